"""Dropout and GELU with less arithmetic, for torch.compile to fuse into the surrounding kernels.

Fused pointwise kernels should be bound by memory traffic; Philox random numbers and the exact error function are bound
by arithmetic instead. Outside torch.compile these functions call torch.nn.functional.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation. (1 + tanh(y)) / 2 is sigmoid(2 y), which compiles to fewer instructions."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627 * x * x))  # 2 sqrt(2 / pi) (1, 0.044715)
    return F.gelu(x, approximate="tanh")


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout in training mode."""
    if torch.compiler.is_compiling() and x.is_cuda and x.numel() < 1 << 31:
        return hashed_dropout(x, p)
    return F.dropout(x, p)


def hashed_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout whose mask is a 32-bit hash of element index and seed, as in attention_triton's `_keep`.

    Philox needs ten times the arithmetic and saves the mask; this mask is recomputed in the backward pass from the
    seed.
    """
    first, second = torch.randint(-(1 << 31), 1 << 31, (2,), device=x.device).int()
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ first
    mixed = (index ^ ((index >> 16) & 0xFFFF) ^ second) * 2146121005  # >> extends the sign, which the mask removes
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * -2073254261
    return torch.where(mixed >= round(p * 2**32) - 2**31, x * (1 / (1 - p)), 0.0)


def gelu(x: Tensor) -> Tensor:
    """BERT's GELU, with the error function."""
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        y: Tensor = _PolynomialGelu.apply(x)
        return y
    return F.gelu(x)


class _PolynomialGelu(torch.autograd.Function):
    """The error function by Abramowitz and Stegun 7.1.26, whose error of 1.5e-7 is far below half precision.

    It takes a short polynomial and one exponential, which the gradient needs as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * _normal(x.float())[0]).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        cdf, density = _normal(x.float())
        return (grad * (cdf + x * density)).type_as(grad)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution function and its density."""
    exponential = torch.exp(-0.5 * x * x)
    t = 1 / (1 + 0.2316418882663604 * x.abs())  # 0.3275911 / sqrt(2)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * tail * exponential
    return torch.where(x < 0, tail, 1 - tail), exponential * 0.3989422804014327
