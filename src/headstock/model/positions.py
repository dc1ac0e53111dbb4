"""Sinusoidal position embeddings and rotary angles."""

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
