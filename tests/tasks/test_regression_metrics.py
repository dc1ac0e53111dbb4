"""Metrics of predicted numbers agree with scipy and scikit-learn, on all rows and on any sample of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, rankdata, spearmanr
from sklearn.metrics import cohen_kappa_score, mean_absolute_error, mean_squared_error, r2_score

from headstock.experiments.comparison_slices import select_rows
from headstock.intervals import difference, item_interval
from headstock.tasks.regression_metrics import FORMULAS, regression_metrics
from headstock.tasks.slice_scores import group_score

NAMES = ("pearson", "spearman", "mae", "rmse", "r2")


def references(true, predicted):
    return {
        "pearson": pearsonr(true, predicted).statistic,
        "spearman": spearmanr(true, predicted).statistic,
        "mae": mean_absolute_error(true, predicted),
        "rmse": mean_squared_error(true, predicted) ** 0.5,
        "r2": r2_score(true, predicted),
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e5]), st.sampled_from([0.0, 2000.0, -3.0]))
def test_metrics_are_those_of_scipy_and_scikit_learn(seed, scale, offset):
    random = np.random.default_rng(seed)
    true = random.normal(size=50).round(1) * scale + offset
    predicted = true + random.normal(size=50) * scale
    metrics = regression_metrics(true, predicted, NAMES)
    for name, value in references(true, predicted).items():
        assert metrics[name].total() == pytest.approx(value, rel=1e-6, abs=1e-9), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_quadratic_kappa_is_cohens(seed):
    random = np.random.default_rng(seed)
    true, predicted = random.integers(1, 6, 60), random.integers(2, 7, 60)
    (kappa,) = regression_metrics(true, predicted, ["quadratic_kappa"]).values()
    assert kappa.total() == pytest.approx(cohen_kappa_score(true, predicted, weights="quadratic"))
    near = regression_metrics(true, true + 1, ["quadratic_kappa"])["quadratic_kappa"].total()
    assert near > 0.5 > cohen_kappa_score(true, true + 1)  # the control: without weights, near is as wrong as far


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_rows_is_scored_from_its_sums(name):
    random = np.random.default_rng(1)
    true, predicted = random.normal(size=80), random.normal(size=80)
    rows = random.integers(80, size=80)
    statistics = regression_metrics(true, predicted, [name])[name]
    sampled = FORMULAS[name].score(statistics.values[rows].sum(0))
    if name == "spearman":  # ranks stay those among all rows
        expected = pearsonr(rankdata(true)[rows], rankdata(predicted)[rows]).statistic
    else:
        expected = references(true[rows], predicted[rows])[name]
    assert sampled == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_is_scored_as_if_its_rows_were_alone(name):
    random = np.random.default_rng(3)
    true, predicted = random.integers(5, size=60), random.normal(size=60)
    mask = (true > 2) | (predicted > 0)
    statistics = regression_metrics(true, predicted, [name])[name]
    expected = references(true[mask], predicted[mask])[name]
    assert group_score(statistics, "high", mask)["score"] == pytest.approx(expected)
    seeds = FORMULAS[name].of(np.stack([statistics.values, statistics.values]))
    assert select_rows((seeds, None), mask)[0].total() == pytest.approx([expected, expected])


def test_constants_have_no_correlation_and_no_explained_variance():
    true, same = np.array([1.0, 2.0, 3.0]), np.full(3, 2.0)
    metrics = regression_metrics(true, same, (*NAMES, "quadratic_kappa"))
    assert {name: float(metrics[name].total()) for name in ("pearson", "spearman", "r2", "quadratic_kappa")} == {
        "pearson": 0.0,
        "spearman": 0.0,
        "r2": pytest.approx(0.0),
        "quadratic_kappa": 0.0,
    }


def test_intervals_have_the_bounds_of_the_metric_and_exclude_a_worse_model():
    random = np.random.default_rng(2)
    true = random.normal(size=200) * 7
    good, bad = (regression_metrics(true, true + random.normal(size=200) * noise, NAMES) for noise in (2.0, 9.0))
    for name in NAMES:
        low, high = item_interval(good[name])[1:]
        assert low <= good[name].total() <= high and high - low > 0
        gap = difference(good[name][None], good[name][None])
        assert gap.mean == 0
        other = item_interval(bad[name])
        assert other.low > high if name in ("mae", "rmse") else other.high < low
    assert item_interval(bad["mae"]).high > 1  # not cut off as a share would be
    assert item_interval(bad["r2"]).low < 0
