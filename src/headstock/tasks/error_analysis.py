"""Error statistics that tasks share: confusion matrix, calibration, effect of length, confident mistakes, label errors.

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
SHOWN = 20  # mistakes in a report
EXPLAINED = 12  # of these, how many get an attribution to tokens
FEW = 5  # below this many texts in either group a test of lengths says nothing
SIGNIFICANT = 0.05
MATRIX_CLASSES = 200  # of more classes no confusion matrix is kept,
MOST_PAIRS = 200  # but so many of the commonest confusions
AGREEMENT = 0.75  # the share of the models that must doubt a label, and for the same other class


def confusion(true: Integers, predicted: Integers, classes: int) -> list[list[int]]:
    """Counts by true class (row) and predicted class (column)."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes).tolist()


def confusions(true: Integers, predicted: Integers, classes: int) -> dict[str, Any]:
    """The matrix as `confusion`; of very many classes the commonest confusions alone, as `confusion_pairs`.

    Those are [true class, predicted class, count, rows of the true class], and the diagonal is summed in
    `confusion_right`: a matrix of 10,000 classes would take a gigabyte.
    """
    if classes <= MATRIX_CLASSES:
        return {"confusion": confusion(true, predicted, classes)}
    wrong = true != predicted
    pairs, counts = np.unique(np.stack([true[wrong], predicted[wrong]]), axis=1, return_counts=True)
    rows = np.bincount(true, minlength=classes)
    order = np.argsort(-counts, kind="stable")[:MOST_PAIRS]
    largest = [[int(a), int(b), int(counts[at]), int(rows[a])] for at in order for a, b in [pairs[:, at]]]
    return {"confusion_pairs": largest, "confusion_right": int((~wrong).sum()), "confusion_total": len(true)}


def calibration(probabilities: Floats, true: Integers) -> dict[str, Any]:
    """`reliability` of the likeliest class."""
    return reliability(probabilities.max(1), probabilities.argmax(1) == true)


def reliability(confidence: Floats, right: NDArray) -> dict[str, Any]:
    """How often the model is right when it says it is p sure, (N,) each, in ten equal bins of p; empty
    bins are left out.

    `ece` is the expected calibration error: the mean gap between confidence and accuracy, weighted by the bins' rows.
    """
    bin_of = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)  # a bin holds its upper edge, so 1.0 too
    bins, gap = [], 0.0
    for number in np.unique(bin_of):
        inside = bin_of == number
        mean, share = float(confidence[inside].mean()), float(right[inside].mean())
        edges = {"low": float(number) / BINS, "high": float(number + 1) / BINS}
        bins.append({**edges, "count": int(inside.sum()), "confidence": mean, "accuracy": share})
        gap += int(inside.sum()) * abs(mean - share)
    return {"bins": bins, "ece": gap / len(right)}


def length_effect(
    right: Sequence[int], wrong: Sequence[int], *, called: str = "wrongly classified texts"
) -> dict[str, Any]:
    """Does length matter? Mann-Whitney's test of the lengths of what was predicted right and of what was not.

    `probability` is that of a wrong one being longer than a right one, ties counting half.
    """
    from scipy.stats import mannwhitneyu

    if not len(right) or not len(wrong):
        few = "Too few mistakes to tell." if not len(wrong) else "Too few right answers to tell."
        return {"p": 1.0, "probability": 0.5, "matters": False, "text": few}
    test = mannwhitneyu(wrong, right, alternative="two-sided")
    probability = float(test.statistic) / (len(wrong) * len(right))
    p = 1.0 if np.isnan(test.pvalue) else float(test.pvalue)  # all lengths equal: nothing to see
    found = {"p": p, "probability": probability}
    if min(len(right), len(wrong)) < FEW:
        few = "Too few mistakes to tell." if len(wrong) < FEW else "Too few right answers to tell."
        return {**found, "matters": False, "text": few}
    shown = f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
    numbers = f"(a wrong one is longer with probability {probability:.2f}; {shown})"
    matters = p < SIGNIFICANT
    if matters:
        side = "longer" if probability > 0.5 else "shorter"
        text = f"Yes: {called} tend to be {side} than the others {numbers}."
    else:
        text = f"No: {called} are neither clearly longer nor clearly shorter than the others {numbers}."
    return {**found, "matters": matters, "text": text}


def length_analysis(lengths: Integers, correct: NDArray, *, called: str) -> dict[str, Any]:
    """The lengths (N,), in words, of correctly and wrongly predicted rows, and a test of their difference."""
    right, wrong = lengths[correct].tolist(), lengths[~correct].tolist()
    return {"right": right, "wrong": wrong, "unit": "words", "statistic": length_effect(right, wrong, called=called)}


def most_confident_errors(confidence: Floats, correct: NDArray, *, limit: int = SHOWN) -> list[int]:
    """The wrongly predicted rows, the most confident first."""
    wrong = np.flatnonzero(~correct)
    return wrong[np.argsort(-confidence[wrong], kind="stable")][:limit].tolist()


def class_errors(probabilities: Floats, true: Integers, *, limit: int = SHOWN) -> list[int]:
    """`most_confident_errors` of the most likely class, from probabilities (N, C)."""
    return most_confident_errors(probabilities.max(1), probabilities.argmax(1) == true, limit=limit)


def label_errors(
    probabilities: Floats,
    labels: Integers,
    *,
    rows: Records,
    classes: Sequence[str],
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Rows whose label is probably wrong, by confident learning over M models' probabilities (M, N, C).

    A model doubts a label when it predicts another class, and is at least as sure of it as it is, on average, of that
    class on the rows that carry it. A row is suspected when at least three quarters of the models doubt its label in
    favour of the same class; the widest mean margin between the two classes comes first.
    """
    models, count, _ = probabilities.shape
    texts = rows.display_texts
    votes = _doubts(probabilities, labels).sum(0)  # (N, C)
    suggested, agree = votes.argmax(1), votes.max(1)
    mean, every = probabilities.mean(0), np.arange(count)
    margin = mean[every, suggested] - mean[every, labels]
    suspected = np.flatnonzero(agree >= ceil(AGREEMENT * models))
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
        for row in suspected[np.argsort(-margin[suspected], kind="stable")][:limit]
    ]


def _doubts(probabilities: Floats, labels: Integers) -> NDArray[np.bool_]:
    """(M, N, C) True where a model would replace the row's label by that class."""
    of_class = labels[:, None] == np.arange(probabilities.shape[2])  # (N, C)
    rows = of_class.sum(0)
    sure = (probabilities * of_class).sum(1) / np.maximum(rows, 1)  # (M, C): mean confidence in a class on its own rows
    sure[:, rows == 0] = np.inf  # of a class that no row carries nothing is known, so none is suggested
    top = probabilities.argmax(2)[:, :, None] == np.arange(probabilities.shape[2])
    return top & ~of_class & (probabilities >= sure[:, None])
