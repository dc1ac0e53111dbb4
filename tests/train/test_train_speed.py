"""The script that measures how fast we train runs anywhere, and no technique changes what is learned."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_speed.py"


def test_it_measures_each_technique_and_all_learn_the_same(tmp_path):
    out = tmp_path / "speed.json"
    words = [sys.executable, SCRIPT, "--tiny", "--device", "cpu", "--only", "gpt", "bert", "finetune"]
    ran = subprocess.run(
        [*words, "--without", "fused loss", "batches ahead", "known places", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 4 and all(row["tokens_per_second"] > 0 for row in rows)
    for work in ("gpt", "bert", "finetune"):
        assert len({row["loss"] for row in rows if row["work"] == work}) == 1
    assert "tokens/s" in ran.stdout
