"""The one training loop: every objective and every task is trained by these lines."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import UserError, WorkError
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.randomness import number
from headstock.tasks.task import Task
from headstock.train import checkpoint as checkpoints
from headstock.train.budget import Budget, due
from headstock.train.evaluate import measure, precision, weights_swapped
from headstock.train.optim import Average, lr_factor, make_optimizers
from headstock.train.order import Order
from headstock.train.run import Run
from headstock.train.settings import TrainSettings
from headstock.train.signals import Interrupted, Interruption
from headstock.train.world import World


@dataclass
class Progress:
    """How far a run is; a checkpoint carries it."""

    step: int = 0
    tokens: int = 0  # predictions made, padding not counted
    seconds: float = 0.0
    aside: float = 0.0  # seconds of them that went into validation and checkpoints
    loss: float = math.nan  # mean over the steps since the line before
    best_loss: float = math.inf
    best_step: int | None = None
    valid: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """What a watcher hears: a step was made, a line is due, or a validation is done."""

    kind: str  # "step", "log" or "valid"
    progress: Progress
    epoch: int
    steps_per_epoch: int
    expected_steps: int
    expected_seconds: float
    lr: float = 0.0
    gradient: float = 0.0
    tokens_per_second: float = 0.0


Watch = Callable[[Event], None]


class Objective(nn.Module):
    """Model and task as one module from batch to summed losses, which is what DDP and torch.compile can wrap."""

    def __init__(self, model: Model, task: Task, *, smoothing: float):
        super().__init__()
        self.model, self.task, self.smoothing = model, task, smoothing

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.losses(self.model, batch, smoothing=self.smoothing)


def train(
    model: Model,
    task: Task,
    data: Any,
    settings: TrainSettings,
    *,
    run: Run,
    world: World,
    watch: Sequence[Watch] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Progress:
    """Train until the budget is spent, going on from the run's newest whole checkpoint if it has one.

    `data` has `train` and `valid`, of whatever the task reads. The run's weights are written at the end.
    """
    length = settings.length or model.backbone.context or 256
    order = Order(task, data.train, length=length, batch=settings.batch, seed=settings.seed)
    budget = Budget.of(settings, order.steps_per_epoch)
    check_shares(settings, world)
    model.to(world.device)
    optimizers = make_optimizers(model, settings)
    average = Average(model, settings.ema) if settings.ema else None
    progress = resume(run, model, optimizers, average, say)
    if world.leads:
        run.rewind_metrics(progress.step)
    objective: nn.Module = Objective(model, task, smoothing=settings.label_smoothing)
    if settings.compile:
        objective = torch.compile(objective)  # type: ignore[assignment]
    objective = world.share(objective)

    elapsed = world.stopwatch(progress.seconds, shared=budget.seconds is not None)
    losses = Running()
    with Interruption() as interruption:
        while not budget.over(progress.step, progress.seconds):
            done = budget.share(progress.step, progress.seconds)
            lr = settings.lr * lr_factor(budget.middle(progress.step, progress.seconds), settings)
            batches = order.micro_batches(
                progress.step, size=settings.micro_batch, rank=world.rank, world=world.size, full=settings.compile
            )
            loss, gradient, counted = one_step(objective, task, batches, optimizers, lr, settings, progress.step, world)
            if average is not None:
                average.update(model)
            progress.step += 1
            progress.tokens += counted
            progress.seconds = elapsed()
            stop_if_not_finite(losses.add(progress.step, loss, counted), order, run)

            after = budget.share(progress.step, progress.seconds)
            passed = partial(due, step=progress.step, before=done, after=after)
            event = partial(describe, progress=progress, order=order, budget=budget, losses=losses, lr=lr)
            tell(watch, event("step"))
            if passed(settings.log_every, 50):
                stop_if_not_finite(losses.settle(), order, run)
                progress.loss = losses.mean()
                tell(watch, event("log", gradient=float(gradient)))
                losses.restart()
            paused = time.monotonic()
            if passed(settings.validate_every, 10):
                validate(model, task, data.valid, average, progress, settings, length, world)
                progress.seconds = elapsed()
                tell(watch, event("valid"))
            asked = agree(interruption.received, world)
            better = progress.best_step == progress.step
            if better or asked or passed(settings.checkpoint_every or settings.validate_every, 10):
                stop_if_not_finite(losses.settle(), order, run)
                keep_checkpoint(run, model, optimizers, average, progress, settings, world)
            losses.pause(time.monotonic() - paused)
            progress.aside += time.monotonic() - paused
            progress.seconds = elapsed()
            if asked is not None:
                where = run.checkpoints / f"step-{progress.step}"
                raise Interrupted(f"stopped after step {progress.step}, saved in {where}; go on with --resume", asked)
    finish(run, model, average, progress, settings, world)
    return progress


def one_step(
    objective: nn.Module,
    task: Task,
    batches: list[Batch],
    optimizers: list[torch.optim.Optimizer],
    lr: float,
    settings: TrainSettings,
    step: int,
    world: World,
) -> tuple[Tensor, Tensor, int]:
    """One move of the weights; the loss, the gradient's length and how many predictions there were, in all processes.

    The mean is made once, over all micro-batches and processes: sums are divided by the counts of the whole step.
    """
    objective.train()
    torch.manual_seed(number(settings.seed, step, world.rank, "dropout"))
    counts = total_counts(task, batches, world)
    whole = torch.zeros((), device=world.device)
    for place, batch in enumerate(batches):
        last = place == len(batches) - 1
        with nullcontext() if last else world.hold_back(objective):
            with precision(world.device, settings.dtype):
                sums = objective(batch.to(world.device))
            loss = torch.stack([total / max(1, counts[head]) for head, total in sums.items()]).sum()
            (loss * world.size).backward()  # DDP divides by the number of processes, and the counts already did
        whole += loss.detach()
    model_parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradient = nn.utils.clip_grad_norm_(model_parameters, settings.clip or math.inf)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if world.size > 1:
        torch.distributed.all_reduce(whole)
    return whole, gradient, max(counts.values())


def total_counts(task: Task, batches: list[Batch], world: World) -> dict[str, int]:
    mine: dict[str, int] = {}
    for batch in batches:
        for head, count in task.counts(batch).items():
            mine[head] = mine.get(head, 0) + count
    return {head: int(count) for head, count in zip(mine, world.total(mine.values()), strict=True)}


class Running:
    """The mean loss since the last line. A GPU's loss is looked at one step later, so that it need not wait for us."""

    def __init__(self) -> None:
        self.waiting: tuple[int, Tensor] | None = None
        self.restart()

    def restart(self) -> None:
        self.total, self.steps, self.tokens, self.since = 0.0, 0, 0, time.monotonic()

    def pause(self, seconds: float) -> None:
        """Do not count this time, in which nothing was trained."""
        self.since += seconds

    def add(self, step: int, loss: Tensor, tokens: int) -> int | None:
        """Keep a step's loss; the number of a step whose loss was not finite, if one was found."""
        bad = self.settle() if loss.is_cuda else None
        self.waiting = (step, loss)
        self.tokens += tokens
        return bad if loss.is_cuda else self.settle()

    def settle(self) -> int | None:
        if self.waiting is None:
            return None
        step, loss = self.waiting
        self.waiting = None
        value = float(loss)
        self.total += value
        self.steps += 1
        return None if math.isfinite(value) else step

    def mean(self) -> float:
        return self.total / max(1, self.steps)

    def speed(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.since)


def describe(
    kind: str,
    *,
    progress: Progress,
    order: Order,
    budget: Budget,
    losses: Running,
    lr: float,
    gradient: float = 0.0,
) -> Event:
    return Event(
        kind,
        progress,
        epoch=(progress.step - 1) // order.steps_per_epoch + 1,
        steps_per_epoch=order.steps_per_epoch,
        expected_steps=budget.expected_steps(progress.step, progress.seconds),
        expected_seconds=budget.expected_seconds(progress.step, progress.seconds),
        lr=lr,
        gradient=gradient,
        tokens_per_second=losses.speed(),
    )


def tell(watch: Sequence[Watch], event: Event) -> None:
    for watcher in watch:
        watcher(event)


def check_shares(settings: TrainSettings, world: World) -> None:
    if settings.batch % (world.size * (settings.micro_batch or 1)):
        parts = f"{world.size} processes" + (f" x micro_batch {settings.micro_batch}" if settings.micro_batch else "")
        raise UserError(f"train.batch: {settings.batch} cannot be shared equally by {parts}")


def agree(received: int | None, world: World) -> int | None:
    """A signal that any process got, known to all of them at the same step."""
    if world.size == 1:
        return received
    shared = torch.tensor(received or 0, device=world.device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared) or None


def stop_if_not_finite(step: int | None, order: Order, run: Run) -> None:
    if step is None:
        return
    places = order.names(step - 1)
    shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    good = checkpoints.newest_whole(run.checkpoints, say=lambda line: None)
    last = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    raise WorkError(f"step {step}: the loss is not a finite number; the step read {shown}; {last}")


def validate(
    model: Model,
    task: Task,
    data: Any,
    average: Average | None,
    progress: Progress,
    settings: TrainSettings,
    length: int,
    world: World,
) -> None:
    """Measure on held-out data with the weights that would be kept, and note whether they are the best so far."""
    with weights_swapped(model, None if average is None else average.tensors):
        progress.valid = measure(
            model,
            task,
            task.examples(data, length=length),
            world=world,
            rows=settings.micro_batch or settings.batch,
            most=max(1, settings.valid_tokens // length),
            size=data.bytes,
            dtype=settings.dtype,
        )
    if progress.valid["loss"] < progress.best_loss:
        progress.best_loss, progress.best_step = progress.valid["loss"], progress.step


def resume(
    run: Run,
    model: Model,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
    say: Callable[[str], None],
) -> Progress:
    """Go on from the newest whole checkpoint, or begin."""
    path = checkpoints.newest_whole(run.checkpoints, say)
    if path is None:
        return Progress()
    found = checkpoints.load(path)
    checkpoints.restore(found, model, optimizers, average)
    say(f"going on from {path}")
    known = {key: value for key, value in found.progress.items() if key != "average_steps"}
    return Progress(**known)


def keep_checkpoint(
    run: Run,
    model: Model,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
    progress: Progress,
    settings: TrainSettings,
    world: World,
) -> None:
    if world.leads:
        try:
            checkpoints.save(run.checkpoints, checkpoints.capture(model, optimizers, average, asdict(progress)))
            checkpoints.prune(run.checkpoints, keep=settings.keep, best=progress.best_step)
        except OSError as wrong:
            good = checkpoints.newest_whole(run.checkpoints, say=lambda line: None)
            last = f"the last whole one is {good}" if good else "there is none before it"
            raise WorkError(f"step {progress.step}: the checkpoint could not be written ({wrong}); {last}") from wrong
    world.wait()


def finish(
    run: Run, model: Model, average: Average | None, progress: Progress, settings: TrainSettings, world: World
) -> None:
    """Put the weights that count into the model and into the run's folder."""
    best = run.checkpoints / f"step-{progress.best_step}"
    if settings.weights == "best" and progress.best_step not in (None, progress.step) and best.is_dir():
        found = checkpoints.load(best)
        model.load_tensors(found.average or found.model, source=str(best))
    elif average is not None:
        model.load_tensors(average.tensors, source="the averaged weights")
    if world.leads:
        run.save_weights(model.tensors())
    world.wait()
