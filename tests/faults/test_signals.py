"""Fault 3: SIGTERM and Ctrl-C stop every long command within seconds, with its work saved and one line of output."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import headstock
from headstock.tasks.causal import CausalLM
from headstock.train.checkpoint import DiskCheckpointer, find_damage, newest_first
from headstock.train.distributed import Interrupted, Interruption
from tests.commands import set_options
from tests.conftest import TINY
from tests.faults.harness import EVERY_STATE, amount, leftovers, outcome
from tests.train.processes import start_command

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # documented in docs/evidence/reliability.md
MAX_SECONDS = 10.0
FIRST_TERMINATED = ("pretrain", "compare", "tokenizer")  # the others get Ctrl-C first; CI sends one signal
PRETRAIN = EVERY_STATE | {"steps": 120, "log_every": 1, "validate_every": 40}
FINETUNE = {"least_steps": 0, "epochs": 60, "lr": 5e-3, "validate_every": 40, "log_every": 1, "patience": 1000}
LONG = {"least_steps": 0, "epochs": 4000, "patience": 10**6}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Five megabytes of words that do not repeat much: a tokenizer needs a second for them, and so does a store."""
    pick, path = random.Random(0), tmp_path_factory.mktemp("text") / "words.txt"
    words = ["".join(pick.choices("abcdefghijklmnop", k=pick.randint(3, 9))) for _ in range(40_000)]
    path.write_text("\n\n".join(" ".join(pick.choices(words, k=60)) for _ in range(12_000)))
    return path


@dataclass
class Case:
    words: list[object]  # of the command, without the folder
    running: Callable[[str, Path], bool]  # by stderr and the folder: whether it is where it should be interrupted


def training(err: str, out: Path) -> bool:
    return "| epoch" in err


@pytest.fixture
def cases(corpus, text, stock, files, tmp_path) -> dict[str, Case]:
    rows = [f"--{name}={path}" for name, path in files.items()]
    tune = ["finetune", stock, f"--train={files['train']}", f"--valid={files['valid']}"]
    return {
        "pretrain": Case(["pretrain", corpus, *set_options(PRETRAIN)], training),
        "finetune": Case([*tune, *set_options(FINETUNE)], training),
        "compare": Case(
            ["compare", stock, *rows, "--labels=24", "--seeds=2", *set_options(LONG)],
            lambda err, out: "trials" in err,
        ),
        "sweep": Case(
            ["sweep", corpus, "--grid=depth=1,2", *set_options(TINY | {"steps": 10**5})],
            lambda err, out: bool(list(out.glob("**/metrics.jsonl"))),
        ),
        "tokenizer": Case(["tokenizer", "train", text], lambda err, out: "documents are" in err),
        "store": Case(["pretrain", text, *set_options(TINY)], lambda err, out: "hashed the documents" in err),
    }


@pytest.mark.parametrize("name", ["pretrain", "finetune", "compare", "sweep", "tokenizer", "store"])
def test_fault_03_signals(cases, corpus, stock, files, tmp_path, tmp_path_factory, record, monkeypatch, name):
    monkeypatch.setenv("HEADSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))  # no store is there
    case, pick, slowest = cases[name], random.Random(4), 0.0
    both = [signal.SIGTERM, signal.SIGINT] if name in FIRST_TERMINATED else [signal.SIGINT, signal.SIGTERM]
    numbers = (both * 5)[: amount(1, 10)]
    for number in numbers:
        out = tmp_path / ("out.json" if name == "tokenizer" else "out")
        process = start_command(tmp_path / "process", *case.words, "--out", out)
        process.wait_until(lambda out=out, process=process: case.running(process.stderr, out))
        time.sleep(pick.uniform(0, 0.2))
        if name in ("tokenizer", "store") and (out.exists() or not process.process.is_alive()):
            process.kill()
            pytest.skip("this machine is so busy that the command was done before the signal")
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait() == CODES[number], process.stderr
        slowest = max(slowest, time.monotonic() - began)
        assert slowest < MAX_SECONDS
        last = process.stderr.splitlines()[-1]
        assert last.startswith("headstock: ") and "Traceback" not in process.stderr
        assert leftovers(tmp_path) == []
        if name in ("pretrain", "finetune"):
            assert "continue with --resume" in last
            assert find_damage(newest_first(out / "checkpoints")[0]) is None
        elif name in ("compare", "sweep"):
            assert "repeat the command to continue" in last
        else:
            assert not out.exists()
        shutil.rmtree(tmp_path / "process")
        if name == "pretrain":
            headstock.pretrain(corpus, out=tmp_path / "whole", settings=PRETRAIN, resume=True)
            headstock.pretrain(corpus, out=out, resume=True)
            assert outcome(out) == outcome(tmp_path / "whole")
        shutil.rmtree(out, ignore_errors=True)
    record(3, name, signals=len(numbers), slowest_exit_in_seconds=round(slowest, 1))


def test_fault_03_a_signal_stops_a_validation(corpus, tmp_path, monkeypatch):
    """The checkpoint says that the validation is missing, so that the resumed run begins with it."""
    settings = EVERY_STATE | {"weights": "best"}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings)
    losses, evaluated = CausalLM.losses, []

    def with_signal(self, model, batch, **options):
        if not model.training:
            evaluated.append(batch)
            if len(evaluated) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return losses(self, model, batch, **options)

    monkeypatch.setattr(CausalLM, "losses", with_signal)
    with pytest.raises(Interrupted, match="stopped after step 3") as stopped:
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings)
    assert stopped.value.exit_code == 143 and len(evaluated) == 1
    headstock.pretrain(corpus, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_fault_03_a_signal_after_the_last_step_is_not_lost(corpus, tmp_path, monkeypatch):
    """It arrives in the last save, when the loop does not look for signals any more."""
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=EVERY_STATE)
    save = DiskCheckpointer.save

    def save_with_signal(self, state):
        save(self, state)
        if state.step == EVERY_STATE["steps"]:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DiskCheckpointer, "save", save_with_signal)
    with pytest.raises(KeyboardInterrupt):
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=EVERY_STATE)
    headstock.pretrain(corpus, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_fault_03_control_a_run_that_ignores_signals_does_not_stop(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Interruption, "handle", lambda self, number, frame: None)

    def interrupt(event):
        os.kill(os.getpid(), signal.SIGTERM)

    results = headstock.pretrain(corpus, out=tmp_path / "run", settings=EVERY_STATE, callbacks=[interrupt])
    assert results["steps"] == EVERY_STATE["steps"]
