"""Linear probes: logistic regression of the labels on the features of a pretrained backbone, as a model's head.

N rows, D width, C classes.
"""

import logging
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headstock.errors import UserError
from headstock.model.heads import ClassificationHead
from headstock.model.model import Model
from headstock.rng import generator
from headstock.tasks.labelled import CachedFeatures, LabelledTask
from headstock.train.evaluate import cache_features

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

logger = logging.getLogger(__name__)

MAX_ITERATIONS = 2000  # of a regression
ABSENT = -1e4  # the logit of a class without training rows
C_VALUES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # scikit-learn's C: the inverse of the regularization strength
FOLDS = 5
MAX_ROWS = 2000  # with more labels, the head that fine-tuning starts from hardly matters


def fit_linear_probe(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str, seed: int) -> None:
    """Set a new head to a linear probe, from which fine-tuning starts (LP-FT, Kumar et al. 2022).

    A random head sends random gradients into the backbone until it has learned; this one has. Features are
    standardized, and the regularization strength is chosen by cross-validation of the loss. Without two classes to
    tell apart, the head stays random.
    """
    if len(data) > MAX_ROWS:
        data = data.select(np.sort(generator(seed, "probe").permutation(len(data))[:MAX_ROWS]).tolist())
    if len(np.unique(data.labels)) < 2:
        logger.info("linear probe: the training rows have one class, so the head starts from random weights")
        return
    vectors = pooled_vectors(cache_features(model, task, data, length=length, dtype=dtype))
    weights = present_weights(data.labels, task.config)
    c, accuracy = choose_c(vectors, data.labels, class_weight=weights, seed=seed)
    # training goes on, so that a class without rows must not start from the logit of an impossible one
    fit_logistic_head(model, vectors, data.labels, task.config, c=c, standardize=True, absent=-math.log(len(vectors)))
    measured = "" if accuracy is None else f", {accuracy:.1%} by cross-validation"
    logger.info(f"linear probe: logistic regression on {len(vectors):,} rows with C={c:g}{measured}")


def choose_c(
    vectors: np.ndarray, labels: np.ndarray, *, class_weight: dict[int, float] | None = None, seed: int
) -> tuple[float, float | None]:
    """The C with the smallest loss by cross-validation, and its accuracy; the middle one where a class has one row."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    folds = min(FOLDS, *np.unique(labels, return_counts=True)[1].tolist())
    if folds < 2:
        return C_VALUES[len(C_VALUES) // 2], None
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=MAX_ITERATIONS, class_weight=class_weight)),
        {"logisticregression__C": C_VALUES},
        scoring=["neg_log_loss", "accuracy"],
        refit=False,
        cv=StratifiedKFold(folds, shuffle=True, random_state=seed),
    ).fit(vectors, labels)
    best = int(np.argmax(search.cv_results_["mean_test_neg_log_loss"]))
    return C_VALUES[best], float(search.cv_results_["mean_test_accuracy"][best])


def pooled_vectors(features: CachedFeatures) -> np.ndarray:
    """(N, D) the feature vector of each row."""
    return torch.cat([vector for (vector,) in features.features]).double().numpy()


def fit_logistic_head(
    model: Model,
    vectors: np.ndarray,
    labels: np.ndarray,
    config: Any,
    *,
    c: float = 1.0,
    standardize: bool = False,
    absent: float = ABSENT,
) -> None:
    """Set the linear head to the logistic regression of labels on feature vectors (N, D).

    Its softmax gives the probabilities of the regression. A class without training rows has the logit `absent`.
    """
    from sklearn.linear_model import LogisticRegression

    linear = cast(ClassificationHead, model.heads["label"]).linear
    if len(present := np.unique(labels)) < 2:
        raise UserError(f"the training rows must have two classes or more, not {config.classes[present[0]]!r} alone")
    means, scales = np.zeros(vectors.shape[1]), np.ones(vectors.shape[1])
    if standardize:
        means, scales = vectors.mean(0), vectors.std(0)
        scales[scales == 0] = 1.0
    regression = LogisticRegression(
        C=c,
        max_iter=MAX_ITERATIONS,
        class_weight=present_weights(labels, config),
        fit_intercept=linear.bias is not None,
    ).fit((vectors - means) / scales, labels)
    coefficients, intercepts = class_coefficients(regression)
    coefficients = coefficients / scales  # of the features as they are
    intercepts = intercepts - coefficients @ means
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[present] = torch.as_tensor(coefficients, dtype=linear.weight.dtype, device=linear.weight.device)
        if linear.bias is not None:
            linear.bias.fill_(absent)
            linear.bias[present] = torch.as_tensor(intercepts, dtype=linear.bias.dtype, device=linear.bias.device)


def present_weights(labels: np.ndarray, config: Any) -> dict[int, float] | None:
    """The weights of the classes that have training rows, if any are set."""
    weights = config.class_weights
    return {int(number): weights[number] for number in np.unique(labels)} if weights else None


def class_coefficients(regression: "LogisticRegression") -> tuple[np.ndarray, np.ndarray]:
    """(C, D) and (C,) coefficients and intercepts whose softmax gives the probabilities of the regression."""
    coefficients, intercepts = regression.coef_, regression.intercept_
    if len(coefficients) > 1:
        return coefficients, intercepts
    # one value for two classes: the softmax of its halves is its sigmoid
    return np.concatenate([-coefficients, coefficients]) / 2, np.concatenate([-intercepts, intercepts]) / 2
