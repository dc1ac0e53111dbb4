"""GPT-2: pre-norm, layer norms, a table of positions, looking back only."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    Export,
    activation_of,
    family_problem,
    refuse,
    tied_with,
    unlike,
)
from headstock.interop.huggingface.heads import (
    CLASSES,
    PIPELINES,
    class_problems,
    label_config,
    label_settings,
    layer_problems,
    plain_head,
    task_of,
)
from headstock.interop.huggingface.tensor_names import Row, Tensors, layer, same, turned
from headstock.train.settings import RunConfig

HEADS = {
    "causal": "GPT2LMHeadModel",
    "hybrid": "GPT2LMHeadModel",  # as it reads left to right
    "headless": "GPT2Model",
    "classify": "GPT2ForSequenceClassification",
    "pair": "GPT2ForSequenceClassification",
    "tag": "GPT2ForTokenClassification",
    "answer": "GPT2ForQuestionAnswering",
}


@ARCHITECTURES.add("gpt2")
class GPT2(Architecture):
    title = "GPT-2"
    reads = ("gpt2",)
    anchors = ("wte.weight",)
    buffers = (".attn.bias", ".attn.masked_bias")

    @classmethod
    def prefix_of(cls, kind: str) -> str:
        return "transformer."

    @classmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        if problems := family_problem(chosen, "transformer"):
            return problems
        c, task = chosen.model, chosen.task
        problems = unlike(c, norm="pre", norm_kind="layer", positions=("learned", "sinusoidal"))
        problems += unlike(c, activation=tuple(ACTIVATIONS), segments=0, embed_scale=False, embed_norm=False)
        problems += unlike(c, qk_norm=False, cross=False, causal=c.causal if chosen.objective == "hybrid" else True)
        if chosen.objective not in HEADS:
            problems.append(f"it is not made for {chosen.objective}")
        elif chosen.objective in CLASSES:
            problems += class_problems(task, pools=("last",), dense=("none",), bias=False)
        elif chosen.objective in ("tag", "answer"):
            problems += layer_problems(task)
        elif chosen.objective != "headless":
            problems += untied_bias(chosen)
        return problems

    @classmethod
    def export(cls, chosen: RunConfig) -> Export:
        c, head = chosen.model, HEADS[chosen.objective]
        config = {
            "vocab_size": c.vocabulary,
            "n_positions": c.context,
            "n_embd": c.width,
            "n_layer": c.depth,
            "n_head": c.heads,
            "n_inner": c.hidden,
            "activation_function": ACTIVATIONS[c.activation],
            "layer_norm_epsilon": c.norm_epsilon,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), c.dropout),
            "tie_word_embeddings": c.tied,
            **label_config(chosen),
        }
        if chosen.objective == "tag":
            config["classifier_dropout"] = chosen.task.dropout
        prefix = "" if chosen.objective == "headless" else "transformer."
        pipeline = PIPELINES.get(chosen.objective)
        if chosen.objective in ("causal", "hybrid"):
            pipeline = "text-generation"
        return Export("gpt2", head, prefix, config, pipeline or "feature-extraction")

    @classmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        c, p = chosen.model, export.prefix

        def zeros(count: int) -> bool | int:
            return True if c.bias else count

        yield same("backbone.tokens.weight", f"{p}wte.weight")
        yield same("backbone.positions.weight" if c.positions == "learned" else "backbone.waves", f"{p}wpe.weight")
        for n in range(c.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}h.{n}"
            yield from layer(f"{ours}.around_attention.norm", f"{theirs}.ln_1", bias=zeros(c.width))
            yield from layer(f"{ours}.attention.inputs", f"{theirs}.attn.c_attn", bias=zeros(3 * c.width), join=turned)
            yield from layer(f"{ours}.attention.output", f"{theirs}.attn.c_proj", bias=zeros(c.width), join=turned)
            yield from layer(f"{ours}.around_feed.norm", f"{theirs}.ln_2", bias=zeros(c.width))
            yield from layer(f"{ours}.feed.up", f"{theirs}.mlp.c_fc", bias=zeros(c.hidden), join=turned)
            yield from layer(f"{ours}.feed.down", f"{theirs}.mlp.c_proj", bias=zeros(c.width), join=turned)
        yield from layer("backbone.final_norm", f"{p}ln_f", bias=zeros(c.width))
        if chosen.objective in CLASSES:
            yield from plain_head("label", "score", bias=chosen.task.head_bias)
        elif chosen.objective in ("tag", "answer"):
            name, theirs = ("tag", "classifier") if chosen.objective == "tag" else ("span", "qa_outputs")
            yield from plain_head(name, theirs)
        elif not c.tied and chosen.objective != "headless":
            yield from layer("heads.token", "lm_head", bias=c.bias)

    @classmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        odd = [name for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention") if config.get(name)]
        refuse(config, [f"{name} is true" for name in odd])
        refuse(config, ["scale_attn_weights is false"] if config.get("scale_attn_weights") is False else [])
        width = config.get("n_embd", 768)
        model = {
            "family": "transformer",
            "vocabulary": config.get("vocab_size", 50257),
            "context": config.get("n_positions", 1024),
            "depth": config.get("n_layer", 12),
            "width": width,
            "heads": config.get("n_head", 12),
            "hidden": config.get("n_inner") or 4 * width,
            "activation": activation_of(config.get("activation_function", "gelu_new")),
            "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
            "dropout": float(config.get("resid_pdrop", 0.1)),
            "inner_dropout": False,
            "tied": tied_with(tensors, config, "lm_head.weight", "transformer.wte.weight"),
        }
        task = task_of(head)
        if task == "classify":
            return {"model": model, "task": label_settings(config, task) | {"pool": "last", "head_bias": False}}
        if task is not None:
            return {"model": model, "task": label_settings(config, task) | {"opening": "start"}}
        alone = {"name": "headless", "opening": "start"}
        return {"model": model, "task": {"name": "causal"} if head == "GPT2LMHeadModel" else alone}

    @classmethod
    def prepare(cls, config: Mapping[str, Any], tensors: Tensors, chosen: RunConfig, export: Export) -> Tensors:
        """An untied head of theirs has no bias; ours has, where the model has biases."""
        if chosen.objective != "causal" or chosen.model.tied or not chosen.model.bias:
            return tensors
        return {"lm_head.bias": torch.zeros(chosen.model.vocabulary)} | tensors


def untied_bias(chosen: RunConfig) -> list[str]:
    """A head with a matrix of its own has a bias here where the model has biases."""
    if chosen.model.tied or not chosen.model.bias:
        return []
    return ["model.tied is false and model.bias true: its head of tokens has no bias (pretrain with tied=true)"]
