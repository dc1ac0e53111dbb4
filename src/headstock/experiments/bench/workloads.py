"""Workloads of benchmarks: random text, labelled rows and token stores of any size, and timed optimizer steps."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstock import config
from headstock.data.token_shards import FORMAT, INDEX, LOCATION, SHARD_TOKENS, SplitWriter
from headstock.data.token_store import SplitStores, open_split_stores
from headstock.io import write_json
from headstock.kernels.fp8 import supports_fp8
from headstock.planner.machine import synchronize
from headstock.rng import generator
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.loop import train
from headstock.train.memory import PeakMemory
from headstock.train.models import blueprint, placeholder_tokenizer
from headstock.train.resolve import with_direction
from headstock.train.settings import RunConfig, make_config, read_preset

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS, LINE = 20_000, 18  # distinct words, and words per line
DOCUMENT = 120  # tokens per document
FIRST_TOKEN = 16  # lower ids are special tokens
CHUNK = 1 << 20  # tokens generated at a time
WARMUP_STEPS = 3  # not timed; a compiled model is compiled in the first
NEVER = 10**9  # steps: no validation or checkpoint between timed steps


# Random data


def random_lines(seed: int = 0) -> Iterator[str]:
    """An endless stream of lines of about 130 bytes; word frequencies follow Zipf's law."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, range(26, 0, -1), k=rng.randint(2, 10))) for _ in range(WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    while True:
        text = rng.choices(words, cum_weights=weights, k=1000 * LINE)
        yield from (" ".join(text[i : i + LINE]) for i in range(0, len(text), LINE))


def write_corpus(path: Path, megabytes: float) -> Path:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for line in random_lines():
            size += file.write(line + "\n")
            if size >= megabytes * 1e6:
                return path
    raise AssertionError("random_lines is endless")


def write_labelled_rows(path: Path, count: int) -> Path:
    """A CSV file of labelled texts of 4 to 60 words."""
    rng, lines = random.Random(1), random_lines(1)
    rows = ["text,label"]
    for number in range(count):
        words = " ".join(next(lines) for _ in range(4)).split()
        rows.append(f"{' '.join(words[: rng.randint(4, 60)])},{('bad', 'good')[number % 2]}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_token_stores(folder: Path, megabytes: float, *, vocabulary: int) -> SplitStores:
    """A token store of the given size at two bytes per token, and a small validation store."""
    folder.mkdir(parents=True)
    eos = placeholder_tokenizer().eos or 0
    dtype = np.dtype("<u2")
    splits = {name: SplitWriter(folder, name, dtype, SHARD_TOKENS) for name in ("train", "valid")}
    for name, size in (("train", megabytes * 1e6 / 2), ("valid", 20_000)):
        remaining, part = int(size), 0
        while remaining > 0:
            tokens = generator(0, part, name).integers(FIRST_TOKEN, vocabulary, min(remaining, CHUNK), dtype=np.uint16)
            tokens[DOCUMENT - 1 :: DOCUMENT] = tokens[-1] = eos
            lengths = np.diff(np.flatnonzero(tokens == eos), prepend=-1)
            locations = np.zeros(len(lengths), LOCATION)
            locations["bytes"] = 4 * lengths
            splits[name].write(tokens, lengths, locations)
            remaining, part = remaining - len(tokens), part + 1
        splits[name].close()
    index = {"format": FORMAT, "fingerprint": "made-up", "tokenizer": "made-up", "vocabulary": vocabulary, "end": eos}
    index |= {"dtype": dtype.str, "sources": ["made up"], "empty": 0, "sides": list(splits), "summary": {}}
    write_json(folder / INDEX, index | {name: writer.counts() for name, writer in splits.items()})
    return open_split_stores(folder)


# Training


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
