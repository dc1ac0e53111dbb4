"""One optimizer step: forward and backward over the micro-batches, clip, update.

Everything that changes how a step runs is composed around `TrainingStep`: the module may be compiled, `GraphedStep`
replays CUDA graphs, and `MicroBatching` splits the batches when memory runs out. `execution.build_step` composes them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headstock.errors import WorkError
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import Task
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import precision
from headstock.train.meters import MetricAccumulator
from headstock.train.optimizers import update_weights
from headstock.train.settings import TrainSettings

logger = logging.getLogger(__name__)

# substrings of the messages of cuBLAS, cuDNN, CUDA, Triton and MPS
OOM_MESSAGES = ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED", "out of memory")

Split = Callable[[int, int], Sequence[Batch]]  # (step, micro-batch size) -> the step's batches at that size


class LossModule(nn.Module):
    """Model and task as one module from batch to summed losses, which DDP and torch.compile can wrap."""

    def __init__(self, model: Model, task: Task, *, smoothing: float):
        super().__init__()
        self.model, self.task, self.smoothing = model, task, smoothing

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Labels are smoothed in training alone."""
        return self.task.losses(self.model, batch, smoothing=self.smoothing if self.model.training else 0.0)


@dataclass
class Gradients:
    """What the backward passes of a step return beside the gradients themselves."""

    loss: Tensor  # mean over the whole step
    tokens: int  # over all processes
    metrics: MetricAccumulator


@dataclass
class StepResult(Gradients):
    gradient_norm: Tensor  # before clipping


class TrainingStep:
    """Computes gradients over micro-batches and updates the weights.

    Losses are sums. They are averaged once, over all micro-batches and processes: each is divided by the counts of
    the whole step.
    """

    zero_to_none = True  # whether gradients are freed between steps

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        optimizers: Sequence[Optimizer],
        settings: TrainSettings,
        distributed: DistributedContext,
    ):
        self.module, self.task, self.optimizers = module, task, optimizers
        self.settings, self.distributed = settings, distributed

    def __call__(self, step: int, batches: Sequence[Batch], lr: float) -> StepResult:
        return self.finish(self.accumulate(step, batches), lr)

    def accumulate(self, step: int, batches: Sequence[Batch]) -> Gradients:
        """Add up the gradients of a step's micro-batches."""
        device = self.distributed.device
        seed_dropout(device, derive_seed(self.settings.seed, step, self.distributed.rank, "dropout"))
        counts, tokens = total_counts(self.task, batches, self.distributed)
        loss, metrics = torch.zeros((), device=device), MetricAccumulator()
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else self.distributed.no_sync(self.module):
                part, sums = self.forward_backward(batch, counts)
            loss += part
            metrics.add(sums, {})
        metrics.add({}, counts)
        return Gradients(loss, tokens, metrics)

    def forward_backward(self, batch: Batch, counts: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the step's loss, and its summed losses by head."""
        with precision(self.distributed.device, self.settings.dtype):
            sums = self.module(batch.to(self.distributed.device))
        means = [self.task.weight(head) * sums[head] / max(1, count) for head, count in counts.items()]
        loss = torch.stack(means).sum()
        (loss * self.distributed.size).backward()  # DDP averages over processes; the counts already did
        return loss.detach(), sums

    def finish(self, gradients: Gradients, lr: float) -> StepResult:
        norm = self.update(lr)
        if self.distributed.size > 1:
            torch.distributed.all_reduce(gradients.loss)
        return StepResult(gradients.loss, gradients.tokens, gradients.metrics, norm)

    def update(self, lr: float) -> Tensor:
        """Update the weights; returns the gradient norm before clipping."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
        return update_weights(self.optimizers, self.settings.clip, to_none=True)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.zero_to_none)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of this device.

    torch.manual_seed seeds every kind of device, and for those that are not initialized it formats a stack trace.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda._get_device_index(device, optional=True)].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def total_counts(task: Task, batches: Sequence[Batch], distributed: DistributedContext) -> tuple[dict[str, int], int]:
    """Predictions by head, and tokens, over all processes."""
    local: dict[str, int] = {}
    tokens = 0
    for batch in batches:
        tokens += task.tokens(batch)
        for head, count in task.counts(batch).items():
            local[head] = local.get(head, 0) + count
    *counts, total = map(int, distributed.all_reduce([*local.values(), tokens]))
    return dict(zip(local, counts, strict=True)), total


class MicroBatching:
    """A training step whose micro-batch size is halved each time memory runs out.

    The losses of a step are divided by the counts of the whole step, so its loss and gradients do not depend on the
    micro-batch size; only the dropout masks differ, and the pairs of SetFit, which are those within a micro-batch.
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
    """Whether memory ran out; also in the capture of a CUDA graph, whose end then fails with another error."""
    if error.__context__ is not None and is_out_of_memory(error.__context__):
        return True
    is_memory_error = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_memory_error or any(message in str(error) for message in OOM_MESSAGES)
