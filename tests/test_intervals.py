"""Coverage and width of confidence intervals, and their determinism."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from headstock.cli.prediction import calibration_lines, slice_lines
from headstock.intervals import (
    TAILS,
    Formula,
    WeightedMetric,
    _resampled_scores,
    crossed_interval,
    difference,
    interval,
    item_interval,
    macro_f1,
    macro_f1_interval,
    macro_f1_item_interval,
    weighted_interval,
)
from headstock.report.format import Difference
from headstock.report.format import interval as score_interval
from headstock.rng import generator
from headstock.tasks.text_metrics import format_range


@pytest.fixture
def few_resamples(monkeypatch):
    """Coverage needs many trials, but few resamples in each."""
    monkeypatch.setattr("headstock.intervals.RESAMPLES", 400)
    return 400


def simulate(random, *, seeds: int, items: int, seed_spread: float, ease=1.5) -> np.ndarray:
    """(S, N) 1 where a model is right: items differ in difficulty, seeds in quality, and the remainder is noise."""
    logits = random.normal(ease, 2, items) + random.normal(0, seed_spread, (seeds, 1))
    return (random.random((seeds, items)) < 1 / (1 + np.exp(-logits))).astype(int)


def expected_accuracy(ease: float, spread: float) -> float:
    """The mean of the logistic function over a normal logit: the accuracy over the population of seeds and items."""
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    return float(weights @ (1 / (1 + np.exp(-(ease + spread * points)))) / weights.sum())


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_macro_f1_matches_scikit_learn(classes, rows):
    true, predicted = np.array(rows).T % classes
    assert macro_f1(true, predicted, classes) == pytest.approx(f1_score(true, predicted, average="macro"))


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("seed_spread", [0.0, 0.4])
def test_intervals_cover_the_true_score_95_percent_of_the_time(few_resamples, seeds, seed_spread):
    """Where seeds matter (spread 0.4), resampling three seeds would cover the true score only 88% of the time."""
    random = generator("coverage", seeds)
    truth = expected_accuracy(1.5, (4 + seed_spread**2) ** 0.5)
    inside = []
    for trial in range(120):
        estimate = interval(simulate(random, seeds=seeds, items=500, seed_spread=seed_spread), key=(trial,))
        inside.append(estimate.low <= truth <= estimate.high)
    assert 0.90 <= np.mean(inside) < 1  # 120 trials are themselves uncertain by 2 points


def test_intervals_cover_the_true_difference_95_percent_of_the_time(few_resamples):
    random = generator("coverage of differences")
    spread = (4 + 4 + 0.2**2) ** 0.5  # difficulty shared by both arms, difficulty of one arm, and seeds
    truth = expected_accuracy(1.4, spread) - expected_accuracy(1.0, spread)
    inside = []
    for trial in range(120):
        ease = random.normal(1, 2, 500)
        a, b = (simulate(random, seeds=3, items=500, seed_spread=0.2, ease=ease + better) for better in (0.4, 0))
        estimate = difference(a, b, key=(trial,))
        inside.append(estimate.low <= truth <= estimate.high)
    assert 0.90 <= np.mean(inside) < 1


# Never narrower than resampling the rows alone


def rows_only(values: np.ndarray) -> tuple[float, float]:
    """The bootstrap interval of the mean over seeds (S, N), from other resamples than the ones under test."""
    means = values.mean(0)
    rows = generator("rows only").integers(len(means), size=(4000, len(means)))
    low, high = np.quantile(means[rows].mean(1), TAILS)
    return float(low), float(high)


def test_seeds_that_tie_do_not_make_a_difference_clear():
    """Two seeds with 9 wins to 5 losses and 18 to 14, of 100 rows: +4 points each, and the rows allow -2.5 to 10.5."""
    a, b = np.zeros((2, 2, 100))
    a[0, :9], b[0, 9:14] = 1, 1
    a[1, 20:38], b[1, 40:54] = 1, 1
    low, high = rows_only(a - b)
    estimate = difference(a, b)
    assert estimate.mean == pytest.approx(0.04)
    assert estimate.low == pytest.approx(low, abs=0.0051) and estimate.high == pytest.approx(high, abs=0.0051)
    assert estimate.low < 0 < estimate.high


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(5, 120), st.sampled_from([0.0, 0.5, 0.95]), st.integers(0, 10_000))
def test_an_interval_is_never_narrower_than_that_of_the_rows_alone(seeds, items, agreement, number):
    """Computed from the same resamples, whether seeds agree by chance, systematically, or not at all."""
    random = generator("never narrower", number)
    values = random.integers(-1, 2, size=(seeds, items)).astype(float)
    values = np.where(random.random((seeds, items)) < agreement, values[:1], values)
    scores, resampled = _resampled_scores(values, None, ())
    low, high = np.quantile(resampled.mean(1), TAILS)
    estimate = crossed_interval(scores, resampled, items=items, bounds=(-1.0, 1.0))
    assert estimate.low <= low + 1e-9 and estimate.high >= high - 1e-9


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.0), (2, 0.3), (3, 0.0), (3, 0.3), (5, 0.0), (5, 0.3)])
def test_false_positive_rate_of_differences(few_resamples, seeds, spread):
    """The rate is that of 95% intervals, over all trials and over those with a narrow interval."""
    random, trials, items = generator("false clear", seeds, str(spread)), 400, 100
    ease = random.normal(1.5, 2, (trials, 1, items))
    logits = ease + random.normal(0, spread, (2, trials, seeds, 1))  # arms, trials, seeds, items
    values = np.subtract(*(random.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32))
    weights = random.multinomial(items, np.full(items, 1 / items), few_resamples).astype(np.float32)
    resampled = (weights @ values.reshape(-1, items).T / items).reshape(few_resamples, trials, seeds)
    clear, width = [], []
    for trial, outcomes in enumerate(values):
        row_bounds = np.quantile(resampled[:, trial].mean(1), TAILS)
        estimate = crossed_interval(
            outcomes.mean(1), resampled[:, trial], items=items, bounds=(-1.0, 1.0), key=(trial,)
        )
        clear.append(estimate.low > 0 or estimate.high < 0)
        width.append((estimate.high - estimate.low) / np.ptp(row_bounds))
    assert min(width) > 0.999
    assert 0.0 < np.mean(clear) <= 0.07
    narrow = np.array(width) <= np.quantile(width, 0.25)
    assert np.mean(np.array(clear)[narrow]) <= (0.12 if spread == 0 else 0.3)


def test_intervals_are_deterministic_for_a_key():
    correct = simulate(generator("same"), seeds=3, items=300, seed_spread=0.3)
    assert interval(correct, key=("a",)) == interval(correct, key=("a",))
    again = interval(correct, key=("b",))
    assert again != interval(correct, key=("a",))
    assert again.low == pytest.approx(interval(correct, key=("a",)).low, abs=0.01)


def test_seeds_that_differ_widen_an_interval_and_more_of_them_narrow_it():
    random = generator("width")

    def width(correct):
        estimate = interval(correct)
        return estimate.high - estimate.low

    alike = np.repeat(simulate(random, seeds=1, items=400, seed_spread=0), 4, axis=0)
    assert width(alike) == pytest.approx(width(alike[:2]), abs=0.01)  # a seed that changes nothing adds nothing
    better = alike.copy()
    better[0], better[1, :150] = 1, 0
    assert width(better) > 1.5 * width(alike)
    assert width(np.tile(better, (3, 1))) < 0.6 * width(better)


def test_pairing_cancels_shared_difficulty():
    random = generator("pairs")
    b = simulate(random, seeds=4, items=500, seed_spread=0)
    a = b.copy()
    a[:, :15] = 1  # a is b, a little better
    paired = difference(a, b)
    assert paired.mean == pytest.approx(a.mean() - b.mean())
    assert 0 < paired.low < paired.mean < paired.high
    shuffled = difference(a, b[:, random.permutation(500)])  # the control: the same accuracies, no longer paired
    assert shuffled.low < 0 < shuffled.high


def test_a_reversed_difference_is_the_negative():
    random = generator("turned")
    a, b = (simulate(random, seeds=3, items=200, seed_spread=0.3, ease=ease) for ease in (1, 1.5))
    forward, backward = difference(a, b), difference(b, a)
    assert forward.mean == pytest.approx(-backward.mean)
    assert forward.low == pytest.approx(-backward.high, abs=0.02)


def test_denominators_that_are_left_out_are_ones():
    random = generator("denominators")
    a = random.integers(0, 3, (3, 50)).astype(float)
    b = random.integers(0, 2, (3, 50)).astype(float)
    twos, ones = np.full(a.shape, 2.0), np.ones(b.shape)
    left_out = difference(a, b, twos, None)
    assert left_out == difference(a, b, twos, ones)
    assert left_out.mean == pytest.approx(a.mean() / 2 - b.mean())
    assert difference(b, a, None, twos) == difference(b, a, ones, twos)


def test_one_seed_gives_a_mean_and_no_interval():
    correct = simulate(generator("one"), seeds=1, items=50, seed_spread=0)
    assert interval(correct) == (correct.mean(), None, None)
    assert difference(correct, 1 - correct)[1:] == (None, None)
    assert macro_f1_interval(correct[0], correct, 2) == (1.0, None, None)


def test_two_seeds_that_differ_determine_nothing():
    """Student's t with one degree of freedom is 12.7; an interval of 0 to 100 would look like a measurement."""
    true = np.arange(40) % 2
    predicted = np.stack([np.zeros(40, dtype=int), np.where(np.arange(40) < 28, true, 0)])
    estimate = macro_f1_interval(true, predicted, 2)
    assert (estimate.low, estimate.high) == (0.0, 1.0)
    assert format_range("macro_f1", estimate.low, estimate.high) == "undetermined"
    gap = difference(predicted == true, predicted[::-1] == true)
    assert gap[1:] == (-1.0, 1.0)
    pair = {"difference": gap.mean, "low": gap.low, "high": gap.high}
    assert Difference.of(pair).signed == "+0.0 points, 95% CI undetermined"
    assert score_interval(gap.low, gap.high) == "undetermined"
    five = macro_f1_interval(true, np.concatenate([predicted, predicted[[0, 1, 0]]]), 2)
    assert 0 < five.low < five.high < 1 and " to " in format_range("macro_f1", five.low, five.high)


def test_items_must_be_the_same_for_a_pair():
    with pytest.raises(ValueError, match=r"\(3, 10\) and \(2, 10\)"):
        difference(np.ones((3, 10)), np.ones((2, 10)))


def test_item_interval_matches_the_binomial():
    correct = np.arange(400) < 320
    mean, low, high = item_interval(correct)
    assert mean == 0.8
    assert (high - low) / 2 == pytest.approx(1.96 * (0.8 * 0.2 / 400) ** 0.5, rel=0.1)


def test_a_perfect_score_is_not_certain():
    assert item_interval(np.ones(30)) == pytest.approx((1.0, 0.9, 1.0))  # the rule of three
    assert interval(np.ones((3, 300))) == pytest.approx((1.0, 0.99, 1.0))


def test_equal_items_give_no_interval_in_a_unit_without_bounds():
    """One row with an error of 500 dollars does not show that errors are 497 to 503."""
    error = Formula(lambda sums: sums[..., 0] / np.maximum(sums[..., 1], 1), (0.0, np.inf))
    rows = np.array([[[500.0, 1.0]], [[400.0, 1.0]]])  # two seeds, one row
    assert item_interval(error.of(rows[0])) == (500, None, None)
    assert interval(error.of(rows)) == (450, None, None)
    assert difference(error.of(rows), error.of(rows)) == (0, None, None)
    change = WeightedMetric(lambda weights: np.full(len(weights), -2.0), rows=5, bounds=(-np.inf, np.inf))
    assert weighted_interval(change) == (-2, None, None)
    assert difference(np.ones((2, 30)), np.ones((2, 30))) == pytest.approx((0, -0.1, 0.1))
    several = np.stack([np.arange(20.0), np.ones(20)], 1)
    estimate = item_interval(error.of(several))
    assert 5 < estimate.low < estimate.mean < estimate.high < 14


@pytest.mark.parametrize(("seeds", "distinct"), [(2, 4), (14, 300)])
def test_few_and_many_distinct_items_are_resampled_alike(seeds, distinct):
    """Few distinct items are drawn together, many one by one; the spread is that of a mean of N either way."""
    values = generator("kinds").integers(2, size=(seeds, 310))
    assert len(np.unique(values, axis=1).T) >= distinct
    means, resampled = _resampled_scores(values, None, ())
    assert resampled.mean(0) == pytest.approx(means, abs=0.005)
    assert resampled.std(0) == pytest.approx(values.std(1) / 310**0.5, rel=0.1)


def test_macro_f1_interval_follows_a_plain_bootstrap():
    random = generator("f1")
    true = random.integers(3, size=150)
    predicted = np.where(random.random((2, 150)) < 0.7, true, random.integers(3, size=(2, 150)))
    estimate = macro_f1_item_interval(true, predicted[0], 3)
    scores = []
    for _ in range(300):
        rows = random.integers(150, size=150)
        scores.append(macro_f1(true[rows], predicted[0, rows], 3))
    assert estimate.mean == pytest.approx(f1_score(true, predicted[0], average="macro"))
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(scores, [0.025, 0.975])), abs=0.025)
    both = macro_f1_interval(true, predicted, 3)
    assert both.mean == pytest.approx(np.mean([f1_score(true, row, average="macro") for row in predicted]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 10_000))
def test_an_interval_contains_its_mean_and_stays_in_range(seeds, items, number):
    random = generator("range", number)
    a, b = random.integers(2, size=(2, seeds, items))
    for estimate, floor in ((interval(a), 0), (difference(a, b), -1), (macro_f1_interval(a[0], b, 2), 0)):
        if seeds > 1:
            assert floor <= estimate.low <= estimate.mean <= estimate.high <= 1


# Scores that are ratios: items that weigh differently, F1


def sentences(random, *, seeds: int, items: int, seed_spread: float) -> tuple[np.ndarray, np.ndarray]:
    """(S, N) correct words of each sentence, (S, N) its words: long sentences are easier, so their weight matters."""
    words = random.choice([1, 3], items)  # few distinct items, so that many trials are fast
    logits = random.normal(0, 1, items) + words / 2 + random.normal(0, seed_spread, (seeds, 1))
    correct = random.binomial(words, 1 / (1 + np.exp(-logits)))
    return correct, np.broadcast_to(words, correct.shape)


@pytest.mark.parametrize("seed_spread", [0.0, 0.4])
def test_intervals_cover_the_true_ratio_95_percent_of_the_time(few_resamples, seed_spread):
    random = generator("coverage of ratios")
    words = np.array([1, 3])
    each = np.array([expected_accuracy(count / 2, (1 + seed_spread**2) ** 0.5) for count in words])
    truth = float((words * each).sum() / words.sum())
    inside = []
    for trial in range(120):
        numerators, denominators = sentences(random, seeds=3, items=450, seed_spread=seed_spread)
        estimate = interval(numerators, denominators, key=(trial,))
        inside.append(estimate.low <= truth <= estimate.high)
        assert estimate.mean == pytest.approx(np.mean(numerators.sum(1) / denominators.sum(1)))
    assert 0.90 <= np.mean(inside) < 1
    assert abs(truth - each.mean()) > 0.04  # the control: a mean over sentences would be another number


def test_a_ratio_with_denominators_of_one_is_a_mean():
    random = generator("ones")
    a, b = (simulate(random, seeds=3, items=200, seed_spread=0.3, ease=ease) for ease in (1, 1.5))
    ones = np.ones_like(a)
    assert interval(a, ones) == pytest.approx(interval(a), abs=1e-6)
    assert item_interval(a[0], ones[0]) == pytest.approx(item_interval(a[0]), abs=1e-6)
    assert difference(a, b, ones, ones).mean == pytest.approx(difference(a, b).mean)
    # distinct items are found by both models here, by their difference there: other draws of the same distribution
    assert difference(a, b, ones, ones) == pytest.approx(difference(a, b), abs=0.01)


def entities(random, *, seeds: int, items: int, recall: float) -> tuple[np.ndarray, np.ndarray]:
    """(S, N) twice the true positives of each sentence, (S, N) its true and predicted entities: F1's two sides."""
    actual = random.poisson(2, items)
    true_positives = random.binomial(actual, recall, (seeds, items))
    false_positives = random.poisson(0.5, (seeds, items))  # differ between models, so the denominators do
    return 2 * true_positives, actual + true_positives + false_positives


def test_f1_difference_with_different_denominators():
    random = generator("f1 pairs")
    state = random.bit_generator.state
    a, totals_a = entities(random, seeds=3, items=400, recall=0.8)
    random.bit_generator.state = state  # the same sentences
    b, totals_b = entities(random, seeds=3, items=400, recall=0.6)
    assert (totals_a != totals_b).any()
    gap = difference(a, b, totals_a, totals_b)
    assert gap.mean == pytest.approx(np.mean(a.sum(1) / totals_a.sum(1)) - np.mean(b.sum(1) / totals_b.sum(1)))
    assert 0 < gap.low < gap.mean < gap.high < 0.25
    back = difference(b, a, totals_b, totals_a)
    assert (back.mean, back.low) == (pytest.approx(-gap.mean), pytest.approx(-gap.high, abs=0.01))
    assert difference(a, a, totals_a, totals_a).mean == 0
    with pytest.raises(ValueError, match="the same seeds and items"):
        difference(a, b[:, :-1], totals_a, totals_b[:, :-1])


def test_item_interval_of_f1_follows_a_plain_bootstrap():
    random = generator("f1 items")
    numerators, denominators = (side[0] for side in entities(random, seeds=1, items=120, recall=0.7))
    estimate = item_interval(numerators, denominators)
    rows = random.integers(120, size=(2000, 120))
    scores = numerators[rows].sum(1) / denominators[rows].sum(1)
    assert estimate.mean == numerators.sum() / denominators.sum()
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(scores, [0.025, 0.975])), abs=0.01)


def test_empty_items_do_not_change_the_score():
    """A sentence without true or predicted entities is not evidence."""
    numerators, denominators = entities(generator("empty"), seeds=3, items=100, recall=0.7)
    padded = [np.hstack([side, np.zeros((3, 50), dtype=int)]) for side in (numerators, denominators)]
    assert interval(*padded).mean == interval(numerators, denominators).mean
    estimate = interval(np.zeros((3, 10)), np.zeros((3, 10)))
    assert (estimate.mean, estimate.low) == (0, 0)


def test_metrics_without_an_interval_are_printed():
    groups = [{"value": "Rome", "rows": 1, "score": 500.0, "low": None, "high": None}]
    slices = {"slice_metric": "mae", "slices": [{"slice": "city", "groups": groups}]}
    assert [line.split() for line in slice_lines(slices)][1] == ["Rome", "1", "rows", "500"]
    change = {"loss_change": -0.5, "loss_change_interval": [None, None]}
    assert list(calibration_lines(change)) == ["calibration changes the loss by -0.5000"]
