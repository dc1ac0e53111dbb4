"""DistilBERT: BERT without kinds of text, under names of its own. Read only: whatever it says, BERT says too."""

from collections.abc import Iterator, Mapping
from typing import Any

from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    Export,
    activation_of,
    refuse,
    tied_with,
)
from headstock.interop.huggingface.heads import CLASSES, dense_head, label_settings, plain_head, task_of
from headstock.interop.huggingface.tensor_names import Row, Tensors, layer, same, thirds
from headstock.train.settings import RunConfig

LAYERS = {  # ours: theirs
    "attention.output": "attention.out_lin",
    "around_attention.norm": "sa_layer_norm",
    "feed.up": "ffn.lin1",
    "feed.down": "ffn.lin2",
    "around_feed.norm": "output_layer_norm",
}


@ARCHITECTURES.add("distilbert")
class DistilBert(Architecture):
    title = "DistilBERT"
    reads = ("distilbert",)
    anchors = ("embeddings.word_embeddings.weight",)
    buffers = ("embeddings.position_ids",)

    @classmethod
    def prefix_of(cls, kind: str) -> str:
        return "distilbert."

    @classmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        return ["it is only read, never written: BERT says all that it can"]

    @classmethod
    def export(cls, chosen: RunConfig) -> Export:
        prefix = "" if chosen.objective == "headless" else "distilbert."
        return Export("distilbert", "DistilBertModel", prefix, {}, None)

    @classmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        p = export.prefix
        yield same("backbone.tokens.weight", f"{p}embeddings.word_embeddings.weight")
        yield same("backbone.positions.weight", f"{p}embeddings.position_embeddings.weight")
        yield from layer("backbone.embed_norm", f"{p}embeddings.LayerNorm")
        for n in range(chosen.model.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}transformer.layer.{n}"
            yield from thirds(f"{ours}.attention.inputs", *(f"{theirs}.attention.{part}_lin" for part in "qkv"))
            for own, name in LAYERS.items():
                yield from layer(f"{ours}.{own}", f"{theirs}.{name}")
        if chosen.objective in CLASSES:
            yield from dense_head("heads.label", "pre_classifier", "classifier", bias=True)
        elif chosen.objective in ("tag", "answer"):
            name, theirs = ("tag", "classifier") if chosen.objective == "tag" else ("span", "qa_outputs")
            yield from plain_head(name, theirs)
        elif chosen.objective == "masked":
            yield from layer("heads.token.transform.dense", "vocab_transform")
            yield from layer("heads.token.transform.norm", "vocab_layer_norm")
            yield same("heads.token.bias", "vocab_projector.bias")
            if not chosen.model.tied:
                yield same("heads.token.weight", "vocab_projector.weight")

    @classmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        embedding = "distilbert.embeddings.word_embeddings.weight"
        refuse(config, ["is_decoder is true"] if config.get("is_decoder") else [])
        model = {
            "family": "transformer",
            "vocabulary": config.get("vocab_size", 30522),
            "context": config.get("max_position_embeddings", 512),
            "depth": config.get("n_layers", 6),
            "width": config.get("dim", 768),
            "heads": config.get("n_heads", 12),
            "hidden": config.get("hidden_dim", 3072),
            "dropout": float(config.get("dropout", 0.1)),
            "inner_dropout": False,
            "norm": "post",
            "norm_epsilon": 1e-12,
            "activation": activation_of(config.get("activation", "gelu")),
            "embed_norm": True,
            "causal": False,
            "tied": tied_with(tensors, config, "vocab_projector.weight", embedding),
        }
        marks = {"opening": "cls", "closed": True}
        task = task_of(head)
        if task == "classify":
            return {"model": model, "task": label_settings(config, task) | {"pool": "cls", "dense": "relu"} | marks}
        if task is not None:
            more = marks if task == "tag" else {}
            return {"model": model, "task": label_settings(config, task) | more}
        masked = {"name": "masked", "transform": True, "closed": True}
        return {"model": model, "task": masked if head.endswith("ForMaskedLM") else {"name": "headless"} | marks}
