"""Where a token stands: the sinusoids added to embeddings and the angles that rotary attention turns by."""

import torch
from torch import Tensor

ROTARY_BASE = 10_000.0


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sine in even columns, cosine in odd ones; an odd width ends on a sine."""
    places = torch.arange(length, dtype=torch.float64)[:, None]
    angles = places * ROTARY_BASE ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    waves = torch.empty(length, width, dtype=torch.float64)
    waves[:, 0::2] = angles.sin()
    waves[:, 1::2] = angles.cos()[:, : width // 2]
    return waves.float()  # made in double: single precision is 1e-4 off at position 5,000


def rotary_angles(length: int, head_width: int, *, base: float = ROTARY_BASE) -> Tensor:
    """(length, head_width / 2): how far each pair of a head's features is turned at each position."""
    half = head_width // 2
    places = torch.arange(length, dtype=torch.float64)[:, None]
    return places * base ** -(torch.arange(half, dtype=torch.float64) / half)  # in double, as above
