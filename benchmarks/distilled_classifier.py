"""Makes one classifier from raw text and labelled rows: pretraining, teachers, and a student that learns from them.

    python benchmarks/distilled_classifier.py recipes/cls-books-record.toml --out runs/record [--seeds 0 1 2 3 4]
    python benchmarks/distilled_classifier.py recipes/cls-books-record.toml --out runs/record --folds 5

Without --folds, teachers and student are trained on the rows of train and valid, and predict the test texts: the
probabilities of each are in OUT/seed-S. With --folds, all that follows pretraining is cross-validated on these rows,
and the test texts are not read: the accuracies are in OUT/folds.jsonl. OUT/results.json sums up what is there.
"""

import argparse
import json
import statistics
import tomllib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headstock
from headstock.data.labelled_texts import read_records
from headstock.data.records import Records, join_records
from headstock.experiments.arms.tfidf import TfidfClassifier
from headstock.experiments.cross_validation import assign_folds
from headstock.experiments.ensemble_weights import combine

HELD_OUT = 0.05  # of the training rows: TF-IDF selects its classifier on them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text(encoding="utf-8"))
    rows = join_records(*(read_records(recipe["data"][name]) for name in ("train", "valid")))
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        runs = pretrain_all(recipe["pretrain"], rows, options.recipe.parent, options.out, options.device, pool)
        if options.folds:
            cross_validate(recipe, runs, rows, options, pool)
        else:
            test = read_records(recipe["data"]["test"])
            calls = [
                pool.submit(train_all, recipe, runs, rows, test, options.out / f"seed-{seed}", options.device, seed)
                for seed in options.seeds
            ]
            for call in calls:
                call.result()
    summary = summarize(recipe, options.out)
    (options.out / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def pretrain_all(
    recipes: dict[str, Any], rows: Records, folder: Path, out: Path, device: str, pool: ProcessPoolExecutor
) -> dict[str, Path]:
    """The pretrained runs by name, in OUT; one after another, since two at once share the GPU and gain nothing."""
    out.mkdir(parents=True, exist_ok=True)
    texts = out / "labelled-texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows.display_texts), encoding="utf-8")
    for name, sections in recipes.items():
        pool.submit(pretrain, sections, folder, out, name, texts, device).result()
    return {name: out / name for name in recipes}


def pretrain(sections: dict[str, Any], folder: Path, out: Path, name: str, texts: Path, device: str) -> None:
    """A run with the settings of another recipe (`config`) or run (`start`) and changes; `task` replaces the one there.

    `minutes` replaces the length there. With `labelled_texts`, the texts of the labelled rows are part of the corpus.
    """
    if (out / name / "results.json").exists():
        return
    config: dict[str, Any] = {}
    if "config" in sections:
        config = tomllib.loads((folder / sections["config"]).read_text(encoding="utf-8"))
    for section, values in sections.items():
        if isinstance(values, dict):
            config[section] = values if section == "task" else config.get(section, {}) | values
    settings = {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}
    corpus = [*settings.pop("data.corpus"), *([texts] if sections.get("labelled_texts") else [])]
    if "minutes" in sections:
        settings = {key: value for key, value in settings.items() if key not in ("train.epochs", "train.steps")}
        settings["train.minutes"] = sections["minutes"]
    start = out / sections["start"] if "start" in sections else None
    resume = (out / name / "config.json").exists()
    headstock.pretrain(
        corpus, out=out / name, start=start, settings=settings, resume=resume, device=device, report=False
    )


def cross_validate(
    recipe: dict[str, Any], runs: dict[str, Path], rows: Records, options: argparse.Namespace, pool: ProcessPoolExecutor
) -> None:
    """Print the accuracy of each model on the rows that it was not trained on, by fold and on average."""
    assert rows.labels is not None
    names = class_names(rows)
    calls = []
    for seed in options.seeds:
        folds = assign_folds(rows, options.folds, seed=seed, strata=rows.labels)
        for fold in range(options.folds):
            train, held_out = (rows.select(np.flatnonzero(part).tolist()) for part in (folds != fold, folds == fold))
            truth = np.array([names.index(label) for label in held_out.labels or []])
            folder = options.out / f"folds-{options.folds}" / f"seed-{seed}" / str(fold)
            call = pool.submit(train_all, recipe, runs, train, held_out, folder, options.device, seed)
            calls.append((seed, fold, truth, call))
    with (options.out / "folds.jsonl").open("w", encoding="utf-8") as file:
        for seed, fold, truth, call in calls:
            accuracies = {name: float((values.argmax(1) == truth).mean()) for name, values in call.result().items()}
            line = json.dumps({"seed": seed, "fold": fold, "accuracies": accuracies})
            print(line, file=file, flush=True)
            print(line, flush=True)


def summarize(recipe: dict[str, Any], out: Path) -> dict[str, Any]:
    """Steps, tokens and seconds of each run, and the mean accuracy of each model over the folds."""
    summary: dict[str, Any] = {"pretraining": {name: run_summary(out / name) for name in recipe["pretrain"]}}
    summary["seeds"] = {
        folder.name.removeprefix("seed-"): {
            run.name: run_summary(run) for run in sorted(folder.iterdir()) if (run / "results.json").exists()
        }
        for folder in sorted(out.glob("seed-*"))
    }
    if (out / "folds.jsonl").exists():
        folds = [json.loads(line) for line in (out / "folds.jsonl").read_text(encoding="utf-8").splitlines()]
        accuracies = {name: [fold["accuracies"][name] for fold in folds] for name in folds[0]["accuracies"]}
        summary["cross_validation"] = {name: statistics.mean(values) for name, values in accuracies.items()}
        summary["folds"] = [{key: fold[key] for key in ("seed", "fold")} for fold in folds]
    return summary


def run_summary(run: Path) -> dict[str, Any]:
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return {key: results[key] for key in ("steps", "tokens", "seconds")}


def class_names(rows: Records) -> list[str]:
    return sorted(set(rows.labels or []))


def train_all(
    recipe: dict[str, Any], runs: dict[str, Path], rows: Records, test: Records, folder: Path, device: str, seed: int
) -> dict[str, np.ndarray]:
    """Probabilities (N, C) of the test rows by every teacher, by all together and by the student."""
    teachers, student = recipe["teachers"], recipe["student"]
    common: dict[str, Any] = {"train": pairs(rows), "test": test.display_texts, "seed": seed, "device": device}
    common |= {"report": False, "progress": False, "overwrite": True}
    members: dict[str, np.ndarray] = {}
    for name, model in teachers["models"].items():
        own = {key: value for key, value in model.items() if key != "run"}
        settings = teachers["finetune"] | own | {"valid_fraction": HELD_OUT}
        out = folder / f"teacher-{name}"
        headstock.finetune(runs[model["run"]], task="classify", out=out, settings=settings, **common)
        members[name] = predicted(out, class_names(rows))
        torch.cuda.empty_cache()  # for the other processes
    if teachers["tfidf"]:
        members["tfidf"] = tfidf_probabilities(rows, test, seed=seed)
    members["together"] = combine(list(members.values()), np.full(len(members), 1 / len(members)))
    settings = student["finetune"] | {"valid_fraction": HELD_OUT}
    headstock.distil(
        runs[student["run"]],
        teachers=[folder / f"teacher-{name}" for name in teachers["models"]],
        text=recipe["data"]["text"],
        tfidf=teachers["tfidf"],
        equal_weights=True,
        rows=student["rows"],
        out=folder / "student",
        settings=settings,
        **common,
    )
    members["student"] = predicted(folder / "student", class_names(rows))
    torch.cuda.empty_cache()
    for name, values in members.items():
        write_predictions(folder / f"{name}.jsonl", values, class_names(rows))
    return members


def write_predictions(path: Path, probabilities: np.ndarray, classes: list[str]) -> None:
    predictions = [
        {"label": classes[row.argmax()], "probabilities": dict(zip(classes, row.round(5).tolist(), strict=True))}
        for row in probabilities
    ]
    path.write_text("".join(json.dumps(prediction) + "\n" for prediction in predictions), encoding="utf-8")


def pairs(rows: Records) -> list[tuple[str, str]]:
    return list(zip(rows.display_texts, rows.labels or [], strict=True))


def predicted(run: Path, classes: list[str]) -> np.ndarray:
    lines = (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([[json.loads(line)["probabilities"][name] for name in classes] for line in lines])


def tfidf_probabilities(rows: Records, test: Records, *, seed: int) -> np.ndarray:
    classes = class_names(rows)
    numbers = np.array([classes.index(label) for label in rows.labels or []])
    order = np.random.default_rng(seed).permutation(len(numbers))
    count = int(len(numbers) * HELD_OUT)
    train, valid = order[count:], order[:count]
    texts = [[rows.display_texts[index] for index in part] for part in (train, valid)]
    model = TfidfClassifier(classes).fit(texts[0], numbers[train], texts[1], numbers[valid], seed=seed)
    return model.probabilities(test.display_texts)


if __name__ == "__main__":
    main()
