"""DistilBERT: BERT without segments, under other names. Import only: every such run can be exported as BERT."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    ExportSpec,
    Sizes,
    import_activation,
    is_tied,
    reject,
    task_head,
)
from headstock.interop.huggingface.heads import (
    BASE,
    MASKED_LM,
    SEQUENCE,
    SPAN,
    TOKEN,
    import_task,
    token_or_span_head,
    two_layer_head,
)
from headstock.interop.huggingface.tensor_map import TensorMap, Tensors, affine, fused_qkv, rename
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
    import_only = True
    model_types = ("distilbert",)
    heads = ()
    embeddings = ("embeddings.word_embeddings.weight",)
    buffers = ("embeddings.position_ids",)
    sizes: ClassVar[Sizes] = {
        "vocabulary": ("vocab_size", 30522),
        "context": ("max_position_embeddings", 512),
        "depth": ("n_layers", 6),
        "width": ("dim", 768),
        "heads": ("n_heads", 12),
        "hidden": ("hidden_dim", 3072),
    }

    @classmethod
    def backbone_prefix(cls, model_type: str) -> str:
        return "distilbert."

    @classmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        return ExportSpec("distilbert", "DistilBertModel", "distilbert.", {}, None)

    @classmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        p, head = spec.prefix, task_head(config)
        yield rename("backbone.tokens.weight", f"{p}embeddings.word_embeddings.weight")
        yield rename("backbone.positions.weight", f"{p}embeddings.position_embeddings.weight")
        yield from affine("backbone.embed_norm", f"{p}embeddings.LayerNorm")
        for n in range(config.model.depth):
            ours, theirs = f"backbone.blocks.{n}", f"{p}transformer.layer.{n}"
            yield from fused_qkv(f"{ours}.attention.inputs", *(f"{theirs}.attention.{part}_lin" for part in "qkv"))
            for own, name in LAYERS.items():
                yield from affine(f"{ours}.{own}", f"{theirs}.{name}")
        if head == SEQUENCE:
            yield from two_layer_head("pre_classifier", "classifier")
        elif head in (TOKEN, SPAN):
            yield from token_or_span_head(config)
        elif head != BASE:
            yield from affine("heads.token.transform.dense", "vocab_transform")
            yield from affine("heads.token.transform.norm", "vocab_layer_norm")
            yield rename("heads.token.bias", "vocab_projector.bias")
            if not config.model.tied:
                yield rename("heads.token.weight", "vocab_projector.weight")

    @classmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        embedding = "distilbert.embeddings.word_embeddings.weight"
        reject(hf_config, ["is_decoder is true"] if hf_config.get("is_decoder") else [])
        model = {
            "family": "transformer",
            **cls.import_sizes(hf_config),
            "dropout": float(hf_config.get("dropout", 0.1)),
            "inner_dropout": False,
            "norm": "post",
            "norm_epsilon": 1e-12,
            "activation": import_activation(hf_config.get("activation", "gelu")),
            "embed_norm": True,
            "causal": False,
            "tied": is_tied(tensors, hf_config, "vocab_projector.weight", embedding),
        }
        task = import_task(
            hf_config,
            head,
            classifier={"pool": "cls", "dense": "relu"},
            special={"opening": "cls", "closed": True},
            language={"name": "masked", "transform": True, "closed": True} if head.endswith(MASKED_LM) else None,
        )
        return {"model": model, "task": task}
