"""Ctrl-C and SIGTERM ask a run to save and leave; a second one leaves at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from headstock.errors import HeadstockError


class Interrupted(HeadstockError):
    """The user or the system asked us to stop; what was done is saved."""

    def __init__(self, message: str, received: int):
        super().__init__(message)
        self.exit_code = 128 + received


class Interruption:
    """While it is open, signals are kept for the loop to see between two steps."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not let us listen
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.hear)
        return self

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
