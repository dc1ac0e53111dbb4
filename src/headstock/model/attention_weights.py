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

AttentionKind = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True)
class AttentionRecord:
    """The attention of one layer in one batch."""

    kind: AttentionKind  # bidirectional self-attention, causal self-attention, or cross-attention
    layer: int  # from 1
    weights: Tensor  # (B, H, T, S); each row sums to one
    allowed: Tensor  # (B or 1, 1, T, S) True where a query may attend
    error: float  # of the output recomputed from these weights, relative to the largest value


@contextmanager
def record_attention(model: Model, callback: Callable[[AttentionRecord], None]) -> Iterator[None]:
    """Within this context, `callback` receives a record of every attention layer as it runs."""
    modules = attention_modules(model)
    for kind, layer, attention in modules:
        attention.hook = attention_hook(kind, layer, callback)
    try:
        yield
    finally:
        for _, _, attention in modules:
            attention.hook = None


def attention_modules(model: Model) -> list[tuple[AttentionKind, int, Attention]]:
    """Every attention module with its kind and layer, from the bottom up."""
    modules: list[tuple[AttentionKind, int, Attention]] = []
    for stack in model.backbone.modules():
        if isinstance(stack, Transformer):
            for layer, module in enumerate(stack.blocks, 1):
                block = cast(Block, module)
                modules.append(("decoder" if stack.causal else "encoder", layer, block.attention))
                if block.cross is not None:
                    modules.append(("cross", layer, block.cross))
    return modules


def attention_hook(kind: AttentionKind, layer: int, callback: Callable[[AttentionRecord], None]) -> AttentionHook:
    @torch.no_grad()
    def hook(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, output: Tensor) -> None:
        allowed = mask.dense(query.size(2), key.size(2), query.device)
        weights = attention_weights(query, key, allowed)
        error = (weights @ value.float() - output.float()).abs().max() / output.abs().max().clamp(min=1e-30)
        callback(AttentionRecord(kind, layer, weights, allowed, float(error)))

    return hook


def attention_weights(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """(B, H, T, S): softmax(Q K' / sqrt(K)), with scores of minus infinity where `allowed` is False."""
    scores = query.float() @ key.float().transpose(-1, -2) / query.size(-1) ** 0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)
