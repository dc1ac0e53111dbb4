"""Trains one model on labelled rows: backbone and head, adapters and head (LoRA), or the head on cached features."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from headstock.model.backbone import CachedBackbone
from headstock.model.lora import LoRAModel
from headstock.model.model import Model
from headstock.tasks.auxiliary import AuxiliaryLosses
from headstock.tasks.base import Task
from headstock.tasks.labelled import LabelledTask
from headstock.train.callbacks import Callback, Event
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import cache_features, model_outputs
from headstock.train.linear_probe import fit_linear_probe
from headstock.train.loop import sequence_length, train
from headstock.train.models import average_weights, build_model, load_source_weights, new_top_layers, with_lm_head
from headstock.train.run_folder import RunFolder
from headstock.train.setfit import fit_setfit
from headstock.train.settings import RunConfig

logger = logging.getLogger(__name__)


@dataclass
class EncodedSplits:
    """Tokenized training and validation rows."""

    train: Any
    valid: Any


@dataclass
class FitResult:
    """A trained model with its training history."""

    model: Model
    task: LabelledTask
    state: TrainState
    epochs: list[dict[str, Any]]  # the task's training metric and the loss, on training and validation rows
    length: int
    adapter: dict[str, Tensor] | None = None  # adapters and heads, with LoRA; the model contains them already

    def outputs(self, data: Any, *, dtype: str = "auto") -> list[np.ndarray]:
        """The model's outputs for all rows."""
        return model_outputs(self.model, self.task, data, length=self.length, dtype=dtype)

    @property
    def best_epoch(self) -> int | None:
        return next((row["epoch"] for row in self.epochs if row["step"] == self.state.best_step), None)


def fit(
    run_config: RunConfig,
    task: LabelledTask,
    weights: dict[str, Tensor] | None,
    data: EncodedSplits,
    *,
    run: RunFolder | None,
    distributed: DistributedContext,
    objective: Task | None = None,
    callbacks: Sequence[Callback] = (),
) -> FitResult:
    """Train one model from `weights`, or from scratch without them.

    With `freeze`, the backbone reads each row once and the head is trained on the cached features. Adapters (`lora`)
    are merged into the weights after training. `objective` is the source's, for `lm_loss`: its head is trained with
    the model and then left out.
    """
    model, transfer = build_model(run_config, task), run_config.transfer
    if weights is not None:
        new = new_top_layers(model, transfer.reinit_layers)
        load_source_weights(model, task, weights, source=transfer.run)
        model.load_tensors(model.tensors() | new, source="the new layers")
    settings, lora = run_config.train, transfer.adapters
    trained = model if lora is None else LoRAModel(model, lora, seed=settings.seed)
    trained_task: Task = task
    if objective is not None or transfer.r_drop or transfer.token_dropout:
        trained_task = AuxiliaryLosses(
            task,
            objective=objective,
            lm_loss=transfer.lm_loss,
            r_drop=transfer.r_drop,
            token_dropout=transfer.token_dropout,
        )
    if objective is not None and weights is not None:
        trained = with_lm_head(model, objective, weights, source=transfer.run)
    trained.to(distributed.device)
    length = sequence_length(model, settings)
    if transfer.linear_probe:
        fit_linear_probe(model, task, data.train, length=length, dtype=settings.dtype, seed=settings.seed)
    epochs: list[dict[str, Any]] = []
    train_data = data
    if transfer.method == "setfit":
        state, epochs = fit_setfit(model, task, data, run_config, run=run, distributed=distributed, callbacks=callbacks)
        return FitResult(model.eval(), task, state, epochs, length)
    if transfer.freeze:
        logger.info(f"computing the features of {len(data.train) + len(data.valid):,} rows with the frozen backbone")
        features = partial(cache_features, model, task, length=length, dtype=settings.dtype)
        trained = Model(CachedBackbone(model.backbone), dict(model.heads.items()))
        train_data = EncodedSplits(features(data.train), features(data.valid))
    callbacks = [*callbacks, record_epochs(epochs, task)]
    state = train(trained, trained_task, train_data, settings, run=run, distributed=distributed, callbacks=callbacks)
    adapter = None
    if isinstance(trained, LoRAModel):
        adapter = trained.tensors()
        trained.merge()
    if trained is not model and run is not None and distributed.is_main:
        if adapter is not None and lora is not None:
            run.save_adapter(adapter, lora)
        run.save_weights(model.tensors())  # with the frozen backbone, and without a language-model head
    if run is not None:
        epochs = epochs_of(run, task)  # also those before an interruption
    return FitResult(model.eval(), task, state, epochs, length, adapter)


def member_configs(run_config: RunConfig) -> list[RunConfig]:
    """The configurations of the models that a run is made of: one, or one for each seed of an ensemble or a soup."""
    transfer, settings = run_config.transfer, run_config.train
    count, alone = max(transfer.ensemble, transfer.soup), replace(transfer, ensemble=1, soup=1)
    if count == 1:
        return [run_config]
    seeds = range(settings.seed, settings.seed + count)
    return [replace(run_config, train=replace(settings, seed=seed), transfer=alone) for seed in seeds]


def model_soup(fits: Sequence[FitResult]) -> FitResult:
    """One model with the mean weights of models that were trained from the same ones (Wortsman et al. 2022).

    Steps, tokens and seconds are those of all of them. The mean has no best step.
    """
    first = fits[0]
    weights = first.model.tensors()
    for number, result in enumerate(fits[1:], start=2):
        weights = average_weights(weights, result.model.tensors(), 1 / number)
    model = copy.deepcopy(first.model)
    model.load_tensors(weights, source="the mean weights")
    sums = {
        name: sum(getattr(result.state, name) for result in fits)
        for name in ("step", "tokens", "seconds", "overhead_seconds")
    }
    return replace(first, model=model, state=replace(first.state, best_step=None, valid={}, **sums))


def record_epochs(epochs: list[dict[str, Any]], task: LabelledTask) -> Callback:
    """Appends the training metric and the loss at every validation."""

    def on_event(event: Event) -> None:
        if event.kind == "valid":
            state = event.state
            row: dict[str, Any] = {"step": state.step, "epoch": event.epoch}
            for name in (task.nouns.training_key, "loss"):
                row |= {f"train_{name}": state.train[name], f"valid_{name}": state.valid[name]}
            epochs.append(row)

    return on_event


def epochs_of(run: RunFolder, task: LabelledTask) -> list[dict[str, Any]]:
    """The same from metrics.jsonl."""
    key = task.nouns.training_key
    columns = ("step", "epoch", f"train_{key}", "train_loss", f"valid_{key}", "valid_loss")
    return [{name: row[name] for name in columns} for row in run.read_metrics() if f"valid_{key}" in row]
