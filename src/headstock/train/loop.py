"""The training loop, shared by every objective and task."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from headstock.errors import DivergenceError
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.activation_checkpointing import restore_blocks
from headstock.train.budget import VALIDATIONS, Budget, Milestones, ValidationBudget
from headstock.train.callbacks import Callback, Event, emit
from headstock.train.checkpoint import Checkpointer, DiskCheckpointer, TrainState
from headstock.train.distributed import DistributedContext, Interrupted, Interruption
from headstock.train.evaluate import Validator
from headstock.train.execution import build_module, build_step, check_settings, choose_execution_mode, uses_graphs
from headstock.train.meters import LossMeter, MetricAccumulator, SpikeDetector
from headstock.train.optimizers import EMA, lr_factor, make_optimizers
from headstock.train.prefetch import Prefetcher
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler, StepLoader
from headstock.train.settings import TrainSettings
from headstock.train.sharding import full_tensors, is_sharded

LOG_LINES = 50  # per run, unless set otherwise


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
) -> TrainState:
    """Train until the budget is spent, resuming from the run's newest valid checkpoint if there is one.

    `data` has `train` and `valid` in the task's own form. The final weights are written to the run; without a run,
    nothing is written and the best weights are kept in memory.
    """
    check_settings(settings, distributed)
    length = sequence_length(model, settings)
    batch, batch_tokens, seed = settings.batch, settings.batch_tokens, settings.seed
    sampler = BatchSampler(task, data.train, length=length, batch=batch, batch_tokens=batch_tokens, seed=seed)
    budget = Budget.of(settings, sampler.steps_per_epoch)
    validation_budget = ValidationBudget(settings, budget, length)
    module = build_module(model, task, settings, distributed)
    full_model, model, sharded = model, module.model, is_sharded(module)
    optimizers = make_optimizers(model, settings)
    ema = EMA(model, settings.ema) if settings.ema else None
    checkpointer = Checkpointer(model, optimizers, ema, settings)
    if run is not None:
        checkpointer = DiskCheckpointer(model, optimizers, ema, settings, run=run, distributed=distributed)
    state = checkpointer.resume()

    mode = choose_execution_mode(model, task, settings, budget, sampler, distributed)
    loader = StepLoader(sampler, budget, state, distributed, full=mode != "eager", graphs=uses_graphs(mode))
    step = build_step(module, task, optimizers, settings, mode, distributed, split=loader)
    step.size = state.micro_batch or step.size  # what fitted into memory before an interruption
    diverged = partial(raise_diverged, sampler=sampler, checkpointer=checkpointer)
    # the loss of a few labelled rows varies too much between healthy steps
    spikes = SpikeDetector(state.spikes) if task.is_language_model or not task.is_labelled else None
    meter, train_metrics = LossMeter(diverged, spikes), MetricAccumulator()
    if state.window:
        meter.restore(state.window["losses"])
        train_metrics.restore(state.window["seen"], distributed)
    clock = distributed.stopwatch(state.seconds, shared=budget.seconds is not None)
    losses = module if sharded else None
    validate = Validator(model, task, data.valid, settings, validation_budget, distributed, ema, clock, losses)
    milestones = Milestones(budget, state)
    steps_per_epoch, has_perplexity = sampler.steps_per_epoch, task.is_language_model
    event = partial(Event, state=state, budget=budget, steps_per_epoch=steps_per_epoch, has_perplexity=has_perplexity)

    prefetcher = Prefetcher(loader.stream(lambda: step.size), size=StepLoader.PREFETCHED)
    with Interruption(distributed) as interruption, prefetcher, checkpointer:
        while state.validation_due or (milestones.done < 1.0 and not out_of_patience(state, settings)):
            lr = settings.lr * lr_factor(budget.midpoint(state.step, state.seconds), settings)
            if not state.validation_due:  # otherwise the run was stopped after the step and before its validation
                if settings.unfreeze:
                    unfreeze_layers(model, state.step / sampler.steps_per_epoch / settings.unfreeze)
                if not model.training:  # a callback has used it; `train()` visits every module, which is slow
                    model.train()
                result = step(state.step, next(prefetcher), lr)
                if ema is not None:
                    ema.update()
                state.step += 1
                state.tokens += result.tokens
                state.micro_batch = step.size
                train_metrics.add(result.metrics.sums, result.metrics.counts)
                meter.add(state.step, result.loss, result.gradient_norm, result.tokens)
                state.spikes = spikes.count if spikes else 0
                state.seconds = clock()
                milestones.advance(state)
                emit(callbacks, event("step", lr=lr))

                if milestones.due(settings.log_every, LOG_LINES):
                    meter.flush()
                    state.loss = meter.mean()
                    gradient_norm, speed = float(result.gradient_norm), meter.tokens_per_second()
                    emit(callbacks, event("log", lr=lr, gradient_norm=gradient_norm, tokens_per_second=speed))
                    meter.reset()
                state.validation_due = milestones.due(settings.validate_every, validation_budget.count(state))
            with meter.pause(state):
                if state.validation_due and validate(state, stop=interruption.stops_validation):
                    state.validation_due = False
                    state.train = train_metrics.score(task, distributed)
                    if not math.isfinite(state.valid.get("loss", 0.0)):
                        diverged(state.step, what="the validation loss")
                    state.seconds = clock()
                    emit(callbacks, event("valid", lr=lr))
                signal = interruption.agreed()
                due = milestones.due(settings.checkpoint_every or settings.validate_every, VALIDATIONS)
                if due and not (settings.checkpoint_every or settings.keep_every) and milestones.done < 1.0:
                    due = checkpointer.is_affordable()
                is_best = settings.weights == "best" and state.best_step == state.step
                if due or signal or is_best:
                    state.window = {"losses": meter.state(), "seen": train_metrics.state(distributed)}
                    state.spikes = spikes.count if spikes else 0  # on a GPU, reading the losses counts the last ones
                    checkpointer.save(state)
            state.seconds = clock()
            checkpointer.check()
            if signal is not None:
                checkpointer.wait()
                raise Interrupted(f"stopped after step {state.step}{checkpointer.resume_hint(state.step)}", signal)
    state.spikes = spikes.count if spikes else 0
    checkpointer.finish(state)
    if settings.weights == "last":
        state.best_step = state.step  # the weights that are kept are those of this step
    restore_blocks(model)
    if sharded:
        full_model.load_tensors(full_tensors(model.tensors()), source="the sharded model")
        full_model.to(distributed.device)
    return state


def sequence_length(model: Model, settings: TrainSettings) -> int:
    return settings.length or model.backbone.context or 256


def out_of_patience(state: TrainState, settings: TrainSettings) -> bool:
    return settings.patience is not None and state.validations_since_best >= settings.patience


def unfreeze_layers(model: Model, count: float) -> None:
    """Make the heads and the top `count` stages of the backbone trainable, and no others."""
    heads = {id(parameter) for parameter in model.heads.parameters()}  # a head may share the embedding
    for height, stage in enumerate(reversed(model.backbone.parameters_by_layer())):
        for parameter in stage:
            parameter.requires_grad_(id(parameter) in heads or height < math.floor(count + 1e-9))


def raise_diverged(
    step: int, *, sampler: BatchSampler, checkpointer: Checkpointer, what: str = "the loss or its gradient"
) -> None:
    names = sampler.names(step - 1)
    rows = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    newest = checkpointer.newest()
    last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
    raise DivergenceError(f"step {step}: {what} is not a finite number; the step read {rows}; {last}")
