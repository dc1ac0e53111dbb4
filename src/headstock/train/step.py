"""One optimizer step: forward and backward over the micro-batches, clip, update.

Everything that changes how a step runs is composed around `TrainingStep`: the module may be compiled, `GraphedStep`
replays CUDA graphs, and `MicroBatching` (oom.py) splits the batches when memory runs out. `build_step` does it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import Task
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import precision
from headstock.train.optimizers import update_weights
from headstock.train.settings import TrainSettings


class LossModule(nn.Module):
    """Model and task as one module from batch to summed losses, which DDP and torch.compile can wrap."""

    def __init__(self, model: Model, task: Task, *, smoothing: float):
        super().__init__()
        self.model, self.task, self.smoothing = model, task, smoothing

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.losses(self.model, batch, smoothing=self.smoothing)


class MetricAccumulator:
    """Summed losses and counts of training batches, which give training metrics without another forward pass."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        for name, value in sums.items():
            # a copy: a CUDA graph overwrites its outputs in the next step
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach().clone()
        for head, count in counts.items():
            self.counts[head] = self.counts.get(head, 0) + count

    def state(self, distributed: DistributedContext) -> dict[str, Any]:
        """For a checkpoint: the exact sums over all processes with their dtypes, and the counts."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([self.sums[name].item() for name in names])
        dtypes = [str(self.sums[name].dtype).removeprefix("torch.") for name in names]
        return {"sums": dict(zip(names, zip(totals, dtypes, strict=True), strict=True)), "counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any], distributed: DistributedContext) -> None:
        """Continue from a checkpoint; rank 0 gets the sums of all processes."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: torch.tensor(
                total if distributed.is_main else 0, dtype=getattr(torch, dtype), device=distributed.device
            )
            for name, (total, dtype) in state["sums"].items()
        }

    def score(self, task: Task, distributed: DistributedContext) -> dict[str, float]:
        """The task's metrics over all processes; resets the accumulator."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([float(self.sums[name]) for name in names])
        counts, self.sums, self.counts = self.counts, {}, {}
        return task.score(dict(zip(names, totals, strict=True)), counts, size=0)


@dataclass
class StepResult:
    loss: Tensor  # mean over the whole step
    gradient_norm: Tensor  # before clipping
    tokens: int  # over all processes
    metrics: MetricAccumulator


@dataclass
class Gradients:
    """What the backward passes of a step return beside the gradients themselves."""

    loss: Tensor
    tokens: int
    metrics: MetricAccumulator


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
        return StepResult(gradients.loss, norm, gradients.tokens, gradients.metrics)

    def update(self, lr: float) -> Tensor:
        """Update the weights; returns the gradient norm before clipping."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
        return update_weights(self.optimizers, self.settings.clip, to_none=True)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.zero_to_none)


Step = Callable[[int, Sequence[Batch], float], StepResult]


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
