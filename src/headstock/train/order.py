"""Which examples make up which step: a pure function of (seed, epoch, index), the same for any number of processes."""

import math
from typing import Any

import numpy as np

from headstock.model.batch import Batch
from headstock.randomness import generator
from headstock.tasks.task import Examples, Task, filled

POOL = 64  # steps whose examples are sorted by length together


class Order:
    """Passes over the data, each in an order of its own, cut into steps of `batch` examples."""

    def __init__(self, task: Task, data: Any, *, length: int, batch: int, seed: int):
        self.task, self.data, self.length, self.batch, self.seed = task, data, length, batch, seed
        self.epoch = -1
        self.enter(0)
        self.steps_per_epoch = math.ceil(len(self.examples) / batch)

    def enter(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.examples: Examples = self.task.examples(self.data, length=self.length, seed=self.seed, epoch=epoch)
        count = np.arange(len(self.examples), dtype=np.uint32)
        draw = generator(self.seed, epoch, "order")
        self.order = draw.permutation(count)
        if (lengths := getattr(self.examples, "lengths", None)) is not None:
            self.order = by_length(self.order, np.asarray(lengths), self.batch, draw)

    def indices(self, step: int) -> list[int]:
        """The examples of a step; the last step of a pass may be smaller, so that each example comes exactly once."""
        epoch, place = divmod(step, self.steps_per_epoch)
        self.enter(epoch)
        return self.order[place * self.batch : (place + 1) * self.batch].tolist()

    def micro_batches(self, step: int, *, size: int | None, rank: int, world: int, full: bool = False) -> list[Batch]:
        """One process's part of a step, cut to `size` rows at a time; every process gets as many parts.

        Where too few examples are left for a process, or a compiled model wants `full` parts of one shape,
        rows are added whose labels do not count.
        """
        everyone = self.indices(step)
        most = math.ceil((self.batch if full else len(everyone)) / world)
        size = size or most
        mine = everyone[rank::world]
        batches = []
        for i in range(0, most, size):
            part = mine[i : i + size]
            wanted = min(size, most - i) if full else max(1, len(part))
            batches.append(filled(self.examples, part, wanted, filler=everyone[0]))
        return batches

    def names(self, step: int) -> list[str]:
        return [self.examples.name(index) for index in self.indices(step)]


def by_length(order: np.ndarray, lengths: np.ndarray, batch: int, draw: np.random.Generator) -> np.ndarray:
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
