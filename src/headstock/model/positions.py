"""Sinusoidal position embeddings, rotary angles, and the buckets of relative positions."""

import math

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sines in even columns, cosines in odd ones; an odd width ends with a sine."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    angles = positions * ROTARY_BASE ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.empty(length, width, dtype=torch.float64)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : width // 2]
    return table.float()  # computed in float64: float32 angles are off by 1e-4 at position 5,000


def rotary_angles(length: int, head_width: int, *, base: float = ROTARY_BASE) -> Tensor:
    """(length, head_width / 2): the angle of each pair of features at each position, in float64."""
    half = head_width // 2
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    return positions * base ** -(torch.arange(half, dtype=torch.float64) / half)


def relative_position_buckets(distance: Tensor, *, buckets: int, longest: int, bidirectional: bool) -> Tensor:
    """The bucket of each signed distance, key minus query, as in T5.

    Near distances have a bucket each, farther ones share buckets of growing size, and those from `longest` on share the
    last. With `bidirectional` the second half of the buckets is for keys on the right; otherwise these are not told
    apart from the query itself, since a causal mask hides them.
    """
    if bidirectional:
        buckets //= 2
        offset, distance = (distance > 0).long() * buckets, distance.abs()
    else:
        offset, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = buckets // 2
    scale = (buckets - exact) / math.log(longest / exact)
    far = exact + ((distance.float() / exact).clamp(min=1).log() * scale).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
