"""Faults 4 and 6: a resume at every step sees the same examples, and a seed gives the same weights in every family."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headstock
from headstock.io import sha256
from headstock.model.batch import Batch
from headstock.train.distributed import Interrupted
from headstock.train.sampler import BatchSampler, StepLoader
from headstock.train.step import TrainingStep
from tests.commands import set_options
from tests.faults.harness import SMALL, amount, is_full, outcome

# Fault 4: the order of the examples


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, list[int], str]]:
    """Every step that is trained on, in order: its number, its examples, and a hash of its batches' contents."""
    steps: list[tuple[int, list[int], str]] = []
    ids: dict[int, list[int]] = {}
    micro_batches, accumulate = BatchSampler.micro_batches, TrainingStep.accumulate

    def remember(self, step, **options):
        ids[step] = self.indices(step)
        return micro_batches(self, step, **options)

    def record(self, step, batches):
        steps.append((step, ids[step], content(batches)))
        return accumulate(self, step, batches)

    monkeypatch.setattr(BatchSampler, "micro_batches", remember)
    monkeypatch.setattr(TrainingStep, "accumulate", record)
    return steps


def content(batches: list[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.tokens, *(batch.labels[head] for head in sorted(batch.labels))):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def interrupt(event) -> None:
    """A callback: Ctrl-C in every step, after which the run saves and stops."""
    if event.kind == "step":
        os.kill(os.getpid(), signal.SIGINT)


EPOCHS = SMALL | {"steps": None, "epochs": 3, "batch": 48, "validate_every": 50, "dropout": 0.1}
ORDERS = {
    "masked": {"objective": "masked", "settings": EPOCHS},
    "causal": {"objective": "causal", "settings": EPOCHS | {"ema": 0.9}},
    "hybrid": {"objective": "hybrid", "settings": EPOCHS | {"micro_batch": 4}},
    "denoise": {"preset": "seq2seq-nano", "settings": {k: v for k, v in EPOCHS.items() if k != "heads"} | {"heads": 2}},
    "padded rows": {"objective": "causal", "settings": EPOCHS | {"rows": "padded"}},
}


@pytest.mark.parametrize("name", [*ORDERS][: amount(1, len(ORDERS))])
def test_fault_04_a_resume_at_every_step_sees_the_same_examples(corpus, tmp_path, seen, record, name):
    headstock.pretrain(corpus, out=tmp_path / "whole", **ORDERS[name])
    expected = list(seen)
    seen.clear()
    resumes = 0
    for _ in expected:
        with pytest.raises(Interrupted):
            headstock.pretrain(corpus, out=tmp_path / "cut", **ORDERS[name], resume=True, callbacks=[interrupt])
        resumes += 1
    headstock.pretrain(corpus, out=tmp_path / "cut", resume=True)  # evaluates
    assert seen == expected
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    per_epoch = len(expected) // 3
    epochs = [[i for _, ids, _ in expected[n : n + per_epoch] for i in ids] for n in range(0, 3 * per_epoch, per_epoch)]
    assert all(sorted(epoch) == list(range(len(epoch))) for epoch in epochs)  # each example once
    assert epochs[0] != epochs[1] != epochs[2]
    record(4, name, steps=len(expected), resumes=resumes, steps_with_other_examples=0)


def test_fault_04_control_a_lost_position_is_noticed(corpus, tmp_path, seen, monkeypatch):
    headstock.pretrain(corpus, out=tmp_path / "whole", **ORDERS["masked"])
    expected = list(seen)
    seen.clear()
    with pytest.raises(Interrupted):
        headstock.pretrain(corpus, out=tmp_path / "cut", **ORDERS["masked"], callbacks=[interrupt])
    monkeypatch.setattr(StepLoader, "stream", lambda self, size: (self(step, size()) for step in range(1000)))
    headstock.pretrain(corpus, out=tmp_path / "cut", resume=True)
    assert seen != expected


# Fault 6: the same seed

TRANSFORMER = {"heads": 2, "context": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "causal": {"preset": "gpt-nano", "settings": TRANSFORMER},
    "masked": {"preset": "bert-nano", "settings": TRANSFORMER},
    "hybrid": {"preset": "bert-nano", "objective": "hybrid", "settings": TRANSFORMER},
    "encoder-decoder": {"preset": "seq2seq-nano", "settings": TRANSFORMER},
    "LSTM": {"preset": "lstm-nano", "settings": {}},
    "GRU": {"preset": "gru-nano", "settings": {}},
    "ELMo": {"preset": "elmo-nano", "settings": {}},
}
SHORT = {"depth": 1, "width": 16, "hidden": 32, "vocabulary": 300, "batch": 8, "steps": 4, "length": 32}
SHORT |= {"dropout": 0.1, "tensorboard": False, "validate_every": 4}


def weights_hash(corpus: Path, out: Path, family: str, seed: int, hash_seed: int) -> str:
    """The hash of the weights: in this process, or at full size in a new one with other hashes of strings."""
    options = FAMILIES[family]
    settings = SHORT | options["settings"] | {"seed": seed}
    if not is_full():
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(hash_seed)  # global generators have no influence
        headstock.pretrain(corpus, out=out, **options | {"settings": settings}, device="cpu")
        return sha256(out / "model.safetensors")
    words = ["pretrain", corpus, "--out", out, "--preset", options["preset"], *set_options(settings), "--quiet"]
    words += ["--objective", options["objective"]] if "objective" in options else []
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    subprocess.run([sys.executable, "-m", "headstock", *map(str, words)], env=environment, check=True)
    return sha256(out / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_06_the_same_seed_gives_the_same_weights(corpus, tmp_path, record, family):
    first, second = (weights_hash(corpus, tmp_path / str(n), family, seed=1, hash_seed=n) for n in (1, 2))
    assert first == second
    assert weights_hash(corpus, tmp_path / "other", family, seed=2, hash_seed=1) != first  # a control
    record(6, family, runs=2, weights="equal", with_another_seed="different")
