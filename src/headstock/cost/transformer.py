"""Closed forms of the Transformer and the encoder-decoder.

`c` is the config that selects among the variants, `d` the sizes. D width, F hidden, A heads, L tokens in a row.
"""

from dataclasses import replace
from typing import Any

from headstock.cost.formulas import (
    Dimensions,
    ExecutionContext,
    ModuleCost,
    SavedActivations,
    Shapes,
    Size,
    divide,
    embedding,
    linear,
    norm,
)
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.transformer import TransformerConfig
from headstock.model.layers import GATED


def transformer_cost(
    c: TransformerConfig, d: Dimensions, context: ExecutionContext, *, name: str = "backbone", own_tokens: bool = True
) -> ModuleCost:
    parts = [embedding("tokens", d.vocabulary, d.width)] if own_tokens else []
    parts += [embedding("positions", d.context, d.width)] if c.positions == "learned" else []
    parts += [embedding("relative", d.relative_buckets, d.heads)] if c.positions == "relative" else []
    parts += [embedding("segments", d.segments, d.width)] if c.segments else []
    parts += [norm("embed_norm", d.width, c.norm_kind, context, bias=c.bias)] if c.embed_norm else []
    parts += [blocks("blocks", c, d, context)]
    parts += [norm("final_norm", d.width, c.norm_kind, context, bias=c.bias)] if c.norm == "pre" else []
    buffers: Shapes = {"waves": (d.context, d.width)} if c.positions == "sinusoidal" else {}
    saved = SavedActivations(dropped=d.width if c.dropout else 0)
    if c.positions == "rotary":
        angles = (d.context, divide(d.head_width, 2))
        buffers = {"cosine": angles, "sine": angles}
        saved += SavedActivations(single=d.head_width)
    if c.positions == "relative" and context.packed:
        saved += SavedActivations(single=d.length / 4)  # the mask, a byte per key
    return ModuleCost(name, buffers=buffers, saved=saved, parts=tuple(parts))


def encoder_decoder_cost(backbone: EncoderDecoder, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    """A target token bears the cost of its share of the source."""
    separate = backbone.encoder.tokens is not backbone.tokens
    source = replace(d, vocabulary=d.source_vocabulary, depth=d.encoder_depth, length=d.source_length, source_length=0)
    share = d.source_length / d.length
    encoder = transformer_cost(backbone.encoder.config, source, context, name="encoder", own_tokens=separate)
    return ModuleCost(
        "backbone",
        saved=SavedActivations(d.width).times(share),  # the encoder's output, saved once for all decoder blocks
        parts=(
            embedding("tokens", d.vocabulary, d.width),
            replace(encoder, passes=share),
            transformer_cost(backbone.decoder.config, d, context, name="decoder", own_tokens=False),
        ),
    )


def blocks(name: str, c: Any, d: Dimensions, context: ExecutionContext) -> ModuleCost:
    def residual(of: str) -> ModuleCost:
        dropped = SavedActivations(dropped=d.width if c.dropout else 0)
        parts = () if c.norm == "none" else (norm("norm", d.width, c.norm_kind, context, bias=c.bias),)
        return ModuleCost(f"around_{of}", parts=parts, saved=dropped)

    parts = [attention("attention", c, d, context), residual("attention")]
    if c.cross:
        parts += [attention("cross", c, d, context, cross=True), residual("cross")]
    parts += [feed_forward("feed", c, d), residual("feed")]
    return ModuleCost(name, parts=tuple(parts), times=d.depth)


def attention(name: str, c: Any, d: Dimensions, context: ExecutionContext, *, cross: bool = False) -> ModuleCost:
    """Keys are those of the row itself, or with `cross` those of the source."""
    width, keys = d.width, d.source_length if cross else d.length
    share = keys / d.length if cross else 1  # keys and values per query
    inputs = linear("inputs", width, 3 * width, bias=c.bias)
    norms: tuple[ModuleCost, ...] = ()
    if c.qk_norm:
        weight: Shapes = {"weight": (d.head_width,)}
        norms = (ModuleCost("query_norm", weight), ModuleCost("key_norm", weight))
    positions = "none" if cross else c.positions
    saved = saved_by_attention(c, d, context, keys=keys, share=share, positions=positions)
    if context.packed and not cross and is_fused(c, context, positions):
        saved += SavedActivations(keys)  # the mask
    return ModuleCost(
        name,
        flops=4 * keys * width,  # each query with each key, each weight with each value
        saved=saved,
        parts=(
            ModuleCost("inputs", inputs.shapes, flops=2 * width * width * (1 + 2 * share), saved=inputs.saved),
            linear("output", width, width, bias=c.bias),
            *norms,
        ),
    )


def is_fused(c: Any, context: ExecutionContext, positions: str) -> bool:
    """Whether attention saves no attention weights; the CPU has no fused kernel with dropout or a learned bias."""
    return context.device == "cuda" or (not c.dropout and positions != "relative")


def saved_by_attention(
    c: Any, d: Dimensions, context: ExecutionContext, *, keys: Size, share: Size, positions: str
) -> SavedActivations:
    """What is saved between the input projection and the output projection."""
    width, query_and_key = d.width, d.width * (1 + share)
    projected = SavedActivations(width + 2 * width * share)  # queries, keys and values
    normed = SavedActivations(single=d.heads * (1 + share)) if c.qk_norm else SavedActivations()
    if c.qk_norm and context.device == "cpu":
        normed += SavedActivations(query_and_key)
    if not is_fused(c, context, positions):
        # the softmax, and with dropout also its mask and the product of both
        weights = SavedActivations((3 if c.dropout else 1) * d.heads * keys)
        return projected + weights + normed + (projected if c.qk_norm else SavedActivations())
    # norms and rotation give new tensors, and an output in another layout than the next layer reads
    copied = SavedActivations(query_and_key + width) if c.qk_norm or positions == "rotary" else SavedActivations()
    return projected + normed + SavedActivations(single=d.heads) + copied


def feed_forward(name: str, c: Any, d: Dimensions) -> ModuleCost:
    gated, drops = c.activation in GATED, c.dropout and c.inner_dropout
    activated = 3 * d.hidden if gated else d.hidden if drops or c.activation != "relu" else 0
    if c.feed_activation == "outer":
        activated = d.width
    gate = (linear("gate", d.width, d.hidden, bias=c.bias, saves_input=False),) if gated else ()
    return ModuleCost(
        name,
        saved=SavedActivations(activated, dropped=d.hidden if drops else 0),
        parts=(*gate, linear("up", d.width, d.hidden, bias=c.bias), linear("down", d.hidden, d.width, bias=c.bias)),
    )
