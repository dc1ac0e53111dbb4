"""Benchmarks: synthetic token stores are valid, scaling follows the closed forms, ratios point in one direction."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headstock.data.labelled_texts import read_records
from headstock.experiments.bench import scaling
from headstock.experiments.bench.runner import (
    Measurement,
    bench_table,
    inference_measurements,
    run_script,
    training_measurements,
)
from headstock.experiments.bench.workloads import (
    QUICK,
    WORKLOADS,
    time_steps,
    workload_config,
    workloads_for,
    write_corpus,
    write_labelled_rows,
    write_token_stores,
)
from headstock.train.models import placeholder_tokenizer

CPU = torch.device("cpu")


def test_a_synthetic_token_store_has_the_requested_size(tmp_path):
    stores = write_token_stores(tmp_path / "store", 0.5, vocabulary=300)
    assert stores.train.tokens == 250_000 and stores.valid.tokens == 20_000
    assert sum(file.stat().st_size for file in (tmp_path / "store").glob("train-0*.bin")) == 500_000
    rows = stores.train.windows(np.array([0, 1000]), 300)
    assert rows.max() < 300 and (rows == placeholder_tokenizer().eos).sum() in (4, 5, 6)
    assert stores.train.lengths.sum() == stores.train.tokens
    assert stores.train.location(3) == "made up:0"


def test_synthetic_text_and_rows(tmp_path):
    assert 0.1e6 <= write_corpus(tmp_path / "text.txt", 0.1).stat().st_size < 0.102e6
    records = read_records(str(write_labelled_rows(tmp_path / "rows.csv", 10)))
    assert len(records) == 10


@pytest.mark.parametrize("workload", [workload for workloads in WORKLOADS.values() for workload in workloads])
def test_every_workload_has_a_valid_config(workload):
    config = workload_config(workload)
    assert config.train.batch == workload.rows and config.train.length == workload.length
    assert getattr(config.model, "context", None) is None or config.model.context >= workload.length


@pytest.mark.parametrize(("supported", "count"), [(True, 1), (False, 0)])
def test_fp8_is_measured_where_it_is_supported(monkeypatch, supported, count):
    monkeypatch.setattr("headstock.experiments.bench.workloads.supports_fp8", lambda device: supported)
    names = [workload.name for workload in workloads_for(torch.device("cuda"), quick=False)]
    assert sum("fp8" in name for name in names) == count and len(names) > 3


def test_timed_steps_count_all_tokens(tmp_path):
    stores = write_token_stores(tmp_path / "store", 0.1, vocabulary=workload_config(QUICK).model.vocabulary)
    timing = time_steps(workload_config(QUICK), stores, CPU, steps=4)
    assert timing.tokens == pytest.approx(QUICK.rows * QUICK.length, rel=0.1)
    assert timing.seconds > 0 and timing.peak_bytes > 1 << 20


def test_a_ratio_is_a_speedup():
    assert Measurement("a", 300, "tokens/s", theirs=100, peer="b").ratio == 3
    assert Measurement("a", 1.0, "s", theirs=3.0, peer="b").ratio == 3
    assert Measurement("a", 1.0, "s").ratio is None


def test_results_of_scripts_become_ratios():
    row = {"work": "generate", "rows": 64, "prompts": "even", "ours": 300.0, "theirs": 100.0, "unit": "tokens"}
    (measurement,) = inference_measurements({"results": [row]})
    assert measurement.work == "generate, 64 rows, even prompts"
    assert measurement.ratio == 3 and measurement.peer == "transformers"
    rows = [("gpt", "nanoGPT, compiled", 400.0), ("gpt", "headstock", 800.0), ("lab", "headstock", 50.0)]
    output = [{"work": work, "how": how, "tokens_per_second": speed} for work, how, speed in rows]
    (measurement,) = training_measurements({"rows": output})
    assert (measurement.ratio, measurement.peer, measurement.work) == (2, "nanoGPT, compiled", "training gpt")


def test_a_script_that_fails_is_skipped(tmp_path, caplog):
    (tmp_path / "broken.py").write_text("import sys; sys.exit('no such library')")
    caplog.set_level("INFO", logger="headstock")
    assert run_script(tmp_path / "broken.py", ["--json"], inference_measurements) == []
    assert "skipped" in caplog.messages[-1] and "no such library" in caplog.messages[-1]
    (tmp_path / "fine.py").write_text(
        "import json, sys; out = sys.argv[sys.argv.index('--json') + 1]\n"
        "json.dump({'results': [{'work': 'w', 'ours': 2, 'theirs': 1, 'unit': 'texts'}]}, open(out, 'w'))"
    )
    assert run_script(tmp_path / "fine.py", ["--device", "cpu", "--json"], inference_measurements)[0].ratio == 2


def test_the_attention_share_grows_with_the_sequence_length():
    config = workload_config(replace(QUICK, settings=QUICK.settings | {"model.context": 4096}))
    shares = [scaling.attention_share(config, length) for length in (64, 512, 4096)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.5
    # attention is proportional to the length, everything else constant
    odds = [share / (1 - share) for share in shares]
    assert odds[1] / odds[0] == pytest.approx(8) and odds[2] / odds[1] == pytest.approx(8)


def test_scaling_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "CPU_WORKLOAD", QUICK)
    monkeypatch.setattr(scaling, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(scaling, "LENGTHS", (32, 64))
    monkeypatch.setattr(scaling, "TOKENS", 64)
    monkeypatch.setattr(scaling, "ROUNDS", 1)
    monkeypatch.setattr(scaling, "time_in_process", lambda *args: scaling.time_store(*args, 1))
    results = scaling.measure_scaling(device="cpu", megabytes=2, steps=4)
    assert [row["megabytes"] for row in results["stores"]] == [1, 2]
    assert [row["tokens"] for row in results["rows"]] == [64, 128]
    scaling.write_scaling_chart(results, tmp_path / "growth.svg")
    svg = Path(tmp_path / "growth.svg").read_text()
    assert "sequence length" in svg and "attention" in svg and (tmp_path / "growth.json").is_file()


def test_the_table_has_a_row_per_measurement():
    rows = [
        Measurement("a", 1234.0, "tokens/s", theirs=617.0, peer="them").to_dict(),
        Measurement("b", 0.3, "s").to_dict(),
    ]
    table = bench_table({"device": "here", "date": "2026-01-01", "versions": {"torch": "2"}, "results": rows})
    assert table.row_count == 2
