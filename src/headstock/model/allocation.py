"""A limit on the memory that building a model may allocate, for sizes read from untrusted files."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZED = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}
MIN_BYTES = 4  # per value


class AllocationTooLarge(Exception):
    """An operation would have exceeded the allocation limit."""


class AllocationLimit(TorchFunctionMode):
    """Raises AllocationTooLarge before an operation with which all tensors created here would exceed `limit` bytes.

    The meta device would serve too, but importing its Python kernels loads torch's compiler, which takes seconds.
    """

    def __init__(self, limit: float):
        super().__init__()
        self.left = limit

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if MIN_BYTES * output_size(func, args, kwargs) > self.left:
            raise AllocationTooLarge
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not any(result is argument for argument in args):
            self.left -= result.nbytes
        return result


def output_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of values a call creates, as far as its arguments determine it."""
    if func in SIZED:
        size = kwargs.get("size", args[0] if len(args) == 1 or func is torch.full else args)
        return math.prod(size) if isinstance(size, tuple | list) else int(size)
    if func is torch.arange:
        return max(int(end) for end in (*args, kwargs.get("end", 0)) if isinstance(end, int | float))
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if func is torch.outer:
        return math.prod(tensor.numel() for tensor in tensors)
    if len(tensors) == 2:
        try:
            return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
        except RuntimeError:  # the operation does not broadcast
            return 0
    return 0
