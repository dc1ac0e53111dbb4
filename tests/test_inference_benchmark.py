"""The benchmark of inference runs, and both of its sides give the same answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "inference.py"


def test_both_sides_do_the_same_work(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(BENCHMARK), "--tiny", "--threads", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [row["work"] for row in rows] == ["generate", "generate", "generate", "predict", "embed"]
    assert all(row["same"] == 1 for row in rows if row["work"] == "generate")
    assert all(row["apart"] < 1e-4 for row in rows if row["work"] != "generate")
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
