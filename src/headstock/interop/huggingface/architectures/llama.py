"""Llama, Qwen3 and EuroBERT: pre-norm with RMS norms, rotary positions, SwiGLU.

A causal run is exported as Llama, or as Qwen3 if it normalizes queries and keys. A bidirectional one is exported as
EuroBERT, or where EuroBERT lacks the part as Llama or Qwen3 with `is_causal` false.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    ExportSpec,
    Sizes,
    is_tied,
    mismatches,
    reject,
    task_head,
)
from headstock.interop.huggingface.heads import (
    BASE,
    CAUSAL_LM,
    MASKED_LM,
    SEQUENCE,
    SPAN,
    TOKEN,
    classifier_problems,
    gelu_head,
    import_task,
    imported_dense,
    label_config,
    layer_problems,
    pipeline_name,
    token_or_span_head,
    two_layer_problems,
)
from headstock.interop.huggingface.tensor_map import TensorMap, Tensors, affine, constant, fused_qkv, rename
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "eurobert": "EuroBert"}
POOLING = {"mean": "mean", "cls": "bos"}  # ours: theirs
QKV = ("q_proj", "k_proj", "v_proj")


def is_causal(config: RunConfig) -> bool:
    return config.model.causal or TASKS.get(config.objective).generates  # a run with both masks is exported as causal


def model_type(config: RunConfig) -> str:
    if config.model.qk_norm:
        return "qwen3"
    head = task_head(config)
    lacking = head == SPAN or (head == SEQUENCE and config.task.pool == "last")  # heads that EuroBERT does not have
    return "llama" if is_causal(config) or lacking else "eurobert"


@ARCHITECTURES.add("llama")
class Llama(Architecture):
    title = "Llama, Qwen3 or EuroBERT"
    model_types = ("llama", "qwen2", "qwen3", "mistral", "eurobert")
    heads = (CAUSAL_LM, MASKED_LM, BASE, SEQUENCE, TOKEN, SPAN)
    embeddings = ("embed_tokens.weight",)
    buffers = ("rotary_emb.inv_freq",)
    sizes: ClassVar[Sizes] = {
        "vocabulary": ("vocab_size", None),
        "context": ("max_position_embeddings", 2048),
        "width": ("hidden_size", None),
        "depth": ("num_hidden_layers", None),
        "heads": ("num_attention_heads", None),
        "hidden": ("intermediate_size", None),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "pre",
        "norm_kind": "rms",
        "positions": "rotary",
        "activation": "swiglu",
        "segments": 0,
        "embed_scale": False,
        "embed_norm": False,
        "cross": False,
    }

    @classmethod
    def backbone_prefix(cls, model_type: str) -> str:
        return "model."

    @classmethod
    def unsupported_model(cls, config: RunConfig) -> list[str]:
        return mismatches(config.model, bias=False) if config.model.qk_norm else []

    @classmethod
    def unsupported_head(cls, config: RunConfig) -> list[str]:
        c, task, head, kind = config.model, config.task, task_head(config), model_type(config)
        if head == SEQUENCE and kind == "eurobert":
            problems = classifier_problems(task, pools=tuple(POOLING), dense=("none", "gelu"))
            return problems + two_layer_problems(config) + mismatches(task, "task", head_bias=True)
        if head == SEQUENCE:
            return classifier_problems(task, pools=("last",), dense=("none",), bias=False)
        if head in (TOKEN, SPAN):
            return layer_problems(task)
        if head == BASE:
            return []
        plain = {name: False for name in ("transform", "nsp") if hasattr(task, name)}
        problems = mismatches(task, "task", **plain)
        if not c.tied and c.bias and kind != "eurobert":
            problems.append("model.tied is false and model.bias true, but its LM head has no bias")
        return problems

    @classmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        c, head, kind = config.model, task_head(config), model_type(config)
        hf_config: dict[str, Any] = {
            **cls.export_sizes(c),
            "num_key_value_heads": c.heads,
            "head_dim": c.width // c.heads,
            "hidden_act": "silu",
            "attention_dropout": c.dropout,
            "rope_theta": c.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
            "tie_word_embeddings": c.tied,
            "attention_bias": c.bias,
            "mlp_bias": c.bias,
            **label_config(config),
        }
        if head in (CAUSAL_LM, MASKED_LM):
            head = MASKED_LM if kind == "eurobert" else CAUSAL_LM
        name, notes = f"{CLASSES[kind]}{head}", []
        if kind == "eurobert" and head == SEQUENCE:
            hf_config["classifier_pooling"] = POOLING[config.task.pool]
        elif kind != "eurobert" and not is_causal(config):
            hf_config["is_causal"] = False
            notes.append(f"{name} is bidirectional through is_causal=false, which older transformers versions ignore")
        if head == TOKEN:
            hf_config["classifier_dropout"] = config.task.dropout
        prefix = {BASE: "", SPAN: "transformer."}.get(head or "", "model.")
        token_ids = ("mask",) if kind == "eurobert" else ()
        return ExportSpec(kind, name, prefix, hf_config, pipeline_name(config, name), tuple(notes), token_ids)

    @classmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, p = config.model, spec.prefix
        yield rename("backbone.tokens.weight", f"{p}embed_tokens.weight")
        for n in range(c.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}layers.{n}"
            yield rename(f"{ours}.around_attention.norm.weight", f"{theirs}.input_layernorm.weight")
            names = [f"{theirs}.self_attn.{part}" for part in QKV]
            yield from fused_qkv(f"{ours}.attention.inputs", *names, bias=c.bias)
            yield from affine(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", bias=c.bias)
            if c.qk_norm:
                yield rename(f"{ours}.attention.query_norm.weight", f"{theirs}.self_attn.q_norm.weight")
                yield rename(f"{ours}.attention.key_norm.weight", f"{theirs}.self_attn.k_norm.weight")
            yield rename(f"{ours}.around_feed.norm.weight", f"{theirs}.post_attention_layernorm.weight")
            for part in ("gate", "up", "down"):
                yield from affine(f"{ours}.feed.{part}", f"{theirs}.mlp.{part}_proj", bias=c.bias)
        yield rename("backbone.final_norm.weight", f"{p}norm.weight")
        yield from head_map(config, spec)

    @classmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        sizes, eurobert = cls.import_sizes(hf_config), hf_config["model_type"] == "eurobert"
        rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
        reject(hf_config, unsupported_import(hf_config, rope, sizes["width"] // sizes["heads"]))
        causal = not eurobert and hf_config.get("is_causal", True)
        model = {
            "family": "transformer",
            **sizes,
            "norm": "pre",
            "norm_kind": "rms",
            "positions": "rotary",
            "rotary_base": float(rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0))),
            "activation": "swiglu",
            "bias": any(name.endswith("_proj.bias") for name in tensors),
            "qk_norm": any(name.endswith("q_norm.weight") for name in tensors),
            "tied": is_tied(tensors, hf_config, "lm_head.weight", "model.embed_tokens.weight"),
            "dropout": float(hf_config.get("attention_dropout", 0.0)),
            "inner_dropout": False,
            "causal": causal,
        }
        classifier: dict[str, Any] = {"pool": "last", "head_bias": False}
        if eurobert and head.endswith(SEQUENCE):
            pools = {theirs: ours for ours, theirs in POOLING.items()}
            pooling = hf_config.get("classifier_pooling", "late")
            reject(hf_config, [] if pooling in pools else [f"classifier_pooling is {pooling!r}, not 'mean' or 'bos'"])
            classifier = {"pool": pools[pooling], "dense": imported_dense(tensors, "dense", "classifier")}
        language = None
        if head.endswith((MASKED_LM, CAUSAL_LM)):
            language = {"name": "masked" if head.endswith(MASKED_LM) or not causal else "causal"}
        special = {"opening": "start" if causal else "cls"}
        task = import_task(hf_config, head, classifier=classifier, special=special, language=language)
        return {"model": model, "task": task}

    @classmethod
    def prepare_tensors(
        cls, hf_config: Mapping[str, Any], tensors: Tensors, config: RunConfig, spec: ExportSpec
    ) -> Tensors:
        """Repeats keys and values shared by several heads (GQA) and adds zero biases to layers without one."""
        c = config.model
        groups = c.heads // (hf_config.get("num_key_value_heads") or c.heads)
        result = dict(tensors)
        for name, tensor in tensors.items():
            if groups > 1 and any(f".{part}." in name for part in QKV[1:]):
                result[name] = repeat_heads(tensor, groups, c.width // c.heads)
        if c.bias:
            for n in range(c.depth):
                sizes = {f"self_attn.{part}": c.width for part in (*QKV, "o_proj")}
                sizes |= {"mlp.gate_proj": c.hidden, "mlp.up_proj": c.hidden, "mlp.down_proj": c.width}
                for part, size in sizes.items():
                    result.setdefault(f"{spec.prefix}layers.{n}.{part}.bias", torch.zeros(size))
            if not c.tied and task_head(config) in (CAUSAL_LM, MASKED_LM):
                result.setdefault("lm_head.bias", torch.zeros(c.vocabulary))
        return result


def repeat_heads(tensor: Tensor, times: int, head_width: int) -> Tensor:
    """(H K, ...) -> (H times K, ...): each head repeated."""
    return tensor.unflatten(0, (-1, head_width)).repeat_interleave(times, 0).flatten(0, 1)


def unsupported_import(hf_config: Mapping[str, Any], rope: Mapping[str, Any], head_width: int) -> list[str]:
    problems = []
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        problems.append(f"rope_type is {kind!r}, not 'default'")
    if hf_config.get("head_dim") not in (None, head_width):
        problems.append(f"head_dim is {hf_config['head_dim']}, not hidden_size / num_attention_heads = {head_width}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}, not 1")
    if has_sliding_window(hf_config):
        problems.append(f"sliding_window is {hf_config['sliding_window']}, but only full attention is supported")
    if hf_config.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act is {hf_config['hidden_act']!r}, not 'silu'")
    return problems


def has_sliding_window(hf_config: Mapping[str, Any]) -> bool:
    """Whether some layer attends to fewer tokens than the context has."""
    if hf_config.get("sliding_window") is None or hf_config.get("use_sliding_window") is False:
        return False
    if layer_types := hf_config.get("layer_types"):
        return "sliding_attention" in layer_types
    return hf_config["sliding_window"] < hf_config.get("max_position_embeddings", 0)


def head_map(config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
    c, head, eurobert = config.model, task_head(config), spec.model_type == "eurobert"
    if head == SEQUENCE and eurobert:
        yield from gelu_head(config, "dense", "classifier")
    elif head == SEQUENCE:
        yield from affine("heads.label.linear", "score", bias=config.task.head_bias)
    elif head in (TOKEN, SPAN):
        yield from token_or_span_head(config, token="classifier" if eurobert else "score")
    elif head != BASE and not c.tied:
        yield from affine("heads.token", "lm_head", bias=c.bias)
    elif head != BASE and c.bias and eurobert:
        yield constant("lm_head.bias", torch.zeros(c.vocabulary))
