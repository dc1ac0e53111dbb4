"""Makes the batches of the next steps while a step is learned from, so that a GPU never waits for them."""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from types import TracebackType

from headstock.model.batch import Batch

STEPS = 3  # so many are ready at the most


class Prefetcher:
    """What `make` gives for each step from `first` to before `last`, in order, made by one thread of its own."""

    def __init__(self, make: Callable[[int], list[Batch]], first: int, last: int | None = None):
        self.make, self.first, self.last = make, first, last
        self.ready: Queue[tuple[int, list[Batch] | BaseException]] = Queue(STEPS)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.work, name="batches", daemon=True)

    def work(self) -> None:
        step = self.first
        while not self.stopped.is_set() and (self.last is None or step < self.last):
            try:
                made: list[Batch] | BaseException = self.make(step)
            except BaseException as wrong:  # whoever asks for this step must hear of it, whatever it is
                made = wrong
            self.ready.put((step, made))
            if isinstance(made, BaseException):
                return
            step += 1

    def take(self, step: int) -> list[Batch]:
        """The batches of a step; steps are asked for one after the other. Raises what went wrong in making them."""
        number, made = self.ready.get()
        assert number == step, f"step {step} was asked for, {number} is next"
        if isinstance(made, BaseException):
            raise made
        return made

    def __enter__(self) -> "Prefetcher":
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopped.set()
        while True:  # whoever waits for room finds it, and then that nobody asks any more
            try:
                self.ready.get_nowait()
            except Empty:
                break
        self.thread.join()
