"""How sure a score is: 95% intervals over the seeds that trained the models and the rows that tested them.

Shapes: S seeds, N items (tested rows), U kinds of item, R resamples, C classes, K counts of an item.

Seeds and items are crossed: every seed's model is tested on the same items. The variance of the mean score has three
parts: items (shared by all seeds), seeds (shared by all items), and their interaction, the chance in one seed on one
item. There are many items, so they are resampled (bootstrap); that covers items and interaction, and no interval here
is narrower. There are few seeds, so the seed effect comes from Student's t with S-1 degrees of freedom. The variance
between the seeds' scores contains the interaction a second time, so z/t of it is subtracted, with z and t the 97.5%
quantiles of the normal and of Student's t. To subtract all of it would be unbiased, but the intervals of two or three
seeds that tie by chance would then cover too little. `benchmarks/interval_coverage.py` measures the coverage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstock.rng import generator

RESAMPLES = 2000
TAILS = (0.025, 0.975)
NORMAL_QUANTILE = 1.959964  # 97.5% of the standard normal distribution

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class SufficientStatistics:
    """Counts from which a corpus-level metric such as BLEU is computed after they are summed over items."""

    values: np.ndarray  # (N, K); for S models (S, N, K)
    score: Callable[[np.ndarray], np.ndarray]  # (..., K) sums -> (...) scores from 0 to 1

    def total(self) -> np.ndarray:
        """The score over all items: one number, or for S models (S,)."""
        return self.score(self.values.sum(-2))


class Interval(NamedTuple):
    """A mean with the 95% interval around it; low and high are None where one seed alone cannot give them."""

    mean: float
    low: float | None
    high: float | None


def accuracy(right: NDArray) -> float:
    """The share of `right` (0 or 1, any shape) that is 1."""
    return float(np.mean(right))


def macro_f1(true: Integers, predicted: Integers, classes: int) -> float:
    """The mean F1 of the classes that occur in the truth or among the predictions (as scikit-learn counts it)."""
    return float(_macro_f1(np.ones((1, len(true))), true, predicted, classes)[0])


def interval(
    hits: NDArray | SufficientStatistics, of: NDArray | None = None, *, key: tuple[int | str, ...] = ()
) -> Interval:
    """The mean score of S models on the same N items. `hits` is (S, N): for accuracy, 1 where a model is right.

    Where items weigh differently a score is a ratio, and `of` (S, N) is what the sum of the hits is divided by: the
    words of each sentence, or for F1 (twice the hits) the entities that a model or the truth names in it. A score that
    is no ratio at all, such as BLEU, comes as Statistics of (S, N, K) counts.
    """
    items = _shape(hits)[1]
    return crossed_interval(*_resampled_scores(hits, of, key), items=items, bounds=(0.0, 1.0), key=key)


def difference(
    a: NDArray | SufficientStatistics,
    b: NDArray | SufficientStatistics,
    of_a: NDArray | None = None,
    of_b: NDArray | None = None,
    *,
    key: tuple[int | str, ...] = (),
) -> Interval:
    """The score of `a` minus that of `b`, all (S, N): paired by seed and by item, so shared difficulty cancels."""
    if isinstance(a, SufficientStatistics) and isinstance(b, SufficientStatistics):
        return _difference_of_statistics(a, b, key)
    assert isinstance(a, np.ndarray) and isinstance(b, np.ndarray), "a score is compared with one of its own kind"
    if a.shape != b.shape:
        raise ValueError(f"a pair needs the same seeds and items, not {a.shape} and {b.shape}")
    if of_a is None or of_b is None:
        scores = _resampled_scores(np.asarray(a, dtype=float) - np.asarray(b, dtype=float), None, key)
    else:
        seeds = len(a)
        both, resampled = _resampled_scores(np.vstack([a, b]), np.vstack([of_a, of_b]), key)
        scores = both[:seeds] - both[seeds:], resampled[:, :seeds] - resampled[:, seeds:]
    return crossed_interval(*scores, items=a.shape[1], bounds=(-1.0, 1.0), key=key)


def _difference_of_statistics(a: SufficientStatistics, b: SufficientStatistics, key: tuple[int | str, ...]) -> Interval:
    if a.values.shape != b.values.shape:
        raise ValueError(f"a pair needs the same seeds and items, not {a.values.shape} and {b.values.shape}")
    both, resampled = _resampled_scores(SufficientStatistics(np.concatenate([a.values, b.values]), a.score), None, key)
    seeds = len(a.values)
    scores = both[:seeds] - both[seeds:], resampled[:, :seeds] - resampled[:, seeds:]
    return crossed_interval(*scores, items=a.values.shape[1], bounds=(-1.0, 1.0), key=key)


def macro_f1_interval(
    true: Integers, predicted: Integers, classes: int, *, key: tuple[int | str, ...] = ()
) -> Interval:
    """The mean macro F1 of S models; `true` is (N,), `predicted` (S, N), both class numbers."""
    return crossed_interval(*_resampled_f1(true, predicted, classes, key), items=len(true), bounds=(0.0, 1.0), key=key)


def item_interval(
    hits: NDArray | SufficientStatistics, of: NDArray | None = None, *, key: tuple[int | str, ...] = ()
) -> Interval:
    """The score of one finished model; both are (N,). Says nothing of what another seed would have given."""
    one = SufficientStatistics(hits.values[None], hits.score) if isinstance(hits, SufficientStatistics) else hits[None]
    (mean,), resampled = _resampled_scores(one, None if of is None else of[None], key)
    return _over_items(float(mean), resampled[:, 0], items=_shape(one)[1], bounds=(0.0, 1.0))


def macro_f1_item_interval(
    true: Integers, predicted: Integers, classes: int, *, key: tuple[int | str, ...] = ()
) -> Interval:
    """The macro F1 of one finished model; both arrays are (N,). Says nothing of other seeds."""
    (mean,), resampled = _resampled_f1(true, predicted[None], classes, key)
    return _over_items(float(mean), resampled[:, 0], items=len(true), bounds=(0.0, 1.0))


def crossed_interval(
    scores: Floats, resampled: Floats, *, items: int, bounds: tuple[float, float], key: tuple[int | str, ...] = ()
) -> Interval:
    """The interval over seeds and items, from each seed's score (S,) and its scores on resampled items (R, S).

    All seeds are scored on the same resamples. Neither end lies inside the interval of the resampled items alone.
    """
    seeds, mean = len(scores), float(scores.mean())
    if seeds < 2:
        return Interval(mean, None, None)
    mean_scores = resampled.mean(1)  # (R,)
    over_items = _over_items(mean, mean_scores, items=items, bounds=bounds)
    assert over_items.low is not None and over_items.high is not None
    # the interaction's share in the variance of the mean over seeds
    interaction = float((resampled - mean_scores[:, None]).var(0).sum()) / (seeds - 1) / seeds
    between = float(scores.var(ddof=1)) / seeds - NORMAL_QUANTILE / _t_quantile(seeds - 1) * interaction
    if between <= 0:
        return over_items
    effect = generator("interval", "seeds", *key).permutation(_even_t(seeds - 1)) * between**0.5
    both = _over_items(mean, mean_scores + effect, items=items, bounds=bounds)
    assert both.low is not None and both.high is not None
    return Interval(mean, min(both.low, over_items.low), max(both.high, over_items.high))


@cache
def _t_quantile(freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, TAILS[1]))


@cache
def _even_t(freedom: int) -> Floats:
    """(R,) evenly spaced quantiles of Student's t: random draws would make its heavy tails noisy."""
    from scipy.special import stdtrit

    return stdtrit(freedom, (np.arange(RESAMPLES) + 0.5) / RESAMPLES)


def _over_items(mean: float, resampled: Floats, *, items: int, bounds: tuple[float, float]) -> Interval:
    if np.ptp(resampled) == 0:  # all items alike: the rule of three says what N of them can still hide
        low, high = mean - 3 / items, mean + 3 / items
    else:
        low, high = (float(edge) for edge in np.quantile(resampled, TAILS))
    return Interval(mean, max(min(low, mean), bounds[0]), min(max(high, mean), bounds[1]))


def _shape(hits: NDArray | SufficientStatistics) -> tuple[int, ...]:
    return hits.values.shape if isinstance(hits, SufficientStatistics) else hits.shape


def _resampled_scores(
    hits: NDArray | SufficientStatistics, of: NDArray | None, key: tuple[int | str, ...]
) -> tuple[Floats, Floats]:
    """Each row's score of (S, N) hits, (S,), and those of every resample of the items, (R, S)."""
    if isinstance(hits, SufficientStatistics):
        return _resampled_statistics(hits, key)
    hits = np.asarray(hits)
    if of is None:
        kinds, weights = _resample(hits, key)
        return hits.mean(1), weights @ kinds.T.astype(np.float32) / np.float32(hits.shape[1])
    kinds, weights = _resample(np.vstack([hits, of]), key)
    above, below = (weights @ part.T.astype(np.float32) for part in (kinds[: len(hits)], kinds[len(hits) :]))
    return hits.sum(1) / np.maximum(np.asarray(of).sum(1), 1e-9), above / np.maximum(below, 1e-9)


def _resampled_statistics(found: SufficientStatistics, key: tuple[int | str, ...]) -> tuple[Floats, Floats]:
    """The same of (S, N, K) counts, of which hardly two items have the same; a resample's are summed, then scored."""
    seeds, items, counts = found.values.shape
    random = generator("interval", "items", *key)
    weights = np.stack([np.bincount(random.integers(items, size=items), minlength=items) for _ in range(RESAMPLES)])
    every = found.values.transpose(1, 0, 2).reshape(items, seeds * counts)
    sums = weights.astype(np.float64) @ every.astype(np.float64)  # (R, N) @ (N, S K)
    return found.total(), found.score(sums.reshape(RESAMPLES, seeds, counts))


def _resampled_f1(
    true: Integers, predicted: Integers, classes: int, key: tuple[int | str, ...]
) -> tuple[Floats, Floats]:
    kinds, weights = _resample(np.vstack([true[None], predicted]), key)
    scores = np.array([macro_f1(true, one, classes) for one in predicted])
    return scores, np.stack([_macro_f1(weights, kinds[0], one, classes) for one in kinds[1:]], axis=1)


def _resample(items: NDArray, key: tuple[int | str, ...]) -> tuple[NDArray, Floats]:
    """The U different columns of `items` and how often each is drawn in every resample of N columns, (R, U).

    Items on which all models behave alike are interchangeable, and of ten thousand only some tens of kinds are left.
    """
    random = generator("interval", "items", *key)
    kinds, kind_of, counts = np.unique(items, axis=1, return_inverse=True, return_counts=True)
    total = items.shape[1]
    if len(counts) < 30 + total / 10:  # both ways draw from the same distribution, each faster on its side of this
        return kinds, random.multinomial(total, counts / total, size=RESAMPLES).astype(np.float32)
    weights = np.empty((RESAMPLES, len(counts)), dtype=np.float32)
    for row in weights:
        row[:] = np.bincount(kind_of.ravel()[random.integers(total, size=total)], minlength=len(counts))
    return kinds, weights


def _macro_f1(weights: Floats, true: Integers, predicted: Integers, classes: int) -> Floats:
    """Macro F1 under each row of item weights (R, U) -> (R,)."""
    every = np.arange(classes)
    of_true, of_predicted = true[:, None] == every, predicted[:, None] == every  # (U, C)
    hits = weights @ (of_true & of_predicted).astype(weights.dtype)  # (R, C)
    size = weights @ (of_true.astype(weights.dtype) + of_predicted)  # twice the hits, plus both kinds of miss
    f1 = np.divide(2 * hits, size, out=np.zeros_like(hits), where=size > 0)
    return f1.sum(1) / np.maximum((size > 0).sum(1), 1)
