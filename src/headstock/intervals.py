"""95% confidence intervals of scores, over the seeds that trained the models and the items that tested them.

Shapes: S seeds, N items (test rows), U distinct items, R resamples, C classes, K counts of an item.

Seeds and items are crossed: every seed's model is tested on the same items. The variance of the mean score has three
parts: items (shared by all seeds), seeds (shared by all items), and their interaction, the chance in one seed on one
item. There are many items, so they are resampled (bootstrap); that covers items and interaction, and no interval here
is narrower. There are few seeds, so the seed effect comes from Student's t with S-1 degrees of freedom. The variance
between the seeds' scores contains the interaction a second time, so z/t of it is subtracted, with z and t the 97.5%
quantiles of the normal and of Student's t. To subtract all of it would be unbiased, but the intervals of two or three
seeds that tie by chance would then cover too little. `benchmarks/interval_coverage.py` measures the coverage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstock.rng import generator

RESAMPLES = 2000
MIN_RESAMPLES = 200
MAX_WEIGHTS = 50_000_000  # row weights that a metric reads in all; of many rows and classes there are fewer resamples
CHUNK_WEIGHTS = 1_000_000  # row weights at once
CHUNK_DRAWS = 16_000  # items drawn at once: small resamples are faster together than one by one
TAILS = (0.025, 0.975)
JACKKNIFE_GROUPS = 20
NORMAL_QUANTILE = 1.959964  # 97.5% of the standard normal distribution

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]
Key = tuple[int | str, ...]  # of the random numbers


@dataclass(frozen=True)
class SufficientStatistics:
    """Counts from which a corpus-level metric such as BLEU is computed after they are summed over items."""

    values: np.ndarray  # (N, K); for S models (S, N, K)
    score: Callable[[np.ndarray], np.ndarray]  # (..., K) sums -> (...) scores
    bounds: tuple[float, float] = (0.0, 1.0)  # of the score
    alone: Callable[[np.ndarray], np.ndarray] | None = None  # the counts of a part of the items, if they depend on it

    def total(self) -> np.ndarray:
        """The score over all items: one number, or for S models (S,)."""
        return self.score(self.values.sum(-2))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: None) -> "SufficientStatistics":
        return replace(self, values=self.values[index])

    def part(self, items: np.ndarray) -> "SufficientStatistics":
        """Of some items, by a mask (N,)."""
        values = self.values[..., items, :]
        return replace(self, values=values if self.alone is None else self.alone(values))


@dataclass(frozen=True)
class Formula:
    """A corpus-level metric: how its score is computed from counts that are summed over items."""

    score: Callable[[np.ndarray], np.ndarray]
    bounds: tuple[float, float] = (0.0, 1.0)
    alone: Callable[[np.ndarray], np.ndarray] | None = None

    def of(self, values: np.ndarray) -> SufficientStatistics:
        return SufficientStatistics(values, self.score, self.bounds, self.alone)


@dataclass(frozen=True)
class WeightedMetric:
    """A metric that is no function of sums, such as AUROC: it is computed again for each resample's row weights."""

    score: Callable[[np.ndarray], np.ndarray]  # (R, N) weights of the rows -> (R,) scores; NaN where undefined
    rows: int
    bounds: tuple[float, float] = (0.0, 1.0)
    cost: int = 1  # passes over the rows

    def total(self) -> float:
        """The score over all rows."""
        return float(self.score(np.ones((1, self.rows)))[0]) if self.rows else float("nan")


class Interval(NamedTuple):
    """A mean with the 95% interval around it; low and high are None where one seed or equal items do not give them."""

    mean: float
    low: float | None
    high: float | None


def macro_f1(true: Integers, predicted: Integers, classes: int) -> float:
    """The mean F1 of the classes that occur among the labels or the predictions (as in scikit-learn)."""
    return float(_macro_f1(np.ones((1, len(true))), true, predicted, classes)[0])


def interval(
    numerators: NDArray | SufficientStatistics, denominators: NDArray | None = None, *, key: Key = ()
) -> Interval:
    """The mean score of S models on the same N items; both arrays are (S, N).

    A score is the sum of the numerators over that of the denominators: for accuracy 1 where a model is right, over 1;
    for tagging the correct words of each sentence over its words; for F1 twice the correct entities over the predicted
    and true ones. A score that is not a ratio, such as BLEU, comes as SufficientStatistics of (S, N, K) counts.
    """
    scores = _resampled_scores(numerators, denominators, key)
    return crossed_interval(*scores, items=numerators.shape[1], bounds=_bounds(numerators), key=key)


def difference(
    a: NDArray | SufficientStatistics,
    b: NDArray | SufficientStatistics,
    denominators_a: NDArray | None = None,
    denominators_b: NDArray | None = None,
    *,
    key: Key = (),
) -> Interval:
    """The score of `a` minus that of `b`, all (S, N): paired by seed and by item, so shared difficulty cancels.

    Without denominators, all of them are 1.
    """
    if a.shape != b.shape:
        raise ValueError(f"a pair needs the same seeds and items, not {a.shape} and {b.shape}")
    both: NDArray | SufficientStatistics
    denominators = None
    if isinstance(a, SufficientStatistics):
        assert isinstance(b, SufficientStatistics)
        both = SufficientStatistics(np.concatenate([a.values, b.values]), a.score, a.bounds)
    elif denominators_a is None and denominators_b is None:
        scores = _resampled_scores(np.asarray(a, dtype=float) - np.asarray(b, dtype=float), None, key)
        return crossed_interval(*scores, items=a.shape[1], bounds=(-1.0, 1.0), key=key)
    else:
        assert isinstance(b, np.ndarray)
        ones = np.ones(a.shape)
        parts = [ones if part is None else part for part in (denominators_a, denominators_b)]
        both, denominators = np.vstack([a, b]), np.vstack(parts)
    means, resampled = _resampled_scores(both, denominators, key)
    seeds = a.shape[0]
    scores = means[:seeds] - means[seeds:], resampled[:, :seeds] - resampled[:, seeds:]
    lowest, highest = _bounds(both)
    return crossed_interval(*scores, items=a.shape[1], bounds=(lowest - highest, highest - lowest), key=key)


def macro_f1_interval(true: Integers, predicted: Integers, classes: int, *, key: Key = ()) -> Interval:
    """The mean macro F1 of S models; `true` is (N,), `predicted` (S, N), both class ids."""
    return crossed_interval(*_resampled_f1(true, predicted, classes, key), items=len(true), bounds=(0.0, 1.0), key=key)


def item_interval(
    numerators: NDArray | SufficientStatistics, denominators: NDArray | None = None, *, key: Key = ()
) -> Interval:
    """The score of one trained model; both arrays are (N,). Does not cover the variation between seeds."""
    (mean,), resampled = _resampled_scores(numerators[None], None if denominators is None else denominators[None], key)
    return Interval(float(mean), *_item_bounds(mean, resampled[:, 0], numerators.shape[0], _bounds(numerators)))


def item_difference(a: NDArray, b: NDArray, *, key: Key = ()) -> Interval:
    """The score of one trained model minus that of another on the same items, (N,) both: paired by item."""
    (mean,), resampled = _resampled_scores((np.asarray(a, dtype=float) - np.asarray(b, dtype=float))[None], None, key)
    return Interval(float(mean), *_item_bounds(mean, resampled[:, 0], len(a), (-1.0, 1.0)))


def _bounds(metric: NDArray | SufficientStatistics) -> tuple[float, float]:
    """The lowest and the highest possible score; a ratio of counts is between 0 and 1."""
    return metric.bounds if isinstance(metric, SufficientStatistics) else (0.0, 1.0)


def macro_f1_item_interval(true: Integers, predicted: Integers, classes: int, *, key: Key = ()) -> Interval:
    """The macro F1 of one trained model; both arrays are (N,). Does not cover the variation between seeds."""
    (mean,), resampled = _resampled_f1(true, predicted[None], classes, key)
    return Interval(float(mean), *_item_bounds(mean, resampled[:, 0], len(true), (0.0, 1.0)))


def weighted_interval(metric: WeightedMetric, *, key: Key = ()) -> Interval | None:
    """The score of one trained model, over resamples of the rows on which it is defined; None if it is not at all."""
    if np.isnan(mean := metric.total()):
        return None
    resamples = int(np.clip(MAX_WEIGHTS // (metric.rows * metric.cost), MIN_RESAMPLES, RESAMPLES))
    random, scores = generator("interval", "items", *key), []
    chunk = max(1, CHUNK_WEIGHTS // metric.rows)
    for start in range(0, resamples, chunk):
        draws = random.integers(metric.rows, size=(min(chunk, resamples - start), metric.rows))
        weights = np.stack([np.bincount(draw, minlength=metric.rows) for draw in draws])
        scores.append(metric.score(weights.astype(float)))
    resampled = np.concatenate(scores)
    return Interval(mean, *_item_bounds(mean, resampled[~np.isnan(resampled)], metric.rows, metric.bounds))


def resampled_weights(items: int, *, key: Key, resamples: int = RESAMPLES) -> Integers:
    """(R, N): how often each item occurs in every resample of the items."""
    return generator(*key).multinomial(items, np.full(items, 1 / items), resamples)


def resampled_ratios(sums: Floats, counts: Floats, *, key: Key) -> Floats:
    """The sum of `sums` over that of `counts`, both (N, ...), in every resample of the items, (R, ...)."""
    weights = resampled_weights(len(sums), key=key).astype(float)
    return ratios(weights @ sums, weights @ counts)


def ratios(sums: Floats, counts: Floats) -> Floats:
    """NaN where there are no counts."""
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=np.asarray(counts) > 0)


def ratio_interval(sums: Floats, counts: Floats, *, key: Key) -> Interval:
    """The sum of `sums` over that of `counts`, both (N,), in any unit: the resamples alone bound the interval."""
    if not counts.sum():
        return Interval(float("nan"), None, None)
    low, high = np.nanquantile(resampled_ratios(sums, counts, key=key), TAILS)
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def jackknife_interval(
    measure: Callable[..., float], *sets: Sequence[Any], bounds: tuple[float, float] = (-np.inf, np.inf)
) -> Interval:
    """A measure of one or more whole sets, with an interval from leaving out a twentieth of each at a time.

    Not a bootstrap: a resample contains items twice, which would itself lower a diversity that is measured.
    """
    groups, value = min(JACKKNIFE_GROUPS, *map(len, sets)), measure(*sets)
    if groups < 2:
        return Interval(value, None, None)
    parts = [
        measure(*([item for i, item in enumerate(items) if i % groups != group] for items in sets))
        for group in range(groups)
    ]
    spread = NORMAL_QUANTILE * float(np.sqrt((groups - 1) * np.var(parts)))
    return Interval(value, max(bounds[0], value - spread), min(bounds[1], value + spread))


def crossed_interval(
    scores: Floats, resampled: Floats, *, items: int, bounds: tuple[float, float], key: Key = ()
) -> Interval:
    """The interval over seeds and items, from each seed's score (S,) and its scores on resampled items (R, S).

    All seeds are scored on the same resamples. Neither end lies inside the interval of the resampled items alone.
    """
    from scipy.special import stdtrit

    seeds, mean = len(scores), float(scores.mean())
    if seeds < 2:
        return Interval(mean, None, None)
    mean_scores = resampled.mean(1)  # (R,)
    low, high = _item_bounds(mean, mean_scores, items, bounds)
    if low is None or high is None:
        return Interval(mean, None, None)
    # the interaction's share in the variance of the mean over seeds
    interaction = float((resampled - mean_scores[:, None]).var(0).sum()) / (seeds - 1) / seeds
    between = float(scores.var(ddof=1)) / seeds - NORMAL_QUANTILE / stdtrit(seeds - 1, TAILS[1]) * interaction
    if between > 0:
        # evenly spaced quantiles of Student's t: random draws would make its heavy tails noisy
        quantiles = stdtrit(seeds - 1, (np.arange(RESAMPLES) + 0.5) / RESAMPLES)  # (R,)
        effect = generator("interval", "seeds", *key).permutation(quantiles) * between**0.5
        seed_low, seed_high = _item_bounds(mean, mean_scores + effect, items, bounds)
        if seed_low is not None and seed_high is not None:
            low, high = min(low, seed_low), max(high, seed_high)
    return Interval(mean, low, high)


def _item_bounds(
    mean: float, resampled: Floats, items: int, bounds: tuple[float, float]
) -> tuple[float, float] | tuple[None, None]:
    """The interval of the resampled scores (R,), which contains the mean and stays within the bounds.

    If all items are alike, the rule of three covers what N of them do not show, in units of the highest score. Without
    a lowest and a highest score, such as for an error in dollars, there is no interval then.
    """
    if not len(resampled) or np.ptp(resampled) == 0:
        if not np.isfinite(bounds).all():
            return None, None
        low, high = mean - 3 * bounds[1] / items, mean + 3 * bounds[1] / items
    else:
        low, high = (float(edge) for edge in np.quantile(resampled, TAILS))
    return float(max(min(low, mean), bounds[0])), float(min(max(high, mean), bounds[1]))


def _resampled_scores(
    numerators: NDArray | SufficientStatistics, denominators: NDArray | None, key: Key
) -> tuple[Floats, Floats]:
    """The score of each of S models, (S,), and their scores on every resample of the items, (R, S)."""
    if isinstance(numerators, SufficientStatistics):
        return _resampled_statistics(numerators, key)
    numerators = np.asarray(numerators)
    if denominators is None:
        distinct, weights = _resample(numerators, key)
        return numerators.mean(1), weights @ distinct.T.astype(np.float32) / np.float32(numerators.shape[1])
    distinct, weights = _resample(np.vstack([numerators, denominators]), key)
    above, below = (weights @ part.T.astype(np.float32) for part in np.split(distinct, [len(numerators)]))
    means = numerators.sum(1) / np.maximum(np.asarray(denominators).sum(1), 1e-9)
    return means, above / np.maximum(below, 1e-9)


def _resampled_statistics(statistics: SufficientStatistics, key: Key) -> tuple[Floats, Floats]:
    """The same for (S, N, K) counts, which are summed over a resample, then scored. Few items have equal counts."""
    seeds, items, counts = statistics.shape
    weights = _occurrences(generator("interval", "items", *key), np.arange(items), np.empty((RESAMPLES, items)))
    by_item = statistics.values.transpose(1, 0, 2).reshape(items, seeds * counts)
    sums = weights @ by_item.astype(np.float64)  # (R, N) @ (N, S K)
    return statistics.total(), statistics.score(sums.reshape(RESAMPLES, seeds, counts))


def _resampled_f1(true: Integers, predicted: Integers, classes: int, key: Key) -> tuple[Floats, Floats]:
    (distinct_true, *distinct), weights = _resample(np.vstack([true[None], predicted]), key)
    scores = np.array([macro_f1(true, row, classes) for row in predicted])
    return scores, np.stack([_macro_f1(weights, distinct_true, row, classes) for row in distinct], axis=1)


def _resample(items: NDArray, key: Key) -> tuple[NDArray, Floats]:
    """The U distinct columns of `items` and how often each occurs in every resample of N columns, (R, U).

    Items on which all models behave alike are interchangeable, so ten thousand items have a few dozen distinct columns.
    """
    random = generator("interval", "items", *key)
    distinct, inverse, counts = np.unique(items, axis=1, return_inverse=True, return_counts=True)
    total = items.shape[1]
    if len(counts) < 30 + total / 10:  # both ways draw from the same distribution, each faster on its side of this
        return distinct, random.multinomial(total, counts / total, size=RESAMPLES).astype(np.float32)
    return distinct, _occurrences(random, inverse.ravel(), np.empty((RESAMPLES, len(counts)), dtype=np.float32))


def _occurrences(random: np.random.Generator, kinds: Integers, weights: Floats) -> Floats:
    """Fill (R, U): how often each of U kinds occurs in every resample of N items of these kinds."""
    resamples, count = weights.shape
    for part in np.split(weights, range(0, resamples, max(1, CHUNK_DRAWS // len(kinds)))[1:]):
        drawn = kinds[random.integers(len(kinds), size=(len(part), len(kinds)))]
        drawn += count * np.arange(len(part))[:, None]
        part[:] = np.bincount(drawn.ravel(), minlength=part.size).reshape(part.shape)
    return weights


def _macro_f1(weights: Floats, true: Integers, predicted: Integers, classes: int) -> Floats:
    """Macro F1 under each row of item weights (R, U) -> (R,)."""
    is_true, is_predicted = (labels[:, None] == np.arange(classes) for labels in (true, predicted))  # (U, C)
    true_positives = weights @ (is_true & is_predicted).astype(weights.dtype)  # (R, C)
    denominators = weights @ (is_true.astype(weights.dtype) + is_predicted)  # 2 TP + FP + FN
    f1 = np.divide(2 * true_positives, denominators, out=np.zeros_like(true_positives), where=denominators > 0)
    return f1.sum(1) / np.maximum((denominators > 0).sum(1), 1)
