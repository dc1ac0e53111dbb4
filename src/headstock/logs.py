"""Routing of the messages that headstock's modules log under the "headstock" logger."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("headstock")


class CallbackHandler(logging.Handler):
    """Passes the text of each record to a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record.getMessage())


@contextmanager
def log_level(level: int) -> Iterator[None]:
    """Set the level of the "headstock" logger for a block."""
    previous = LOGGER.level
    LOGGER.setLevel(level)
    try:
        yield
    finally:
        LOGGER.setLevel(previous)


@contextmanager
def messages_to(write: Callable[[str], None]) -> Iterator[None]:
    """Pass every message of level INFO and above to `write`, one call per message.

    Libraries that configure the root logger meanwhile, as onnxruntime does, do not make it print them a second time.
    """
    handler, propagate = CallbackHandler(write), LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.propagate = logging.getLogger().hasHandlers()
    try:
        with log_level(logging.INFO):
            yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = propagate


@contextmanager
def muted() -> Iterator[None]:
    """Drop messages below WARNING for a block, for runs nested in another command."""
    with log_level(max(logging.WARNING, LOGGER.level)):
        yield
