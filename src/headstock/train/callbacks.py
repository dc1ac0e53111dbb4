"""Training events and callbacks: metrics.jsonl, TensorBoard, log lines and a progress bar."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from headstock.tasks.base import perplexity
from headstock.train.budget import Budget
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.metrics import format_metrics
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings


@dataclass(frozen=True)
class Event:
    """What callbacks are called with: a step was made ("step"), a log line is due ("log"), or a validation is complete
    ("valid")."""

    kind: Literal["step", "log", "valid"]
    state: TrainState
    budget: Budget
    steps_per_epoch: int
    lr: float = 0.0
    gradient_norm: float = 0.0
    tokens_per_second: float = 0.0
    has_perplexity: bool = True  # the loss is per token, so it has a perplexity

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def loss(self) -> float:
        """The training loss since the last log line."""
        return self.state.loss

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last validation; empty before the first."""
        return self.state.valid

    @property
    def epoch(self) -> int:
        return (self.state.step - 1) // self.steps_per_epoch + 1

    @property
    def expected_steps(self) -> int:
        return self.budget.expected_steps(self.state.step, self.state.seconds)

    @property
    def time_left(self) -> str:
        expected = self.budget.expected_seconds(self.state.step, self.state.seconds)
        return format_duration(expected - self.state.seconds)


Callback = Callable[[Event], None]


def emit(callbacks: Sequence[Callback], event: Event) -> None:
    for callback in callbacks:
        callback(event)


@contextmanager
def run_callbacks(
    run: RunFolder, callbacks: Sequence[Callback], settings: TrainSettings, distributed: DistributedContext
) -> Iterator[list[Callback]]:
    """The callbacks of a run in a folder: metrics.jsonl, the caller's, and TensorBoard if set; none but on rank 0."""
    if not distributed.is_main:
        yield []
        return
    with tensorboard(run) if settings.tensorboard else nullcontext() as events:
        yield [log_metrics(run), *callbacks, *([events] if events else [])]


def log_metrics(run: RunFolder) -> Callback:
    """Appends every log line and validation to metrics.jsonl."""

    def on_event(event: Event) -> None:
        if row := metrics_of(event):
            run.add_metrics(row)

    return on_event


def metrics_of(event: Event) -> dict[str, Any] | None:
    """The row of metrics.jsonl for a log line or a validation; None for a step."""
    state = event.state
    if event.kind == "log":
        row = {"loss": state.loss, "lr": event.lr, "gradient": event.gradient_norm}
        row |= {"perplexity": perplexity(state.loss)} if event.has_perplexity else {}
        row["tokens_per_second"] = round(event.tokens_per_second, 1)
    elif event.kind == "valid":
        row = {f"valid_{name}": value for name, value in state.valid.items()}
        row |= {f"train_{name}": value for name, value in state.train.items()}
    else:
        return None
    return {"step": state.step, "epoch": event.epoch, "seconds": round(state.seconds, 3), "tokens": state.tokens} | row


@contextmanager
def tensorboard(run: RunFolder) -> Iterator[Callback]:
    """Writes the same numbers as TensorBoard events."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    # not torch's SummaryWriter, which takes seconds to import
    writer = EventFileWriter(str(run.tensorboard))

    def on_event(event: Event) -> None:
        state = event.state
        if event.kind == "log":
            rows = {"train/loss": state.loss, "train/lr": event.lr, "train/gradient": event.gradient_norm}
            rows["train/tokens_per_second"] = event.tokens_per_second
        elif event.kind == "valid":
            rows = {f"valid/{name}": value for name, value in state.valid.items()}
        else:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in rows.items()]
        writer.add_event(Record(wall_time=time.time(), step=state.step, summary=Summary(value=values)))

    try:
        yield on_event
    finally:
        writer.close()


def log_lines(write: Callable[[str], None]) -> Callback:
    """`| epoch   1 |   500/ 3125 steps | loss 7.29929 | ppl 1479.254`, for files and pipes."""

    def on_event(event: Event) -> None:
        state = event.state
        prefix = f"| epoch {event.epoch:3d} | {state.step:5d}/{event.expected_steps:5d} steps"
        if event.kind == "log":
            speed = f"{event.tokens_per_second:,.0f} tokens/s | {event.time_left} left"
            ppl = f" | ppl {perplexity(state.loss):8.3f}" if event.has_perplexity else ""
            write(f"{prefix} | loss {state.loss:.5f}{ppl} | {speed}")
        elif event.kind == "valid":
            write(f"{prefix} | {format_metrics(state.valid)}")

    return on_event


@contextmanager
def progress_bar() -> Iterator[Callback]:
    """A progress bar on stderr with loss, perplexity, speed and time left; validations are printed above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    columns: list[Any] = [
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TextColumn("{task.fields[left]} left"),
    ]
    bar = Progress(*columns, console=console)
    row = bar.add_task("", total=1, epoch=1, loss="loss -", speed="-", left="-:--")

    def on_event(event: Event) -> None:
        bar.start()  # at the first step, not while data is prepared; idempotent
        state = event.state
        bar.update(row, completed=state.step, total=event.expected_steps, epoch=event.epoch, left=event.time_left)
        if event.kind == "log":
            ppl = f" ppl {perplexity(state.loss):,.2f}" if event.has_perplexity else ""
            bar.update(row, loss=f"loss {state.loss:.3f}{ppl}", speed=f"{event.tokens_per_second:,.0f}")
        elif event.kind == "valid":
            console.print(f"  step {state.step:5d}  {format_metrics(state.valid)}")

    try:
        yield on_event
    finally:
        bar.stop()


@contextmanager
def terminal_progress(*, quiet: bool) -> Iterator[list[Callback]]:
    """A progress bar on a terminal, log lines elsewhere, nothing if quiet."""
    if quiet:
        yield []
    elif sys.stderr.isatty():
        with progress_bar() as callback:
            yield [callback]
    else:
        yield [log_lines(lambda line: print(line, file=sys.stderr, flush=True))]


@contextmanager
def status_line(*, quiet: bool) -> Iterator[list[Callback]]:
    """For many short runs: one line on a terminal that is overwritten, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield []
        return

    def on_event(event: Event) -> None:
        step, total = event.state.step, event.expected_steps
        if event.kind == "step":
            text = f"         step {step:,} of {total:,}, {event.time_left} left" if step < total else ""
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    try:
        yield [on_event]
    finally:
        sys.stderr.write("\r\x1b[K")


def format_duration(seconds: float) -> str:
    total = max(0, round(seconds))
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"
