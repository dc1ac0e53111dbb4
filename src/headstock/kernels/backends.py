"""Libraries under torch that are passed by for a while, where what torch has beside them is faster."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch


class ScopedSwitch:
    """Counts those who want a switch turned, to `wish`, that is one for the whole process.

    Whoever is inside, in whatever thread or half-read stream, has the same; the last to leave puts back what was.
    """

    def __init__(self, is_on: Callable[[], bool], turn: Callable[[bool], None], *, wish: bool = False):
        self.is_on, self.turn, self.wish = is_on, turn, wish
        self.lock, self.inside, self.before = Lock(), 0, True

    @contextmanager
    def __call__(self, wanted: bool = True) -> Iterator[None]:
        if not wanted:
            yield
            return
        with self.lock:
            if not self.inside:
                self.before = self.is_on()
                self.turn(self.wish)
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.turn(self.before)


_mkldnn: Any = torch.backends.mkldnn
_cuda: Any = torch.backends.cuda
_onednn = ScopedSwitch(lambda: _mkldnn.enabled, lambda on: setattr(_mkldnn, "enabled", on))
_cudnn_attention = ScopedSwitch(lambda: _cuda.cudnn_sdp_enabled(), lambda on: _cuda.enable_cudnn_sdp(on))


@contextmanager
def fast_cpu_kernels() -> Iterator[None]:
    """For a while, products and cells on a CPU as they are fastest there. It concerns no other device."""
    with _onednn(onednn_is_slow()):
        yield


@cache
def onednn_is_slow() -> bool:
    """On ARM without long vectors oneDNN needs up to 1.7 times as long as the plain library that is beside it."""
    return is_arm() and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


@cache
def is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """For a while, attention by kernels that take every shape as it comes.

    On Hopper and Blackwell torch chooses cuDNN's first, in half precision, and that makes a plan on the processor for
    each new shape; of texts sorted by length nearly every batch has a shape of its own.
    """
    with _cudnn_attention(device.type == "cuda"):
        yield
