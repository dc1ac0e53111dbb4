"""Compares pretraining and fine-tuning settings for CLS-books by cross-validation on its labelled rows.

    python benchmarks/cls_books.py --out runs/search [--candidates plain r-drop] [--seeds 0 1 2 3 4] [--processes 4]

The candidates are in benchmarks/cls_books.toml. Results are appended to OUT/results.jsonl, one line per candidate, with
the difference from the first one. The test texts are not read.
"""

import argparse
import json
import time
import tomllib
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from distilled_classifier import HELD_OUT, class_names, common_arguments, pretrain_all, read_predictions

import headstock
from headstock.data.labelled_texts import read_records
from headstock.data.records import Records, join_records
from headstock.experiments.cross_validation import assign_folds
from headstock.intervals import difference, interval

RECIPE = Path(__file__).with_suffix(".toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--candidates", nargs="*", help="default: all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--processes", type=int, default=4, help="fine-tunings at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text(encoding="utf-8"))
    names = options.candidates or list(recipe["candidates"])
    candidates = {name: dict(recipe["candidates"][name]) for name in names}
    rows = join_records(*(read_records(recipe["data"][name]) for name in ("train", "valid")))
    used = {candidate["run"] for candidate in candidates.values()}
    used |= {recipe["pretrain"][name]["start"] for name in used if "start" in recipe["pretrain"][name]}
    needed = {name: sections for name, sections in recipe["pretrain"].items() if name in used}
    processes = partial(ProcessPoolExecutor, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with processes(1) as first, processes(options.processes) as pool:
        options.out.mkdir(parents=True, exist_ok=True)
        pretrained = pretrain_all(needed, rows, Path("recipes"), options.out, options.device, first, beside=pool)
        runs = {name: finished(*pretrained[name]) for name in needed}
        calls = {
            (name, seed): submit_folds(pool, runs, name, recipe["finetune"] | candidate, rows, seed, options)
            for name, candidate in candidates.items()
            for seed in options.seeds
        }
        reference: np.ndarray | None = None
        with (options.out / "results.jsonl").open("a", encoding="utf-8") as file:
            for name, candidate in candidates.items():
                try:
                    done = [collect(calls[name, seed], len(rows)) for seed in options.seeds]
                except Exception as error:
                    print(json.dumps({"candidate": name, "error": repr(error)[:300]}), flush=True)
                    continue
                correct, seconds = np.stack([part[0] for part in done]), sum(part[1] for part in done)
                row = {"candidate": name, **candidate, "seeds": len(options.seeds), "folds": options.folds}
                row |= {"accuracy": interval(correct)._asdict(), "seconds": round(seconds, 1)}
                if reference is not None:
                    row["difference"] = difference(correct, reference)._asdict()
                reference = correct if reference is None else reference
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")


def finished(run: Path, done: Future[None]) -> Path:
    done.result()
    return run


def submit_folds(
    pool: ProcessPoolExecutor,
    runs: dict[str, Path],
    name: str,
    candidate: dict[str, Any],
    rows: Records,
    seed: int,
    options: argparse.Namespace,
) -> list[tuple[np.ndarray, Future[Any]]]:
    """For each fold the numbers of its rows, and the call that trains on the others."""
    assert rows.labels is not None
    folds, calls = assign_folds(rows, options.folds, seed=seed, strata=rows.labels), []
    run = runs[candidate.pop("run")]
    for fold in range(options.folds):
        out = options.out / name / f"{seed}-{fold}"
        train, held_out = (rows.select(np.flatnonzero(part).tolist()) for part in (folds != fold, folds == fold))
        call = pool.submit(correct_rows, run, candidate, train, held_out, out, seed, options.device)
        calls.append((np.flatnonzero(folds == fold), call))
    return calls


def correct_rows(
    run: Path, settings: dict[str, Any], train: Records, held_out: Records, out: Path, seed: int, device: str
) -> tuple[np.ndarray, float]:
    """(N,) whether each held-out row is classified correctly by a model that is trained on the others; seconds."""
    start, classes = time.monotonic(), class_names(train)
    headstock.finetune(
        run,
        out=out,
        settings=settings | {"valid_fraction": HELD_OUT},
        **common_arguments(train, held_out, seed, device),
    )
    truth = np.array([classes.index(label) for label in held_out.labels or []])
    return read_predictions(out, classes).argmax(1) == truth, time.monotonic() - start


def collect(calls: list[tuple[np.ndarray, Future[Any]]], count: int) -> tuple[np.ndarray, float]:
    correct, total = np.zeros(count), 0.0
    for numbers, call in calls:
        correct[numbers], seconds = call.result()
        total += seconds
    return correct, total


if __name__ == "__main__":
    main()
