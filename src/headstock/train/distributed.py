"""Distributed training: one process, or as many as torchrun started; and signals that stop all of them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headstock.errors import HeadstockError, LostProcessError, UserError
from headstock.io import rank_and_size
from headstock.train.sharding import is_sharded, without_gradient_sync

TIMEOUT = "HEADSTOCK_TIMEOUT"  # environment variable: seconds that a process waits for the others
DEFAULT_TIMEOUT = 1800.0  # one process may be tokenizing a large corpus meanwhile
LOST_MESSAGES = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo


@dataclass(frozen=True)
class DistributedContext:
    """This process's device and rank. Only rank 0 writes files and logs."""

    device: torch.device
    rank: int = 0
    size: int = 1
    borrowed: bool = False  # the caller had already initialized the process group, and will destroy it

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, values: Iterable[float]) -> list[float]:
        """Sums over all processes, in double precision."""
        numbers = list(values)
        if self.size == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.tolist()

    def wrap(self, module: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
        """Average the module's gradients over all processes, of which some weights may have none if said so."""
        if self.size == 1 or is_sharded(module):  # a sharded module does so itself
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, find_unused_parameters=find_unused_parameters)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Do not communicate gradients: only the last micro-batch of a step has to."""
        if is_sharded(module):
            return without_gradient_sync(module)
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def stopwatch(self, before: float, *, shared: bool) -> Callable[[], float]:
        """Seconds from now on plus `before`. If `shared`, all processes read the clock of rank 0."""
        began = time.monotonic() - before

        def elapsed() -> float:
            seconds = time.monotonic() - began
            return self.all_reduce([seconds if self.is_main else 0.0])[0] if shared else seconds

        return elapsed

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def choose_device(name: str = "auto") -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available; use --device cpu or auto")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: no Apple GPU is available; use --device cpu or auto")
    if name not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name}: must be auto, cpu, cuda or mps")
    return torch.device(name)


@contextmanager
def process_group(device: str = "auto") -> Iterator[DistributedContext]:
    """Join the process group of torchrun for a block; without torchrun, a context of one process.

    If a process is lost, the others fail after a timeout.
    """
    seconds, lost = timeout(), False
    distributed = init_distributed(device, seconds)
    try:
        yield distributed
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(message in str(error) for message in LOST_MESSAGES)
        if distributed.size == 1 or not lost:
            raise
        raise LostProcessError(
            f"rank {distributed.rank} of {distributed.size}: another process does not respond; it was stopped or lost "
            f"(timeout {seconds:.0f} s, set by the environment variable {TIMEOUT})"
        ) from error
    finally:
        if distributed.size > 1 and not distributed.borrowed and not lost and dist.is_initialized():
            dist.destroy_process_group()


def timeout() -> float:
    """Seconds that a process waits for the others."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(f"{TIMEOUT}: must be a number of seconds above 0, not {text!r}")
    return seconds


def init_distributed(device_name: str, seconds: float) -> DistributedContext:
    device = choose_device(device_name)
    if rank_and_size()[1] == 1:
        return DistributedContext(device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    borrowed = dist.is_initialized()
    if not borrowed:
        # gloo also on GPUs: for tensors in main memory (checkpoints, cpu_offload)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return DistributedContext(device, dist.get_rank(), dist.get_world_size(), borrowed)


# Ctrl-C and SIGTERM: the first asks the run to save and stop, the second stops it at once


class Interrupted(HeadstockError):
    """The run was asked to stop, and has saved its state."""

    def __init__(self, message: str, received: int):
        super().__init__(message)
        self.exit_code = 128 + received


class Interruption:
    """Records signals within the context, for the loop to check between steps."""

    def __init__(self, distributed: DistributedContext) -> None:
        self.distributed = distributed
        self.received: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self.handle)
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number

    def stops_validation(self) -> bool:
        """Whether to stop in the middle of a validation; several processes would have to agree, so they finish it."""
        return self.received is not None and self.distributed.size == 1

    def agreed(self) -> int | None:
        """A signal that any process received, known to all of them at the same step."""
        if self.distributed.size == 1:
            return self.received
        shared = torch.tensor(self.received or 0, device=self.distributed.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared) or None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.received is not None and error is None:  # after the last step, too late for the loop to notice
            signal.raise_signal(self.received)
