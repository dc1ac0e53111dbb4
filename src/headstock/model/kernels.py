"""How the two heaviest things are computed: attention, and what a head over the vocabulary loses.

B rows, T tokens, H heads, K head width, N predictions, D width, V vocabulary. Everything here gives what the plain
formula gives; which way is the fastest depends on the device, and is known to nobody else.
"""

import os
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.model.batch import IGNORE
from headstock.model.masks import Mask

NEW = os.environ.get("HEADSTOCK_KERNELS") == "new"  # what no GPU has run yet is used by those who ask for it
SCORES = 1 << 27  # so many scores of tokens are held at once: half a gigabyte in single precision
FEW = 1 << 24  # so few are held all at once: there is nothing to gain, and any loss can be taken of them


def working_type(x: Tensor) -> torch.dtype:
    """The precision that products of `x` are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# Attention


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """(B, H, T, K) what every query takes from the values that the mask lets it look at."""
    if mask.bounds is not None:
        return attend_apart(query, key, value, mask.bounds, causal=mask.causal, dropout=dropout)
    return F.scaled_dot_product_attention(query, key, value, mask.allowed, dropout, mask.causal)


def reads_apart(x: Tensor, head_width: int) -> bool:
    """Whether there is a kernel that reads the documents of packed rows each by itself, with no mask to be built."""
    if not NEW or x.device.type != "cuda" or head_width > 256:
        return False
    return working_type(x) in (torch.bfloat16, torch.float16) and _has_kernel(x.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:  # before torch 2.10
        return False
    return True


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Attention inside each document of packed rows; `bounds` are where they begin and end in all rows end to end.

    Documents of no length are allowed, so that there may be as many bounds in every batch.
    """
    rows, _, length, width = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B, H, T, K) -> (B T, H, K)
    if dropout or width % 8:  # what varlen_attn calls, which itself knows of no dropout and no other scale
        if width % 8:
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))  # zeros add nothing
        flash = torch.ops.aten._flash_attention_forward
        made = flash(q, k, v, bounds, bounds, length, length, dropout, causal, False, scale=width**-0.5)[0]
        made = made[..., :width]
    else:
        made = _varlen(q, k, v, bounds, length, causal)
    return made.unflatten(0, (rows, length)).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, length: int, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    how: dict[str, Any] = {"is_causal": causal}
    if "window_size" in _parameters():  # since torch 2.11: how far to look back and ahead
        how = {"window_size": (-1, 0 if causal else -1)}
    return varlen_attn(query, key, value, bounds, bounds, length, length, **how)  # type: ignore[return-value]


@cache
def _parameters() -> tuple[str, ...]:
    from torch.nn.attention.varlen import varlen_attn

    return tuple(signature(varlen_attn).parameters)


# What a head over the vocabulary loses


def fuses(count: int, vocabulary: int) -> bool:
    """Whether so many predictions are worth being made in parts: else all their scores are held at once."""
    return count * vocabulary > FEW


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    most: int = SCORES,
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of scores `hidden @ weight.T + bias`, and how many of the best are right.

    (N, D), (V, D), (V,), (N,). Never more than `most` scores are held, and none for the way back: the gradient is made
    together with the loss, when the scores are there anyway.
    """
    parts = max(1, -(-len(hidden) * len(weight) // most))
    hidden = hidden.to(working_type(hidden))
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, smoothing, parts, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        parts: int,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        table = weight.to(hidden.dtype)
        shift = None if bias is None else bias.to(hidden.dtype)
        loss, hits = hidden.new_zeros((), dtype=torch.float32), labels.new_zeros(())
        moves: list[Tensor] = []
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        by_bias = None if bias is None or not learns else torch.zeros_like(bias, dtype=torch.float32)
        for rows, wanted in zip(hidden.chunk(parts), labels.chunk(parts), strict=True):
            scores = F.linear(rows, table, shift)  # (n, V)
            hits = hits + (scores.argmax(-1) == wanted).sum()
            likely = scores.log_softmax(-1, dtype=torch.float32)
            kept, at = (wanted != IGNORE).float(), wanted.clamp(min=0)[:, None]
            lost = (smoothing - 1) * likely.gather(1, at).squeeze(1)
            if smoothing:
                lost = lost - smoothing * likely.mean(-1)
            loss = loss + (lost * kept).sum()
            if by_weight is None:
                continue
            wrong = likely.exp_().scatter_add_(1, at, likely.new_full(at.shape, smoothing - 1))
            if smoothing:
                wrong -= smoothing / len(weight)
            wrong = wrong.mul_(kept[:, None]).to(hidden.dtype)  # the gradient of the scores
            moves.append(wrong @ table)
            by_weight += wrong.mT @ rows
            if by_bias is not None:
                by_bias += wrong.sum(0, dtype=torch.float32)
        by_hidden = torch.cat(moves) if moves else None
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight, by_bias = ctx.saved_tensors
        to_bias = None if by_bias is None else by_bias * slope
        return by_hidden * slope.to(by_hidden.dtype), by_weight * slope, to_bias, None, None, None, None
