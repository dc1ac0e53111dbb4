"""Matthews correlation and AUROC as functions of row weights, from which their bootstrap intervals come.

N rows, C classes, R resamples.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headstock.intervals import WeightedMetric

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]

MAX_AUROC_CLASSES = 200  # each class is ranked on its own


def class_metrics(
    labels: Integers, probabilities: Floats, predicted: Integers | None = None
) -> dict[str, WeightedMetric]:
    """`mcc` and `auroc` of probabilities (N, C) for class ids (N,); `auroc` alone for labels (N, C) of 0 and 1.

    Without `predicted` class ids, the most probable class is predicted.
    """
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1) if predicted is None else predicted
    metrics = {} if labels.ndim == 2 else {"mcc": mcc(labels, predicted, classes)}
    return metrics | ({"auroc": auroc(labels, probabilities)} if classes <= MAX_AUROC_CLASSES else {})


def mcc(true: Integers, predicted: Integers, classes: int) -> WeightedMetric:
    """Matthews correlation coefficient; for several classes the R_K statistic, as in scikit-learn.

    It is 0 where all labels or all predictions are one class.
    """
    is_true, is_predicted = (np.eye(classes)[ids] for ids in (true, predicted))  # (N, C)
    correct = (true == predicted).astype(float)

    def score(weights: Floats) -> Floats:
        rows, true_counts, predicted_counts = weights.sum(1), weights @ is_true, weights @ is_predicted  # (R,), (R, C)
        covariance = rows * (weights @ correct) - (true_counts * predicted_counts).sum(1)
        variances = [rows**2 - (counts**2).sum(1) for counts in (true_counts, predicted_counts)]
        scale = np.sqrt(variances[0] * variances[1])
        return np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)

    return WeightedMetric(score, rows=len(true), bounds=(-1.0, 1.0))


def auroc(labels: Integers, probabilities: Floats) -> WeightedMetric:
    """Area under the ROC curve; for several classes the mean over one-vs-rest problems (macro).

    Classes that no row or every row has are left out of the mean; without any other class the score is NaN.
    """
    classes = probabilities.shape[1]
    if labels.ndim == 2:
        columns = [(labels[:, i] == 1, probabilities[:, i]) for i in range(classes)]
    else:
        columns = [(labels == i, probabilities[:, i]) for i in ([1] if classes == 2 else range(classes))]
    curves = [one_vs_rest(positive, scores) for positive, scores in columns if 0 < positive.sum() < len(positive)]

    def score(weights: Floats) -> Floats:
        by_row = np.ascontiguousarray(weights.T)
        areas = np.array([curve(by_row) for curve in curves]).reshape(len(curves), len(weights))
        defined = ~np.isnan(areas)
        total, count = np.where(defined, areas, 0.0).sum(0), defined.sum(0)
        return np.divide(total, count, out=np.full(len(weights), np.nan), where=count > 0)

    return WeightedMetric(score, rows=len(labels), cost=max(1, len(curves)))


def one_vs_rest(positive: NDArray[np.bool_], scores: Floats) -> Callable[[Floats], Floats]:
    """A function of weights (N, R): how often a positive row has a higher score than a negative one; ties count half.

    NaN for a resample without positive or without negative rows.
    """
    order = np.argsort(scores, kind="stable")
    ranked, is_positive = scores[order], positive[order]
    negatives = ranked[~is_positive]
    below, up_to = (np.searchsorted(negatives, ranked[is_positive], side=side) for side in ("left", "right"))
    positive_rows, negative_rows = order[is_positive], order[~is_positive]

    def area(weights: Floats) -> Floats:
        own, rest = weights[positive_rows], weights[negative_rows]
        cumulative = np.concatenate([np.zeros_like(rest[:1]), np.cumsum(rest, axis=0)])  # of the negatives before each
        wins = ((cumulative[below] + cumulative[up_to]) * own).sum(0) / 2
        pairs = own.sum(0) * cumulative[-1]
        return np.divide(wins, pairs, out=np.full(weights.shape[1], np.nan), where=pairs > 0)

    return area
