"""Products in 8 bits, for training on GPUs that do twice as many of them.  M rows, K features, N outputs, V vocabulary.

8 bits are a sign, an exponent of 4 and a fraction of 3, or for gradients 5 and 2. They tell numbers apart over 15 or 30
powers of two, and factors are scaled to lie there. To find a scale by looking for the largest number, all would have
to be read once more, which costs most of what is gained. So scales are known before:

- A vector of K features as norms make them has length sqrt(K), and no feature above that. So is what comes of it:
  values mixed by attention, and what a bend leaves. Whatever is above all the same is cut off there.
- Weights are few, so the largest is looked for.
- The gradient of a mean over M tokens is M times smaller than one token's, whose size 5 bits of exponent allow for.
- The gradient of a cross entropy lies between -1 and 1.

The gradient of weights is computed in 16 bits: it is a sum over tokens, for which both factors would have to be turned
round in memory first.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = 16  # products of 8 bits are made of so many features at once
LEAST = 2048  # rows that are worth it
WRONG = 2.0**15  # the scale of a cross entropy's gradient

_wanted = False


@contextmanager
def eight_bits(wanted: bool = True) -> Iterator[None]:
    """For a while, whatever learns does its large products in 8 bits. What only looks does not: see `serves`."""
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def has_eight_bits(device: torch.device) -> bool:
    """NVIDIA's since Ada and Hopper; a CPU can do it too, but slowly."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether this product is to be made in 8 bits."""
    if not _wanted or not torch.is_grad_enabled() or x.numel() < LEAST * x.size(-1):
        return False
    return weight.size(0) % SIZES == 0 and weight.size(1) % SIZES == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, back: bool = True) -> Tensor:
    """(..., K), (N, K), (N,) -> (..., N) in bfloat16; with `back`, the gradient of `x` is made in 8 bits too."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(torch.bfloat16)
        made: Tensor = _Linear.apply(rows, weight, None if bias is None else bias.to(torch.bfloat16), back)
    return made.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.back = bias is not None, back
        scale = reach(x.size(1))
        table, grain = shrunk(weight)
        return multiply(shrink(x, scale), table.t(), 1 / scale, grain, bias, fast=True)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.back:
            scale = 2.0 ** (6 + math.ceil(math.log2(len(slope))))  # 64 and more where a token moves features by one
            table, grain = shrunk(weight.t())
            by_x = multiply(shrink(slope, scale, BACKWARD), table.t(), 1 / scale, grain)
        else:
            by_x = slope @ weight.to(slope.dtype)
        return by_x, (slope.mT @ x).to(weight.dtype), slope.sum(0) if ctx.biased else None, None


def reach(features: int) -> float:
    """The scale by which vectors of so many features fit, whose length is the root of that."""
    return 2.0 ** math.floor(math.log2(torch.finfo(FORWARD).max / math.sqrt(features)))


def shrink(x: Tensor, scale: float, kind: torch.dtype = FORWARD) -> Tensor:
    most = torch.finfo(kind).max
    return (x.float() * scale).clamp(-most, most).to(kind)


def shrunk(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same in 8 bits, row after row in memory, and what one stands for."""
    most = torch.finfo(FORWARD).max
    grain = weight.detach().abs().amax().float().clamp(min=1e-12) / most
    return (weight.detach().float() / grain).clamp(-most, most).to(FORWARD).contiguous(), grain


def multiply(
    x: Tensor, turned: Tensor, scale: float, grain: Tensor, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """(M, K) by (K, N), whose columns lie together in memory. Sums are rounded more where `fast`: not for gradients."""
    how: Any = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return torch._scaled_mm(x, turned, scale_a=grain.new_full((), scale), scale_b=grain, **how)


class Table:
    """A head's weights (V, D), for its scores and for what their gradient wants of its vectors."""

    def __init__(self, weight: Tensor):
        self.rows, self.grain = shrunk(weight)
        self.columns = self.rows.t().contiguous()

    def scores(self, x: Tensor) -> Tensor:
        scale = reach(x.size(1))
        return multiply(shrink(x, scale), self.rows.t(), 1 / scale, self.grain, fast=True)

    def back(self, wrong: Tensor) -> Tensor:
        return multiply(wrong, self.columns.t(), 1 / WRONG, self.grain)
