"""T5: an encoder-decoder with relative position biases, pre-norm with RMS norms, without biases.

T5 1.0 has ReLU and a tied head, T5 1.1 and Flan-T5 have GEGLU and a head of their own. T5 does not divide scores by
√K, and divides the input of a tied head by √D: these factors are moved into the query projection and the final norm.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.interop.huggingface import heads
from headstock.interop.huggingface.architecture import (
    ARCHITECTURES,
    Architecture,
    ConfigKeys,
    ExportSpec,
    Layers,
    SourceModel,
)
from headstock.interop.tensor_map import TensorMap, Tensors, rename, repeat
from headstock.tasks.base import TASKS
from headstock.train.settings import RunConfig

FEED_FORWARD = {  # our activation: theirs
    "relu": "relu",
    "geglu": "gated-gelu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "silu": "silu",
    "swiglu": "gated-silu",
}
SELF_ATTENTION: Layers = {"attention.output": "layer.0.SelfAttention.o", "around_attention.norm": "layer.0.layer_norm"}
CROSS_ATTENTION: Layers = {"cross.output": "layer.1.EncDecAttention.o", "around_cross.norm": "layer.1.layer_norm"}
RELATIVE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@ARCHITECTURES.add("t5")
class T5(Architecture):
    title = "T5"
    family = "seq2seq"
    classes: ClassVar[dict[str, str]] = {"t5": "T5"}
    model_types = ("t5",)
    supported_heads = (heads.SEQ2SEQ,)
    config_keys: ClassVar[ConfigKeys] = {
        "vocabulary": ("vocab_size", None),
        "context": ("n_positions", 512),  # not a limit: distances have no end
        "width": ("d_model", None),
        "heads": ("num_heads", None),
        "hidden": ("d_ff", None),
        "dropout": ("dropout_rate", 0.1),
        "norm_epsilon": ("layer_norm_epsilon", 1e-6),
        "relative_buckets": ("relative_attention_num_buckets", 32),
        "relative_distance": ("relative_attention_max_distance", 128),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm": "pre",
        "norm_kind": "rms",
        "positions": "relative",
        "activation": tuple(FEED_FORWARD),
        "bias": False,
        "qk_norm": False,
        "embed_scale": False,
        "embed_norm": False,
        "source_vocabulary": None,
        "shared": True,
    }
    prefix = ""
    embeddings = EMBEDDINGS
    buffers = ("EncDecAttention.relative_attention_bias.weight",)  # in old files, never used
    always_biased = False

    def unsupported_lm_head(self, config: RunConfig) -> list[str]:
        return []

    def export_config(self, config: RunConfig) -> dict[str, Any]:
        c = config.model
        return {
            "num_layers": c.encoder_depth or c.depth,
            "num_decoder_layers": c.depth,
            "d_kv": c.width // c.heads,
            "feed_forward_proj": FEED_FORWARD[c.activation],
            "scale_decoder_outputs": c.tied,
            "is_encoder_decoder": True,
        }

    def export_spec(self, config: RunConfig) -> ExportSpec:
        translates = TASKS.get(config.objective).is_labelled
        return replace(super().export_spec(config), pipeline="translation" if translates else None)

    def backbone_map(self, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c = config.model
        # an embedding that is not tied to the LM head is stored once per module that uses it
        yield repeat("backbone.tokens.weight", *EMBEDDINGS[: 1 if c.tied else 3])
        for side, depth in (("encoder", c.encoder_depth or c.depth), ("decoder", c.depth)):
            ours, cross = f"backbone.{side}", side == "decoder"
            yield rename(f"{ours}.relative.weight", f"{side}.{RELATIVE}")
            for n in range(depth):
                yield from self.t5_block(c, f"{ours}.blocks.{n}", f"{side}.block.{n}", cross=cross)
            # a tied head reads its input divided by sqrt(D)
            factor = math.sqrt(c.width) if c.tied and cross else 1.0
            yield scaled(f"{ours}.final_norm.weight", f"{side}.final_layer_norm.weight", factor)

    def t5_block(self, model: Any, ours: str, theirs: str, *, cross: bool) -> Iterator[TensorMap]:
        feed = f"layer.{2 if cross else 1}"
        layers = SELF_ATTENTION | (CROSS_ATTENTION if cross else {}) | {"around_feed.norm": f"{feed}.layer_norm"}
        gated = FEED_FORWARD[model.activation].startswith("gated-")
        layers |= {"feed.gate": f"{feed}.DenseReluDense.wi_0"} if gated else {}
        layers |= {"feed.up": f"{feed}.DenseReluDense.{'wi_1' if gated else 'wi'}"}
        layers |= {"feed.down": f"{feed}.DenseReluDense.wo"}
        yield from self.block_map(model, ours, theirs, layers)
        kinds = {"attention": "layer.0.SelfAttention"} | ({"cross": "layer.1.EncDecAttention"} if cross else {})
        for kind, name in kinds.items():
            parts = tuple(f"{theirs}.{name}.{part}.weight" for part in "qkv")
            yield unscaled_attention(f"{ours}.{kind}.inputs.weight", parts, math.sqrt(model.width // model.heads))

    # Import

    def unsupported_import(self, source: SourceModel) -> list[str]:
        c, problems = source.config, []
        if not source.head.endswith(heads.SEQ2SEQ):
            problems.append(f"{source.head} is not a text-to-text model")
        if c["d_model"] % c["d_kv"] or c["num_heads"] * c["d_kv"] > c["d_model"]:
            problems.append(f"{c['num_heads']} heads of d_kv {c['d_kv']} do not fit into d_model {c['d_model']}")
        if (kind := c.get("feed_forward_proj", "relu")) not in FEED_FORWARD.values():
            problems.append(f"feed_forward_proj is {kind!r}, not {' or '.join(map(repr, FEED_FORWARD.values()))}")
        return problems

    def import_model(self, source: SourceModel) -> dict[str, Any]:
        c = source.config
        kind = c.get("feed_forward_proj", "relu")
        return super().import_model(source) | {
            "heads": c["d_model"] // c["d_kv"],  # with fewer heads, the rest are zero
            "depth": c.get("num_decoder_layers") or c["num_layers"],
            "encoder_depth": c["num_layers"],
            "activation": next(ours for ours, theirs in FEED_FORWARD.items() if theirs == kind),
            "inner_dropout": True,
        }

    def import_task(self, source: SourceModel) -> dict[str, Any]:
        start = source.config.get("decoder_start_token_id", source.config.get("pad_token_id", 0))
        tokenizer = source.tokenizer
        if start not in (tokenizer.pad, tokenizer.bos):
            raise UserError(f"config.json: decoder_start_token_id {start} is neither the padding nor the start token")
        return {"name": "translate", "beams": 1, "decoder_start": "pad" if start == tokenizer.pad else "bos"}

    def prepare_tensors(self, source: SourceModel, config: RunConfig, spec: ExportSpec) -> Tensors:
        """Merges copies of the embedding, and adds heads of zeros where T5 has fewer than D / K.

        Files of transformers 5 say with `scale_decoder_outputs` what older ones imply by `tie_word_embeddings`.
        """
        c, result = config.model, dict(source.tensors)
        copies = [result.pop(name) for name in EMBEDDINGS if name in result]
        if any(not torch.equal(copy, copies[0]) for copy in copies):
            raise UserError(f"{source.path}: encoder and decoder have different embeddings")
        result |= dict.fromkeys(EMBEDDINGS[: 1 if c.tied else 3], copies[0])
        if not c.tied:
            result.setdefault("lm_head.weight", copies[0])
        scaled = source.config.get("scale_decoder_outputs", source.config.get("tie_word_embeddings", True) is not False)
        norm = "decoder.final_layer_norm.weight"
        if scaled != c.tied and norm in result:  # `backbone_map` expects both or neither
            result[norm] = result[norm] * math.sqrt(c.width) ** (1 if c.tied else -1)
        missing = c.heads - source.config["num_heads"]
        if missing > 0:
            result = {name: with_zero_heads(name, tensor, missing, c.width) for name, tensor in result.items()}
        return result


def with_zero_heads(name: str, tensor: Tensor, heads: int, width: int) -> Tensor:
    """A tensor of attention with more heads, which contribute nothing."""
    if name.endswith(("Attention.q.weight", "Attention.k.weight", "Attention.v.weight")):
        return F.pad(tensor, (0, 0, 0, width - len(tensor)))
    if name.endswith("Attention.o.weight"):
        return F.pad(tensor, (0, width - tensor.size(1)))
    return F.pad(tensor, (0, heads)) if name.endswith("relative_attention_bias.weight") else tensor


def scaled(ours: str, theirs: str, factor: float) -> TensorMap:
    """A tensor that is `factor` times as large there."""
    return TensorMap(ours, (theirs,), lambda tensor: [tensor * factor], lambda parts: parts[0] / factor)


def unscaled_attention(ours: str, theirs: tuple[str, ...], factor: float) -> TensorMap:
    """Query, key and value projections for scores that are not divided by `factor`."""

    def split(tensor: Tensor) -> list[Tensor]:
        query, key, value = tensor.chunk(3)
        return [query / factor, key, value]

    return TensorMap(ours, theirs, split, lambda parts: torch.cat([parts[0] * factor, parts[1], parts[2]]))
