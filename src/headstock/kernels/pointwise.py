"""Dropout and GELU with less arithmetic, for where a compiler puts them into the kernels around.

Such kernels should take as long as reading and writing does; torch's own draws and error function take longer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's. Half of one plus a tangent is a sigmoid, which compiled code has a shorter way to."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627 * x * x))  # 2 sqrt(2 / pi), and 0.044715 of it
    return F.gelu(x, approximate="tanh")


def dropout(x: Tensor, dropout: float) -> Tensor:
    """Dropout while learning."""
    if torch.compiler.is_compiling() and x.is_cuda and x.numel() < 1 << 31:
        return drop_by_hash(x, dropout)
    return F.dropout(x, dropout)


def drop_by_hash(x: Tensor, dropout: float) -> Tensor:
    """The same, drawn by a mixer of 32 bits as attention's: see `_stays` in fused_attention.py.

    torch's own draws, fit for any statistics, need ten times the arithmetic, and what they left is remembered. These
    are made again on the way back from a number for all.
    """
    one, two = torch.randint(-(1 << 31), 1 << 31, (2,), device=x.device).int()
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ one
    mixed = (place ^ ((place >> 16) & 0xFFFF) ^ two) * 2146121005  # shifts fill with the sign, which is taken off
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * -2073254261
    return torch.where(mixed >= round(dropout * 2**32) - 2**31, x * (1 / (1 - dropout)), 0.0)


def gelu(x: Tensor) -> Tensor:
    """BERT's, with the exact error function."""
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        made: Tensor = _Gelu.apply(x)
        return made
    return F.gelu(x)


class _Gelu(torch.autograd.Function):
    """The error function by Abramowitz and Stegun's 7.1.26, to 1.5e-7: a short polynomial and an exponential.

    The exponential is the one that the slope wants too. In half precision nobody sees the difference.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * _normal(x.float())[0]).type_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        below, bell = _normal(x.float())
        return (slope * (below + x * bell)).type_as(slope)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the normal distribution is below, and its density."""
    bell = torch.exp(-0.5 * x * x)
    t = 1 / (1 + 0.2316418882663604 * x.abs())  # 0.3275911 / sqrt(2)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * tail * bell
    return torch.where(x < 0, tail, 1 - tail), bell * 0.3989422804014327
