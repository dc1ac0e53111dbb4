"""Class labels: class ids and weights, labels that are refused, and warnings about suspicious ones."""

import csv

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.tasks.class_labels import balanced_weights, find_classes, label_numbers, label_warnings
from headstock.tasks.classify import Classify, ClassifyConfig


def records(*labels, source="train.csv"):
    return Records(source, list(range(2, len(labels) + 2)), {"text": ["x"] * len(labels), "label": list(labels)})


def test_class_order():
    assert find_classes(records("10", "9", "-1", "9"), None) == ("-1", "9", "10")
    assert find_classes(records("4.5", "10", "0.5", "3"), None) == ("0.5", "3", "4.5", "10")
    assert find_classes(records("1", "01", "2"), None) == ("01", "1", "2")  # equal numbers in a fixed order
    assert find_classes(records("pos", "neg", "neutral"), None) == ("neg", "neutral", "pos")
    assert find_classes(records("10", "9", "none"), None) == ("10", "9", "none")  # not all are numbers
    assert find_classes(records("²", "1"), None) == ("1", "²")
    assert find_classes(records("a, b", "c", "b"), ",") == ("a", "b", "c")
    assert find_classes(records("a", "a"), ",") == ("a",)  # multi-label


def test_one_class_is_refused():
    with pytest.raises(UserError, match=r"^train.csv: only one class, 'pos'; there must be at least two"):
        find_classes(records("pos", "pos"), None)


def test_unknown_labels_are_refused_with_their_locations(tmp_path):
    path = tmp_path / "valid.csv"
    with path.open("w", newline="") as file:
        rows = [("text", "label"), ("good", "positive"), ("two\nlines", "negative"), ("fine", "positif"), ("so", "x")]
        csv.writer(file).writerows(rows)
    config = ClassifyConfig(classes=("negative", "positive"))
    with pytest.raises(UserError) as error:
        label_numbers(read_records(path), config)
    expected = "training has 'negative', 'positive'"
    assert str(error.value).split("; ") == [
        f"{path}:5: label 'positif' is new",  # line 5, since one text has two lines
        expected,
        "did you mean 'positive'?",
        f"{path}:6: label 'x' is new",
        expected,
    ]
    with pytest.raises(UserError, match=r"^train.csv:2: .*train.csv:6: .*; and 4 more$"):
        label_numbers(records(*"qrstuvwxy"), config)


def test_label_numbers():
    config = ClassifyConfig(classes=("a", "b", "c"))
    assert label_numbers(records("c", "a", "b"), config).tolist() == [2, 0, 1]
    multilabel = ClassifyConfig(classes=("a", "b", "c"), separator="|")
    assert label_numbers(records("c|a", "b", "b | c"), multilabel).tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 1]]


def test_balanced_weights():
    labels = np.array([0] * 6 + [1] * 3 + [2])
    weights = balanced_weights(labels, 3)
    assert weights == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=labels))
    assert np.bincount(labels) * weights == pytest.approx([10 / 3] * 3)
    multilabel = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert balanced_weights(multilabel, 2) == pytest.approx((1 / 3, 3.0))  # negatives per positive
    assert all(np.isfinite(balanced_weights(np.array([0, 1]), 3)))  # a class without rows


def rows(labels, texts=None, source="train.csv"):
    texts = texts or [f"text {number}" for number in range(len(labels))]
    return Records(source, list(range(2, len(labels) + 2)), {"text": texts, "label": list(labels)})


def classes(labels, **config):
    return Classify.infer_settings(ClassifyConfig(**config), rows(labels)).classes


# Refused


def test_fractions_are_refused():
    scores = [f"{number % 51 / 10:.2f}" for number in range(119)]  # 0.00 to 5.00
    with pytest.raises(UserError, match=r"train.csv.*numbers from 0 to 5, 51 distinct values in 119 rows") as error:
        classes(scores)
    assert "regression" in str(error.value) and "many_classes" in str(error.value)
    assert len(classes(scores, many_classes=True)) == 51
    with pytest.raises(UserError, match="6 distinct values in 8 rows"):
        classes(["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.1", "0.2"])
    with pytest.raises(UserError, match="regression"):
        classes([f"{number},5" for number in range(40)])  # a comma where others have a point


def test_many_integers_with_few_rows_are_refused():
    with pytest.raises(UserError, match="40 distinct values in 80 rows"):
        classes([str(number % 40) for number in range(80)])


def test_class_numbers_are_accepted():
    assert classes(["1", "2", "3", "4", "5"] * 3) == ("1", "2", "3", "4", "5")
    assert classes(["0.0", "1.0"] * 2) == ("0.0", "1.0")
    assert classes(["-0.5", "0.5", "1.5"] * 3) == ("-0.5", "0.5", "1.5")
    assert len(classes([str(number % 77) for number in range(770)])) == 77  # ids of 77 intents


def test_nearly_distinct_labels_are_refused():
    with pytest.raises(UserError, match=r"30 distinct values in 40 rows.*--columns label=NAME"):
        classes([f"review of film {number % 30}" for number in range(40)])
    assert len(classes([f"film {number % 30}" for number in range(40)], many_classes=True)) == 30
    assert len(classes([f"intent {number % 30}" for number in range(90)])) == 30


# Warnings


def warnings_for(labels, texts=None, separator=None):
    return label_warnings(rows(labels, texts), separator)


def test_valid_labels_give_no_warning():
    assert warnings_for(["good", "bad"] * 5) == []
    assert warnings_for(["class1", "class2", "class10"] * 5) == []
    assert warnings_for(["male", "female", "cats", "bats"] * 5) == []
    assert label_warnings(Records("x", [1], {"text": ["a"]})) == []


def test_single_occurrence_is_reported_with_its_location():
    (line,) = warnings_for(["good", "bad", "odd", "good", "bad"])
    assert "'odd'" in line and "train.csv:4" in line and "once" in line
    (line,) = warnings_for(["a|b", "b|c", "a|b"], separator="|")
    assert "'c'" in line and "train.csv:3" in line


@pytest.mark.parametrize("label", ["Goood", "Good ", "good", "Goo d", "Godd", "Gods"])
def test_misspelling_is_reported(label):
    lines = warnings_for([*["Good", "Bad"] * 10, label, label])
    assert any("'Good' (10 rows)" in line and repr(label.strip()) in line for line in lines) == (label != "Good ")


def test_contradiction_is_reported_with_both_locations():
    (line,) = warnings_for(["good", "bad", "bad", "good"], ["a film", "a book", "a  film", "a play"])
    assert "train.csv:2 'good'" in line and "train.csv:4 'bad'" in line


def test_many_numeric_classes_are_reported():
    (line,) = warnings_for([str(number % 30) for number in range(900)])
    assert "30 labels are all numbers" in line


def test_checks_scale_to_ten_thousand_classes():
    labels = [f"class {number:05d}x" for number in range(10_000)]
    assert warnings_for([*labels, *labels, *labels[:10] * 20]) == []
