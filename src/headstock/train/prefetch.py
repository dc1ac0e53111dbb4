"""Computes the next items of a stream in background threads while the current one is in use."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Result = TypeVar("Result")

BUFFER = 2  # items that wait at most, so that memory stays flat however long the stream is
FIRST_CHUNK, MAX_CHUNK = 256, 4096  # a small first chunk returns the first results soon


class Prefetcher(Generic[T]):
    """Iterates over `items` in a background thread, at most `size` items ahead of the consumer.

    An exception in the thread is raised by the `next` call for that item. Leaving the context waits for the thread;
    `close` does not, because a thread that reads standard input cannot be interrupted.
    """

    def __init__(self, items: Iterable[T], *, size: int = BUFFER):
        self.queue: Queue[Any] = Queue(size)
        self.stopped = threading.Event()
        # the thread holds no reference to self, so an abandoned prefetcher is collected and closes itself
        arguments = (iter(items), self.queue, self.stopped)
        self.thread = threading.Thread(target=_fill, args=arguments, name="prefetch", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self.stopped.is_set():
            raise StopIteration
        item = self.queue.get()
        if isinstance(item, tuple):
            return item[0]
        self.close()
        raise StopIteration if item is None else item

    def close(self) -> None:
        """Let the thread stop after the item it is computing."""
        self.stopped.set()
        while True:  # the thread may be waiting for space in the queue
            try:
                self.queue.get_nowait()
            except Empty:
                break

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        self.thread.join()


def _fill(items: Iterator[T], queue: "Queue[Any]", stopped: threading.Event) -> None:
    """Put each item as a 1-tuple, then None, or the exception that ended the iteration."""
    try:
        for item in items:
            queue.put((item,))
            if stopped.is_set():
                return
        queue.put(None)
    except BaseException as error:
        queue.put(error)


def prefetch_map(function: Callable[[T], Result], items: Iterable[T], *, threads: int) -> Iterator[Result]:
    """`map(function, items)` in order, computed ahead by `threads` threads.

    More than one thread pays where `function` releases the GIL, as tokenizers do, and processors are idle.
    """
    with ThreadPoolExecutor(threads, "prefetch") as pool:
        jobs = Prefetcher(pool.submit(function, item) for item in items)
        try:
            for job in jobs:
                yield job.result()
        finally:
            jobs.close()


def growing_chunks(items: Iterable[T], *, max_size: int = MAX_CHUNK) -> Iterator[list[T]]:
    """All items in lists, each twice as long as the previous one up to `max_size`."""
    remaining, size = iter(items), min(FIRST_CHUNK, max_size)
    while chunk := list(islice(remaining, size)):
        yield chunk
        size = min(2 * size, max_size)
