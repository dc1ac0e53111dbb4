"""Tiny runs of every kind, and one real server process that serves them to all tests of this folder."""

import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import headstock
from tests.conftest import TINY
from tests.experiments.small import MAKERS, SETTINGS, make_rows, write_lines, write_rows
from tests.tasks.parallel import QUICK, sentences, write
from tests.train.processes import BackgroundProcess, run_headstock

TASKS = ("causal", "masked", "classify", "pair", "tag", "answer", "translate")
START_SECONDS = 120  # on a busy machine


@pytest.fixture(scope="session")
def runs(corpus, tmp_path_factory) -> dict[str, Path]:
    """A tiny run of each task, in a folder of the task's name, which is also the name of the served model."""
    folder = tmp_path_factory.mktemp("served")
    paths = {task: folder / task for task in TASKS}
    headstock.pretrain(corpus, out=paths["causal"], settings=TINY | {"steps": 40, "lr": 0.01})
    headstock.pretrain(corpus, out=paths["masked"], preset="bert-nano", settings=TINY | {"steps": 10})
    rows = write_rows(folder / "classify.csv", make_rows(40, name="train"))
    headstock.finetune(paths["causal"], train=rows, valid=rows, out=paths["classify"], settings=SETTINGS)
    for task, make in MAKERS.items():
        rows = write_lines(folder / f"{task}.jsonl", make(24, name="train"))
        options = {"task": task, "train": rows, "valid": rows, "out": paths[task]}
        headstock.finetune(paths["masked"], settings=SETTINGS | {"lr": 0.02}, **options)
    rows = write(folder / "translate.tsv", sentences(40, "train"))
    options = {"preset": "seq2seq-nano", "task": "translate", "settings": QUICK | {"epochs": 1.0}}
    headstock.finetune(train=rows, valid=rows, out=paths["translate"], **options)
    return paths


class ForkedCommand(BackgroundProcess):
    """`headstock ARGUMENTS` with stdout and stderr in one file."""

    def __init__(self, log: Path, *arguments: str):
        self.start({1: log, 2: log}, run_headstock, arguments, {})

    def poll(self) -> int | None:
        return self.process.exitcode


@dataclass
class ServerProcess:
    """`headstock serve` in its own process, and where it listens."""

    process: subprocess.Popen | ForkedCommand
    url: str
    log: Path

    def stop(self, seconds: float = 30) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def start_server(log: Path, *arguments, forked: bool = True) -> ServerProcess:
    """`headstock serve --port 0 ARGUMENTS`, once it has printed its URL; its output goes to the file `log`.

    A forked process starts with torch imported, another one as a user starts it.
    """
    words = ["serve", "--port", "0", *map(str, arguments)]
    with log.open("wb") as file:
        if forked:
            process = ForkedCommand(log, *words)
        else:
            command = [sys.executable, "-m", "headstock", *words]
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT
            )  # inherits one thread and the cache
    give_up = time.monotonic() + START_SECONDS
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"https?://[\w.:\[\]-]+:\d+", text):
            return ServerProcess(process, match[0], log)
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            raise RuntimeError(f"the server did not start (exit code {process.poll()}):\n{text}")
        threading.Event().wait(0.05)


@pytest.fixture(scope="session")
def server(runs, tmp_path_factory):
    """The server process of all runs."""
    pytest.importorskip("fastapi", reason="needs headstock[serve]")
    pytest.importorskip("uvicorn", reason="needs headstock[serve]")
    process = start_server(tmp_path_factory.mktemp("server") / "log.txt", *runs.values(), "--device", "cpu")
    yield process
    if process.process.poll() is None:
        process.stop()


@pytest.fixture(scope="session")
def served(server, runs) -> tuple[str, dict[str, str]]:
    """The server's base URL, and the name of the model of each task."""
    return server.url, {task: path.name for task, path in runs.items()}
