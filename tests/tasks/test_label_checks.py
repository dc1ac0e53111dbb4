"""Labels that are probably not what was meant: refused before training, or named in a warning."""

import pytest

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.tasks.class_labels import label_warnings
from headstock.tasks.classify import Classify, ClassifyConfig


def rows(labels, texts=None, source="train.csv"):
    texts = texts or [f"text {number}" for number in range(len(labels))]
    return Records(source, list(range(2, len(labels) + 2)), {"text": texts, "label": list(labels)})


def classes(labels, **config):
    return Classify.infer_settings(ClassifyConfig(**config), rows(labels)).classes


# Refused


def test_scores_with_fractions_are_no_classes():
    scores = [f"{number % 51 / 10:.2f}" for number in range(119)]  # 0.00 to 5.00
    with pytest.raises(UserError, match=r"train.csv.*numbers from 0 to 5, 51 distinct values in 119 rows") as wrong:
        classes(scores)
    assert "regression" in str(wrong.value) and "many_classes" in str(wrong.value)
    assert len(classes(scores, many_classes=True)) == 51
    with pytest.raises(UserError, match="6 distinct values in 8 rows"):
        classes(["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.1", "0.2"])
    with pytest.raises(UserError, match="regression"):
        classes([f"{number},5" for number in range(40)])  # a comma where others have a point


def test_many_integers_of_few_rows_are_no_classes():
    with pytest.raises(UserError, match="40 distinct values in 80 rows"):
        classes([str(number % 40) for number in range(80)])


def test_integers_that_name_classes_stay_classes():
    assert classes(["1", "2", "3", "4", "5"] * 3) == ("1", "2", "3", "4", "5")
    assert classes(["0.0", "1.0"] * 2) == ("0.0", "1.0")
    assert classes(["-0.5", "0.5", "1.5"] * 3) == ("-0.5", "0.5", "1.5")
    assert len(classes([str(number % 77) for number in range(770)])) == 77  # ids of 77 intents


def test_a_label_for_nearly_every_row_is_the_wrong_column():
    with pytest.raises(UserError, match=r"30 distinct values in 40 rows.*--columns label=NAME"):
        classes([f"review of film {number % 30}" for number in range(40)])
    assert len(classes([f"film {number % 30}" for number in range(40)], many_classes=True)) == 30
    assert len(classes([f"intent {number % 30}" for number in range(90)])) == 30


# Warned of


def warned(labels, texts=None, separator=None):
    return label_warnings(rows(labels, texts), separator)


def test_sound_labels_give_no_warning():
    assert warned(["good", "bad"] * 5) == []
    assert warned(["class1", "class2", "class10"] * 5) == []
    assert warned(["male", "female", "cats", "bats"] * 5) == []
    assert label_warnings(Records("x", [1], {"text": ["a"]})) == []


def test_a_label_that_occurs_once_is_named_with_its_place():
    (line,) = warned(["good", "bad", "odd", "good", "bad"])
    assert "'odd'" in line and "train.csv:4" in line and "once" in line
    (line,) = warned(["a|b", "b|c", "a|b"], separator="|")
    assert "'c'" in line and "train.csv:3" in line


@pytest.mark.parametrize("odd", ["Goood", "Good ", "good", "Goo d", "Godd", "Gods"])
def test_a_label_spelled_nearly_like_another_is_named_beside_it(odd):
    lines = warned([*["Good", "Bad"] * 10, odd, odd])
    assert any("'Good' (10 rows)" in line and repr(odd.strip()) in line for line in lines) == (odd != "Good ")


def test_a_text_with_two_labels_is_named_with_both_places():
    (line,) = warned(["good", "bad", "bad", "good"], ["a film", "a book", "a  film", "a play"])
    assert "train.csv:2 'good'" in line and "train.csv:4 'bad'" in line


def test_many_numbers_as_classes_are_mentioned():
    (line,) = warned([str(number % 30) for number in range(900)])
    assert "30 labels are all numbers" in line


def test_the_checks_take_ten_thousand_classes():
    labels = [f"class {number:05d}x" for number in range(10_000)]
    assert warned([*labels, *labels, *labels[:10] * 20]) == []
