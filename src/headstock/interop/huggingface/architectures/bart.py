"""Encoder-decoders: BART, mBART, Marian, Pegasus and Blenderbot have the same tensors and differ in three settings."""

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
    unlike,
)
from headstock.interop.huggingface.tensor_names import (
    Row,
    Tensors,
    constant,
    layer,
    lowered,
    rearranged,
    same,
    thirds,
)
from headstock.model.layers import NORM_EPSILON
from headstock.model.positions import sinusoids
from headstock.train.settings import RunConfig

# (norm, embed_norm, positions): what is called so
KINDS = {
    ("post", True, "learned"): "bart",
    ("pre", True, "learned"): "mbart",
    ("post", False, "sinusoidal"): "marian",
    ("pre", False, "sinusoidal"): "pegasus",
    ("pre", False, "learned"): "blenderbot",
}
HEADS = {"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus", "blenderbot": "Blenderbot"}
OFFSETS = {"bart": 2, "mbart": 2}  # rows before the first position
LAYERS = {  # ours: theirs, and along which axis of the weight the model's own features stand
    "attention.output": ("self_attn.out_proj", 0),
    "around_attention.norm": ("self_attn_layer_norm", 0),
    "cross.output": ("encoder_attn.out_proj", 0),
    "around_cross.norm": ("encoder_attn_layer_norm", 0),
    "feed.up": ("fc1", 1),
    "feed.down": ("fc2", 0),
    "around_feed.norm": ("final_layer_norm", 0),
}


def kind_of(model: Any) -> str | None:
    return KINDS.get((model.norm, model.embed_norm, model.positions))


@ARCHITECTURES.add("bart")
class Bart(Architecture):
    title = "BART, mBART, Marian, Pegasus or Blenderbot"
    reads = ("bart", "mbart", "marian", "pegasus", "blenderbot")
    anchors = ("shared.weight", "encoder.embed_tokens.weight")

    @classmethod
    def prefix_of(cls, kind: str) -> str:
        return "model."

    @classmethod
    def misfits(cls, chosen: RunConfig) -> list[str]:
        if problems := family_problem(chosen, "seq2seq"):
            return problems
        c = chosen.model
        problems = unlike(c, norm_kind="layer", activation=tuple(ACTIVATIONS), qk_norm=False, norm_epsilon=NORM_EPSILON)
        problems += unlike(c, source_vocabulary=None, shared=True)
        if kind_of(c) is None:
            are = f"norm {c.norm!r}, embed_norm {str(c.embed_norm).lower()} and positions {c.positions!r}"
            known = "; ".join(f"{norm}, {str(normed).lower()}, {places}" for norm, normed, places in KINDS)
            problems.append(f"model has {are}, which none has together (they have: {known})")
        if c.positions == "sinusoidal" and c.width % 2:
            problems.append(f"model.width is {c.width}, not even")
        return problems

    @classmethod
    def export(cls, chosen: RunConfig) -> Export:
        c = chosen.model
        kind = kind_of(c) or ""
        sizes = {"layers": c.depth, "attention_heads": c.heads, "ffn_dim": c.hidden}
        config = {
            "vocab_size": c.vocabulary,
            "max_position_embeddings": c.context,
            "d_model": c.width,
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()},
            "encoder_layers": c.encoder_depth or c.depth,
            "activation_function": ACTIVATIONS[c.activation],
            **dict.fromkeys(("dropout", "attention_dropout"), c.dropout),
            "activation_dropout": c.dropout if c.inner_dropout else 0.0,
            "scale_embedding": c.embed_scale,
            "tie_word_embeddings": c.tied,
            "is_encoder_decoder": True,
        }
        if kind == "marian":
            config |= {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": c.vocabulary}
        head = "MarianMTModel" if kind == "marian" else f"{HEADS[kind]}ForConditionalGeneration"
        return Export(kind, head, "model.", config, "translation" if chosen.objective == "translate" else None)

    @classmethod
    def rows(cls, chosen: RunConfig, export: Export) -> Iterator[Row]:
        c, p = chosen.model, export.prefix
        order = torch.cat([torch.arange(0, c.width, 2), torch.arange(1, c.width, 2)])  # sines, then cosines
        for row, axes in unordered(chosen, export, p):
            yield rearranged(row, order, axes) if c.positions == "sinusoidal" else row

    @classmethod
    def settings(cls, config: Mapping[str, Any], head: str, tensors: Tensors) -> dict[str, Any]:
        kind = config["model_type"]
        norm, normed, places = next(settings for settings, name in KINDS.items() if name == kind)
        problems = [
            f"encoder_{name} is {config[f'encoder_{name}']}, decoder_{name} {config[f'decoder_{name}']}"
            for name in ("attention_heads", "ffn_dim")
            if config[f"encoder_{name}"] != config[f"decoder_{name}"]
        ]
        if config.get("share_encoder_decoder_embeddings") is False:
            problems.append("share_encoder_decoder_embeddings is false")
        if not head.endswith(("ForConditionalGeneration", "MTModel")):
            problems.append(f"it is a {head}; models for texts from texts can be read, other heads not")
        refuse(config, problems)
        bias = tensors.get("final_logits_bias")
        model = {
            "family": "seq2seq",
            "vocabulary": config["vocab_size"],
            "context": config["max_position_embeddings"],
            "depth": config["decoder_layers"],
            "encoder_depth": config["encoder_layers"],
            "width": config["d_model"],
            "heads": config["encoder_attention_heads"],
            "hidden": config["encoder_ffn_dim"],
            "dropout": float(config.get("dropout", 0.1)),
            "inner_dropout": bool(config.get("activation_dropout", 0.0)),
            "norm": norm,
            "positions": places,
            "activation": activation_of(config.get("activation_function", "gelu")),
            "embed_norm": normed,
            "embed_scale": bool(config.get("scale_embedding", False)),
            "tied": config.get("tie_word_embeddings", True) is not False and (bias is None or not bias.any()),
        }
        return {"model": model, "task": {"name": "translate" if kind == "marian" else "denoise"}}

    @classmethod
    def prepare(cls, config: Mapping[str, Any], tensors: Tensors, chosen: RunConfig, export: Export) -> Tensors:
        """One embedding where the file may have it up to four times, and positions where it leaves them out."""
        c, made = chosen.model, dict(tensors)
        names = ["model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"]
        found = [made[name] for name in names if name in made]
        if found and all(torch.equal(one, found[0]) for one in found):
            made = {name: tensor for name, tensor in made.items() if name not in names} | {names[0]: found[0]}
        made.setdefault("final_logits_bias", torch.zeros(1, c.vocabulary))
        if not c.tied and found:
            made |= dict.fromkeys(names, found[0])
            made.setdefault("lm_head.weight", found[0])
        if c.positions == "sinusoidal":
            order = torch.cat([torch.arange(0, c.width, 2), torch.arange(1, c.width, 2)])
            for side in ("encoder", "decoder"):
                made.setdefault(f"model.{side}.embed_positions.weight", sinusoids(c.context, c.width)[:, order])
        return made


def unordered(chosen: RunConfig, export: Export, prefix: str) -> Iterator[tuple[Row, tuple[int, ...]]]:
    """Every row, and the axes of our tensor along which the model's own features stand."""
    c = chosen.model
    yield (same("backbone.tokens.weight", f"{prefix}shared.weight") if c.tied else thrice(prefix)), (1,)
    for side in ("encoder", "decoder"):
        ours, theirs = f"backbone.{side}", f"{prefix}{side}"
        if c.positions == "learned":
            offset = OFFSETS.get(export.model_type, 0)
            yield lowered(f"{ours}.positions.weight", f"{theirs}.embed_positions.weight", offset), (1,)
        else:
            yield same(f"{ours}.waves", f"{theirs}.embed_positions.weight"), (1,)
        zeros: bool | int = True if c.bias else c.width
        norms = {"embed_norm": "layernorm_embedding"} if c.embed_norm else {}
        norms |= {"final_norm": "layer_norm"} if c.norm == "pre" else {}
        for own, name in norms.items():
            for row in layer(f"{ours}.{own}", f"{theirs}.{name}", bias=zeros):
                yield row, (0,)
        for n in range((c.encoder_depth or c.depth) if side == "encoder" else c.depth):
            yield from block_rows(chosen, f"{ours}.blocks.{n}", f"{theirs}.layers.{n}", cross=side == "decoder")
    yield from head_rows(chosen)


def block_rows(chosen: RunConfig, ours: str, theirs: str, *, cross: bool) -> Iterator[tuple[Row, tuple[int, ...]]]:
    c = chosen.model
    for own, name in (("attention", "self_attn"), ("cross", "encoder_attn")):
        if own == "attention" or cross:
            parts = [f"{theirs}.{name}.{part}_proj" for part in "qkv"]
            weight, *biases = thirds(f"{ours}.{own}.inputs", *parts, bias=True if c.bias else c.width)
            yield weight, (1,)
            yield from ((row, ()) for row in biases)
    for own, (name, axis) in LAYERS.items():
        if "cross" in own and not cross:
            continue
        size = c.hidden if own == "feed.up" else c.width
        weight, bias = layer(f"{ours}.{own}", f"{theirs}.{name}", bias=True if c.bias else size)
        yield weight, (axis,)
        yield bias, () if own == "feed.up" else (0,)


def head_rows(chosen: RunConfig) -> Iterator[tuple[Row, tuple[int, ...]]]:
    c = chosen.model
    if not c.tied:
        yield same("heads.token.weight", "lm_head.weight"), (1,)
    if c.tied or not c.bias:
        yield constant("final_logits_bias", torch.zeros(1, c.vocabulary)), ()
    else:
        yield Row("heads.token.bias", ("final_logits_bias",), lambda t: [t[None]], lambda parts: parts[0][0]), ()


def thrice(prefix: str) -> Row:
    """An embedding that is not tied to the head is written for each that reads it."""
    names = tuple(f"{prefix}{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
    return Row("backbone.tokens.weight", names, lambda t: [t, t.clone(), t.clone()], lambda parts: parts[0])
