"""The inference benchmark runs, and both of its sides give the same outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "inference.py"


def test_both_sides_give_the_same_outputs(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(BENCHMARK), "--tiny", "--threads", "1", "--json", str(tmp_path / "results.json")]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [row["work"] for row in rows] == ["generate", "generate", "generate", "predict", "embed"]
    assert all(row["identical"] == 1 for row in rows if row["work"] == "generate")
    assert all(row["max_difference"] < 1e-4 for row in rows if row["work"] != "generate")
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
