"""Encoder-decoders: BART, mBART, Marian, Pegasus and Blenderbot share their tensors and differ in three settings."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstock.interop import format_setting
from headstock.interop.huggingface import heads
from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    ConfigKeys,
    ExportSpec,
    Layers,
    SourceModel,
)
from headstock.interop.tensor_map import (
    TensorMap,
    Tensors,
    constant,
    offset_rows,
    permute_features,
    rename,
    repeat,
    unsqueeze,
)
from headstock.model.layers import NORM_EPSILON
from headstock.model.positions import sinusoids
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

KINDS = {  # (norm, embed_norm, positions): model type
    ("post", True, "learned"): "bart",
    ("pre", True, "learned"): "mbart",
    ("post", False, "sinusoidal"): "marian",
    ("pre", False, "sinusoidal"): "pegasus",
    ("pre", False, "learned"): "blenderbot",
}
POSITION_OFFSETS = {"bart": 2, "mbart": 2}
LAYERS: Layers = {
    "attention.inputs": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.out_proj",
    "around_attention.norm": "self_attn_layer_norm",
    "feed.up": "fc1",
    "feed.down": "fc2",
    "around_feed.norm": "final_layer_norm",
}
CROSS_LAYERS: Layers = {
    "cross.inputs": ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.output": "encoder_attn.out_proj",
    "around_cross.norm": "encoder_attn_layer_norm",
}
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@ARCHITECTURES.add("bart")
class Bart(Architecture):
    title = "BART, mBART, Marian, Pegasus or Blenderbot"
    family = "seq2seq"
    classes: ClassVar[dict[str, str]] = {
        "bart": "Bart",
        "mbart": "MBart",
        "marian": "Marian",
        "pegasus": "Pegasus",
        "blenderbot": "Blenderbot",
    }
    model_types = tuple(classes)
    supported_heads = (heads.SEQ2SEQ,)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", None),
        "context": ("max_position_embeddings", None),
        "width": ("d_model", None),
        "depth": ("decoder_layers", None),
        "heads": ("encoder_attention_heads", None),
        "hidden": ("encoder_ffn_dim", None),
        "activation": ("activation_function", "gelu"),
        "dropout": ("dropout", 0.1),
        "embed_scale": ("scale_embedding", False),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm_kind": "layer",
        "activation": tuple(ACTIVATIONS),
        "qk_norm": False,
        "norm_epsilon": NORM_EPSILON,
        "source_vocabulary": None,
        "shared": True,
    }
    required_config: ClassVar[dict[str, Any]] = {"share_encoder_decoder_embeddings": True}
    prefix = "model."
    embeddings = EMBEDDINGS[:2]

    def unsupported_model(self, config: RunConfig) -> list[str]:
        c, problems = config.model, []
        if (c.norm, c.embed_norm, c.positions) not in KINDS:
            actual = f"norm {c.norm!r}, embed_norm {format_setting(c.embed_norm)} and positions {c.positions!r}"
            combinations = "; ".join(", ".join(map(format_setting, kind)) for kind in KINDS)
            problems.append(f"no architecture combines {actual} (known combinations: {combinations})")
        if c.positions == "sinusoidal" and c.width % 2:
            problems.append(f"model.width is {c.width}, not even")
        return problems

    def unsupported_lm_head(self, config: RunConfig) -> list[str]:
        return []

    def export_type(self, config: RunConfig) -> str:
        return KINDS[config.model.norm, config.model.embed_norm, config.model.positions]

    def export_head(self, config: RunConfig) -> str:
        return "MTModel" if self.export_type(config) == "marian" else heads.SEQ2SEQ

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        c = config.model
        settings = {
            "encoder_layers": c.encoder_depth or c.depth,
            "decoder_attention_heads": c.heads,
            "decoder_ffn_dim": c.hidden,
            "attention_dropout": c.dropout,
            "activation_dropout": c.dropout if c.inner_dropout else 0.0,
            "is_encoder_decoder": True,
        }
        if self.export_type(config) == "marian":
            settings |= {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": c.vocabulary}
        return settings

    def export_spec(self, config: RunConfig) -> ExportSpec:
        translates = TASKS.get(config.objective).is_labelled
        return replace(super().export_spec(config), pipeline="translation" if translates else None)

    def tensor_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        for entry in super().tensor_map(config, spec):
            axis = feature_axis(entry.ours) if config.model.positions == "sinusoidal" else None
            yield entry if axis is None else permute_features(entry, sinusoid_order(config.model.width), axis)

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c = config.model
        # an embedding that is not tied to the LM head is stored once per module that uses it
        yield repeat("backbone.tokens.weight", *(f"{spec.prefix}{name}" for name in EMBEDDINGS[: 1 if c.tied else 3]))
        for side, depth in (("encoder", c.encoder_depth or c.depth), ("decoder", c.depth)):
            ours, theirs = f"backbone.{side}", f"{spec.prefix}{side}"
            if c.positions == "learned":
                offset = POSITION_OFFSETS.get(spec.model_type, 0)
                yield offset_rows(f"{ours}.positions.weight", f"{theirs}.embed_positions.weight", offset)
            else:
                yield rename(f"{ours}.waves", f"{theirs}.embed_positions.weight")
            if c.embed_norm:
                yield from self.layer_map(c, f"{ours}.embed_norm", f"{theirs}.layernorm_embedding")
            if c.norm == "pre":
                yield from self.layer_map(c, f"{ours}.final_norm", f"{theirs}.layer_norm")
            layers = LAYERS | (CROSS_LAYERS if side == "decoder" else {})
            for n in range(depth):
                yield from self.block_map(c, f"{ours}.blocks.{n}", f"{theirs}.layers.{n}", layers)

    def lm_head_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c, bias = config.model, "final_logits_bias"
        if not c.tied:
            yield rename("heads.token.weight", "lm_head.weight")
        if c.tied or not c.bias:
            yield constant(bias, torch.zeros(1, c.vocabulary))
        else:
            yield unsqueeze("heads.token.bias", bias, 0)

    def unsupported_import(self, source: SourceModel) -> list[str]:
        supported = source.head.endswith((heads.SEQ2SEQ, "MTModel"))
        problems = [] if supported else [f"{source.head} is not a text-to-text model"]
        for name in ("attention_heads", "ffn_dim"):
            encoder, decoder = source.config[f"encoder_{name}"], source.config[f"decoder_{name}"]
            if encoder != decoder:
                problems.append(f"encoder_{name} is {encoder}, decoder_{name} {decoder}")
        return problems

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        model = super().import_model(source)
        settings = next(settings for settings, name in KINDS.items() if name == source.config["model_type"])
        bias = source.tensors.get("final_logits_bias")
        return (
            model
            | dict(zip(("norm", "embed_norm", "positions"), settings, strict=True))
            | {
                "encoder_depth": source.config["encoder_layers"],
                "inner_dropout": bool(source.config.get("activation_dropout", 0.0)),
                "tied": source.config.get("tie_word_embeddings", True) is not False
                and (bias is None or not bias.any()),
            }
        )

    def import_task(self, source: SourceModel) -> dict[str, Any]:
        return {"name": "translate" if source.config["model_type"] == "marian" else "denoise"}

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Merges copies of the embedding and adds tensors that files may leave out."""
        c, result = config.model, dict(source.tensors)
        names = [f"model.{name}" for name in EMBEDDINGS]
        copies = [result[name] for name in names if name in result]
        if copies and all(torch.equal(copy, copies[0]) for copy in copies):
            result = {name: tensor for name, tensor in result.items() if name not in names} | {names[0]: copies[0]}
        result.setdefault("final_logits_bias", torch.zeros(1, c.vocabulary))
        if not c.tied and copies:
            result |= dict.fromkeys(names, copies[0])
            result.setdefault("lm_head.weight", copies[0])
        if c.positions == "sinusoidal":
            table = sinusoids(c.context, c.width)[:, sinusoid_order(c.width)]
            for side in ("encoder", "decoder"):
                result.setdefault(f"model.{side}.embed_positions.weight", table)
        return result


def sinusoid_order(width: int) -> Tensor:
    """Hugging Face puts all sines before all cosines; here they alternate."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def feature_axis(name: str | None) -> int | None:
    """The axis of our tensor that holds features of the residual stream, if any."""
    if name is None:
        return None
    if any(part in name for part in ("tokens", "positions", "waves", "inputs", "feed.up", "heads.token")):
        return None if name.endswith("bias") else 1
    return 0
