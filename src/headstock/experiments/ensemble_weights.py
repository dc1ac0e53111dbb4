"""Combines the probabilities of several classifiers with fitted weights.

M models, N rows, C classes.
"""

from collections.abc import Sequence

import numpy as np

from headstock.rng import generator
from headstock.tasks.calibration import softmax

MIN_PROBABILITY = 1e-6  # in logarithms
FOLDS = 5  # of `cross_fitted`


def combine(probabilities: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
    """(N, C) the product of the models' probabilities, each to the power of its weight, normalized."""
    logs = [np.log(np.maximum(part, MIN_PROBABILITY)) for part in probabilities]
    return softmax(np.einsum("m,mnc->nc", weights, np.stack(logs)))


def fit_weights(probabilities: Sequence[np.ndarray], truth: np.ndarray) -> np.ndarray:
    """(M,) weights of 0 or more with the least negative log-likelihood of the true classes.

    They need not sum to one: the probabilities of overconfident models are softened.
    """
    from scipy.optimize import minimize

    count, rows = len(probabilities), np.arange(len(truth))

    def loss(weights: np.ndarray) -> float:
        likelihood = combine(probabilities, weights)[rows, truth]
        return float(-np.log(np.maximum(likelihood, MIN_PROBABILITY)).mean())

    start = np.full(count, 1 / count)
    return minimize(loss, start, bounds=[(0.0, None)] * count, method="L-BFGS-B").x


def cross_fitted(probabilities: Sequence[np.ndarray], truth: np.ndarray, *, seed: int) -> np.ndarray:
    """(N, C) combined probabilities of each row, with weights that are fitted on the other folds of the rows.

    The weights that are fitted on all rows would make the accuracy on the same rows too high.
    """
    combined = np.empty_like(probabilities[0], dtype=float)
    order = generator(seed, "cross-fitted").permutation(len(truth))
    for fold in np.array_split(order, min(FOLDS, len(truth))):
        others = np.setdiff1d(order, fold)
        weights = fit_weights([part[others] for part in probabilities], truth[others])
        combined[fold] = combine([part[fold] for part in probabilities], weights)
    return combined


def accuracy(probabilities: np.ndarray, truth: np.ndarray) -> float:
    return round(float((probabilities.argmax(1) == truth).mean()), 6)
