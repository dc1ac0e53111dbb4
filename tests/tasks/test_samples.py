"""Pretraining stores a few samples of the model's outputs for held-out text."""

import json

import pytest

import headstock
from headstock.tasks import samples as task_samples
from tests.conftest import TINY

KINDS = {
    "causal": {"continued"},
    "masked": {"filled"},
    "hybrid": {"continued", "filled"},
    "denoise": {"denoised"},
    "both-ways": set(),
}
CELLS = {key: value for key, value in TINY.items() if key not in ("heads", "context")} | {"length": 32}
PRESETS = {"denoise": "seq2seq-nano", "both-ways": "elmo-nano"}


@pytest.fixture(autouse=True)
def as_long_as_for_users(monkeypatch):
    monkeypatch.setattr(task_samples, "NEW_TOKENS", 40)


def pretrain(corpus, out, objective, **overrides):
    settings = (CELLS if objective == "both-ways" else TINY) | {"steps": 2, "tensorboard": False} | overrides
    return headstock.pretrain(corpus, out=out, preset=PRESETS.get(objective), objective=objective, settings=settings)


@pytest.mark.parametrize("objective", KINDS)
def test_each_objective_has_its_samples(corpus, tmp_path, objective):
    samples = pretrain(corpus, tmp_path / "run", objective)["samples"]
    assert {sample["kind"] for sample in samples} == KINDS[objective]
    assert json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["samples"] == samples
    text = " ".join(corpus.read_text(encoding="utf-8").split())
    for sample in samples:
        true_text = sample["given"] + sample["true"] if sample["kind"] == "continued" else sample["true"]
        assert " ".join(true_text.split()) in text
        assert ("[MASK]" in sample["given"]) == (sample["kind"] == "filled") or sample["kind"] == "denoised"
        assert "[MASK]" not in sample["output"]


def test_samples_depend_on_the_seed(corpus, tmp_path):
    first, repeated, other_seed = (
        pretrain(corpus, tmp_path / str(number), "causal", seed=seed)["samples"]
        for number, seed in enumerate((0, 0, 1))
    )
    assert first == repeated != other_seed


def test_samples_of_one_long_document_differ(tmp_path):
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"word{number} follows {number + 1}." for number in range(4000)), encoding="utf-8")
    samples = pretrain(text, tmp_path / "run", "causal", **{"data.documents": "file"})["samples"]
    assert len({sample["given"] for sample in samples}) == len(samples) == 3
