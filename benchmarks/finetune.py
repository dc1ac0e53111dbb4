"""Fine-tuning speed of a classifier on the CPU, relative to transformers' Trainer, and the cost of a frozen epoch.

    python benchmarks/finetune.py                                             on the catalog's French book reviews
    python benchmarks/finetune.py --data data/cls-books/train.review.spm      on your own labelled file
    python benchmarks/finetune.py --rows 1600 --threads 1

All sides run alternately in one process with the same threads, after a warm-up; each step counts at its fastest. Both
models are BERTs of the same shape in float32 with the same dropout, AdamW, clipping and schedule, and train on the same
rows with the same batch size for as many steps. No validation, checkpoint or log is timed. Throughput counts real
tokens, not padding.

The Trainer has fused AdamW, SDPA attention and dynamic padding; a second row of the table adds its optional grouping by
length. It needs the package `accelerate`. Without it, the peer is the same model in a bare training loop with the same
samplers and collator.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from headstock.data.labelled_texts import read_records
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from headstock.errors import HeadstockError
from headstock.logs import messages_to
from headstock.tasks.class_labels import find_classes
from headstock.tasks.classify import Classify
from headstock.tasks.labelled import EncodedRows
from headstock.train.distributed import DistributedContext
from headstock.train.fit import EncodedSplits, fit
from headstock.train.labelled_data import require_labels, subset
from headstock.train.sampler import BatchSampler
from headstock.train.settings import RunConfig, make_config

CATALOG = "catalog:cls-books/train.csv"
VOCABULARY, CONTEXT, DEPTH, WIDTH, HEADS, HIDDEN = 16_000, 256, 4, 256, 4, 1024
LR, WEIGHT_DECAY, WARMUP, BETA2, CLIP = 3e-4, 0.01, 0.1, 0.999, 1.0
NEVER = 10**9
FROZEN_EPOCHS = 20  # a single one is too short to be timed
LOG_LENGTH, LOG_DEVIATION = 4.61, 0.77  # mean and deviation of the logarithm of a review's length in tokens
Rows = list[dict[str, Any]]
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None


@dataclass(frozen=True)
class Workload:
    tokenizer: Tokenizer
    classes: tuple[str, ...]
    train: EncodedRows
    description: str  # of the rows
    batch: int
    dropout: float

    @property
    def epoch(self) -> int:
        """Steps per epoch."""
        return len(self.train.tokens) // self.batch


@dataclass(frozen=True)
class Timing:
    """One or more epochs, without the first step."""

    steps: list[float]  # seconds of each step
    tokens: int  # without padding; 0 for a frozen backbone, whose features are cached
    positions: int  # with padding
    epochs: int = 1
    caching: float = 0.0  # seconds to compute the features of a frozen backbone, before the first step

    @property
    def seconds(self) -> float:
        return sum(self.steps) / self.epochs

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.positions


def fastest_steps(passes: list[Timing]) -> Timing:
    """Each step at its fastest over all rounds, since other programs may slow some of them down."""
    if len({(timing.tokens, timing.positions) for timing in passes}) > 1:  # not the same batches
        return min(passes, key=lambda timing: timing.seconds)
    steps = [min(times) for times in zip(*(timing.steps for timing in passes), strict=True)]
    return replace(passes[0], steps=steps, caching=min(timing.caching for timing in passes))


# Data


def load_workload(data: str | None, rows: int, batch: int, dropout: float) -> Workload:
    """Labelled rows from a file, or random ones of realistic lengths if the catalog cannot be downloaded."""
    rows -= rows % batch  # full batches only
    try:
        records = require_labels(read_records(data or CATALOG), "label", "to train on")
    except HeadstockError as error:
        if data is not None:
            raise
        print(f"{CATALOG} is not available ({error}): using random tokens", file=sys.stderr)
        return random_workload(rows, batch, dropout)
    tokenizer = train_tokenizer(records.display_texts, TokenizerSettings(vocabulary=VOCABULARY))
    classes = find_classes(records, None)
    train = make_task(tokenizer, classes).prepare(subset(records, rows, seed=0))
    return Workload(tokenizer, classes, train, f"of {len(records):,} in {records.source}", batch, dropout)


def random_workload(rows: int, batch: int, dropout: float) -> Workload:
    generator = np.random.default_rng(0)
    lengths = np.maximum(9, generator.lognormal(LOG_LENGTH, LOG_DEVIATION, rows).astype(int))
    tokens = [generator.integers(16, VOCABULARY, length).tolist() for length in lengths]
    tokenizer = train_tokenizer(["un livre"], TokenizerSettings(vocabulary=300))  # only its special tokens are used
    sources = [f"row {i}" for i in range(rows)]
    train = EncodedRows(tokens, generator.integers(0, 2, rows), sources)
    return Workload(tokenizer, ("0", "1"), train, "of random tokens with realistic lengths", batch, dropout)


def make_task(tokenizer: Tokenizer, classes: tuple[str, ...]) -> Classify:
    return Classify(Classify.Config(classes=classes, pool="cls", opening="cls"), tokenizer)


# Headstock


def make_run_config(workload: Workload, *, steps: int, freeze: bool) -> RunConfig:
    model = {
        "vocabulary": VOCABULARY,
        "context": CONTEXT,
        "depth": DEPTH,
        "width": WIDTH,
        "heads": HEADS,
        "hidden": HIDDEN,
        "dropout": workload.dropout,
        "inner_dropout": False,  # as BERT
        "norm": "post",
        "positions": "learned",
        "activation": "gelu",
        "segments": 2,
        "embed_norm": True,
        "causal": False,
    }
    task = {"name": "classify", "classes": list(workload.classes), "pool": "cls", "opening": "cls"}
    train = {
        "steps": steps,
        "batch": workload.batch,
        "lr": LR,
        "schedule": "linear",
        "warmup": WARMUP,
        "beta2": BETA2,
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "dtype": "float32",
        "weights": "last",
        "validate_every": NEVER,
        "checkpoint_every": NEVER,
        "log_every": NEVER,
    }
    transfer = {"run": "none", "init": "scratch", "freeze": freeze}
    return make_config({"model": model, "task": task, "data": {}, "transfer": transfer, "train": train})


def time_headstock(workload: Workload, steps: int, *, freeze: bool = False) -> Timing:
    """`fit` as `headstock finetune` calls it, without a run folder."""
    config = make_run_config(workload, steps=steps, freeze=freeze)
    task = Classify(config.task, workload.tokenizer)
    timestamps: list[tuple[float, int]] = []
    notified: list[float] = []

    def on_event(event: Any) -> None:
        if event.kind == "step":
            timestamps.append((time.perf_counter(), event.state.tokens))

    def on_message(line: str) -> None:  # logged when the features of a frozen backbone are computed
        notified.append(time.perf_counter())

    # the loop validates after the last step, which is not timed
    data = EncodedSplits(workload.train, workload.train.select(range(workload.batch)))
    distributed = DistributedContext(torch.device("cpu"))
    with messages_to(on_message):
        result = fit(config, task, None, data, run=None, distributed=distributed, callbacks=[on_event])
    seconds = [after - before for (before, _), (after, _) in pairwise(timestamps)]
    if freeze:
        return Timing(seconds, 0, 0, epochs=FROZEN_EPOCHS, caching=timestamps[0][0] - notified[0])
    # batches are a function of the seed, so their padding can be counted afterwards
    sampler = BatchSampler(result.task, workload.train, length=CONTEXT, batch=workload.batch, seed=config.train.seed)
    batches = [sampler.micro_batches(step, size=None, rank=0, world_size=1)[0] for step in range(1, steps)]
    return Timing(seconds, timestamps[-1][1] - timestamps[0][1], sum(batch.tokens.numel() for batch in batches))


# transformers


class CountingCollator:
    """Pads a batch to its longest row and counts its tokens, without and with padding."""

    def __init__(self, tokenizer: Tokenizer):
        library = tokenizers.Tokenizer.from_str(tokenizer.backend.to_json())
        padding = tokenizer.id_to_token(tokenizer.pad or 0)
        self.collate = DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=library, pad_token=padding))
        self.tokens: list[int] = []
        self.positions: list[int] = []

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        batch = self.collate(rows)
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        self.positions.append(batch["input_ids"].numel())
        return batch


class StepTimer(TrainerCallback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.timestamps: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.timestamps.append(time.perf_counter())


def make_bert(workload: Workload) -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": DEPTH,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "hidden_dropout_prob": workload.dropout,
        "attention_probs_dropout_prob": workload.dropout,
        "classifier_dropout": 0.1,  # as before our head
        "num_labels": len(workload.classes),
        "pad_token_id": workload.tokenizer.pad or 0,
        "attn_implementation": "sdpa",
    }
    return BertForSequenceClassification(BertConfig(**shape))


def time_transformers(workload: Workload, steps: int, *, group_by_length: bool) -> Timing:
    task = make_task(workload.tokenizer, workload.classes)
    assert workload.train.labels is not None
    rows = [
        {"input_ids": task.sequences(tokens, CONTEXT)[0], "label": int(label)}
        for tokens, label in zip(workload.train.tokens, workload.train.labels, strict=True)
    ]
    collate, timer = CountingCollator(workload.tokenizer), StepTimer()
    (run_trainer if HAS_TRAINER else run_loop)(workload, rows, collate, timer, steps, group_by_length)
    counted = slice(1, steps)  # the Trainer may prefetch one batch more
    seconds = [after - before for before, after in pairwise(timer.timestamps)]
    return Timing(seconds, sum(collate.tokens[counted]), sum(collate.positions[counted]))


def run_trainer(
    workload: Workload, rows: Rows, collate: CountingCollator, timer: StepTimer, steps: int, group_by_length: bool
) -> None:
    settings: dict[str, Any] = {}
    if group_by_length:  # renamed in newer versions
        renamed = "train_sampling_strategy" in {part.name for part in fields(TrainingArguments)}
        settings = {"train_sampling_strategy": "group_by_length"} if renamed else {"group_by_length": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # defaults: a linear schedule, no evaluation, no workers
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=workload.batch,
            learning_rate=LR,
            warmup_steps=round(WARMUP * steps),
            weight_decay=WEIGHT_DECAY,
            adam_beta2=BETA2,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        trainer = Trainer(make_bert(workload), arguments, collate, rows, callbacks=[timer])
        trainer.remove_callback(PrinterCallback)  # it prints into our table
        trainer.train()


def run_loop(
    workload: Workload, rows: Rows, collate: CountingCollator, timer: StepTimer, steps: int, group_by_length: bool
) -> None:
    model = make_bert(workload).train()
    sampler = LengthGroupedSampler(workload.batch, dataset=rows) if group_by_length else RandomSampler(rows)
    loader: DataLoader[Any] = DataLoader(rows, workload.batch, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, BETA2), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)
    for _, batch in zip(range(steps), repeat_forever(loader), strict=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        timer.on_step_end()


def repeat_forever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# Output


def measure(workload: Workload, repeats: int) -> dict[str, Timing]:
    """The fastest steps of each side, which are timed alternately."""
    peer = "transformers, Trainer" if HAS_TRAINER else "transformers, bare loop"
    sides: dict[str, Callable[[int], Timing]] = {
        "headstock": lambda steps: time_headstock(workload, steps),
        peer: lambda steps: time_transformers(workload, steps, group_by_length=False),
        "the same, grouped by length": lambda steps: time_transformers(workload, steps, group_by_length=True),
    }
    for side in sides.values():
        side(2)  # warm-up
    sides["headstock, frozen"] = lambda steps: time_headstock(workload, FROZEN_EPOCHS * (steps - 1) + 1, freeze=True)
    rounds = [{name: side(workload.epoch + 1) for name, side in sides.items()} for _ in range(repeats)]
    return {name: fastest_steps([results[name] for results in rounds]) for name in sides}


def print_results(timings: dict[str, Timing]) -> dict[str, Any]:
    """Print the table; returns the values for JSON."""
    ours, peer, grouped, frozen = timings.values()
    print(f"{'':28} {'real tokens/s':>14} {'padding':>8} {'s/epoch':>11} {'speedup':>11}")
    for name, timing in timings.items():
        columns = f"{name:28} " + (f"{timing.speed:>14,.0f} {timing.padding:>8.1%}" if timing.tokens else f"{'':23}")
        ratio = ours.seconds / timing.seconds if timing is frozen else ours.speed / timing.speed
        print(f"{columns} {timing.seconds:>11.3f} " + ("" if timing is ours else f"{ratio:>10.2f}x"))
    speedup = ours.seconds / frozen.seconds
    print(f"a frozen epoch is {speedup:,.0f} times cheaper than a full one (its features took {frozen.caching:.1f} s)")
    return {
        "peer": list(timings)[1],
        "tokens_per_second": {"ours": ours.speed, "peer": peer.speed, "peer_grouped": grouped.speed},
        "padding": {"ours": ours.padding, "peer": peer.padding, "peer_grouped": grouped.padding},
        "ratio": ours.speed / peer.speed,
        "ratio_grouped": ours.speed / grouped.speed,
        "epoch_seconds": ours.seconds,
        "frozen_epoch_seconds": frozen.seconds,
        "frozen_caching_seconds": frozen.caching,
        "frozen_cheaper": speedup,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help=f"labelled file (default: {CATALOG})")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.rows < args.batch:
        parser.error(f"--rows {args.rows}: must be at least one batch of {args.batch}")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    try:
        workload = load_workload(args.data, args.rows, args.batch, args.dropout)
    except HeadstockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    print(f"{DEPTH} layers x {WIDTH} wide, vocabulary {VOCABULARY}, context {CONTEXT}, dropout {workload.dropout}")
    print(f"{len(workload.train.tokens)} rows {workload.description}, batch size {workload.batch}")
    if not HAS_TRAINER:
        print("`accelerate` is not installed, so the peer is a bare loop instead of the Trainer")
    print(json.dumps(print_results(measure(workload, args.repeats))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
