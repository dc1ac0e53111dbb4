"""Ctrl-C and SIGTERM: both stop a command where it is, also inside a library that does not return for minutes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

_abandoned: list[threading.Event] = []  # of the threads that a signal left running, set when they end


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised wherever Ctrl-C would raise a KeyboardInterrupt."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` in the main thread at a SIGTERM within the block, so that temporary files are removed."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers nowhere else
        yield
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def signal_of(stop: KeyboardInterrupt) -> int:
    return signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT


def interruptible(work: Callable[[], Result]) -> Result:
    """Call a function of a library in another thread, while this one stays able to handle signals.

    Python handles a signal when a library returns to it. After a signal the thread is abandoned: it cannot be stopped.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        done.wait()  # not `join`, after which an interrupted thread counts as ended (Python 3.11)
    except KeyboardInterrupt:
        _abandoned.append(done)
        raise
    if errors:
        raise errors[0]
    return results[0]


def exit_process(code: Any) -> NoReturn:
    """Exit, at once if an abandoned thread is still running: Python would wait for it, or crash in its library."""
    if not all(done.is_set() for done in _abandoned):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code or 0)
    sys.exit(code)
