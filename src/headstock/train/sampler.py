"""Which examples form which step: a pure function of (seed, epoch, index), for any number of processes."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headstock.decoding.batching import batch_by_tokens
from headstock.model.batch import Batch, pad_to_multiple
from headstock.rng import RandomPermutation, generator
from headstock.tasks.base import Examples, Task, padded_batch
from headstock.train.budget import Budget
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext

POOL = 64  # steps whose examples are sorted by length together
MAX_IN_MEMORY = 1 << 22  # examples; the permutation of more is computed on demand


class BatchSampler:
    """Shuffles the data in every epoch and splits it into steps of `batch` examples or `batch_tokens` tokens."""

    def __init__(self, task: Task, data: Any, *, length: int, batch: int, seed: int, batch_tokens: int | None = None):
        self.task, self.data, self.length, self.batch, self.seed = task, data, length, batch, seed
        self.batch_tokens = batch_tokens
        self.lock = threading.RLock()  # a prefetching thread makes batches while the loop may ask for names
        self.epoch = -1
        self.set_epoch(0)
        self.steps_per_epoch = (
            math.ceil(len(self.order) / batch) if self.boundaries is None else len(self.boundaries) - 1
        )

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.examples: Examples = self.task.examples(self.data, length=self.length, seed=self.seed, epoch=epoch)
        count = len(self.examples)
        lengths = getattr(self.examples, "lengths", None)
        self.boundaries: np.ndarray | None = None  # of the steps, where they do not have `batch` examples each
        self.order: np.ndarray | RandomPermutation = RandomPermutation(count, self.seed, epoch, "order")
        if count > MAX_IN_MEMORY and lengths is None and self.batch_tokens is None:
            return
        random = generator(self.seed, epoch, "order")
        self.order = np.arange(count, dtype=np.uint32)
        random.shuffle(self.order)
        sizes = np.broadcast_to(self.length, count) if lengths is None else np.asarray(lengths)
        if self.batch_tokens is not None:
            steps = getattr(self, "steps_per_epoch", None)  # every epoch has as many as the first
            self.order, self.boundaries = steps_by_tokens(self.order, sizes, self.batch_tokens, random, steps)
        elif lengths is not None:
            self.order = steps_by_length(self.order, sizes, self.batch, random)

    def indices(self, step: int) -> list[int]:
        """The examples of a step. The last step of an epoch may be smaller, so that each example occurs once."""
        epoch, position = divmod(step, self.steps_per_epoch)
        with self.lock:
            self.set_epoch(epoch)
            begin, end = position * self.batch, (position + 1) * self.batch
            if self.boundaries is not None:
                begin, end = self.boundaries[position : position + 2]
            return self.order[begin:end].tolist()

    def micro_batches(
        self, step: int, *, size: int | None, rank: int, world_size: int, full: bool = False, done: float | None = None
    ) -> list[Batch]:
        """One process's part of a step in micro-batches of `size` examples; every process gets equally many.

        Where examples run short, or a compiled model needs `full` batches of one shape, padding examples without
        labels are added. `done` is the fraction of the run completed before this step.
        """
        with self.lock:
            if done is not None:
                self.task.progress = done
            everything = self.indices(step)
            full = full and self.batch_tokens is None  # steps of a number of tokens differ in their rows
            count = math.ceil((self.batch if full else len(everything)) / world_size)
            size = size or count
            own = everything[rank::world_size]
            batches = []
            for i in range(0, count, size):
                part = own[i : i + size]
                rows = min(size, count - i) if full else max(1, len(part))
                batches.append(padded_batch(self.examples, part, rows, filler=everything[0]))
            return batches

    def names(self, step: int) -> list[str]:
        with self.lock:
            return [self.examples.name(index) for index in self.indices(step)]


class StepLoader:
    """The micro-batches of each step for this process, in pinned memory where the device is a GPU."""

    PREFETCHED = 3  # steps
    # Rows of varying length are padded to a multiple of these: GPU kernels are slower for lengths that are not a
    # multiple of 8, and CUDA graphs pay only where shapes recur.
    LENGTH_MULTIPLE, GRAPHED_LENGTH_MULTIPLE = 8, 32

    def __init__(
        self,
        sampler: BatchSampler,
        budget: Budget,
        state: TrainState,
        distributed: DistributedContext,
        *,
        full: bool,
        graphs: bool,
    ):
        self.sampler, self.budget, self.state, self.distributed = sampler, budget, state, distributed
        self.full = full  # batches of one shape
        fixed = graphs and sampler.batch_tokens is None
        self.length_multiple = self.GRAPHED_LENGTH_MULTIPLE if fixed else self.LENGTH_MULTIPLE

    def __call__(self, step: int, size: int | None) -> list[Batch]:
        """The batches of a step, which may be ahead of the run's state."""
        batches = self.sampler.micro_batches(
            step,
            size=size,
            rank=self.distributed.rank,
            world_size=self.distributed.size,
            full=self.full,
            done=self.budget.fraction(step, self.state.seconds),
        )
        if self.distributed.device.type != "cuda":
            return batches
        if hasattr(self.sampler.examples, "lengths"):
            batches = [
                batch if batch.features is not None else pad_to_multiple(batch, self.length_multiple)
                for batch in batches
            ]
        return [batch.pin_memory() for batch in batches]

    def stream(self, size: Callable[[], int | None]) -> Iterator[list[Batch]]:
        """The remaining steps of the run."""
        steps = (
            itertools.count(self.state.step) if self.budget.steps is None else range(self.state.step, self.budget.steps)
        )
        return (self(step, size()) for step in steps)


def steps_by_length(order: np.ndarray, lengths: np.ndarray, batch: int, random: np.random.Generator) -> np.ndarray:
    """Reorder examples so that each step has similar lengths, with the steps in random order.

    Examples are sorted within pools of many steps, so that the composition of steps changes between epochs. The
    incomplete step stays last.
    """
    full = len(order) // batch * batch
    pools = np.split(order[:full], range(POOL * batch, full, POOL * batch)) if full else []
    # noise on the lengths: otherwise the examples of a small file always share a step with the same others
    ordered = [pool[np.argsort(lengths[pool] * random.uniform(0.95, 1.05, len(pool)), kind="stable")] for pool in pools]
    steps = np.concatenate([*ordered, order[:0]]).reshape(-1, batch)
    return np.concatenate([steps[random.permutation(len(steps))].reshape(-1), order[full:]])


def steps_by_tokens(
    order: np.ndarray, lengths: np.ndarray, tokens: int, random: np.random.Generator, steps: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reorder examples into steps of at most `tokens` tokens including padding; also the boundaries of the steps.

    If `steps` is given and the lengths have changed since the first epoch, the limit is adjusted to keep that number.
    """
    ordered = order[np.argsort(lengths[order], kind="stable")]
    sizes = lengths[ordered]
    boundaries = token_boundaries(sizes, tokens)
    if steps is not None and len(boundaries) - 1 != steps:
        boundaries = boundaries_for_steps(sizes, steps)
    parts = np.split(ordered, boundaries[1:-1])
    turn = random.permutation(len(parts))
    return np.concatenate([parts[i] for i in turn]), np.concatenate([[0], np.cumsum([len(parts[i]) for i in turn])])


def token_boundaries(sizes: np.ndarray, tokens: int) -> np.ndarray:
    """The boundaries of `batch_by_tokens` among examples of rising length."""
    return np.cumsum([0, *map(len, batch_by_tokens(sizes.tolist(), int, tokens))])


def boundaries_for_steps(sizes: np.ndarray, steps: int) -> np.ndarray:
    """Exactly `steps` steps: the smallest limit that needs no more, then the largest steps are halved."""
    low, high = 1, int(sizes[-1]) * len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(token_boundaries(sizes, middle)) - 1 <= steps else (middle + 1, high)
    boundaries = token_boundaries(sizes, low).tolist()
    while len(boundaries) - 1 < steps:
        rows = np.diff(boundaries)
        largest = int(rows.argmax())
        boundaries.insert(largest + 1, boundaries[largest] + int(rows[largest]) // 2)
    return np.array(boundaries)
