"""Products in 8 bits, for training on GPUs that do twice as many of them.  M rows, K features, N outputs, V vocabulary.

8 bits are a sign, an exponent of 4 and a fraction of 3, or for gradients 5 and 2. They tell numbers apart over 15 or 30
powers of two, and factors are scaled to lie there. To find a scale by looking for the largest number, all would have
to be read once more, which costs most of what is gained. So scales are known before:

- A vector of K features as norms make them has length sqrt(K), and no feature above that. So is what comes of it:
  values mixed by attention, and what a bend leaves. Whatever is above all the same is cut off there.
- Weights are few, so the largest is looked for.
- The gradient of a mean over M tokens is M times smaller than one token's, whose size 5 bits of exponent allow for.
- The gradient of a cross entropy lies between -1 and 1.

The gradient of a layer's weights is computed in 16 bits: it is a sum over tokens, for which both factors would have to
be turned round in memory first. That of a head over the vocabulary is in 8, since one factor is narrow there and the
other need then not be written in 16 bits at all.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels.backends import ScopedSwitch
from headstock.kernels.capability import triton_works

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = 16  # products of 8 bits are made of so many features at once
LEAST = 2048  # rows that are worth it
WRONG = 2.0**15  # the scale of a cross entropy's gradient

_wanted = False


def _want(wanted: bool) -> None:
    global _wanted
    _wanted = wanted


# For a while, whatever learns does its large products in 8 bits. What only looks does not: see `serves`.
fp8_matmuls = ScopedSwitch(lambda: _wanted, _want, wish=True)


def supports_fp8(device: torch.device) -> bool:
    """NVIDIA's since Ada and Hopper; a CPU can do it too, but slowly."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether this product is to be made in 8 bits."""
    if not _wanted or not torch.is_grad_enabled() or x.numel() < LEAST * x.size(-1):
        return False
    return weight.size(0) % SIZES == 0 and weight.size(1) % SIZES == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K), (N, K), (N,) -> (..., N) in bfloat16; the gradient of `x` is made in 8 bits too."""
    return linear_apart(x, weight, bias, 1)[0]


def linear_apart(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...]:
    """The same in so many parts (..., N / parts), for when their gradients come one by one."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(torch.bfloat16)
        made = _Linear.apply(rows, weight, None if bias is None else bias.to(torch.bfloat16), parts)
    return tuple(part.unflatten(0, x.shape[:-1]) for part in made)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        scale = reach(x.size(1))
        table, grain = shrunk(weight)
        return multiply(shrink(x, scale), table.t(), 1 / scale, grain, bias, fast=True).chunk(parts, 1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scale = 64.0 * power_above(x.size(0))  # 64 and more where a token moves features by one
        if len(slopes) == 1:
            slope, small = slopes[0], shrink(slopes[0], scale, BACKWARD)
            by_bias = slope.sum(0) if ctx.biased else None
        else:
            slope, small, sums = gather(slopes, scale, ctx.biased)
            by_bias = sums.to(slope.dtype) if ctx.biased else None
        table, grain = shrunk(weight.t())
        by_x = multiply(small, table.t(), 1 / scale, grain)
        return by_x, (slope.mT @ x).to(weight.dtype), by_bias, None


@torch.library.custom_op("headstock::gather", mutates_args=())
def gather(parts: Sequence[Tensor], scale: float, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(M, D) gradients of several parts in one reading: (M, N) side by side, the same in 8 bits, (N,) their sums."""
    if triton_works(parts[0].device):
        from headstock.kernels import fp8_triton as fused_eight

        whole, small, _ = _gathered(parts)
        return whole, small, fused_eight.gather(parts, whole, small, scale, summed)
    whole = torch.cat(list(parts), 1)
    return whole, shrink(whole, scale, BACKWARD), whole.sum(0, dtype=torch.float32)


@gather.register_fake
def _gathered(parts: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    features = sum(part.size(1) for part in parts)
    whole = parts[0].new_empty(parts[0].size(0), features)
    return whole, whole.new_empty(whole.shape, dtype=BACKWARD), whole.new_empty(features, dtype=torch.float32)


@torch.library.custom_op("headstock::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    """(M, N) in 8 bits -> (N, M) row after row in memory, with zeros up to a multiple of what products want."""
    turned = _turned(x)
    if triton_works(x.device):
        from headstock.kernels import fp8_triton as fused_eight

        fused_eight.turn(x.view(torch.int8), turned.view(torch.int8))
    else:
        turned.copy_(F.pad(x.view(torch.int8), (0, 0, 0, turned.size(1) - len(x))).t().view(x.dtype))
    return turned


@turn.register_fake
def _turned(x: Tensor) -> Tensor:
    return x.new_empty(x.size(1), x.size(0) + -x.size(0) % SIZES)


def power_above(number: int) -> float:
    """The least power of two that is not below. By comparing only: of a number that a compiler leaves open it then
    remembers between which powers it lies, and not the number."""
    power = 1.0
    while power < number:
        power *= 2
    return power


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


class Head:
    """A head's weights (V, D) and bias (V,), and some vectors (M, D): scores, and what their gradient gives to each."""

    def __init__(self, weight: Tensor, bias: Tensor | None, hidden: Tensor):
        self.scale = reach(hidden.size(1))
        self.rows, self.grain = shrunk(weight)
        self.columns, self.bias = self.rows.t().contiguous(), bias
        self.hidden = shrink(hidden, self.scale)

    def scores(self, part: slice) -> Tensor:
        return multiply(self.hidden[part], self.rows.t(), 1 / self.scale, self.grain, self.bias, fast=True)

    def back(self, wrong: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(m, D) by vectors, (V, D) by weights, (V,) by the bias."""
        by_hidden = multiply(wrong, self.columns.t(), 1 / WRONG, self.grain)
        turned, one = turn(wrong), self.grain.new_full((), 1 / self.scale)
        by_weight = multiply(turned, turn(self.hidden[part]).t(), 1 / WRONG, one)
        return by_hidden, by_weight, None if self.bias is None else turned.float().sum(1) / WRONG
