"""Fine-tunes with each setting of docs/howto/regularize.md, on the same rows, for the same number of steps and seeds.

headstock data get rotten-tomatoes --to data
python benchmarks/regularize.py data --out runs/regularize --json benchmarks/results/regularize.json

The training rows are the 400 quotes of docs/howto/finetune.md. Adaptation reads data/corpus.txt first; its steps come
on top of the others. Intervals are over test rows and seeds, differences to plain fine-tuning paired by both. Runs that
exist are not trained again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import headstock
from headstock.intervals import Interval, difference, interval

STEPS = 50
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "lm_loss=0.3": {"lm_loss": 0.3},
    "r_drop=1": {"r_drop": 1.0},
    "reinit_layers=1": {"reinit_layers": 1},
    "layer_decay=0.8": {"layer_decay": 0.8},
    "unfreeze=0.25": {"unfreeze": 0.25},
    "ema=0.9": {"ema": 0.9},
    "label_smoothing=0.1": {"label_smoothing": 0.1},
    "pool=concat": {"pool": "concat"},
    "adapt_steps=10": {"adapt_steps": 10, "adapt_text": ["{data}/corpus.txt"]},
    "adapt_average=0.5": {"adapt_steps": 10, "adapt_text": ["{data}/corpus.txt"], "adapt_average": 0.5},
    "soup=5": {"soup": 5},
    "ensemble=5": {"ensemble": 5},
    "token_dropout=0.15": {"token_dropout": 0.15},
    "token_dropout=0.15, r_drop=1": {"token_dropout": 0.15, "r_drop": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare settings that regularize or adapt.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="some of the settings; the file keeps its rows of the others")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    train = pd.read_csv(options.data / "train.csv").sample(400, random_state=0)
    test = pd.read_csv(options.data / "test.csv")
    correct = {
        name: np.array(
            [correct_rows(name, seed, train, test, options.data, options.out) for seed in range(options.seeds)]
        )
        for name in SETTINGS
        if options.only is None or name in ("none", *options.only)
    }
    rows = [summarize(name, correct) for name in correct]
    for row in rows:
        print(row)
    if options.json:
        if options.only is not None:
            saved = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
            merged = {row["settings"]: row for row in [*saved, *rows]}
            rows = [merged[name] for name in SETTINGS if name in merged]
        results = {"steps": STEPS, "train_rows": len(train), "test_rows": len(test), "rows": rows}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def correct_rows(name: str, seed: int, train: pd.DataFrame, test: pd.DataFrame, data: Path, out: Path) -> np.ndarray:
    """1 for each test row that a model of these settings and this seed classifies correctly, (N,)."""
    run, settings = out / f"{list(SETTINGS).index(name)}-seed-{seed}", dict(SETTINGS[name])
    if "adapt_text" in settings:
        settings["adapt_text"] = [path.format(data=data) for path in settings["adapt_text"]]
    if not (run / "results.json").exists():
        headstock.finetune(
            "reviews-en",
            train=train,
            valid=data / "valid.csv",
            out=run,
            seed=seed * settings.get("soup", settings.get("ensemble", 1)),  # no model is in two of them
            settings=settings | {"steps": STEPS},
            overwrite=run.exists(),
        )
    predictions = headstock.load(run).predict_values(list(test["text"]))
    right = np.array([row["label"] for row in predictions]) == test["label"].to_numpy()
    print(f"{name}, seed {seed}: {right.mean():.4f}", flush=True)
    return right.astype(float)


def summarize(name: str, correct: dict[str, np.ndarray]) -> dict[str, Any]:
    row: dict[str, Any] = {"settings": name, "by_seed": [round(float(mean), 5) for mean in correct[name].mean(1)]}
    row["accuracy"] = rounded(interval(correct[name], key=("accuracy",)))
    if name != "none":
        row["difference"] = rounded(difference(correct[name], correct["none"]))
    return row


def rounded(values: Interval) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in (values.mean, values.low, values.high)]


if __name__ == "__main__":
    main()
