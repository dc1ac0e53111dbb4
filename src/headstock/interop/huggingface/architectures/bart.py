"""Encoder-decoders: BART, mBART, Marian, Pegasus and Blenderbot share their tensors and differ in three settings."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstock.interop.huggingface.architecture import (
    ACTIVATIONS,
    ARCHITECTURES,
    Architecture,
    ExportSpec,
    Sizes,
    import_activation,
    reject,
    show,
)
from headstock.interop.huggingface.heads import SEQ2SEQ
from headstock.interop.huggingface.tensor_map import (
    TensorMap,
    Tensors,
    affine,
    constant,
    fused_qkv,
    offset_rows,
    permute_features,
    rename,
    repeat,
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
CLASSES = {"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus", "blenderbot": "Blenderbot"}
POSITION_OFFSETS = {"bart": 2, "mbart": 2}
LAYERS = {  # ours: theirs, and the axis of the weight that holds model features
    "attention.output": ("self_attn.out_proj", 0),
    "around_attention.norm": ("self_attn_layer_norm", 0),
    "cross.output": ("encoder_attn.out_proj", 0),
    "around_cross.norm": ("encoder_attn_layer_norm", 0),
    "feed.up": ("fc1", 1),
    "feed.down": ("fc2", 0),
    "around_feed.norm": ("final_layer_norm", 0),
}
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

# an entry, and the axes of our tensor that hold model features
EntryAxes = tuple[TensorMap, tuple[int, ...]]


def model_type(model: Any) -> str | None:
    return KINDS.get((model.norm, model.embed_norm, model.positions))


def sinusoid_order(width: int) -> Tensor:
    """Hugging Face puts all sines before all cosines; here they alternate."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


@ARCHITECTURES.add("bart")
class Bart(Architecture):
    title = "BART, mBART, Marian, Pegasus or Blenderbot"
    family = "seq2seq"
    model_types = ("bart", "mbart", "marian", "pegasus", "blenderbot")
    heads = (SEQ2SEQ,)
    embeddings = EMBEDDINGS[:2]
    sizes: ClassVar[Sizes] = {
        "vocabulary": ("vocab_size", None),
        "context": ("max_position_embeddings", None),
        "width": ("d_model", None),
        "depth": ("decoder_layers", None),
        "heads": ("encoder_attention_heads", None),
        "hidden": ("encoder_ffn_dim", None),
    }
    required: ClassVar[dict[str, Any]] = {
        "norm_kind": "layer",
        "activation": tuple(ACTIVATIONS),
        "qk_norm": False,
        "norm_epsilon": NORM_EPSILON,
        "source_vocabulary": None,
        "shared": True,
    }

    @classmethod
    def backbone_prefix(cls, model_type: str) -> str:
        return "model."

    @classmethod
    def unsupported_model(cls, config: RunConfig) -> list[str]:
        c, problems = config.model, []
        if model_type(c) is None:
            actual = f"norm {c.norm!r}, embed_norm {show(c.embed_norm)} and positions {c.positions!r}"
            known = "; ".join(f"{norm}, {show(normed)}, {positions}" for norm, normed, positions in KINDS)
            problems.append(f"no architecture combines {actual} (known combinations: {known})")
        if c.positions == "sinusoidal" and c.width % 2:
            problems.append(f"model.width is {c.width}, not even")
        return problems

    @classmethod
    def export_spec(cls, config: RunConfig) -> ExportSpec:
        c = config.model
        kind = model_type(c) or ""
        hf_config = {
            **cls.export_sizes(c),
            "encoder_layers": c.encoder_depth or c.depth,
            "decoder_attention_heads": c.heads,
            "decoder_ffn_dim": c.hidden,
            "activation_function": ACTIVATIONS[c.activation],
            **dict.fromkeys(("dropout", "attention_dropout"), c.dropout),
            "activation_dropout": c.dropout if c.inner_dropout else 0.0,
            "scale_embedding": c.embed_scale,
            "tie_word_embeddings": c.tied,
            "is_encoder_decoder": True,
        }
        if kind == "marian":
            hf_config |= {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": c.vocabulary}
        name = "MarianMTModel" if kind == "marian" else f"{CLASSES[kind]}{SEQ2SEQ}"
        translates = TASKS.get(config.objective).is_labelled
        return ExportSpec(kind, name, "model.", hf_config, "translation" if translates else None)

    @classmethod
    def tensor_map(cls, config: RunConfig, spec: ExportSpec) -> Iterator[TensorMap]:
        c = config.model
        for entry, axes in entries(config, spec):
            sinusoidal = c.positions == "sinusoidal"
            yield permute_features(entry, sinusoid_order(c.width), axes) if sinusoidal else entry

    @classmethod
    def import_settings(cls, hf_config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        kind = hf_config["model_type"]
        norm, embed_norm, positions = next(settings for settings, name in KINDS.items() if name == kind)
        problems = [
            f"encoder_{name} is {hf_config[f'encoder_{name}']}, decoder_{name} {hf_config[f'decoder_{name}']}"
            for name in ("attention_heads", "ffn_dim")
            if hf_config[f"encoder_{name}"] != hf_config[f"decoder_{name}"]
        ]
        if hf_config.get("share_encoder_decoder_embeddings") is False:
            problems.append("share_encoder_decoder_embeddings is false")
        if not head.endswith((SEQ2SEQ, "MTModel")):
            problems.append(f"{head} is not a text-to-text model")
        reject(hf_config, problems)
        bias = tensors.get("final_logits_bias")
        model = {
            "family": "seq2seq",
            **cls.import_sizes(hf_config),
            "encoder_depth": hf_config["encoder_layers"],
            "dropout": float(hf_config.get("dropout", 0.1)),
            "inner_dropout": bool(hf_config.get("activation_dropout", 0.0)),
            "norm": norm,
            "positions": positions,
            "activation": import_activation(hf_config.get("activation_function", "gelu")),
            "embed_norm": embed_norm,
            "embed_scale": bool(hf_config.get("scale_embedding", False)),
            "tied": hf_config.get("tie_word_embeddings", True) is not False and (bias is None or not bias.any()),
        }
        return {"model": model, "task": {"name": "translate" if kind == "marian" else "denoise"}}

    @classmethod
    def prepare_tensors(
        cls, hf_config: Mapping[str, Any], tensors: Tensors, config: RunConfig, spec: ExportSpec
    ) -> Tensors:
        """Merges copies of the embedding and adds tensors that files may leave out."""
        c, result = config.model, dict(tensors)
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


def entries(config: RunConfig, spec: ExportSpec) -> Iterator[EntryAxes]:
    c = config.model
    # an embedding that is not tied to the LM head is stored once per module that uses it
    names = [f"{spec.prefix}{name}" for name in EMBEDDINGS[: 1 if c.tied else 3]]
    yield repeat("backbone.tokens.weight", *names), (1,)
    for side in ("encoder", "decoder"):
        ours, theirs = f"backbone.{side}", f"{spec.prefix}{side}"
        if c.positions == "learned":
            offset = POSITION_OFFSETS.get(spec.model_type, 0)
            yield offset_rows(f"{ours}.positions.weight", f"{theirs}.embed_positions.weight", offset), (1,)
        else:
            yield rename(f"{ours}.waves", f"{theirs}.embed_positions.weight"), (1,)
        norms = {"embed_norm": "layernorm_embedding"} if c.embed_norm else {}
        norms |= {"final_norm": "layer_norm"} if c.norm == "pre" else {}
        for own, name in norms.items():
            for entry in affine(f"{ours}.{own}", f"{theirs}.{name}", bias=True if c.bias else c.width):
                yield entry, (0,)
        for n in range((c.encoder_depth or c.depth) if side == "encoder" else c.depth):
            yield from block_entries(config, f"{ours}.blocks.{n}", f"{theirs}.layers.{n}", cross=side == "decoder")
    if not c.tied:
        yield rename("heads.token.weight", "lm_head.weight"), (1,)
    if c.tied or not c.bias:
        yield constant("final_logits_bias", torch.zeros(1, c.vocabulary)), ()
    else:
        bias = TensorMap("heads.token.bias", ("final_logits_bias",), lambda t: [t[None]], lambda parts: parts[0][0])
        yield bias, ()


def block_entries(config: RunConfig, ours: str, theirs: str, *, cross: bool) -> Iterator[EntryAxes]:
    c = config.model
    for own, name in (("attention", "self_attn"), ("cross", "encoder_attn")):
        if own == "attention" or cross:
            parts = [f"{theirs}.{name}.{part}_proj" for part in "qkv"]
            weight, *biases = fused_qkv(f"{ours}.{own}.inputs", *parts, bias=True if c.bias else c.width)
            yield weight, (1,)
            yield from ((bias, ()) for bias in biases)
    for own, (name, axis) in LAYERS.items():
        if "cross" in own and not cross:
            continue
        size = c.hidden if own == "feed.up" else c.width
        weight, bias = affine(f"{ours}.{own}", f"{theirs}.{name}", bias=True if c.bias else size)
        yield weight, (axis,)
        yield bias, () if own == "feed.up" else (0,)
