"""The experiment grid of compare and sweep: each trial runs once, its result is cached, processes share the work.

Starting the same command several times, for example once per GPU, divides the trials among the processes.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headstock.io import remove_stale, try_lock, write_json
from headstock.train.signals import Interrupted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between two looks at what other processes have finished

TrialResult = dict[str, Any]


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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def run_grid(
    folder: Path,
    trials: Sequence[TrialT],
    run_trial: Callable[[TrialT], tuple[TrialResult, bool]],
    *,
    format_score: Callable[[TrialResult], str],
    on_result: Callable[[int, dict[int, TrialResult]], None] = lambda index, results: None,
) -> list[TrialResult]:
    """The result of every trial, in the order of `trials`.

    `run_trial` returns a result and whether it is new (not read from the cache). `on_result` is called after each
    trial with its index and all results so far.
    """
    remove_stale(folder / "cells")
    results: dict[int, TrialResult] = {}
    width = max(len(trial.label) for trial in trials)

    def run(trial: TrialT) -> tuple[TrialResult, bool]:
        with explained_interruption(f"{len(results)} of {len(trials)} trials are saved in {folder}"):
            return run_trial(trial)

    for index, (result, is_new) in shared_trials(folder, trials, run):
        results[index] = result
        duration = f"{result['seconds']:6.1f} s" if is_new else "(cached)"
        progress = f"{len(results):3d}/{len(trials)}  {trials[index].label:{width}s}"
        logger.info("%s  %s  %s", progress, format_score(result), duration)
        on_result(index, results)
    return [results[index] for index in range(len(trials))]


@contextmanager
def explained_interruption(saved: str) -> Iterator[None]:
    """Turn an interruption into one that says what is saved and how to continue."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        signal_number = stop.exit_code - 128 if isinstance(stop, Interrupted) else signal.SIGINT
        raise Interrupted(f"stopped; {saved}; repeat the command to continue", signal_number) from None


def shared_trials(
    folder: Path, trials: Sequence[TrialT], run: Callable[[TrialT], tuple[TrialResult, bool]]
) -> Iterator[tuple[int, tuple[TrialResult, bool]]]:
    """The index and outcome of every trial; trials that another process is running are collected at the end."""
    pending, is_waiting = list(range(len(trials))), False
    while pending:
        before = len(pending)
        for index in list(pending):
            with try_lock(claim_path(folder, trials[index].name)) as is_ours:
                if not is_ours:
                    continue
                outcome = run(trials[index])
            pending.remove(index)
            yield index, outcome
        if len(pending) == before:
            if not is_waiting:
                logger.info("waiting for %d trials that other processes are running", len(pending))
            is_waiting = True
            time.sleep(POLL_SECONDS)


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[None]:
    """Hold the claim `name` for a block; other processes wait."""
    while True:
        with try_lock(claim_path(folder, name)) as is_ours:
            if is_ours:
                yield
                return
        time.sleep(POLL_SECONDS)


def claim_path(folder: Path, name: str) -> Path:
    """An empty lock file. It is never removed: a lock on a removed file would not exclude a newly created one."""
    return folder / "claims" / name
