"""The benchmark against the lab's model trains all models on the same number of tokens and evaluates them alike."""

import json
import math

import pytest
import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.experiments.bench.workloads import random_lines
from headstock.train.models import build_model, build_task
from headstock.train.settings import make_config
from tests.benchmarks import load_benchmark, run_benchmark

TOKENS = 6000


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("lab_quality")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A tokenizer and the token stores of sentences of one to twelve words."""
    folder, lines = tmp_path_factory.mktemp("sentences"), random_lines()
    sentences = [" ".join(next(lines).split()[: 1 + index % 12]) for index in range(300)]
    path = folder / "text.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    corpus = read_corpus(path, documents="line")
    tokenizer = train_tokenizer(sentences, TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(corpus, tokenizer, valid_fraction=0.2, cache=folder / "cache")


def test_all_models_train_on_equally_many_tokens_and_are_evaluated_on_the_same(tmp_path, capsys):
    out = tmp_path / "quality.json"
    options = ["--tiny", "--device", "cpu", "--tokens", TOKENS, "--points", 4, "--lr", 1e-3, 4e-3, "--batch", 8]
    run_benchmark("lab_quality", *options, "--only", "lab", "packed-16", "packed-muon", "--out", out)
    results = json.loads(out.read_text())
    rows = results["rows"]
    assert [(row["name"], row["train"]["lr"]) for row in rows] == [
        ("lab", 5e-4),  # fixed: options apply to our models only
        *((name, lr) for name in ("packed-16", "packed-muon") for lr in (1e-3, 4e-3)),
    ]
    assert {row["targets"] for row in rows} == {results["data"]["valid_tokens"]}
    for row in rows:
        step_tokens = row["train"]["batch"] * 32  # at most
        assert TOKENS - step_tokens < row["tokens"] <= TOKENS
        for point, share in zip(row["curve"], (0.25, 0.5, 0.75, 1), strict=True):
            assert share * TOKENS - step_tokens < point["tokens"] <= share * TOKENS
            assert math.isfinite(point["perplexity"]) and point["perplexity"] > 1
        assert row["perplexity"] == row["curve"][-1]["perplexity"] < row["curve"][0]["perplexity"]
        assert row["seconds"] == row["curve"][-1]["seconds"] > row["curve"][0]["seconds"] > 0
        assert row["ratio"] == row["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert rows[0]["real_share"] < 1 and all(row["real_share"] > 0.9 for row in rows[1:])
    assert rows[0]["seconds_to_lab"] == rows[0]["seconds"]
    assert "perplexity" in capsys.readouterr().out


def test_padded_and_packed_rows_have_the_same_targets_and_perplexity(benchmark, text):
    tokenizer, stores = text
    tokens = stores.valid.tokens  # rows this long split no sentence
    run_config = tiny_config(benchmark, context=tokens)
    model = build_model(run_config, build_task(run_config, tokenizer))

    def evaluate(rows: str, length: int) -> tuple[float, int]:
        return benchmark.perplexity(model, tokenizer, stores.valid, length, torch.device("cpu"), rows)

    padded, packed = evaluate("padded", tokens), evaluate("packed", tokens)
    assert packed[0] == pytest.approx(padded[0], rel=1e-5) and packed[1] == padded[1] == tokens
    for rows in ("padded", "packed"):  # shorter rows have as many targets, with less context
        perplexity, targets = evaluate(rows, 16)
        assert targets == tokens and perplexity != pytest.approx(padded[0], rel=1e-5)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_a_token_budget_gives_as_many_steps_as_fit(benchmark, text, rows):
    tokenizer, stores = text
    run_config = tiny_config(benchmark, rows=rows)
    task = build_task(run_config, tokenizer)
    budget = 2 * stores.train.tokens  # two epochs
    tokens, share = benchmark.tokens_by_step(task, stores.train, run_config.train, budget)
    assert tokens[-1] == budget and (tokens[:-1] < tokens[1:]).all()
    fewer, _ = benchmark.tokens_by_step(task, stores.train, run_config.train, budget - 1)
    assert fewer.tolist() == tokens[:-1].tolist()
    assert share < 0.8 if rows == "padded" else share > 0.9


def tiny_config(benchmark, *, context: int = 64, rows: str = "packed"):
    workload = benchmark.scaled_workload("tiny")
    model = {"vocabulary": workload.vocabulary, **workload.model, "context": context}
    train = {"batch": 8, "length": 32}
    return make_config({"model": model, "task": {"name": "causal", "rows": rows}, "train": train})
