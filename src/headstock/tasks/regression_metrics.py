"""Metrics of predicted numbers: Pearson, Spearman, R², quadratic weighted kappa, MAE and RMSE.

N rows. Each is a function of statistics that are summed over rows, so that any sample of rows can be scored.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from headstock.intervals import Formula, SufficientStatistics

MOMENTS = ("sum_true", "sum_predicted", "sum_true_squared", "sum_predicted_squared", "sum_product")
CORRELATION = (-1.0, 1.0)
UNBOUNDED = float("inf")


def moments(true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """(..., N, 6): 1, y, p, y², p² and y p of labels y and predictions p, in units of the labels' mean and deviation.

    Correlations, R² and kappa are the same in any units, and small numbers keep their digits.
    """
    center, scale = true.mean(), true.std() or 1.0
    y, p = (true - center) / scale, (predicted - center) / scale
    return np.stack([np.ones_like(y), y, p, y * y, p * p, y * p], axis=-1)


def batch_moments(true: Tensor, predicted: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The summed moments of a batch, all (N,), over the rows where `mask` is 1, without their number."""
    y, p = true * mask, predicted.detach() * mask
    sums = (y, p, y * y, p * p, y * p)
    return {name: values.sum() for name, values in zip(MOMENTS, sums, strict=True)}


def total_moments(sums: Mapping[str, float], rows: int) -> np.ndarray:
    """(6,) from the sums of all batches."""
    return np.array([rows, *(sums[name] for name in MOMENTS)])


def variances(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(..., 6) summed moments -> the variances of labels and predictions, their covariance, and p's mean minus y's."""
    count, y, p, yy, pp, yp = np.moveaxis(np.asarray(sums, dtype=np.float64), -1, 0)
    count = np.maximum(count, 1)
    y, p = y / count, p / count
    return np.maximum(yy / count - y * y, 0), np.maximum(pp / count - p * p, 0), yp / count - y * p, p - y


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """0 where the denominator is 0, up to rounding: a constant has no correlation with anything."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 1e-12)


def pearson(sums: np.ndarray) -> np.ndarray:
    """(..., 6) summed moments -> (...)."""
    true, predicted, covariance, _ = variances(sums)
    return np.clip(ratio(covariance, np.sqrt(true * predicted)), -1.0, 1.0)


def r2(sums: np.ndarray) -> np.ndarray:
    """(..., 6) summed moments -> (...): 1 minus the squared error relative to that of the labels' mean."""
    true, predicted, covariance, gap = variances(sums)
    error = true + predicted - 2 * covariance + gap * gap
    return np.where(true > 1e-12, 1 - ratio(error, true), 0.0)


def quadratic_kappa(sums: np.ndarray) -> np.ndarray:
    """(..., 6) summed moments of whole numbers -> (...): Cohen's kappa with quadratic weights.

    The observed and the expected squared distance need only means, variances and the covariance.
    """
    true, predicted, covariance, gap = variances(sums)
    return ratio(2 * covariance, true + predicted + gap * gap)


def mean(sums: np.ndarray) -> np.ndarray:
    """(..., 2) sum and count -> (...)."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def root_mean(sums: np.ndarray) -> np.ndarray:
    return np.sqrt(mean(sums))


def ranked_again(values: np.ndarray) -> np.ndarray:
    """(..., N, 6) moments of ranks among more rows -> of the ranks among these rows."""
    from scipy.stats import rankdata

    return moments(rankdata(values[..., 1], axis=-1), rankdata(values[..., 2], axis=-1))


FORMULAS = {
    "pearson": Formula(pearson, CORRELATION),
    "spearman": Formula(pearson, CORRELATION, ranked_again),
    "mae": Formula(mean, (0.0, UNBOUNDED)),
    "rmse": Formula(root_mean, (0.0, UNBOUNDED)),
    "r2": Formula(r2, (-UNBOUNDED, 1.0)),
    "quadratic_kappa": Formula(quadratic_kappa, CORRELATION),
}


def regression_metrics(
    true: np.ndarray, predicted: np.ndarray, names: Sequence[str] = ("pearson", "spearman", "mae", "rmse", "r2")
) -> dict[str, SufficientStatistics]:
    """The named metrics of predictions (N,) for labels (N,).

    The ranks of Spearman's rho are those among all rows, also in a resample; a slice is ranked again. For kappa both
    must be whole numbers.
    """
    from scipy.stats import rankdata

    true, predicted = true.astype(np.float64), predicted.astype(np.float64)
    error, ones = np.abs(predicted - true), np.ones(len(true))
    values = {
        "mae": lambda: np.stack([error, ones], 1),
        "rmse": lambda: np.stack([error**2, ones], 1),
        "spearman": lambda: moments(rankdata(true), rankdata(predicted)),
    }
    return {name: FORMULAS[name].of(values.get(name, lambda: moments(true, predicted))()) for name in names}
