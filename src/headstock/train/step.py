"""One move of the weights: from a step's batches to gradients, and from these to other weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import Task
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import precision
from headstock.train.graphed_step import GraphedStep
from headstock.train.optimizers import move
from headstock.train.settings import TrainSettings


class LossModule(nn.Module):
    """Model and task as one module from batch to summed losses, which is what DDP and torch.compile can wrap."""

    def __init__(self, model: Model, task: Task, *, smoothing: float):
        super().__init__()
        self.model, self.task, self.smoothing = model, task, smoothing

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.losses(self.model, batch, smoothing=self.smoothing)


def training_step(
    objective: nn.Module,
    task: Task,
    batches: list[Batch],
    optimizers: list[torch.optim.Optimizer],
    lr: float,
    settings: TrainSettings,
    step: int,
    distributed: DistributedContext,
    seen: "MetricAccumulator | None" = None,
    fit: Callable[..., "StepResult"] = lambda learn, batches, forget: learn(batches),
    replay: GraphedStep | None = None,
) -> tuple[Tensor, Tensor, int]:
    """One move of the weights; the loss, the gradient's length and how many tokens there were, in all processes.

    `fit` may cut the batches smaller where memory is too small for them.
    """
    learn = partial(gather, objective, task, settings=settings, step=step, distributed=distributed, replay=replay)
    to_none = replay is None  # recordings write gradients always to the same place
    learned = fit(learn, batches, forget=lambda: [optimizer.zero_grad(to_none) for optimizer in optimizers])
    if seen is not None:
        seen.take(learned.seen)
    if replay is not None:
        gradient = replay.moving(lr)
    else:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
        gradient = move(optimizers, settings.clip, to_none=True)
    if distributed.size > 1:
        torch.distributed.all_reduce(learned.loss)
    return learned.loss, gradient, learned.tokens


@dataclass
class StepResult:
    """What a step's batches gave, beside the gradients."""

    loss: Tensor
    tokens: int  # of all processes
    seen: "MetricAccumulator"


def gather(
    objective: nn.Module,
    task: Task,
    batches: Sequence[Batch],
    *,
    settings: TrainSettings,
    step: int,
    distributed: DistributedContext,
    replay: GraphedStep | None = None,
) -> StepResult:
    """The gradients of a step, in the weights.

    The mean is made once, over all micro-batches and processes: sums are divided by the counts of the whole step.
    """
    seed_dropout(distributed.device, derive_seed(settings.seed, step, distributed.rank, "dropout"))
    counts, tokens = total_counts(task, batches, distributed)
    whole, seen = torch.zeros((), device=distributed.device), MetricAccumulator()
    for place, batch in enumerate(batches):
        if replay is not None:
            loss, sums = replay(batch, {head: task.weight(head) / max(1, count) for head, count in counts.items()})
            whole += loss
            seen.add(sums)
            continue
        last = place == len(batches) - 1
        with nullcontext() if last else distributed.no_sync(objective):
            with precision(distributed.device, settings.dtype):
                sums = objective(batch.to(distributed.device))
            means = [task.weight(head) * sums[head] / max(1, count) for head, count in counts.items()]
            loss = torch.stack(means).sum()
            (loss * distributed.size).backward()  # DDP divides by the number of processes, and the counts already did
        whole += loss.detach()
        seen.add(sums)
    seen.count(counts)
    return StepResult(whole, tokens, seen)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generator that dropout draws from; torch.manual_seed would seed those of every device there may be."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def total_counts(task: Task, batches: Sequence[Batch], distributed: DistributedContext) -> tuple[dict[str, int], int]:
    """Predictions by head, and tokens, of all processes together."""
    mine: dict[str, int] = {}
    tokens = 0
    for batch in batches:
        tokens += task.tokens(batch)
        for head, count in task.counts(batch).items():
            mine[head] = mine.get(head, 0) + count
    *counts, every = map(int, distributed.all_reduce([*mine.values(), tokens]))
    return dict(zip(mine, counts, strict=True)), every


class MetricAccumulator:
    """What the training batches themselves showed since the validation before: a running score, for free."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            # a copy, as the memory of a recording is used again in the next step
            self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach().clone()

    def count(self, counts: dict[str, int]) -> None:
        for head, count in counts.items():
            self.counts[head] = self.counts.get(head, 0) + count

    def take(self, other: "MetricAccumulator") -> None:
        self.add(other.sums)
        self.count(other.counts)

    def state(self, distributed: DistributedContext) -> dict[str, Any]:
        """What a checkpoint keeps: the sums of all processes together, as exact numbers, and the counts."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([self.sums[name].item() for name in names])
        kinds = [str(self.sums[name].dtype).removeprefix("torch.") for name in names]
        return {"sums": dict(zip(names, zip(totals, kinds, strict=True), strict=True)), "counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any], distributed: DistributedContext) -> None:
        """Go on from a checkpoint; the sums of all processes are now the first one's."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: torch.tensor(
                total if distributed.is_main else 0, dtype=getattr(torch, kind), device=distributed.device
            )
            for name, (total, kind) in state["sums"].items()
        }

    def score(self, task: Task, distributed: DistributedContext) -> dict[str, float]:
        """The task's metrics over it, all processes together; then it begins anew."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([float(self.sums[name]) for name in names])
        counts, self.sums, self.counts = self.counts, {}, {}
        return task.score(dict(zip(names, totals, strict=True)), counts, size=0)
