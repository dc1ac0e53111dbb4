"""Llama and its kin: pre-norm, RMS norms, rotary positions, SwiGLU.

Looking back only it is Llama, or Qwen3 where queries and keys are normed. Looking both ways it is EuroBERT, or, where
EuroBERT has no such part, the same Llama or Qwen3 told not to be causal.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    Export,
    family_problem,
    refuse,
    tied_with,
    unlike,
)
from headstock.interop.huggingface.heads import (
    CLASSES,
    PIPELINES,
    class_problems,
    dense_head,
    is_mirrored,
    label_config,
    label_settings,
    layer_problems,
    mirrored,
    plain_head,
    task_of,
)
from headstock.interop.huggingface.tensor_names import Row, Tensors, constant, layer, same, thirds
from headstock.train.settings import RunConfig

TASKS = ("causal", "masked", "hybrid", "headless", "classify", "pair", "tag", "answer")
POOLINGS = {"mean": "mean", "cls": "bos"}
BASE = 10_000.0
PARTS = ("q_proj", "k_proj", "v_proj")


def looks_back(chosen: RunConfig) -> bool:
    return chosen.model.causal or chosen.objective == "hybrid"  # which is exported as it reads left to right


def kind_of(chosen: RunConfig) -> str:
    """Which of the kin a run is."""
    if chosen.model.qk_norm:
        return "qwen3"
    both_ways = not looks_back(chosen) and chosen.objective != "answer"  # EuroBERT has no head for answers
    last = chosen.objective in CLASSES and chosen.task.pool == "last"
    return "eurobert" if both_ways and not last else "llama"


def head_of(kind: str, objective: str) -> str:
    name = {"llama": "Llama", "qwen3": "Qwen3", "eurobert": "EuroBert"}[kind]
    endings = {"headless": "Model", "tag": "ForTokenClassification", "answer": "ForQuestionAnswering"}
    endings |= dict.fromkeys(CLASSES, "ForSequenceClassification")
    return name + endings.get(objective, "ForMaskedLM" if kind == "eurobert" else "ForCausalLM")


@ARCHITECTURES.add("llama")
class Llama(Architecture):
    title = "Llama, Qwen3 or EuroBERT"
    reads = ("llama", "qwen2", "qwen3", "mistral", "eurobert")
    anchors = ("embed_tokens.weight",)
    buffers = ("rotary_emb.inv_freq",)

    @classmethod
    def prefix_of(cls, kind: str) -> str:
        return "model."

    @classmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        if problems := family_problem(chosen, "transformer"):
            return problems
        c, task = chosen.model, chosen.task
        problems = unlike(c, norm="pre", norm_kind="rms", positions="rotary", activation="swiglu", segments=0)
        problems += unlike(c, embed_scale=False, embed_norm=False, cross=False)
        problems += unlike(c, bias=False) if c.qk_norm else []
        if chosen.objective not in TASKS:
            problems.append(f"it is not made for {chosen.objective}")
        elif chosen.objective in CLASSES:
            problems += class_misfits(chosen)
        elif chosen.objective in ("tag", "answer"):
            problems += layer_problems(task)
        elif chosen.objective != "headless":
            problems += unlike(task, "task", transform=False) if hasattr(task, "transform") else []
            problems += unlike(task, "task", nsp=False) if hasattr(task, "nsp") else []
            if not c.tied and c.bias and kind_of(chosen) != "eurobert":
                problems.append("model.tied is false and model.bias true: its head of tokens has no bias")
        return problems

    @classmethod
    def export(cls, chosen: RunConfig) -> Export:
        c, kind = chosen.model, kind_of(chosen)
        config: dict[str, Any] = {
            "vocab_size": c.vocabulary,
            "max_position_embeddings": c.context,
            "hidden_size": c.width,
            "num_hidden_layers": c.depth,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.heads,
            "head_dim": c.width // c.heads,
            "intermediate_size": c.hidden,
            "hidden_act": "silu",
            "rms_norm_eps": c.norm_epsilon,
            "attention_dropout": c.dropout,
            "rope_theta": c.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
            "tie_word_embeddings": c.tied,
            "attention_bias": c.bias,
            "mlp_bias": c.bias,
            **label_config(chosen),
        }
        if kind == "eurobert" and chosen.objective in CLASSES:
            config["classifier_pooling"] = POOLINGS[chosen.task.pool]
        elif kind != "eurobert" and not looks_back(chosen):
            config["is_causal"] = False
        if chosen.objective == "tag":
            config["classifier_dropout"] = chosen.task.dropout
        prefix = {"headless": "", "answer": "transformer."}.get(chosen.objective, "model.")
        pipeline = PIPELINES.get(chosen.objective)
        if chosen.objective in ("causal", "hybrid"):
            pipeline = "text-generation"
        elif chosen.objective == "masked" and kind == "eurobert":
            pipeline = "fill-mask"
        return Export(kind, head_of(kind, chosen.objective), prefix, config, pipeline or "feature-extraction")

    @classmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        c, p = chosen.model, export.prefix
        yield same("backbone.tokens.weight", f"{p}embed_tokens.weight")
        for n in range(c.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}layers.{n}"
            yield same(f"{ours}.around_attention.norm.weight", f"{theirs}.input_layernorm.weight")
            names = [f"{theirs}.self_attn.{part}" for part in PARTS]
            yield from thirds(f"{ours}.attention.inputs", *names, bias=c.bias)
            yield from layer(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", bias=c.bias)
            if c.qk_norm:
                yield same(f"{ours}.attention.query_norm.weight", f"{theirs}.self_attn.q_norm.weight")
                yield same(f"{ours}.attention.key_norm.weight", f"{theirs}.self_attn.k_norm.weight")
            yield same(f"{ours}.around_feed.norm.weight", f"{theirs}.post_attention_layernorm.weight")
            for part in ("gate", "up", "down"):
                yield from layer(f"{ours}.feed.{part}", f"{theirs}.mlp.{part}_proj", bias=c.bias)
        yield same("backbone.final_norm.weight", f"{p}norm.weight")
        yield from head_rows(chosen, export)

    @classmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        problems = [] if kind == "default" else [f"rope_type is {kind!r}, not 'default'"]
        if config.get("head_dim") not in (None, width // heads):
            problems.append(
                f"head_dim is {config['head_dim']}, not hidden_size / num_attention_heads = {width // heads}"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}, not 1")
        if slides(config):
            problems.append(f"sliding_window is {config['sliding_window']}, and here every token sees all before it")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            problems.append(f"hidden_act is {config['hidden_act']!r}, not 'silu'")
        refuse(config, problems)
        causal = config["model_type"] != "eurobert" and config.get("is_causal", True)
        model = {
            "family": "transformer",
            "vocabulary": config["vocab_size"],
            "context": config.get("max_position_embeddings", 2048),
            "depth": config["num_hidden_layers"],
            "width": width,
            "heads": heads,
            "hidden": config["intermediate_size"],
            "norm": "pre",
            "norm_kind": "rms",
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "positions": "rotary",
            "rotary_base": float(rope.get("rope_theta", config.get("rope_theta", BASE))),
            "activation": "swiglu",
            "bias": any(name.endswith("_proj.bias") for name in tensors),
            "qk_norm": any(name.endswith("q_norm.weight") for name in tensors),
            "tied": tied_with(tensors, config, "lm_head.weight", "model.embed_tokens.weight"),
            "dropout": float(config.get("attention_dropout", 0.0)),
            "inner_dropout": False,
            "causal": causal,
        }
        return {"model": model, "task": task_settings(config, head, tensors, causal=causal)}

    @classmethod
    def prepare(cls, config: Mapping[str, Any], tensors: Tensors, chosen: RunConfig, export: Export) -> Tensors:
        """Keys and values that several heads share are written for each; biases that only some layers have are zero."""
        c = chosen.model
        times = c.heads // (config.get("num_key_value_heads") or c.heads)
        made = dict(tensors)
        for name, tensor in tensors.items():
            if times > 1 and any(f".{part}." in name for part in PARTS[1:]):
                made[name] = repeated(tensor, times, c.width // c.heads)
        if c.bias:
            for n in range(c.depth):
                sizes = {f"self_attn.{part}": c.width for part in (*PARTS, "o_proj")}
                sizes |= {"mlp.gate_proj": c.hidden, "mlp.up_proj": c.hidden, "mlp.down_proj": c.width}
                for part, size in sizes.items():
                    made.setdefault(f"{export.prefix}layers.{n}.{part}.bias", torch.zeros(size))
            if not c.tied and chosen.objective in ("causal", "masked"):
                made.setdefault("lm_head.bias", torch.zeros(c.vocabulary))
        return made


def repeated(tensor: Tensor, times: int, head_width: int) -> Tensor:
    """(H K, ...) -> (times H K, ...): each head so many times in a row."""
    return tensor.unflatten(0, (-1, head_width)).repeat_interleave(times, 0).flatten(0, 1)


def slides(config: Mapping[str, Any]) -> bool:
    """Whether some layer sees only the nearest tokens, and fewer than the longest text has."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return False
    kinds = config.get("layer_types")
    return (
        "sliding_attention" in kinds if kinds else config["sliding_window"] < config.get("max_position_embeddings", 0)
    )


def class_misfits(chosen: RunConfig) -> list[str]:
    c, task = chosen.model, chosen.task
    if kind_of(chosen) != "eurobert":
        return class_problems(task, pools=("last",), dense=("none",), bias=False)
    problems = class_problems(task, pools=tuple(POOLINGS), dense=("none", "gelu"))
    if task.dense == "none" and 2 * len(task.classes) > c.width:
        problems.append(f"{len(task.classes)} classes are more than half of model.width {c.width}")
    if not task.head_bias:
        problems.append("task.head_bias is false, and its classifiers have one")
    return problems


def head_rows(chosen: RunConfig, export: Export) -> Iterator[Row]:
    c, task = chosen.model, chosen.task
    if chosen.objective in CLASSES and export.model_type == "eurobert":
        if task.dense == "none":
            sizes = {"width": c.width, "classes": len(task.classes)}
            yield from mirrored("heads.label.linear", "dense", "classifier", **sizes)
        else:
            yield from dense_head("heads.label", "dense", "classifier", bias=True)
    elif chosen.objective in CLASSES:
        yield from plain_head("label", "score", bias=task.head_bias)
    elif chosen.objective == "tag":
        yield from plain_head("tag", "classifier" if export.model_type == "eurobert" else "score")
    elif chosen.objective == "answer":
        yield from plain_head("span", "qa_outputs")
    elif chosen.objective != "headless":
        if not c.tied:
            yield from layer("heads.token", "lm_head", bias=c.bias)
        elif c.bias and export.model_type == "eurobert":
            yield constant("lm_head.bias", torch.zeros(c.vocabulary))


def task_settings(config: Mapping[str, Any], head: str, tensors: Tensors, *, causal: bool) -> dict[str, Any]:
    task = task_of(head)
    opening = {"opening": "start" if causal else "cls"}
    if task == "classify" and config["model_type"] == "eurobert":
        pools = {theirs: ours for ours, theirs in POOLINGS.items()}
        pooling = config.get("classifier_pooling", "late")
        refuse(config, [] if pooling in pools else [f"classifier_pooling is {pooling!r}, not 'mean' or 'bos'"])
        dense = "none" if is_mirrored(tensors, "dense", "classifier") else "gelu"
        return label_settings(config, task) | {"pool": pools[pooling], "dense": dense} | opening
    if task == "classify":
        return label_settings(config, task) | {"pool": "last", "head_bias": False} | opening
    if task is not None:
        return label_settings(config, task) | opening
    if head.endswith("ForMaskedLM") or (head.endswith("ForCausalLM") and not causal):
        return {"name": "masked"}
    return {"name": "causal"} if head.endswith("ForCausalLM") else {"name": "headless"} | opening
