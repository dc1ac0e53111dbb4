"""How long one text takes to classify on the CPU: here, in ONNX Runtime with and without 8-bit numbers, elsewhere.

    python benchmarks/latency.py
    python benchmarks/latency.py --preset bert-small --threads 2

All four compute the same classifier: one run is made and exported, its weights are random (what they are does not
change how long they take). Texts are read one at a time, in turns, so that what else the machine does falls on all
four alike; each time is from the text's tokens to the scores of its classes. Needs headstock[interop].
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

import headstock
from headstock.interop import export_run
from headstock.interop.onnx import open_session
from headstock.model.batch import Batch

SETTINGS: dict[str, Any] = {"pool": "cls", "dense": "tanh", "task.opening": "cls", "closed": True, "task.dropout": 0.0}
SETTINGS |= {"bidirectional": True}  # BERT's presets leave it to the objective, and here there was none
WAYS = ("Hugging Face, eager", "Headstock", "ONNX float32", "ONNX int8")


def some_texts(count: int, *, longest: int, seed: int) -> list[str]:
    """Words out of two thousand, a few to many of them."""
    pick = random.Random(seed)
    words = ["".join(pick.choices("abcdefghijklmnopqrstuvwxyz", k=pick.randint(2, 9))) for _ in range(2000)]
    return [" ".join(pick.choices(words, k=pick.randint(4, longest))) for _ in range(count)]


def make_run(folder: Path, given: argparse.Namespace) -> Path:
    texts = some_texts(400, longest=given.words, seed=0)
    rows = [f"{text},{('bad', 'good')[i % 2]}" for i, text in enumerate(texts)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = SETTINGS | {"steps": 1, "batch": 4, "length": 256, "tokenizer.vocabulary": given.vocabulary}
    headstock.finetune(preset=given.preset, train=folder / "rows.csv", out=folder / "run", settings=settings)
    return folder / "run"


def ways_of(run: Path, folder: Path, threads: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """By name, a function from a row of tokens to the scores of the classes."""
    from transformers import AutoModelForSequenceClassification

    export_run(run, folder / "huggingface", to="huggingface")
    export_run(run, folder / "onnx", to="onnx", int8=True)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "huggingface").eval()
    loaded = headstock.load(run, device="cpu")
    task, model = loaded.classification_task(), loaded.model

    def eager(row: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            tokens = torch.from_numpy(row)
            return theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.numpy()

    def ours(row: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model.heads["label"](task.read(model, Batch(torch.from_numpy(row)))).numpy()

    def onnx(name: str) -> Callable[[np.ndarray], np.ndarray]:
        session = open_session(folder / "onnx" / name, threads=threads)
        return lambda row: session.run(["logits"], {"input_ids": row, "attention_mask": np.ones_like(row)})[0]

    return dict(zip(WAYS, (eager, ours, onnx("model.onnx"), onnx("model_int8.onnx")), strict=True))


def measure(
    ways: dict[str, Callable[[np.ndarray], np.ndarray]], rows: list[np.ndarray]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each way for each row, and how far its scores are from the first way's at most."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    apart = dict.fromkeys(ways, 0.0)
    for row in rows[:5]:  # to warm up
        for way in ways.values():
            way(row)
    for row in rows:
        wanted = None
        for name, way in ways.items():
            began = time.perf_counter()
            scores = way(row)
            seconds[name].append(time.perf_counter() - began)
            wanted = scores if wanted is None else wanted
            apart[name] = max(apart[name], float(np.abs(scores - wanted).max()))
    return seconds, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="bert-mini", help="what the classifier is made like")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--words", type=int, default=60, help="in the longest text")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), given)
        loaded = headstock.load(run, device="cpu")
        ways = ways_of(run, Path(folder), given.threads)
        task, texts = loaded.classification_task(), some_texts(given.texts, longest=given.words, seed=1)
        rows = [np.array(task.rows(ids, 256)) for ids in loaded.tokenizer.encode_batch(texts)]
        seconds, apart = measure(ways, rows)
        parameters = loaded.model.parameter_counts()["total"]
        files = {name: (Path(folder) / "onnx" / file).stat().st_size for name, file in FILES.items()}
    lengths = [row.shape[1] for row in rows]
    print(
        f"{given.preset}, {parameters:,} parameters, {len(rows)} texts of {min(lengths)} to {max(lengths)} tokens "
        f"(median {statistics.median(lengths):.0f}), one at a time, threads {given.threads}, torch {torch.__version__}"
    )
    print(f"{'':20s} {'median ms':>10s} {'90% below':>10s} {'speed':>7s} {'scores apart':>13s} {'file MB':>8s}")
    slow = seconds[WAYS[0]]
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(slow, times, strict=True))
        size = f"{files[name] / 1e6:8.1f}" if name in files else f"{'':8s}"
        middle, high = statistics.median(times) * 1e3, float(np.quantile(times, 0.9)) * 1e3
        print(f"{name:20s} {middle:10.2f} {high:10.2f} {ratio:6.2f}x {apart[name]:13.1e} {size}")
    print("speed is the median over the texts of how many times as fast as Hugging Face each was at the same text")


FILES = {"ONNX float32": "model.onnx", "ONNX int8": "model_int8.onnx"}

if __name__ == "__main__":
    main()
