"""How many tokens a second are learned from on this machine, what each technique is worth, and what peers do.

    python benchmarks/train_speed.py --device cuda                                everything that needs nothing else
    python benchmarks/train_speed.py --device cuda --only bert --text french.txt  one work, on real text
    python benchmarks/train_speed.py --device cuda --without all                  each technique left out once
    python benchmarks/train_speed.py --device cuda --nanogpt ../nanoGPT --peers   peers' own code in the same run
    python benchmarks/train_speed.py --tiny --without all                         a few small steps anywhere, to try it

The works: `gpt` is GPT-2's smallest shape on one endless text, rows of 1,024 tokens; `bert` is BERT-base's, masked
language modelling on texts of mixed length, of which tokens count but padding does not; `lab` is a narrow model of 21
million weights with a wide vocabulary, 16 rows of 64 tokens; `finetune` is a classifier of 40 million weights and 1,600
texts, five times over. Ours is the real loop with all it does in a run but validations and checkpoints. The clock
starts after the first steps, in which compiling happens; that is told beside. The last loss is told too: it must not
depend on a technique.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))  # the peers' side lies beside

from headstock.data.corpus import read_corpus
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.experiments.bench.workloads import random_lines
from headstock.kernels import cross_entropy
from headstock.model.backbones import transformer
from headstock.model.batch import Batch
from headstock.tasks.classify import EncodedTexts
from headstock.train import loop
from headstock.train.callbacks import Event
from headstock.train.distributed import DistributedContext
from headstock.train.fit import LabelledData
from headstock.train.loop import train
from headstock.train.models import build_model, build_task
from headstock.train.prefetch import Prefetcher
from headstock.train.settings import RunConfig, make_config

NEVER = 10**9
OPENING = 2  # a mark before every text that no text has itself
LOG_LENGTH, LOG_SPREAD = 4.61, 0.77  # mean and deviation of the logarithm of a book review's length in tokens
BERT = {"norm": "post", "embed_norm": True, "causal": False, "segments": 2, "inner_dropout": False}


@dataclass(frozen=True)
class Work:
    """What is trained, and in what steps."""

    model: dict[str, Any]
    task: dict[str, Any]
    train: dict[str, Any]
    real: int  # entries of the vocabulary; the model's own is rounded up
    documents: str = "line"
    warm: int = 10
    steps: int = 40


WORKS = {
    "gpt": Work(
        {
            "context": 1024,
            "depth": 12,
            "width": 768,
            "heads": 12,
            "hidden": 3072,
            "bias": False,  # as nanoGPT trains it
            "activation": "gelu_tanh",
        },
        {"name": "causal"},
        {"batch": 64, "lr": 6e-4, "optimizer": "adamw"},
        real=50_257,
        documents="file",
    ),
    "bert": Work(
        {"context": 512, "depth": 12, "width": 768, "heads": 12, "hidden": 3072, "dropout": 0.1, **BERT},
        {"name": "masked", "transform": True},
        {"batch": 64, "length": 512, "lr": 1e-4},
        real=30_522,
    ),
    "lab": Work(
        {"context": 256, "depth": 4, "width": 200, "heads": 2, "hidden": 200, "dropout": 0.2, "norm": "post"}
        | {"positions": "sinusoidal", "activation": "relu", "tied": False, "embed_scale": True},
        {"name": "causal"},
        {"batch": 16, "length": 64, "lr": 5e-4},
        real=50_001,
        warm=50,
        steps=1000,
    ),
    "finetune": Work(
        {"context": 256, "depth": 10, "width": 512, "heads": 8, "hidden": 2048, "dropout": 0.1, **BERT},
        {"name": "classify", "classes": ["bad", "good"], "pool": "cls", "opening": "cls"},
        {"batch": 16, "lr": 1.5e-4, "schedule": "linear", "warmup": 0.1},
        real=16_000,
        warm=20,
        steps=500,
    ),
}


def tiny(work: Work) -> Work:
    sizes = {"depth": 2, "width": 32, "heads": 2, "hidden": 64, "context": 64}
    length = {"length": 32, "batch": 4}
    return replace(work, model=work.model | sizes, train=work.train | length, real=301, warm=2, steps=4)


# What can be left out


class Immediate(Prefetcher):
    """Computes each item when it is requested."""

    def __init__(self, items: Iterable[Any], *, size: int):
        self.items = iter(items)

    def __next__(self) -> Any:
        return next(self.items)

    def close(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def found_out(batch: Batch, head: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = batch.labels[head] != -100
    return hidden[wanted], batch.labels[head][wanted]


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "fused loss": (cross_entropy, "MIN_LOGITS", float("inf")),
    "documents apart": (transformer, "supports_varlen", lambda x, width: False),
    "batches ahead": (loop, "Prefetcher", Immediate),
    "known places": (Batch, "gather_labelled", found_out),
    "half stream": (transformer, "compute_dtype", lambda x: torch.float32),  # where blocks norm first
}
WITHOUT = [*PATCHES, "padded vocabulary", "compiling"]
WITH = ["replay", "both", "eight bits", "eight bits, both", "eight bits, exact gelu"]  # what is not on by itself


@contextmanager
def changed(out: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in (PATCHES.get(name) for name in out):
            if patch is not None:
                stack.enter_context(mock.patch.object(*patch))
        yield


# What is read


@dataclass
class Text:
    """Real or made-up text, and its tokens by vocabulary and documents, each made once."""

    path: Path
    folder: Path
    tokenizers: dict[int, Tokenizer] = field(default_factory=dict)

    def tokenizer(self, entries: int) -> Tokenizer:
        kept = self.folder / f"{self.path.stem}-{entries}.json"
        if entries not in self.tokenizers and kept.exists():
            self.tokenizers[entries] = open_tokenizer(kept)
        if entries not in self.tokenizers:
            texts = (document.text for document in islice(iter(read_corpus(self.path)), 50_000))
            self.tokenizers[entries] = train_tokenizer(texts, TokenizerSettings(vocabulary=entries))
            self.tokenizers[entries].save(kept)
        return self.tokenizers[entries]

    def stores(self, work: Work) -> tuple[Tokenizer, SplitStores]:
        tokenizer = self.tokenizer(work.real)
        corpus = read_corpus(self.path, documents=work.documents)  # type: ignore[arg-type]
        return tokenizer, build_split_stores(corpus, tokenizer, cache=self.folder / "cache")


def made_up_reviews(work: Work, count: int) -> EncodedTexts:
    draw = np.random.default_rng(0)
    lengths = np.maximum(9, draw.lognormal(LOG_LENGTH, LOG_SPREAD, count).astype(int))
    tokens = [draw.integers(16, work.real, length).tolist() for length in lengths]
    return EncodedTexts(tokens, draw.integers(0, 2, count), [f"row {i}" for i in range(count)], bytes=0)


# Our side


@dataclass
class Told:
    """A line of the table."""

    work: str
    how: str
    tokens_per_second: float
    step_ms: float
    loss: float
    first: float  # seconds before the clock starts: data, compiling, the first steps
    peak_gb: float


def settings_of(work: Work, out: list[str], more: list[str], device: torch.device) -> RunConfig:
    multiple = 1 if "padded vocabulary" in out else 128
    padded = -(-work.real // multiple) * multiple
    compiled: Any = "auto" if work.task["name"] == "classify" else device.type == "cuda"  # auto records small models
    compiled = False if "compiling" in out else compiled
    last = {"validate_every": NEVER, "checkpoint_every": NEVER, "log_every": work.warm + work.steps, "weights": "last"}
    tree = {
        "model": {"vocabulary": padded, **work.model, **({"activation": "gelu"} if "exact" in " ".join(more) else {})},
        "task": work.task,
        "train": {**work.train, "steps": work.warm + work.steps, "valid_tokens": 1, **last}
        | {"compile": next((way for way in ("replay", "both") if any(way in name for name in more)), compiled)}
        | ({"dtype": "float8"} if any("eight" in name for name in more) else {}),
    }
    if work.task["name"] == "classify":
        tree |= {"data": {}, "transfer": {"run": "none", "init": "scratch"}}
    return make_config(tree)


@contextmanager
def profiled(device: torch.device) -> Iterator[None]:
    """Afterwards, which kernels took longest, of all steps together: a run that is not fit to be timed."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        yield
    print(seen.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=40), file=sys.stderr)


def ours(
    name: str,
    work: Work,
    text: Text,
    device: torch.device,
    out: list[str],
    more: list[str],
    profiling: bool = False,
) -> Told:
    began = time.perf_counter()
    torch._dynamo.reset()
    chosen = settings_of(work, out, more, device)
    if work.task["name"] == "classify":
        tokenizer = text.tokenizer(301)  # asked for its marks only
        rows = made_up_reviews(work, 1600 if work.steps > 4 else 40)
        data: Any = LabelledData(rows, rows.select(range(8)))
    else:
        tokenizer, data = text.stores(work)
    task = build_task(chosen, tokenizer)
    model = build_model(chosen, task)
    moments: list[tuple[float, int]] = []
    losses: list[float] = []

    def hear(event: Event) -> None:
        if event.kind == "step" and event.state.step in (work.warm, work.warm + work.steps):
            wait(device)
            moments.append((time.perf_counter(), event.state.tokens))
        elif event.kind == "log":
            losses.append(event.state.loss)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with changed(out), profiled(device) if profiling else nullcontext():
        train(model, task, data, chosen.train, run=None, distributed=DistributedContext(device), callbacks=[hear])
    (start, before), (end, after) = moments
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    how = ", ".join([f"without {x}" for x in out] + [f"with {x}" for x in more]) or "headstock"
    seconds = end - start
    return Told(name, how, (after - before) / seconds, 1000 * seconds / work.steps, losses[-1], start - began, peak)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Their side


def theirs(name: str, work: Work, text: Text, device: torch.device, given: argparse.Namespace) -> Iterator[Told]:
    """What peers' own code does with the same shape; those that are not installed are passed over."""

    def told(how: str, found: tuple[float, float, float]) -> Told:
        speed, ms, loss = found
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        return Told(name, how, speed, ms, loss, 0.0, peak)

    shape = {"vocabulary": work.real, "batch": work.train["batch"], **work.model}
    shape["places"] = shape["batch"] * work.train.get("length", shape["context"])  # of a step
    steps: dict[str, Any] = {"warm": work.warm, "steps": work.steps, "device": device}
    if name == "gpt" and given.nanogpt:
        from peers.nanogpt import measure as nanogpt

        yield told("nanoGPT, compiled", nanogpt(Path(given.nanogpt), shape, compiled=not given.tiny, **steps))
    if not given.peers or name not in ("bert", "finetune"):
        return
    from peers import huggingface_training as huggingface

    if name == "bert":
        tokenizer, stores = text.stores(work)
        rows = [stores.train.document(i).tolist() for i in range(min(stores.train.documents, 200_000))]
        marks = (tokenizer.cls or 0, tokenizer.mask or 0)
        found = huggingface.masked(rows, marks, shape, padded_to=128, compiled=not given.tiny, **steps)
        yield told("Hugging Face, compiled, padded to 128", found)
    else:
        texts = made_up_reviews(work, 1600 if work.steps > 4 else 40)
        by = "Trainer" if huggingface.HAS_TRAINER else "a bare loop"
        rows = [[OPENING, *tokens] for tokens in texts.tokens]  # as ours begin, so that no text's own token is asked
        yield told(f"Hugging Face, {by}", huggingface.classifier(rows, texts.labels, shape, **steps))


# The table


def print_table(rows: list[Told], say: Callable[[str], None] = print) -> None:
    heads = f"{'tokens/s':>12s} {'ratio':>6s} {'ms/step':>8s} {'loss':>8s} {'first s':>8s} {'GB':>6s}"
    say(f"{'work':9s} {'how':38s} {heads}")
    for row in rows:
        whole = next(other for other in rows if other.work == row.work)
        say(
            f"{row.work:9s} {row.how:38s} {row.tokens_per_second:12,.0f} "
            f"{row.tokens_per_second / whole.tokens_per_second:6.2f} {row.step_ms:8.2f} {row.loss:8.4f} "
            f"{row.first:8.1f} {row.peak_gb:6.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=list(WORKS), nargs="+", default=list(WORKS))
    parser.add_argument("--text", help="a text file, one document a line; made-up lines unless given")
    parser.add_argument("--without", nargs="+", default=[], choices=["all", *WITHOUT], help="leave out, one at a time")
    parser.add_argument("--with", nargs="+", default=[], choices=["all", *WITH], dest="more", help="add, one at a time")
    parser.add_argument("--no-plain", action="store_true", help="do not measure what is neither without nor with")
    parser.add_argument("--batch", type=int, help="rows in a step, of every work")
    parser.add_argument("--length", type=int, help="tokens in a row, of every work; a peer pads to what it pads to")
    parser.add_argument("--steps", type=int, help="steps that are timed, of every work")
    parser.add_argument("--nanogpt", help="folder of nanoGPT's own code")
    parser.add_argument("--peers", action="store_true", help="measure Hugging Face's too")
    parser.add_argument("--profile", action="store_true", help="tell which kernels take longest; it slows them")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to try the script")
    parser.add_argument("--out", help="a JSON file to write")
    parser.add_argument("--kept", type=Path, help="a folder that keeps tokenizers and tokens for the next call")
    given = parser.parse_args()
    device = torch.device(given.device)
    out = WITHOUT if "all" in given.without else given.without
    more = WITH if "all" in given.more else given.more
    rows: list[Told] = []
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    facts = {"date": str(date.today()), "device": where, "torch": torch.__version__}

    def tell(row: Told) -> None:
        """Told and written at once: whoever is stopped in between has what came before."""
        rows.append(row)
        print_table([row], lambda line: print(line, file=sys.stderr, flush=True))
        if given.out:
            whole = facts | {"rows": [asdict(row) for row in rows]}
            Path(given.out).write_text(json.dumps(whole, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as forgotten:
        folder = given.kept or Path(forgotten)
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(given.text) if given.text else folder / f"text{'-tiny' if given.tiny else ''}.txt"
        if not given.text and not path.exists():
            path.write_text("\n".join(islice(random_lines(), 1000 if given.tiny else 200_000)) + "\n", encoding="utf-8")
        text = Text(path, folder)
        for name in given.only:
            work = tiny(WORKS[name]) if given.tiny else WORKS[name]
            sizes = {"batch": given.batch, "length": given.length}
            work = replace(work, train=work.train | {what: size for what, size in sizes.items() if size})
            work = replace(work, steps=given.steps or work.steps)
            plans = [*([] if given.no_plain else [([], [])]), *(([x], []) for x in out), *(([], [x]) for x in more)]
            for row in theirs(name, work, text, device, given):  # first, so that ratios are to theirs
                tell(row)
            for left, added in plans:
                try:
                    tell(ours(name, work, text, device, left, added, given.profile))
                except Exception as wrong:  # the others are worth knowing even so
                    print(f"{name}, without {left}, with {added}: {type(wrong).__name__}: {wrong}", file=sys.stderr)
    print_table(rows)
    print(f"{date.today()}, {where}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
