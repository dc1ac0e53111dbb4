"""Fault 19: one process at a time trains in a run folder, and one that was killed does not block the next."""

import shutil
import signal
import subprocess
import sys

import filelock
import pytest

import headstock
from headstock.errors import UserError
from headstock.logs import messages_to
from headstock.train.finetune import finetune
from tests.commands import set_options
from tests.faults.harness import SMALL, amount, leftovers, outcome, pretrain_and_sync
from tests.train.processes import BackgroundProcess, start_command

BUSY = "another process is using this folder"
ENDLESS = SMALL | {"steps": 10**6, "validate_every": 10**6, "checkpoint_every": 2}
HOLDER = """
import sys
from pathlib import Path
from headstock.io import lock_folder
with lock_folder(Path(sys.argv[1])) as acquired:
    print(acquired, flush=True)
    sys.stdin.read()
"""


def test_fault_19_a_locked_folder_is_refused_until_its_process_dies(corpus, stock, files, tmp_path):
    """Also under another name, by every command that trains, with every option."""
    run, link = shutil.copytree(stock, tmp_path / "run"), tmp_path / "link"
    link.symlink_to(run)
    other = subprocess.Popen([sys.executable, "-c", HOLDER, link], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"True\n"
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(UserError, match=BUSY):
            headstock.pretrain(corpus, out=run, **options)
        with pytest.raises(UserError, match=BUSY):
            finetune(preset="gpt-nano", train=files["train"], out=run, **options)
    other.kill()
    other.communicate()
    assert other.returncode == -signal.SIGKILL
    headstock.pretrain(corpus, out=run, resume=True)
    assert leftovers(tmp_path) == []  # no lock file is left


def test_fault_19_a_stale_lock_does_not_block(corpus, tmp_path, record):
    """While a run trains, a second process is refused; after kill -9 the next one resumes it at once."""
    kills = amount(2, 20)
    for number in range(kills):
        out = tmp_path / f"run-{number}"
        first = BackgroundProcess(tmp_path / "first", pretrain_and_sync, corpus, out, ENDLESS)
        first.wait_until(lambda out=out: list(out.glob("checkpoints/step-*")))
        second = start_command(tmp_path / "second", "pretrain", corpus, "--out", out, "--resume")
        assert second.wait() == 2 and BUSY in second.stderr.splitlines()[-1]
        first.kill()
        assert (tmp_path / f".run-{number}.claim").exists()  # the lock file of the killed process
        third = start_command(tmp_path / "third", "pretrain", corpus, "--out", out, "--resume")
        third.wait_until(lambda third=third: "resuming from" in third.stderr)
        third.send_signal(signal.SIGTERM)
        assert third.wait() == 143
        assert leftovers(tmp_path) == []
        for name in ("first", "second", "third", out.name):
            shutil.rmtree(tmp_path / name)
    record(19, "stale lock after kill -9", kills=kills, second_process_refused=kills, resumed_at_once=kills)


def test_fault_19_processes_that_start_together(corpus, tmp_path, record):
    """Exactly one trains; the others are refused because of the lock, or because the run exists by then."""
    headstock.pretrain(corpus, out=tmp_path / "alone", settings=SMALL)
    rounds, processes = amount(1, 20), amount(3, 4)
    for number in range(rounds):
        out = tmp_path / f"run-{number}"
        words = ["pretrain", corpus, "--out", out, *set_options(SMALL)]
        started = [start_command(tmp_path / f"process-{n}", *words) for n in range(processes)]
        assert sorted(process.wait() for process in started) == [0, *[2] * (processes - 1)]
        refused = [process.stderr for process in started if process.wait()]
        assert all(BUSY in err or "exists already" in err for err in refused)
        assert outcome(out) == outcome(tmp_path / "alone")
        shutil.rmtree(out)
    record(19, "processes that start together", rounds=rounds, processes=processes, that_trained_in_each_round=1)


@pytest.mark.parametrize("locked", [True, False])
def test_fault_19_control_without_the_lock_both_train(corpus, tmp_path, monkeypatch, locked):
    """A second run in the same folder, started by every message of the first."""
    if not locked:
        monkeypatch.setattr(filelock.FileLock, "acquire", lambda self: None)
    trained, refused = [], []

    def start_another(line):
        if trained or len(refused) > 3:
            return
        try:
            trained.append(1)
            headstock.pretrain(corpus, out=tmp_path / "run", settings=SMALL, overwrite=True)
        except UserError as error:
            trained.clear()
            refused.append(error)

    with messages_to(start_another):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=SMALL, overwrite=True)
    assert bool(refused) is locked and bool(trained) is not locked
