"""Temperature scaling, decision thresholds and abstention, checked against scikit-learn and on separate rows."""

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, f1_score, precision_score, recall_score

from headstock.errors import UserError
from headstock.rng import generator
from headstock.tasks.calibration import (
    Calibration,
    brier_score,
    calibration_metrics,
    decision_scores,
    fit_calibration,
    fit_temperature,
    fit_thresholds,
    risk_coverage,
    temperature_scaled,
)
from headstock.tasks.classify import mean_nll


def calibrated_rows(rows: int, classes: int, *, key: str, prior: float = 0.0):
    """Labels that are drawn from the probabilities; `prior` makes the last class rare."""
    random = generator("calibrated rows", key)
    logits = random.normal(0, 1.5, (rows, classes))
    logits[:, -1] -= prior
    honest = temperature_scaled(np.exp(logits), 1.0)
    labels = (random.random((rows, 1)) > honest.cumsum(1)).sum(1).clip(0, classes - 1)
    return labels, honest


@pytest.mark.parametrize("classes", [2, 4])
def test_temperature_of_an_overconfident_model(classes):
    """Logits three times too large need temperature 3: loss and ECE fall on other rows, and no argmax changes."""
    labels, honest = calibrated_rows(3000, classes, key="fit")
    overconfident = temperature_scaled(honest, 1 / 3)
    temperature = fit_temperature(labels, overconfident)
    assert temperature == pytest.approx(3, rel=0.1)
    test_labels, test_honest = calibrated_rows(3000, classes, key="test")
    before = temperature_scaled(test_honest, 1 / 3)
    after = temperature_scaled(before, temperature)
    assert (after.argmax(1) == before.argmax(1)).all()
    assert mean_nll(after, test_labels) < mean_nll(before, test_labels) - 0.1
    metrics = [calibration_metrics(test_labels, probabilities) for probabilities in (before, after)]
    assert metrics[1]["ece"] < 0.03 < 0.1 < metrics[0]["ece"]
    assert metrics[1]["brier"] < metrics[0]["brier"]
    # control: a calibrated model keeps its temperature, and another temperature makes it worse
    assert fit_temperature(labels, honest) == pytest.approx(1, rel=0.1)
    assert mean_nll(temperature_scaled(test_honest, 2), test_labels) > mean_nll(test_honest, test_labels)


def test_temperature_matches_scikit_learn():
    random = generator("reference")
    labels = random.integers(3, size=400)
    features = 0.7 * np.eye(3)[labels] + random.normal(size=(400, 3))
    model = LogisticRegression(C=1e4).fit(features[:40], labels[:40])  # few rows: overconfident
    rows, truth = features[40:], labels[40:]
    reference = CalibratedClassifierCV(FrozenEstimator(model), method="temperature").fit(rows, truth)
    ours = temperature_scaled(model.predict_proba(rows), fit_temperature(truth, model.predict_proba(rows)))
    assert ours == pytest.approx(reference.predict_proba(rows), abs=0.01)


def test_temperature_of_a_model_without_errors_stays_finite():
    """Without smoothed targets, the best temperature of 50 correct rows is 0, and one later error costs everything."""
    probabilities = np.tile([0.9, 0.1], (50, 1))
    temperature = fit_temperature(np.zeros(50, dtype=int), probabilities)
    assert 0.3 < temperature < 1
    assert temperature_scaled(probabilities, temperature).max() < 0.999


def test_multilabel_temperature():
    random = generator("several labels")
    honest = 1 / (1 + np.exp(-random.normal(0, 2, (3000, 3))))
    labels = (random.random((3000, 3)) < honest).astype(int)
    logits = np.log(honest / (1 - honest))
    fitted = fit_calibration(labels, 1 / (1 + np.exp(-2 * logits)), file="f", selected_epoch=False)
    assert fitted.multilabel
    assert fitted.temperature == pytest.approx(2, rel=0.1)
    assert fitted.scaled(1 / (1 + np.exp(-2 * logits))) == pytest.approx(honest, abs=0.05)


def test_a_fitted_threshold_beats_one_half_on_rare_classes():
    labels, probabilities = calibrated_rows(4000, 2, key="fit", prior=4)
    assert 0.02 < labels.mean() < 0.2  # rare
    thresholds = fit_thresholds(labels, probabilities, "f1")
    assert thresholds[1] < 0.5
    test_labels, test = calibrated_rows(4000, 2, key="test", prior=4)
    at_half, fitted = test.argmax(1), decision_scores(test, thresholds).argmax(1)
    assert (fitted == (test[:, 1] > thresholds[1])).all()
    assert f1_score(test_labels, fitted) > f1_score(test_labels, at_half) + 0.02
    balanced = decision_scores(test, fit_thresholds(labels, probabilities, "balanced_accuracy")).argmax(1)
    score = balanced_accuracy_score(test_labels, balanced)
    assert score > balanced_accuracy_score(test_labels, fitted) > balanced_accuracy_score(test_labels, at_half)


def test_threshold_for_a_precision_or_recall():
    labels, probabilities = calibrated_rows(1000, 2, key="targets", prior=2)
    for criterion, metric, other in (
        ("precision=0.8", precision_score, recall_score),
        ("recall=0.8", recall_score, precision_score),
    ):
        (_, threshold) = fit_thresholds(labels, probabilities, criterion, positive=1)
        predicted = probabilities[:, 1] > threshold
        assert metric(labels, predicted) >= 0.8
        best = other(labels, predicted)
        for cut in np.linspace(0.05, 0.9, 60):  # no other threshold that meets the target is better
            if metric(labels, probabilities[:, 1] > cut, zero_division=0) >= 0.8:
                assert other(labels, probabilities[:, 1] > cut) <= best + 1e-12


def test_thresholds_of_several_classes():
    labels, probabilities = calibrated_rows(3000, 4, key="fit", prior=3)
    thresholds = fit_thresholds(labels, probabilities, "f1")
    test_labels, test = calibrated_rows(3000, 4, key="test", prior=3)
    scores = [
        f1_score(test_labels, decision_scores(test, used).argmax(1), average="macro") for used in ((), thresholds)
    ]
    assert scores[1] > scores[0] + 0.01
    assert thresholds[3] == min(thresholds)  # of the rare class


@pytest.mark.parametrize("criterion", ["accuracy", "precision", "precision=x", "recall=2", "f1=0.5"])
def test_unknown_criteria_are_refused(criterion):
    with pytest.raises(UserError, match=criterion.partition("=")[0]):
        fit_thresholds(*calibrated_rows(20, 2, key="few"), criterion)


def test_unreachable_precision_is_refused():
    labels, scores = np.array([0, 1, 0, 1]), np.array([0.9, 0.4, 0.3, 0.2])
    with pytest.raises(UserError, match=r"at most 0\.5"):
        fit_thresholds(labels, np.stack([1 - scores, scores], 1), "precision=0.9", positive=1)
    with pytest.raises(UserError, match="rows of the class"):
        fit_thresholds(np.zeros(4, dtype=int), np.stack([1 - scores, scores], 1), "f1")


def test_brier_score_matches_scikit_learn():
    for classes in (2, 3):
        labels, probabilities = calibrated_rows(50, classes, key="brier")
        truth = probabilities[:, 1] if classes == 2 else probabilities
        assert brier_score(labels, probabilities) == pytest.approx(brier_score_loss(labels, truth))


def test_accuracy_rises_with_abstention_if_confidence_means_something():
    labels, probabilities = calibrated_rows(2000, 3, key="coverage")
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    result = risk_coverage(confidence, correct)
    half, whole = result["curve"][9], result["curve"][-1]
    assert (half["coverage"], whole["coverage"]) == (0.5, 1.0)
    assert half["accuracy"] > whole["accuracy"] + 0.05
    assert whole["accuracy"] == pytest.approx(correct.mean())
    kept = confidence >= half["confidence"]
    assert correct[kept].mean() == pytest.approx(half["accuracy"])
    # control: confidence in a random order leaves the risk as it is
    shuffled = risk_coverage(generator("shuffle").permutation(confidence), correct)
    assert result["aurc"] < shuffled["aurc"] - 0.05
    assert shuffled["aurc"] == pytest.approx(1 - correct.mean(), abs=0.05)
    assert risk_coverage(np.array([0.9, 0.8]), np.array([True, False]))["aurc"] == 0.25  # (0 + 1/2) / 2


def test_confidence_at_a_coverage():
    labels, probabilities = calibrated_rows(1000, 2, key="quantiles")
    fitted = fit_calibration(labels, probabilities, file="valid.csv", selected_epoch=True)
    below = fitted.confidence_at(0.8, calibrated=False)
    assert (probabilities.max(1) >= below).mean() == pytest.approx(0.8, abs=0.01)
    below = fitted.confidence_at(0.8, calibrated=True)
    assert (fitted.scaled(probabilities).max(1) >= below).mean() == pytest.approx(0.8, abs=0.01)
    with pytest.raises(UserError, match="temperature"):
        Calibration(0.0, 10, "f")
