"""Compares fine-tuning settings for CLS-books by cross-validation on its labelled rows.

    python benchmarks/cls_books.py --out runs/search [--candidates plain r-drop] [--repeats 2] [--processes 4]

The candidates are in benchmarks/cls_books.toml; --recipe names another such file. Each of the five folds has a seed of
its own, and another one in every repeat. Results are appended to OUT/results.jsonl: a line per pretraining with its
length and metrics, and one per candidate with the accuracy of each fold, their mean, and the difference from the first
candidate, paired by fold, with corrected 95% intervals. What is in OUT is not trained again, so that candidates can be
compared with another one by naming it first. The test texts are not read.
"""

import argparse
import json
import shutil
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from distilled_classifier import (
    HELD_OUT,
    class_names,
    common_arguments,
    pretrain_all,
    pretraining_summary,
    process_pool,
    read_predictions,
)

import headstock
from headstock.data.labelled_texts import read_records
from headstock.data.records import Records, join_records
from headstock.experiments.cross_validation import assign_folds
from headstock.experiments.trial_evaluation import t_interval
from headstock.intervals import Interval

RECIPE = Path(__file__).with_suffix(".toml")

Calls = dict[str, list[Future[tuple[float, float]]]]  # by candidate: accuracy and seconds of each fine-tuning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--candidates", nargs="*", help="default: all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="each with other folds and seeds")
    parser.add_argument("--processes", type=int, default=4, help="fine-tunings at once")
    parser.add_argument("--pretrainings", type=int, default=1, help="at once: while one compiles, another may train")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text(encoding="utf-8"))
    names = options.candidates or list(recipe["candidates"])
    candidates = {name: dict(recipe["candidates"][name]) for name in names}
    rows = join_records(*(read_records(recipe["data"][name]) for name in ("train", "valid")))
    runs = dict.fromkeys(candidate["run"] for candidate in candidates.values())
    starts = {start: None for name in runs if (start := recipe["pretrain"][name].get("start"))}
    needed = {name: recipe["pretrain"][name] for name in starts | runs}
    options.out.mkdir(parents=True, exist_ok=True)
    with process_pool(options.pretrainings) as first, process_pool(options.processes) as pool:
        pretrained = pretrain_all(needed, rows, Path("recipes"), options.out, options.device, first, beside=pool)
        calls: Calls = {name: [] for name in names}
        run_of = {done: name for name, (_, done) in pretrained.items()}
        for done in as_completed(run_of):
            if error := done.exception():
                print(json.dumps({"pretraining": run_of[done], "error": repr(error)[:300]}), flush=True)
                continue
            for name, candidate in candidates.items():
                if candidate["run"] == run_of[done]:
                    settings = recipe["finetune"] | {key: value for key, value in candidate.items() if key != "run"}
                    calls[name] = submit_folds(pool, options.out / candidate["run"], name, settings, rows, options)
        with (options.out / "results.jsonl").open("a", encoding="utf-8") as file:
            for name, (folder, done) in pretrained.items():
                if done.exception() is None:
                    file.write(json.dumps({"pretraining": name, **pretraining_summary(folder)}) + "\n")
            for row in candidate_rows(candidates, calls, options.folds):
                print(json.dumps(row), flush=True)
                if "error" not in row:
                    file.write(json.dumps(row) + "\n")


def candidate_rows(candidates: dict[str, Any], calls: Calls, folds: int) -> Iterator[dict[str, Any]]:
    """The scores of each candidate, as soon as its fine-tunings are done, and their difference from the first one's."""
    overlap = 1 / ((folds - 1) * (1 - HELD_OUT))  # of the rows that score a model over those that train it
    first = next(iter(candidates))
    reference: np.ndarray | None = None
    for name, candidate in candidates.items():
        if not calls[name]:  # its pretraining failed
            continue
        try:
            results = [call.result() for call in calls[name]]
        except Exception as error:
            yield {"candidate": name, "error": repr(error)[:300]}
            continue
        scores = np.array([score for score, _ in results])  # (repeats x folds,)
        row = {"candidate": name, **candidate, "accuracy": scores.round(5).tolist()}
        row |= {"mean": rounded(t_interval(scores.tolist(), overlap=overlap))}
        if reference is not None:
            row["reference"] = first
            row["difference"] = rounded(t_interval((scores - reference).tolist(), overlap=overlap))
        reference = scores if name == first else reference
        yield row | {"seconds": round(sum(seconds for _, seconds in results), 1)}


def rounded(interval: Interval) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in interval]


def submit_folds(
    pool: ProcessPoolExecutor,
    run: Path,
    name: str,
    settings: dict[str, Any],
    rows: Records,
    options: argparse.Namespace,
) -> list[Future[tuple[float, float]]]:
    """For each fold of each repeat the call that trains on the rows of the other folds."""
    assert rows.labels is not None
    calls = []
    for repeat in range(options.repeats):
        folds = assign_folds(rows, options.folds, seed=repeat, strata=rows.labels)
        for fold in range(options.folds):
            out = options.out / "candidates" / name / f"{repeat}-{fold}"
            train, held_out = (rows.select(np.flatnonzero(part).tolist()) for part in (folds != fold, folds == fold))
            seed = repeat * options.folds + fold
            calls.append(pool.submit(accuracy, run, settings, train, held_out, out, seed, options.device))
    return calls


def accuracy(
    run: Path, settings: dict[str, Any], train: Records, held_out: Records, out: Path, seed: int, device: str
) -> tuple[float, float]:
    """The accuracy on the held-out rows of a model that is trained on the others, and its seconds of training."""
    classes = class_names(train)
    if not (out / "results.json").exists():
        settings = settings | {"valid_fraction": HELD_OUT}
        headstock.finetune(run, out=out, settings=settings, **common_arguments(train, held_out, seed, device))
        for folder in (out / "checkpoints", out / "adapted", out / "members"):
            shutil.rmtree(folder, ignore_errors=True)  # a hundred of them would fill a disk
        (out / "model.safetensors").unlink()
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    truth = np.array([classes.index(label) for label in held_out.labels or []])
    return float((read_predictions(out, classes).argmax(1) == truth).mean()), results["seconds"]


if __name__ == "__main__":
    main()
