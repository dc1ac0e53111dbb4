"""Which examples make up which step: a pure function of (seed, epoch, index), the same for any number of processes."""

import math
import threading
from typing import Any

import numpy as np

from headstock.model.batch import Batch
from headstock.rng import RandomPermutation, generator
from headstock.tasks.base import Examples, Task, padded_batch

POOL = 64  # steps whose examples are sorted by length together
MANY = 1 << 22  # examples: the order of more is computed where it is asked for, since to hold it would grow with them


class BatchSampler:
    """Passes over the data, each in an order of its own, cut into steps of `batch` examples."""

    def __init__(self, task: Task, data: Any, *, length: int, batch: int, seed: int, batch_tokens: int | None = None):
        self.task, self.data, self.length, self.batch, self.seed = task, data, length, batch, seed
        self.batch_tokens = batch_tokens
        self.lock = threading.RLock()  # batches are made by a thread, and the loop may ask for names meanwhile
        self.epoch = -1
        self.enter(0)
        self.steps_per_epoch = math.ceil(len(self.order) / batch) if self.cuts is None else len(self.cuts) - 1

    def enter(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.examples: Examples = self.task.examples(self.data, length=self.length, seed=self.seed, epoch=epoch)
        count = len(self.examples)
        lengths = getattr(self.examples, "lengths", None)
        self.cuts: np.ndarray | None = None  # where steps begin and end, if not after every `batch` examples
        self.order: np.ndarray | RandomPermutation = RandomPermutation(count, self.seed, epoch, "order")
        if count > MANY and lengths is None and self.batch_tokens is None:
            return
        draw = generator(self.seed, epoch, "order")
        self.order = np.arange(count, dtype=np.uint32)
        draw.shuffle(self.order)
        sizes = np.broadcast_to(self.length, count) if lengths is None else np.asarray(lengths)  # rows are full else
        if self.batch_tokens is not None:
            steps = getattr(self, "steps_per_epoch", None)  # as many in every pass as in the first
            self.order, self.cuts = batch_by_tokens(self.order, sizes, self.batch_tokens, draw, steps)
            return
        if lengths is not None:
            self.order = batch_by_length(self.order, sizes, self.batch, draw)

    def indices(self, step: int) -> list[int]:
        """The examples of a step; the last step of a pass may be smaller, so that each example comes exactly once."""
        epoch, place = divmod(step, self.steps_per_epoch)
        with self.lock:
            self.enter(epoch)
            begin, end = place * self.batch, (place + 1) * self.batch
            if self.cuts is not None:
                begin, end = self.cuts[place : place + 2]
            return self.order[begin:end].tolist()

    def micro_batches(
        self, step: int, *, size: int | None, rank: int, world_size: int, full: bool = False, done: float | None = None
    ) -> list[Batch]:
        """One process's part of a step, cut to `size` rows at a time; every process gets as many parts.

        Where too few examples are left for a process, or a compiled model wants `full` parts of one shape,
        rows are added whose labels do not count. `done` is the share of the run that is over by then.
        """
        with self.lock:
            if done is not None:
                self.task.progress = done
            return self.parts(step, size, rank, world_size, full=full)

    def parts(self, step: int, size: int | None, rank: int, world_size: int, *, full: bool) -> list[Batch]:
        everyone = self.indices(step)
        full = full and self.batch_tokens is None  # steps of so many tokens have rows as they come
        most = math.ceil((self.batch if full else len(everyone)) / world_size)
        size = size or most
        mine = everyone[rank::world_size]
        batches = []
        for i in range(0, most, size):
            part = mine[i : i + size]
            wanted = min(size, most - i) if full else max(1, len(part))
            batches.append(padded_batch(self.examples, part, wanted, filler=everyone[0]))
        return batches

    def names(self, step: int) -> list[str]:
        with self.lock:
            return [self.examples.name(index) for index in self.indices(step)]


def batch_by_length(order: np.ndarray, lengths: np.ndarray, batch: int, draw: np.random.Generator) -> np.ndarray:
    """The same examples, those of like length in one step, and the steps in random order.

    Sorted within pools of many steps, so that who meets whom still changes from pass to pass. The step that is not
    full stays the last.
    """
    full = len(order) // batch * batch
    pools = [order[at : min(at + POOL * batch, full)] for at in range(0, full, POOL * batch)]
    # lengths are taken a little longer or shorter than they are: else texts of a small file always meet the same others
    ordered = [pool[np.argsort(lengths[pool] * draw.uniform(0.95, 1.05, len(pool)), kind="stable")] for pool in pools]
    steps = np.concatenate([*ordered, order[:0]]).reshape(-1, batch)
    return np.concatenate([steps[draw.permutation(len(steps))].reshape(-1), order[full:]])


def batch_by_tokens(
    order: np.ndarray, lengths: np.ndarray, tokens: int, draw: np.random.Generator, steps: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same examples in steps of at most so many tokens, padding too, and where the steps begin and end.

    Examples of one length meet others in every pass. Where there must be just so many `steps`, as in the passes after
    the first, and lengths have changed, the limit gives way.
    """
    alike = order[np.argsort(lengths[order], kind="stable")]
    sizes = lengths[alike]
    cuts = cut(sizes, tokens)
    if steps is not None and len(cuts) - 1 != steps:
        cuts = cut_into(sizes, steps)
    parts = np.split(alike, cuts[1:-1])
    turn = draw.permutation(len(parts))
    return np.concatenate([parts[i] for i in turn]), np.concatenate([[0], np.cumsum([len(parts[i]) for i in turn])])


def cut(sizes: np.ndarray, tokens: int) -> np.ndarray:
    """Where steps begin and end among examples of rising length, each filled as far as the limit allows."""
    cuts = [0]
    while (at := cuts[-1]) < len(sizes):
        near = sizes[at : at + max(1, tokens // max(1, int(sizes[at])))]
        padded = np.arange(1, len(near) + 1) * near  # all are as long as the last
        cuts.append(at + max(1, int(np.searchsorted(padded, tokens, side="right"))))
    return np.array(cuts)


def cut_into(sizes: np.ndarray, steps: int) -> np.ndarray:
    """The same into so many steps: by the least limit that makes no more, and then the fullest ones in two."""
    low, high = 1, int(sizes[-1]) * len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(sizes, middle)) - 1 <= steps else (middle + 1, high)
    cuts = cut(sizes, low).tolist()
    while len(cuts) - 1 < steps:
        rows = np.diff(cuts)
        widest = int(rows.argmax())
        cuts.insert(widest + 1, cuts[widest] + int(rows[widest]) // 2)
    return np.array(cuts)
