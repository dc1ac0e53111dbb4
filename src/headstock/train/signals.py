"""Ctrl-C and SIGTERM: the first asks the run to save and stop, the second stops it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from headstock.errors import HeadstockError
from headstock.train.distributed import DistributedContext


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

    def agreed(self) -> int | None:
        """A signal that any process received, known to all of them at the same step."""
        if self.distributed.size == 1:
            return self.received
        shared = torch.tensor(self.received or 0, device=self.distributed.device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        return int(shared) or None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
