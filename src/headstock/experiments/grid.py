"""The experiment grid of compare and sweep: each trial runs once, here or on a Ray cluster; results are cached."""

import json
import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from headstock.errors import UserError
from headstock.io import lock_folder, remove_stale, write_json
from headstock.logs import muted
from headstock.signals import signal_of
from headstock.train.distributed import Interrupted
from headstock.train.run_folder import RunFolder

logger = logging.getLogger(__name__)

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


class Trainable(ABC, Generic[TrialT]):
    """Runs the trials of an experiment, in this process or in a copy of it on another machine."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder of the experiment."""

    @property
    def shared_inputs(self) -> Sequence[Path] | None:
        """Files that trials read themselves, wherever they run, as they do `folder`; None if there are none."""
        return None

    @abstractmethod
    def lookup(self, trial: TrialT) -> "Outcome | None":
        """The outcome of a trial that is in the cache."""

    @abstractmethod
    def run(self, trial: TrialT) -> "Outcome":
        """The outcome from the cache, or else of running the trial."""

    @abstractmethod
    def on_worker(self, folder: Path, device: str) -> "Trainable[TrialT]":
        """A copy that works in another folder, on the device of another machine."""


Executor = Callable[[Trainable[Any], Sequence[Any]], Iterator[tuple[int, "Outcome"]]]


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

    def get(
        self, trial: Trial, key: str, *, is_complete: Callable[[TrialResult], bool] = lambda cached: True
    ) -> Outcome | None:
        """The cached result with this key; `is_complete` may reject it."""
        cached = self.read(trial)
        return Outcome(cached, is_new=False) if cached.get("key") == key and is_complete(cached) else None

    def run(self, trial: Trial, key: str, run: Callable[[], TrialResult]) -> Outcome:
        """The result of `run`, which is cached."""
        start = time.monotonic()
        with muted():
            result = run()
        result = {"seconds": round(time.monotonic() - start, 3)} | result | {"key": key}
        self.write(trial, result)
        return Outcome(result, is_new=True)


def trial_run(name: str, *, folder: Path, home: Path | None) -> RunFolder:
    """The run that a trial saves. On another machine it lies in a temporary `folder`, but is named by its `home`."""
    return RunFolder(folder / "runs" / name, name=str(home / "runs" / name) if home else "")


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
    trainable: Trainable[TrialT],
    trials: Sequence[TrialT],
    *,
    execute: Executor | None = None,
    format_score: Callable[[TrialResult], str],
    on_result: Callable[[int, dict[int, TrialResult], bool], None] = lambda index, results, is_new: None,
) -> list[TrialResult]:
    """The result of every trial, in the order of `trials`.

    `execute` decides where trials run; by default in this process. `on_result` is called after each trial with its
    index, all results so far, and whether its result is new rather than from the cache.
    """
    folder = trainable.folder
    remove_stale(folder / "cells")
    results: dict[int, TrialResult] = {}
    width = max(len(trial.label) for trial in trials)
    with explain_interruption(lambda: f"{len(results)} of {len(trials)} trials are saved in {folder}"):
        for index, (result, is_new) in (execute or run_here)(trainable, trials):
            results[index] = result
            progress = f"{len(results):3d}/{len(trials)}  {trials[index].label:{width}s}"
            log_outcome(progress, format_score(result), Outcome(result, is_new))
            on_result(index, results, is_new)
    return [results[index] for index in range(len(trials))]


def log_outcome(progress: str, score: str, outcome: Outcome) -> None:
    duration = f"{outcome.result['seconds']:6.1f} s" if outcome.is_new else "(cached)"
    logger.info("%s  %s  %s", progress, score, duration)


def run_here(trainable: Trainable[TrialT], trials: Sequence[TrialT]) -> Iterator[tuple[int, Outcome]]:
    """Run trials in this process and yield each index and outcome."""
    for index, trial in enumerate(trials):
        yield index, trainable.run(trial)


@contextmanager
def explain_interruption(saved: Callable[[], str]) -> Iterator[None]:
    """Turn an interruption into one that says what is `saved` and how to continue."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        signal_number = stop.exit_code - 128 if isinstance(stop, Interrupted) else signal_of(stop)
        raise Interrupted(f"stopped; {saved()}; repeat the command to continue", signal_number) from None


@contextmanager
def lock_experiment(folder: Path) -> Iterator[None]:
    """Hold the lock on an experiment's folder; a second process is refused. A process that dies loses its lock."""
    check_folder(folder)
    with lock_folder(folder) as acquired:
        if not acquired:
            raise UserError(f"{folder}: another process is using this folder (--on ray runs trials side by side)")
        yield


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
