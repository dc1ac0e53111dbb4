"""Interrupted runs resume to bit-identical weights, and damaged checkpoints are skipped."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.train import checkpoint
from headstock.train.run_folder import RunFolder

MODES = {
    "plain": {},
    "averaged": {"ema": 0.9, "dropout": 0.2},
    "muon": {"optimizer": "muon", "schedule": "trapezoid", "micro_batch": 4, "dropout": 0.1, "qk_norm": True},
    "everything": {
        "optimizer": "muon",
        "ema": 0.95,
        "micro_batch": 2,
        "dropout": 0.3,
        "label_smoothing": 0.1,
        "schedule": "linear",
        "weights": "last",
        "tied": False,
        "positions": "sinusoidal",
    },
}


class Stopped(Exception):
    pass


def stop_after(step):
    def on_event(event):
        if event.kind == "step" and event.state.step == step:
            raise Stopped

    return on_event


def metrics(path):
    """The logged rows without timings."""
    timed = ("seconds", "tokens_per_second")
    return [{key: row[key] for key in row if key not in timed} for row in RunFolder(path).read_metrics()]


def weights(path):
    return (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_in_the_same_bits(corpus, tmp_path, tiny, mode):
    settings = tiny | MODES[mode] | {"validate_every": 4, "log_every": 2}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    for step in (7, 10):
        with pytest.raises(Stopped):
            headstock.pretrain(
                corpus, out=tmp_path / "cut", settings=settings, resume=True, callbacks=[stop_after(step)]
            )
    headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


@pytest.mark.parametrize("every", [{"log_every": 5, "validate_every": 6}, {"log_every": 12, "validate_every": 5}])
def test_running_sums_continue_after_a_resume(corpus, tmp_path, tiny, every):
    settings = tiny | every | {"checkpoint_every": 2, "weights": "last"}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    for step in (3, 9):
        with pytest.raises(Stopped):
            headstock.pretrain(
                corpus, out=tmp_path / "cut", settings=settings, resume=True, callbacks=[stop_after(step)]
            )
    headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, resume=True)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    assert len(metrics(tmp_path / "whole")) >= 3


def test_the_newest_and_the_best_checkpoints_are_kept(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"validate_every": 2, "keep": 2})
    steps = [checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path / "run" / "checkpoints")]
    best = headstock.load(tmp_path / "run").run.results()["best_step"]
    assert steps[:2] == [12, 10]
    assert set(steps) == {12, 10, best}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"weights": "last"}, [12, 2]),  # the first save takes long: the next would be due much later
        ({"weights": "last", "checkpoint_every": 4}, [12, 8, 4]),
        ({"weights": "last", "keep_every": 1}, [12, 10, 8, 6, 4, 2]),
    ],
)
def test_slow_saves_are_rare_unless_settings_ask_for_them(corpus, tmp_path, tiny, monkeypatch, settings, expected):
    monkeypatch.setattr(checkpoint, "FAST_SAVE", 0.0)
    monkeypatch.setattr(checkpoint, "MAX_SAVE_SHARE", 1e-6)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"validate_every": 2, "keep": 9} | settings)
    assert [checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path / "run" / "checkpoints")] == expected


def test_the_best_weights_are_saved_however_long_that_takes(corpus, tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(checkpoint, "FAST_SAVE", 0.0)
    monkeypatch.setattr(checkpoint, "MAX_SAVE_SHARE", 1e-6)
    settings = tiny | {"validate_every": 2, "lr": 0.3, "schedule": "constant"}
    headstock.pretrain(corpus, out=tmp_path / "run", settings=settings)
    monkeypatch.undo()
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    assert 2 < RunFolder(tmp_path / "whole").results()["best_step"] < 12  # neither the first save nor the last
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def damage_checkpoint(path):
    """Flip one bit, which safetensors itself does not notice."""
    file = path / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(("every", "kept"), [(None, [4, 5]), (2, [2, 4, 5]), (1, [1, 2, 3, 4, 5]), (3, [3, 4, 5])])
def test_checkpoints_of_every_kth_step_are_kept(tmp_path, every, kept):
    for step in range(1, 6):
        checkpoint.Checkpoint({"w": torch.ones(2)}, {}, {}, {"step": step}).write(tmp_path / f"step-{step}")
        checkpoint.prune(tmp_path, written=step, keep=2, best=None, keep_every=every)
    assert sorted(map(checkpoint.step_of, tmp_path.iterdir())) == kept


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path, keep):
    def save(step):
        saved = checkpoint.Checkpoint({"w": torch.ones(2)}, {"w/m": torch.ones(99)}, {}, {"step": step})
        saved.write(tmp_path / f"step-{step}")
        checkpoint.prune(tmp_path, written=step, keep=keep, best=2)

    for step in (2, 4, 6, 8, 10):
        save(step)
    damage_checkpoint(tmp_path / "step-10")
    save(9)  # the run resumes from 8 and has not reached 10 again
    valid = [
        checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path) if checkpoint.find_damage(path) is None
    ]
    assert valid == {1: [9, 2], 2: [9, 8, 2]}[keep]
    save(10)
    damage_checkpoint(tmp_path / "step-10")
    save(12)
    valid = [
        checkpoint.step_of(path) for path in checkpoint.newest_first(tmp_path) if checkpoint.find_damage(path) is None
    ]
    assert valid == {1: [12, 2], 2: [12, 9, 2]}[keep]


def test_a_damaged_best_checkpoint_does_not_become_the_result(corpus, tmp_path, tiny, messages):
    settings = tiny | {"validate_every": 4, "lr": 2.0, "warmup": 0.9, "schedule": "constant", "steps": 16}
    best = headstock.pretrain(corpus, out=tmp_path / "run", settings=settings)["best_step"]
    assert best < 16  # the rising learning rate makes it worse
    damage_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best}")
    before = weights(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    again = headstock.pretrain(corpus, out=tmp_path / "run", resume=True)
    assert again["best_step"] == 16
    assert any(f"step-{best} is damaged" in line for line in messages)
    assert weights(tmp_path / "run") != before


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_checkpoint_is_skipped(corpus, tmp_path, tiny, damage, messages):
    settings = tiny | {"validate_every": 4}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, callbacks=[stop_after(9)])
    newest = tmp_path / "cut" / "checkpoints" / "step-8"
    file = newest / "optimizer.safetensors"
    if damage == "flip":
        damage_checkpoint(newest)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, resume=True)
    assert any("step-8 is damaged" in line for line in messages)
    assert any(line.endswith("step-4") for line in messages)
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")


def test_a_finished_run_is_not_trained_again(corpus, tmp_path, tiny):
    first = headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny)
    stamp = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    assert headstock.pretrain(corpus, out=tmp_path / "run", resume=True) == first
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == stamp


def test_resuming_with_other_settings_or_text_is_rejected(corpus, tmp_path, tiny):
    own = tmp_path / "own.txt"
    shutil.copy(corpus, own)
    with pytest.raises(Stopped):
        headstock.pretrain(own, out=tmp_path / "run", settings=tiny | {"validate_every": 4}, callbacks=[stop_after(5)])
    with pytest.raises(UserError, match=r"train.lr is 0.002, not 0.5; model.depth is 2, not 3"):
        headstock.pretrain(own, out=tmp_path / "run", settings={"lr": 0.5, "depth": 3}, resume=True)
    own.write_text(own.read_text() + "\n\nOne more story")
    with pytest.raises(UserError, match="the corpus has changed"):
        headstock.pretrain(own, out=tmp_path / "run", resume=True)


def test_a_run_can_be_moved(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "here", settings=tiny)
    before = headstock.load(tmp_path / "here").score("Anne likes Paris.")
    (tmp_path / "there").mkdir()
    os.rename(tmp_path / "here", tmp_path / "there" / "moved")
    assert headstock.load(tmp_path / "there" / "moved").score("Anne likes Paris.") == before


def test_training_time_continues_after_a_resume(corpus, tmp_path, tiny):
    settings = tiny | {"validate_every": 4}
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=settings, callbacks=[stop_after(5)])
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / "progress.json").read_text())["seconds"]
    began = time.monotonic()
    results = headstock.pretrain(corpus, out=tmp_path / "run", resume=True)
    assert saved < results["seconds"] < saved + time.monotonic() - began


def test_damaged_metrics_do_not_prevent_a_resume(corpus, tmp_path, tiny, messages):
    settings = tiny | {"validate_every": 4, "log_every": 1}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=settings, callbacks=[stop_after(7)])
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:9] + b"\xff" + lines[1][10:]
    lines[2] = b"[1, 2]\n"
    file.write_bytes(b"".join(lines) + b'{"step": 7, "lo')  # an incomplete last line
    headstock.pretrain(corpus, out=tmp_path / "run", resume=True)
    assert len([line for line in messages if f"{file}: 2 damaged lines" in line]) == 1
    whole = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "run") == [whole[0], *whole[3:]]


def test_the_corpus_may_be_renamed_or_moved_before_a_resume(corpus, tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(corpus, "c.txt")
    settings = tiny | {"validate_every": 4}
    with pytest.raises(Stopped):
        headstock.pretrain("c.txt", out="run", settings=settings, callbacks=[stop_after(5)])
    with pytest.raises(Stopped):
        headstock.pretrain("./c.txt", out="run", resume=True, callbacks=[stop_after(6)])
    os.mkdir("moved")
    os.rename("c.txt", "moved/d.txt")
    headstock.pretrain("moved/d.txt", out="run", resume=True)
    assert RunFolder(tmp_path / "run").config()["data"]["corpus"] == ["moved/d.txt"]
    assert headstock.load("run").evaluate()["documents"] > 0  # the held-out part is read from there too
    (tmp_path / "other.txt").write_text(corpus.read_text() + "\n\nAnother story")
    with pytest.raises(UserError, match="the corpus has changed"):
        headstock.pretrain("other.txt", out="run", resume=True)


def test_another_number_of_threads_is_logged_at_a_resume(corpus, tmp_path, tiny, messages):
    settings = tiny | {"validate_every": 4}
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=settings, callbacks=[stop_after(5)])
    with pytest.raises(Stopped):
        headstock.pretrain(corpus, out=tmp_path / "run", resume=True, callbacks=[stop_after(6)])
    assert not [line for line in messages if "->" in line]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        headstock.pretrain(corpus, out=tmp_path / "run", resume=True)
    finally:
        torch.set_num_threads(threads)
    assert [line for line in messages if f"threads {threads} -> {threads + 1}" in line]


OLD = Path(__file__).parent / "old_runs"  # of version 0.1, without manifests of finished weights


def test_runs_of_an_earlier_version_are_read_and_resumed(tmp_path, monkeypatch):
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    assert headstock.load("finished").score("Anne likes tea.")[0].log_likelihood < 0
    assert headstock.load("finished").evaluate()["loss"] == pytest.approx(
        RunFolder(Path("finished")).results()["valid_loss"]
    )
    results = headstock.pretrain(out="interrupted", resume=True, device="cpu")
    assert results["steps"] == 8
    assert results["valid_loss"] == pytest.approx(RunFolder(Path("finished")).results()["valid_loss"], rel=1e-4)
    assert headstock.load("interrupted").score("Anne likes tea.")
