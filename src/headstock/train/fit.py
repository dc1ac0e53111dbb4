"""Trains one model on labelled rows: backbone and new head, or the head alone on what the frozen backbone saw."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from headstock.data.tokenizer import Tokenizer
from headstock.model.backbone import CachedBackbone
from headstock.model.model import Model
from headstock.tasks.labelled import LabelledTask, is_labelled
from headstock.train.callbacks import Callback, Event, log_metrics, tensorboard
from headstock.train.distributed import DistributedContext
from headstock.train.loop import sequence_length, train
from headstock.train.outputs import cache_features, model_outputs
from headstock.train.pretrain import build_model, transferred_tensors
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig
from headstock.train.state import TrainState

logger = logging.getLogger(__name__)


@dataclass
class LabelledData:
    """What the loop reads: the task's own form of the training and validation rows."""

    train: Any
    valid: Any


@dataclass
class FitResult:
    """A trained model and how it came about."""

    model: Model
    task: LabelledTask
    state: TrainState
    epochs: list[dict[str, Any]]  # accuracy and loss in training and validation, epoch by epoch
    length: int

    def outputs(self, data: Any, *, dtype: str = "auto") -> list[np.ndarray]:
        """What the predictions of all rows are made from."""
        return model_outputs(self.model, self.task, data, length=self.length, dtype=dtype)

    @property
    def best_epoch(self) -> int | None:
        return next((row["epoch"] for row in self.epochs if row["step"] == self.state.best_step), None)


def fit_run(
    run: RunFolder,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    data: LabelledData,
    distributed: DistributedContext,
    callbacks: Sequence[Callback],
) -> FitResult:
    """`fit`, with its metrics and checkpoints in a run's folder."""
    with ExitStack() as stack:
        callbacks = list(callbacks) if distributed.is_main else []
        if distributed.is_main:
            callbacks.append(log_metrics(run))
            if chosen.train.tensorboard:
                callbacks.append(stack.enter_context(tensorboard(run)))
        fitted = fit(chosen, tokenizer, weights, data, run=run, distributed=distributed, callbacks=callbacks)
    fitted.epochs = epochs_of(run)  # of the whole run, also what lies before an interruption
    return fitted


def fit(
    chosen: RunConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor] | None,
    data: LabelledData,
    *,
    run: RunFolder | None,
    distributed: DistributedContext,
    callbacks: Sequence[Callback] = (),
) -> FitResult:
    """Train one model. Frozen, the backbone reads each row once and the head learns from what it saw."""
    model, task = build_model(chosen, tokenizer)
    assert is_labelled(task)
    if weights is not None:
        load_weights(model, task, weights, source=chosen.transfer.run)
    model.to(distributed.device)
    length, settings = sequence_length(model, chosen.train), chosen.train
    epochs: list[dict[str, Any]] = []
    callbacks = [*callbacks, record_epochs(epochs)]
    if chosen.transfer.freeze:
        logger.info(f"the frozen backbone reads {len(data.train) + len(data.valid):,} rows, once")
        look = partial(cache_features, model, task, length=length, dtype=settings.dtype)
        seen = LabelledData(look(data.train), look(data.valid))
        head = Model(CachedBackbone(model.backbone), dict(model.heads.items()))
        progress = train(head, task, seen, settings, run=run, distributed=distributed, callbacks=callbacks)
        if run is not None and distributed.is_main:
            run.save_weights(model.tensors())
    else:
        progress = train(model, task, data, settings, run=run, distributed=distributed, callbacks=callbacks)
    return FitResult(model.eval(), task, progress, epochs, length)


def load_weights(model: Model, task: LabelledTask, weights: dict[str, Tensor], *, source: str) -> None:
    """Take over another run's backbone, and its head where the task inherits one."""
    if task.reuses_head:
        model.load_tensors(transferred_tensors(model, weights), source=source)
    else:
        model.load_backbone(weights, source=source)


EPOCH = ("step", "epoch", "train_accuracy", "train_loss", "valid_accuracy", "valid_loss")


def record_epochs(epochs: list[dict[str, Any]]) -> Callback:
    """Keeps accuracy and loss of every epoch."""

    def hear(event: Event) -> None:
        if event.kind == "valid":
            p = event.state
            values = (p.step, event.epoch, p.train["accuracy"], p.train["loss"], p.valid["accuracy"], p.valid["loss"])
            epochs.append(dict(zip(EPOCH, values, strict=True)))

    return hear


def epochs_of(run: RunFolder) -> list[dict[str, Any]]:
    """The same from a run's metrics."""
    return [{name: row[name] for name in EPOCH} for row in run.read_metrics() if "valid_accuracy" in row]
