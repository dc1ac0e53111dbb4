"""Recomputes attention weights, which fused attention does not return.

B rows, H heads, T queries, S keys, K head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from headstock.model.attention_mask import AttentionMask
from headstock.model.backbones.transformer import Transformer
from headstock.model.layers import Attention, AttentionHook, Block
from headstock.model.model import Model

AttentionKind = Literal["encoder", "decoder", "cross", "forward", "backward"]
DIRECTIONS: dict[str, AttentionKind] = {"forwards": "forward", "backwards": "backward"}  # of a stack that is one of two


@dataclass(frozen=True)
class AttentionRecord:
    """The attention of one layer in one batch."""

    # bidirectional self-attention, causal self-attention, cross-attention, or one direction of a bidirectional LM
    kind: AttentionKind
    layer: int  # from 1
    weights: Tensor  # (B, H, T, S) in the order of the text; each row sums to one
    allowed: Tensor  # (B or 1, 1, T, S) True where a query may attend
    error: float  # of the output recomputed from these weights, relative to the largest value


@contextmanager
def record_attention(model: Model, callback: Callable[[AttentionRecord], None]) -> Iterator[None]:
    """Within this context, `callback` receives a record of every attention layer as it runs."""
    modules = attention_modules(model)
    for kind, layer, attention in modules:
        attention.hook = record_hook(kind, layer, callback)
    try:
        yield
    finally:
        for _, _, attention in modules:
            attention.hook = None


def attention_modules(model: Model) -> list[tuple[AttentionKind, int, Attention]]:
    """Every attention module with its kind and layer, from the bottom up."""
    modules: list[tuple[AttentionKind, int, Attention]] = []
    for name, stack in model.backbone.named_modules():
        if isinstance(stack, Transformer):
            kind = DIRECTIONS.get(name, "decoder" if stack.causal else "encoder")
            for layer, module in enumerate(stack.blocks, 1):
                block = cast(Block, module)
                modules.append((kind, layer, block.attention))
                if block.cross is not None:
                    modules.append(("cross", layer, block.cross))
    return modules


def record_hook(kind: AttentionKind, layer: int, callback: Callable[[AttentionRecord], None]) -> AttentionHook:
    @torch.no_grad()
    def hook(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, output: Tensor) -> None:
        weights, allowed = masked_weights(query, key, mask)
        error = (weights @ value.to(weights) - output.to(weights)).abs().max() / output.abs().max().clamp(min=1e-30)
        if kind == "backward":  # it reads the text from its end
            weights, allowed = weights.flip(-2, -1), allowed.flip(-2, -1)
        callback(AttentionRecord(kind, layer, weights, allowed, float(error)))

    return hook


def masked_weights(query: Tensor, key: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """(B, H, T, S) the weights under a mask, and (B or 1, H or 1, T, S) where it allows any."""
    allowed = mask.dense(query.size(2), key.size(2), query.device)
    return attention_weights(query, key, allowed, mask.bias), allowed


def attention_weights(query: Tensor, key: Tensor, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """(B, H, T, S): softmax(Q K' / sqrt(K) + bias) in at least single precision; zero where `allowed` is False."""
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precision) @ key.to(precision).transpose(-1, -2) / query.size(-1) ** 0.5
    scores = scores if bias is None else scores + bias.to(precision)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)
