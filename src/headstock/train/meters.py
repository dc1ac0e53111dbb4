"""Running training statistics: mean loss and throughput of a log window, training metrics, and loss spikes."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from headstock.tasks.base import Task
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext

logger = logging.getLogger(__name__)

WINDOW = 64  # steps that a new one is compared with
MIN_STEPS = 32  # before anything counts as a spike
DEVIATIONS = 10.0  # above the median, in median absolute deviations scaled to a standard deviation,
RATIO = {"loss": 1.3, "gradient norm": 5.0}  # and at least this multiple of the median
MAX_REPORTED = 5  # spikes that are logged individually; all are counted


class SpikeDetector:
    """Compares each step's loss and gradient norm with a robust range of the last `WINDOW` steps."""

    def __init__(self, count: int = 0):
        self.count = count
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in RATIO}

    def add(self, step: int, loss: float, gradient_norm: float) -> None:
        spikes = []
        for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
            recent = self.recent[name]
            if len(recent) >= MIN_STEPS and (center := median(recent)) and value > self.limit(name, center):
                spikes.append(f"{name} {value:.4g} against a median of {center:.4g}")
            recent.append(value)
        if spikes:
            self.count += 1
            if self.count <= MAX_REPORTED:
                note = "; further spikes are only counted" if self.count == MAX_REPORTED else ""
                logger.info(f"spike at step {step}: {', '.join(spikes)} over the previous {WINDOW} steps{note}")

    def limit(self, name: str, center: float) -> float:
        deviation = 1.4826 * median(abs(value - center) for value in self.recent[name])
        return max(center + DEVIATIONS * deviation, RATIO[name] * center)

    def state(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.recent.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, values in state.items():
            self.recent[name].extend(values)


class LossMeter:
    """Mean loss and throughput since the last log line.

    A GPU's loss is copied asynchronously and read one step later, so that the CPU does not wait for the GPU. For a
    loss or gradient norm that is not finite, `diverged` is called with its step.
    """

    def __init__(self, diverged: Callable[[int], None], spikes: SpikeDetector | None = None) -> None:
        self.diverged, self.spikes = diverged, spikes
        self.pending: tuple[int, Tensor, Any] | None = None  # step, (loss, gradient norm), CUDA event of the copy
        self.paused_at = 0.0
        self.reset()

    def reset(self) -> None:
        self.total, self.steps, self.tokens, self.since = 0.0, 0, 0, time.monotonic()

    def add(self, step: int, loss: Tensor, gradient_norm: Tensor, tokens: int) -> None:
        self.tokens += tokens
        values = torch.stack([loss.detach(), gradient_norm.detach().to(loss)])
        if not loss.is_cuda:
            self.pending = (step, values, None)
            self.flush()
            return
        copy, copied = values.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        self.flush()
        self.pending = (step, copy, copied)

    def flush(self) -> None:
        """Account for the step whose values are still being copied."""
        if self.pending is None:
            return
        step, values, copied = self.pending
        self.pending = None
        if copied is not None:
            copied.synchronize()
        loss, gradient_norm = values.tolist()
        self.total += loss
        self.steps += 1
        if not math.isfinite(loss + gradient_norm):
            self.diverged(step)
        elif self.spikes:
            self.spikes.add(step, loss, gradient_norm)

    def mean(self) -> float:
        return self.total / max(1, self.steps)

    def tokens_per_second(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.since)

    @contextmanager
    def pause(self, state: TrainState) -> Iterator[None]:
        """Exclude a validation or checkpoint from the throughput; its duration is added to the state's overhead."""
        self.paused_at = time.monotonic()
        yield
        seconds = time.monotonic() - self.paused_at
        self.since += seconds
        state.overhead_seconds += seconds

    def state(self) -> dict[str, Any]:
        """For a checkpoint, which is written during a pause."""
        self.flush()
        sums = {"total": self.total, "steps": self.steps, "tokens": self.tokens, "seconds": self.paused_at - self.since}
        return sums | {"spikes": self.spikes.state() if self.spikes else {}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.total, self.steps, self.tokens = state["total"], state["steps"], state["tokens"]
        self.since = time.monotonic() - state["seconds"]
        if self.spikes:
            self.spikes.restore(state.get("spikes", {}))


class MetricAccumulator:
    """Summed losses and counts of training batches, which give training metrics without another forward pass."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        for name, value in sums.items():
            # float64 sums of float32 losses are exact: neither a resume nor the number of processes changes them
            exact = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
            # a copy: a CUDA graph overwrites its outputs in the next step
            self.sums[name] = self.sums[name] + exact if name in self.sums else exact.clone()
        for head, count in counts.items():
            self.counts[head] = self.counts.get(head, 0) + count

    def state(self, distributed: DistributedContext) -> dict[str, Any]:
        """For a checkpoint: the exact sums over all processes with their dtypes, and the counts."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([self.sums[name].item() for name in names])
        dtypes = [str(self.sums[name].dtype).removeprefix("torch.") for name in names]
        return {"sums": dict(zip(names, zip(totals, dtypes, strict=True), strict=True)), "counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any], distributed: DistributedContext) -> None:
        """Continue from a checkpoint; rank 0 gets the sums of all processes."""
        self.counts = dict(state["counts"])
        self.sums = {
            name: torch.tensor(
                total if distributed.is_main else 0, dtype=getattr(torch, dtype), device=distributed.device
            )
            for name, (total, dtype) in state["sums"].items()
        }

    def score(self, task: Task, distributed: DistributedContext) -> dict[str, float]:
        """The task's metrics over all processes; resets the accumulator."""
        names = sorted(self.sums)
        totals = distributed.all_reduce([float(self.sums[name]) for name in names])
        counts, self.sums, self.counts = self.counts, {}, {}
        return task.score(dict(zip(names, totals, strict=True)), counts, size=0)
