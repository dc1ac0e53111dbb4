"""Times optimizer steps of the real training loop, without validation and checkpoints."""

import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from headstock import config
from headstock.data.token_store import SplitStores
from headstock.kernels.fp8 import supports_fp8
from headstock.planner.machine import synchronize
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.models import blueprint
from headstock.train.peak_memory import PeakMemory
from headstock.train.resolve import with_direction
from headstock.train.settings import RunConfig, make_config, read_preset

WARMUP_STEPS = 3  # not timed; a compiled model is compiled in the first
NEVER = 10**9  # steps: no validation or checkpoint between timed steps


@dataclass(frozen=True)
class Workload:
    """A model and its batch shape."""

    preset: str
    rows: int
    length: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.rows} x {self.length}{', fp8' if self.is_fp8 else ''}"

    @property
    def is_fp8(self) -> bool:
        return self.settings.get("train.dtype") == "float8"


WORKLOADS = {
    "cpu": (
        Workload("gpt-nano", 8, 256, {}),
        Workload("modern-nano", 8, 256, {}),
        Workload("bert-nano", 16, 128, {}),
        Workload("lstm-nano", 8, 256, {}),
    ),
    "cuda": (
        Workload("gpt-base", 64, 1024, {"train.compile": True}),
        Workload("bert-base", 256, 128, {"train.compile": True}),
        Workload("modern-small", 128, 512, {"train.compile": True}),
        Workload("gpt-nano", 64, 256, {}),
        Workload("gpt-base", 64, 1024, {"train.compile": True, "train.dtype": "float8"}),
    ),
}
QUICK = Workload("gpt-nano", 2, 64, {"model.depth": 2, "model.width": 32, "model.hidden": 64})


@dataclass(frozen=True)
class StepTiming:
    seconds: float  # median of one step
    tokens: float  # per step
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def workloads_for(device: torch.device, *, quick: bool) -> tuple[Workload, ...]:
    """The workloads of a device that it supports."""
    if quick:
        return (QUICK,)
    workloads = WORKLOADS.get(device.type, WORKLOADS["cpu"])
    return tuple(workload for workload in workloads if not workload.is_fp8 or supports_fp8(device))


def workload_config(workload: Workload) -> RunConfig:
    tree = read_preset(workload.preset)
    for key, value in workload.settings.items():
        section, _, name = key.partition(".")
        tree[section] |= {name: value}
    tree = config.merge(tree, {"model": {"vocabulary": tree["tokenizer"]["vocabulary"]}})
    tree["train"] |= {"batch": workload.rows, "length": workload.length}
    return make_config(with_direction(tree))


def time_steps(run_config: RunConfig, stores: SplitStores, device: torch.device, *, steps: int) -> StepTiming:
    """Train for a few steps and take the median time of those after the warm-up."""
    model, task = blueprint(run_config, weights=True)
    settings = replace(
        run_config.train,
        steps=WARMUP_STEPS + steps,
        validate_every=NEVER,
        valid_tokens=1,  # a run always validates at its end
        checkpoint_every=NEVER,
        log_every=NEVER,
        weights="last",
    )
    times: list[tuple[float, int]] = []  # after each step: the clock, and the tokens so far

    def record_time(event: Event) -> None:
        if event.kind == "step":
            synchronize(device)
            times.append((time.perf_counter(), event.state.tokens))

    peak = PeakMemory(device)
    train(model, task, stores, settings, run=None, distributed=DistributedContext(device), callbacks=[record_time])
    timed = times[WARMUP_STEPS - 1 :]
    seconds = statistics.median(after[0] - before[0] for before, after in pairwise(timed))
    return StepTiming(seconds, (timed[-1][1] - timed[0][1]) / (len(timed) - 1), peak.bytes())
