"""How fast a finished model is used: text a second, for generating, classifying and embedding, and fine-tuning one."""

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.experiments.bench.measurement import Measurement, median_seconds
from headstock.experiments.bench.synthetic_data import random_lines, write_labelled_rows
from headstock.experiments.bench.training import QUICK, Workload, settings_of
from headstock.inference.pipeline import Pipeline, load
from headstock.train.blueprint import blueprint
from headstock.train.finetune import finetune

PROMPT = 16
SPREAD = 0.08  # of random weights: wide enough that the text does not fall into a loop at once
SMALL: dict[str, Any] = {"depth": 2, "width": 32, "heads": 2, "hidden": 64}


def bench_decoding(device: torch.device, *, quick: bool) -> list[Measurement]:
    """Greedy, with a cache, one row and 64."""
    shape = QUICK if quick else Workload("gpt-base" if device.type == "cuda" else "gpt-mini", 1, 256, {})
    torch.manual_seed(0)
    model, _ = blueprint(settings_of(shape), weights=True)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=SPREAD)
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    new, draw, found = 8 if quick else 128, random.Random(0), []
    for rows in (1, 4) if quick else (1, 64):
        prompts = [[draw.randrange(10, 200) for _ in range(PROMPT)] for _ in range(rows)]
        write = partial(generate, model, prompts, max_tokens=new, sampling=Sampling(temperature=0.0))
        taken = median_seconds(write, rounds=1 if quick else 3, device=device)
        found.append(Measurement(f"decoding {shape.preset}, {rows} rows", rows * new / taken, "tokens/s"))
    return found


def bench_finetuned(device: torch.device, *, quick: bool) -> list[Measurement]:
    """A classifier is made, and then reads short texts."""
    preset, texts = ("bert-base", 20_000) if device.type == "cuda" else ("bert-nano", 1000)
    size = {**SMALL, "tokenizer.vocabulary": 400} if quick else {"tokenizer.vocabulary": 4000}
    settings = {"steps": 4 if quick else 30, "length": 128, "batch": 8 if quick else 32} | size
    with tempfile.TemporaryDirectory() as folder:
        rows = write_labelled_rows(Path(folder) / "rows.csv", 60 if quick else 1600)
        made = finetune(preset=preset, train=rows, out=Path(folder) / "run", settings=settings, device=device.type)
        loaded = load(Path(folder) / "run", device=device.type)
    some = random_lines(2)
    shown = [next(some) for _ in range(40 if quick else texts)]
    return [
        Measurement(f"fine-tuning {preset}", made["tokens_per_second"], "tokens/s"),
        timed(f"classifying with {preset}", lambda: loaded.predict(shown), len(shown), loaded, quick),
        timed(f"embedding with {preset}", lambda: loaded.embed(shown), len(shown), loaded, quick),
    ]


def timed(work: str, do: Any, count: int, loaded: Pipeline, quick: bool) -> Measurement:
    taken = median_seconds(do, rounds=1 if quick else 3, device=loaded.model.device)
    return Measurement(work, count / taken, "texts/s")
