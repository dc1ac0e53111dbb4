"""The script that sets our training beside the lab's gives both equally many tokens and one and the same measure."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.experiments.bench.workloads import random_lines
from headstock.train.models import build_model, build_task
from headstock.train.settings import make_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lab_quality.py"
TOKENS = 6000


@pytest.fixture(scope="module")
def quality():
    """The script as a module."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("lab_quality", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences of one to twelve words, with their tokens."""
    folder = tmp_path_factory.mktemp("sentences")
    made = random_lines()
    sentences = [" ".join(next(made).split()[: 1 + place % 12]) for place in range(300)]
    path = folder / "text.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    corpus = read_corpus(path, documents="line")
    tokenizer = train_tokenizer(sentences, TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(corpus, tokenizer, valid_fraction=0.2, cache=folder / "cache")


def test_all_see_as_many_tokens_and_are_measured_on_the_same_ones(tmp_path):
    out = tmp_path / "quality.json"
    words = [sys.executable, SCRIPT, "--tiny", "--device", "cpu", "--tokens", str(TOKENS), "--points", "4"]
    ran = subprocess.run(
        [*words, "--only", "lab", "packed-16", "packed-muon", "--lr", "1e-3", "4e-3", "--batch", "8", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(out.read_text())
    rows = told["rows"]
    assert [(row["name"], row["train"]["lr"]) for row in rows] == [
        ("lab", 5e-4),  # which is as it is, whatever is asked of ours
        *((name, lr) for name in ("packed-16", "packed-muon") for lr in (1e-3, 4e-3)),
    ]
    assert {row["targets"] for row in rows} == {told["data"]["valid_tokens"]}
    for row in rows:
        step = row["train"]["batch"] * 32  # at most so many in a step
        assert TOKENS - step < row["tokens"] <= TOKENS
        for point, share in zip(row["curve"], (0.25, 0.5, 0.75, 1), strict=True):
            assert share * TOKENS - step < point["tokens"] <= share * TOKENS
            assert math.isfinite(point["perplexity"]) and point["perplexity"] > 1
        assert row["perplexity"] == row["curve"][-1]["perplexity"] < row["curve"][0]["perplexity"]
        assert row["seconds"] == row["curve"][-1]["seconds"] > row["curve"][0]["seconds"] > 0
        assert row["ratio"] == row["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert rows[0]["real_share"] < 1 and all(row["real_share"] > 0.9 for row in rows[1:])
    assert rows[0]["seconds_to_lab"] == rows[0]["seconds"]
    assert "perplexity" in ran.stdout


def test_padded_and_packed_rows_ask_for_the_same_tokens_and_lose_the_same(quality, text):
    tokenizer, stores = text
    whole = stores.valid.tokens  # in rows so long no sentence is cut, so both show each of them from its beginning
    run_config = tiny_settings(quality, context=whole)
    model = build_model(run_config, build_task(run_config, tokenizer))

    def found(rows: str, length: int) -> tuple[float, int]:
        return quality.perplexity(model, tokenizer, stores.valid, length, torch.device("cpu"), rows)

    padded, packed = found("padded", whole), found("packed", whole)
    assert packed[0] == pytest.approx(padded[0], rel=1e-5) and packed[1] == padded[1] == whole
    for rows in ("padded", "packed"):  # cut rows ask for as many, but know less of what came before
        cut = found(rows, 16)
        assert cut[1] == whole and cut[0] != pytest.approx(padded[0], rel=1e-5)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_steps_are_as_many_as_fit_into_the_tokens(quality, text, rows):
    tokenizer, stores = text
    chosen = tiny_settings(quality, rows=rows)
    task = build_task(chosen, tokenizer)
    budget = 2 * stores.train.tokens  # two passes
    seen, share = quality.seen_after(task, stores.train, chosen.train, budget)
    assert seen[-1] == budget and (seen[:-1] < seen[1:]).all()
    fewer, _ = quality.seen_after(task, stores.train, chosen.train, budget - 1)
    assert fewer.tolist() == seen[:-1].tolist()
    assert share < 0.8 if rows == "padded" else share > 0.9


def tiny_settings(quality, *, context: int = 64, rows: str = "packed"):
    work = quality.sized("tiny")
    train = {"batch": 8, "length": 32}
    model = {"vocabulary": work.real, **work.model, "context": context}
    return make_config({"model": model, "task": {"name": "causal", "rows": rows}, "train": train})
