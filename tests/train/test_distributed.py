"""Data-parallel training: several processes learn what one does, stay in step, and only the first one writes."""

import json
import os
import shutil
import signal
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
    """The folder and stdout of a run of two processes under torchrun."""
    out = tmp_path_factory.mktemp("two") / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "headstock"]
    # torch's shared store makes restarts with gloo hang at times
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, *arguments(corpus, out, SETTINGS), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert process.returncode == 0, process.stderr[-3000:]
    return out, process.stdout


def test_two_processes_learn_what_one_does(corpus, tmp_path, two):
    out, stdout = two
    headstock.pretrain(corpus, out=tmp_path / "run", settings=SETTINGS, device="cpu")
    rows = {1: RunFolder(tmp_path / "run").read_metrics(), 2: RunFolder(out).read_metrics()}
    for name in ("loss", "valid_loss", "gradient"):
        curves = {n: [row[name] for row in rows[n] if name in row] for n in (1, 2)}
        assert len(curves[1]) == len(curves[2]) > 1
        assert curves[2] == pytest.approx(curves[1], abs=1e-4)
    assert [row["tokens"] for row in rows[1]] == [row["tokens"] for row in rows[2]]
    assert json.loads(stdout)["processes"] == 2  # only the first process prints
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
    assert RunFolder(tmp_path / "run").results()["steps"] > 1


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_does_not_block_the_others(corpus, tmp_path, stopped):
    settings = TINY | {"steps": 100_000, "log_every": 1, "validate_every": 100_000}
    command = arguments(corpus, tmp_path / "run", settings)
    ranks = start_ranks(tmp_path / "rank", 2, *command, HEADSTOCK_TIMEOUT="1.5")
    try:
        ranks[0].wait_until(lambda: "steps" in ranks[0].stderr)  # both are training now
        ranks[stopped].send_signal(signal.SIGSTOP)
        other = ranks[1 - stopped]
        assert other.wait() == 1, other.stderr
        assert f"rank {1 - stopped} of 2" in other.stderr and "HEADSTOCK_TIMEOUT" in other.stderr
        assert "Traceback" not in other.stderr
    finally:
        for rank in ranks:
            rank.kill()


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
