"""Experiment tracking: sends the settings, metrics and results of a run to MLflow or Weights & Biases."""

import logging
import math
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from headstock.data import urls
from headstock.errors import UserError, WorkError
from headstock.train.callbacks import Callback, Event, metrics_of
from headstock.train.distributed import DistributedContext, Interrupted
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings

logger = logging.getLogger(__name__)

Row = dict[str, Any]  # a row of metrics.jsonl
Status = Literal["finished", "stopped", "failed"]
FINAL_SECONDS = 60  # the longest wait at the end of a run for what has not been sent yet,
STOPPED_SECONDS = 5  # and when a run is stopped or fails
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # what fails is kept and sent again, so there is no need to wait minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # where commands print their results
}
MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # in one request; the server refuses more


@dataclass(frozen=True)
class TrackedRow:
    """A row of metrics.jsonl."""

    prefix: str  # of the names of metrics: `members/0/` for a member of an ensemble
    row: Row
    time: float  # seconds since 1970

    @property
    def step(self) -> int:
        return self.row["step"]

    @property
    def series(self) -> str:
        """Validations and log lines of the same step are different rows."""
        return self.prefix + ("valid" if any(name.startswith("valid_") for name in self.row) else "log")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics by their full names, without the step."""
        return numbers({name: value for name, value in self.row.items() if name != "step"}, self.prefix)


class Tracker(Protocol):
    """A tracking service. Its methods may wait for a network and may raise any exception."""

    title: str

    def new_id(self) -> str | None:
        """The id of a run that is not created yet; None if the service chooses it."""

    def start(self, run_id: str | None, *, name: str, params: Mapping[str, Any]) -> str:
        """Create a tracked run, or continue the one with this id; returns its id."""

    def log(self, rows: list[TrackedRow]) -> None: ...

    def finish(self, results: Mapping[str, float], status: Status) -> None: ...


# Runs that are tracked


class Tracking:
    """The tracking of a run; this one is off."""

    def callbacks(self, run: RunFolder) -> list[Callback]:
        """The callbacks of a run: the tracked one, or one of its members."""
        return []

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Send the results, and wait until everything has arrived; returns the results."""
        return results


@contextmanager
def tracked(run: RunFolder, settings: TrainSettings, distributed: DistributedContext) -> Iterator[Tracking]:
    """Track a run while it is trained. A tracker that is missing or fails is reported, and training continues."""
    tracker = make_tracker(settings.track) if distributed.is_main else None
    if tracker is None:
        yield Tracking()
        return
    tracking = RunTracking(run, tracker)
    try:
        yield tracking
    except BaseException as error:
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        tracking.close("stopped" if stopped else "failed", seconds=STOPPED_SECONDS)
        raise


def make_tracker(name: str) -> Tracker | None:
    """The tracker of a name; None for `none`, and if its package is not installed."""
    if name == "none":
        return None
    if find_spec(name) is None:
        logger.warning(f"track={name} needs: pip install 'headstock[{name}]'; this run is not tracked")
        return None
    return MLflow() if name == "mlflow" else WeightsAndBiases()


@dataclass
class TrackingState:
    """The content of tracking.json, by which a resumed run continues its tracked run."""

    run_id: str | None = None
    steps: dict[str, int] = field(default_factory=dict)  # the last step sent, by series
    finished: bool = False  # the results were sent


class RunTracking(Tracking):
    """Sends the metrics of a run to a tracker in a thread.

    What cannot be sent is kept and sent with the next metrics, and at the latest when the run is resumed.
    """

    def __init__(self, run: RunFolder, tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self.state = read_state(run)
        self.queued = dict(self.state.steps)  # the last step of each series that earlier processes sent or left to send
        self.unsent = [] if self.state.finished else self.rows_not_sent()
        self.queued |= {row.series: row.step for row in self.unsent}
        self.is_started, self.has_failed = False, False
        self.results: Mapping[str, float] = {}
        self.queue: queue.SimpleQueue[TrackedRow | Status | None] = queue.SimpleQueue()
        self.queue.put(None)  # wakes the thread, which creates the tracked run
        self.thread = threading.Thread(target=self._work, daemon=True)
        if not self.state.finished:
            self.thread.start()

    def rows_not_sent(self) -> list[TrackedRow]:
        """Rows that an earlier process wrote to metrics.jsonl and did not send."""
        runs, now = self.run.model_runs(), time.time()
        rows = [TrackedRow(self.prefix(run), row, now) for run in runs for row in run.read_metrics()]
        return [row for row in rows if self.is_new(row)]

    def prefix(self, run: RunFolder) -> str:
        return "" if run.path == self.run.path else f"{run.path.relative_to(self.run.path).as_posix()}/"

    def is_new(self, row: TrackedRow) -> bool:
        """Whether a row is not a repetition: a resumed run repeats the steps after its last checkpoint."""
        return row.step > self.queued.get(row.series, 0)

    def callbacks(self, run: RunFolder) -> list[Callback]:
        prefix = self.prefix(run)

        def on_event(event: Event) -> None:
            if metrics := metrics_of(event):
                row = TrackedRow(prefix, metrics, time.time())
                if self.is_new(row):
                    self.queue.put(row)

        return [on_event]

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        self.results = numbers(results, "results/")
        self.close("finished", seconds=FINAL_SECONDS)
        return results

    def close(self, status: Status, *, seconds: float) -> None:
        """Send what is left; gives up after some seconds."""
        if not self.thread.is_alive():
            return
        self.queue.put(status)
        deadline = time.monotonic() + seconds
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.thread.join(0.1)  # Ctrl-C is noticed in between
        if self.thread.is_alive() or self.has_failed:
            title = self.tracker.title
            logger.warning(f"{title} has not received everything of {self.run}; --resume sends the rest")

    # In the thread

    def _work(self) -> None:
        ending: Status | None = None
        while ending is None:
            items = [self.queue.get()]
            while not self.queue.empty():
                items.append(self.queue.get())
            self.unsent += [item for item in items if isinstance(item, TrackedRow)]
            ending = next((item for item in items if isinstance(item, str)), None)
            try:
                self._send(ending)
                self.has_failed = False
            except Exception as error:  # whatever a library or a network raises: training continues
                if not self.has_failed:
                    title, reason = self.tracker.title, describe_error(error)
                    logger.warning(f"{title}: {reason}; training continues, and metrics are sent later")
                self.has_failed = True

    def _send(self, ending: Status | None) -> None:
        """Send what is not sent yet."""
        if not self.is_started:
            if self.state.run_id is None and (run_id := self.tracker.new_id()):
                self.state.run_id = run_id
                self.save_state()
            name, params = self.run.path.resolve().name, flat(self.run.config())
            self.state.run_id = self.tracker.start(self.state.run_id, name=name, params=params)
            self.is_started = True
            self.save_state()
        if self.unsent:
            self.tracker.log(self.unsent)
            self.state.steps |= {row.series: row.step for row in self.unsent}
            self.unsent = []
            self.save_state()
        if ending is not None:
            self.tracker.finish(self.results, ending)
            self.state.finished = ending == "finished"
            self.save_state()

    def save_state(self) -> None:
        self.run.write(self.run.tracking_file.name, asdict(self.state))


def read_state(run: RunFolder) -> TrackingState:
    if not run.tracking_file.is_file():
        return TrackingState()
    try:
        state = TrackingState(**run.read(run.tracking_file.name))
        if not all(isinstance(step, int) for step in state.steps.values()):
            raise TypeError("steps must be numbers")
    except (UserError, TypeError, AttributeError) as error:
        logger.warning(f"{run.tracking_file}: is damaged ({error}); the run is tracked as a new one")
        return TrackingState()
    return state


def describe_error(error: BaseException) -> str:
    """The cause of an error: libraries wrap `Connection refused` in long messages."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(str(error).split())[:200] or type(error).__name__


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as one table with names such as `train.lr`."""
    table: dict[str, Any] = {}
    for name, value in tree.items():
        table |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return table


def numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a tree, with names such as `results/test/accuracy`."""
    table: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            table |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            table[prefix + name] = value
    return table


# Services


class MLflow:
    """An MLflow tracking server, named by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    STATUS: ClassVar[dict[Status, str]] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.title = f"MLflow at {urls.redact(uri)}" if uri else "MLflow"

    def new_id(self) -> None:
        return None

    def start(self, run_id: str | None, *, name: str, params: Mapping[str, Any]) -> str:
        for variable, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient()
        run = self.find_run(run_id)
        if run is None:
            run = self.client.create_run(self.experiment_id(), run_name=name)
        else:
            self.client.update_run(run.info.run_id, status="RUNNING")
        self.run_id: str = run.info.run_id
        values = [(key, str(value)) for key, value in params.items() if key not in run.data.params]
        for start in range(0, len(values), MLFLOW_PARAMS):
            batch = values[start : start + MLFLOW_PARAMS]
            self.client.log_batch(self.run_id, params=[Param(key, value) for key, value in batch])
        logger.info(f"{self.title}: run {self.run_id} of experiment {run.info.experiment_id}")
        return self.run_id

    def find_run(self, run_id: str | None) -> Any:
        """The run of an id; None if it was deleted or is that of another server."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            logger.warning(f"{self.title}: there is no run {run_id}; a new one is created")
            return None
        return run

    def experiment_id(self) -> str:
        if identifier := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identifier
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self.client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self.client.create_experiment(name)

    def log(self, rows: list[TrackedRow]) -> None:
        self.log_values((name, value, row.time, row.step) for row in rows for name, value in row.metrics.items())

    def finish(self, results: Mapping[str, float], status: Status) -> None:
        self.log_values((name, value, time.time(), 0) for name, value in results.items())
        self.client.set_terminated(self.run_id, status=self.STATUS[status])

    def log_values(self, values: Iterable[tuple[str, float, float, int]]) -> None:
        """Send values with their names, times and steps."""
        from mlflow.entities import Metric

        metrics = [Metric(mlflow_name(name), value, int(1000 * when), step) for name, value, when, step in values]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MLFLOW_METRICS])


def mlflow_name(name: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w/.\- :]", "_", name, flags=re.ASCII)


class WeightsAndBiases:
    """Weights & Biases: its server, project and mode are those of WANDB_BASE_URL, WANDB_PROJECT and WANDB_MODE."""

    title = "Weights & Biases"
    EXIT_CODE: ClassVar[dict[Status, int]] = {"finished": 0, "stopped": 130, "failed": 1}

    def new_id(self) -> str:
        return secrets.token_hex(8)

    def start(self, run_id: str | None, *, name: str, params: Mapping[str, Any]) -> str:
        import wandb

        if wandb.setup().settings.mode in (None, "online") and not wandb.login(prompt=False, verify=False):
            raise WorkError("no API key; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        settings = wandb.Settings(console="off", silent=True)  # our own messages and progress bar stay as they are
        options: dict[str, Any] = {"name": name, "config": dict(params), "settings": settings}
        # not the run that the caller's program may have opened
        self.run = wandb.init(id=run_id, resume="allow", reinit="create_new", **options)
        self.run.define_metric("*", step_metric="step")  # a resumed run may go back by some steps
        where = f"in {Path(self.run.dir).parent}" if self.run.offline else f"at {self.run.url}"
        logger.info(f"Weights & Biases: run {self.run.id} {where}")
        return self.run.id

    def log(self, rows: list[TrackedRow]) -> None:
        for row in rows:
            self.run.log({"step": row.step, "_timestamp": row.time, **row.metrics})

    def finish(self, results: Mapping[str, float], status: Status) -> None:
        self.run.summary.update(dict(results))
        self.run.finish(exit_code=self.EXIT_CODE[status])
