"""Fault 7: a resume without any one piece of the saved state differs from the uninterrupted run.

This is the control of fault 1: every piece that a checkpoint restores matters, and the comparison notices it.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import headstock
from headstock.model.backbones.transformer import Transformer
from headstock.tasks.causal import CausalLM
from headstock.train.budget import Budget, ValidationBudget
from headstock.train.checkpoint import Checkpoint, TrainState, newest_first, step_of
from headstock.train.distributed import Interrupted
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule, TrainingStep
from tests.faults.harness import EVERY_STATE, outcome

# Pieces that are not restored for the next step: for readers of a checkpoint, or for the message about other hardware
RECORDS = {"train", "valid", "environment"}


@dataclass
class Scenario:
    """A run that is interrupted after the checkpoint of a step."""

    settings: dict[str, Any]
    step: int
    patch: Callable[[pytest.MonkeyPatch], None] | None = None  # of the run
    resumed_patch: bool = True  # whether the patch also holds for the resume
    stops: bool = False  # whether the patch interrupts the run
    change: dict[str, Any] = field(default_factory=dict)  # of the checkpoint's state before the resume


def limit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 rows fit into memory."""
    forward = Transformer.forward

    def limited(self, batch, *args, **kwargs):
        if self.training and len(batch.tokens) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", limited)


def stop_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal arrives in the first validation."""
    losses = CausalLM.losses

    def with_signal(self, model, batch, **options):
        if not model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses(self, model, batch, **options)

    monkeypatch.setattr(CausalLM, "losses", with_signal)


def spike_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of steps 38 and 43 is 40 times as high."""
    accumulate, forward, current = TrainingStep.accumulate, LossModule.forward, [0]

    def counted(self, step, batches):
        current[0] = step + 1
        return accumulate(self, step, batches)

    def spiking(self, batch):
        factor = 40 if self.model.training and current[0] in (38, 43) else 1
        return {head: loss * factor for head, loss in forward(self, batch).items()}

    monkeypatch.setattr(TrainingStep, "accumulate", counted)
    monkeypatch.setattr(LossModule, "forward", spiking)


WINDOWS = EVERY_STATE | {"keep": 9, "steps": 9, "log_every": 4, "validate_every": 5, "checkpoint_every": 3}
WORSE = {"lr": 2.0, "warmup": 0.9, "schedule": "constant", "optimizer": "adamw", "ema": 0.0}  # after a few steps
BEST = WINDOWS | WORSE | {"weights": "best", "validate_every": 1, "checkpoint_every": 1, "steps": 30, "patience": 6}
SCENARIOS = {
    "middle": Scenario(WINDOWS, 6),
    "end": Scenario(WINDOWS, 9),
    "best": Scenario(BEST, 6),
    "memory": Scenario(WINDOWS, 6, limit_memory, resumed_patch=False),
    "validation": Scenario(WINDOWS, 5, stop_validation, resumed_patch=False, stops=True),
    "spikes": Scenario(WINDOWS | {"steps": 44, "checkpoint_every": 40, "validate_every": 44}, 40, spike_twice),
    "minutes": Scenario(
        WINDOWS | {"steps": None, "minutes": 0.01}, -1, change={"seconds_per_valid_example": 1.0, "valid_examples": 9}
    ),
}


def forget(*keys: str) -> Callable[[Checkpoint], None]:
    """Set a field of the state to its initial value."""

    def edit(checkpoint: Checkpoint) -> None:
        values, initial = checkpoint.state, asdict(TrainState()) | {"average_steps": 0}
        for key in keys[:-1]:
            values, initial = values[key], initial.get(key, {})
        new = initial[keys[-1]] if keys[-1] in initial else type(values[keys[-1]])()
        assert new != values[keys[-1]], "it has its initial value anyway"
        values[keys[-1]] = new

    return edit


def remove(part: str, ending: str = "") -> Callable[[Checkpoint], None]:
    """Remove the tensors of a part whose names end like this."""

    def edit(checkpoint: Checkpoint) -> None:
        tensors = getattr(checkpoint, part)
        removed = [name for name in tensors if name.endswith(ending)]
        assert removed
        for name in removed:
            if part == "optimizer":  # its optimizer starts this value anew, as zeros
                tensors[name].zero_()
            else:
                tensors[name].normal_()

    return edit


# each piece: the scenario in which it matters, and how it is removed
PIECES: dict[str, tuple[str, Callable[[Checkpoint], None]]] = {
    "model": ("middle", remove("model")),
    "Muon's momentum": ("middle", remove("optimizer", "/momentum")),
    "Adam's first moment": ("middle", remove("optimizer", "/exp_avg")),
    "Adam's second moment": ("middle", remove("optimizer", "/exp_avg_sq")),
    "Adam's step": ("middle", remove("optimizer", "/step")),
    "average": ("middle", remove("average")),
    "average_steps": ("middle", forget("average_steps")),
    "step": ("middle", forget("step")),  # also the position in the data, the learning rate and the dropout masks
    "tokens": ("middle", forget("tokens")),
    "window": ("middle", forget("window")),
    "window: loss": ("middle", forget("window", "losses", "total")),
    "window: steps": ("middle", forget("window", "losses", "steps")),
    "window: metrics": ("middle", forget("window", "seen", "sums")),
    "window: counts": ("middle", forget("window", "seen", "counts")),
    "window: spikes": ("spikes", forget("window", "losses", "spikes")),
    "spikes": ("spikes", forget("spikes")),
    "loss": ("end", forget("loss")),
    "best_score": ("best", forget("best_score")),
    "best_step": ("best", forget("best_step")),
    "validations_since_best": ("best", forget("validations_since_best")),
    "micro_batch": ("memory", forget("micro_batch")),
    "validation_due": ("validation", forget("validation_due")),
    "valid_examples": ("minutes", forget("valid_examples")),
    "seconds_per_valid_example": ("minutes", forget("seconds_per_valid_example")),
}
# clocks, which no two runs share; the tests below show that they continue
CLOCKS = {"seconds", "overhead_seconds", "valid_tokens", "window: seconds", "window: tokens"}


@pytest.fixture(scope="module")
def interrupted(corpus, tmp_path_factory):
    """By scenario: the run with its checkpoints up to the step, and the outcome without an interruption."""
    runs: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in runs:
            scenario, out = SCENARIOS[name], tmp_path_factory.mktemp(name) / "run"
            if scenario.stops:
                headstock.pretrain(corpus, out=out.with_name("whole"), settings=scenario.settings)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted) if scenario.stops else nullcontext():
                if scenario.patch:
                    scenario.patch(patch)
                headstock.pretrain(corpus, out=out, settings=scenario.settings)
            expected = outcome(out.with_name("whole") if scenario.stops else out)
            last = step_of(newest_first(out / "checkpoints")[0])
            for path in newest_first(out / "checkpoints"):
                if scenario.step >= 0 and step_of(path) > scenario.step:
                    shutil.rmtree(path)
            for file in ("model.safetensors", "results.json", "README.md"):
                (out / file).unlink(missing_ok=True)
            if scenario.change:
                edit_newest(out, lambda checkpoint: checkpoint.state.update(scenario.change))
                expected = resumed(corpus, out, out.with_name("expected"), scenario)
            assert step_of(newest_first(out / "checkpoints")[0]) in (scenario.step, last)
            runs[name] = out, expected
        return runs[name]

    return of


def edit_newest(run: Path, edit: Callable[[Checkpoint], None]) -> None:
    """Change the newest checkpoint, with a manifest that fits."""
    path = newest_first(run / "checkpoints")[0]
    checkpoint = Checkpoint.read(path)
    edit(checkpoint)
    shutil.rmtree(path)
    checkpoint.write(path)


def resumed(corpus: Path, source: Path, out: Path, scenario: Scenario) -> dict[str, Any]:
    """The outcome of resuming a copy of a run."""
    if source != out:
        shutil.copytree(source, out)
    with pytest.MonkeyPatch.context() as patch:
        if scenario.patch and scenario.resumed_patch:
            scenario.patch(patch)
        headstock.pretrain(corpus, out=out, resume=True)
    return outcome(out)


def test_fault_07_each_piece_of_the_state_matters(corpus, interrupted, tmp_path, record):
    for name, scenario in SCENARIOS.items():
        run, expected = interrupted(name)
        assert resumed(corpus, run, tmp_path / name, scenario) == expected, name
    for number, (piece, (name, edit)) in enumerate(PIECES.items()):
        run, expected = interrupted(name)
        out = shutil.copytree(run, tmp_path / f"piece-{number}")
        edit_newest(out, edit)
        assert resumed(corpus, out, out, SCENARIOS[name]) != expected, f"{piece} does not matter"
    record(7, "each piece of the state removed in turn", pieces=len(PIECES), differing_resumes=len(PIECES))


def test_fault_07_the_pieces_are_all_of_a_checkpoint(interrupted):
    checkpoint = Checkpoint.read(newest_first(interrupted("middle")[0] / "checkpoints")[0])
    known = PIECES.keys() | CLOCKS | RECORDS
    assert {part.name for part in fields(TrainState)} | {"average_steps", "environment"} == checkpoint.state.keys()
    assert checkpoint.state.keys() <= known
    assert {name.rpartition("/")[2] for name in checkpoint.optimizer} == {"momentum", "exp_avg", "exp_avg_sq", "step"}
    losses, seen = checkpoint.state["window"]["losses"], checkpoint.state["window"]["seen"]
    assert losses.keys() == {"total", "steps", "tokens", "seconds", "spikes"} and seen.keys() == {"sums", "counts"}


def test_fault_07_clocks_continue(interrupted, tmp_path, corpus):
    run, _ = interrupted("middle")
    out = shutil.copytree(run, tmp_path / "run")
    later = {"seconds": 1000.0, "overhead_seconds": 990.0}
    edit_newest(out, lambda checkpoint: checkpoint.state.update(later))
    resumed(corpus, out, out, SCENARIOS["middle"])
    results = json.loads((out / "results.json").read_text())
    assert results["seconds"] > 1000 and results["tokens_per_second"] > results["tokens"] / 1000
    settings = TrainSettings(minutes=1.0)  # validations of a run in minutes read as many tokens as the first one
    budget = ValidationBudget(settings, Budget.of(settings, 10), 32)
    sizes = [budget.examples(TrainState(5, seconds=9.0, valid_tokens=n), on_cpu=True) for n in (None, 64_000)]
    assert sizes[0] != sizes[1] == 2000
