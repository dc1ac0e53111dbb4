"""A limit on what building a model may allocate, for sizes that come from a file and cannot be trusted."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZED = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}
BYTES = 4  # of a value, at least


class AllocationTooLarge(Exception):
    """More would have been allocated than the limit allows."""


class AllocationLimit(TorchFunctionMode):
    """Raises AllocationTooLarge before a tensor is made with which all tensors made here would exceed `limit` bytes.

    The meta device would tell as much, but its kernels are Python that imports torch's compiler, which takes seconds.
    """

    def __init__(self, limit: float):
        super().__init__()
        self.left = limit

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if BYTES * values_made(func, args, kwargs) > self.left:
            raise AllocationTooLarge
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not any(result is part for part in args):
            self.left -= result.nbytes
        return result


def values_made(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many values a call makes, as far as its arguments say."""
    if func in SIZED:
        size = kwargs.get("size", args[0] if len(args) == 1 or func is torch.full else args)
        return math.prod(size) if isinstance(size, tuple | list) else int(size)
    if func is torch.arange:
        return max(int(end) for end in (*args, kwargs.get("end", 0)) if isinstance(end, int | float))
    tensors = [part for part in args if isinstance(part, Tensor)]
    if func is torch.outer:
        return math.prod(part.numel() for part in tensors)
    if len(tensors) == 2:
        try:
            return math.prod(torch.broadcast_shapes(*(part.shape for part in tensors)))
        except RuntimeError:  # not an operation that broadcasts
            return 0
    return 0
