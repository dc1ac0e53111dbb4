"""Data-parallel training: several processes learn what one does, stay in step, and only the first one writes."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.train.distributed import choose_device, timeout
from headstock.train.run_folder import RunFolder
from tests.commands import set_options
from tests.conftest import TINY
from tests.train.processes import start_ranks

SETTINGS = TINY | {"log_every": 1, "validate_every": 4, "ema": 0.9, "optimizer": "muon", "micro_batch": 2}


def arguments(corpus, out, settings):
    return ["pretrain", corpus, "--out", out, "--device", "cpu", *set_options(settings)]


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """The folder and stdout of a run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    ranks = start_ranks(folder / "rank", 2, *arguments(corpus, folder / "run", SETTINGS), "--json", OMP_NUM_THREADS="1")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert not ranks[1].stdout  # only the first process prints
    return folder / "run", ranks[0].stdout


def test_two_processes_learn_what_one_does(corpus, tmp_path, two):
    out, stdout = two
    headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS, device="cpu")
    rows = {1: RunFolder(tmp_path / "run").read_metrics(), 2: RunFolder(out).read_metrics()}
    for name in ("loss", "valid_loss", "gradient"):
        curves = {n: [row[name] for row in rows[n] if name in row] for n in (1, 2)}
        assert len(curves[1]) == len(curves[2]) > 1
        assert curves[2] == pytest.approx(curves[1], abs=1e-4)
    assert [row["tokens"] for row in rows[1]] == [row["tokens"] for row in rows[2]]
    assert json.loads(stdout)["processes"] == 2
    assert len(rows[2]) == 15  # and only the first one logs


def test_two_processes_resume_together(corpus, tmp_path, two):
    out = tmp_path / "run"
    shutil.copytree(two[0], out)
    before = RunFolder(out).results()
    for path in (out / "checkpoints" / "step-12", out / "results.json", out / "model.safetensors"):
        path.rename(tmp_path / path.name)
    ranks = start_ranks(tmp_path / "rank", 2, *arguments(corpus, out, SETTINGS), "--resume")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert RunFolder(out).results()["valid_loss"] == before["valid_loss"]


def test_two_processes_stop_by_the_same_clock(corpus, tmp_path, tiny):
    del tiny["steps"]
    ranks = start_ranks(tmp_path / "rank", 2, *arguments(corpus, tmp_path / "run", tiny | {"minutes": 0.02}))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert RunFolder(tmp_path / "run").results()["steps"] >= 1


def test_torchrun_starts_the_command():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*torchrun, "-m", "headstock", "pretrain", "--no-such-option", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "exitcode" in done.stderr
    assert "no-such-option" in json.loads(done.stdout)["error"]


def test_unavailable_devices_are_rejected():
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            choose_device("cuda")
    with pytest.raises(UserError, match="auto, cpu, cuda or mps"):
        choose_device("gpu")


def test_timeouts_must_be_positive_numbers(monkeypatch):
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("HEADSTOCK_TIMEOUT", text)
        with pytest.raises(UserError, match="HEADSTOCK_TIMEOUT"):
            timeout()
    monkeypatch.setenv("HEADSTOCK_TIMEOUT", "2.5")
    assert timeout() == 2.5
