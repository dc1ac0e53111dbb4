"""Calibration of class probabilities: temperature scaling, decision thresholds, abstention, and their metrics.

N rows, C classes. Labels are class ids (N,), or for multi-label classes 0 and 1 (N, C).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstock.data.records import Records
from headstock.errors import ConfigError, UserError
from headstock.tasks.error_analysis import calibration as top_class_calibration

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]

MIN_PROBABILITY = 1e-30  # in logarithms
MAX_TEMPERATURE = 20.0
PASSES = 3  # over the classes, when their thresholds are fitted in turn
CANDIDATES = 200  # thresholds tried for one of several classes
QUANTILES = 101  # of the confidence that a calibration stores
CURVE_POINTS = 20  # of a risk-coverage curve
CRITERIA = "f1, balanced_accuracy, precision=P or recall=R"


@dataclass(frozen=True)
class Calibration:
    """How the probabilities of a run are scaled and turned into decisions; fitted on rows it was not trained on."""

    temperature: float
    rows: int
    file: str
    selected_epoch: bool = False  # the same rows selected the epoch
    multilabel: bool = False  # classes are predicted independently
    thresholds: tuple[float, ...] = ()  # of the classes; without them the most probable class is predicted
    criterion: str | None = None  # what the thresholds maximize
    confidence: tuple[float, ...] = ()  # quantiles over the rows, as they are
    calibrated_confidence: tuple[float, ...] = ()  # and after calibration
    fingerprint: str | None = None  # of the rows; older runs have none

    def __post_init__(self) -> None:
        problems = [] if self.temperature > 0 else [("temperature", f"must be above 0, not {self.temperature}")]
        if any(not 0 < threshold < 1 for threshold in self.thresholds):
            problems.append(("thresholds", "must lie between 0 and 1"))
        if problems:
            raise ConfigError(problems)

    def fitted_on(self, records: Records) -> bool:
        """Whether these are the rows it was fitted on, which show less error than others would."""
        if self.fingerprint is None:
            return (self.file, self.rows) == (records.source, len(records))
        return self.fingerprint == records.fingerprint()

    def scaled(self, probabilities: Floats) -> Floats:
        """Probabilities (N, C) at this temperature."""
        scale = sigmoid_scaled if self.multilabel else temperature_scaled
        return scale(probabilities, self.temperature)

    def confidence_at(self, coverage: float, *, calibrated: bool) -> float:
        """The confidence that the given share of the rows reaches; 0 for all rows."""
        if coverage == 1:
            return 0.0
        quantiles = self.calibrated_confidence if calibrated else self.confidence
        return float(np.interp(1 - coverage, np.linspace(0, 1, len(quantiles)), quantiles))


# Temperature scaling (Guo et al. 2017): softmax(logits / T). Logits are known up to a constant, as log-probabilities.


def temperature_scaled(probabilities: Floats, temperature: float) -> Floats:
    logits = np.log(np.maximum(probabilities.astype(np.float64), MIN_PROBABILITY)) / temperature
    return softmax(logits)


def softmax(values: Floats) -> Floats:
    """Over the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid_scaled(probabilities: Floats, temperature: float) -> Floats:
    clipped = np.clip(probabilities.astype(np.float64), MIN_PROBABILITY, 1 - 1e-7)  # float32 rounds above that to 1
    return 1 / (1 + (1 / clipped - 1) ** (1 / temperature))


def fit_temperature(labels: Integers, probabilities: Floats) -> float:
    """The temperature with the lowest negative log-likelihood, which has a single minimum.

    Targets are smoothed as if one more row were undecided (Platt 1999): otherwise the temperature of rows without any
    error would be 0.
    """
    from scipy.optimize import minimize_scalar

    smoothing = 1 / (len(labels) + 2)

    def loss(log_temperature: float) -> float:
        if labels.ndim == 2:
            scaled = sigmoid_scaled(probabilities, np.exp(log_temperature))
            target = (1 - smoothing) * labels + smoothing / 2
            return float(-(target * _log(scaled) + (1 - target) * _log(1 - scaled)).sum(1).mean())
        logs = _log(temperature_scaled(probabilities, np.exp(log_temperature)))
        return float(-((1 - smoothing) * logs[np.arange(len(labels)), labels] + smoothing * logs.mean(1)).mean())

    bound = np.log(MAX_TEMPERATURE)
    return float(np.exp(minimize_scalar(loss, bounds=(-bound, bound), method="bounded", options={"xatol": 1e-5}).x))


def _log(values: Floats) -> Floats:
    return np.log(np.maximum(values, MIN_PROBABILITY))


# Decisions. With thresholds t, the class with the largest p / t is predicted; for two classes with thresholds 1 - t
# and t this is the second one where its probability exceeds t. Of multi-label classes, all with p > t are predicted.


def decision_scores(probabilities: Floats, thresholds: Sequence[float] = ()) -> Floats:
    """(N, C) probabilities divided by the thresholds and normalized: the largest is predicted, and its confidence."""
    if not len(thresholds):
        return probabilities
    ratios = probabilities / np.asarray(thresholds)
    return ratios / ratios.sum(-1, keepdims=True)


def fit_thresholds(
    labels: Integers, probabilities: Floats, criterion: str, *, positive: int | None = None
) -> tuple[float, ...]:
    """The thresholds of all classes that are best by a criterion on these rows.

    `f1` is that of the `positive` class (default: the rarer one) for two classes, the macro average for several, and
    that of each class for multi-label classes; `balanced_accuracy` is the mean recall. `precision=P` gives the
    highest recall of the positive class at that precision, `recall=R` the highest precision.
    """
    classes = probabilities.shape[1]
    rule = parse_criterion(criterion)
    if labels.ndim == 2:
        columns = range(classes) if positive is None else [positive]
        fitted = {column: best_cut(labels[:, column] == 1, probabilities[:, column], rule) for column in columns}
        return tuple(fitted.get(column, 0.5) for column in range(classes))
    if classes == 2:
        positive = int(np.bincount(labels, minlength=2).argmin()) if positive is None else positive
        threshold = best_cut(labels == positive, probabilities[:, positive], rule)
        return (1 - threshold, threshold) if positive == 1 else (threshold, 1 - threshold)
    if positive is not None or rule.target is not None:
        problem = f"a threshold for one class needs two classes or multi-label ones, but there are {classes}"
        raise UserError(f"--thresholds {criterion}: {problem}; use f1 or balanced_accuracy without --positive")
    return fit_class_weights(labels, probabilities, rule)


@dataclass(frozen=True)
class Criterion:
    """What a threshold maximizes; with a target, at least that precision or recall is required."""

    name: str
    target: float | None = None

    def score(self, hits: Floats, false_alarms: Floats, positives: Any, negatives: Any) -> Floats:
        """Of any number of thresholds at once; minus infinity where the target is missed."""
        predicted = hits + false_alarms
        precision = np.divide(hits, predicted, out=np.ones_like(hits), where=predicted > 0)
        recall = hits / np.maximum(positives, 1)
        if self.name == "f1":
            return 2 * hits / np.maximum(predicted + positives, 1)
        if self.name == "balanced_accuracy":
            return (recall + 1 - false_alarms / np.maximum(negatives, 1)) / 2
        wanted, other = (precision, recall) if self.name == "precision" else (recall, precision)
        return np.where(wanted >= self.target, other, -np.inf)


def parse_criterion(text: str) -> Criterion:
    name, _, value = text.partition("=")
    try:
        criterion = Criterion(name, float(value) if value else None)
    except ValueError:
        raise UserError(f"--thresholds {text}: {value!r} is not a number") from None
    needs_target = name in ("precision", "recall")
    if not (needs_target or name in ("f1", "balanced_accuracy")) or needs_target != (criterion.target is not None):
        raise UserError(f"--thresholds {text}: expected {CRITERIA}")
    if criterion.target is not None and not 0 < criterion.target <= 1:
        raise UserError(f"--thresholds {text}: must be above 0 and at most 1")
    return criterion


def best_cut(positive: NDArray[np.bool_], scores: Floats, criterion: Criterion) -> float:
    """The threshold on the probability of one class, halfway between two rows."""
    if not 0 < positive.sum() < len(positive):
        raise UserError("a threshold needs rows of the class and others; name a file with both")
    order = np.argsort(-scores, kind="stable")
    ranked, is_positive = scores[order].astype(np.float64), positive[order]
    hits, false_alarms = np.cumsum(is_positive).astype(float), np.cumsum(~is_positive).astype(float)
    ends = np.flatnonzero(np.append(ranked[:-1] > ranked[1:], True))  # rows with the same score are cut together
    values = criterion.score(hits[ends], false_alarms[ends], positive.sum(), (~positive).sum())
    best = ends[int(values.argmax())]
    if np.isneginf(values.max()):
        reached = (hits / (hits + false_alarms))[ends].max()
        raise UserError(f"no threshold has {criterion.name} {criterion.target} on these rows (at most {reached:.3f})")
    following = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float(np.clip((ranked[best] + following) / 2, 1e-6, 1 - 1e-6))


def fit_class_weights(labels: Integers, probabilities: Floats, criterion: Criterion) -> tuple[float, ...]:
    """Thresholds of several classes, fitted one class after the other until none changes."""
    classes, logs = probabilities.shape[1], _log(probabilities.astype(np.float64))
    offsets, by_f1 = np.zeros(classes), criterion.name == "f1"  # minus log thresholds; otherwise mean recall

    def score(predicted: Integers) -> float:
        hits, predictions, positives = (
            np.bincount(ids, minlength=classes) for ids in (labels[labels == predicted], predicted, labels)
        )
        values = 2 * hits / np.maximum(predictions + positives, 1) if by_f1 else hits / np.maximum(positives, 1)
        return float(values[positives > 0].mean())

    best = score(logs.argmax(1))
    for _ in range(PASSES):
        before = best
        for column in range(classes):
            others = np.delete(logs + offsets, column, axis=1)
            critical = np.sort(others.max(1) - logs[:, column])  # a larger offset makes the row one of this class
            for offset in np.quantile(critical, np.linspace(0, 1, min(CANDIDATES, len(critical)))) + 1e-9:
                moved = offsets.copy()
                moved[column] = offset
                if (value := score((logs + moved).argmax(1))) > best + 1e-12:
                    best, offsets = value, moved
        if best == before:
            break
    thresholds = np.exp(-(offsets - offsets.mean()))
    return tuple(np.clip(thresholds / thresholds.sum(), 1e-6, 1 - 1e-6).tolist())


# Metrics


def brier_score(labels: Integers, probabilities: Floats) -> float:
    """The mean squared error of the probabilities as in scikit-learn: for more than two classes summed over them."""
    classes = probabilities.shape[1]
    if labels.ndim == 2:
        return float(((probabilities - labels) ** 2).mean())
    errors = ((probabilities - np.eye(classes)[labels]) ** 2).sum(1).mean()
    return float(errors / 2 if classes == 2 else errors)


def risk_coverage(confidence: Floats, correct: NDArray) -> dict[str, Any]:
    """The accuracy of the most confident predictions for each coverage, and the area under the risk-coverage curve.

    Risk is the share of errors among the predictions that are kept; `aurc` is its mean over all coverages.
    """
    order = np.argsort(-confidence, kind="stable")
    accuracy = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
    counts = sorted({max(1, round(len(order) * i / CURVE_POINTS)) for i in range(1, CURVE_POINTS + 1)})
    curve = [
        {
            "coverage": count / len(order),
            "accuracy": float(accuracy[count - 1]),
            "confidence": float(confidence[order[count - 1]]),
        }
        for count in counts
    ]
    return {"aurc": float((1 - accuracy).mean()), "curve": curve}


def calibration_metrics(labels: Integers, probabilities: Floats) -> dict[str, float]:
    """Expected calibration error (`ece`) and area under the risk-coverage curve of the top class, and `brier`."""
    brier = brier_score(labels, probabilities)
    if labels.ndim == 2:
        return {"brier": brier}
    ece = top_class_calibration(probabilities, labels)["ece"]
    aurc = risk_coverage(probabilities.max(1), probabilities.argmax(1) == labels)["aurc"]
    return {"ece": ece, "brier": brier, "aurc": aurc}


def fit_calibration(
    labels: Integers,
    probabilities: Floats,
    *,
    file: str,
    selected_epoch: bool,
    criterion: str | None = None,
    positive: int | None = None,
    fingerprint: str | None = None,
) -> Calibration:
    """Fit the temperature and, by a criterion, decision thresholds for the scaled probabilities."""
    multilabel, temperature = labels.ndim == 2, round(fit_temperature(labels, probabilities), 6)
    fitted = Calibration(temperature, len(labels), file, selected_epoch, multilabel, fingerprint=fingerprint)
    if criterion:
        thresholds = fit_thresholds(labels, fitted.scaled(probabilities), criterion, positive=positive)
        fitted = replace(fitted, thresholds=thresholds, criterion=criterion)
    if multilabel:
        return fitted
    calibrated = decision_scores(fitted.scaled(probabilities), fitted.thresholds)
    return replace(fitted, confidence=quantiles(probabilities), calibrated_confidence=quantiles(calibrated))


def quantiles(scores: Floats) -> tuple[float, ...]:
    """Of the confidence, evenly spaced; rounded down, so that no row falls below its own confidence."""
    values = np.quantile(scores.max(1), np.linspace(0, 1, QUANTILES))
    return tuple((np.floor(values * 1e6) / 1e6).tolist())
