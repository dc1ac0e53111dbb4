"""What the device supports, and switches for the libraries below PyTorch."""

import gc
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Setting = TypeVar("Setting")


def is_ampere_or_newer(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU of compute capability 8.0 or higher."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_properties(device).major >= 8  # torch.compile treats the properties as constants


def triton_works(device: torch.device) -> bool:
    """Whether Triton kernels build and run on this device; a constant under torch.compile."""
    return _builds_triton(device)


# Equivalent to @torch.compiler.assume_constant_result, which would import torch._dynamo into every process.
triton_works._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _builds_triton(device: torch.device) -> bool:
    """Build one small kernel: Triton needs a C compiler and Python headers at run time."""
    if not is_ampere_or_newer(device) or find_spec("triton") is None:
        return False
    try:
        from headstock.kernels import cross_entropy_triton

        logits, labels = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        cross_entropy_triton.cross_entropy(logits, labels, 0.0, logits)
    except Exception as error:  # build failures have many types, and every kernel has a PyTorch fallback
        warnings.warn(f"Triton cannot build kernels here, so training is slower: {error}", stacklevel=2)
        return False
    return True


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matmuls of `x` run: the autocast dtype where autocast is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class ScopedSwitch(Generic[Setting]):
    """Sets a process-wide setting while at least one `with` block is active, then restores its previous value.

    Blocks may overlap in any order, across threads and suspended generators.
    """

    def __init__(self, read: Callable[[], Setting], write: Callable[[Setting], None], *, value: Setting):
        self.read, self.write, self.value = read, write, value
        self.lock, self.active, self.previous = Lock(), 0, value

    @contextmanager
    def __call__(self, enabled: bool = True) -> Iterator[None]:
        if not enabled:
            yield
            return
        with self.lock:
            if not self.active:
                self.previous = self.read()
                self.write(self.value)
            self.active += 1
        try:
            yield
        finally:
            with self.lock:
                self.active -= 1
                if not self.active:
                    self.write(self.previous)


_mkldnn: Any = torch.backends.mkldnn
_cuda: Any = torch.backends.cuda
_onednn = ScopedSwitch(lambda: _mkldnn.enabled, lambda on: setattr(_mkldnn, "enabled", on), value=False)
_cudnn_attention = ScopedSwitch(lambda: _cuda.cudnn_sdp_enabled(), lambda on: _cuda.enable_cudnn_sdp(on), value=False)
# Pauses the cyclic garbage collector: while many small objects are created that stay, it would scan them all again.
paused_gc = ScopedSwitch(gc.isenabled, lambda on: gc.enable() if on else gc.disable(), value=False)
_host_threads = ScopedSwitch(torch.get_num_threads, torch.set_num_threads, value=1)


@contextmanager
def fast_cpu_kernels() -> Iterator[None]:
    """Disable oneDNN while PyTorch's native CPU kernels are faster; no effect on other devices."""
    with _onednn(onednn_is_slow()):
        yield


@cache
def onednn_is_slow() -> bool:
    """On ARM without SVE, oneDNN takes up to 1.7 times as long as PyTorch's native kernels."""
    return is_arm() and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


@cache
def is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Exclude cuDNN from scaled_dot_product_attention, for batches of many different shapes.

    On Hopper and Blackwell PyTorch prefers cuDNN in half precision, which builds a plan on the CPU for each new shape.
    """
    with _cudnn_attention(device.type == "cuda"):
        yield


@contextmanager
def single_host_thread(device: torch.device) -> Iterator[None]:
    """Use one CPU thread while the model runs on another device.

    What is left for the CPU is small. With more threads, OpenMP's workers spin between operations and take the cores
    from the tokenizer (benchmarks/inference.py).
    """
    with _host_threads(device.type != "cpu"):
        yield
