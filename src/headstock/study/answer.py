"""From the cells of a comparison to its answer: means, intervals, differences, verdicts, and what went wrong where."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from typing import Any

import numpy as np

from headstock import config
from headstock.files import write_json, write_text
from headstock.study.arms import Arm
from headstock.study.cells import Ground
from headstock.study.leakage import overlap
from headstock.study.leaks import Leaks
from headstock.study.mistakes import label_errors
from headstock.study.settings import Plan
from headstock.study.told import shown_of, told_of
from headstock.study.verdict import sentence
from headstock.tasks.classify import label_numbers
from headstock.text.catalog import PREFIX
from headstock.train.intervals import difference, interval, macro_f1_interval
from headstock.train.metrics import as_predictions

Cell = dict[str, Any]
TOLD = (
    "arm", "labels", "seed", "accuracy", "macro_f1", "loss", "ece", "valid_accuracy", "best_epoch", "seconds",
    "tokens_per_second", "chosen", "epochs",
)  # fmt: skip
VERSIONS = ("headstock", "torch", "tokenizers", "scikit-learn", "numpy")


def answer(
    plan: Plan, ground: Ground, arms: list[Arm], cells: list[Cell], leaks: Leaks, *, seconds: float
) -> dict[str, Any]:
    """Everything the report shows, written to results.json; test rows without labels get their predictions."""
    counts = sorted({made["labels"] for made in cells})
    by_arm = {
        (arm.name, n): [c for c in cells if (c["arm"], c["labels"]) == (arm.name, n)] for arm in arms for n in counts
    }
    truth = label_numbers(ground.measured, ground.config)
    summary = [summarise(ground, truth, arm.name, n, by_arm[arm.name, n]) for n in counts for arm in arms]
    pairs = [
        compare_pair(truth, a.name, b.name, n, by_arm[a.name, n], by_arm[b.name, n])
        for n in counts
        for a, b in combinations(arms, 2)
    ]
    described = [describe_arm(arm, by_arm[arm.name, counts[-1]][0]) for arm in arms]
    results = {
        "kind": "compare",
        "task": ground.task,
        "title": title_of(ground, arms),
        "versions": versions(),
        "device": str(ground.world.device),
        "seconds": round(max(seconds, sum(made["seconds"] for made in cells)), 1),  # also of what was there already
        "seed": plan.compare.seed,
        "settings": settings_of(plan),
        "data": ground.splits.describe(),
        "classes": list(ground.config.classes),
        "measured_on": "valid" if ground.measured_is_valid else "test",
        "measured_rows": len(ground.measured),
        "leakage": leaks.runs,
        "train_overlap": len(overlap(ground.measured.plain, ground.splits.train.plain)),
        "arms": described,
        "labels": counts,
        "seeds": sorted({made["seed"] for made in cells}),
        "cells": [{name: made[name] for name in TOLD} for made in cells],
        "summary": summary,
        "pairs": pairs,
        "verdicts": [sentence(n, summary, pairs, described) for n in counts],
        "notes": notes(plan, ground, leaks),
        "details": details(ground, truth, arms, by_arm, counts[-1]),
    }
    write_json(ground.folder / "results.json", results)
    if ground.unlabelled is not None:
        for arm in arms:
            write_predictions(ground, arm, by_arm[arm.name, counts[-1]])
    return results


def settings_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """Everything the comparison was run with, section by section."""
    grown = {f"pretrain.{name}": table for name, table in plan.pretrain.items() if isinstance(table, dict)}
    if own := {name: value for name, value in plan.pretrain.items() if not isinstance(value, dict)}:
        grown = {"pretrain": own} | grown
    arms = {f"arms.{name}": table for name, table in plan.arms.items()}
    return {"compare": config.plain(plan.compare), "finetune": plan.settings, **arms, **grown}


def title_of(ground: Ground, arms: Sequence[Arm]) -> str:
    runs = list(dict.fromkeys(arm.run.path.name for arm in arms if arm.run is not None))
    what = ", ".join(runs) if runs else "TF-IDF"
    folder, _, file = ground.splits.train.source.rpartition("/")
    return f"{what} on {folder.removeprefix(PREFIX) if folder.startswith(PREFIX) else file}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            continue
    return found


def predicted(cells: list[Cell]) -> np.ndarray:
    """(S, N, C) what each seed's model says of the measured rows."""
    return np.array([made["probabilities"] for made in cells])


def right(cells: list[Cell], truth: np.ndarray) -> np.ndarray:
    """(S, N) whether each seed's model is right on each row."""
    found = predicted(cells)
    return found.argmax(-1) == truth if truth.ndim == 1 else ((found > 0.5) == truth.astype(bool)).all(-1)


def summarise(ground: Ground, truth: np.ndarray, arm: str, labels: int, cells: list[Cell]) -> dict[str, Any]:
    mean = interval(right(cells, truth), key=("accuracy",))
    f1 = {"macro_f1": float(np.mean([made["macro_f1"] for made in cells])), "macro_f1_low": None, "macro_f1_high": None}
    if truth.ndim == 1:
        around = macro_f1_interval(truth, predicted(cells).argmax(-1), len(ground.config.classes))
        f1 = {"macro_f1": around.mean, "macro_f1_low": around.low, "macro_f1_high": around.high}
    speeds = [made["tokens_per_second"] for made in cells if made["tokens_per_second"]]
    return {
        "arm": arm,
        "labels": labels,
        "seeds": len(cells),
        "accuracy": mean.mean,
        "low": mean.low,
        "high": mean.high,
        **f1,
        "seconds": float(np.mean([made["seconds"] for made in cells])),
        "tokens_per_second": float(np.mean(speeds)) if speeds else None,
    }


def compare_pair(
    truth: np.ndarray, a: str, b: str, labels: int, ours: list[Cell], theirs: list[Cell]
) -> dict[str, Any]:
    gap = difference(right(ours, truth), right(theirs, truth))
    return {"labels": labels, "a": a, "b": b, "difference": gap.mean, "low": gap.low, "high": gap.high}


def describe_arm(arm: Arm, made: Cell) -> dict[str, Any]:
    sizes = made["parameters"]
    counted = sizes and {name: sizes[name] for name in ("total", "trainable", "frozen")}
    return {
        "name": arm.name,
        "kind": arm.kind,
        "run": str(arm.run) if arm.run else None,
        "parameters": counted,
        "settings": arm.settings,
    }


def notes(plan: Plan, ground: Ground, leaks: Leaks) -> list[str]:
    said = ["Each arm chose its epoch or classifier on at most as many validation rows as it had training rows."]
    if plan.compare.seeds < 2:
        said.append("One seed only: nothing is known of how much another would differ, so intervals are left out.")
    if ground.measured_is_valid:
        said.append(
            "Measured on the validation rows, by which the epochs were chosen too: the numbers flatter all arms."
        )
    if leaks.excluded:
        said.append(f"{len(leaks.excluded):,} measured rows were left out because pretraining had seen their texts.")
    said += [
        f"Measured texts were not looked for in what {told['run']} was pretrained on: {told['why']}."
        for told in leaks.runs
        if not told["checked"]
    ]
    if plan.compare.rows == len(ground.measured):
        said.append(f"Measured on {len(ground.measured):,} rows, drawn fairly from all that could be.")
    return said


def details(
    ground: Ground, truth: np.ndarray, arms: list[Arm], by_arm: dict[tuple[str, int], list[Cell]], labels: int
) -> dict[str, Any]:
    """What the models of the first seed get wrong where they had the most labels, and which labels look wrong."""
    if truth.ndim > 1:  # several classes at once have no confusion matrix
        return {}
    classes, told = ground.config.classes, {}
    for arm in arms:
        made = by_arm[arm.name, labels][0]
        found, explained = np.array(made["probabilities"]), made.get("explained", {})
        told[arm.name] = {"seed": made["seed"], **told_of(ground.measured, truth, found, classes, explained)}
    judges = [arm for arm in arms if arm.kind != "scratch"] or arms
    every = np.concatenate([predicted(by_arm[arm.name, labels]) for arm in judges])
    doubtful = label_errors(every, truth, **shown_of(ground.measured, classes))
    return {"labels": labels, "arms": told, "label_errors": doubtful}


def valid_loss(made: Cell) -> float:
    """At the chosen epoch; TF-IDF has none."""
    return next((row["valid_loss"] for row in made["epochs"] if row["epoch"] == made["best_epoch"]), 0.0)


def write_predictions(ground: Ground, arm: Arm, cells: list[Cell]) -> None:
    """The test rows as the seed says that did best on validation rows; among equals, the one that lost least there."""
    best = max(cells, key=lambda made: (made["valid_accuracy"], -valid_loss(made)))
    rows = as_predictions(ground.config, np.array(best["predicted"]))
    path = ground.folder / "predictions" / f"{arm.name.replace(' ', '-').replace('/', '-')}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
