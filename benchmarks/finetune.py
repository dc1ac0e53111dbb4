"""How fast a classifier is fine-tuned on the CPU, to transformers' Trainer, and what an epoch of a frozen one costs.

    python benchmarks/finetune.py                                             on the catalog's French book reviews
    python benchmarks/finetune.py --data data/cls-books/train.review.spm      on a labelled file of yours
    python benchmarks/finetune.py --rows 1600 --threads 1

All sides run in one process, with the same threads, in turns, after a warm-up; the table shows each step at its
fastest. Both models are a BERT of the same depth, width, heads, hidden, vocabulary and context, in single precision,
with dropout in the same places and to the same share, AdamW, clipping and schedule; both read the same rows, as many at
a time, for as many steps. Nothing is validated, written or logged between two steps that are timed. Speed is told in
real tokens, without the padding.

The Trainer has its fused AdamW, sdpa attention and padding to the longest row of a batch; its own grouping by length,
which is off unless asked for, stands in a line of its own.

The Trainer needs the package `accelerate`. Where that is missing, the peer is the same model in a bare loop of
forward, backward, clipping and step with the same samplers and collator: the Trainer's work without its bookkeeping.
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
from headstock.tasks.classify import Classify, EncodedTexts
from headstock.train.distributed import DistributedContext
from headstock.train.fit import LabelledData, fit
from headstock.train.labelled_data import require_labels, subset
from headstock.train.sampler import BatchSampler
from headstock.train.settings import RunConfig, make_config

CATALOG = "catalog:cls-books/train.csv"
VOCABULARY, CONTEXT, DEPTH, WIDTH, HEADS, HIDDEN = 16_000, 256, 4, 256, 4, 1024
LR, WEIGHT_DECAY, WARMUP, BETA2, CLIP = 3e-4, 0.01, 0.1, 0.999, 1.0
NEVER = 10**9
FROZEN_EPOCHS = 20  # one alone is too short to be timed
LOG_LENGTH, LOG_SPREAD = 4.61, 0.77  # mean and deviation of the logarithm of a review's length in tokens
Rows = list[dict[str, Any]]
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None


@dataclass(frozen=True)
class Work:
    """What all sides are given."""

    tokenizer: Tokenizer
    classes: tuple[str, ...]
    train: EncodedTexts
    named: str  # which rows they are, in words
    batch: int
    dropout: float

    @property
    def epoch(self) -> int:
        """Steps in a pass over the rows."""
        return len(self.train.tokens) // self.batch


@dataclass(frozen=True)
class Timed:
    """A pass over the rows, or several: all steps but a first one, which is not timed."""

    steps: list[float]  # seconds of each
    tokens: int  # padding not counted; a frozen model reads none
    places: int  # padding counted
    epochs: int = 1
    reading: float = 0.0  # seconds in which a frozen backbone read the texts, before the first step

    @property
    def seconds(self) -> float:
        return sum(self.steps) / self.epochs

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.places


def best_of(passes: list[Timed]) -> Timed:
    """Each step at its fastest, as a side takes the same steps every time but others are at work on the machine too."""
    if len({(one.tokens, one.places) for one in passes}) > 1:  # not the same steps after all
        return min(passes, key=lambda one: one.seconds)
    steps = [min(times) for times in zip(*(one.steps for one in passes), strict=True)]
    return replace(passes[0], steps=steps, reading=min(one.reading for one in passes))


# The rows


def gather(data: str | None, rows: int, batch: int, dropout: float) -> Work:
    """Labelled rows from a file, or made-up ones of real lengths where the catalog's are not to be had."""
    rows -= rows % batch  # all steps alike
    try:
        records = require_labels(read_records(data or CATALOG), "label", "to train on")
    except HeadstockError as wrong:
        if data is not None:
            raise
        print(f"{CATALOG} is not to be had ({wrong}), so the tokens are made up", file=sys.stderr)
        return made_up(rows, batch, dropout)
    tokenizer = train_tokenizer(records.display_texts, TokenizerSettings(vocabulary=VOCABULARY))
    classes = find_classes(records, None)
    train = task_of(tokenizer, classes).prepare(subset(records, rows, seed=0))
    return Work(tokenizer, classes, train, f"of {len(records):,} in {records.source}", batch, dropout)


def made_up(rows: int, batch: int, dropout: float) -> Work:
    draw = np.random.default_rng(0)
    lengths = np.maximum(9, draw.lognormal(LOG_LENGTH, LOG_SPREAD, rows).astype(int))
    tokens = [draw.integers(16, VOCABULARY, length).tolist() for length in lengths]
    tokenizer = train_tokenizer(["un livre"], TokenizerSettings(vocabulary=300))  # asked for its special tokens only
    places = [f"row {i}" for i in range(rows)]
    train = EncodedTexts(tokens, draw.integers(0, 2, rows), places, bytes=0)
    return Work(tokenizer, ("0", "1"), train, "made up, in lengths drawn like those of the reviews", batch, dropout)


def task_of(tokenizer: Tokenizer, classes: tuple[str, ...]) -> Classify:
    return Classify(Classify.Config(classes=classes, pool="cls", opening="cls"), tokenizer)


# Our side


def our_settings(work: Work, *, steps: int, freeze: bool) -> RunConfig:
    model = {
        "vocabulary": VOCABULARY,
        "context": CONTEXT,
        "depth": DEPTH,
        "width": WIDTH,
        "heads": HEADS,
        "hidden": HIDDEN,
        "dropout": work.dropout,
        "inner_dropout": False,  # as BERT
        "norm": "post",
        "positions": "learned",
        "activation": "gelu",
        "segments": 2,
        "embed_norm": True,
        "causal": False,
    }
    task = {"name": "classify", "classes": list(work.classes), "pool": "cls", "opening": "cls"}
    train = {
        "steps": steps,
        "batch": work.batch,
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


def ours(work: Work, steps: int, *, freeze: bool = False) -> Timed:
    """`fit` as `headstock finetune` calls it, less its folder."""
    chosen = our_settings(work, steps=steps, freeze=freeze)
    moments: list[tuple[float, int]] = []
    asked: list[float] = []

    def hear(event: Any) -> None:
        if event.kind == "step":
            moments.append((time.perf_counter(), event.state.tokens))

    def note(line: str) -> None:  # said when the frozen backbone begins to read
        asked.append(time.perf_counter())

    # the loop validates when it ends, which is after the last step and so not timed
    data = LabelledData(work.train, work.train.select(range(work.batch)))
    distributed = DistributedContext(torch.device("cpu"))
    task = Classify(chosen.task, work.tokenizer)
    with messages_to(note):
        fitted = fit(chosen, task, None, data, run=None, distributed=distributed, callbacks=[hear])
    seconds = [after - before for (before, _), (after, _) in pairwise(moments)]
    if freeze:
        return Timed(seconds, 0, 0, epochs=FROZEN_EPOCHS, reading=moments[0][0] - asked[0])
    # which rows a step reads is a function of the seed, so what they were padded to can be asked afterwards
    order = BatchSampler(fitted.task, work.train, length=CONTEXT, batch=work.batch, seed=chosen.train.seed)
    batches = [order.micro_batches(step, size=None, rank=0, world_size=1)[0] for step in range(1, steps)]
    return Timed(seconds, moments[-1][1] - moments[0][1], sum(batch.tokens.numel() for batch in batches))


# Their side


class Counting:
    """Pads the rows of a batch to the longest of them, and remembers how many tokens it had, and places."""

    def __init__(self, tokenizer: Tokenizer):
        library = tokenizers.Tokenizer.from_str(tokenizer.backend.to_json())
        padding = tokenizer.id_to_token(tokenizer.pad or 0)
        self.collate = DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=library, pad_token=padding))
        self.tokens: list[int] = []
        self.places: list[int] = []

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        batch = self.collate(rows)
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        self.places.append(batch["input_ids"].numel())
        return batch


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self.moments.append(time.perf_counter())


def their_model(work: Work) -> BertForSequenceClassification:
    torch.manual_seed(0)
    # a dictionary, as the class takes more than its signature says
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": DEPTH,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "hidden_dropout_prob": work.dropout,
        "attention_probs_dropout_prob": work.dropout,
        "classifier_dropout": 0.1,  # ours has that much before its head
        "num_labels": len(work.classes),
        "pad_token_id": work.tokenizer.pad or 0,
        "attn_implementation": "sdpa",
    }
    return BertForSequenceClassification(BertConfig(**shape))


def theirs(work: Work, steps: int, *, grouped: bool) -> Timed:
    task = task_of(work.tokenizer, work.classes)
    assert work.train.labels is not None
    rows = [
        {"input_ids": task.rows(tokens, CONTEXT)[0], "label": int(label)}
        for tokens, label in zip(work.train.tokens, work.train.labels, strict=True)
    ]
    collate, clock = Counting(work.tokenizer), Clock()
    (by_trainer if HAS_TRAINER else by_bare_loop)(work, rows, collate, clock, steps, grouped)
    timed = slice(1, steps)  # the Trainer may have padded a batch more than it trained on
    seconds = [after - before for before, after in pairwise(clock.moments)]
    return Timed(seconds, sum(collate.tokens[timed]), sum(collate.places[timed]))


def by_trainer(work: Work, rows: Rows, collate: Counting, clock: Clock, steps: int, grouped: bool) -> None:
    settings: dict[str, Any] = {}
    if grouped:  # newer versions call it so
        newer = "train_sampling_strategy" in {part.name for part in fields(TrainingArguments)}
        settings = {"train_sampling_strategy": "group_by_length"} if newer else {"group_by_length": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # the rest is as it comes: a linear schedule, no evaluation, no workers
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=work.batch,
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
        trainer = Trainer(their_model(work), arguments, collate, rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)  # it prints into our table
        trainer.train()


def by_bare_loop(work: Work, rows: Rows, collate: Counting, clock: Clock, steps: int, grouped: bool) -> None:
    model = their_model(work).train()
    sampler = LengthGroupedSampler(work.batch, dataset=rows) if grouped else RandomSampler(rows)
    loader: DataLoader[Any] = DataLoader(rows, work.batch, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, BETA2), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)
    for _, batch in zip(range(steps), again_and_again(loader), strict=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        clock.on_step_end()


def again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# The table


def measure(work: Work, repeats: int) -> dict[str, Timed]:
    """A pass of each side at its best; they take turns."""
    peer = "transformers, Trainer" if HAS_TRAINER else "transformers, bare loop"
    sides: dict[str, Callable[[int], Timed]] = {
        "headstock": lambda steps: ours(work, steps),
        peer: lambda steps: theirs(work, steps, grouped=False),
        "the same, grouped by length": lambda steps: theirs(work, steps, grouped=True),
    }
    for side in sides.values():
        side(2)  # the warm-up
    sides["headstock, frozen"] = lambda steps: ours(work, FROZEN_EPOCHS * (steps - 1) + 1, freeze=True)
    turns = [{name: side(work.epoch + 1) for name, side in sides.items()} for _ in range(repeats)]
    return {name: best_of([turn[name] for turn in turns]) for name in sides}


def show(best: dict[str, Timed]) -> dict[str, Any]:
    """Print the table; the same as plain values."""
    mine, plain, grouped, frozen = best.values()
    print(f"{'':28} {'real tokens/s':>14} {'padding':>8} {'s an epoch':>11} {'ours to it':>11}")
    for name, timed in best.items():
        told = f"{name:28} " + (f"{timed.speed:>14,.0f} {timed.padding:>8.1%}" if timed.tokens else f"{'':23}")
        ratio = mine.seconds / timed.seconds if timed is frozen else mine.speed / timed.speed
        print(f"{told} {timed.seconds:>11.3f} " + ("" if timed is mine else f"{ratio:>10.2f}x"))
    cheaper = mine.seconds / frozen.seconds
    print(f"a frozen epoch is {cheaper:,.0f} times cheaper than a full one (reading once took {frozen.reading:.1f} s)")
    return {
        "peer": list(best)[1],
        "tokens_per_second": {"ours": mine.speed, "peer": plain.speed, "peer_grouped": grouped.speed},
        "padding": {"ours": mine.padding, "peer": plain.padding, "peer_grouped": grouped.padding},
        "ratio": mine.speed / plain.speed,
        "ratio_grouped": mine.speed / grouped.speed,
        "epoch_seconds": mine.seconds,
        "frozen_epoch_seconds": frozen.seconds,
        "frozen_reading_seconds": frozen.reading,
        "frozen_cheaper": cheaper,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help=f"a labelled file; {CATALOG} unless given")
    options.add_argument("--rows", type=int, default=320)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--dropout", type=float, default=0.1, help="BERT's own unless given")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = options.parse_args()
    if chosen.rows < chosen.batch:
        options.error(f"--rows {chosen.rows}: must be at least one batch of {chosen.batch}")
    torch.set_num_threads(chosen.threads)
    logging.set_verbosity_error()
    try:
        work = gather(chosen.data, chosen.rows, chosen.batch, chosen.dropout)
    except HeadstockError as wrong:
        print(wrong, file=sys.stderr)
        return wrong.exit_code
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"load of the machine before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    print(f"{DEPTH} layers x {WIDTH} wide, vocabulary {VOCABULARY}, context {CONTEXT}, dropout {work.dropout}")
    print(f"{len(work.train.tokens)} rows {work.named}, {work.batch} at a time")
    if not HAS_TRAINER:
        print("`accelerate` is not installed, so the peer is a bare loop and not the Trainer")
    print(json.dumps(show(measure(work, chosen.repeats))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
