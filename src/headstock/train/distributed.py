"""The processes that train together: one, or as many as torchrun started."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from headstock.errors import LostProcessError, UserError
from headstock.io import rank_and_size

TIMEOUT = "HEADSTOCK_TIMEOUT"  # environment variable: seconds that a process waits for the others
MOST_SECONDS = 1800.0  # unless it is set; one process may tokenize a large corpus meanwhile
LOST = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words


@dataclass(frozen=True)
class DistributedContext:
    """One process's place among all. Rank 0 alone writes and speaks."""

    device: torch.device
    rank: int = 0
    size: int = 1
    guest: bool = False  # the processes had joined before, and whoever joined them also parts them

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, values: Iterable[float]) -> list[float]:
        """Numbers added up over all processes."""
        numbers = list(values)
        if self.size == 1:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return shared.tolist()

    def wrap(self, module: nn.Module, *, thawing: bool = False) -> nn.Module:
        """The module with gradients averaged over all processes; `thawing`, some weights may have none for a while."""
        if self.size == 1:
            return module
        places = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(module, device_ids=places, find_unused_parameters=thawing)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local for a while: all but the last micro-batch of a step need not travel."""
        return module.no_sync() if isinstance(module, nn.parallel.DistributedDataParallel) else nullcontext()

    def stopwatch(self, before: float, *, shared: bool) -> Callable[[], float]:
        """Seconds from now on, and `before`; shared, it is the first process's clock that all of them read."""
        began = time.monotonic() - before

        def elapsed() -> float:
            mine = time.monotonic() - began
            return self.all_reduce([mine if self.is_main else 0.0])[0] if shared else mine

        return elapsed

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def choose_device(wish: str = "auto") -> torch.device:
    if wish == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is to be found here; use --device cpu or auto")
    if wish == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: no Apple GPU is to be found here; use --device cpu or auto")
    if wish not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {wish}: must be auto, cpu, cuda or mps")
    return torch.device(wish)


@contextmanager
def process_group(device: str = "auto") -> Iterator[DistributedContext]:
    """This process's distributed while it lasts: alone, or all the processes that torchrun started.

    A process that is stopped or lost does not keep the others waiting for ever: they fail after a timeout.
    """
    seconds = timeout()
    distributed = init_distributed(device, seconds)
    try:
        yield distributed
    except RuntimeError as error:
        known = isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)
        if distributed.size == 1 or not known:
            raise
        raise LostProcessError(
            f"rank {distributed.rank} of {distributed.size}: another process does not answer; it was stopped or lost "
            f"(waited at most {seconds:.0f} s, which the environment variable {TIMEOUT} sets)"
        ) from error
    finally:
        if distributed.size > 1 and not distributed.guest and dist.is_initialized():
            dist.destroy_process_group()


def timeout() -> float:
    """Seconds that a process waits for the others."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else MOST_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(f"{TIMEOUT}: must be a number of seconds above 0, not {text!r}")
    return seconds


def init_distributed(device: str, seconds: float) -> DistributedContext:
    chosen = choose_device(device)
    if rank_and_size()[1] == 1:
        return DistributedContext(chosen)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    guest = dist.is_initialized()
    if not guest:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return DistributedContext(chosen, dist.get_rank(), dist.get_world_size(), guest)
