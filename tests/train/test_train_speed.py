"""The training benchmark runs anywhere, and no optimization changes the loss."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_speed.py"


def test_every_optimization_is_measured_and_gives_the_same_loss(tmp_path):
    out = tmp_path / "speed.json"
    command = [sys.executable, SCRIPT, "--tiny", "--device", "cpu", "--only", "gpt", "bert", "finetune"]
    process = subprocess.run(
        [*command, "--without", "fused loss", "prefetching", "label positions", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 4 and all(row["tokens_per_second"] > 0 for row in rows)
    for work in ("gpt", "bert", "finetune"):
        assert len({row["loss"] for row in rows if row["work"] == work}) == 1
    assert "tokens/s" in process.stdout
