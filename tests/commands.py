"""Real commands in processes of their own, which begin with torch imported: that takes longer than most commands."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["headstock.train.pretrain", "headstock.experiments.compare"])


def command(*words, stdin: bytes = b"", timeout: float = 120) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `headstock WORDS`, run where we are and with our environment."""
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name) / stream for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_bytes(stdin)
        given = (list(map(str, words)), [str(path) for path in streams], dict(os.environ), os.getcwd())
        process = CONTEXT.Process(target=_run, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"headstock {' '.join(given[0])}: not done after {timeout} s")
        return process.exitcode, streams[1].read_text(encoding="utf-8"), streams[2].read_text(encoding="utf-8")


def _run(words: list[str], streams: list[str], environment: dict[str, str], folder: str) -> None:
    """As `python -m headstock` would: it knows nothing of tests, and ends as it wishes."""
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["headstock", *words]
    runpy.run_module("headstock", run_name="__main__")
