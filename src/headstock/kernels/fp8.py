"""fp8 matmuls for training.  M rows, K features, N outputs, V vocabulary.

e4m3 (activations, weights) and e5m2 (gradients) cover 15 and 30 powers of two, so tensors are scaled first. Finding a
scale from the largest value reads the whole tensor once more, which costs most of the gain. Most scales are known:

- Normalized vectors of K features have length sqrt(K), so no feature exceeds sqrt(K). The same holds for what derives
  from them: attention outputs and activations. Larger values are clamped.
- Weights are few, so their scale is the largest value.
- The gradient of a mean over M tokens is M times smaller than that of one token, whose size 5 exponent bits allow for.
- The gradient of a cross entropy lies between -1 and 1.

The weight gradient of a layer stays in bfloat16: it sums over tokens, so both factors would have to be transposed
first. That of the vocabulary layer is in fp8, since one of its factors is narrow and the other is never written in
bfloat16.

Training GPT-2 124M on an H200 runs at 722,596 tokens/s in fp8 and 598,814 in bfloat16 (docs/evidence/performance.md).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels.backends import ScopedSwitch, triton_works

VALUE, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # fp8 matmuls need dimensions that are multiples of this
MIN_ROWS = 2048  # fewer rows gain nothing
CROSS_ENTROPY_SCALE = 2.0**15

_enabled = False


def _set_enabled(enabled: bool) -> None:
    global _enabled
    _enabled = enabled


# Within this context, training runs its large matmuls in fp8; evaluation does not (see `applies`).
fp8_matmuls = ScopedSwitch(lambda: _enabled, _set_enabled, value=True)


def supports_fp8(device: torch.device) -> bool:
    """NVIDIA GPUs since Ada and Hopper; CPUs too, but slowly."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def applies(x: Tensor, weight: Tensor) -> bool:
    """Whether this matmul should run in fp8."""
    if not _enabled or not torch.is_grad_enabled() or x.numel() < MIN_ROWS * x.size(-1):
        return False
    return weight.size(0) % MULTIPLE == 0 and weight.size(1) % MULTIPLE == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K), (N, K), (N,) -> (..., N): torch.nn.functional.linear, or where it applies the same in fp8."""
    return split_linear(x, weight, bias, 1)[0] if applies(x, weight) else F.linear(x, weight, bias)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...]:
    """An fp8 linear layer as `parts` tensors (..., N / parts) in bfloat16, whose gradients may arrive separately.

    The gradient of `x` is computed in fp8 too.
    """
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(torch.bfloat16)
        outputs = _Linear.apply(rows, weight, None if bias is None else bias.to(torch.bfloat16), parts)
    return tuple(part.unflatten(0, x.shape[:-1]) for part in outputs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        scale = activation_scale(x.size(1))
        fp8_weight, unit = quantize_weight(weight)
        return matmul(quantize(x, scale), fp8_weight.t(), 1 / scale, unit, bias, fast=True).chunk(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scale = 64.0 * next_power_of_2(x.size(0))  # 64 or more where one token's gradient is 1
        if len(grads) == 1:
            grad, fp8_grad = grads[0], quantize(grads[0], scale, GRADIENT)
            bias_grad = grad.sum(0) if ctx.has_bias else None
        else:
            grad, fp8_grad, sums = concat_and_quantize(grads, scale, ctx.has_bias)
            bias_grad = sums.to(grad.dtype) if ctx.has_bias else None
        fp8_weight, unit = quantize_weight(weight.t())
        x_grad = matmul(fp8_grad, fp8_weight.t(), 1 / scale, unit)
        return x_grad, (grad.mT @ x).to(weight.dtype), bias_grad, None


@torch.library.custom_op("headstock::concat_and_quantize", mutates_args=())
def concat_and_quantize(parts: Sequence[Tensor], scale: float, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (M, D) of several parts in one pass: (M, N) side by side, the same in fp8, (N,) sums over rows."""
    if triton_works(parts[0].device):
        from headstock.kernels import fp8_triton

        grad, fp8_grad, _ = _concat_outputs(parts)
        return grad, fp8_grad, fp8_triton.concat_and_quantize(parts, grad, fp8_grad, scale, with_sums)
    grad = torch.cat(list(parts), 1)
    return grad, quantize(grad, scale, GRADIENT), grad.sum(0, dtype=torch.float32)


@concat_and_quantize.register_fake
def _concat_outputs(parts: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    features = sum(part.size(1) for part in parts)
    grad = parts[0].new_empty(parts[0].size(0), features)
    return grad, grad.new_empty(grad.shape, dtype=GRADIENT), grad.new_empty(features, dtype=torch.float32)


@torch.library.custom_op("headstock::transpose_fp8", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    """(M, N) in fp8 -> contiguous (N, M), zero-padded to a multiple of `MULTIPLE` columns."""
    transposed = _transposed(x)
    if triton_works(x.device):
        from headstock.kernels import fp8_triton

        fp8_triton.transpose(x.view(torch.int8), transposed.view(torch.int8))
    else:
        transposed.copy_(F.pad(x.view(torch.int8), (0, 0, 0, transposed.size(1) - len(x))).t().view(x.dtype))
    return transposed


@transpose.register_fake
def _transposed(x: Tensor) -> Tensor:
    return x.new_empty(x.size(1), x.size(0) + -x.size(0) % MULTIPLE)


def next_power_of_2(number: int) -> float:
    """The least power of two that is not below `number`.

    Comparisons alone: for a dynamic size torch.compile then guards on the interval between two powers, not on the size.
    """
    power = 1.0
    while power < number:
        power *= 2
    return power


def activation_scale(features: int) -> float:
    """The scale at which vectors of length sqrt(features) fit into e4m3."""
    return 2.0 ** math.floor(math.log2(torch.finfo(VALUE).max / math.sqrt(features)))


def quantize(x: Tensor, scale: float, dtype: torch.dtype = VALUE) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in e4m3, contiguous, and the value of one unit."""
    limit = torch.finfo(VALUE).max
    unit = weight.detach().abs().amax().float().clamp(min=1e-12) / limit
    return (weight.detach().float() / unit).clamp(-limit, limit).to(VALUE).contiguous(), unit


def matmul(
    x: Tensor, transposed: Tensor, scale: float, unit: Tensor, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """(M, K) by (K, N), column-major, in bfloat16; `fast` accumulates less precisely and is not for gradients."""
    options: Any = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return torch._scaled_mm(x, transposed, scale_a=unit.new_full((), scale), scale_b=unit, **options)


class VocabularyLayer:
    """A linear layer (V, D) over the vocabulary and its input (M, D) in fp8."""

    def __init__(self, weight: Tensor, bias: Tensor | None, hidden: Tensor):
        self.scale = activation_scale(hidden.size(1))
        self.weight, self.unit = quantize_weight(weight)
        self.weight_transposed, self.bias = self.weight.t().contiguous(), bias
        self.hidden = quantize(hidden, self.scale)

    def logits(self, part: slice) -> Tensor:
        """(m, V) of some rows."""
        return matmul(self.hidden[part], self.weight.t(), 1 / self.scale, self.unit, self.bias, fast=True)

    def backward(self, grad: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """From the logits' gradient (m, V) in fp8: those of hidden (m, D), weight (V, D) and bias (V,)."""
        hidden_grad = matmul(grad, self.weight_transposed.t(), 1 / CROSS_ENTROPY_SCALE, self.unit)
        transposed, unit = transpose(grad), self.unit.new_full((), 1 / self.scale)
        weight_grad = matmul(transposed, transpose(self.hidden[part]).t(), 1 / CROSS_ENTROPY_SCALE, unit)
        return hidden_grad, weight_grad, None if self.bias is None else transposed.float().sum(1) / CROSS_ENTROPY_SCALE
