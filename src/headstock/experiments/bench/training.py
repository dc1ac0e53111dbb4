"""How many tokens a second the real training loop reads, with all it does in a run but validations and checkpoints."""

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headstock import config
from headstock.data.token_store import SplitStores
from headstock.experiments.bench.measurement import Measurement
from headstock.experiments.bench.synthetic_data import write_token_stores
from headstock.kernels.fp8 import supports_fp8
from headstock.planner.machine import synchronize
from headstock.train.blueprint import blueprint
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.peak_memory import PeakMemory
from headstock.train.pretrain import with_direction
from headstock.train.settings import RunConfig, make_config, read_preset

WARM = 3  # steps that are left out; a compiled model is made in the first
ALONE = 10**9  # so that neither a validation nor a checkpoint falls between two steps


@dataclass(frozen=True)
class Workload:
    """What is trained, and in what steps."""

    preset: str
    rows: int
    length: int
    settings: dict[str, Any]

    @property
    def named(self) -> str:
        return f"{self.preset}, {self.rows} x {self.length}{', in 8 bits' if self.small else ''}"

    @property
    def small(self) -> bool:
        return self.settings.get("train.dtype") == "float8"


SHAPES = {
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
    seconds: float  # of the middle step, by the clock
    tokens: float  # in a step
    peak: int  # bytes

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def shapes(device: torch.device, *, quick: bool) -> tuple[Workload, ...]:
    """Those that are worth measuring there, and can be."""
    if quick:
        return (QUICK,)
    every = SHAPES.get(device.type, SHAPES["cpu"])
    return tuple(shape for shape in every if not shape.small or supports_fp8(device))


def bench_training(device: torch.device, *, quick: bool) -> list[Measurement]:
    """One line a shape."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(shapes(device, quick=quick)):
            chosen = settings_of(shape)
            stores = write_token_stores(
                Path(folder) / str(number), 0.2 if quick else 20, vocabulary=chosen.model.vocabulary
            )
            steps = measure(chosen, stores, device, steps=6 if quick else 20)
            found.append(Measurement(f"training {shape.named}", steps.speed, "tokens/s"))
    return found


def settings_of(shape: Workload) -> RunConfig:
    tree = read_preset(shape.preset)
    for key, value in shape.settings.items():
        section, _, name = key.partition(".")
        tree[section] |= {name: value}
    tree = config.merge(tree, {"model": {"vocabulary": tree["tokenizer"]["vocabulary"]}})
    tree["train"] |= {"batch": shape.rows, "length": shape.length}
    return make_config(with_direction(tree))


def measure(chosen: RunConfig, stores: SplitStores, device: torch.device, *, steps: int) -> StepTiming:
    """The middle of the steps after the first few."""
    model, task = blueprint(chosen, weights=True)
    settings = replace(
        chosen.train,
        steps=WARM + steps,
        validate_every=ALONE,
        valid_tokens=1,  # at the end of a run there is a validation in any case
        checkpoint_every=ALONE,
        log_every=ALONE,
        weights="last",
    )
    moments: list[tuple[float, int]] = []

    def hear(event: Event) -> None:
        if event.kind == "step":
            synchronize(device)
            moments.append((time.perf_counter(), event.state.tokens))

    peak = PeakMemory(device)
    train(model, task, stores, settings, run=None, distributed=DistributedContext(device), callbacks=[hear])
    kept = moments[WARM - 1 :]
    clock = statistics.median(after[0] - before[0] for before, after in pairwise(kept))
    return StepTiming(clock, (kept[-1][1] - kept[0][1]) / (len(kept) - 1), peak.bytes())
