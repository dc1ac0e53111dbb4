"""What to do when memory runs out: read half as many rows at once, twice as often, for the same step."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from headstock.errors import WorkError
from headstock.model.batch import Batch
from headstock.train.distributed import DistributedContext

Result = TypeVar("Result")
SIGNS = ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED", "out of memory")  # cuBLAS and cuDNN; CUDA, Triton and Apple's


class MicroBatching:
    """How many examples a process reads at once: as many as set, and half of that each time memory ran out."""

    def __init__(self, size: int | None, distributed: DistributedContext, say: Callable[[str], None]):
        self.size, self.distributed, self.say = size, distributed, say

    def fit(
        self,
        learn: Callable[[Sequence[Batch]], Result],
        batches: Sequence[Batch],
        again: Callable[[int], Sequence[Batch]],
        forget: Callable[[], None],
    ) -> Result:
        """What `learn` makes of a step's batches; cut `again` into smaller ones where these are too large.

        `forget` undoes what an attempt left behind. A step's sums are divided by the counts of the whole step, so its
        loss and gradients are the same however it is cut; only dropout draws other features to leave out.
        """
        said = self.size
        while (result := self.attempt(learn, batches)) is None:
            forget()  # here, not where it was caught: until then the error holds on to all that it passed through
            if self.distributed.device.type == "cuda":
                torch.cuda.empty_cache()
            tried = rows_of(batches)
            # batches that were made ahead may still be as large as those that did not fit
            self.size = self.size if self.size is not None and tried > self.size else -(-tried // 2)
            batches = again(self.size)
        if said != self.size:
            self.say(
                f"memory ran out: from now on {self.size} rows are read at once and {len(batches)} times a step, which "
                f"gives the same step (to begin with it: --set micro_batch={self.size})"
            )
        return result

    def attempt(self, learn: Callable[[Sequence[Batch]], Result], batches: Sequence[Batch]) -> Result | None:
        """The result, or nothing if there was too little memory but fewer rows may do."""
        try:
            return learn(batches)
        except (RuntimeError, MemoryError) as wrong:
            if not out_of_memory(wrong):
                raise
            rows, longest = rows_of(batches), max(batch.tokens.size(1) for batch in batches)
            short = str(wrong).splitlines()[0] if str(wrong) else type(wrong).__name__
        if self.distributed.size > 1:  # the others wait for this process's gradients by now, and cannot be told
            raise WorkError(f"out of memory with {rows} rows at once; begin anew with --set micro_batch ({short})")
        if rows == 1:
            raise WorkError(
                f"out of memory with a single row of {longest} tokens: choose a smaller length or model ({short})"
            )
        return None


def rows_of(batches: Sequence[Batch]) -> int:
    """The most examples that a batch has; one may have several rows."""
    return max(
        len(batch.tokens) if batch.example_ids is None else int(batch.example_ids.max()) + 1 for batch in batches
    )


def out_of_memory(wrong: BaseException) -> bool:
    known = isinstance(wrong, torch.OutOfMemoryError | MemoryError)
    return known or any(sign in str(wrong) for sign in SIGNS)
