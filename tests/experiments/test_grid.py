"""The experiment grid: several processes share the trials, each trial runs once, and all get every result."""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from headstock.experiments.grid import Outcome, claim_path, exclusive, run_grid
from headstock.io import try_lock
from headstock.logs import messages_to
from tests.commands import command, set_options
from tests.experiments.process_patches import skip_report
from tests.experiments.small import SETTINGS
from tests.experiments.test_sweep import BASE

HOLDER = """
import sys
from pathlib import Path
from headstock.io import try_lock
with try_lock(Path(sys.argv[1])) as acquired:
    print(acquired, flush=True)
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
        return Outcome({"seconds": 0.0, "name": trial.name.upper()}, is_new=True)

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
    order, messages = [], []
    with try_lock(claim_path(tmp_path, "b")) as acquired:
        assert not acquired

    def on_message(line):
        if line.startswith("waiting"):
            messages.append(line)
            holder.communicate() if end == "normal" else holder.send_signal(signal.SIGKILL)

    with messages_to(on_message):
        results = run_names(tmp_path, ["a", "b", "c"], order)
    assert order == ["a", "c", "b"]
    assert [result["name"] for result in results] == ["A", "B", "C"]
    assert len(messages) == 1 and "waiting for 1 " in messages[0]


def test_a_single_process_never_waits(tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    order = []
    run_names(tmp_path, ["3", "1", "2"], order)
    assert order == ["3", "1", "2"]
    with exclusive(tmp_path, "best"), try_lock(claim_path(tmp_path, "best")) as acquired:
        assert not acquired
    with try_lock(claim_path(tmp_path, "best")) as acquired:
        assert acquired
    assert not any("waiting" in line for line in caplog.messages)


def run_twice(*words):
    """The trials that each of two processes of one command ran itself; both must succeed."""
    with ThreadPoolExecutor() as threads:
        outcomes = [threads.submit(command, *words, patch=skip_report) for _ in range(2)]
    codes, _, errors = zip(*(outcome.result() for outcome in outcomes), strict=True)
    assert codes == (0, 0), errors
    return map(trials_run, errors)


def trials_run(err):
    """The labels of the trials that were not cached, from progress lines such as `1/4  LABEL  SCORE  1.2 s`."""
    lines = [line for line in err.splitlines() if re.match(r" *\d+/\d+ ", line) and line.endswith(" s")]
    return [re.split(r"/\d+ +", line, maxsplit=1)[1].rsplit(maxsplit=2)[0] for line in lines]


def test_two_comparisons_share_the_trials(stock, files, tmp_path):
    out = tmp_path / "out"
    options = [f"--{name}={path}" for name, path in files.items()] + set_options(SETTINGS)
    options += ["--arms=scratch,frozen", "--labels=8", "--seeds=3", "--leakage=skip", f"--out={out}"]
    first, second = run_twice("compare", stock, *options)
    assert len(first) + len(second) == 6 and not set(first) & set(second)
    assert not list(out.rglob("*.partial"))


def test_two_sweeps_share_the_trials(corpus, tmp_path):
    out, grid = tmp_path / "out", ["--grid=depth=1,2", "--grid=lr=1e-3,3e-2", "--seeds=1"]
    first, second = run_twice("sweep", corpus, *set_options(BASE), *grid, f"--out={out}")
    assert len(first) + len(second) == 4 and not set(first) & set(second)
    assert len(list((out / "runs").iterdir())) == 1  # only the best is kept
    assert (out / "results.json").exists()
