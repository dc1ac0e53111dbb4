"""SetFit (Tunstall et al. 2022): contrastive fine-tuning of the backbone, then logistic regression on its embeddings.

N rows, D width, C classes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from headstock.model.model import Model
from headstock.tasks.contrastive import ContrastivePairs, is_classifier
from headstock.tasks.labelled import LabelledTask, metric_value
from headstock.train.callbacks import Callback, Event
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import cache_features, model_outputs
from headstock.train.linear_probe import fit_logistic_head, pooled_vectors
from headstock.train.loop import sequence_length, train
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig


def fit_setfit(
    model: Model,
    task: LabelledTask,
    data: Any,
    run_config: RunConfig,
    *,
    run: RunFolder | None,
    distributed: DistributedContext,
    callbacks: Sequence[Callback] = (),
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Train a model with its head in place; returns the state, and the metrics of the finished classifier."""
    settings = run_config.train
    assert is_classifier(task)
    epochs: dict[int, int] = {}  # by step

    def record_epoch(event: Event) -> None:
        epochs[event.state.step] = event.epoch

    state = train(
        model.with_heads({}),
        ContrastivePairs(task),
        data,
        settings,
        run=run,
        distributed=distributed,
        callbacks=[*callbacks, record_epoch],
    )
    length = sequence_length(model, settings)
    features = partial(cache_features, model, task, length=length, dtype=settings.dtype)
    fit_logistic_head(model, pooled_vectors(features(data.train)), data.train.labels, task.config)
    if run is not None and distributed.is_main:
        run.save_weights(model.tensors())  # now with the head
    if settings.weights == "last" or state.best_step is None:
        state.best_step = state.step
    row: dict[str, Any] = {"step": state.best_step, "epoch": epochs.get(state.best_step, int(settings.epochs or 1))}
    for name, rows in (("train", data.train), ("valid", data.valid)):
        outputs = model_outputs(model, task, rows, length=length, dtype=settings.dtype)
        accuracy, loss = task.row_metrics(rows, outputs)["accuracy"], task.extra_metrics(rows, outputs)["loss"]
        row |= {f"{name}_accuracy": metric_value(accuracy), f"{name}_loss": loss}
    return state, [row]
