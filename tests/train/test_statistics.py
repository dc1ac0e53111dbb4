"""Intervals of metrics that are computed from sufficient statistics, such as BLEU."""

import numpy as np
import pytest

from headstock.intervals import SufficientStatistics, difference, interval, item_interval
from headstock.tasks.text_metrics import bleu, bleu_counts

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "red", "blue", "house", "tree"]


def ratio(sums):
    return sums[..., 0] / sums[..., 1]


def noisy(references, rate, random):
    rows = (row.split() for row in references)
    return [" ".join(random.choice(WORDS) if random.random() < rate else word for word in row) for row in rows]


@pytest.fixture(scope="module")
def references():
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, 8)) for _ in range(150)]


def counts_of(references, rate, seeds):
    return np.stack(
        [bleu_counts(noisy(references, rate, np.random.default_rng(seed)), references) for seed in range(seeds)]
    )


def test_sufficient_statistics_give_the_interval_of_a_ratio():
    random = np.random.default_rng(1)
    counts = random.integers(1, 9, (3, 400)).astype(float)
    correct = np.floor(counts * random.uniform(0.2, 1, (3, 400)))
    plain = interval(correct, counts)
    from_statistics = interval(SufficientStatistics(np.stack([correct, counts], -1), ratio))
    assert from_statistics.mean == pytest.approx(plain.mean)
    assert from_statistics.low == pytest.approx(plain.low, abs=0.006) and from_statistics.high == pytest.approx(
        plain.high, abs=0.006
    )
    plain = item_interval(correct[0], counts[0])
    from_statistics = item_interval(SufficientStatistics(np.stack([correct[0], counts[0]], -1), ratio))
    assert from_statistics.mean == pytest.approx(plain.mean)
    assert from_statistics.low == pytest.approx(plain.low, abs=0.006)


def test_bleu_has_an_interval_around_the_corpus_score(references):
    counts = counts_of(references, 0.2, 3)
    bleu_interval = interval(SufficientStatistics(counts, bleu))
    assert bleu_interval.mean == pytest.approx(float(np.mean([bleu(run.sum(0)) for run in counts])))
    assert 0 < bleu_interval.low < bleu_interval.mean < bleu_interval.high < 1
    wider = interval(SufficientStatistics(counts[:, :20], bleu))
    assert wider.high - wider.low > bleu_interval.high - bleu_interval.low
    single = interval(SufficientStatistics(counts[:1], bleu))
    assert single.low is None and single.mean == pytest.approx(float(bleu(counts[0].sum(0))))


def test_differences_are_paired(references):
    better, worse = (SufficientStatistics(counts_of(references, rate, 3), bleu) for rate in (0.1, 0.3))
    gap = difference(better, worse)
    assert gap.low > 0.1 and gap.mean == pytest.approx(float((better.total() - worse.total()).mean()))
    reverse = difference(worse, better)
    assert reverse.mean == pytest.approx(-gap.mean) and reverse.high < 0
    same = difference(better, better)
    assert same.mean == 0 and same.low < 0 < same.high
    with pytest.raises(ValueError, match="same seeds and items"):
        difference(better, SufficientStatistics(worse.values[:, :10], bleu))
