"""BERT: bidirectional, post-norm with layer norms, learned positions and segments, normalized embeddings.

ELECTRA has BERT's backbone: a sequence classifier whose hidden layer is not BERT's tanh pooler is exported as ELECTRA.
RoBERTa and DistilBERT are import only, because such runs can be exported as BERT.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from headstock.interop import mismatches
from headstock.interop.huggingface import heads
from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    THEIR_ACTIVATIONS,
    Architecture,
    ConfigKeys,
    ExportSpec,
    Layers,
    SourceModel,
)
from headstock.interop.tensor_map import TensorMap, Tensors, affine, constant, rename, repeat, reverse_rows
from headstock.train.settings import RunConfig

SEGMENTS = 2  # if the run has none: BERT's tokenizers number the second text of a pair with 1


@ARCHITECTURES.add("bert")
class Bert(Architecture):
    title = "BERT"
    classes: ClassVar[dict[str, str]] = {"bert": "Bert", "electra": "Electra"}
    model_types: ClassVar[tuple[str, ...]] = ("bert", "electra")
    supported_heads = (heads.MASKED_LM, heads.BASE, heads.SEQUENCE, heads.TOKEN, heads.SPAN)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", 30522),
        "context": ("max_position_embeddings", 512),
        "width": ("hidden_size", 768),
        "depth": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "hidden": ("intermediate_size", 3072),
        "norm_epsilon": ("layer_norm_eps", 1e-12),
        "activation": ("hidden_act", "gelu"),
        "dropout": ("hidden_dropout_prob", 0.1),
        "segments": ("type_vocab_size", 2),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "post",
        "norm_kind": "layer",
        "positions": ("learned", "sinusoidal"),
        "embed_norm": True,
        "activation": tuple(ACTIVATIONS),
        "embed_scale": False,
        "qk_norm": False,
        "causal": False,
        "cross": False,
    }
    required_config: ClassVar[dict[str, Any]] = {"is_decoder": False, "position_embedding_type": "absolute"}

    embeddings = ("embeddings.word_embeddings.weight",)
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    blocks: ClassVar[str] = "encoder.layer"
    layers: ClassVar[Layers] = {
        "attention.inputs": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output": "attention.output.dense",
        "around_attention.norm": "attention.output.LayerNorm",
        "feed.up": "intermediate.dense",
        "feed.down": "output.dense",
        "around_feed.norm": "output.LayerNorm",
    }
    transform: ClassVar[tuple[str, str]] = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
    lm_head = "cls.predictions.decoder.weight"
    lm_biases: ClassVar[tuple[str, ...]] = ("cls.predictions.bias", "cls.predictions.decoder.bias")  # second if untied
    classifier: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")
    pooler_activation: ClassVar[str] = "tanh"

    def backbone_prefix(self, model_type: str) -> str:
        return f"{model_type}."

    def unsupported_classifier(self, config: RunConfig) -> list[str]:
        return heads.gelu_head_problems(config, pools=("cls",), dense=("none", "tanh", "gelu"))

    def unsupported_lm_head(self, config: RunConfig) -> list[str]:
        return mismatches(vars(config.task), {"transform": True}, "task.")

    def export_type(self, config: RunConfig) -> str:
        return "electra" if heads.task_head(config) == heads.SEQUENCE and config.task.dense != "tanh" else "bert"

    def export_head(self, config: RunConfig) -> str:
        return "ForPreTraining" if getattr(config.task, "nsp", False) else super().export_head(config)

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        c = config.model
        settings = {"attention_probs_dropout_prob": c.dropout, "type_vocab_size": c.segments or SEGMENTS}
        return settings | ({"embedding_size": c.width} if self.export_type(config) == "electra" else {})

    def export_spec(self, config: RunConfig) -> ExportSpec:
        spec = super().export_spec(config)
        if heads.task_head(config) != heads.BASE:
            return spec
        return replace(spec, notes=("its pooler has no weights, because the run has none: read last_hidden_state",))

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, embeddings = config.model, f"{spec.prefix}embeddings"
        yield rename("backbone.tokens.weight", f"{embeddings}.word_embeddings.weight")
        positions = "backbone.positions.weight" if c.positions == "learned" else "backbone.waves"
        yield rename(positions, f"{embeddings}.position_embeddings.weight")
        if c.segments:
            yield rename("backbone.segments.weight", f"{embeddings}.token_type_embeddings.weight")
        else:
            yield constant(f"{embeddings}.token_type_embeddings.weight", torch.zeros(SEGMENTS, c.width))
        yield from self.layer_map(c, "backbone.embed_norm", f"{embeddings}.LayerNorm")
        for n in range(c.depth):
            yield from self.block_map(c, f"backbone.blocks.{n}", f"{spec.prefix}{self.blocks}.{n}", self.layers)

    def classifier_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        if spec.model_type == "electra":
            return heads.gelu_head(config, "classifier.dense", "classifier.out_proj")
        return heads.two_layer_head(*self.classifier)

    def lm_head_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c = config.model
        for part, name in zip(("dense", "norm"), self.transform, strict=True):
            yield from self.layer_map(c, f"heads.token.transform.{part}", name)
        yield repeat("heads.token.bias", *self.lm_biases[: 1 if c.tied else 2])
        if not c.tied:
            yield rename("heads.token.weight", self.lm_head)
        if config.task.nsp:
            yield from affine("heads.next.pooler", f"{spec.prefix}pooler.dense")
            for part in ("weight", "bias"):  # BERT's class 0 is "is next", ours is 1
                yield reverse_rows(f"heads.next.linear.{part}", f"cls.seq_relationship.{part}")

    def unsupported_import(self, source: SourceModel) -> list[str]:
        width = source.config.get("hidden_size", 768)
        return [] if source.config.get("embedding_size", width) == width else ["embedding_size is not hidden_size"]

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        model = super().import_model(source)
        return model | ({"segments": 0} if model.get("segments") == 1 else {})

    def import_special_tokens(self, source: SourceModel) -> dict[str, Any]:
        return {"opening": "cls", "closed": True}

    def import_classifier(self, source: SourceModel) -> dict[str, Any]:
        dense = self.pooler_activation
        if source.config["model_type"] == "electra":
            dense = heads.imported_dense(source.tensors, "classifier.dense", "classifier.out_proj")
        return {"pool": "cls", "dense": dense}

    def import_lm_task(self, source: SourceModel) -> dict[str, Any] | None:
        nsp = source.head.endswith("ForPreTraining")
        if source.config["model_type"] == "electra" or not (nsp or source.head.endswith(heads.MASKED_LM)):
            return None
        return {"name": "masked", "transform": True, "closed": True, "nsp": nsp}

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Adds a single segment embedding to every position and merges the two names of the LM head's bias."""
        tensors = dict(source.tensors)
        positions = f"{spec.prefix}embeddings.position_embeddings.weight"
        segments = f"{spec.prefix}embeddings.token_type_embeddings.weight"
        if source.config.get("type_vocab_size") == 1 and positions in tensors and segments in tensors:
            tensors[positions] = tensors[positions] + tensors[segments]
            tensors[segments] = torch.zeros(SEGMENTS, tensors[segments].size(1))
        biases = [tensors.pop(name) for name in self.lm_biases if name in tensors]
        if biases:
            tensors |= dict.fromkeys(self.lm_biases[: 1 if config.model.tied else 2], biases[0])
        return tensors


@ARCHITECTURES.add("roberta")
class Roberta(Bert):
    """BERT whose positions start after the id of the padding token."""

    title = "RoBERTa"
    import_only = True
    model_types = ("roberta", "xlm-roberta", "camembert")
    transform = ("lm_head.dense", "lm_head.layer_norm")
    lm_head = "lm_head.decoder.weight"
    lm_biases = ("lm_head.bias", "lm_head.decoder.bias")
    classifier = ("classifier.dense", "classifier.out_proj")

    def backbone_prefix(self, model_type: str) -> str:
        return "roberta."

    def position_offset(self, source: SourceModel) -> int:
        padding = source.config.get("pad_token_id")
        return 2 if padding is None else padding + 1

    def unsupported_import(self, source: SourceModel) -> list[str]:
        activation = source.config.get("hidden_act", "gelu")
        if source.head.endswith(heads.MASKED_LM) and THEIR_ACTIVATIONS.get(activation) != "gelu":
            return [f"hidden_act is {activation!r}, but its LM head uses 'gelu'"]
        return []

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        model = super().import_model(source)
        return model | {"context": model["context"] - self.position_offset(source)}

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        positions = f"{spec.prefix}embeddings.position_embeddings.weight"
        tensors = dict(source.tensors)
        if positions in tensors:
            tensors[positions] = tensors[positions][self.position_offset(source) :]
        return super().prepare_tensors(replace(source, tensors=tensors), config, spec)


@ARCHITECTURES.add("distilbert")
class DistilBert(Bert):
    """BERT without segments, under other names."""

    title = "DistilBERT"
    import_only = True
    model_types = ("distilbert",)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", 30522),
        "context": ("max_position_embeddings", 512),
        "depth": ("n_layers", 6),
        "width": ("dim", 768),
        "heads": ("n_heads", 12),
        "hidden": ("hidden_dim", 3072),
        "activation": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
    }
    required: ClassVar[dict[str, Any]] = Bert.required | {"norm_epsilon": 1e-12}
    blocks = "transformer.layer"
    layers: ClassVar[Layers] = {
        "attention.inputs": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": "attention.out_lin",
        "around_attention.norm": "sa_layer_norm",
        "feed.up": "ffn.lin1",
        "feed.down": "ffn.lin2",
        "around_feed.norm": "output_layer_norm",
    }
    transform = ("vocab_transform", "vocab_layer_norm")
    lm_head = "vocab_projector.weight"
    lm_biases = ("vocab_projector.bias",)
    classifier = ("pre_classifier", "classifier")
    pooler_activation = "relu"

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        segments = f"{spec.prefix}embeddings.token_type_embeddings.weight"
        width = source.tensors[f"{spec.prefix}{self.embeddings[0]}"].size(1)
        tensors = source.tensors | {segments: torch.zeros(SEGMENTS, width)}
        return super().prepare_tensors(replace(source, tensors=tensors), config, spec)
