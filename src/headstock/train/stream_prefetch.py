"""Makes the next part of a stream while the part before it is used, so that a model does not wait for a tokenizer."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from queue import Empty, Queue
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")

FIRST, AT_ONCE = 256, 4096  # items in the first part, so that answers come soon, and in those that follow at the most
WAITING = 2  # parts that are ready at the most: memory stays flat however long the stream is


def growing(items: Iterable[T], *, most: int = AT_ONCE) -> Iterator[list[T]]:
    """All items in parts, each twice as large as the one before it up to `most`."""
    waiting, size = iter(items), min(FIRST, most)
    while part := list(islice(waiting, size)):
        yield part
        size = min(2 * size, most)


def worked_ahead(work: Callable[[T], Made], items: Iterator[T], *, threads: int) -> Iterator[Made]:
    """What `work` makes of each item, in their order, made by so many threads; what goes wrong is raised in its turn.

    The work of several pays where it lets other threads run, as that of a tokenizer does, and the processors have
    nothing better to do.
    """
    if threads == 1:
        yield from made_ahead(work(item) for item in items)
        return
    with ThreadPoolExecutor(threads, "ahead") as pool, closing(made_ahead(pool.submit(work, i) for i in items)) as jobs:
        for job in jobs:
            yield job.result()


def made_ahead(items: Iterator[T]) -> Generator[T]:
    """The same items in their order, made by a thread of its own; what goes wrong there is raised here, in its turn."""
    ready: Queue[tuple[T] | BaseException | None] = Queue(WAITING)
    stopped = threading.Event()

    def work() -> None:
        try:
            for item in items:
                ready.put((item,))
                if stopped.is_set():
                    return
            ready.put(None)
        except BaseException as wrong:  # whoever asks for the next item must hear of it, whatever it is
            ready.put(wrong)

    # a thread that waits for someone's keyboard cannot be stopped, so nobody waits for it either
    threading.Thread(target=work, name="ahead", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stopped.set()
        while True:  # where the thread waits for room, it finds some, and then that nobody asks any more
            try:
                ready.get_nowait()
            except Empty:
                break
