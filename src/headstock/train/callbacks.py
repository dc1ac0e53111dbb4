"""Training callbacks: the metrics file, TensorBoard, plain lines, and a bar on a terminal."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headstock.train.loop import Callback, Event
from headstock.train.run_folder import RunFolder


def log_metrics(run: RunFolder) -> Callback:
    """Every line and every validation as a row of metrics.jsonl."""

    def hear(event: Event) -> None:
        p = event.state
        if event.kind == "log":
            row = {"loss": p.loss, "lr": event.lr, "gradient": event.gradient}
            row |= {"perplexity": perplexity(p.loss)} if event.of_tokens else {}
            row["tokens_per_second"] = round(event.tokens_per_second, 1)
        elif event.kind == "valid":
            row = {f"valid_{name}": value for name, value in p.valid.items()}
            row |= {f"train_{name}": value for name, value in p.train.items()}
        else:
            return
        run.add_metrics(
            {"step": p.step, "epoch": event.epoch, "seconds": round(p.seconds, 3), "tokens": p.tokens} | row
        )

    return hear


@contextmanager
def tensorboard(run: RunFolder) -> Iterator[Callback]:
    """The same numbers as TensorBoard events."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    # the event writer by itself: torch's SummaryWriter around it takes seconds to import
    writer = EventFileWriter(str(run.tensorboard))

    def hear(event: Event) -> None:
        p = event.state
        if event.kind == "log":
            rows = {"train/loss": p.loss, "train/lr": event.lr, "train/gradient": event.gradient}
            rows["train/tokens_per_second"] = event.tokens_per_second
        elif event.kind == "valid":
            rows = {f"valid/{name}": value for name, value in p.valid.items()}
        else:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in rows.items()]
        writer.add_event(Record(wall_time=time.time(), step=p.step, summary=Summary(value=values)))

    try:
        yield hear
    finally:
        writer.close()


def log_lines(write: Callable[[str], None]) -> Callback:
    """`| epoch   1 |   500/ 3125 steps | loss 7.29929 | ppl 1479.254`, for files and pipes."""

    def hear(event: Event) -> None:
        p = event.state
        place = f"| epoch {event.epoch:3d} | {p.step:5d}/{event.expected_steps:5d} steps"
        if event.kind == "log":
            speed = f"{event.tokens_per_second:,.0f} tokens/s | {clock(event.expected_seconds - p.seconds)} left"
            ppl = f" | ppl {perplexity(p.loss):8.3f}" if event.of_tokens else ""
            write(f"{place} | loss {p.loss:.5f}{ppl} | {speed}")
        elif event.kind == "valid":
            write(f"{place} | {summary(p.valid)}")

    return hear


@contextmanager
def progress_bar() -> Iterator[Callback]:
    """A bar on standard error with loss, perplexity, speed and time left; validations stay as lines above it."""
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
    shown = Progress(*columns, console=console)
    row = shown.add_task("", total=1, epoch=1, loss="loss -", speed="-", left="-:--")

    def hear(event: Event) -> None:
        shown.start()  # with the first step, not while text is still being read; it may be started again and again
        p = event.state
        left = clock(event.expected_seconds - p.seconds)
        shown.update(row, completed=p.step, total=event.expected_steps, epoch=event.epoch, left=left)
        if event.kind == "log":
            ppl = f" ppl {perplexity(p.loss):,.2f}" if event.of_tokens else ""  # a label has no perplexity
            shown.update(row, loss=f"loss {p.loss:.3f}{ppl}", speed=f"{event.tokens_per_second:,.0f}")
        elif event.kind == "valid":
            console.print(f"  step {p.step:5d}  {summary(p.valid)}")

    try:
        yield hear
    finally:
        shown.stop()


@contextmanager
def on_screen(*, quiet: bool) -> Iterator[list[Callback]]:
    """A bar on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        yield []
    elif sys.stderr.isatty():
        with progress_bar() as callback:
            yield [callback]
    else:
        yield [log_lines(lambda line: print(line, file=sys.stderr, flush=True))]


@contextmanager
def one_line(*, quiet: bool) -> Iterator[list[Callback]]:
    """For many short runs in a row: on a terminal a line that is written over, elsewhere nothing."""
    if quiet or not sys.stderr.isatty():
        yield []
        return

    def hear(event: Event) -> None:
        step, every = event.state.step, event.expected_steps
        if event.kind == "step":
            left = clock(event.expected_seconds - event.state.seconds)
            text = f"         step {step:,} of {every:,}, {left} left" if step < every else ""
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    try:
        yield [hear]
    finally:
        sys.stderr.write("\r\x1b[K")


def summary(metrics: dict[str, float], intervals: Mapping[str, Sequence[float]] | None = None) -> str:
    """`valid loss 3.210 | valid ppl 24.779 | bits per byte 1.502`: one number once, by its fullest name.

    With intervals, `valid loss 3.210 (3.151 to 3.272) | ...`.
    """
    around = {name: f" ({low:.3f} to {high:.3f})" for name, (low, high) in (intervals or {}).items()}
    short = {"loss": "valid loss", "perplexity": "valid ppl", "bits_per_byte": "bits per byte"}
    short |= {"causal_perplexity": "causal ppl", "masked_perplexity": "masked ppl", "next_accuracy": "next accuracy"}
    short |= {"forward_perplexity": "forward ppl", "backward_perplexity": "backward ppl"}
    twice = {"perplexity"} if {"causal_perplexity", "forward_perplexity"} & metrics.keys() else set()
    shown = {name: value for name, value in metrics.items() if name not in twice | {"next_loss"}}
    return " | ".join(f"{short.get(name, name)} {value:.3f}{around.get(name, '')}" for name, value in shown.items())


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
