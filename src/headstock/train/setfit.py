"""SetFit (Tunstall et al. 2022): contrastive fine-tuning of the backbone, then logistic regression on its embeddings.

N rows, D width, C classes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from headstock.errors import UserError
from headstock.model.heads import ClassificationHead
from headstock.model.model import Model
from headstock.tasks.contrastive import ContrastivePairs, is_classifier
from headstock.tasks.labelled import CachedFeatures, LabelledTask, metric_value
from headstock.train.callbacks import Callback, Event
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import cache_features, model_outputs
from headstock.train.loop import sequence_length, train
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

MAX_ITERATIONS = 2000  # of the regression
ABSENT = -1e4  # the logit of a class without training rows


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
    fit_logistic_head(model, features(data.train), data.train.labels, task.config)
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


def fit_logistic_head(model: Model, features: CachedFeatures, labels: np.ndarray, config: Any) -> None:
    """Set the linear head to the logistic regression of labels on pooled features, with scikit-learn's defaults.

    Its softmax gives the probabilities of the regression. A class without training rows gets none.
    """
    from sklearn.linear_model import LogisticRegression

    vectors = torch.cat([vector for (vector,) in features.features]).double().numpy()  # (N, D)
    linear = cast(ClassificationHead, model.heads["label"]).linear
    if len(present := np.unique(labels)) < 2:
        raise UserError(f"SetFit: the training rows must have two classes or more, not {config.classes[present[0]]!r}")
    weights = {number: config.class_weights[number] for number in present} if config.class_weights else None
    regression = LogisticRegression(
        max_iter=MAX_ITERATIONS, class_weight=weights, fit_intercept=linear.bias is not None
    ).fit(vectors, labels)
    coefficients, intercepts = regression.coef_, regression.intercept_
    if len(present) == 2:  # one value for two classes: the softmax of its halves is its sigmoid
        coefficients, intercepts = (np.stack([-part[0] / 2, part[0] / 2]) for part in (coefficients, intercepts))
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[present] = torch.as_tensor(coefficients, dtype=linear.weight.dtype, device=linear.weight.device)
        if linear.bias is not None:
            linear.bias.fill_(ABSENT)
            linear.bias[present] = torch.as_tensor(intercepts, dtype=linear.bias.dtype, device=linear.bias.device)
