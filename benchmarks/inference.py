"""Inference speed relative to Hugging Face transformers, with the same weights in the same process.

    python benchmarks/inference.py                               on the CPU: 10,000 texts, batches of 1 and 64 rows
    python benchmarks/inference.py --device cuda --dtype bfloat16 --texts 100000
    python benchmarks/inference.py --task predict --file my.txt  your own texts, one per line
    python benchmarks/inference.py --tiny                        a quick check that everything runs

Cached greedy decoding is compared with `generate`, for prompts of equal and of different lengths; `predict` and `embed`
with the text-classification and feature-extraction pipelines. After a warm-up the sides are timed alternately. The
table has medians of wall-clock and of CPU time, which varies less on a shared machine. The outputs of both sides are
compared before anything is timed. Needs headstock[interop].
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

CLASSIFIER: dict[str, Any] = {"pool": "cls", "dense": "tanh", "task.opening": "cls", "closed": True}
CLASSIFIER |= {"task.dropout": 0.0, "bidirectional": True, "steps": 1, "batch": 4, "length": 256}
TINY = {"depth": 2, "width": 32, "heads": 2, "hidden": 64}
TASKS = ("generate", "predict", "embed")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LOG_DEVIATION = 0.57  # of the logarithm of the number of words, in 50,000 French sentences


def some_texts(count: int, *, words: float, seed: int) -> list[str]:
    """Random texts with Zipf-distributed words and the length distribution of sentences."""
    letters, generator = random.Random(0), random.Random(seed)
    vocabulary_words = ["".join(letters.choices(LETTERS, k=letters.randint(2, 9))) for _ in range(20_000)]
    weights = list(accumulate(1 / rank for rank in range(1, len(vocabulary_words) + 1)))
    log_mean = np.log(words) - LOG_DEVIATION**2 / 2
    lengths = [max(1, round(generator.lognormvariate(log_mean, LOG_DEVIATION))) for _ in range(count)]
    return [" ".join(generator.choices(vocabulary_words, cum_weights=weights, k=length)) for length in lengths]


def causal_run(folder: Path, args: argparse.Namespace) -> Path:
    """A language model with random weights, large enough that its text does not repeat at once."""
    texts = some_texts(400 if args.tiny else 4000, words=20, seed=0)
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    settings = {"steps": 1, "batch": 2, "tokenizer.vocabulary": args.vocabulary} | (TINY if args.tiny else {})
    headstock.pretrain(folder / "text.txt", out=folder / "causal", preset=args.causal, settings=settings, device="cpu")
    run, generator = open_run(folder / "causal"), torch.Generator().manual_seed(0)
    weights = run.weights()
    for name, tensor in weights.items():
        if "norm" not in name:
            tensor.normal_(std=0.08, generator=generator)
    run.save_weights(weights)
    return run.path


def classifier_run(folder: Path, args: argparse.Namespace) -> Path:
    """A classifier with two classes and random weights."""
    texts = some_texts(400 if args.tiny else 4000, words=args.words, seed=0)
    rows = [f"{text},{('bad', 'good')[i % 2]}" for i, text in enumerate(texts)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = CLASSIFIER | {"tokenizer.vocabulary": args.vocabulary} | (TINY if args.tiny else {})
    out = folder / "classes"
    headstock.finetune(preset=args.masked, train=folder / "rows.csv", out=out, settings=settings, device="cpu")
    return out


def load_pipeline(run: Path, args: argparse.Namespace) -> Pipeline:
    """Load a run in the given precision instead of the default one."""
    loaded = headstock.load(run, device=args.device, int8=args.int8)
    loaded.config = replace(loaded.config, train=replace(loaded.config.train, dtype=args.dtype))
    for model in loaded.models:
        model.to(dtype=getattr(torch, args.dtype))
    return loaded


Times = list[tuple[float, float]]


def time_call(function: Callable[[], Any], times: Times) -> Any:
    """Call the function and record its wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return result


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Median seconds of both sides, and how many times as fast ours is."""
    sides: list[tuple[Callable[[], Any], Times]] = [(ours, []), (theirs, [])]
    for _ in range(rounds):
        for function, times in sides:
            time_call(function, times)
    our_times, their_times = (
        [statistics.median(seconds) for seconds in zip(*times, strict=True)] for _, times in sides
    )
    return {
        "ours_seconds": our_times[0],
        "theirs_seconds": their_times[0],
        "ratio": their_times[0] / our_times[0],
        "cpu_ratio": their_times[1] / our_times[1],
    }


def measure_generation(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    run = causal_run(folder, args)
    export_run(run, folder / "causal-hf", to="huggingface")
    loaded = load_pipeline(run, args)
    theirs = peer.generator(folder / "causal-hf", device=args.device, dtype=getattr(torch, args.dtype))
    greedy, vocabulary, results = Sampling(temperature=0.0), loaded.config.model.vocabulary, []
    for rows, uneven in [(rows, False) for rows in args.rows] + [(max(args.rows), True)]:
        generator = random.Random(rows)
        lengths = [generator.randint(4, 2 * args.prompt - 4) if uneven else args.prompt for _ in range(rows)]
        prompts = [[generator.randrange(10, vocabulary) for _ in range(length)] for length in lengths]

        def ours(prompts: list[list[int]] = prompts) -> list[list[int]]:
            generated = generate(loaded.model, prompts, max_tokens=args.tokens, sampling=greedy)
            return [row.tokens for row in generated]

        def peers(prompts: list[list[int]] = prompts) -> list[list[int]]:
            return theirs(prompts, args.tokens)

        our_output, their_output = ours(), peers()
        assert all(len(row) == args.tokens for row in our_output + their_output)
        timing = alternate(ours, peers, args.rounds)
        count = rows * args.tokens
        results.append(
            {"work": "generate", "rows": rows, "prompts": "uneven" if uneven else "even", "unit": "tokens"}
            | {"ours": count / timing["ours_seconds"], "theirs": count / timing["theirs_seconds"]}
            | timing
            | {"identical": sum(a == b for a, b in zip(our_output, their_output, strict=True)) / rows}
        )
    return results


def measure_texts(folder: Path, args: argparse.Namespace, tasks: list[str]) -> list[dict[str, Any]]:
    run = classifier_run(folder, args)
    export_run(run, folder / "classes-hf", to="huggingface")
    loaded, placement = load_pipeline(run, args), {"device": args.device, "dtype": getattr(torch, args.dtype)}
    texts = some_texts(args.texts, words=args.words, seed=1)
    if args.file:
        texts = [line for line in args.file.read_text(encoding="utf-8").split("\n") if line.strip()][: args.texts]
    sample, results = texts[: max(8, len(texts) // 20)], []
    for task in tasks:
        theirs: Any = (peer.classifier if task == "predict" else peer.embedder)(folder / "classes-hf", **placement)
        size = peer.fastest_batch_size(theirs, sample, args.sizes)
        ours: Any = loaded.predict if task == "predict" else partial(loaded.embed, pool="cls")
        difference = max_difference(task, ours(sample), theirs(sample, size))
        tolerance = 1e-4 if args.dtype == "float32" and not args.int8 else 0.2
        assert difference < tolerance, f"{task}: the sides differ by {difference}"
        timing = alternate(partial(ours, texts), partial(theirs, texts, size), args.rounds)
        count = len(texts)
        results.append(
            {"work": task, "texts": count, "their_batch": size, "unit": "texts"}
            | {"ours": count / timing["ours_seconds"], "theirs": count / timing["theirs_seconds"]}
            | timing
            | {"max_difference": difference}
        )
    return results


def max_difference(task: str, ours: Any, theirs: Any) -> float:
    """The largest difference between the outputs of both sides."""
    if task == "embed":
        return float(np.abs(ours - theirs).max())
    pairs = zip(ours, theirs, strict=True)
    return max(abs(p - other[name]) for row, other in pairs for name, p in row["probabilities"].items())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--int8", action="store_true", help="use int8 on our side (CPU only)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--causal", default="gpt-mini", help="preset for generation")
    parser.add_argument("--masked", default="bert-mini", help="preset for classification")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per row")
    parser.add_argument("--prompt", type=int, default=16, help="tokens per prompt")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--words", type=float, default=20, help="mean words per text")
    parser.add_argument("--file", type=Path, help="texts, one per line (default: random)")
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes to try for the pipelines")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="a very small model and few texts")
    args = parser.parse_args()
    if args.tiny:
        args.texts, args.tokens, args.rows, args.rounds, args.vocabulary = 60, 6, [1, 3], 1, 300
    args.sizes = args.sizes or ([16, 64, 256, 1024] if args.device.startswith("cuda") else [1, 8, 16, 64])
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = measure_generation(folder, args) if "generate" in args.task else []
        text_tasks = [task for task in TASKS[1:] if task in args.task]
        results += measure_texts(folder, args, text_tasks) if text_tasks else []
    device_name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {args.threads} threads"
    environment = {
        "device": device_name,
        "dtype": "int8" if args.int8 else args.dtype,
        "torch": torch.__version__,
        "transformers": peer.version,
    }
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"{'':32s} {'ours':>10s} {'theirs':>10s}   {'ratio':>6s} {'by CPU time':>18s}")
    for row in results:
        label = f"{row['rows']} rows, {row['prompts']} prompts" if "rows" in row else f"{row['texts']:,} texts"
        speeds = f"{row['ours']:10,.0f} {row['theirs']:10,.0f}"
        ratios = f"{row['ratio']:6.2f}x {row['cpu_ratio']:17.2f}x"
        print(f"{row['work']:9s} {label:22s} {speeds}  {ratios}  {row['unit']}/s")
    if args.json:
        args.json.write_text(json.dumps(environment | {"results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
