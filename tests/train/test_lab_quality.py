"""The lab benchmark gives every recipe the same number of tokens and the same evaluation."""

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
    lines = random_lines()
    sentences = [" ".join(next(lines).split()[: 1 + i % 12]) for i in range(300)]
    path = folder / "text.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    corpus = read_corpus(path, documents="line")
    tokenizer = train_tokenizer(sentences, TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(corpus, tokenizer, valid_fraction=0.2, cache=folder / "cache")


def test_recipes_see_equally_many_tokens_and_are_evaluated_alike(tmp_path):
    out = tmp_path / "quality.json"
    command = [sys.executable, SCRIPT, "--tiny", "--device", "cpu", "--tokens", str(TOKENS), "--points", "4"]
    process = subprocess.run(
        [*command, "--only", "lab", "packed-16", "packed-muon", "--lr", "1e-3", "4e-3", "--batch", "8", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    output = json.loads(out.read_text())
    rows = output["rows"]
    assert [(row["name"], row["train"]["lr"]) for row in rows] == [
        ("lab", 5e-4),  # --lr and --batch are for our recipes
        *((name, lr) for name in ("packed-16", "packed-muon") for lr in (1e-3, 4e-3)),
    ]
    assert {row["targets"] for row in rows} == {output["data"]["valid_tokens"]}
    for row in rows:
        step = row["train"]["batch"] * 32  # the most tokens of a step
        assert TOKENS - step < row["tokens"] <= TOKENS
        for point, share in zip(row["curve"], (0.25, 0.5, 0.75, 1), strict=True):
            assert share * TOKENS - step < point["tokens"] <= share * TOKENS
            assert math.isfinite(point["perplexity"]) and point["perplexity"] > 1
        assert row["perplexity"] == row["curve"][-1]["perplexity"] < row["curve"][0]["perplexity"]
        assert row["seconds"] == row["curve"][-1]["seconds"] > row["curve"][0]["seconds"] > 0
        assert row["ratio"] == row["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert rows[0]["real_share"] < 1 and all(row["real_share"] > 0.9 for row in rows[1:])
    assert rows[0]["seconds_to_lab"] == rows[0]["seconds"]
    assert "perplexity" in process.stdout


def test_padded_and_packed_rows_have_the_same_perplexity(quality, text):
    tokenizer, stores = text
    tokens = stores.valid.tokens  # in rows of this length no sentence is truncated
    config = tiny_settings(quality, context=tokens)
    model = build_model(config, build_task(config, tokenizer))

    def measure(rows: str, length: int) -> tuple[float, int]:
        return quality.perplexity(model, tokenizer, stores.valid, length, torch.device("cpu"), rows)

    padded, packed = measure("padded", tokens), measure("packed", tokens)
    assert packed[0] == pytest.approx(padded[0], rel=1e-5) and packed[1] == padded[1] == tokens
    for rows in ("padded", "packed"):  # truncated rows predict as many tokens with less context
        truncated = measure(rows, 16)
        assert truncated[1] == tokens and truncated[0] != pytest.approx(padded[0], rel=1e-5)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_steps_fill_the_token_budget(quality, text, rows):
    tokenizer, stores = text
    config = tiny_settings(quality, rows=rows)
    task = build_task(config, tokenizer)
    budget = 2 * stores.train.tokens  # two passes
    totals, share = quality.tokens_by_step(task, stores.train, config.train, budget)
    assert totals[-1] == budget and (totals[:-1] < totals[1:]).all()
    fewer, _ = quality.tokens_by_step(task, stores.train, config.train, budget - 1)
    assert fewer.tolist() == totals[:-1].tolist()
    assert share < 0.8 if rows == "padded" else share > 0.9


def tiny_settings(quality, *, context: int = 64, rows: str = "packed"):
    workload = quality.scaled_workload("tiny")
    train = {"batch": 8, "length": 32}
    model = {"vocabulary": workload.vocabulary, **workload.model, "context": context}
    return make_config({"model": model, "task": {"name": "causal", "rows": rows}, "train": train})
