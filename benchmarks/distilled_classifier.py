"""Makes one classifier from raw text and labelled rows: pretraining, teachers, and students that learn from them.

    python benchmarks/distilled_classifier.py recipes/cls-books-record.toml --out runs/record --seeds 0 1 2 3 4
    python benchmarks/distilled_classifier.py recipes/cls-books-record.toml --out runs/record --folds 5

With --seeds, teachers are trained on the rows of train and valid, and each student, once with each seed, learns from
all of them: their predictions of the test texts are in OUT/test. With --folds, teachers and students are trained on the
other rows of each fold, and predict those of the fold. The test texts play no part in it. Both can be given; --students
names those of the recipe to train. OUT/results.json sums up what is there, and OUT/cross_validation.jsonl has what each
model predicts for the labelled rows, in their order, so that two recipes can be compared row by row.
"""

import argparse
import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headstock
from headstock.api.data import split_files
from headstock.config import flatten_tables
from headstock.data.labelled_texts import read_records
from headstock.data.records import Records, join_records
from headstock.experiments.cross_validation import assign_folds
from headstock.experiments.distil import (
    cached_probabilities,
    closest_texts,
    normalize,
    text_records,
    tfidf_probabilities,
)
from headstock.experiments.ensemble_weights import combine
from headstock.inference.pipeline import load
from headstock.intervals import item_difference, item_interval
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.settings import LabelledSettings

HELD_OUT = 0.05  # of the training rows: TF-IDF selects its classifier on them
TFIDF_PROCESSES = 4
TFIDF, TOGETHER = "tfidf", "together"


@dataclass
class Split:
    """Rows to train on and rows to predict; `numbers` are those of a fold's rows among all labelled ones."""

    folder: Path
    train: Records
    held_out: Records
    seeds: list[int]  # of the students
    numbers: np.ndarray | None = None
    teachers: dict[str, Future[None]] = field(default_factory=dict)
    students: dict[str, Future[None]] = field(default_factory=dict)  # by name and seed: student-0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="of the students that predict the test texts")
    parser.add_argument("--students", nargs="*", help="default: all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1, help="fine-tunings at once")
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text(encoding="utf-8"))
    if options.students is not None:
        students = recipe["student"]["models"]
        if unknown := set(options.students) - set(students):
            parser.error(f"--students {' '.join(sorted(unknown))}: the recipe has {', '.join(students)}")
        recipe["student"]["models"] = {name: students[name] for name in options.students}
    rows = join_records(*(read_records(recipe["data"][name]) for name in ("train", "valid")))
    options.out.mkdir(parents=True, exist_ok=True)
    splits = make_splits(recipe, rows, options)
    with process_pool(1) as first, process_pool(options.processes) as pool, process_pool(TFIDF_PROCESSES) as other:
        runs = pretrain_all(
            recipe["pretrain"], rows, options.recipe.parent, options.out, options.device, first, beside=pool
        )
        texts = write_pool(recipe, rows, options.out)
        pool_texts = read_pool(texts)
        predicted = [
            other.submit(predict_tfidf, split.train, pool_texts, seed)
            for split in splits
            for seed in split.seeds
            if recipe["teachers"]["tfidf"] and recipe["student"]["models"]
        ]
        for _, done in runs.values():  # pretrainings and fine-tunings at once may fill the memory of a GPU
            done.result()
        for future in predicted:
            future.result()
        for split in splits:  # before all students, so that these fill the processes that the last teachers leave idle
            submit_teachers(recipe, runs, split, texts, options, pool)
        for split in splits:
            submit_students(recipe, split, texts, options, pool)
        folds = []
        for split in splits:
            write_predictions(split, recipe, options.device)
            if split.numbers is not None:
                folds.append(split)
            summary = summarize(recipe, options.out, rows, folds)
            (options.out / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


@contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """One process per run, so that its GPU memory is free afterwards, and a share of the cores for each.

    After an error, the runs that have not begun are cancelled.
    """
    threads = max(1, (os.cpu_count() or 1) // (processes + 1))
    executor = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        max_tasks_per_child=1,
        initializer=torch.set_num_threads,
        initargs=(threads,),
    )
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def make_splits(recipe: dict[str, Any], rows: Records, options: argparse.Namespace) -> list[Split]:
    splits = []
    if options.seeds:
        test = read_records(recipe["data"]["test"])
        splits.append(Split(options.out / "test", rows, test, options.seeds))
    if options.folds:
        assert rows.labels is not None
        folds = assign_folds(rows, options.folds, seed=0, strata=rows.labels)
        for fold in range(options.folds):
            train, held_out = (rows.select(np.flatnonzero(part).tolist()) for part in (folds != fold, folds == fold))
            folder = options.out / f"fold-{fold}-of-{options.folds}"
            splits.append(Split(folder, train, held_out, [0], np.flatnonzero(folds == fold)))
    return splits


# Pretraining


def pretrain_all(
    recipes: dict[str, Any],
    rows: Records,
    folder: Path,
    out: Path,
    device: str,
    pool: ProcessPoolExecutor,
    *,
    beside: ProcessPoolExecutor,
) -> dict[str, tuple[Path, Future[None]]]:
    """The pretrained runs by name, in OUT: as many at once as `pool` has processes.

    One with `beside` runs in the other pool: small recurrent models leave most of a GPU idle.
    """
    texts = out / "labelled-texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows.display_texts), encoding="utf-8")
    runs: dict[str, tuple[Path, Future[None]]] = {}
    for name, sections in recipes.items():
        executor = beside if sections.get("beside") else pool
        if "start" in sections:
            runs[sections["start"]][1].result()  # a process that waited for it would keep its place in the pool
        runs[name] = (out / name, executor.submit(pretrain, sections, folder, out, name, texts, device))
    return runs


def pretrain(sections: dict[str, Any], folder: Path, out: Path, name: str, texts: Path, device: str) -> None:
    """A run with the settings of another recipe (`config`) or run (`start`) and changes; `task` replaces the one there.

    `minutes` replaces the length there. With `labelled_texts`, the texts of the labelled rows are part of the corpus.
    """
    if (out / name / "results.json").exists():
        return
    settings = flatten_tables(pretraining_tables(sections, folder))
    corpus = [*settings.pop("data.corpus"), *([texts] if sections.get("labelled_texts") else [])]
    if "minutes" in sections:
        settings = {key: value for key, value in settings.items() if key not in ("train.epochs", "train.steps")}
        settings["train.minutes"] = sections["minutes"]
    start = out / sections["start"] if "start" in sections else None
    resume = (out / name / "config.json").exists()
    headstock.pretrain(
        corpus, out=out / name, start=start, settings=settings, resume=resume, device=device, report=False
    )


def pretraining_tables(sections: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The tables of another recipe, if one is named, with the changes."""
    tables: dict[str, Any] = {}
    if "config" in sections:
        tables = tomllib.loads((folder / sections["config"]).read_text(encoding="utf-8"))
    for name, values in sections.items():
        if isinstance(values, dict):
            tables[name] = values if name == "task" else tables.get(name, {}) | values
    return tables


# Teachers and students


def write_pool(recipe: dict[str, Any], rows: Records, out: Path) -> Path:
    """A file with the unlabelled texts that are most like the labelled ones, from which the students learn."""
    path = out / "pool.jsonl"
    if not path.exists():
        splits = LabelledSplits(rows, rows.select([]), None)
        texts = closest_texts(splits, recipe["data"]["text"], recipe["student"]["rows"], seed=0)
        lines = [json.dumps({"text": normalize(text)}) + "\n" for text in texts]
        path.write_text("".join(lines), encoding="utf-8")
    return path


def submit_teachers(
    recipe: dict[str, Any],
    runs: dict[str, tuple[Path, Future[None]]],
    split: Split,
    texts: Path,
    options: argparse.Namespace,
    pool: ProcessPoolExecutor,
) -> None:
    """Train the teachers of a split: with folds one model each, otherwise as many as the recipe says."""
    for teacher, model in recipe["teachers"]["models"].items():
        own = {key: value for key, value in model.items() if key != "run"}
        settings = recipe["teachers"]["finetune"] | own | ({"ensemble": 1} if split.numbers is not None else {})
        settings |= {"valid_fraction": HELD_OUT}
        run, _ = runs[model["run"]]
        arguments = (run, settings, split.train, split.held_out, split.folder / teacher, texts)
        split.teachers[teacher] = pool.submit(train_teacher, *arguments, options.device)


def train_teacher(
    run: Path, settings: dict[str, Any], rows: Records, held_out: Records, out: Path, texts: Path, device: str
) -> None:
    """Fine-tune a teacher; its predictions of the unlabelled texts are kept in the cache for the students."""
    if not (out / "results.json").exists():
        headstock.finetune(
            run, task="classify", out=out, settings=settings, **common_arguments(rows, held_out, 0, device)
        )
        remove_checkpoints(out)
    cached_probabilities(load(out, device=device), text_records(read_pool(texts)), class_names(rows))


def read_pool(texts: Path) -> list[str]:
    return [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]


def predict_tfidf(rows: Records, texts: Sequence[str], seed: int) -> np.ndarray:
    """What TF-IDF predicts, fitted on the rows that the student of this seed trains on.

    The cache keeps it: called for a student's texts while the GPU pretrains, it saves the student a minute.
    """
    classes = class_names(rows)
    train = split_files("classify", train=labelled_pairs(rows))["train"]
    settings = LabelledSettings(str(train), valid_fraction=HELD_OUT)
    splits = read_splits(settings, Classify, ClassifyConfig(classes=tuple(classes)), seed=seed)
    return tfidf_probabilities(splits, text_records(texts), classes, seed=seed)[1]


def submit_students(
    recipe: dict[str, Any], split: Split, texts: Path, options: argparse.Namespace, pool: ProcessPoolExecutor
) -> None:
    """Train the students of a split when its teachers are there."""
    for future in split.teachers.values():
        future.result()
    teachers = [split.folder / name for name in teacher_names(recipe)]
    for student, model in recipe["student"]["models"].items():
        settings = recipe["student"]["finetune"] | {key: value for key, value in model.items() if key != "run"}
        for seed in split.seeds:
            name = f"{student}-{seed}"
            arguments = (options.out / model["run"], teachers, recipe, settings, split.train, split.held_out)
            split.students[name] = pool.submit(
                train_student, *arguments, split.folder / name, texts, seed, options.device
            )


def train_student(
    run: Path,
    teachers: list[Path],
    recipe: dict[str, Any],
    settings: dict[str, Any],
    rows: Records,
    held_out: Records,
    out: Path,
    texts: Path,
    seed: int,
    device: str,
) -> None:
    if (out / "results.json").exists():
        return
    headstock.distil(
        run,
        teachers=teachers,
        text=[texts],
        tfidf=recipe["teachers"]["tfidf"],
        equal_weights=True,
        rows=recipe["student"]["rows"],
        out=out,
        settings=settings | {"valid_fraction": HELD_OUT},
        **common_arguments(rows, held_out, seed, device),
    )
    remove_checkpoints(out)


def remove_checkpoints(run: Path) -> None:
    """A hundred runs with the states of their optimizers would fill a disk."""
    for folder in (run, *members(run)):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def common_arguments(rows: Records, held_out: Records, seed: int, device: str) -> dict[str, Any]:
    common: dict[str, Any] = {"train": labelled_pairs(rows), "test": held_out.display_texts, "seed": seed}
    return common | {"device": device, "report": False, "progress": False, "overwrite": True}


def labelled_pairs(rows: Records) -> list[tuple[str, str]]:
    return list(zip(rows.display_texts, rows.labels or [], strict=True))


# Predictions and results


def write_predictions(split: Split, recipe: dict[str, Any], device: str) -> None:
    """NAME.jsonl in the split's folder: each model alone, the teachers in pairs and together, and the students."""
    classes = class_names(split.train)
    teachers = {name: read_predictions(split.folder / name, classes) for name in split.teachers}
    if recipe["teachers"]["tfidf"]:
        teachers[TFIDF] = predict_tfidf(split.train, split.held_out.display_texts, 0)
    predictions = teachers | combined_predictions(teachers)
    for name, future in split.students.items():
        future.result()
        predictions[name] = read_predictions(split.folder / name, classes)
    for name in split.teachers:
        for number, member in enumerate(members(split.folder / name)):
            predictions[f"{name}-{number}"] = load(member, device=device).probabilities(split.held_out.display_texts)
    for name, values in predictions.items():
        lines = [
            {"label": classes[row.argmax()], "probabilities": dict(zip(classes, row.round(5).tolist(), strict=True))}
            for row in values.astype(np.float64)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (split.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def combined_predictions(teachers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The normalized geometric mean of each pair of teachers and of all of them."""
    return {
        name: combine([teachers[teacher] for teacher in group], np.full(len(group), 1 / len(group)))
        for name, group in teacher_groups(list(teachers)).items()
    }


def teacher_groups(teachers: list[str]) -> dict[str, list[str]]:
    pairs = {f"{one}-and-{other}": [one, other] for one, other in combinations(teachers, 2)}
    return pairs | {TOGETHER: teachers}


def members(run: Path) -> list[Path]:
    """The models of an ensemble of seeds."""
    return sorted((run / "members").iterdir()) if (run / "members").is_dir() else []


def read_predictions(run: Path, classes: list[str]) -> np.ndarray:
    return read_probabilities(run / "predictions.jsonl", classes)


def read_probabilities(file: Path, classes: list[str]) -> np.ndarray:
    lines = file.read_text(encoding="utf-8").splitlines()
    return np.array([[json.loads(line)["probabilities"][name] for name in classes] for line in lines])


def teacher_names(recipe: dict[str, Any]) -> list[str]:
    return list(recipe["teachers"]["models"])


def class_names(rows: Records) -> list[str]:
    return sorted(set(rows.labels or []))


def summarize(recipe: dict[str, Any], out: Path, rows: Records, folds: list[Split]) -> dict[str, Any]:
    """Lengths of the runs, metrics of the pretrainings, and accuracies over all folds with intervals over rows."""
    summary: dict[str, Any] = {"pretraining": {name: pretraining_summary(out / name) for name in recipe["pretrain"]}}
    summary["test"] = {path.parent.name: run_summary(path.parent) for path in sorted(out.glob("test/*/results.json"))}
    if not folds:
        return summary
    classes = class_names(rows)
    truth = np.array([classes.index(label) for label in rows.labels or []])
    numbers = np.concatenate([split.numbers for split in folds if split.numbers is not None])
    students = list(folds[0].students)
    teachers = [*folds[0].teachers, *([TFIDF] if recipe["teachers"]["tfidf"] else [])]
    predictions = {
        name: np.concatenate([read_probabilities(split.folder / f"{name}.jsonl", classes) for split in folds])
        for name in [*teachers, *students, *teacher_groups(teachers)]
    }
    single = {name: predictions[name] for name in [*teachers, *students]}
    write_fold_predictions(out / "cross_validation.jsonl", single, classes, numbers)
    correct = {name: (values.argmax(1) == truth[numbers]).astype(float) for name, values in predictions.items()}
    summary["cross_validation"] = {
        "rows": len(numbers),
        "accuracy": {name: item_interval(part)._asdict() for name, part in correct.items()},
        "differences": {
            one: {name: item_difference(correct[one], part)._asdict() for name, part in correct.items() if name != one}
            for one in correct
        },
        "folds": {
            split.folder.name: {name: run_summary(split.folder / name) for name in split.teachers} for split in folds
        },
    }
    return summary


def write_fold_predictions(
    file: Path, predictions: dict[str, np.ndarray], classes: list[str], numbers: np.ndarray
) -> None:
    """A line for each labelled row that has been predicted: what each model says, alone.

    `row` counts the rows of train and then those of valid, from 0.
    """
    with file.open("w", encoding="utf-8") as lines:
        for index in np.argsort(numbers):
            probabilities = {
                name: dict(zip(classes, values[index].round(5).tolist(), strict=True))
                for name, values in predictions.items()
            }
            lines.write(json.dumps({"row": int(numbers[index]), "probabilities": probabilities}) + "\n")


def pretraining_summary(run: Path) -> dict[str, Any]:
    """Length, parameters and metrics on the held-out text."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    metrics = {key: round(value, 4) for key, value in results["metrics"].items()}
    return run_lengths(results) | {"parameters": results["parameters"]["total"], "metrics": metrics}


def run_summary(run: Path) -> dict[str, Any]:
    file = run / "results.json"
    return run_lengths(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def run_lengths(results: dict[str, Any]) -> dict[str, Any]:
    return {key: results[key] for key in ("steps", "tokens", "seconds")}


if __name__ == "__main__":
    main()
