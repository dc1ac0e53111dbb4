"""Faults 8, 9 and 20: flipped bits, truncated files, and which checkpoints are kept."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import headstock
from headstock.train import checkpoint, tensors
from headstock.train.checkpoint import Checkpoint, newest_first, prune, step_of
from headstock.train.tensors import find_damage, read_tensors
from tests.faults.harness import EVERY_STATE, SAVES, amount, is_full, outcome

STEP = 6  # of the newest checkpoint, which is damaged; the one before it is of step 3


@dataclass
class Saved:
    how: str
    run: Path  # interrupted after its second checkpoint
    expected: dict[str, Any]  # its outcome without the interruption


@pytest.fixture(scope="module", params=SAVES if is_full() else ["synchronous"])
def saved(request, corpus, tmp_path_factory) -> Saved:
    out, settings = tmp_path_factory.mktemp("damage") / "run", EVERY_STATE | {"keep": 9} | SAVES[request.param]
    headstock.pretrain(corpus, out=out, settings=settings)
    expected = outcome(out)
    shutil.rmtree(out / "checkpoints" / "step-9")
    for name in ("model.safetensors", "results.json", "README.md"):
        (out / name).unlink()
    return Saved(request.param, out, expected)


def flip(data: bytes, pick: random.Random) -> bytes:
    bit = pick.randrange(8 * len(data))
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def cut(data: bytes, pick: random.Random) -> bytes:
    return data[: pick.randrange(len(data))]


Damage = Callable[[bytes, random.Random], bytes]


def check_damage(corpus: Path, saved: Saved, folder: Path, messages: list[str], damage: Damage, count: int):
    """Every damage is detected, and a damaged run resumes from the checkpoint before to the same bits."""
    run, newest = shutil.copytree(saved.run, folder / "run"), Path("checkpoints") / f"step-{STEP}"
    files = sorted(path.relative_to(run) for path in (run / newest).rglob("*") if path.is_file())
    pick = random.Random(7)
    for number in range(count):
        file = run / files[number % len(files)]  # small files as often as large ones
        data = file.read_bytes()
        file.write_bytes(damage(data, pick))
        assert find_damage(run / newest) is not None, file
        file.write_bytes(data)
    assert find_damage(run / newest) is None
    resumes = amount(len(files), 4 * len(files))
    for number in range(resumes):
        out = shutil.copytree(saved.run, folder / f"run-{number}")
        file = out / files[number % len(files)]
        file.write_bytes(damage(file.read_bytes(), pick))
        headstock.pretrain(corpus, out=out, resume=True)
        assert outcome(out) == saved.expected
    assert sum(f"step-{STEP} is damaged" in line for line in messages) == resumes
    assert sum("resuming from" in line and line.endswith("step-3") for line in messages) == resumes
    return {"detected": count, "resumes_from_the_previous_checkpoint": resumes}


def test_fault_08_flipped_bits(corpus, saved, tmp_path, record, messages):
    figures = check_damage(corpus, saved, tmp_path, messages, flip, flips := amount(60, 1000))
    record(8, f"{saved.how} save", flips=flips, **figures)


def test_fault_09_truncation(corpus, saved, tmp_path, record, messages):
    figures = check_damage(corpus, saved, tmp_path, messages, cut, cuts := amount(20, 200))
    record(9, f"{saved.how} save", truncations=cuts, **figures)


def test_fault_08_control_the_library_does_not_notice_flipped_bits(saved, tmp_path):
    """The manifest is what detects them: safetensors reads other weights without an error."""
    source, file = saved.run / "checkpoints" / f"step-{STEP}" / "model.safetensors", tmp_path / "model.safetensors"
    data = source.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")  # of the values
    file.write_bytes(data[:begin] + flip(data[begin:], random.Random(9)))
    before, after = read_tensors(source), read_tensors(file)
    assert any(not torch.equal(before[name], after[name]) for name in before)


# Retention


def save(folder: Path, step: int, *, keep: int, best: int | None, keep_every: int | None) -> None:
    Checkpoint({"w": torch.ones(2)}, {"w/m": torch.ones(9)}, {}, {"step": step}).write(folder / f"step-{step}")
    prune(folder, written=step, keep=keep, best=best, keep_every=keep_every)


def damage_one(folder: Path, pick: random.Random) -> None:
    """Cut a file of a checkpoint, or change one of its bits."""
    file = pick.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    file.write_bytes(pick.choice((flip, cut))(file.read_bytes(), pick))


def random_history(folder: Path, pick: random.Random) -> tuple[int, int]:
    """Saves, damages, interruptions and new bests in random order; the number of saves, and of losses.

    A loss is a save after which fewer valid checkpoints exist than before it, and fewer than should be kept.
    """
    keep, keep_every = pick.randint(1, 4), pick.choice((None, None, 2, 3))
    step, best, saves, losses = 0, None, 0, 0
    for _ in range(pick.randint(4, 12)):
        valid = [step_of(path) for path in newest_first(folder) if find_damage(path) is None]
        action = pick.random()
        if action < 0.25 and (paths := newest_first(folder)):
            damage_one(pick.choice(paths), pick)
        elif action < 0.4:  # a resume: from the newest valid checkpoint
            step = max(valid, default=0)
        else:
            step += pick.randint(1, 2)
            best = step if pick.random() < 0.3 else best
            save(folder, step, keep=keep, best=best, keep_every=keep_every)
            saves += 1
            after = [step_of(path) for path in newest_first(folder) if find_damage(path) is None]
            earlier = [s for s in valid if s < step]
            expected = {step, *sorted(earlier)[len(earlier) - keep + 1 :]} | ({best} & {*earlier, step})
            expected |= {s for s in earlier if keep_every and s % keep_every == 0}
            losses += not expected <= set(after)
    return saves, losses


def test_fault_20_retention_never_deletes_the_only_valid_checkpoint(tmp_path, record):
    histories, saves = amount(40, 1000), 0
    for number in range(histories):
        made, losses = random_history(tmp_path / str(number), random.Random(number))
        assert losses == 0, number
        saves += made
    record(20, "random histories", histories=histories, saves=saves, valid_checkpoints_lost=0)


def test_fault_20_control_retention_that_counts_damaged_checkpoints_loses_some(tmp_path, monkeypatch):
    """With a check that finds no damage, damaged checkpoints take the places of valid ones."""
    monkeypatch.setattr(checkpoint, "find_damage", lambda folder: None)
    losses = [random_history(tmp_path / str(number), random.Random(number))[1] for number in range(40)]
    assert tensors.find_damage is find_damage and sum(losses) > 0
