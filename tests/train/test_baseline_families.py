"""Runs of the baseline families, and next-token prediction without a causal mask."""

import json
import logging

import pytest

import headstock

SMALL = {"depth": 1, "width": 16, "vocabulary": 300, "batch": 8, "steps": 12, "tensorboard": False}


def losses(run) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["valid_loss"] for row in rows if "valid_loss" in row] or [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("family", "objective", "settings"),
    [
        ("ngram", "causal", {"order": 3, "hidden": 32}),
        ("recurrent", "causal", {"cell": "rnn", "hidden": 32}),
        ("bitransformer", "both-ways", {"heads": 2, "hidden": 32, "context": 32}),
        ("rnn-seq2seq", "denoise", {"cell": "gru", "hidden": 32}),
    ],
)
def test_a_run_learns_and_is_used(family, objective, settings, tmp_path, corpus, call):
    run = tmp_path / "run"
    settings = SMALL | {"length": 32, "lr": 0.01} | settings
    headstock.pretrain(corpus, out=run, objective=objective, settings=settings | {"model.family": family}, device="cpu")
    assert losses(run)[-1] < losses(run)[0]
    if objective == "causal":
        out, _ = call("generate", run, "Anne", "--max-tokens", "4", "--json")
        assert json.loads(out.splitlines()[-1])
    out, _ = call("explain", "params", run, "--json")
    assert json.loads(out.splitlines()[-1])["total"] > 0
    if objective != "denoise":
        (rows,) = [headstock.load(run).embed(["Anne sees Paris."])]
        assert len(rows) == 1


def test_without_a_causal_mask_a_model_copies_what_it_predicts(tmp_path, corpus, tiny, caplog):
    caplog.set_level(logging.WARNING, logger="headstock")
    final = {}
    for causal in (True, False):
        settings = tiny | {"steps": 250, "validate_every": 125, "lr": 0.01, "model.causal": causal}
        headstock.pretrain(corpus, out=tmp_path / str(causal), settings=settings, device="cpu")
        final[causal] = losses(tmp_path / str(causal))[-1]
        assert ("model.causal=false" in caplog.text) is not causal
    assert final[False] < 0.8 * final[True]
