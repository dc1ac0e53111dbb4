"""docs/reference/api.md describes every public name, and its examples run."""

import re
from pathlib import Path

import pytest

import headstock

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_all_examples_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 12
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "unknown keyword 'epoch'; did you mean 'epochs'?" in capsys.readouterr().out
    assert list(names["frame"]["label"]) == [
        row.label for row in names["pipeline"].predict(["A warm film.", "A dull film."])
    ]
    assert set(names["table"]["arm"]) == {"scratch", "pretrained", "frozen", "tfidf"}


def test_every_public_name_is_described():
    words = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    assert set(headstock.__all__) <= words
