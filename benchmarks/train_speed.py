"""Training throughput on this machine, the gain of each optimization, and the throughput of other libraries.

    python benchmarks/train_speed.py --device cuda                                all workloads
    python benchmarks/train_speed.py --device cuda --only bert --text french.txt  one workload, on real text
    python benchmarks/train_speed.py --device cuda --without all                  an ablation of each optimization
    python benchmarks/train_speed.py --device cuda --nanogpt ../nanoGPT --peers   other libraries in the same process
    python benchmarks/train_speed.py --tiny --without all                         a few small steps, to try the script

Workloads: `gpt` is GPT-2 124M on one continuous text in rows of 1,024 tokens; `bert` is BERT-base with masked language
modelling on texts of mixed length; `lab` is the course lab's model (21M parameters, large vocabulary) in 16 rows of 64
tokens; `finetune` is a 40M-parameter classifier on 1,600 texts for five epochs. Padding tokens are not counted.

Our side is the real training loop without validation and checkpoints. The first steps, which compile, are not timed;
their duration is reported separately. The final loss is reported too, because no optimization may change it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))  # for `peers`

from headstock.data.corpus import read_corpus
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.experiments.bench.workloads import random_lines
from headstock.kernels import cross_entropy
from headstock.model.backbones import transformer
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.planner.machine import device_name, synchronize
from headstock.tasks.labelled import EncodedRows
from headstock.train import loop
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.fit import EncodedSplits
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.prefetch import Prefetcher
from headstock.train.settings import RunConfig, make_config

NEVER = 10**9
CLS = 2  # prepended to every text of the classifier; no text contains it
LOG_LENGTH, LOG_DEVIATION = 4.61, 0.77  # mean and deviation of the logarithm of a book review's length in tokens
BERT = {"norm": "post", "embed_norm": True, "causal": False, "segments": 2, "inner_dropout": False}


@dataclass(frozen=True)
class Workload:
    model: dict[str, Any]
    task: dict[str, Any]
    train: dict[str, Any]
    vocabulary: int  # of the tokenizer; that of the model is rounded up
    documents: str = "line"
    warmup_steps: int = 10
    steps: int = 40


WORKLOADS = {
    "gpt": Workload(
        {"context": 1024, "depth": 12, "width": 768, "heads": 12, "hidden": 3072}
        | {"bias": False, "activation": "gelu_tanh"},  # without biases, like nanoGPT
        {"name": "causal"},
        {"batch": 64, "lr": 6e-4, "optimizer": "adamw"},
        vocabulary=50_257,
        documents="file",
    ),
    "bert": Workload(
        {"context": 512, "depth": 12, "width": 768, "heads": 12, "hidden": 3072, "dropout": 0.1, **BERT},
        {"name": "masked", "transform": True},
        {"batch": 64, "length": 512, "lr": 1e-4},
        vocabulary=30_522,
    ),
    "lab": Workload(
        {"context": 256, "depth": 4, "width": 200, "heads": 2, "hidden": 200, "dropout": 0.2, "norm": "post"}
        | {"positions": "sinusoidal", "activation": "relu", "tied": False, "embed_scale": True},
        {"name": "causal"},
        {"batch": 16, "length": 64, "lr": 5e-4},
        vocabulary=50_001,
        warmup_steps=50,
        steps=1000,
    ),
    "finetune": Workload(
        {"context": 256, "depth": 10, "width": 512, "heads": 8, "hidden": 2048, "dropout": 0.1, **BERT},
        {"name": "classify", "classes": ["bad", "good"], "pool": "cls", "opening": "cls"},
        {"batch": 16, "lr": 1.5e-4, "schedule": "linear", "warmup": 0.1},
        vocabulary=16_000,
        warmup_steps=20,
        steps=500,
    ),
}


def tiny(workload: Workload) -> Workload:
    model = workload.model | {"depth": 2, "width": 32, "heads": 2, "hidden": 64, "context": 64}
    settings = workload.train | {"length": 32, "batch": 4}
    return replace(workload, model=model, train=settings, vocabulary=301, warmup_steps=2, steps=4)


# Optimizations to switch off or on


class NoPrefetcher(Prefetcher):
    """Computes each item when it is requested."""

    def __init__(self, items: Iterable[Any], *, size: int):
        self.items = iter(items)

    def __next__(self) -> Any:
        return next(self.items)

    def close(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def gather_by_mask(batch: Batch, head: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch.labels[head] != IGNORE_INDEX
    return hidden[mask], batch.labels[head][mask]


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "fused loss": (cross_entropy, "MIN_LOGITS", float("inf")),
    "varlen attention": (transformer, "supports_varlen", lambda x, width: False),
    "prefetching": (loop, "Prefetcher", NoPrefetcher),
    "label positions": (Batch, "gather_labelled", gather_by_mask),
    "bf16 residual": (transformer, "compute_dtype", lambda x: torch.float32),  # pre-norm blocks only
}
WITHOUT = [*PATCHES, "padded vocabulary", "compile"]
WITH = ["compile=replay", "compile=both", "fp8", "fp8 compile=both", "fp8 exact-gelu"]  # off by default


@contextmanager
def patched(names: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            if name in PATCHES:
                stack.enter_context(mock.patch.object(*PATCHES[name]))
        yield


# Data


@dataclass
class Text:
    """A text file, with a tokenizer for each vocabulary size; tokenizers and token stores are cached in `folder`."""

    path: Path
    folder: Path
    tokenizers: dict[int, Tokenizer] = field(default_factory=dict)

    def tokenizer(self, vocabulary: int) -> Tokenizer:
        if vocabulary not in self.tokenizers:
            file = self.folder / f"{self.path.stem}-{vocabulary}.json"
            if file.exists():
                tokenizer = open_tokenizer(file)
            else:
                texts = (document.text for document in islice(iter(read_corpus(self.path)), 50_000))
                tokenizer = train_tokenizer(texts, TokenizerSettings(vocabulary=vocabulary))
                tokenizer.save(file)
            self.tokenizers[vocabulary] = tokenizer
        return self.tokenizers[vocabulary]

    def stores(self, workload: Workload) -> tuple[Tokenizer, SplitStores]:
        tokenizer = self.tokenizer(workload.vocabulary)
        corpus = read_corpus(self.path, documents=workload.documents)  # type: ignore[arg-type]
        return tokenizer, build_split_stores(corpus, tokenizer, cache=self.folder / "cache")


@contextmanager
def open_text(file: str | None, cache: Path | None, *, lines: int) -> Iterator[Text]:
    """The given text file or one with so many random lines, and a cache folder, temporary by default."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = cache or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(file) if file else folder / f"random-{lines}.txt"
        if not path.exists() and not file:
            path.write_text("\n".join(islice(random_lines(), lines)) + "\n", encoding="utf-8")
        yield Text(path, folder)


def random_reviews(workload: Workload) -> EncodedRows:
    count = 1600 if workload.steps > 4 else 40
    generator = np.random.default_rng(0)
    lengths = np.maximum(9, generator.lognormal(LOG_LENGTH, LOG_DEVIATION, count).astype(int))
    tokens = [generator.integers(16, workload.vocabulary, length).tolist() for length in lengths]
    return EncodedRows(tokens, generator.integers(0, 2, count), [f"row {i}" for i in range(count)])


# Headstock


@dataclass
class Result:
    """A row of the table."""

    work: str
    how: str
    tokens_per_second: float
    step_ms: float
    loss: float
    first: float  # seconds before timing starts: data, compilation and the first steps
    peak_gb: float


def make_run_config(workload: Workload, without: list[str], extra: list[str], device: torch.device) -> RunConfig:
    multiple = 1 if "padded vocabulary" in without else 128
    model = {"vocabulary": -(-workload.vocabulary // multiple) * multiple, **workload.model}
    classifies = workload.task["name"] == "classify"
    compile_mode: Any = "auto" if classifies else device.type == "cuda"  # auto captures small models
    for name in extra:
        if "compile=" in name:
            compile_mode = name.partition("compile=")[2]
        if "exact-gelu" in name:
            model["activation"] = "gelu"
    steps = workload.warmup_steps + workload.steps
    settings: dict[str, Any] = {"steps": steps, "log_every": steps, "validate_every": NEVER, "checkpoint_every": NEVER}
    settings |= {"valid_tokens": 1, "weights": "last", "compile": False if "compile" in without else compile_mode}
    settings |= {"dtype": "float8"} if any(name.startswith("fp8") for name in extra) else {}
    tree = {"model": model, "task": workload.task, "train": workload.train | settings}
    if classifies:
        tree |= {"data": {}, "transfer": {"run": "none", "init": "scratch"}}
    return make_config(tree)


@contextmanager
def profiled(device: torch.device) -> Iterator[None]:
    """Print which kernels take longest; profiling slows the run down."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        yield
    print(profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=40), file=sys.stderr)


def measure_headstock(
    name: str, workload: Workload, text: Text, device: torch.device, without: list[str], extra: list[str], trace: bool
) -> Result:
    began = time.perf_counter()
    torch._dynamo.reset()
    config = make_run_config(workload, without, extra, device)
    data: Any
    if workload.task["name"] == "classify":
        tokenizer, rows = text.tokenizer(301), random_reviews(workload)  # only its special tokens are used
        data = EncodedSplits(rows, rows.select(range(8)))
    else:
        tokenizer, data = text.stores(workload)
    task = build_task(config, tokenizer)
    model = build_model(config, task)
    timestamps: list[tuple[float, int]] = []  # seconds, tokens
    losses: list[float] = []

    def on_event(event: Event) -> None:
        if event.kind == "step" and event.state.step in (workload.warmup_steps, config.train.steps):
            synchronize(device)
            timestamps.append((time.perf_counter(), event.state.tokens))
        elif event.kind == "log":
            losses.append(event.state.loss)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with patched(without), profiled(device) if trace else nullcontext():
        train(model, task, data, config.train, run=None, distributed=DistributedContext(device), callbacks=[on_event])
    (start, start_tokens), (end, end_tokens) = timestamps
    how = ", ".join([f"without {x}" for x in without] + [f"with {x}" for x in extra]) or "headstock"
    speed, step_ms = (end_tokens - start_tokens) / (end - start), 1000 * (end - start) / workload.steps
    return Result(name, how, speed, step_ms, losses[-1], start - began, peak_memory(device))


def peak_memory(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0


# Other libraries


def measure_peers(
    name: str, workload: Workload, text: Text, device: torch.device, args: argparse.Namespace
) -> Iterator[Result]:
    """Other libraries with a model of the same shape; those that are not installed are skipped."""
    shape = {"vocabulary": workload.vocabulary, "batch": workload.train["batch"], **workload.model}
    shape["step_tokens"] = shape["batch"] * workload.train.get("length", shape["context"])
    steps: dict[str, Any] = {"warmup_steps": workload.warmup_steps, "steps": workload.steps, "device": device}
    if name == "gpt" and args.nanogpt:
        from peers.nanogpt import measure

        measured = measure(Path(args.nanogpt), shape, compiled=not args.tiny, **steps)
        yield Result(name, "nanoGPT, compiled", *measured, 0.0, peak_memory(device))
    if not args.peers or name not in ("bert", "finetune"):
        return
    from peers import huggingface_training as huggingface

    if name == "bert":
        tokenizer, stores = text.stores(workload)
        rows = [stores.train.document(i).tolist() for i in range(min(stores.train.documents, 200_000))]
        special_tokens = (tokenizer.cls or 0, tokenizer.mask or 0)
        how = "Hugging Face, compiled, padded to 128"
        measured = huggingface.masked(rows, special_tokens, shape, padded_to=128, compiled=not args.tiny, **steps)
    else:
        texts = random_reviews(workload)
        how = f"Hugging Face, {'Trainer' if huggingface.HAS_TRAINER else 'a bare loop'}"
        measured = huggingface.classifier([[CLS, *row] for row in texts.tokens], texts.labels, shape, **steps)
    yield Result(name, how, *measured, 0.0, peak_memory(device))


# Output


def print_table(rows: list[Result], file: TextIO | None = None) -> None:
    columns = f"{'tokens/s':>12s} {'ratio':>6s} {'ms/step':>8s} {'loss':>8s} {'first s':>8s} {'GB':>6s}"
    print(f"{'work':9s} {'how':38s} {columns}", file=file, flush=True)
    for row in rows:
        baseline = next(other for other in rows if other.work == row.work)
        print(
            f"{row.work:9s} {row.how:38s} {row.tokens_per_second:12,.0f} "
            f"{row.tokens_per_second / baseline.tokens_per_second:6.2f} {row.step_ms:8.2f} {row.loss:8.4f} "
            f"{row.first:8.1f} {row.peak_gb:6.1f}",
            file=file,
            flush=True,
        )


def environment(device: torch.device) -> dict[str, Any]:
    return {"date": str(date.today()), "device": device_name(device), "torch": torch.__version__}


def write_results(file: str | None, facts: dict[str, Any], rows: list[Any]) -> None:
    """Write all results so far, so that an interrupted benchmark keeps them."""
    if file:
        content = facts | {"rows": [asdict(row) for row in rows]}
        Path(file).write_text(json.dumps(content, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    parser.add_argument("--text", help="text file with one document per line (default: random lines)")
    parser.add_argument("--without", nargs="+", default=[], choices=["all", *WITHOUT], help="switch off, one at a time")
    parser.add_argument("--with", nargs="+", default=[], choices=["all", *WITH], dest="extra", help="one at a time")
    parser.add_argument("--no-baseline", action="store_true", help="only measure --without and --with")
    parser.add_argument("--batch", type=int, help="rows per step")
    parser.add_argument("--length", type=int, help="tokens per row")
    parser.add_argument("--steps", type=int, help="timed steps")
    parser.add_argument("--nanogpt", help="folder with nanoGPT's code")
    parser.add_argument("--peers", action="store_true", help="also measure Hugging Face")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels (slows the run down)")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--cache", type=Path, help="folder in which tokenizers and token stores are cached")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device, rows = torch.device(args.device), list[Result]()
    without = WITHOUT if "all" in args.without else args.without
    extra = WITH if "all" in args.extra else args.extra
    variants: list[tuple[list[str], list[str]]] = [] if args.no_baseline else [([], [])]
    variants += [([name], []) for name in without] + [([], [name]) for name in extra]

    def add(row: Result) -> None:
        rows.append(row)
        print_table([row], sys.stderr)
        write_results(args.out, environment(device), rows)

    with open_text(args.text, args.cache, lines=1000 if args.tiny else 200_000) as text:
        for name in args.only:
            workload = tiny(WORKLOADS[name]) if args.tiny else WORKLOADS[name]
            sizes = {key: value for key, value in (("batch", args.batch), ("length", args.length)) if value}
            workload = replace(workload, train=workload.train | sizes, steps=args.steps or workload.steps)
            for row in measure_peers(name, workload, text, device, args):  # first: ratios are relative to a peer
                add(row)
            for removed, added in variants:
                try:
                    add(measure_headstock(name, workload, text, device, removed, added, args.profile))
                except Exception as error:  # continue with the others
                    print(f"{name}, {removed}, {added}: {type(error).__name__}: {error}", file=sys.stderr)
    print_table(rows)
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))


if __name__ == "__main__":
    main()
