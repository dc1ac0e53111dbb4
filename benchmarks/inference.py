"""How fast a finished model is used: ratios to Hugging Face's transformers with the same weights in the same process.

    python benchmarks/inference.py                               on the CPU: 10,000 texts, one row and 64 rows
    python benchmarks/inference.py --device cuda --dtype bfloat16 --texts 100000
    python benchmarks/inference.py --work predict --file my.txt  texts of yours, one a line
    python benchmarks/inference.py --tiny                        seconds, to see that all of it runs

Cached greedy generation is compared with `generate`, with prompts of one length and of many; `predict` and `embed` with
the text-classification and feature-extraction pipelines. The sides take turns, after a warm-up; the table has medians,
by the clock and by processor time, which hardly moves when others use the machine. Before anything is timed the answers
of both sides are compared: a fast wrong answer would be worth nothing. Needs headstock[interop].
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from peers import huggingface_inference as peer

import headstock
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.inference.pipeline import Pipeline
from headstock.interop import export_run
from headstock.train.run_folder import open_run

CLASSIFIER: dict[str, Any] = {
    "pool": "cls",
    "dense": "tanh",
    "task.opening": "cls",
    "closed": True,
    "task.dropout": 0.0,
}
CLASSIFIER |= {"bidirectional": True, "steps": 1, "batch": 4, "length": 256}
TINY = {"depth": 2, "width": 32, "heads": 2, "hidden": 64}
WORKS = ("generate", "predict", "embed")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPREAD = 0.57  # of the logarithm of a text's number of words; measured on 50,000 French sentences


def some_texts(count: int, *, words: float, seed: int) -> list[str]:
    """Made-up texts of words that are as rare, and of lengths that are as spread, as those of sentences are."""
    letters, draw = random.Random(0), random.Random(seed)
    known = ["".join(letters.choices(LETTERS, k=letters.randint(2, 9))) for _ in range(20_000)]
    often = list(accumulate(1 / rank for rank in range(1, len(known) + 1)))
    middle = np.log(words) - SPREAD**2 / 2
    lengths = [max(1, round(draw.lognormvariate(middle, SPREAD))) for _ in range(count)]
    return [" ".join(draw.choices(known, cum_weights=often, k=length)) for length in lengths]


def causal_run(folder: Path, given: argparse.Namespace) -> Path:
    """A language model whose weights are random, but wide enough that its text does not fall into a loop at once."""
    (folder / "text.txt").write_text("\n".join(some_texts(4000, words=20, seed=0)), encoding="utf-8")
    settings = {"steps": 1, "batch": 2, "tokenizer.vocabulary": given.vocabulary} | (TINY if given.tiny else {})
    headstock.pretrain(folder / "text.txt", out=folder / "causal", preset=given.causal, settings=settings, device="cpu")
    run, draw = open_run(folder / "causal"), torch.Generator().manual_seed(0)
    weights = run.weights()
    for name, tensor in weights.items():
        if "norm" not in name:
            tensor.normal_(std=0.08, generator=draw)
    run.save_weights(weights)
    return run.path


def class_run(folder: Path, given: argparse.Namespace) -> Path:
    """A classifier of two classes; its weights are random, for what they are does not change how long they take."""
    rows = [f"{text},{('bad', 'good')[i % 2]}" for i, text in enumerate(some_texts(4000, words=given.words, seed=0))]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = CLASSIFIER | {"tokenizer.vocabulary": given.vocabulary} | (TINY if given.tiny else {})
    out = folder / "classes"
    headstock.finetune(preset=given.masked, train=folder / "rows.csv", out=out, settings=settings, device="cpu")
    return out


def opened(run: Path, given: argparse.Namespace) -> Pipeline:
    """Our side in the precision that was asked for; it would choose its own."""
    loaded = headstock.load(run, device=given.device, int8=given.int8)
    loaded.config = replace(loaded.config, train=replace(loaded.config.train, dtype=given.dtype))
    for model in loaded.models:
        model.to(dtype=getattr(torch, given.dtype))
    return loaded


Times = list[tuple[float, float]]


def timed(work: Callable[[], Any], times: Times) -> Any:
    """Do it, and note its seconds by the clock and on all processors together."""
    clock, processors = time.perf_counter(), time.process_time()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times.append((time.perf_counter() - clock, time.process_time() - processors))
    return result


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Seconds of both, medians over the rounds, and how many times as fast ours is."""
    sides: list[tuple[Callable[[], Any], Times]] = [(ours, []), (theirs, [])]
    for _ in range(rounds):
        for work, times in sides:
            timed(work, times)
    own, other = ([statistics.median(each) for each in zip(*times, strict=True)] for _, times in sides)
    return {
        "ours_seconds": own[0],
        "theirs_seconds": other[0],
        "ratio": other[0] / own[0],
        "processor_ratio": other[1] / own[1],
    }


def measure_generation(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    run = causal_run(folder, given)
    export_run(run, folder / "causal-hf", to="huggingface")
    loaded = opened(run, given)
    theirs = peer.generator(folder / "causal-hf", device=given.device, dtype=getattr(torch, given.dtype))
    greedy, vocabulary, found = Sampling(temperature=0.0), loaded.config.model.vocabulary, []
    for rows, uneven in [(rows, False) for rows in given.rows] + [(max(given.rows), True)]:
        draw = random.Random(rows)
        lengths = [draw.randint(4, 2 * given.prompt - 4) if uneven else given.prompt for _ in range(rows)]
        prompts = [[draw.randrange(10, vocabulary) for _ in range(length)] for length in lengths]

        def ours(prompts: list[list[int]] = prompts) -> list[list[int]]:
            made = generate(loaded.model, prompts, max_tokens=given.tokens, sampling=greedy)
            return [row.tokens for row in made]

        def peers(prompts: list[list[int]] = prompts) -> list[list[int]]:
            return theirs(prompts, given.tokens)

        one, other = ours(), peers()
        assert all(len(row) == given.tokens for row in one + other)
        told = in_turns(ours, peers, given.rounds)
        made = rows * given.tokens
        found.append(
            {"work": "generate", "rows": rows, "prompts": "uneven" if uneven else "even", "unit": "tokens"}
            | {"ours": made / told["ours_seconds"], "theirs": made / told["theirs_seconds"]}
            | told
            | {"same": sum(a == b for a, b in zip(one, other, strict=True)) / rows}
        )
    return found


def measure_reading(folder: Path, given: argparse.Namespace, works: list[str]) -> list[dict[str, Any]]:
    run = class_run(folder, given)
    export_run(run, folder / "classes-hf", to="huggingface")
    loaded, where = opened(run, given), {"device": given.device, "dtype": getattr(torch, given.dtype)}
    texts = some_texts(given.texts, words=given.words, seed=1)
    if given.file:
        texts = [line for line in given.file.read_text(encoding="utf-8").split("\n") if line.strip()][: given.texts]
    sample, found = texts[: max(8, len(texts) // 20)], []
    for work in works:
        theirs: Any = (peer.classifier if work == "predict" else peer.embedder)(folder / "classes-hf", **where)
        size = peer.best_batch(theirs, sample, given.sizes)
        ours: Any = loaded.predict if work == "predict" else partial(loaded.embed, pool="cls")
        apart = distance(work, ours(sample), theirs(sample, size))
        near = 1e-4 if given.dtype == "float32" and not given.int8 else 0.2
        assert apart < near, f"{work}: the sides differ by {apart}"
        told = in_turns(partial(ours, texts), partial(theirs, texts, size), given.rounds)
        count = len(texts)
        found.append(
            {"work": work, "texts": count, "their_batch": size, "unit": "texts"}
            | {"ours": count / told["ours_seconds"], "theirs": count / told["theirs_seconds"]}
            | told
            | {"apart": apart}
        )
    return found


def distance(work: str, ours: Any, theirs: Any) -> float:
    """How far the two sides' answers are apart at most."""
    if work == "embed":
        return float(np.abs(ours - theirs).max())
    pairs = zip(ours, theirs, strict=True)
    return max(abs(p - other[name]) for one, other in pairs for name, p in one["probabilities"].items())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--int8", action="store_true", help="our side in 8 bits, on a CPU; theirs stays as it is")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--causal", default="gpt-mini", help="the preset that writes")
    parser.add_argument("--masked", default="bert-mini", help="the preset that reads")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a row")
    parser.add_argument("--prompt", type=int, default=16, help="tokens in a prompt")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--words", type=float, default=20, help="in a text, on average")
    parser.add_argument("--file", type=Path, help="texts, one a line; made up when not given")
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes the pipelines may choose from")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--tiny", action="store_true", help="a very small model and little work")
    given = parser.parse_args()
    if given.tiny:
        given.texts, given.tokens, given.rows, given.rounds, given.vocabulary = 60, 6, [1, 3], 1, 300
    given.sizes = given.sizes or ([16, 64, 256, 1024] if given.device.startswith("cuda") else [1, 8, 16, 64])
    return given


def main() -> None:
    given = options()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measure_generation(folder, given) if "generate" in given.work else []
        reading = [work for work in WORKS[1:] if work in given.work]
        found += measure_reading(folder, given, reading) if reading else []
    card = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"CPU, {given.threads} threads"
    about = {
        "device": card,
        "dtype": "int8" if given.int8 else given.dtype,
        "torch": torch.__version__,
        "transformers": peer.version,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':32s} {'ours':>10s} {'theirs':>10s}   {'ratio':>6s} {'by processor time':>18s}")
    for row in found:
        what = f"{row['rows']} rows, {row['prompts']} prompts" if "rows" in row else f"{row['texts']:,} texts"
        speeds = f"{row['ours']:10,.0f} {row['theirs']:10,.0f}"
        ratios = f"{row['ratio']:6.2f}x {row['processor_ratio']:17.2f}x"
        print(f"{row['work']:9s} {what:22s} {speeds}  {ratios}  {row['unit']}/s")
    if given.json:
        given.json.write_text(json.dumps(about | {"results": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
