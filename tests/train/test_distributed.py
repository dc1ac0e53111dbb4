"""Several real processes under torchrun: the same curve, the same order, one writer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from headstock.errors import UserError
from headstock.train.distributed import choose_device, timeout
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY


def launch(processes: int, corpus, out, settings, *more: str):
    options = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    start = [sys.executable, "-m", "headstock"]
    if processes > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        start += ["-m", "headstock"]
    # torch's shared store makes restarts with gloo hang at times
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*start, "pretrain", str(corpus), "--out", str(out), "--device", "cpu", "--json", *options, *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


SETTINGS = TINY | {"log_every": 1, "validate_every": 4, "ema": 0.9, "optimizer": "muon", "micro_batch": 2}


@pytest.fixture(scope="module")
def two(corpus, tmp_path_factory):
    """A run of two processes, and what they said."""
    out = tmp_path_factory.mktemp("two") / "run"
    return out, launch(2, corpus, out, SETTINGS)


def test_two_processes_learn_what_one_does(corpus, tmp_path, two):
    out, done = two
    launch(1, corpus, tmp_path / "run", SETTINGS)
    rows = {1: RunFolder(tmp_path / "run").read_metrics(), 2: RunFolder(out).read_metrics()}
    for name in ("loss", "valid_loss", "gradient"):
        curves = {n: [row[name] for row in rows[n] if name in row] for n in (1, 2)}
        assert len(curves[1]) == len(curves[2]) > 1
        assert curves[2] == pytest.approx(curves[1], abs=1e-4)
    assert [row["tokens"] for row in rows[1]] == [row["tokens"] for row in rows[2]]
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1  # one process speaks
    assert json.loads(lines[0])["processes"] == 2
    assert len(rows[2]) == 15  # and one writes


def test_two_processes_go_on_together(corpus, tmp_path, two):
    out = tmp_path / "run"
    shutil.copytree(two[0], out)
    before = RunFolder(out).results()
    for late in (out / "checkpoints" / "step-12", out / "results.json", out / "model.safetensors"):
        late.rename(tmp_path / late.name)
    launch(2, corpus, out, SETTINGS, "--resume")
    assert RunFolder(out).results()["valid_loss"] == before["valid_loss"]


def test_two_processes_stop_by_the_same_clock(corpus, tmp_path, tiny):
    del tiny["steps"]
    done = launch(2, corpus, tmp_path / "run", tiny | {"minutes": 0.05})
    assert json.loads(done.stdout)["steps"] > 1


def test_a_device_that_is_not_there_is_refused():
    import torch

    from headstock.errors import UserError

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            choose_device("cuda")
    with pytest.raises(UserError, match="must be auto, cpu, cuda or mps"):
        choose_device("gpu")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_does_not_keep_the_others_waiting(corpus, tmp_path, stopped):
    out, settings = tmp_path / "run", TINY | {"steps": 100_000, "log_every": 1, "validate_every": 100_000}
    options = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "headstock",
        "pretrain",
        str(corpus),
        "--out",
        str(out),
        "--device",
        "cpu",
        *options,
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    environment = os.environ | meeting | {"OMP_NUM_THREADS": "1", "HEADSTOCK_TIMEOUT": "2"}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(2)
    ]
    try:
        assert ranks[0].stderr is not None
        seen = next(line for line in ranks[0].stderr if "steps" in line)  # both are training now
        ranks[stopped].send_signal(signal.SIGSTOP)
        _, rest = ranks[1 - stopped].communicate(timeout=120)
        assert ranks[1 - stopped].returncode == 1, seen + rest
        assert f"rank {1 - stopped} of 2" in rest and "HEADSTOCK_TIMEOUT" in rest and "Traceback" not in rest
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_timeout_that_is_no_number_is_refused(monkeypatch):
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("HEADSTOCK_TIMEOUT", text)
        with pytest.raises(UserError, match="HEADSTOCK_TIMEOUT"):
            timeout()
    monkeypatch.setenv("HEADSTOCK_TIMEOUT", "2.5")
    assert timeout() == 2.5
