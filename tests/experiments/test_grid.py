"""The experiment grid: each trial runs once, in order, and a second process in the same folder is refused."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from headstock.errors import UserError
from headstock.experiments.grid import Outcome, Trainable, lock_experiment, run_grid
from tests.commands import command
from tests.train.processes import BackgroundProcess


def hold_lock(folder: Path, end: Path) -> None:
    """Run an experiment in a folder until the file `end` exists."""
    with lock_experiment(folder):
        folder.with_name("locked").touch()
        while not end.exists():
            time.sleep(0.01)


@dataclass(frozen=True)
class NamedTrial:
    name: str

    @property
    def label(self) -> str:
        return self.name


class Recorder(Trainable[NamedTrial]):
    """Trials that record when they ran."""

    folder: Path = None  # type: ignore[assignment]

    def __init__(self, folder):
        self.folder, self.order = folder, []

    def lookup(self, trial):
        return None

    def run(self, trial):
        self.order.append(trial.name)
        return Outcome({"seconds": 0.0, "name": trial.name.upper()}, is_new=True)

    def on_worker(self, folder, device):
        return self


def test_trials_run_in_order(tmp_path):
    trainable, progress = Recorder(tmp_path), []
    results = run_grid(
        trainable,
        [NamedTrial(name) for name in "312"],
        format_score=lambda result: result["name"],
        on_result=lambda index, results, is_new: progress.append((index, len(results), is_new)),
    )
    assert trainable.order == ["3", "1", "2"]
    assert [result["name"] for result in results] == ["3", "1", "2"]
    assert progress == [(0, 1, True), (1, 2, True), (2, 3, True)]


@pytest.fixture
def holder(tmp_path):
    """Another process that runs an experiment in the folder."""
    process = BackgroundProcess(tmp_path / "holder", hold_lock, tmp_path / "out", tmp_path / "end")
    process.wait_until((tmp_path / "locked").exists)
    yield process
    process.kill()


@pytest.mark.parametrize("verb", ["compare", "sweep"])
def test_a_second_process_is_refused(verb, holder, stock, files, corpus, tmp_path):
    words = {
        "compare": [stock, *(f"--{name}={path}" for name, path in files.items())],
        "sweep": [corpus, "--grid=lr=1e-3,3e-2"],
    }
    code, _, err = command(verb, *words[verb], f"--out={tmp_path / 'out'}")
    assert code == 2 and "another process is using this folder" in err
    assert not (tmp_path / "out" / "cells").exists()


@pytest.mark.parametrize("end", ["normal", "killed"])
def test_the_lock_ends_with_its_process(end, holder, tmp_path):
    with pytest.raises(UserError, match="another process"), lock_experiment(tmp_path / "out"):
        pass
    if end == "normal":
        (tmp_path / "end").touch()
        assert holder.wait() == 0, holder.stderr
    else:
        holder.kill()
    with lock_experiment(tmp_path / "out"):
        pass
