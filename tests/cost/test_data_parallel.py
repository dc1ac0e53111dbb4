"""Traffic of data-parallel training: the formulas, what was measured, and the tables of docs/evidence/scaling.md."""

import json
from pathlib import Path

import pytest

from headstock.cost.data_parallel import checkpoint_bytes, step_traffic
from tests.benchmarks import load_benchmark

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks/results/network-bytes.json").read_text())


def test_one_process_sends_nothing():
    assert step_traffic(1000, 1, "ddp").total == step_traffic(1000, 1, "fsdp").total == 0


def test_two_processes_send_each_gradient_once():
    assert step_traffic(1000, 2, "ddp").total == 4000
    assert step_traffic(1000, 2, "fsdp").reduce == 2000


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['parallel']}-{row['processes']}")
def test_the_measured_traffic_is_that_of_the_formula(row):
    embeddings = MEASURED["settings"]["vocabulary"] * MEASURED["settings"]["width"]
    arguments = (row["parameters"], row["processes"], row["parallel"])
    formula = step_traffic(*arguments, outside_blocks=embeddings, scatters=False).total
    assert row["measured_bytes"] == pytest.approx(formula, rel=0.005)
    if row["parallel"] == "fsdp":  # the terms that matter: gathering everything twice, or a true reduce-scatter
        for wrong in ({"scatters": False}, {"outside_blocks": embeddings}):
            assert step_traffic(*arguments, **wrong).total != pytest.approx(row["measured_bytes"], rel=0.03)


def test_the_size_of_a_checkpoint():
    recorded = json.loads((ROOT / "benchmarks/results/fsdp.json").read_text())
    megabytes = checkpoint_bytes(recorded["parameters"], 8 * recorded["parameters"]) / 1e6
    assert recorded["save"]["sync"]["checkpoint_mb"] == pytest.approx(megabytes, rel=0.01)


def test_the_tables_of_the_page_are_those_of_the_script():
    model = load_benchmark("scaling_model")
    page = (ROOT / "docs/evidence/scaling.md").read_text(encoding="utf-8")
    measured = model.Measured.read()
    for table in (model.step_table(measured), model.epoch_table(measured)):
        assert "\n".join(table) in page
