"""What tasks declare about themselves for the web page."""

import pytest

from headstock.tasks.base import TASKS
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.widgets import Bars, KeyValues, coloured_words, prediction_table


def test_words_of_one_entity_are_one_span():
    text = "Anne Lee sees New York ."
    spans = [(0, 4), (5, 8), (9, 13), (14, 17), (18, 22), (23, 24)]
    part = coloured_words(text, spans, ["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O"], [0.9, 0.5, 1, 0.8, 0.9, 1])
    assert [(text[span.start : span.end], span.label, span.probability) for span in part.spans] == [
        ("Anne Lee", "PER", 0.5),
        ("New York", "LOC", 0.8),
    ]
    assert len({span.colour for span in part.spans}) == 2


def test_neighbouring_entities_stay_apart():
    part = coloured_words("Anne Ben", [(0, 4), (5, 8)], ["B-PER", "B-PER"], [1, 1])
    assert [(span.start, span.end) for span in part.spans] == [(0, 4), (5, 8)]
    part = coloured_words("a b", [(0, 1), (2, 3)], ["I-PER", "I-LOC"], [1, 1])
    assert [span.label for span in part.spans] == ["PER", "LOC"]


def test_tags_without_a_scheme_are_shown_as_they_are():
    part = coloured_words("It rains", [(0, 2), (3, 8)], ["PRON", "VERB"], [1, 1])
    assert [span.label for span in part.spans] == ["PRON", "VERB"]


def test_an_unknown_prediction_becomes_bars_and_a_table():
    bars, table = prediction_table({"label": "a", "probabilities": {"a": 0.7, "b": 0.3}, "note": "x", "list": [1]})
    assert bars == Bars([("a", 0.7), ("b", 0.3)], ["a"]) and table == KeyValues([("label", "a"), ("note", "x")])


@pytest.mark.parametrize("name", [name for name in TASKS.names() if TASKS.get(name).is_labelled])
def test_every_labelled_task_has_a_widget_of_its_own_inputs(name):
    task_class = TASKS.get(name)
    assert issubclass(task_class, LabelledTask)
    task = task_class(task_class.Config(), None)
    (widget,) = task.widgets
    assert widget.endpoint == f"/v1/{name}" and len(widget.inputs) == task.texts_per_row
    row = task.row_from_texts([field.example for field in widget.inputs])
    assert task.is_row(row)  # the examples are a row
