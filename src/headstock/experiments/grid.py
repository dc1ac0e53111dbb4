"""The experiment grid of compare and sweep: each trial runs once, its result is cached, processes share the work.

Starting the same command several times, for example once per GPU, divides the trials among the processes.
"""

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from headstock.errors import UserError
from headstock.io import remove_stale, try_lock, write_json
from headstock.logs import muted
from headstock.signals import signal_of
from headstock.train.distributed import Interrupted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between two looks at what other processes have finished
PACKAGES = ("headstock", "torch", "tokenizers", "scikit-learn", "numpy")
SINGLE_SEED = "One seed only: the variation between seeds is unknown, so there are no intervals."

TrialResult = dict[str, Any]


class Outcome(NamedTuple):
    result: TrialResult
    is_new: bool  # False if the result was read from the cache


class Trial(Protocol):
    @property
    def name(self) -> str:
        """Unique within the grid; names the result file."""
        ...

    @property
    def label(self) -> str:
        """How progress lines refer to the trial."""
        ...


TrialT = TypeVar("TrialT", bound=Trial)


class ResultCache:
    """The results of trials, one JSON file each under `cells/`."""

    def __init__(self, folder: Path):
        self.folder = folder / "cells"

    def path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.name}.json"

    def read(self, trial: Trial) -> TrialResult:
        return read_json(self.path(trial))

    def write(self, trial: Trial, result: TrialResult) -> None:
        write_json(self.path(trial), result)

    def get_or_run(
        self,
        trial: Trial,
        key: str,
        run: Callable[[], TrialResult],
        *,
        is_complete: Callable[[TrialResult], bool] = lambda cached: True,
    ) -> Outcome:
        """The cached result with this key, or else that of `run`; `is_complete` may reject a cached result."""
        cached = self.read(trial)
        if cached.get("key") == key and is_complete(cached):
            return Outcome(cached, is_new=False)
        start = time.monotonic()
        with muted():
            result = run()
        result = {"seconds": round(time.monotonic() - start, 3)} | result | {"key": key}
        self.write(trial, result)
        return Outcome(result, is_new=True)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; an experiment needs a folder")


def run_grid(
    folder: Path,
    trials: Sequence[TrialT],
    run_trial: Callable[[TrialT], Outcome],
    *,
    format_score: Callable[[TrialResult], str],
    on_result: Callable[[int, dict[int, TrialResult]], None] = lambda index, results: None,
) -> list[TrialResult]:
    """The result of every trial, in the order of `trials`.

    `on_result` is called after each trial with its index and all results so far.
    """
    remove_stale(folder / "cells")
    results: dict[int, TrialResult] = {}
    width = max(len(trial.label) for trial in trials)
    with explain_interruption(lambda: f"{len(results)} of {len(trials)} trials are saved in {folder}"):
        for index, (result, is_new) in execute(folder, trials, run_trial):
            results[index] = result
            progress = f"{len(results):3d}/{len(trials)}  {trials[index].label:{width}s}"
            log_outcome(progress, format_score(result), Outcome(result, is_new))
            on_result(index, results)
    return [results[index] for index in range(len(trials))]


def log_outcome(progress: str, score: str, outcome: Outcome) -> None:
    duration = f"{outcome.result['seconds']:6.1f} s" if outcome.is_new else "(cached)"
    logger.info("%s  %s  %s", progress, score, duration)


def execute(
    folder: Path, trials: Sequence[TrialT], run_trial: Callable[[TrialT], Outcome]
) -> Iterator[tuple[int, Outcome]]:
    """Run trials in this process and yield each index and outcome as it becomes available.

    This is the only place that decides where trials run. Trials that another process is running are collected at the
    end, from the cache.
    """
    pending, is_waiting = list(range(len(trials))), False
    while pending:
        before = len(pending)
        for index in list(pending):
            with try_lock(claim_path(folder, trials[index].name)) as acquired:
                if not acquired:
                    continue
                outcome = run_trial(trials[index])
            pending.remove(index)
            yield index, outcome
        if len(pending) == before:
            if not is_waiting:
                logger.info("waiting for %d trials that other processes are running", len(pending))
            is_waiting = True
            time.sleep(POLL_SECONDS)


@contextmanager
def explain_interruption(saved: Callable[[], str]) -> Iterator[None]:
    """Turn an interruption into one that says what is `saved` and how to continue."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        signal_number = stop.exit_code - 128 if isinstance(stop, Interrupted) else signal_of(stop)
        raise Interrupted(f"stopped; {saved()}; repeat the command to continue", signal_number) from None


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` for a block; other processes wait."""
    while True:
        with try_lock(claim_path(folder, name)) as acquired:
            if acquired:
                yield
                return
        time.sleep(POLL_SECONDS)


def claim_path(folder: Path, name: str) -> Path:
    """An empty lock file. It is never removed: a lock on a removed file would not exclude a newly created one."""
    return folder / "claims" / name


def total_seconds(elapsed: float, trials: Sequence[TrialResult]) -> float:
    """The duration of an experiment, including that of cached trials."""
    return round(max(elapsed, sum(result["seconds"] for result in trials)), 1)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that can change a result."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            continue
    return installed
