"""Mistakes are counted as by hand, length matters only where it does, and planted label errors are found."""

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


def test_confusion_has_the_truth_in_rows():
    found = confusion(np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 0, 0]), 3)
    assert found == [[1, 1, 0], [0, 1, 0], [2, 0, 0]]


def test_calibration_is_what_a_hand_computes():
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9], [0.35, 0.65], [0.4, 0.6], [1.0, 0.0]])
    found = calibration(probabilities, np.array([0, 0, 1, 1, 0]))
    assert [(one["low"], one["high"], one["count"]) for one in found["bins"]] == [
        (0.5, 0.6, 1),
        (0.6, 0.7, 1),
        (0.8, 0.9, 2),
        (0.9, 1.0, 1),
    ]
    assert [one["accuracy"] for one in found["bins"]] == [1, 1, 0.5, 1]
    # one row 0.4 under, one 0.35 under, two rows 0.4 over, one exact
    assert found["ece"] == pytest.approx((0.4 + 0.35 + 2 * 0.4 + 0) / 5)


def test_a_model_that_means_what_it_says_is_calibrated_and_a_boaster_is_not():
    random = generator("calibration")
    honest = softmax(random.normal(0, 1.5, (20_000, 3)))
    true = (random.random((20_000, 1)) > honest.cumsum(1)).sum(1).clip(0, 2)
    assert calibration(honest, true)["ece"] < 0.02
    assert calibration(softmax(3 * np.log(honest)), true)["ece"] > 0.1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_every_row_is_in_one_bin_that_holds_its_confidence(rows):
    first = np.array([share for share, _ in rows])
    found = calibration(np.stack([first, 1 - first], 1), np.array([int(truth) for _, truth in rows]))
    assert sum(one["count"] for one in found["bins"]) == len(rows)
    assert all(one["low"] - 1e-9 <= one["confidence"] <= one["high"] + 1e-9 for one in found["bins"])
    assert 0 <= found["ece"] <= 1


def test_length_matters_where_wrong_texts_are_longer():
    random = generator("lengths")
    right, wrong = random.poisson(20, 300), random.poisson(30, 60)
    found = length_effect(right, wrong)
    by_hand = np.mean((wrong[:, None] > right) + 0.5 * (wrong[:, None] == right))
    assert found["probability"] == pytest.approx(by_hand)
    assert found["matters"] and found["p"] < 0.001
    assert found["text"] == (
        "Yes: wrongly classified texts tend to be longer than the others "
        f"(a wrong one is longer with probability {by_hand:.2f}; p < 0.001)."
    )
    assert "tend to be shorter" in length_effect(wrong, right)["text"]


def test_length_does_not_matter_where_it_does_not():
    random = generator("no lengths")
    false_alarms = [length_effect(random.poisson(20, 200), random.poisson(20, 40))["matters"] for _ in range(200)]
    assert np.mean(false_alarms) < 0.1
    found = length_effect([7] * 20, [7] * 10)
    assert (found["p"], found["probability"], found["matters"]) == (1.0, 0.5, False)
    assert found["text"].startswith("No: ")


@pytest.mark.parametrize(
    ("right", "wrong", "what"), [(50, 4, "errors"), (50, 0, "errors"), (4, 50, "correct predictions")]
)
def test_a_handful_says_nothing_about_length(right, wrong, what):
    found = length_effect(list(range(right)), [1000] * wrong)
    assert found["text"] == f"Too few {what} to tell." and not found["matters"]


def test_the_surest_mistakes_come_first():
    probabilities = np.array([[0.6, 0.4], [0.99, 0.01], [0.2, 0.8], [0.05, 0.95], [0.9, 0.1]])
    true = np.array([1, 0, 0, 0, 1])  # wrong: 0 (0.6), 2 (0.8), 3 (0.95), 4 (0.9)
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == true
    assert most_confident_errors(confidence, correct) == [3, 4, 2, 0]
    assert most_confident_errors(confidence, correct, limit=2) == [3, 4]


def test_a_classifiers_mistakes_are_named_and_attributed():
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


def doubted(probabilities: np.ndarray, labels: np.ndarray, **more) -> dict[int, dict]:
    rows = Records("a", list(range(len(labels))), {"text": [str(row) for row in range(len(labels))]})
    found = label_errors(probabilities, labels, rows=rows, classes=CLASSES, **more)
    return {int(one["text"]): one for one in found}


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
    found = doubted(models(true, count=5, skill=4, name="planted"), labels, limit=1000)
    hits = set(found) & set(wrong.tolist())
    assert len(hits) / 50 >= 0.7  # recall
    assert len(hits) / len(found) >= 0.9  # precision
    assert all(found[row]["suggested"] == CLASSES[true[row]] for row in hits)
    assert all(4 <= one["agree"] <= one["of"] == 5 for one in found.values())
    confidences = [one["confidence"] for one in found.values()]
    assert np.mean(confidences[:10]) > np.mean(confidences[-10:])  # the surest first
    assert list(doubted(models(true, count=5, skill=4, name="planted"), labels, limit=3)) == list(found)[:3]


@pytest.mark.parametrize(("skill", "share"), [(4, 0.005), (2, 0.05)])
def test_clean_labels_are_left_alone(skill, share):
    true = generator("clean").integers(3, size=1000)
    seen = models(true, count=5, skill=skill, name="clean")
    assert len(doubted(seen, true, limit=1000)) <= share * 1000
    if skill == 2:  # the control: these models are wrong often enough to accuse many rows
        assert np.mean(seen[0].argmax(1) != true) > 0.08


def test_most_models_must_agree_on_the_same_class():
    sure = {label: softmax(6 * np.eye(3)[label]) for label in range(3)}
    labels = np.array([0, 1, 2] * 5)
    seen = np.stack([np.stack([sure[label] for label in labels])] * 4)
    assert not doubted(seen, labels)
    seen[:3, 0] = sure[1]
    assert doubted(seen, labels)[0]["agree"] == 3
    seen[2, 0] = sure[2]  # three doubt the label, but not for the same class
    assert not doubted(seen, labels)


def test_a_class_that_no_row_carries_is_never_suggested():
    seen = np.stack([softmax(6 * np.eye(3)[[2, 0, 0, 1, 1]])])
    assert not doubted(seen, np.array([0, 0, 0, 1, 1]))


def test_of_very_many_classes_the_commonest_confusions_are_kept_and_no_matrix():
    few = confusions(np.array([0, 1]), np.array([1, 1]), 2)
    assert few == {"confusion": [[0, 1], [0, 1]]}
    true = np.array([7, 7, 7, 7, 9000, 5, 5])
    found = confusions(true, np.array([8, 8, 7, 1, 9000, 6, 5]), 10_000)
    assert found["confusion_pairs"][0] == [7, 8, 2, 4]
    assert sorted(found["confusion_pairs"][1:]) == [[5, 6, 1, 2], [7, 1, 1, 4]]
    assert (found["confusion_right"], found["confusion_total"]) == (3, 7)
    every = np.arange(10_000)
    assert len(json.dumps(confusions(every, np.roll(every, 1), 10_000))) < 10_000


def test_a_report_lists_confusions_where_there_is_no_matrix():
    classes = [f"class {number}" for number in range(1000)]
    found = confusion_pairs(confusions(np.array([7, 7, 7, 2]), np.array([8, 8, 7, 2]), 1000), classes)
    assert found is not None
    assert (found["right"], found["total"], found["table"]) == (2, 4, False)
    assert found["largest"] == [("class 7", "class 8", 2, 2 / 3)]
    assert confusion_pairs({"confusion": [[1]]}, ["a"]) is None
