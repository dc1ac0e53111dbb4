"""Faults 1 and 2: kill -9 at random moments, inside saves, and after each of their system calls."""

import json
import random
import re
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headstock
from headstock.errors import UserError
from headstock.train import checkpoint, checkpoint_files
from tests.faults import system_calls
from tests.faults.harness import EVERY_STATE, SAVES, amount, leftovers, outcome, pretrain_and_sync
from tests.train.processes import BackgroundProcess

LONGER = EVERY_STATE | {"steps": amount(16, 30), "validate_every": 10, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """The outcome of a run without interruptions, by its settings."""
    outcomes: dict[str, Any] = {}

    def of(settings: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(settings)
        if key not in outcomes:
            out = tmp_path_factory.mktemp("uninterrupted") / "run"
            headstock.pretrain(corpus, out=out, settings=settings)
            outcomes[key] = outcome(out)
        return outcomes[key]

    return of


@pytest.mark.parametrize("save", SAVES)
def test_fault_01_kill_9_at_random_moments(corpus, tmp_path, uninterrupted, record, save):
    settings, pick = LONGER | SAVES[save], random.Random(10)
    kills, unfinished = 0, 0
    BackgroundProcess(tmp_path / "process", print).wait()  # until the server of forks has imported torch
    began = time.monotonic()
    process = BackgroundProcess(tmp_path / "process", pretrain_and_sync, corpus, tmp_path / "whole", settings)
    assert process.wait() == 0, process.stderr
    duration = time.monotonic() - began
    while kills < amount(1, 50) or (not unfinished and kills < 10):  # one after the end of a run proves nothing
        out = tmp_path / f"run-{kills}"
        process = BackgroundProcess(tmp_path / "process", pretrain_and_sync, corpus, out, settings)
        time.sleep(pick.uniform(0, duration))
        process.kill()
        kills += 1
        unfinished += not (out / "results.json").exists()
        headstock.pretrain(corpus, out=out, settings=settings, resume=True)
        assert outcome(out) == uninterrupted(settings)
        assert leftovers(tmp_path) == []
        shutil.rmtree(out)
    assert unfinished
    record(1, f"at random moments, {save} save", kills=kills, before_the_end=unfinished, bit_identical_resumes=kills)


@pytest.mark.parametrize("save", SAVES)
def test_fault_01_kill_9_inside_saves(corpus, tmp_path, uninterrupted, record, save):
    """The process is killed up to 10 ms after a checkpoint's temporary folder appears."""
    settings, pick = LONGER | SAVES[save], random.Random(2)
    kills, inside = 0, 0
    while kills < amount(1, 50) or (not inside and kills < 10):  # one that comes too late proves nothing
        out = tmp_path / f"run-{kills}"
        process = BackgroundProcess(tmp_path / "process", pretrain_and_sync, corpus, out, settings)
        step = pick.randrange(2, LONGER["steps"], 2)
        process.wait_until(lambda out=out, step=step: list(out.glob(f"checkpoints/.step-{step}.*")))
        time.sleep(pick.uniform(0, 0.01))
        process.kill()
        kills += 1
        inside += bool(list(out.glob("checkpoints/.step-*.partial")))
        headstock.pretrain(corpus, out=out, settings=settings, resume=True)
        assert outcome(out) == uninterrupted(settings)
        assert leftovers(tmp_path) == []
        shutil.rmtree(out)
    assert inside
    record(1, f"aimed at saves, {save} save", kills=kills, hit_a_save=inside, bit_identical_resumes=kills)


# Every system call


def traced(corpus: Path, folder: Path, settings: dict[str, Any], kills: list[int]) -> None:
    """List the changes to files from the second save to the end of a run, and kill one run after each of `kills`."""
    calls = system_calls.trace(
        lambda: pretrain_and_sync(corpus, folder / "all", settings), folder / "all", since=".step-6."
    )
    (folder / "calls.json").write_text(json.dumps(calls))
    for number in kills or range(1, len(calls) + 1):
        kill_after(number, corpus, folder / f"run-{number}", settings)


def kill_after(number: int, corpus: Path, out: Path, settings: dict[str, Any], atomic: bool = True) -> None:
    """Kill a run after this many changes to files, counted from the second save on."""
    if not atomic:
        checkpoint_files.atomic_folder = in_place
    system_calls.trace(lambda: pretrain_and_sync(corpus, out, settings), out, kill_after=number, since="step-6")


@contextmanager
def in_place(path: Path):
    path.mkdir(parents=True)
    yield path


@pytest.mark.skipif(not system_calls.AVAILABLE, reason="system calls are traced on Linux only")
@pytest.mark.parametrize("save", SAVES)
def test_fault_02_kill_9_after_each_system_call_of_a_save(corpus, tmp_path, uninterrupted, record, save):
    settings = EVERY_STATE | SAVES[save]
    kills = random.Random(3).sample(range(1, 100), amount(2, 0))  # all of them at full size
    process = BackgroundProcess(tmp_path / "process", traced, corpus, tmp_path, settings, kills)
    assert process.wait(1200) == 0, process.stderr
    calls = json.loads((tmp_path / "calls.json").read_text())
    names = {re.sub("at2?$", "", call.split()[0]) for call in calls}  # some machines have renameat alone
    assert {"write", "fsync", "rename", "mkdir", "unlink"} <= names
    assert unflushed(calls, tmp_path / "all") == []  # so that it holds after a power failure, too
    runs = sorted(tmp_path.glob("run-*"))
    assert len(runs) == len(kills or calls)
    for out in runs:
        newest = checkpoint.newest_valid(out / "checkpoints")
        assert newest is not None and checkpoint.step_of(newest) >= 3, calls[int(out.name[4:]) - 1]
        headstock.pretrain(corpus, out=out, settings=settings, resume=True)
        assert outcome(out) == uninterrupted(settings), calls[int(out.name[4:]) - 1]
    assert leftovers(tmp_path) == []
    figures = {"system_calls": len(calls), "kills": len(runs), "valid_checkpoints": len(runs)}
    record(
        2, f"after each call of two saves and the end of a run, {save} save", **figures, bit_identical_resumes=len(runs)
    )


def unflushed(calls: list[str], run: Path) -> list[str]:
    """The files of the last checkpoint that no fsync followed before its folder was renamed; `calls` of `traced`."""
    (rename,) = [i for i, call in enumerate(calls) if re.fullmatch(r"rename\w* checkpoints/\.step-9\.[^/]*", call)]
    flushed = {call.rpartition("/")[2] for call in calls[:rename] if call.startswith("fsync checkpoints/.step-9.")}
    missing = [file.name for file in (run / "checkpoints" / "step-9").iterdir() if file.name not in flushed]
    return missing + ([] if "fsync checkpoints" in calls[rename:] else ["the renamed folder"])


def trace_without_fsync(corpus: Path, folder: Path) -> None:
    def pretrain() -> None:
        headstock.pretrain(corpus, out=folder / "all", settings=EVERY_STATE)

    (folder / "calls.json").write_text(json.dumps(system_calls.trace(pretrain, folder / "all")))


@pytest.mark.skipif(not system_calls.AVAILABLE, reason="system calls are traced on Linux only")
def test_fault_02_control_unflushed_files_are_noticed(corpus, tmp_path):
    """Tests skip fsync; with it, after a power failure, too, a checkpoint is either whole or absent."""
    process = BackgroundProcess(tmp_path / "process", trace_without_fsync, corpus, tmp_path)
    assert process.wait() == 0, process.stderr
    missing = unflushed(json.loads((tmp_path / "calls.json").read_text()), tmp_path / "all")
    assert len(missing) == 6


@pytest.mark.skipif(not system_calls.AVAILABLE, reason="system calls are traced on Linux only")
def test_fault_02_control_a_save_in_place_loses_the_run(corpus, tmp_path, monkeypatch):
    """Without temporary names and the manifest's check, a run killed in the middle of a save cannot be resumed."""
    process = BackgroundProcess(tmp_path / "process", kill_after, 4, corpus, tmp_path / "run", EVERY_STATE, False)
    assert process.wait() == 0, process.stderr
    monkeypatch.setattr(checkpoint, "find_damage", lambda folder: None)
    with pytest.raises(UserError, match=r"progress\.json"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=EVERY_STATE, resume=True)
