"""Error statistics that tasks share: confusion matrix, calibration, effect of length, confident errors, label errors.

Shapes: N rows, C classes, M models. `true` holds class ids; probabilities are those of held-out rows.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstock.data.records import Records

Integers = NDArray[np.integer]
Floats = NDArray[np.floating]

BINS = 10
MAX_ERRORS = 20  # in a report
MAX_ATTRIBUTED = 12  # of these, how many get an attribution to tokens
MIN_GROUP = 5  # texts in either group for a test of lengths
SIGNIFICANCE = 0.05
MAX_MATRIX_CLASSES = 200  # with more classes, the report has the most frequent confusions instead of a matrix
MAX_CONFUSIONS = 200
AGREEMENT = 0.75  # share of the models that must suggest the same other label
TOO_FEW_ERRORS, TOO_FEW_CORRECT = "Too few errors to tell.", "Too few correct predictions to tell."


def confusion(true: Integers, predicted: Integers, classes: int) -> list[list[int]]:
    """Counts by true class (row) and predicted class (column)."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes).tolist()


def confusions(true: Integers, predicted: Integers, classes: int) -> dict[str, Any]:
    """The matrix as `confusion`; for very many classes only the most frequent confusions, as `confusion_pairs`.

    Those are [true class, predicted class, count, rows of the true class], and the diagonal is summed in
    `confusion_right`: a matrix of 10,000 classes would take a gigabyte.
    """
    if classes <= MAX_MATRIX_CLASSES:
        return {"confusion": confusion(true, predicted, classes)}
    wrong = true != predicted
    pairs, counts = np.unique(np.stack([true[wrong], predicted[wrong]]), axis=1, return_counts=True)
    rows = np.bincount(true, minlength=classes)
    largest = np.argsort(-counts, kind="stable")[:MAX_CONFUSIONS]
    entries = [[int(a), int(b), int(counts[i]), int(rows[a])] for i in largest for a, b in [pairs[:, i]]]
    return {"confusion_pairs": entries, "confusion_right": int((~wrong).sum()), "confusion_total": len(true)}


def calibration(probabilities: Floats, true: Integers) -> dict[str, Any]:
    """`reliability` of the most likely class."""
    return reliability(probabilities.max(1), probabilities.argmax(1) == true)


def reliability(confidence: Floats, correct: NDArray) -> dict[str, Any]:
    """The accuracy of predictions by confidence, (N,) each, in ten equal bins; empty bins are left out.

    `ece` is the expected calibration error: the mean gap between confidence and accuracy, weighted by the bins' rows.
    """
    bin_ids = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)  # the upper edge is inside, so 1.0 too
    bins, gap = [], 0.0
    for number in np.unique(bin_ids):
        inside = bin_ids == number
        mean, accuracy = float(confidence[inside].mean()), float(correct[inside].mean())
        edges = {"low": float(number) / BINS, "high": float(number + 1) / BINS}
        bins.append({**edges, "count": int(inside.sum()), "confidence": mean, "accuracy": accuracy})
        gap += int(inside.sum()) * abs(mean - accuracy)
    return {"bins": bins, "ece": gap / len(correct)}


def length_effect(
    correct: Sequence[int], wrong: Sequence[int], *, errors: str = "wrongly classified texts"
) -> dict[str, Any]:
    """Whether length matters: Mann-Whitney's test of the lengths of correctly and wrongly predicted rows.

    `probability` is that of a wrong one being longer than a correct one; ties count half.
    """
    from scipy.stats import mannwhitneyu

    p, probability = 1.0, 0.5
    if len(correct) and len(wrong):
        test = mannwhitneyu(wrong, correct, alternative="two-sided")
        probability = float(test.statistic) / (len(wrong) * len(correct))
        p = 1.0 if np.isnan(test.pvalue) else float(test.pvalue)  # all lengths are equal
    significant = min(len(correct), len(wrong)) >= MIN_GROUP and p < SIGNIFICANCE
    p_text = f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
    numbers = f"(a wrong one is longer with probability {probability:.2f}; {p_text})"
    if len(wrong) < MIN_GROUP:
        text = TOO_FEW_ERRORS
    elif len(correct) < MIN_GROUP:
        text = TOO_FEW_CORRECT
    elif significant:
        text = f"Yes: {errors} tend to be {'longer' if probability > 0.5 else 'shorter'} than the others {numbers}."
    else:
        text = f"No: {errors} are neither clearly longer nor clearly shorter than the others {numbers}."
    return {"p": p, "probability": probability, "matters": significant, "text": text}


def length_analysis(lengths: Integers, correct: NDArray, *, errors: str) -> dict[str, Any]:
    """The lengths (N,), in words, of correctly and wrongly predicted rows, and a test of their difference."""
    right, wrong = lengths[correct].tolist(), lengths[~correct].tolist()
    return {"right": right, "wrong": wrong, "unit": "words", "statistic": length_effect(right, wrong, errors=errors)}


def most_confident_errors(confidence: Floats, correct: NDArray, *, limit: int = MAX_ERRORS) -> list[int]:
    """The wrongly predicted rows, the most confident first."""
    wrong = np.flatnonzero(~correct)
    return wrong[np.argsort(-confidence[wrong], kind="stable")][:limit].tolist()


def error_record(
    location: str, text: str, *, label: str, predicted: str, confidence: float | None, **details: Any
) -> dict[str, Any]:
    """A wrong prediction, as results.json stores it; `tokens` may get an attribution later."""
    return {
        "place": location,
        "text": text,
        "label": label,
        "predicted": predicted,
        "confidence": None if confidence is None else round(float(confidence), 5),
        "tokens": [],
        **details,
    }


def label_errors(
    probabilities: Floats, labels: Integers, *, rows: Records, classes: Sequence[str], limit: int = 50
) -> list[dict[str, Any]]:
    """Rows whose label is probably wrong, by confident learning over M models' probabilities (M, N, C).

    A model suggests another label when it predicts another class with at least its mean confidence in that class on
    the rows that carry it. A row is reported when at least three quarters of the models suggest the same class; the
    largest mean margin between the two classes comes first.
    """
    models, count, _ = probabilities.shape
    texts = rows.display_texts
    votes = _suggestions(probabilities, labels).sum(0)  # (N, C)
    suggested, agree = votes.argmax(1), votes.max(1)
    mean, indices = probabilities.mean(0), np.arange(count)
    margin = mean[indices, suggested] - mean[indices, labels]
    reported = np.flatnonzero(agree >= ceil(AGREEMENT * models))
    return [
        {
            "place": rows.location(row),
            "text": texts[row],
            "label": classes[labels[row]],
            "suggested": classes[suggested[row]],
            "confidence": float(mean[row, suggested[row]]),
            "agree": int(agree[row]),
            "of": models,
        }
        for row in reported[np.argsort(-margin[reported], kind="stable")][:limit]
    ]


def _suggestions(probabilities: Floats, labels: Integers) -> NDArray[np.bool_]:
    """(M, N, C) True where a model would replace the row's label by that class."""
    class_ids = np.arange(probabilities.shape[2])
    has_label = labels[:, None] == class_ids  # (N, C)
    rows = has_label.sum(0)
    mean_confidence = (probabilities * has_label).sum(1) / np.maximum(rows, 1)  # (M, C) in a class on its own rows
    mean_confidence[:, rows == 0] = np.inf  # a class without rows is never suggested
    is_top = probabilities.argmax(2)[:, :, None] == class_ids
    return is_top & ~has_label & (probabilities >= mean_confidence[:, None])
