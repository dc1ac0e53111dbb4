"""Intervals of scores that are no ratio of sums, and of those that are, told as counts."""

import numpy as np
import pytest

from headstock.intervals import SufficientStatistics, difference, interval, item_interval
from headstock.tasks.text_metrics import bleu, bleu_counts

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "red", "blue", "house", "tree"]


def ratio(sums):
    return sums[..., 0] / sums[..., 1]


def noisy(wanted, rate, random):
    rows = (row.split() for row in wanted)
    return [" ".join(random.choice(WORDS) if random.random() < rate else word for word in row) for row in rows]


@pytest.fixture(scope="module")
def wanted():
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, 8)) for _ in range(150)]


def counts_of(wanted, rate, seeds):
    return np.stack([bleu_counts(noisy(wanted, rate, np.random.default_rng(seed)), wanted) for seed in range(seeds)])


def test_a_ratio_told_as_counts_has_the_interval_of_a_ratio():
    random = np.random.default_rng(1)
    of = random.integers(1, 9, (3, 400)).astype(float)
    hits = np.floor(of * random.uniform(0.2, 1, (3, 400)))
    plain, counted = interval(hits, of), interval(SufficientStatistics(np.stack([hits, of], -1), ratio))
    assert counted.mean == pytest.approx(plain.mean)
    assert counted.low == pytest.approx(plain.low, abs=0.006) and counted.high == pytest.approx(plain.high, abs=0.006)
    one, alone = (
        item_interval(hits[0], of[0]),
        item_interval(SufficientStatistics(np.stack([hits[0], of[0]], -1), ratio)),
    )
    assert alone.mean == pytest.approx(one.mean) and alone.low == pytest.approx(one.low, abs=0.006)


def test_bleu_has_an_interval_around_the_corpus_score(wanted):
    counts = counts_of(wanted, 0.2, 3)
    found = interval(SufficientStatistics(counts, bleu))
    assert found.mean == pytest.approx(float(np.mean([bleu(one.sum(0)) for one in counts])))
    assert 0 < found.low < found.mean < found.high < 1
    wider = interval(SufficientStatistics(counts[:, :20], bleu))
    assert wider.high - wider.low > found.high - found.low
    single = interval(SufficientStatistics(counts[:1], bleu))
    assert single.low is None and single.mean == pytest.approx(float(bleu(counts[0].sum(0))))


def test_a_difference_is_paired_and_clear_where_it_is_large(wanted):
    better, worse = (SufficientStatistics(counts_of(wanted, rate, 3), bleu) for rate in (0.1, 0.3))
    gap = difference(better, worse)
    assert gap.low > 0.1 and gap.mean == pytest.approx(float((better.total() - worse.total()).mean()))
    turned = difference(worse, better)
    assert turned.mean == pytest.approx(-gap.mean) and turned.high < 0
    same = difference(better, better)
    assert same.mean == 0 and same.low < 0 < same.high
    with pytest.raises(ValueError, match="same seeds and items"):
        difference(better, SufficientStatistics(worse.values[:, :10], bleu))
