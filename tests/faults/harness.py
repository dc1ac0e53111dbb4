"""The size at which fault tests run (small in `make test`, the full size in `make faults`), and what they compare."""

import os
import posix
from pathlib import Path
from typing import Any

import headstock
from headstock.io import sha256
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY

SIZE = "HEADSTOCK_FAULTS"  # environment variable: "full", or nothing for the CI size
RESULTS = "HEADSTOCK_FAULTS_RESULTS"  # environment variable: a JSON-lines file to which results are appended


def is_full() -> bool:
    return os.environ.get(SIZE) == "full"


def amount(ci: int, full: int) -> int:
    """How often a fault is provoked: the first number in `make test`, the second in `make faults`."""
    return full if is_full() else ci


SMALL = TINY | {"depth": 1, "steps": 9, "log_every": 2, "validate_every": 3, "keep": 1, "weights": "last"}
EVERY_STATE = SMALL | {"ema": 0.9, "optimizer": "muon", "dropout": 0.1}  # all that a checkpoint can hold
SAVES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"async_save": True},
}  # ways to save a checkpoint
TIMED = ("run", "seconds", "tokens_per_second", "peak_bytes")  # what may differ between equal runs


def outcome(path: Path) -> dict[str, Any]:
    """Everything of a finished run that an interruption must not change: weights by their bits, metrics, results."""
    run = RunFolder(path)
    rows = [{key: row[key] for key in row if key not in TIMED} for row in run.read_metrics()]
    results = {key: value for key, value in run.results().items() if key not in TIMED}
    return {"weights": sha256(run.weights_file), "metrics": rows, "results": results}


def leftovers(folder: Path) -> list[str]:
    """Temporary files and locks that an interruption left behind."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".*"))


def pretrain_and_sync(corpus: Path, out: Path, settings: dict[str, Any]) -> None:
    """Pretrain in a process of its own, with the calls of fsync that other tests skip."""
    os.fsync = posix.fsync
    headstock.pretrain(corpus, out=out, settings=settings, resume=True)
