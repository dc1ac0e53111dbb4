"""Where attention looks: the weights that its fused product never shows, made again beside it, nothing changed.

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
    """What one layer's attention did with one batch."""

    kind: AttentionKind  # onto itself, looking both ways (encoder) or back only (decoder), or across onto a source
    layer: int  # the lowest is 1
    weights: Tensor  # (B, H, T, S) how much each place takes of each; a row sums to one
    allowed: Tensor  # (B or 1, 1, T, S) True where a query may look
    error: float  # of what these weights make of the values, beside what the fused product made: share of the largest


@contextmanager
def record_attention(model: Model, hear: Callable[[AttentionRecord], None]) -> Iterator[None]:
    """While this is open, `hear` is told what every attention of the model did, as soon as it did it."""
    attentions = attention_modules(model)
    for where, layer, attention in attentions:
        attention.hook = attention_hook(where, layer, hear)
    try:
        yield
    finally:
        for _, _, attention in attentions:
            attention.hook = None


def attention_modules(model: Model) -> list[tuple[AttentionKind, int, Attention]]:
    """Every attention of a model with its place, from the bottom up; none where a model has no attention."""
    found: list[tuple[AttentionKind, int, Attention]] = []
    for stack in model.backbone.modules():
        if isinstance(stack, Transformer):
            for layer, each in enumerate(stack.blocks, 1):
                block = cast(Block, each)
                found.append(("decoder" if stack.causal else "encoder", layer, block.attention))
                if block.cross is not None:
                    found.append(("cross", layer, block.cross))
    return found


def attention_hook(where: AttentionKind, layer: int, hear: Callable[[AttentionRecord], None]) -> AttentionHook:
    @torch.no_grad()
    def watch(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, mixed: Tensor) -> None:
        allowed = mask.dense(query.size(2), key.size(2), query.device)
        weights = attention_weights(query, key, allowed)
        apart = (weights @ value.float() - mixed.float()).abs().max() / mixed.abs().max().clamp(min=1e-30)
        hear(AttentionRecord(where, layer, weights, allowed, float(apart)))

    return watch


def attention_weights(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """(B, H, T, S): the textbook's softmax(Q K' / sqrt(K)), where what may not be looked at scores minus infinity."""
    scores = query.float() @ key.float().transpose(-1, -2) / query.size(-1) ** 0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)
