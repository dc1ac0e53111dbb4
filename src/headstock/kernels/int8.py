"""int8 linear layers for inference on a CPU.  M rows, K features, N outputs.

Weights are quantized once, with one scale per output. Inputs are quantized dynamically for each matmul, by the range of
all their values, so a result depends slightly on the other rows of its batch. CPUs with int8 instructions run these
matmuls about three times as fast as float32. Attention, norms and recurrent cells stay in float32.
"""

import warnings
from contextlib import nullcontext
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.kernels.backends import is_arm

MIN_ROWS = 8  # with fewer rows, reading the weights takes the time
MIN_WEIGHTS = 1 << 12  # smaller layers are not worth it

_engine_lock = Lock()


class Int8Linear(nn.Module):
    """A linear layer that runs in int8 for `MIN_ROWS` rows or more. Its weights must not change afterwards."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.scales = weight.detach().abs().amax(1).clamp(min=1e-12)  # (N,)
        self.packed = pack(weight.detach() / self.scales[:, None])

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < MIN_ROWS * x.size(-1):
            return F.linear(x, self.weight, self.bias)
        y = matmul(x.float(), self.packed)
        return (y.mul_(self.scales) if self.bias is None else torch.addcmul(self.bias, y, self.scales)).type_as(x)


def quantize_int8(model: nn.Module) -> None:
    """Replace the large linear layers of a model on a CPU by int8 layers.

    A module that is no nn.Linear but multiplies by its own `weight` and `bias` takes part by declaring an attribute
    `int8`, which is set to the function to call instead.
    """
    if next(model.parameters()).device.type != "cpu":
        raise UserError("int8 is for CPUs: add --device cpu (GPUs use 16 bits by default)")
    if engine() is None or not is_accurate():
        raise UserError("this build of torch has no fast and correct int8 matmul for this processor")
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and part.weight.numel() >= MIN_WEIGHTS:
                setattr(module, name, Int8Linear(part.weight, part.bias))
        if hasattr(module, "int8"):
            module.int8 = Int8Linear(module.weight, module.bias).forward  # type: ignore[arg-type,assignment]


def pack(weight: Tensor) -> Any:
    """Weights (N, K) between -1 and 1 as int8, in the layout of the CPU's library.

    They share one scale: per-output scales are slow on ARM and, in torch 2.13, wrong there once the number of rows
    changes.
    """
    backend: Any = torch.backends.quantized
    with _engine_lock:  # the engine is a process-wide setting
        previous, backend.engine = backend.engine, engine()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch deprecates this way of creating quantized tensors
                quantized = torch.quantize_per_tensor(weight, 1 / 127, 0, torch.qint8)
            return torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            backend.engine = previous


def matmul(x: Tensor, packed: Any) -> Tensor:
    """(..., K) -> (..., N). On x86 the sums of 8-bit products may overflow, so inputs are reduced to 7 bits."""
    with _engine_lock if is_arm() else nullcontext():  # on ARM two threads with the same weights crash, in torch 2.13
        y: Tensor = torch.ops.quantized.linear_dynamic(x, packed, not is_arm())
    return y


def engine() -> str | None:
    """The quantization library to use, if this build has it. torch's default on ARM is slower than float32."""
    name, supported = "onednn" if is_arm() else "x86", torch.backends.quantized.supported_engines
    return name if name in supported and hasattr(torch, "quantize_per_tensor") else None


@cache
def is_accurate() -> bool:
    """Whether int8 matmuls are close to float32 for several numbers of rows in succession."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.rand(32, 64, generator=generator) * 2 - 1, torch.rand(64, 64, generator=generator)
    packed = pack(weight)
    for rows in (x, x[:24] - 0.5, x[:40] * 3):
        expected = rows @ weight.T
        if (matmul(rows, packed) - expected).abs().max() > 0.05 * expected.abs().max():
            return False
    return True
