"""Matthews correlation and AUROC: parity with scikit-learn, and their intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import matthews_corrcoef, roc_auc_score

from headstock.intervals import weighted_interval
from headstock.rng import generator
from headstock.tasks.class_metrics import auroc, class_metrics, mcc


def noisy_classifier(classes: int, rows: int, *, skill: float = 1.0, key: int = 0):
    """Class ids and probabilities that agree with them more often the larger `skill` is, with ties."""
    random = generator("classifier", classes, rows, key)
    true = random.integers(classes, size=rows)
    logits = skill * np.eye(classes)[true] + random.normal(size=(rows, classes)).round(1)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return true, probabilities


@pytest.mark.filterwarnings("ignore:A single label")
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_mcc_matches_scikit_learn(classes, rows):
    true, predicted = np.array(rows).T % classes
    assert mcc(true, predicted, classes).total() == pytest.approx(matthews_corrcoef(true, predicted), abs=1e-12)


@pytest.mark.parametrize("key", range(3))
def test_auroc_matches_scikit_learn(key):
    true, probabilities = noisy_classifier(2, 60, key=key)
    assert auroc(true, probabilities).total() == pytest.approx(roc_auc_score(true, probabilities[:, 1]))
    true, probabilities = noisy_classifier(4, 60, key=key)
    expected = roc_auc_score(true, probabilities, multi_class="ovr", average="macro")
    assert auroc(true, probabilities).total() == pytest.approx(expected)
    several = generator("several", key).integers(2, size=(60, 3))
    assert auroc(several, probabilities[:, :3]).total() == pytest.approx(roc_auc_score(several, probabilities[:, :3]))


def test_row_weights_count_rows_several_times():
    true, probabilities = noisy_classifier(3, 40)
    weights = generator("weights").integers(3, size=40)
    rows = np.repeat(np.arange(40), weights)
    for name, metric in class_metrics(true, probabilities).items():
        repeated = class_metrics(true[rows], probabilities[rows])[name].total()
        assert metric.score(weights[None].astype(float))[0] == pytest.approx(repeated)
        assert metric.total() != pytest.approx(repeated)  # the weights matter


def test_auroc_ranks_rows_whatever_the_decision_threshold_is():
    """A model that never predicts the rare class has accuracy 90% and no correlation, but may rank well."""
    true = np.array([0] * 90 + [1] * 10)
    scores = np.where(true == 1, 0.4, 0.1)
    metrics = class_metrics(true, np.stack([1 - scores, scores], 1))
    assert metrics["mcc"].total() == 0
    assert metrics["auroc"].total() == 1
    random = generator("chance").random(100)
    assert 0.3 < class_metrics(true, np.stack([1 - random, random], 1))["auroc"].total() < 0.7


@pytest.mark.parametrize("name", ["mcc", "auroc"])
def test_intervals_cover_the_score_of_many_rows(name, monkeypatch):
    monkeypatch.setattr("headstock.intervals.RESAMPLES", 400)
    truth = class_metrics(*noisy_classifier(2, 100_000))[name].total()
    inside = []
    for key in range(60):
        metric = class_metrics(*noisy_classifier(2, 120, key=1 + key))[name]
        estimate = weighted_interval(metric, key=(key,))
        assert estimate.low < estimate.mean < estimate.high
        inside.append(estimate.low <= truth <= estimate.high)
    assert np.mean(inside) >= 0.85
    narrow = weighted_interval(class_metrics(*noisy_classifier(2, 2000))[name])
    assert narrow.high - narrow.low < 0.5 * (estimate.high - estimate.low)


def test_auroc_of_one_class_is_undefined():
    one_class = np.zeros(5, dtype=int)
    assert weighted_interval(auroc(one_class, np.full((5, 2), 0.5))) is None
    assert mcc(one_class, one_class, 2).total() == 0  # as in scikit-learn
    few = weighted_interval(auroc(np.array([0, 0, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])))
    assert few.mean == 0.5  # resamples without the rare class are left out
