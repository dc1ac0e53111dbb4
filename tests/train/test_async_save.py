"""Asynchronous saves: training continues meanwhile, and what is written is the state of the step that was saved."""

import errno
import os
import signal
import threading

import pytest

import headstock
from headstock.errors import WorkError
from headstock.io import sha256
from headstock.train import checkpoint, checkpoint_files
from headstock.train.checkpoint import newest_valid, step_of
from headstock.train.distributed import Interrupted
from tests.conftest import TINY
from tests.train.processes import BackgroundProcess

SETTINGS = TINY | {"validate_every": 3, "keep_every": 1, "ema": 0.9, "optimizer": "muon", "weights": "last"}
ASYNC = SETTINGS | {"async_save": True}


def pretrain(corpus, out, settings, **options):
    return headstock.pretrain(corpus, out=out, settings=settings, device="cpu", **options)


def hashes(run):
    """Those of the tensors in all checkpoints, and of the final weights."""
    files = [*run.glob("checkpoints/step-*/*.safetensors"), run / "model.safetensors"]
    return {str(file.relative_to(run)): sha256(file) for file in files}


@pytest.fixture(scope="module")
def synchronous(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("synchronous") / "run"
    pretrain(corpus, out, SETTINGS)
    return out


@pytest.fixture
def blocked(monkeypatch):
    """The first save does not go on until the event is set."""
    event, write = threading.Event(), checkpoint_files.write_tensors

    def write_later(path, tensors):
        if ".step-3." in str(path):
            assert event.wait(60), "nobody trained on while the checkpoint was written"
        write(path, tensors)

    monkeypatch.setattr(checkpoint_files, "write_tensors", write_later)
    return event


def set_at(step, event):
    return lambda happened: event.set() if happened.kind == "step" and happened.state.step == step else None


def test_training_continues_and_the_saved_step_is_written(corpus, tmp_path, synchronous, blocked):
    pretrain(corpus, tmp_path / "run", ASYNC, callbacks=[set_at(5, blocked)])
    assert len(hashes(tmp_path / "run")) == 13  # three files of four checkpoints, and the final weights
    assert hashes(tmp_path / "run") == hashes(synchronous)


def test_without_a_copy_a_later_step_would_be_written(corpus, tmp_path, synchronous, blocked, monkeypatch):
    monkeypatch.setattr(checkpoint, "copy_to_host", lambda tensors, buffers: tensors)
    pretrain(corpus, tmp_path / "run", ASYNC, callbacks=[set_at(5, blocked)])
    own, expected = hashes(tmp_path / "run"), hashes(synchronous)
    assert own["model.safetensors"] == expected["model.safetensors"]
    assert own["checkpoints/step-3/model.safetensors"] != expected["checkpoints/step-3/model.safetensors"]


def test_an_error_is_raised_after_the_next_step(corpus, tmp_path, monkeypatch):
    write = checkpoint_files.write_tensors

    def fail(path, tensors):
        if ".step-6." in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors)

    monkeypatch.setattr(checkpoint_files, "write_tensors", fail)
    steps = []
    with pytest.raises(WorkError, match=r"step 6: .*No space left.*step-3"):
        pretrain(corpus, tmp_path / "run", ASYNC, callbacks=[lambda event: steps.append(event.state.step)])
    assert steps[-1] < 12  # not only at the end


def test_a_signal_waits_for_the_save(corpus, tmp_path, monkeypatch):
    writing, write = threading.Event(), checkpoint_files.write_checkpoint

    def write_later(*arguments):
        writing.set()
        threading.Event().wait(0.2)  # long enough to leave before it is written, if nobody waited
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write_later)

    def interrupt(event):
        if event.kind == "step" and event.state.step == 4:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="step-4"):
        pretrain(corpus, tmp_path / "run", ASYNC, callbacks=[interrupt])
    assert writing.is_set()
    newest = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None and step_of(newest) == 4


def pretrain_until_killed(corpus, out):
    """Pretrain in a process that is killed when its second checkpoint is half written."""
    write = checkpoint_files.write_tensors

    def write_or_die(path, tensors):
        write(path, tensors)
        if ".step-6." in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_files.write_tensors = write_or_die
    pretrain(corpus, out, ASYNC)


def test_kill_9_during_a_save_leaves_the_checkpoint_before_it(corpus, tmp_path, synchronous):
    out = tmp_path / "run"
    process = BackgroundProcess(tmp_path / "process", pretrain_until_killed, corpus, out)
    assert process.wait() == -signal.SIGKILL, process.stderr
    newest = newest_valid(out / "checkpoints")
    assert newest is not None and step_of(newest) == 3 and list(out.rglob(".step-6.*"))
    pretrain(corpus, out, ASYNC, resume=True)
    assert hashes(out) == hashes(synchronous)
