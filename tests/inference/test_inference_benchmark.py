"""The inference benchmark runs, and both of its sides give the same outputs."""

import json

import pytest

from tests.benchmarks import run_benchmark


def test_both_sides_give_the_same_outputs(tmp_path):
    pytest.importorskip("transformers")
    run_benchmark("inference", "--tiny", "--threads", 1, "--json", tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [row["work"] for row in rows] == ["generate", "generate", "generate", "predict", "embed"]
    assert all(row["identical"] == 1 for row in rows if row["work"] == "generate")
    assert all(row["max_difference"] < 1e-4 for row in rows if row["work"] != "generate")
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
