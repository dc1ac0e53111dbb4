"""Latency of classifying one text on the CPU: Hugging Face, Headstock, and ONNX Runtime in float32 and int8.

    python benchmarks/latency.py
    python benchmarks/latency.py --preset bert-small --threads 2

All four compute the same classifier, with random weights. Texts are classified one at a time by each backend in turn,
so that other load on the machine affects all four alike. A time covers the steps from token ids to class scores.
Needs headstock[interop].
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

import headstock
from headstock.interop import export_run
from headstock.interop.onnx import open_session
from headstock.model.batch import Batch
from headstock.tasks.pooled_text import PooledTextTask

SETTINGS: dict[str, Any] = {"pool": "cls", "dense": "tanh", "task.opening": "cls", "closed": True, "task.dropout": 0.0}
SETTINGS |= {"bidirectional": True}  # there is no pretraining objective to decide it
BACKENDS = ("Hugging Face, eager", "Headstock", "ONNX float32", "ONNX int8")
FILES = {"ONNX float32": "model.onnx", "ONNX int8": "model_int8.onnx"}


def random_texts(count: int, *, longest: int, seed: int) -> list[str]:
    """Texts of 4 to `longest` random words from a vocabulary of 2,000."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(2000)]
    return [" ".join(generator.choices(words, k=generator.randint(4, longest))) for _ in range(count)]


def make_run(folder: Path, args: argparse.Namespace) -> Path:
    texts = random_texts(400, longest=args.words, seed=0)
    rows = [f"{text},{('bad', 'good')[i % 2]}" for i, text in enumerate(texts)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = SETTINGS | {"steps": 1, "batch": 4, "length": 256, "tokenizer.vocabulary": args.vocabulary}
    headstock.finetune(preset=args.preset, train=folder / "rows.csv", out=folder / "run", settings=settings)
    return folder / "run"


def make_backends(run: Path, folder: Path, threads: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Functions from a row of token ids to the class scores, by name."""
    from transformers import AutoModelForSequenceClassification

    export_run(run, folder / "huggingface", to="huggingface")
    export_run(run, folder / "onnx", to="onnx", int8=True)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "huggingface").eval()
    loaded = headstock.load(run, device="cpu")
    task, model = cast(PooledTextTask, loaded.classification_task()), loaded.model

    def eager(row: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            tokens = torch.from_numpy(row)
            return theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.numpy()

    def ours(row: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model.heads["label"](task.pooled_features(model, Batch(torch.from_numpy(row)))).numpy()

    def onnx(name: str) -> Callable[[np.ndarray], np.ndarray]:
        session = open_session(folder / "onnx" / name, threads=threads)
        return lambda row: session.run(["logits"], {"input_ids": row, "attention_mask": np.ones_like(row)})[0]

    return dict(zip(BACKENDS, (eager, ours, onnx("model.onnx"), onnx("model_int8.onnx")), strict=True))


def measure(
    backends: dict[str, Callable[[np.ndarray], np.ndarray]], rows: list[np.ndarray]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each backend for each row, and its largest difference from the first backend's scores."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    differences = dict.fromkeys(backends, 0.0)
    for row in rows[:5]:  # warm-up
        for backend in backends.values():
            backend(row)
    for row in rows:
        expected = None
        for name, backend in backends.items():
            began = time.perf_counter()
            scores = backend(row)
            seconds[name].append(time.perf_counter() - began)
            expected = scores if expected is None else expected
            differences[name] = max(differences[name], float(np.abs(scores - expected).max()))
    return seconds, differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="bert-mini", help="preset of the classifier")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--words", type=int, default=60, help="words in the longest text")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), args)
        loaded = headstock.load(run, device="cpu")
        backends = make_backends(run, Path(folder), args.threads)
        task, texts = (
            cast(PooledTextTask, loaded.classification_task()),
            random_texts(args.texts, longest=args.words, seed=1),
        )
        rows = [np.array(task.sequences(ids, 256)) for ids in loaded.tokenizer.encode_batch(texts)]
        seconds, differences = measure(backends, rows)
        parameters = loaded.model.parameter_counts()["total"]
        files = {name: (Path(folder) / "onnx" / file).stat().st_size for name, file in FILES.items()}
    lengths = [row.shape[1] for row in rows]
    print(
        f"{args.preset}, {parameters:,} parameters, {len(rows)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"(median {statistics.median(lengths):.0f}), one at a time, threads {args.threads}, torch {torch.__version__}"
    )
    print(f"{'':20s} {'median ms':>10s} {'p90 ms':>10s} {'speedup':>7s} {'difference':>13s} {'file MB':>8s}")
    reference = seconds[BACKENDS[0]]
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(reference, times, strict=True))
        size = f"{files[name] / 1e6:8.1f}" if name in files else f"{'':8s}"
        median, p90 = statistics.median(times) * 1e3, float(np.quantile(times, 0.9)) * 1e3
        print(f"{name:20s} {median:10.2f} {p90:10.2f} {ratio:6.2f}x {differences[name]:13.1e} {size}")
    print("speedup: median over the texts of the time of Hugging Face divided by that of the backend")


if __name__ == "__main__":
    main()
