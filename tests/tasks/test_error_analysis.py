"""Confusions, calibration, the effect of length, confident errors and label errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.data.records import Records
from headstock.report.error_section import confusion_pairs
from headstock.rng import generator
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.tasks.error_analysis import (
    calibration,
    confusion,
    confusions,
    label_errors,
    length_effect,
    most_confident_errors,
)
from headstock.tasks.labelled import EncodedRows

CLASSES = ["bad", "fair", "good"]


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_confusion_matrix():
    matrix = confusion(np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 0, 0]), 3)
    assert matrix == [[1, 1, 0], [0, 1, 0], [2, 0, 0]]


def test_calibration_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9], [0.35, 0.65], [0.4, 0.6], [1.0, 0.0]])
    result = calibration(probabilities, np.array([0, 0, 1, 1, 0]))
    assert [(bin_["low"], bin_["high"], bin_["count"]) for bin_ in result["bins"]] == [
        (0.5, 0.6, 1),
        (0.6, 0.7, 1),
        (0.8, 0.9, 2),
        (0.9, 1.0, 1),
    ]
    assert [bin_["accuracy"] for bin_ in result["bins"]] == [1, 1, 0.5, 1]
    # one row 0.4 under, one 0.35 under, two rows 0.4 over, one exact
    assert result["ece"] == pytest.approx((0.4 + 0.35 + 2 * 0.4 + 0) / 5)


def test_overconfident_model_is_not_calibrated():
    random = generator("calibration")
    honest = softmax(random.normal(0, 1.5, (20_000, 3)))
    true = (random.random((20_000, 1)) > honest.cumsum(1)).sum(1).clip(0, 2)
    assert calibration(honest, true)["ece"] < 0.02
    assert calibration(softmax(3 * np.log(honest)), true)["ece"] > 0.1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_every_row_is_in_the_bin_of_its_confidence(rows):
    first = np.array([share for share, _ in rows])
    result = calibration(np.stack([first, 1 - first], 1), np.array([int(truth) for _, truth in rows]))
    assert sum(bin_["count"] for bin_ in result["bins"]) == len(rows)
    assert all(bin_["low"] - 1e-9 <= bin_["confidence"] <= bin_["high"] + 1e-9 for bin_ in result["bins"])
    assert 0 <= result["ece"] <= 1


def test_longer_errors_are_significant():
    random = generator("lengths")
    right, wrong = random.poisson(20, 300), random.poisson(30, 60)
    effect = length_effect(right, wrong)
    by_hand = np.mean((wrong[:, None] > right) + 0.5 * (wrong[:, None] == right))
    assert effect["probability"] == pytest.approx(by_hand)
    assert effect["matters"] and effect["p"] < 0.001
    assert effect["text"] == (
        "Yes: wrongly classified texts tend to be longer than the others "
        f"(a wrong one is longer with probability {by_hand:.2f}; p < 0.001)."
    )
    assert "tend to be shorter" in length_effect(wrong, right)["text"]


def test_equal_lengths_are_not_significant():
    random = generator("no lengths")
    false_alarms = [length_effect(random.poisson(20, 200), random.poisson(20, 40))["matters"] for _ in range(200)]
    assert np.mean(false_alarms) < 0.1
    effect = length_effect([7] * 20, [7] * 10)
    assert (effect["p"], effect["probability"], effect["matters"]) == (1.0, 0.5, False)
    assert effect["text"].startswith("No: ")


@pytest.mark.parametrize(
    ("right", "wrong", "subject"), [(50, 4, "errors"), (50, 0, "errors"), (4, 50, "correct predictions")]
)
def test_few_rows_give_no_length_effect(right, wrong, subject):
    effect = length_effect(list(range(right)), [1000] * wrong)
    assert effect["text"] == f"Too few {subject} to tell." and not effect["matters"]


def test_most_confident_errors_come_first():
    probabilities = np.array([[0.6, 0.4], [0.99, 0.01], [0.2, 0.8], [0.05, 0.95], [0.9, 0.1]])
    true = np.array([1, 0, 0, 0, 1])  # wrong: 0 (0.6), 2 (0.8), 3 (0.95), 4 (0.9)
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == true
    assert most_confident_errors(confidence, correct) == [3, 4, 2, 0]
    assert most_confident_errors(confidence, correct, limit=2) == [3, 4]


def test_classification_errors_are_located_and_attributed():
    probabilities = np.array([[0.6, 0.4], [0.99, 0.01], [0.2, 0.8], [0.05, 0.95], [0.9, 0.1]])
    rows = Records("a.csv", [1, 2, 3, 4, 5], {"text": list("abcde"), "label": ["yes", "no", "no", "no", "yes"]})
    task = Classify(ClassifyConfig(classes=("no", "yes")), None)
    data = EncodedRows([], np.array([1, 0, 0, 0, 1]), [])
    analysis = task.error_analysis(rows, data, list(probabilities), attribute=lambda row, target: [("x", row + target)])
    assert [mistake["place"] for mistake in analysis["mistakes"]] == ["a.csv:4", "a.csv:5", "a.csv:3", "a.csv:1"]
    assert analysis["mistakes"][0] == {
        "place": "a.csv:4",
        "text": "d",
        "label": "no",
        "predicted": "yes",
        "confidence": pytest.approx(0.95),
        "tokens": [("x", 4)],
    }
    assert analysis["confusion"] == [[1, 2], [2, 0]]


def find_label_errors(probabilities: np.ndarray, labels: np.ndarray, **options) -> dict[int, dict]:
    rows = Records("a", list(range(len(labels))), {"text": [str(row) for row in range(len(labels))]})
    errors = label_errors(probabilities, labels, rows=rows, classes=CLASSES, **options)
    return {int(error["text"]): error for error in errors}


def models(true: np.ndarray, *, count: int, skill: float, name: str) -> np.ndarray:
    """(M, N, 3) probabilities of models that see the true class through noise, some of it shared."""
    random = generator("models", name)
    shared = random.normal(0, 1, (len(true), 3))
    signal = skill * np.eye(3)[true] + 0.7 * shared
    return np.stack([softmax(2 * (signal + random.normal(0, 0.7, shared.shape))) for _ in range(count)])


def test_planted_label_errors_are_found():
    random = generator("planted")
    true = random.integers(3, size=1000)
    wrong = random.choice(1000, size=50, replace=False)
    labels = true.copy()
    labels[wrong] = (labels[wrong] + 1 + random.integers(2, size=50)) % 3
    errors = find_label_errors(models(true, count=5, skill=4, name="planted"), labels, limit=1000)
    correct = set(errors) & set(wrong.tolist())
    assert len(correct) / 50 >= 0.7  # recall
    assert len(correct) / len(errors) >= 0.9  # precision
    assert all(errors[row]["suggested"] == CLASSES[true[row]] for row in correct)
    assert all(4 <= error["agree"] <= error["of"] == 5 for error in errors.values())
    confidences = [error["confidence"] for error in errors.values()]
    assert np.mean(confidences[:10]) > np.mean(confidences[-10:])  # the most confident first
    assert list(find_label_errors(models(true, count=5, skill=4, name="planted"), labels, limit=3)) == list(errors)[:3]


@pytest.mark.parametrize(("skill", "share"), [(4, 0.005), (2, 0.05)])
def test_clean_labels_are_not_reported(skill, share):
    true = generator("clean").integers(3, size=1000)
    probabilities = models(true, count=5, skill=skill, name="clean")
    assert len(find_label_errors(probabilities, true, limit=1000)) <= share * 1000
    if skill == 2:  # control: these models are often wrong
        assert np.mean(probabilities[0].argmax(1) != true) > 0.08


def test_models_must_agree_on_the_same_class():
    certain = {label: softmax(6 * np.eye(3)[label]) for label in range(3)}
    labels = np.array([0, 1, 2] * 5)
    probabilities = np.stack([np.stack([certain[label] for label in labels])] * 4)
    assert not find_label_errors(probabilities, labels)
    probabilities[:3, 0] = certain[1]
    assert find_label_errors(probabilities, labels)[0]["agree"] == 3
    probabilities[2, 0] = certain[2]  # three suggest another label, but not the same one
    assert not find_label_errors(probabilities, labels)


def test_class_without_rows_is_never_suggested():
    probabilities = np.stack([softmax(6 * np.eye(3)[[2, 0, 0, 1, 1]])])
    assert not find_label_errors(probabilities, np.array([0, 0, 0, 1, 1]))


def test_many_classes_have_confusion_pairs_instead_of_a_matrix():
    small = confusions(np.array([0, 1]), np.array([1, 1]), 2)
    assert small == {"confusion": [[0, 1], [0, 1]]}
    true = np.array([7, 7, 7, 7, 9000, 5, 5])
    large = confusions(true, np.array([8, 8, 7, 1, 9000, 6, 5]), 10_000)
    assert large["confusion_pairs"][0] == [7, 8, 2, 4]
    assert sorted(large["confusion_pairs"][1:]) == [[5, 6, 1, 2], [7, 1, 1, 4]]
    assert (large["confusion_right"], large["confusion_total"]) == (3, 7)
    class_ids = np.arange(10_000)
    assert len(json.dumps(confusions(class_ids, np.roll(class_ids, 1), 10_000))) < 10_000


def test_report_lists_confusion_pairs():
    classes = [f"class {number}" for number in range(1000)]
    pairs = confusion_pairs(confusions(np.array([7, 7, 7, 2]), np.array([8, 8, 7, 2]), 1000), classes)
    assert pairs is not None
    assert (pairs["right"], pairs["total"], pairs["table"]) == (2, 4, False)
    assert pairs["largest"] == [("class 7", "class 8", 2, 2 / 3)]
    assert confusion_pairs({"confusion": [[1]]}, ["a"]) is None
