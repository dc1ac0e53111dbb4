"""Quality and speed of the course lab's model after equally many tokens: trained by the lab's recipe and by ours.

    python benchmarks/lab_quality.py --device cuda --text sentences.txt --tokens 3000000 --out quality.json
    python benchmarks/lab_quality.py --device cuda --text sentences.txt --only lab packed-muon --lr 2e-3 4e-3
    python benchmarks/lab_quality.py --small --text sentences.txt --tokens 300000    a narrow model, for a CPU
    python benchmarks/lab_quality.py --tiny                                          seconds anywhere, to try it

The model is train_speed's `lab`, the text one sentence per line, tokenized by byte-pair encoding with at most 50,001
entries (our vocabulary is padded to a multiple of 128). `lab` has one sentence per row, truncated to 64 tokens, and 16
rows per step, in float32 without compilation, with AdamW without weight decay at a constant learning rate; `lab-tuned`
has a higher learning rate with a schedule. Ours are packed rows.

All recipes see the same number of real tokens, up to one step. All models are evaluated alike, in float32, with every
held-out sentence in a row of its own, truncated as in the lab. Evaluation time is not counted. The steady speed leaves
out the first steps and those after each evaluation, whose batches were prefetched during it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `train_speed`

from train_speed import NEVER, WORKLOADS, Workload, environment, open_text, tiny, write_results

from headstock.data.token_store import SplitStores, TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.model.model import Model
from headstock.planner.machine import synchronize
from headstock.tasks.base import Task
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import BatchSums, evaluate
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.sampler import BatchSampler
from headstock.train.settings import RunConfig, TrainSettings, make_config

WARMUP_STEPS, SETTLE_STEPS = 20, 5  # left out of the steady speed, at first and after each evaluation
EVALUATION_BATCH = 64

LAB = {"batch": 16, "optimizer": "adamw", "lr": 5e-4, "dtype": "float32", "compile": False}
CONSTANT = {"schedule": "constant", "warmup": 0.0, "weight_decay": 0.0, "beta2": 0.999}
OURS = {"dtype": "auto", "compile": "replay", "vocabulary_multiple": 128}
TRAPEZOID = {"schedule": "trapezoid", "warmup": 0.05, "cooldown": 0.5}
MUON = {"optimizer": "muon", "batch": 128, "lr": 8e-3, "beta2": 0.99, "weight_decay": 0.3, "compile": "both"}


@dataclass(frozen=True)
class Recipe:
    name: str
    rows: str  # padded or packed
    train: dict[str, Any]  # training settings


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("lab", "padded", LAB | CONSTANT),
        Recipe("lab-tuned", "padded", LAB | TRAPEZOID | {"lr": 2e-3}),
        Recipe("packed-16", "packed", LAB | OURS),
        Recipe("packed-adamw", "packed", LAB | OURS | TRAPEZOID | {"batch": 128, "lr": 4e-3}),
        Recipe("packed-muon", "packed", OURS | TRAPEZOID | MUON),
    )
}


def select_recipes(args: argparse.Namespace) -> Iterator[Recipe]:
    """The recipes of --only; ours with every --batch and --lr."""
    for recipe in (RECIPES[name] for name in args.only):
        if recipe.name.startswith("lab"):
            yield recipe
            continue
        for batch in args.batch or [recipe.train["batch"]]:
            for lr in args.lr or [recipe.train["lr"]]:
                yield replace(recipe, train=recipe.train | args.set | {"batch": batch, "lr": lr})


def make_run_config(recipe: Recipe, workload: Workload, device: torch.device, seed: int) -> RunConfig:
    multiple = recipe.train.get("vocabulary_multiple", 1)
    model = {"vocabulary": -(-workload.vocabulary // multiple) * multiple, **workload.model}
    never = {"validate_every": NEVER, "checkpoint_every": NEVER, "log_every": NEVER, "valid_tokens": 1}
    settings = {**recipe.train, **never, "weights": "last", "length": workload.train["length"], "seed": seed}
    if device.type != "cuda":  # no CUDA graphs
        settings["compile"] = False
    return make_config({"model": model, "task": {**workload.task, "rows": recipe.rows}, "train": settings})


# Token budget and evaluation


def tokens_by_step(task: Task, store: TokenStore, settings: TrainSettings, budget: int) -> tuple[np.ndarray, float]:
    """Real tokens seen after each step that fits into the budget, and the share of positions that are not padding.

    Counted from the batches themselves, since the number of tokens in a step depends on the sentences drawn.
    """
    assert settings.length is not None
    sampler = BatchSampler(task, store, length=settings.length, batch=settings.batch, seed=settings.seed)
    totals, positions = [0], 0
    for step in count():
        (batch,) = sampler.micro_batches(step, size=None, rank=0, world_size=1)
        if totals[-1] + task.tokens(batch) > budget:
            break
        totals.append(totals[-1] + task.tokens(batch))
        positions += batch.tokens.numel()
    if len(totals) == 1:
        raise SystemExit(f"--tokens {budget}: a single step of {settings.batch} rows has more")
    return np.array(totals[1:]), totals[-1] / positions


def perplexity(
    model: Model, tokenizer: Tokenizer, store: TokenStore, length: int, device: torch.device, rows: str = "padded"
) -> tuple[float, int]:
    """Perplexity on held-out text and the number of predicted tokens, which is the same for every model."""
    task, sums = CausalLM(CausalConfig(rows=rows), tokenizer), BatchSums()  # type: ignore[arg-type]
    examples = task.examples(store, length=length)
    options: dict[str, Any] = {"batch_size": EVALUATION_BATCH, "size": 0, "dtype": "float32", "batch_sums": sums}
    metrics = evaluate(model, task, examples, distributed=DistributedContext(device), **options)
    targets = sum(counts["token"] for _, counts, _ in sums)
    assert targets == store.tokens, f"{targets} of {store.tokens} tokens were predicted"
    return metrics["perplexity"], targets


@dataclass
class Point:
    """A point of a learning curve: real tokens seen, seconds of training, perplexity."""

    tokens: int
    seconds: float
    perplexity: float


class TimedEvaluation:
    """A training callback that evaluates after the given steps and measures the time spent on training."""

    def __init__(
        self, steps: set[int], warmup: int, settle: int, evaluate: Callable[[], float], device: torch.device
    ) -> None:
        self.steps, self.settle, self.evaluate, self.device = steps, settle, evaluate, device
        self.curve: list[Point] = []
        self.seconds = self.steady_seconds = 0.0
        self.steady_tokens = 0
        self.steady_from = warmup  # the step after which the speed is steady
        self.steady_start: tuple[float, int] | None = None  # seconds and tokens at that step
        self.resumed = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            return
        step, tokens = event.state.step, event.state.tokens
        if step in self.steps:
            synchronize(self.device)
            now = time.perf_counter()
            self.seconds += now - self.resumed
            if self.steady_start is not None:
                self.steady_seconds += now - self.steady_start[0]
                self.steady_tokens += tokens - self.steady_start[1]
            self.curve.append(Point(tokens, self.seconds, self.evaluate()))
            self.steady_from, self.steady_start = max(self.steady_from, step + self.settle), None
            self.resumed = time.perf_counter()
        elif step == self.steady_from:
            synchronize(self.device)
            self.steady_start = time.perf_counter(), tokens

    def overall_speed(self) -> float:
        return self.curve[-1].tokens / self.seconds

    def steady_speed(self) -> float:
        """Tokens per second; the overall speed if the run was too short to become steady."""
        return self.steady_tokens / self.steady_seconds if self.steady_seconds else self.overall_speed()


# One run


@dataclass
class Result:
    """A row of the table."""

    name: str
    seed: int
    rows: str
    train: dict[str, Any]
    steps: int
    tokens: int  # real tokens seen
    real_share: float  # of the positions in its batches
    seconds: float  # of training
    tokens_per_second: float  # steady
    overall_tokens_per_second: float
    perplexity: float
    targets: int  # held-out tokens
    parameters: int
    curve: list[Point]
    ratio: float | None = None  # of its steady speed to that of `lab`
    seconds_to_lab: float | None = None  # of training, until its perplexity was that of `lab` at the end


def run_recipe(
    recipe: Recipe, workload: Workload, tokenizer: Tokenizer, stores: SplitStores, args: argparse.Namespace, seed: int
) -> Result:
    device = torch.device(args.device)
    config = make_run_config(recipe, workload, device, seed)
    task = build_task(config, tokenizer)
    model = build_model(config, task)
    totals, real_share = tokens_by_step(task, stores.train, config.train, args.tokens)
    budgets = args.tokens * np.arange(1, args.points + 1) / args.points
    steps = {int(step) for step in np.searchsorted(totals, budgets, side="right") if step} | {len(totals)}
    targets = 0

    def measure() -> float:
        nonlocal targets
        value, targets = perplexity(model, tokenizer, stores.valid, workload.train["length"], device)
        return value

    warmup, settle = (WARMUP_STEPS, SETTLE_STEPS) if workload.steps > 4 else (1, 1)
    timer = TimedEvaluation(steps, warmup, settle, measure, device)
    settings = replace(config.train, steps=len(totals))
    state = train(model, task, stores, settings, run=None, distributed=DistributedContext(device), callbacks=[timer])
    assert state.tokens == totals[-1], f"{state.tokens} tokens were seen, expected {totals[-1]}"
    return Result(
        recipe.name,
        seed,
        recipe.rows,
        recipe.train,
        steps=state.step,
        tokens=state.tokens,
        real_share=real_share,
        seconds=timer.seconds,
        tokens_per_second=timer.steady_speed(),
        overall_tokens_per_second=timer.overall_speed(),
        perplexity=timer.curve[-1].perplexity,
        targets=targets,
        parameters=model.parameter_counts()["total"],
        curve=timer.curve,
    )


def compare_with_lab(rows: list[Result]) -> None:
    """Set the ratios to the lab's run of the same seed, where there is one."""
    for row in rows:
        lab = next((other for other in rows if other.name == "lab" and other.seed == row.seed), None)
        if lab is not None:
            row.ratio = row.tokens_per_second / lab.tokens_per_second
            reached = (point.seconds for point in row.curve if point.perplexity <= lab.perplexity)
            row.seconds_to_lab = next(reached, None)


# Output


def label(row: Result) -> str:
    return f"{row.name:14s} {row.train['batch']:5d} {row.train['lr']:8.1e}"


def print_table(rows: list[Result], file: TextIO | None = None) -> None:
    columns = f"{'tokens/s':>11s} {'overall':>11s} {'ratio':>6s} {'seconds':>8s} {'steps':>6s} {'tokens':>10s}"
    columns += f" {'real':>5s} {'perplexity':>10s} {'as lab s':>8s}"
    print(f"{'recipe':14s} {'batch':>5s} {'lr':>8s} {'seed':>4s} {columns}", file=file)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        reached = "-" if row.seconds_to_lab is None else f"{row.seconds_to_lab:.1f}"
        print(
            f"{label(row)} {row.seed:4d} {row.tokens_per_second:11,.0f} {row.overall_tokens_per_second:11,.0f} "
            f"{ratio:>6s} {row.seconds:8.1f} {row.steps:6d} {row.tokens:10,d} {row.real_share:5.0%} "
            f"{row.perplexity:10.2f} {reached:>8s}",
            file=file,
        )


def print_curves(rows: list[Result]) -> None:
    print("perplexity by thousands of tokens")
    for row in rows:
        points = " ".join(f"{point.tokens / 1000:,.0f}: {point.perplexity:.1f}" for point in row.curve)
        print(f"{label(row)} {row.seed:4d}  {points}")


def print_means(rows: list[Result]) -> None:
    by_recipe: dict[str, list[float]] = {}
    for row in rows:
        by_recipe.setdefault(label(row), []).append(row.perplexity)
    print("perplexity over seeds: mean, minimum, maximum")
    for name, values in by_recipe.items():
        print(f"{name}  {statistics.mean(values):.2f} {min(values):.2f} {max(values):.2f}")


def scaled_workload(size: str) -> Workload:
    """The lab's workload, `small` for a CPU, or `tiny`."""
    lab = WORKLOADS["lab"]
    if size == "small":
        return replace(lab, model=lab.model | {"width": 64, "hidden": 64}, vocabulary=2000)
    return tiny(lab) if size == "tiny" else lab


def parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as warmup=0.1")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", help="text file with one sentence per line (default: random lines)")
    parser.add_argument("--tokens", type=int, help="real tokens that each run sees (default: 3,000,000)")
    parser.add_argument("--only", choices=list(RECIPES), nargs="+", default=list(RECIPES))
    parser.add_argument("--batch", type=int, nargs="+", help="rows per step, of our recipes")
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates, of our recipes")
    parser.add_argument("--set", type=parse_setting, nargs="+", default=[], help="training settings of our recipes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--points", type=int, default=8, help="evaluations of each run")
    parser.add_argument("--small", dest="size", action="store_const", const="small", default="lab")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cache", type=Path, help="folder in which tokenizers and token stores are cached")
    args = parser.parse_args()
    args.set = dict(args.set)
    args.tokens = args.tokens or (20_000 if args.size == "tiny" else 3_000_000)
    if args.size == "tiny":
        args.batch = args.batch or [16]
    return args


def main() -> None:
    args = parse_args()
    workload, rows = scaled_workload(args.size), list[Result]()
    facts = environment(torch.device(args.device))
    with open_text(args.text, args.cache, lines=400 if args.size == "tiny" else 50_000) as text:
        tokenizer, stores = text.stores(workload)
        data = {"train_tokens": stores.train.tokens, "valid_tokens": stores.valid.tokens}
        data |= {"entries": tokenizer.vocabulary}
        for seed in range(args.seeds):
            for recipe in select_recipes(args):
                rows.append(run_recipe(recipe, workload, tokenizer, stores, args, seed))
                compare_with_lab(rows)
                print_table(rows[-1:], sys.stderr)
                write_results(args.out, facts | {"data": data}, rows)
    print_table(rows)
    print_curves(rows)
    if args.seeds > 1:
        print_means(rows)
    print(f"{data['train_tokens']:,} training tokens, {data['valid_tokens']:,} held out, {data['entries']:,} entries")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
