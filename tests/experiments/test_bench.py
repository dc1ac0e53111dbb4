"""What is measured is what is meant: made-up stores are stores, closed forms tell growth, ratios point one way."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headstock.data.labelled_texts import read_records
from headstock.experiments.bench import peers
from headstock.experiments.bench import scaling as growing
from headstock.experiments.bench.measurement import Measurement
from headstock.experiments.bench.runner import bench_table
from headstock.experiments.bench.synthetic_data import write_corpus, write_labelled_rows, write_token_stores
from headstock.experiments.bench.training import QUICK, SHAPES, measure, settings_of, shapes
from headstock.train.blueprint import placeholder_tokenizer

CPU = torch.device("cpu")


def test_a_made_up_store_is_a_store_of_the_size_asked_for(tmp_path):
    stores = write_token_stores(tmp_path / "store", 0.5, vocabulary=300)
    assert stores.train.tokens == 250_000 and stores.valid.tokens == 20_000
    assert sum(file.stat().st_size for file in (tmp_path / "store").glob("train-0*.bin")) == 500_000
    rows = stores.train.windows(np.array([0, 1000]), 300)
    assert rows.max() < 300 and (rows == placeholder_tokenizer().eos).sum() in (4, 5, 6)
    assert stores.train.lengths.sum() == stores.train.tokens
    assert stores.train.location(3) == "made up:0"


def test_made_up_text_and_rows(tmp_path):
    assert 0.1e6 <= write_corpus(tmp_path / "text.txt", 0.1).stat().st_size < 0.102e6
    records = read_records(str(write_labelled_rows(tmp_path / "rows.csv", 10)))
    assert len(records) == 10


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes])
def test_every_shape_can_be_built(shape):
    chosen = settings_of(shape)
    assert chosen.train.batch == shape.rows and chosen.train.length == shape.length
    assert getattr(chosen.model, "context", None) is None or chosen.model.context >= shape.length


@pytest.mark.parametrize(("has", "count"), [(True, 1), (False, 0)])
def test_eight_bits_are_measured_where_a_gpu_has_them(monkeypatch, has, count):
    monkeypatch.setattr("headstock.experiments.bench.training.supports_fp8", lambda device: has)
    names = [shape.named for shape in shapes(torch.device("cuda"), quick=False)]
    assert sum("in 8 bits" in name for name in names) == count and len(names) > 3


def test_steps_are_timed_with_all_their_tokens(tmp_path):
    stores = write_token_stores(tmp_path / "store", 0.1, vocabulary=settings_of(QUICK).model.vocabulary)
    found = measure(settings_of(QUICK), stores, CPU, steps=4)
    assert found.tokens == pytest.approx(QUICK.rows * QUICK.length, rel=0.1)
    assert found.seconds > 0 and found.peak > 1 << 20


def test_a_ratio_says_how_many_times_as_fast():
    assert Measurement("a", 300, "tokens/s", theirs=100, peer="b").ratio == 3
    assert Measurement("a", 1.0, "s", theirs=3.0, peer="b").ratio == 3
    assert Measurement("a", 1.0, "s").ratio is None


def test_rows_of_scripts_become_ratios():
    row = {"work": "generate", "rows": 64, "prompts": "even", "ours": 300.0, "theirs": 100.0, "unit": "tokens"}
    (one,) = peers.inference_rows({"results": [row]})
    assert one.work == "generate, 64 rows, even prompts" and one.ratio == 3 and one.peer == "transformers"
    rows = [("gpt", "all", 800.0), ("gpt", "nanoGPT, compiled", 400.0), ("lab", "all", 50.0)]
    told = [{"work": work, "how": how, "tokens_per_second": speed} for work, how, speed in rows]
    (one,) = peers.training_rows({"rows": told})
    assert one.ratio == 2 and one.peer == "nanoGPT, compiled" and one.work == "training gpt"


def test_a_script_that_fails_is_left_out_and_said(tmp_path):
    (tmp_path / "broken.py").write_text("import sys; sys.exit('no such library')")
    said: list[str] = []
    assert peers.run(tmp_path / "broken.py", ["--json"], peers.inference_rows, said.append) == []
    assert "left out" in said[-1] and "no such library" in said[-1]
    (tmp_path / "fine.py").write_text(
        "import json, sys; out = sys.argv[sys.argv.index('--json') + 1]\n"
        "json.dump({'results': [{'work': 'w', 'ours': 2, 'theirs': 1, 'unit': 'texts'}]}, open(out, 'w'))"
    )
    assert (
        peers.run(tmp_path / "fine.py", ["--device", "cpu", "--json"], peers.inference_rows, said.append)[0].ratio == 2
    )


def test_attention_is_the_part_that_grows_with_the_row():
    chosen = settings_of(replace(QUICK, settings=QUICK.settings | {"model.context": 4096}))
    shares = [growing.attention_share(chosen, length) for length in (64, 512, 4096)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.5
    # for long rows it is all that matters: twice the length, twice the share's odds
    odds = [share / (1 - share) for share in shares]
    assert odds[1] / odds[0] == pytest.approx(8) and odds[2] / odds[1] == pytest.approx(8)


def test_growth_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "SMALL", QUICK)
    monkeypatch.setattr(growing, "ROWS", (1, 2))
    monkeypatch.setattr(growing, "LENGTHS", (32, 64))
    monkeypatch.setattr(growing, "TOKENS", 64)
    monkeypatch.setattr(growing, "ROUNDS", 1)
    monkeypatch.setattr(growing, "in_own_process", lambda *given: growing.read_store(*given, 1))
    found = growing.measure_scaling(device="cpu", megabytes=2, steps=4)
    assert [row["megabytes"] for row in found["stores"]] == [1, 2]
    assert [row["tokens"] for row in found["rows"]] == [64, 128]
    growing.write_scaling_chart(found, tmp_path / "growth.svg")
    drawn = Path(tmp_path / "growth.svg").read_text()
    assert "tokens in a row" in drawn and "attention" in drawn and (tmp_path / "growth.json").is_file()


def test_the_table_has_a_row_for_each():
    rows = [Measurement("a", 1234.0, "tokens/s", theirs=617.0, peer="them").plain(), Measurement("b", 0.3, "s").plain()]
    made = bench_table({"device": "here", "date": "2026-01-01", "versions": {"torch": "2"}, "results": rows})
    assert made.row_count == 2
