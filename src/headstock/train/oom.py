"""Recovers from running out of memory by splitting a step into smaller micro-batches."""

import logging
from collections.abc import Callable, Sequence

import torch

from headstock.errors import WorkError
from headstock.model.batch import Batch
from headstock.train.step import Gradients, StepResult, TrainingStep

logger = logging.getLogger(__name__)

# substrings of the messages of cuBLAS, cuDNN, CUDA, Triton and MPS
OOM_MESSAGES = ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED", "out of memory")

Split = Callable[[int, int], Sequence[Batch]]  # (step, micro-batch size) -> the step's batches at that size


class MicroBatching:
    """A training step whose micro-batch size is halved each time memory runs out.

    The losses of a step are divided by the counts of the whole step, so its loss and gradients do not depend on the
    micro-batch size; only the dropout masks differ.
    """

    def __init__(self, step: TrainingStep, split: Split, size: int | None):
        self.step, self.split = step, split
        self.size = size  # examples per micro-batch and process; None: all

    def __call__(self, step: int, batches: Sequence[Batch], lr: float) -> StepResult:
        before = self.size
        while (gradients := self.attempt(step, batches)) is None:
            # outside `attempt`: a live exception keeps the tensors of its frames alive
            self.step.zero_grad()
            if self.step.distributed.device.type == "cuda":
                torch.cuda.empty_cache()
            examples = max_examples(batches)
            # prefetched batches may still have the size that did not fit
            self.size = self.size if self.size is not None and examples > self.size else -(-examples // 2)
            batches = self.split(step, self.size)
        if before != self.size:
            logger.warning(
                f"out of memory: each step now runs as {len(batches)} micro-batches of {self.size} rows, which "
                f"computes the same gradients (to start with it: --set micro_batch={self.size})"
            )
        return self.step.finish(gradients, lr)

    def attempt(self, step: int, batches: Sequence[Batch]) -> Gradients | None:
        """None where memory ran out and smaller micro-batches may fit."""
        try:
            return self.step.accumulate(step, batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rows, longest = max_examples(batches), max(batch.tokens.size(1) for batch in batches)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self.step.distributed.size > 1:  # the other processes are already waiting for this one's gradients
            raise WorkError(
                f"out of memory with {rows} rows per micro-batch; restart with --set micro_batch ({reason})"
            )
        if rows == 1:
            raise WorkError(
                f"out of memory with a single row of {longest} tokens: choose a smaller length or model ({reason})"
            )
        return None


def max_examples(batches: Sequence[Batch]) -> int:
    """The examples of the largest batch; an example may have several rows."""
    return max(
        len(batch.tokens) if batch.example_ids is None else int(batch.example_ids.max()) + 1 for batch in batches
    )


def is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(message in str(error) for message in OOM_MESSAGES)
