"""The training benchmark runs on any machine, and no optimization changes the losses."""

import json

from tests.benchmarks import run_benchmark


def test_every_optimization_is_measured_and_gives_the_same_loss(tmp_path, capsys):
    out = tmp_path / "speed.json"
    models = ["gpt", "bert", "finetune"]
    without = ["fused loss", "prefetching", "label positions"]
    run_benchmark("train_speed", "--tiny", "--device", "cpu", "--only", *models, "--without", *without, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 4 and all(row["tokens_per_second"] > 0 for row in rows)
    for model in models:
        assert len({row["loss"] for row in rows if row["work"] == model}) == 1
    assert "tokens/s" in capsys.readouterr().out
