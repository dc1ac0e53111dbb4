"""The one training loop: every objective and every task is trained by these lines."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import DivergenceError, UserError
from headstock.kernels.backends import fast_cpu_kernels
from headstock.kernels.fp8 import supports_fp8
from headstock.model.batch import Batch, pad_to_multiple
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.budget import VALIDATIONS, Budget, ValidationBudget, due
from headstock.train.checkpointer import Checkpointer, DiskCheckpointer, MemoryCheckpointer
from headstock.train.compile import ExecutionMode, choose_execution_mode, compiled
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate, weights_swapped
from headstock.train.graphed_step import LENGTHS, GraphedStep
from headstock.train.loss_spikes import SpikeDetector
from headstock.train.oom import MicroBatching
from headstock.train.optimizers import EMA, lr_factor, make_optimizers
from headstock.train.prefetch import Prefetcher
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.signals import Interrupted, Interruption
from headstock.train.state import TrainState
from headstock.train.step import LossModule, MetricAccumulator, training_step


@dataclass(frozen=True)
class Event:
    """What a callback hears: a step was made, a line is due, or a validation is done."""

    kind: str  # "step", "log" or "valid"
    state: TrainState
    epoch: int
    steps_per_epoch: int
    expected_steps: int
    expected_seconds: float
    lr: float = 0.0
    gradient: float = 0.0
    tokens_per_second: float = 0.0
    of_tokens: bool = True  # the loss is that of tokens


Callback = Callable[[Event], None]


@fast_cpu_kernels()
def train(
    model: Model,
    task: Task,
    data: Any,
    settings: TrainSettings,
    *,
    run: RunFolder | None,
    distributed: DistributedContext,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda line: None,
) -> TrainState:
    """Train until the budget is spent, going on from the run's newest whole checkpoint if it has one.

    `data` has `train` and `valid`, of whatever the task reads. The run's weights are written at the end; without a
    run nothing is written, and the best weights are kept in memory.
    """
    length = sequence_length(model, settings)
    order = BatchSampler(
        task,
        data.train,
        length=length,
        batch=settings.batch,
        batch_tokens=settings.batch_tokens,
        seed=settings.seed,
    )
    budget = Budget.of(settings, order.steps_per_epoch)
    validations = ValidationBudget(settings, budget, length)
    check_possible(settings, distributed)
    model.to(distributed.device)
    optimizers = make_optimizers(model, settings)
    average = EMA(model, settings.ema) if settings.ema else None
    keeper: Checkpointer = DiskCheckpointer(run, settings, distributed) if run is not None else MemoryCheckpointer()
    progress = keeper.resume(model, optimizers, average, say)
    objective: nn.Module = LossModule(model, task, smoothing=settings.label_smoothing)
    way = choose_execution_mode(model, task, settings, budget, order, distributed, say)
    if way in ("compiled", "both"):
        objective = compiled(objective)
    objective = distributed.wrap(objective, thawing=settings.unfreeze is not None).train()
    replay = None
    if way in ("recorded", "both"):
        how: dict[str, Any] = {"clip": settings.clip, "dtype": settings.dtype, "device": distributed.device}
        replay = GraphedStep(objective, optimizers, **how, say=say)

    elapsed = distributed.stopwatch(progress.seconds, shared=budget.seconds is not None)
    # the loss of a few labelled rows is no mean over many predictions: it jumps in healthy runs
    spikes = SpikeDetector(say, progress.spikes) if task.is_language_model or task.fills_masks else None
    losses, seen, at_once = (
        LossMeter(spikes),
        MetricAccumulator(),
        MicroBatching(settings.micro_batch, distributed, say),
    )
    if progress.window:  # the next log line is the mean over steps before the checkpoint too
        losses.restore(progress.window["losses"])
        seen.restore(progress.window["seen"], distributed)
    cut = partial(cut_step, order, budget, progress, distributed, way)
    ahead = Prefetcher(lambda step: cut(step, at_once.size), progress.step, budget.steps)
    with Interruption() as interruption, ahead:
        # the clock is read for what is due once a step: between two readings nothing can be passed over, nor the end
        done = budget.share(progress.step, progress.seconds)
        while done < 1.0 and not out_of_patience(progress, settings):
            if settings.unfreeze:
                thaw(model, progress.step / order.steps_per_epoch / settings.unfreeze)
            if not model.training:  # a callback has used it; to ask every part of it takes long beside a small step
                objective.train()
            lr = settings.lr * lr_factor(budget.middle(progress.step, progress.seconds), settings)
            batches, fit = ahead.take(progress.step), partial(at_once.fit, again=partial(cut, progress.step))
            loss, gradient, counted = training_step(
                objective, task, batches, optimizers, lr, settings, progress.step, distributed, seen, fit, replay
            )
            if average is not None:
                average.update()
            progress.step += 1
            progress.tokens += counted
            progress.at_once = at_once.size
            # a gradient that is no number makes weights that are none, however good the loss was
            stop_if_not_finite(losses.add(progress.step, loss, gradient, counted), order, keeper)
            progress.spikes = spikes.count if spikes else 0
            progress.seconds = elapsed()

            after = budget.share(progress.step, progress.seconds)
            passed = partial(due, step=progress.step, before=done, after=after)
            event = partial(
                describe,
                progress=progress,
                order=order,
                budget=budget,
                losses=losses,
                lr=lr,
                of_tokens=task.is_language_model,
            )
            emit(callbacks, event("step"))
            if passed(settings.log_every, 50):
                stop_if_not_finite(losses.settle(), order, keeper)
                progress.loss = losses.mean()
                emit(callbacks, event("log", gradient=float(gradient)))
                losses.restart()
            paused = time.monotonic()
            if passed(settings.validate_every, validations.times(progress)):
                progress.train = seen.score(task, distributed)
                most, began = validations.examples(progress, on_cpu=distributed.device.type == "cpu"), elapsed()
                read = validate(
                    model, task, data.valid, average, progress, settings, length, distributed, most, rows=at_once.size
                )
                if progress.valid_pace is None:
                    progress.valid_examples, progress.valid_pace = read, (elapsed() - began) / max(1, read)
                lost = None if math.isfinite(progress.valid.get("loss", 0.0)) else progress.step
                stop_if_not_finite(lost, order, keeper, "the loss of held-out data")
                progress.seconds = elapsed()
                emit(callbacks, event("valid"))
            asked = agree(interruption.received, distributed)
            better = progress.best_step == progress.step
            if better or asked or passed(settings.checkpoint_every or settings.validate_every, VALIDATIONS):
                stop_if_not_finite(losses.settle(), order, keeper)
                progress.window = {"losses": losses.state(paused), "seen": seen.state(distributed)}
                keeper.keep(model, optimizers, average, progress)
            losses.pause(time.monotonic() - paused)
            progress.aside += time.monotonic() - paused
            progress.seconds = elapsed()
            if asked is not None:
                raise Interrupted(f"stopped after step {progress.step}{keeper.where(progress.step)}", asked)
            done = after
    keeper.finish(model, average, progress, settings, say)
    return progress


def sequence_length(model: Model, settings: TrainSettings) -> int:
    return settings.length or model.backbone.context or 256


def cut_step(
    order: BatchSampler,
    budget: Budget,
    progress: TrainState,
    distributed: DistributedContext,
    way: ExecutionMode,
    step: int,
    size: int | None,
) -> list[Batch]:
    """This process's batches of a step, which may be some steps ahead of the run's progress."""
    done, full = budget.share(step, progress.seconds), way != "plain"
    batches = order.micro_batches(
        step, size=size, rank=distributed.rank, world_size=distributed.size, full=full, done=done
    )
    if distributed.device.type != "cuda":
        return batches
    if hasattr(order.examples, "lengths"):  # kernels for lengths that are no multiple of eight are slower
        multiple = LENGTHS if way in ("recorded", "both") and order.batch_tokens is None else 8
        batches = [batch if batch.features is not None else pad_to_multiple(batch, multiple) for batch in batches]
    return [batch.pin_memory() for batch in batches]


def out_of_patience(progress: TrainState, settings: TrainSettings) -> bool:
    return settings.patience is not None and progress.worse >= settings.patience


def thaw(model: Model, opened: float) -> None:
    """Let move the heads, and as many of the backbone's stages, from the top, as have been `opened` by now."""
    heads = {id(parameter) for parameter in model.heads.parameters()}  # a head may share the embedding
    for height, stage in enumerate(reversed(model.backbone.parameters_by_layer())):
        for parameter in stage:
            parameter.requires_grad_(id(parameter) in heads or height < math.floor(opened + 1e-9))


class LossMeter:
    """The mean loss since the last line. A GPU's loss is looked at one step later, so that it need not wait for us."""

    def __init__(self, spikes: SpikeDetector | None = None) -> None:
        self.spikes = spikes
        self.waiting: tuple[int, Tensor, Any] | None = None  # a step, its loss and gradient norm, and a CUDA event
        self.restart()

    def restart(self) -> None:
        self.total, self.steps, self.tokens, self.since = 0.0, 0, 0, time.monotonic()

    def pause(self, seconds: float) -> None:
        """Do not count this time, in which nothing was trained."""
        self.since += seconds

    def state(self, now: float) -> dict[str, Any]:
        """What a checkpoint keeps, with the seconds that have passed until `now`."""
        sums = {"total": self.total, "steps": self.steps, "tokens": self.tokens, "seconds": now - self.since}
        return sums | {"spikes": self.spikes.state() if self.spikes else {}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.total, self.steps, self.tokens = state["total"], state["steps"], state["tokens"]
        self.since = time.monotonic() - state["seconds"]
        if self.spikes:
            self.spikes.restore(state.get("spikes", {}))

    def add(self, step: int, loss: Tensor, gradient: Tensor, tokens: int) -> int | None:
        """Keep a step's loss and gradient norm; the number of a step where one was not finite, if one was found."""
        self.tokens += tokens
        both = torch.stack([loss.detach(), gradient.detach().to(loss.dtype)])
        if not loss.is_cuda:
            self.waiting = (step, both, None)
            return self.settle()
        # sent off now: whoever asked for it later would wait for all that the GPU was told to do meanwhile
        sent, come = both.to("cpu", non_blocking=True), torch.cuda.Event()
        come.record()
        bad = self.settle()
        self.waiting = (step, sent, come)
        return bad

    def settle(self) -> int | None:
        if self.waiting is None:
            return None
        step, both, come = self.waiting
        self.waiting = None
        if come is not None:
            come.synchronize()
        loss, gradient = both.tolist()
        self.total += loss
        self.steps += 1
        if not math.isfinite(loss + gradient):
            return step
        if self.spikes:
            self.spikes.add(step, loss, gradient)
        return None

    def mean(self) -> float:
        return self.total / max(1, self.steps)

    def speed(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.since)


def describe(
    kind: str,
    *,
    progress: TrainState,
    order: BatchSampler,
    budget: Budget,
    losses: LossMeter,
    lr: float,
    of_tokens: bool,
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
        of_tokens=of_tokens,
    )


def emit(callbacks: Sequence[Callback], event: Event) -> None:
    for callback in callbacks:
        callback(event)


def check_possible(settings: TrainSettings, distributed: DistributedContext) -> None:
    if settings.batch % (distributed.size * (settings.micro_batch or 1)):
        parts = f"{distributed.size} processes" + (
            f" x micro_batch {settings.micro_batch}" if settings.micro_batch else ""
        )
        raise UserError(f"train.batch: {settings.batch} cannot be shared equally by {parts}")
    if settings.dtype == "float8" and not supports_fp8(distributed.device):
        raise UserError("train.dtype: float8 needs a GPU with 8-bit products, which NVIDIA's have since Ada and Hopper")


def agree(received: int | None, distributed: DistributedContext) -> int | None:
    """A signal that any process got, known to all of them at the same step."""
    if distributed.size == 1:
        return received
    shared = torch.tensor(received or 0, device=distributed.device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared) or None


def stop_if_not_finite(
    step: int | None, order: BatchSampler, keeper: Checkpointer, what: str = "the loss or its gradient"
) -> None:
    if step is None:
        return
    places = order.names(step - 1)
    shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    good = keeper.newest()
    last = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    raise DivergenceError(f"step {step}: {what} is not a finite number; the step read {shown}; {last}")


def validate(
    model: Model,
    task: Task,
    data: Any,
    average: EMA | None,
    progress: TrainState,
    settings: TrainSettings,
    length: int,
    distributed: DistributedContext,
    most: int,
    rows: int | None = None,
) -> int:
    """Measure on held-out data with the weights that would be kept, and note whether they are the best so far.

    Returns how many examples were read.
    """
    examples = task.examples(data, length=length)
    with weights_swapped(model, None if average is None else average.tensors):
        progress.valid = evaluate(
            model,
            task,
            examples,
            distributed=distributed,
            rows=rows or settings.batch // distributed.size,
            most=most,
            size=data.bytes,
            unknown=getattr(data, "unknown", None),
            dtype=settings.dtype,
        )
    merit = task.selection_score(progress.valid)
    progress.worse += 1
    if merit < progress.best_merit:
        progress.best_merit, progress.best_step, progress.worse = merit, progress.step, 0
    return min(most, len(examples))
