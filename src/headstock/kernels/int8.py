"""Products in 8-bit integers, for using a finished model on a CPU.  M rows, K features, N outputs.

Weights become integers once, each output's by a scale of its own. What comes in is made small for every product, by the
least and the largest number in it, so that an answer depends a little on what is read beside it. Processors with
instructions for it multiply such integers about three times as fast. Attention, norms and recurrent cells stay as they
are.
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
from headstock.model.heads import LMHead
from headstock.model.model import Model

FEW = 8  # a product of fewer rows is bounded by reading the weights, and gains nothing
LEAST = 1 << 12  # so many weights are worth it

_alone = Lock()


class Int8Linear(nn.Module):
    """A layer with its product of many rows in 8 bits. It is for use alone: the weights are not to change."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.scales = weight.detach().abs().amax(1).clamp(min=1e-12)  # (N,)
        self.packed = pack(weight.detach() / self.scales[:, None])

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < FEW * x.size(-1):
            return F.linear(x, self.weight, self.bias)
        made = multiply(x.float(), self.packed)
        return (made.mul_(self.scales) if self.bias is None else torch.addcmul(self.bias, made, self.scales)).type_as(x)


def quantize_int8(model: Model) -> None:
    """From now on, the large products of a model on a CPU are made in 8 bits."""
    if model.device.type != "cpu":
        raise UserError("8-bit integers are for CPUs: say --device cpu too; a GPU takes 16 bits by itself")
    if engine() is None or not is_right():
        raise UserError(
            "this build of torch has no products of 8-bit integers that are fast and right on this processor"
        )
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and part.weight.numel() >= LEAST:
                setattr(module, name, Int8Linear(part.weight, part.bias))
        if isinstance(module, LMHead):  # its weights may be those of the embedding
            module.small = Int8Linear(module.weight, module.bias).forward


def pack(weight: Tensor) -> Any:
    """Weights (N, K) between -1 and 1 in integers, as the processor's library wants them.

    With one scale for all: with one for each output ARM's way is slow and, for another number of rows than the first
    time, wrong in torch 2.13.
    """
    libraries: Any = torch.backends.quantized
    with _alone:  # the library is chosen for the whole process
        before, libraries.engine = libraries.engine, engine()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch means to make such tensors in another way one day
                small = torch.quantize_per_tensor(weight, 1 / 127, 0, torch.qint8)
            return torch.ops.quantized.linear_prepack(small, None)
        finally:
            libraries.engine = before


def multiply(x: Tensor, packed: Any) -> Tensor:
    """(..., K) -> (..., N). Elsewhere than on ARM sums of full 8 bits may run over, so that 7 are taken of `x`."""
    with _alone if is_arm() else nullcontext():  # two threads with the same weights crash there, in torch 2.13
        made: Tensor = torch.ops.quantized.linear_dynamic(x, packed, not is_arm())
    return made


def engine() -> str | None:
    """The library that multiplies them. On ARM not the one torch would take, which is slower than 32 bits."""
    wanted, there = "onednn" if is_arm() else "x86", torch.backends.quantized.supported_engines
    return wanted if wanted in there and hasattr(torch, "quantize_per_tensor") else None


@cache
def is_right() -> bool:
    """Whether products are near those in single precision, for several numbers of rows one after the other."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.rand(32, 64, generator=draw) * 2 - 1, torch.rand(64, 64, generator=draw)
    packed = pack(weight)
    for rows in (x, x[:24] - 0.5, x[:40] * 3):
        wanted = rows @ weight.T
        if (multiply(rows, packed) - wanted).abs().max() > 0.05 * wanted.abs().max():
            return False
    return True
