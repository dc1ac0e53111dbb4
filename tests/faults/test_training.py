"""Faults 12, 13, 14 and 18: NaN, loss spikes, out of memory, and data that changed before a resume."""

import json
import math
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch

import headstock
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import DivergenceError
from headstock.train import loop
from headstock.train.checkpoint import newest_first, step_of
from headstock.train.run_folder import RunFolder
from headstock.train.step import LossModule, TrainingStep
from tests.commands import set_options
from tests.conftest import TINY
from tests.faults.harness import EVERY_STATE, amount, is_full, outcome
from tests.train.processes import BackgroundProcess


@pytest.fixture
def change_loss(monkeypatch):
    """`change_loss(steps, change)`: the summed losses of these steps, counted from 1, are changed from now on."""
    accumulate, forward = TrainingStep.accumulate, LossModule.forward
    active = {"steps": [], "change": None, "step": 0}

    def counted(self, step, batches):
        active["step"] = step + 1
        return accumulate(self, step, batches)

    def changed(self, batch):
        sums = forward(self, batch)
        is_changed = active["step"] in active["steps"]
        return {head: active["change"](loss) for head, loss in sums.items()} if is_changed else sums

    monkeypatch.setattr(TrainingStep, "accumulate", counted)
    monkeypatch.setattr(LossModule, "forward", changed)
    return lambda steps, change: active.update(steps=steps, change=change)


# Fault 12: NaN


def nan_loss(loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan


def nan_gradient(loss: torch.Tensor) -> torch.Tensor:
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


@pytest.mark.parametrize("nan", [nan_loss, nan_gradient])
def test_fault_12_nan_in_a_step(corpus, tmp_path, change_loss, call, record, nan):
    """Exit code 1, nothing of that step is saved, and without the NaN the run goes on to the same bits."""
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=EVERY_STATE)
    steps = range(1, EVERY_STATE["steps"] + 1) if is_full() else (1, 8)
    for step in steps:
        out = tmp_path / f"run-{step}"
        change_loss([step], nan)
        _, err = call("pretrain", corpus, "--out", out, *set_options(EVERY_STATE), code=1)
        change_loss([], nan)
        last = err.splitlines()[-1]
        assert f"step {step}: the loss or its gradient is not a finite number" in last and "Traceback" not in err
        saved = newest_first(out / "checkpoints")
        assert [step_of(path) for path in saved] == [n for n in (6, 3) if n < step][:1]
        headstock.pretrain(corpus, out=out, settings=EVERY_STATE, resume=True)
        assert outcome(out) == outcome(tmp_path / "whole")
    record(12, nan.__name__.replace("_", " of the ").replace("nan", "NaN"), runs=len(steps), exit_code=1, updates=0)


def test_fault_12_control_without_the_check_the_run_goes_on(corpus, tmp_path, change_loss, monkeypatch):
    change_loss([8], nan_loss)
    with pytest.raises(DivergenceError):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=EVERY_STATE)
    monkeypatch.setattr(loop, "raise_diverged", lambda *args, **options: None)
    headstock.pretrain(corpus, out=tmp_path / "unchecked", settings=EVERY_STATE)


# Fault 13: spikes


def test_fault_13_loss_spikes(corpus, tmp_path, change_loss, messages, record):
    """Factors below 4 may pass while the loss falls steeply, since the fall counts as variation."""
    pick, steps, clean, spikes = random.Random(5), amount(60, 200), amount(1, 10), amount(1, 20)
    settings = TINY | {"depth": 1, "steps": steps, "validate_every": steps}
    for seed in range(clean):
        run = headstock.pretrain(corpus, out=tmp_path / f"clean-{seed}", settings=settings | {"seed": seed})
        assert run["spikes"] == 0
    assert not any("spike" in line for line in messages)
    for seed in range(spikes):
        step, factor = pick.randint(34, steps), pick.uniform(5, 40)
        change_loss([step], lambda loss, factor=factor: loss * factor)
        run = headstock.pretrain(corpus, out=tmp_path / f"spike-{seed}", settings=settings | {"seed": seed})
        flagged = [line.split(":")[0] for line in messages if "spike" in line]
        assert run["spikes"] >= 1 and flagged[0] == f"spike at step {step}", (step, factor)
        messages.clear()
        change_loss([], None)
    figures = {"clean_runs": clean, "steps_each": steps, "false_alarms": 0, "spikes": spikes}
    record(13, "a step's loss times 5 to 40", **figures, flagged_in_the_same_step=spikes)


# Fault 14: out of memory

WIDE = TINY | {"depth": 1, "context": 128, "vocabulary": 1000, "batch": 64, "steps": 2, "log_every": 1, "seed": 3}


def pretrain_in_little_memory(corpus: Path, out: Path, settings: dict, megabytes: int) -> None:
    """Pretrain in a process that may allocate so much beyond what it has now."""
    headstock.pretrain(corpus, out=out.with_name("first"), settings=settings | {"batch": 1, "steps": 1})
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    headstock.pretrain(corpus, out=out, settings=settings)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_fault_14_out_of_memory(tmp_path, record):
    pick, text = random.Random(0), tmp_path / "text.txt"
    words = ["".join(pick.choices("abcdefghij", k=5)) for _ in range(2000)]
    text.write_text("\n\n".join(" ".join(pick.choices(words, k=100)) for _ in range(150)))
    headstock.pretrain(text, out=tmp_path / "whole", settings=WIDE)
    process = BackgroundProcess(tmp_path / "process", pretrain_in_little_memory, text, tmp_path / "run", WIDE, 60)
    assert process.wait() == 0, process.stderr
    rows = [RunFolder(tmp_path / run).read_metrics() for run in ("whole", "run")]
    losses = [[row["loss"] for row in run if "loss" in row] for run in rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 2
    progress = json.loads((newest_first(tmp_path / "run" / "checkpoints")[0] / "progress.json").read_text())
    assert progress["micro_batch"] < 64  # a control: the memory did not suffice
    worst = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    figures = {"micro_batch": f"64 -> {progress['micro_batch']}", "largest_difference_of_losses": f"{worst:.0e}"}
    record(14, "memory limited to 60 MB, so that allocations fail", **figures)


# Fault 18: other data at a resume


def test_fault_18_changed_data_is_refused_at_a_resume(corpus, tmp_path, call, record):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    shutil.copy(corpus, text)
    headstock.pretrain(text, out=run, settings=EVERY_STATE)
    shutil.rmtree(run / "checkpoints" / f"step-{EVERY_STATE['steps']}")
    for name in ("model.safetensors", "results.json"):
        (run / name).unlink()
    original = text.read_text(encoding="utf-8")
    changes = {
        "a character": original.replace("Anne", "Anna", 1),
        "a document added": f"{original}\n\nOne more story",
        "a document removed": original.partition("\n\n")[2],
        "the order": "\n\n".join(reversed(original.split("\n\n"))),
    }
    refused = []
    for name, changed in changes.items():
        text.write_text(changed, encoding="utf-8")
        _, err = call("pretrain", text, "--out", run, "--resume", code=2)
        assert "the corpus has changed" in err.splitlines()[-1]
        refused.append(name)
    text.write_text(original, encoding="utf-8")
    saved = (run / "tokenizer.json").read_bytes()
    other = train_tokenizer(original.replace("Anne", "Otto").split("\n\n"), TokenizerSettings(vocabulary=290))
    other.save(tmp_path / "other.json")
    _, err = call("pretrain", text, "--out", run, "--resume", "--tokenizer", tmp_path / "other.json", code=2)
    assert "tokenizer.file" in err.splitlines()[-1]
    for content in ((tmp_path / "other.json").read_bytes(), saved[:-2], saved.replace(b"vocab", b"vocap", 1)):
        (run / "tokenizer.json").write_bytes(content)
        _, err = call("pretrain", text, "--out", run, "--resume", code=2)
        assert "tokenizer.json: is damaged or was replaced" in err.splitlines()[-1]
    (run / "tokenizer.json").write_bytes(saved)
    call("pretrain", text, "--out", run, "--resume")  # a control: the original data is accepted
    record(18, "corpus or tokenizer", changes=len(refused) + 4, refused=len(refused) + 4, exit_code=2)
