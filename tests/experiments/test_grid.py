"""The experiment grid: several processes share the trials, each trial runs once, and all get every result."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from headstock.experiments.grid import claim_path, exclusive, run_grid
from headstock.io import try_lock
from headstock.logs import messages_to
from tests.experiments.small import SETTINGS
from tests.experiments.test_sweep import BASE

HOLDER = """
import sys
from pathlib import Path
from headstock.io import try_lock
with try_lock(Path(sys.argv[1])) as is_ours:
    print(is_ours, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class NamedTrial:
    name: str

    @property
    def label(self) -> str:
        return self.name


def run_names(folder, names, order):
    """Run a grid whose trials record when they ran."""

    def run(trial):
        order.append(trial.name)
        return {"seconds": 0.0, "name": trial.name.upper()}, True

    return run_grid(folder, [NamedTrial(name) for name in names], run, format_score=lambda result: result["name"])


@pytest.fixture
def holder(tmp_path):
    """Another process that is running trial `b`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, claim_path(tmp_path, "b")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("end", ["normal", "killed"])
def test_a_trial_of_another_process_comes_last(tmp_path, holder, end):
    order, waits = [], []
    with try_lock(claim_path(tmp_path, "b")) as is_ours:
        assert not is_ours

    def on_message(line):
        if line.startswith("waiting"):
            waits.append(line)
            holder.communicate() if end == "normal" else holder.send_signal(signal.SIGKILL)

    with messages_to(on_message):
        results = run_names(tmp_path, ["a", "b", "c"], order)
    assert order == ["a", "c", "b"]
    assert [result["name"] for result in results] == ["A", "B", "C"]
    assert waits == ["waiting for 1 trials that other processes are running"]


def test_a_single_process_never_waits(tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    order = []
    run_names(tmp_path, ["3", "1", "2"], order)
    assert order == ["3", "1", "2"]
    with exclusive(tmp_path, "best"), try_lock(claim_path(tmp_path, "best")) as is_ours:
        assert not is_ours
    with try_lock(claim_path(tmp_path, "best")) as is_ours:
        assert is_ours
    assert not any("waiting" in line for line in caplog.messages)


def run_twice(*command):
    """The stderr of two processes of one command, both of which must succeed."""
    arguments = [sys.executable, "-m", "headstock", *command]
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


def trials_run(output):
    """The trials that a process ran itself, without their number and time."""
    lines = [line for line in output.splitlines() if re.match(r" *\d+/\d+ ", line) and line.endswith(" s")]
    return [re.split(r"/\d+ +", line, maxsplit=1)[1].rsplit(maxsplit=2)[0] for line in lines]


def test_two_comparisons_share_the_trials(stock, files, tmp_path):
    out, options = tmp_path / "out", [f"--{name}={path}" for name, path in files.items()]
    options += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    first, second = map(
        trials_run, run_twice("compare", str(stock), *options, "--labels=8", "--seeds=2", f"--out={out}")
    )
    assert len(first) + len(second) == 8 and not set(first) & set(second)
    assert not list(out.rglob("*.partial"))


def test_two_sweeps_share_the_trials(corpus, tmp_path):
    out, options = tmp_path / "out", [f"--set={name}={str(value).lower()}" for name, value in BASE.items()]
    first, second = map(
        trials_run,
        run_twice(
            "sweep", str(corpus), *options, "--grid=depth=1,2", "--grid=lr=1e-3,3e-2", "--seeds=1", f"--out={out}"
        ),
    )
    assert len(first) + len(second) == 4 and not set(first) & set(second)
    assert len(list((out / "runs").iterdir())) == 1  # only the best is kept
    assert (out / "results.json").exists()
