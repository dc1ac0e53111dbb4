"""How well, and how soon, the course lab's model learns from equally many tokens: as the lab does it, and as we do.

    python benchmarks/lab_quality.py --device cuda --text sentences.txt --tokens 3000000 --out quality.json
    python benchmarks/lab_quality.py --device cuda --text sentences.txt --only lab packed-muon --lr 2e-3 4e-3
    python benchmarks/lab_quality.py --small --text sentences.txt --tokens 300000    a narrow stand-in, for a CPU
    python benchmarks/lab_quality.py --tiny                                          seconds anywhere, to try it

The model is train_speed's `lab`, the text one sentence a line, its tokens those of one byte-pair tokenizer of at most
50,001 entries (the model has as many, used or not, and ours are rounded up to a multiple of 128). `lab` reads one
sentence a row, cut after 64 tokens, 16 rows a step, in single precision and without compiling, by an AdamW that does
not decay and whose learning rate never changes; `lab-tuned` has a higher one with a schedule. Ours read full rows.

All see as many real tokens, up to a step less: padding is not counted, a sentence's end is. All are measured alike,
whatever they were trained in: every held-out sentence a row of its own, cut as the lab cuts, in single precision. The
clock stands still meanwhile. The steady speed leaves out the first steps, and those after each measurement, for which
batches were made while the clock stood; the overall speed leaves out nothing else.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the lab's model is written down beside

from train_speed import NEVER, WORKS, Text, Work, tiny, wait

from headstock.data.token_store import SplitStores, TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.experiments.bench.workloads import random_lines
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import BatchSums, evaluate
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.sampler import BatchSampler
from headstock.train.settings import RunConfig, TrainSettings, make_config

WARM, SETTLE = 20, 5  # steps left out of the steady speed, at first and after each measurement
MEASURED_ROWS = 64

# How they are trained

LAB = {"batch": 16, "optimizer": "adamw", "lr": 5e-4, "dtype": "float32", "compile": False}
PLAIN = {"schedule": "constant", "warmup": 0.0, "weight_decay": 0.0, "beta2": 0.999}
OURS = {"dtype": "auto", "compile": "replay", "vocabulary_multiple": 128}
TRAPEZOID = {"schedule": "trapezoid", "warmup": 0.05, "cooldown": 0.5}
MUON = {"optimizer": "muon", "batch": 128, "lr": 8e-3, "beta2": 0.99, "weight_decay": 0.3, "compile": "both"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # rows, and settings of train
    "lab": ("padded", LAB | PLAIN),
    "lab-tuned": ("padded", LAB | TRAPEZOID | {"lr": 2e-3}),
    "packed-16": ("packed", LAB | OURS),
    "packed-adamw": ("packed", LAB | OURS | TRAPEZOID | {"batch": 128, "lr": 4e-3}),
    "packed-muon": ("packed", OURS | TRAPEZOID | MUON),
}


@dataclass(frozen=True)
class Way:
    """One line of the table: how rows are made, and the settings of train."""

    name: str
    rows: str
    train: dict[str, Any]


def ways(given: argparse.Namespace) -> Iterator[Way]:
    """Those asked for; ours with every batch and learning rate that is given."""
    for name in given.only:
        rows, settings = WAYS[name]
        if name.startswith("lab"):
            yield Way(name, rows, settings)
            continue
        for batch in given.batch or [settings["batch"]]:
            for lr in given.lr or [settings["lr"]]:
                yield Way(name, rows, settings | given.set | {"batch": batch, "lr": lr})


def settings_of(way: Way, work: Work, device: torch.device, seed: int) -> RunConfig:
    multiple = way.train.get("vocabulary_multiple", 1)
    vocabulary = -(-work.real // multiple) * multiple
    quiet = {"validate_every": NEVER, "checkpoint_every": NEVER, "log_every": NEVER, "valid_tokens": 1}
    settings = {**way.train, **quiet, "weights": "last", "length": work.train["length"], "seed": seed}
    if device.type != "cuda":  # there is nothing to record
        settings["compile"] = False
    tree = {"model": {"vocabulary": vocabulary, **work.model}, "task": {**work.task, "rows": way.rows}}
    return make_config(tree | {"train": settings})


# What they see, and how they are measured


def seen_after(task: Task, store: TokenStore, settings: TrainSettings, tokens: int) -> tuple[np.ndarray, float]:
    """Real tokens seen after each step, of as many steps as fit into `tokens`; and the share of places that are real.

    Counted from the very batches: how many tokens sentences bring is known only by drawing them.
    """
    assert settings.length is not None
    order = BatchSampler(task, store, length=settings.length, batch=settings.batch, seed=settings.seed)
    seen, places = [0], 0
    for step in count():
        (batch,) = order.micro_batches(step, size=None, rank=0, world_size=1)
        if seen[-1] + task.tokens(batch) > tokens:
            break
        seen.append(seen[-1] + task.tokens(batch))
        places += batch.tokens.numel()
    if len(seen) == 1:
        raise SystemExit(f"--tokens {tokens}: a single step of {settings.batch} rows has more")
    return np.array(seen[1:]), seen[-1] / places


def perplexity(
    model: Model, tokenizer: Tokenizer, store: TokenStore, length: int, device: torch.device, rows: str = "padded"
) -> tuple[float, int]:
    """Of held-out text, and how many tokens had to be given; the same for every model, however it was trained."""
    task, pieces = CausalLM(CausalConfig(rows=rows), tokenizer), BatchSums()  # type: ignore[arg-type]
    examples = task.examples(store, length=length)
    options: dict[str, Any] = {"batch_size": MEASURED_ROWS, "size": 0, "dtype": "float32", "batch_sums": pieces}
    metrics = evaluate(model, task, examples, distributed=DistributedContext(device), **options)
    targets = sum(counts["token"] for _, counts, _ in pieces)
    assert targets == store.tokens, f"{targets} of {store.tokens} tokens were asked for"
    return metrics["perplexity"], targets


@dataclass
class Point:
    """How far a run is: real tokens seen, seconds of training, perplexity."""

    tokens: int
    seconds: float
    perplexity: float


class Clock:
    """Counts a run's time but not that of the measurements, which it asks for after the steps in `marks`."""

    def __init__(self, marks: set[int], warm: int, settle: int, look: Callable[[], float], device: torch.device):
        self.marks, self.settle, self.look, self.device = marks, settle, look, device
        self.curve: list[Point] = []
        self.seconds = self.steady_seconds = 0.0
        self.steady_tokens = 0
        self.stride = warm  # the step after which the run is in its stride,
        self.entered: tuple[float, int] | None = None  # and when that was, and with how many tokens
        self.since = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            return
        step, tokens = event.state.step, event.state.tokens
        if step in self.marks:
            wait(self.device)
            now = time.perf_counter()
            self.seconds += now - self.since
            if self.entered is not None:
                self.steady_seconds += now - self.entered[0]
                self.steady_tokens += tokens - self.entered[1]
            self.curve.append(Point(tokens, self.seconds, self.look()))
            self.stride, self.entered = max(self.stride, step + self.settle), None
            self.since = time.perf_counter()
        elif step == self.stride:
            wait(self.device)
            self.entered = time.perf_counter(), tokens

    def overall(self) -> float:
        return self.curve[-1].tokens / self.seconds

    def steady(self) -> float:
        """Tokens a second; a run too short to be in its stride has only the overall speed."""
        return self.steady_tokens / self.steady_seconds if self.steady_seconds else self.overall()


# One run


@dataclass
class Told:
    """A line of the table."""

    name: str
    seed: int
    rows: str
    train: dict[str, Any]
    steps: int
    tokens: int  # real ones seen
    real_share: float  # of the places in its batches
    seconds: float  # of training
    tokens_per_second: float  # steady
    overall_tokens_per_second: float
    perplexity: float
    targets: int  # held-out tokens it was measured on
    parameters: int
    curve: list[Point]
    ratio: float | None = None  # of its steady speed to that of `lab`
    seconds_to_lab: float | None = None  # of training, until it was measured to be as good as `lab` in the end


def trained(
    way: Way, work: Work, tokenizer: Tokenizer, stores: SplitStores, given: argparse.Namespace, seed: int
) -> Told:
    device = torch.device(given.device)
    chosen = settings_of(way, work, device, seed)
    task = build_task(chosen, tokenizer)
    model = build_model(chosen, task)
    seen, real = seen_after(task, stores.train, chosen.train, given.tokens)
    shares = given.tokens * np.arange(1, given.points + 1) / given.points
    marks = {int(step) for step in np.searchsorted(seen, shares, side="right") if step} | {len(seen)}
    targets = 0

    def look() -> float:
        nonlocal targets
        found, targets = perplexity(model, tokenizer, stores.valid, work.train["length"], device)
        return found

    warm, settle = (WARM, SETTLE) if work.steps > 4 else (1, 1)
    clock = Clock(marks, warm, settle, look, device)
    done = train(
        model,
        task,
        stores,
        replace(chosen.train, steps=len(seen)),
        run=None,
        distributed=DistributedContext(device),
        callbacks=[clock],
    )
    assert done.tokens == seen[-1], f"{done.tokens} tokens were seen, and {seen[-1]} meant to be"
    speeds = {"tokens_per_second": clock.steady(), "overall_tokens_per_second": clock.overall()}
    facts: dict[str, Any] = {
        "steps": done.step,
        "tokens": done.tokens,
        "real_share": real,
        "seconds": clock.seconds,
        **speeds,
    }
    last: dict[str, Any] = {"perplexity": clock.curve[-1].perplexity, "targets": targets, "curve": clock.curve}
    return Told(way.name, seed, way.rows, way.train, parameters=model.parameter_counts()["total"], **facts, **last)


def compare(rows: list[Told]) -> None:
    """Set every run beside the lab's of the same seed, where there is one."""
    for row in rows:
        lab = next((other for other in rows if other.name == "lab" and other.seed == row.seed), None)
        if lab is None:
            continue
        row.ratio = row.tokens_per_second / lab.tokens_per_second
        as_good = (point.seconds for point in row.curve if point.perplexity <= lab.perplexity)
        row.seconds_to_lab = next(as_good, None)


# The table


def print_table(rows: list[Told], say: Callable[[str], None] = print) -> None:
    heads = (
        f"{'tokens/s':>11s} {'overall':>11s} {'ratio':>6s} {'seconds':>8s} {'steps':>6s} {'tokens':>10s} {'real':>5s}"
    )
    say(f"{'way':14s} {'batch':>5s} {'lr':>8s} {'seed':>4s} {heads} {'perplexity':>10s} {'as lab s':>8s}")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        reached = "-" if row.seconds_to_lab is None else f"{row.seconds_to_lab:.1f}"
        say(
            f"{row.name:14s} {row.train['batch']:5d} {row.train['lr']:8.1e} {row.seed:4d} "
            f"{row.tokens_per_second:11,.0f} {row.overall_tokens_per_second:11,.0f} {ratio:>6s} {row.seconds:8.1f} "
            f"{row.steps:6d} {row.tokens:10,d} {row.real_share:5.0%} {row.perplexity:10.2f} {reached:>8s}"
        )


def print_curves(rows: list[Told]) -> None:
    print("perplexity by thousands of tokens seen")
    for row in rows:
        points = " ".join(f"{point.tokens / 1000:,.0f}: {point.perplexity:.1f}" for point in row.curve)
        print(f"{row.name:14s} {row.train['batch']:5d} {row.train['lr']:8.1e} {row.seed:4d}  {points}")


def print_means(rows: list[Told]) -> None:
    """Over the seeds, of each way."""
    alike: dict[str, list[Told]] = {}
    for row in rows:
        alike.setdefault(f"{row.name:14s} {row.train['batch']:5d} {row.train['lr']:8.1e}", []).append(row)
    print("perplexity over the seeds: mean, least, most")
    for what, same in alike.items():
        found = [row.perplexity for row in same]
        print(f"{what}  {statistics.mean(found):.2f} {min(found):.2f} {max(found):.2f}")


def sized(name: str) -> Work:
    """The lab's work; `small`, as much narrower as a CPU can train; or `tiny`."""
    lab = WORKS["lab"]
    if name == "small":
        return replace(lab, model=lab.model | {"width": 64, "hidden": 64}, real=2000)
    return tiny(lab) if name == "tiny" else lab


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not such as warmup=0.1")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="a text file, one sentence a line; made-up lines unless given")
    parser.add_argument("--tokens", type=int, help="real tokens that each run sees; 3,000,000 unless given")
    parser.add_argument("--only", choices=list(WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--batch", type=int, nargs="+", help="rows in a step, of each of ours")
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates of each of ours")
    parser.add_argument("--set", type=setting, nargs="+", default=[], help="settings of train of ours, as warmup=0.1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--points", type=int, default=8, help="measurements of each run, at equal numbers of tokens")
    parser.add_argument("--small", dest="size", action="store_const", const="small", default="lab")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    parser.add_argument("--out", help="a JSON file to write")
    parser.add_argument("--kept", type=Path, help="a folder that keeps tokenizers and tokens for the next call")
    given = parser.parse_args()
    given.set = dict(given.set)
    given.tokens = given.tokens or (20_000 if given.size == "tiny" else 3_000_000)
    if given.size == "tiny":
        given.batch = given.batch or [16]
    return given


def main() -> None:
    given = options()
    work, rows = sized(given.size), list[Told]()
    with tempfile.TemporaryDirectory() as forgotten:
        folder = given.kept or Path(forgotten)
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(given.text) if given.text else folder / f"sentences{'-tiny' if given.size == 'tiny' else ''}.txt"
        if not given.text and not path.exists():
            path.write_text(
                "\n".join(islice(random_lines(), 400 if given.size == "tiny" else 50_000)) + "\n", encoding="utf-8"
            )
        tokenizer, stores = Text(path, folder).stores(work)
        device = torch.device(given.device)
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        held = {"train_tokens": stores.train.tokens, "valid_tokens": stores.valid.tokens}
        data = held | {"entries": tokenizer.vocabulary}
        facts = {"date": str(date.today()), "device": where, "torch": torch.__version__, "data": data}
        for seed in range(given.seeds):
            for way in ways(given):
                rows.append(trained(way, work, tokenizer, stores, given, seed))
                compare(rows)
                print_table(rows[-1:], lambda line: print(line, file=sys.stderr))
                if given.out:  # after each, for whoever is stopped in between
                    whole = facts | {"rows": [asdict(row) for row in rows]}
                    Path(given.out).write_text(json.dumps(whole, indent=1) + "\n")
    print_table(rows)
    print_curves(rows)
    if given.seeds > 1:
        print_means(rows)
    print(
        f"{data['train_tokens']:,} tokens to learn from, {data['valid_tokens']:,} held out, {data['entries']:,} entries"
    )
    print(f"{date.today()}, {where}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
