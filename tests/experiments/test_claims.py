"""The same command started several times at once: every piece is made by one process, and all have everything."""

import re
import signal
import subprocess
import sys

import pytest

from headstock.experiments.claims import alone, claim, share
from headstock.io import try_lock
from tests.experiments.small import SETTINGS
from tests.experiments.test_sweep import BASE

HOLDER = """
import sys
from pathlib import Path
from headstock.io import try_lock
with try_lock(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """Another process that is at work on `b`."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, claim(tmp_path, "b")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "True\n"
    yield other
    other.kill()
    other.communicate()


@pytest.mark.parametrize("ends", ["well", "killed"])
def test_what_another_is_at_work_on_comes_last(tmp_path, held, ends):
    said, order = [], []
    with try_lock(claim(tmp_path, "b")) as mine:
        assert not mine

    def say(line):
        said.append(line)
        held.communicate() if ends == "well" else held.send_signal(signal.SIGKILL)

    for place, made in share(tmp_path, ["a", "b", "c"], str, str.upper, say):
        order.append((place, made))
    assert order == [(0, "A"), (2, "C"), (1, "B")]
    assert said == ["waiting for other processes, which are at work on 1 more"]


def test_nobody_waits_where_nobody_else_is(tmp_path):
    said = []
    assert [made for _, made in share(tmp_path, [3, 1, 2], str, lambda n: n * n, said.append)] == [9, 1, 4]
    with alone(tmp_path, "best"), try_lock(claim(tmp_path, "best")) as mine:
        assert not mine
    with try_lock(claim(tmp_path, "best")) as mine:
        assert mine
    assert said == []


def twice(*command):
    """What two processes of one command said, which both must have ended well."""
    whole = [sys.executable, "-m", "headstock", *command]
    both = [subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    return said


def made_by(said):
    """The cells that a process made itself, without their places in the row and their times."""
    lines = [line for line in said.splitlines() if re.match(r" *\d+/\d+ ", line) and line.endswith(" s")]
    return [re.split(r"/\d+ +", line, maxsplit=1)[1].rsplit(maxsplit=2)[0] for line in lines]


def test_two_comparisons_share_the_cells(stock, files, tmp_path):
    out, options = tmp_path / "out", [f"--{name}={path}" for name, path in files.items()]
    options += [f"--set={name}={value}" for name, value in SETTINGS.items()]
    first, second = map(made_by, twice("compare", str(stock), *options, "--labels=8", "--seeds=2", f"--out={out}"))
    assert len(first) + len(second) == 8 and not set(first) & set(second)
    assert not list(out.rglob("*.partial"))


def test_two_sweeps_share_the_trainings(corpus, tmp_path):
    out, options = tmp_path / "out", [f"--set={name}={str(value).lower()}" for name, value in BASE.items()]
    first, second = map(
        made_by,
        twice("sweep", str(corpus), *options, "--grid=depth=1,2", "--grid=lr=1e-3,3e-2", "--seeds=1", f"--out={out}"),
    )
    assert len(first) + len(second) == 4 and not set(first) & set(second)
    assert len(list((out / "runs").iterdir())) == 1  # of the best
    assert (out / "results.json").exists()
