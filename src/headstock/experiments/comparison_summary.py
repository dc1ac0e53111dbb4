"""From the cells of a comparison to its answer: means, intervals, differences, verdicts, and what went wrong where."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, combinations
from typing import Any

import numpy as np

from headstock import config
from headstock.data.catalog import PREFIX
from headstock.data.records import Records
from headstock.experiments.arms import Arm
from headstock.experiments.compare_settings import ComparisonPlan
from headstock.experiments.compare_trials import ExperimentContext
from headstock.experiments.leakage import overlapping_rows
from headstock.experiments.leakage_check import LeakageReport
from headstock.experiments.run_comparison import comparability_notes, describe_runs
from headstock.experiments.verdict import features_verdict, verdict
from headstock.intervals import SufficientStatistics, difference, interval, macro_f1_interval
from headstock.io import write_json, write_text
from headstock.report.theme import arm_label
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.error_analysis import label_errors
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.wording import metric_name
from headstock.train.metrics import majority_class, majority_warning

Cell = dict[str, Any]
TOLD = (
    "arm", "labels", "seed", "score", "accuracy", "macro_f1", "loss", "ece", "valid_score", "best_epoch", "seconds",
    "tokens_per_second", "chosen", "epochs",
)  # fmt: skip
VERSIONS = ("headstock", "torch", "tokenizers", "scikit-learn", "numpy")


def summarize_comparison(
    plan: ComparisonPlan,
    ground: ExperimentContext,
    arms: list[Arm],
    cells: list[Cell],
    leaks: LeakageReport,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Everything the report shows, written to results.json; test rows without labels get their predictions."""
    counts = sorted({made["labels"] for made in cells})
    by_arm = {
        (arm.name, n): [c for c in cells if (c["arm"], c["labels"]) == (arm.name, n)] for arm in arms for n in counts
    }
    metric = ground.task.primary_metric
    summary = [summarise(ground, arm.name, n, by_arm[arm.name, n]) for n in counts for arm in arms]
    pairs = [
        compare_pair(ground.task, a.name, b.name, n, by_arm[a.name, n], by_arm[b.name, n])
        for n in counts
        for a, b in combinations(arms, 2)
    ]
    described = [describe_arm(arm, by_arm[arm.name, counts[-1]][0]) for arm in arms]
    runs, commonest = describe_runs(arms, summary), majority(ground)
    results = {
        "kind": "compare",
        "task": ground.task_class.name,
        "metric": metric,
        "title": title_of(ground, arms),
        "versions": versions(),
        "device": str(ground.distributed.device),
        "seconds": round(max(seconds, sum(made["seconds"] for made in cells)), 1),  # also of what was there already
        "seed": plan.compare.seed,
        "settings": settings_of(plan),
        "data": ground.splits.describe(),
        "classes": list(getattr(ground.task_config, "classes", ())),
        "measured_on": "valid" if ground.evaluates_on_valid else "test",
        "measured_rows": len(ground.eval_records),
        "majority": commonest,
        "leakage": leaks.runs,
        "train_overlap": len(overlapping_rows(whole(ground.eval_records), whole(ground.splits.train))),
        "arms": described,
        "runs": runs,
        "labels": counts,
        "seeds": sorted({made["seed"] for made in cells}),
        "cells": [{name: made[name] for name in (*TOLD, *made["tallies"])} for made in cells],
        "summary": summary,
        "pairs": pairs,
        "verdicts": verdicts(plan, counts, summary, pairs, described, unit=ground.task_class.nouns.unit),
        "warnings": list(ground.splits.warnings),
        "notes": [*notes(plan, ground, leaks), *under_majority(commonest, summary), *comparability_notes(runs)],
        "details": details(ground, arms, by_arm, counts[-1]),
    }
    write_json(ground.folder / "results.json", results)
    if ground.unlabelled_test is not None:
        for arm in arms:
            write_predictions(ground, arm, by_arm[arm.name, counts[-1]])
    return results


def majority(ground: ExperimentContext) -> dict[str, Any] | None:
    """The commonest class of the measured rows (of words, the commonest tag), and the accuracy of answering it."""
    columns = ground.eval_records.columns
    known = columns.get("label", list(chain.from_iterable(columns.get("tags", []))))
    if not known or getattr(ground.task_config, "separator", None) is not None:
        return None
    name, accuracy = majority_class(known)
    return {"class": name, "accuracy": accuracy}


def under_majority(found: Mapping[str, Any] | None, summary: Sequence[dict[str, Any]]) -> list[str]:
    """Which arms do no better, or not clearly better, than always answering the commonest class."""
    if found is None:
        return []
    said = []
    always = f"always answering {found['class']!r} ({found['accuracy']:.1%})"
    for row in summary:
        metrics = {"accuracy": row["accuracy"], "majority": found["accuracy"], "majority_class": found["class"]}
        around = {"intervals": {"accuracy": (row.get("accuracy_low"), row.get("accuracy_high"))}}
        if majority_warning(metrics | around):
            how = "below" if row["accuracy"] < found["accuracy"] else "not clearly above"
            who = f"{arm_label(row['arm'])} with {row['labels']:,} labels"
            said.append(f"{who} ({row['accuracy']:.1%}) is {how} {always}.")
    return said


def verdicts(
    plan: ComparisonPlan,
    counts: list[int],
    summary: list[dict[str, Any]],
    pairs: list[dict[str, Any]],
    arms: list[dict[str, Any]],
    *,
    unit: str,
) -> list[str]:
    """What pays at each number of labels; where choices of layers were compared, which is best."""
    named = tuple(f"frozen {layers} " for layers in plan.compare.features)  # and a run, where there are several
    tried = [arm for arm in arms if f"{arm['name']} ".startswith(named)] if named else []
    others = [arm for arm in arms if arm not in tried]
    said = []
    for n in counts:
        if others:
            said.append(verdict(n, summary, pairs, others, unit=unit))
        if tried:
            said.append(features_verdict(n, summary, pairs, tried, unit=unit))
    return said


def whole(records: Records) -> list[str]:
    """All that a row says: the same question on another text is another one, and so is another translation."""
    contexts = records.columns.get("context", records.columns.get("target", [""] * len(records)))
    return [f"{context} {text}" for context, text in zip(contexts, records.display_texts, strict=True)]


def settings_of(plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    """Everything the comparison was run with, section by section."""
    grown = {f"pretrain.{name}": table for name, table in plan.pretrain.items() if isinstance(table, dict)}
    if own := {name: value for name, value in plan.pretrain.items() if not isinstance(value, dict)}:
        grown = {"pretrain": own} | grown
    arms = {f"arms.{name}": table for name, table in plan.arms.items()}
    return {"compare": config.to_dict(plan.compare), "finetune": plan.settings, **arms, **grown}


def title_of(ground: ExperimentContext, arms: Sequence[Arm]) -> str:
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


def tallied(
    judge: LabelledTask, cells: list[Cell], metric: str
) -> tuple[np.ndarray | SufficientStatistics, np.ndarray | None]:
    """(S, N) what each seed's model got right of each row, and what that is a share of; None if of one each.

    Of a metric that is no share, such as BLEU, the (S, N, K) counts that it is made from.
    """
    if metric in judge.formulas:
        return SufficientStatistics(np.array([made["tallies"][metric] for made in cells]), judge.formulas[metric]), None
    hits, of = (np.array([made["tallies"][metric][part] for made in cells]) for part in (0, 1))
    return hits, None if (of == 1).all() else of


def summarise(ground: ExperimentContext, arm: str, labels: int, cells: list[Cell]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in cells[0]["tallies"]:
        around = interval(*tallied(ground.task, cells, metric), key=("accuracy",))
        found |= {metric: around.mean, f"{metric}_low": around.low, f"{metric}_high": around.high}
    metric = ground.task.primary_metric
    means = [made["macro_f1"] for made in cells if made["macro_f1"] is not None]
    f1 = {"macro_f1": float(np.mean(means)) if means else None, "macro_f1_low": None, "macro_f1_high": None}
    if (
        cells[0]["probabilities"] is not None
        and (truth := label_numbers(ground.eval_records, ground.task_config)).ndim == 1
    ):
        around = macro_f1_interval(truth, predicted(cells).argmax(-1), len(ground.task_config.classes))
        f1 = {"macro_f1": around.mean, "macro_f1_low": around.low, "macro_f1_high": around.high}
    speeds = [made["tokens_per_second"] for made in cells if made["tokens_per_second"]]
    return {
        "arm": arm,
        "labels": labels,
        "seeds": len(cells),
        "metric": metric,
        "score": found[metric],
        "low": found[f"{metric}_low"],
        "high": found[f"{metric}_high"],
        "accuracy": found.get("accuracy", found.get("exact_match")),
        **found,
        **f1,
        "seconds": float(np.mean([made["seconds"] for made in cells])),
        "tokens_per_second": float(np.mean(speeds)) if speeds else None,
    }


def compare_pair(
    judge: LabelledTask, a: str, b: str, labels: int, ours: list[Cell], theirs: list[Cell]
) -> dict[str, Any]:
    (hits, of), (other_hits, other_of) = (tallied(judge, cells, judge.primary_metric) for cells in (ours, theirs))
    gap = difference(hits, other_hits, of, other_of)
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


def takes_last(plan: ComparisonPlan) -> bool:
    """Whether no arm chooses among its epochs, and TF-IDF, which chooses among classifiers, is not there."""

    def asked(settings: Mapping[str, Any], otherwise: str) -> str:
        return settings.get("weights", settings.get("train.weights", otherwise))

    of_all = asked(plan.settings, "best")
    own = [asked(plan.arms.get(name, {}), of_all) for name in plan.compare.arms]
    return "tfidf" not in plan.compare.arms and set(own) == {"last"}


def notes(plan: ComparisonPlan, ground: ExperimentContext, leaks: LeakageReport) -> list[str]:
    last = takes_last(plan)
    said = ["Each arm chose its epoch or classifier on at most as many validation rows as it had training rows."]
    if last:
        said = ["The weights are those of the last epoch: no rows chose one."]
    said += [f"{metric_name(name)} is sacrebleu's: {told}." for name, told in ground.task.metric_signatures().items()]
    if plan.compare.seeds < 2:
        said.append("One seed only: nothing is known of how much another would differ, so intervals are left out.")
    if ground.evaluates_on_valid:
        chosen = "" if last else ", by which the epochs were chosen too: the numbers flatter all arms"
        said.append(f"Measured on the validation rows{chosen}.")
    if leaks.excluded:
        said.append(f"{len(leaks.excluded):,} measured rows were left out because pretraining had seen their texts.")
    said += [
        f"Measured texts were not looked for in what {told['run']} was pretrained on: {told['why']}."
        for told in leaks.runs
        if not told["checked"]
    ]
    if plan.compare.rows == len(ground.eval_records):
        said.append(f"Measured on {len(ground.eval_records):,} rows, drawn fairly from all that could be.")
    return said


def details(
    ground: ExperimentContext, arms: list[Arm], by_arm: dict[tuple[str, int], list[Cell]], labels: int
) -> dict[str, Any]:
    """What the models of the first seed get wrong where they had the most labels, and which labels look wrong."""
    told = {arm.name: by_arm[arm.name, labels][0] for arm in arms}
    found = {name: {"seed": made["seed"], **made["told"]} for name, made in told.items() if made.get("told")}
    if not found:  # several classes at once have no confusion matrix
        return {}
    judges = [arm for arm in arms if arm.kind != "scratch"] or arms
    kept = [made for arm in judges for made in by_arm[arm.name, labels]]
    doubts = {} if kept[0]["probabilities"] is None else {"label_errors": doubtful(ground, kept)}
    return {"labels": labels, "arms": found, **doubts}


def doubtful(ground: ExperimentContext, kept: list[Cell]) -> list[dict[str, Any]]:
    """Rows whose one label is probably wrong."""
    truth = label_numbers(ground.eval_records, ground.task_config)
    return label_errors(predicted(kept), truth, rows=ground.eval_records, classes=ground.task_config.classes)


def valid_loss(made: Cell) -> float:
    """At the chosen epoch; TF-IDF has none."""
    return next((row["valid_loss"] for row in made["epochs"] if row["epoch"] == made["best_epoch"]), 0.0)


def write_predictions(ground: ExperimentContext, arm: Arm, cells: list[Cell]) -> None:
    """The test rows as the seed says that did best on validation rows; among equals, the one that lost least there."""
    best = max(cells, key=lambda made: (made["valid_score"], -valid_loss(made)))
    rows = best["predicted"]
    path = ground.folder / "predictions" / f"{arm.name.replace(' ', '-').replace('/', '-')}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
