"""Results convert to JSON and data frames, behave as mappings, and are shown in a notebook with everything escaped."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headstock.errors import UserError
from headstock.results import Result, ResultList
from headstock.tasks.base import TASKS
from headstock.tasks.classify import ClassPrediction
from headstock.tasks.labelled import is_labelled
from headstock.tasks.predictions import Prediction, UntypedPrediction

HOSTILE = "<script>alert('x')</script>"


@dataclass(frozen=True, eq=False)
class Sample(Result):
    name: str
    path: Path
    numbers: tuple[float, ...]
    array: np.ndarray
    extra: str | None = None


def sample(name: str = "a") -> Sample:
    return Sample(name, Path("runs/x"), (1.0, math.nan), np.arange(2))


def test_a_result_is_json_and_a_mapping():
    expected = {"name": "a", "path": str(Path("runs/x")), "numbers": [1.0, None], "array": [0, 1]}
    result = sample()
    assert json.loads(json.dumps(result.to_dict())) == expected
    assert result["array"] == [0, 1] and dict(result) == expected and len(result) == 4 and "extra" not in result
    assert result | {"name": "b"} == expected | {"name": "b"}
    assert result == sample() and result != sample("b")
    with pytest.raises(KeyError):
        result["nothing"]
    with pytest.raises(AttributeError):
        result.name = "b"  # type: ignore[misc]


def test_a_list_of_results():
    rows = ResultList([sample("a"), sample("b"), sample("c")])
    assert [row.name for row in rows[1:]] == ["b", "c"] and isinstance(rows[1:], ResultList)
    assert rows == [sample("a"), sample("b"), sample("c")] and rows.to_dict()[2]["name"] == "c"
    nested = ResultList([rows[:1], rows[1:]], index_name="query")
    pytest.importorskip("pandas")
    assert list(rows.to_frame()["name"]) == ["a", "b", "c"]
    assert list(nested.to_frame()["query"]) == [0, 1, 1]


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        sample().to_frame()


def test_html_is_escaped():
    for result in (sample(HOSTILE), ResultList([sample(HOSTILE)]), UntypedPrediction({HOSTILE: HOSTILE})):
        html = result._repr_html_()
        assert "<script>" not in html and "&lt;script&gt;" in html
    prediction = ClassPrediction(HOSTILE, {HOSTILE: 1.0})
    assert "<script>" not in prediction._repr_html_()
    many = ResultList(sample(str(number)) for number in range(1000))._repr_html_()
    assert many.count("<tr>") < 100 and "940 more rows" in many


def test_every_labelled_task_has_a_class_of_predictions():
    classes = [TASKS.get(name).prediction_class for name in TASKS.names() if is_labelled(TASKS.get(name))]
    assert len(classes) >= 7
    assert all(issubclass(kind, Prediction) and kind is not UntypedPrediction for kind in classes)


def test_a_prediction_has_the_keys_of_its_task():
    values = {"label": "a", "probabilities": {"a": 0.75, "b": 0.25}}
    assert ClassPrediction.from_dict(values) == values
    abstained = values | {"label": "", "abstained": True}
    assert ClassPrediction.from_dict(abstained).to_dict() == abstained
    assert ClassPrediction.from_dict(values)._rows() == [{"label": "a", "p(a)": 0.75, "p(b)": 0.25}]
    assert UntypedPrediction.from_dict({"x": 1})["x"] == 1
