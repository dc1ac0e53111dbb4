"""Summarizes the trials of a comparison: means, intervals, paired differences, verdicts and error details."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, combinations
from typing import Any

import numpy as np

from headstock import config
from headstock.data.catalog import PREFIX
from headstock.data.records import Records
from headstock.data.saved_inputs import source_name
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.compare_settings import Arm, CompareSettings, ComparisonPlan, kind_of_arm
from headstock.experiments.compare_trials import ExperimentContext
from headstock.experiments.comparison_slices import comparison_slices, summarize_slices
from headstock.experiments.grid import SINGLE_SEED, TrialResult, total_seconds, versions
from headstock.experiments.leakage import LeakageReport
from headstock.experiments.leakage_search import overlapping_rows
from headstock.experiments.trial_evaluation import paired_difference, row_values
from headstock.experiments.verdict import features_verdict, verdict
from headstock.intervals import interval, macro_f1_interval
from headstock.io import write_json, write_text
from headstock.report.theme import arm_label
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.error_analysis import label_errors
from headstock.tasks.text_metrics import is_score, metric_name
from headstock.train.metrics import majority_class, majority_warning
from headstock.train.run_folder import RunFolder, source_run

CELL_KEYS = (
    "arm", "labels", "seed", "score", "accuracy", "macro_f1", "loss", "ece", "valid_score", "best_epoch", "seconds",
    "tokens_per_second", "chosen", "epochs",
)  # fmt: skip
RUN_METRICS = (
    "perplexity", "masked_perplexity", "forward_perplexity", "backward_perplexity", "bits_per_byte", "accuracy",
)  # fmt: skip
ADVISED_SEEDS = CompareSettings.seeds  # fewer give intervals that are wide or misleadingly narrow
SIZE_TOLERANCE = 0.1  # runs whose sizes differ by a larger fraction are reported as different

ResultsByArm = dict[tuple[str, int], list[TrialResult]]  # by arm and number of labels, one per seed


def summarize_comparison(
    plan: ComparisonPlan,
    context: ExperimentContext,
    arms: list[Arm],
    trials: list[TrialResult],
    leaks: LeakageReport,
    *,
    seconds: float,
) -> dict[str, Any]:
    """The contents of results.json, which is written; also writes predictions for unlabelled test rows."""
    counts = sorted({result["labels"] for result in trials})
    by_arm: ResultsByArm = {
        (arm.name, count): [result for result in trials if (result["arm"], result["labels"]) == (arm.name, count)]
        for arm in arms
        for count in counts
    }
    summary = [summarize_arm(context, arm.name, count, by_arm[arm.name, count]) for count in counts for arm in arms]
    pairs = [
        {"labels": count, "a": a.name, "b": b.name, "difference": gap.mean, "low": gap.low, "high": gap.high}
        for count in counts
        for a, b in combinations(arms, 2)
        for gap in [paired_difference(context.task, by_arm[a.name, count], by_arm[b.name, count])]
    ]
    runs, majority = describe_runs(arms, summary), majority_baseline(context)
    results = {
        "kind": "compare",
        "task": context.task.name,
        "metric": context.task.primary_metric,
        "better": "higher" if is_score(context.task.primary_metric) else "lower",
        "title": title_of(context, arms),
        "versions": versions(),
        "device": str(context.distributed.device),
        "seconds": total_seconds(seconds, trials),
        "seed": plan.compare.seed,
        "settings": settings_of(plan),
        "data": context.splits.describe(type(context.task)),
        "classes": list(getattr(context.task.config, "classes", ())),
        "measured_on": "valid" if context.evaluates_on_valid else "test",
        "measured_rows": len(context.eval_records),
        "majority": majority,
        "leakage": [asdict(run) for run in leaks.runs],
        "train_overlap": len(overlapping_rows(full_texts(context.eval_records), full_texts(context.splits.train))),
        "arms": [describe_arm(arm, by_arm[arm.name, counts[-1]][0]) for arm in arms],
        "runs": runs,
        "labels": counts,
        "seeds": sorted({result["seed"] for result in trials}),
        "cells": [{name: result[name] for name in (*CELL_KEYS, *result["tallies"])} for result in trials],
        "summary": summary,
        "pairs": pairs,
        "slices": summarize_slices(
            context,
            comparison_slices(context, plan.compare.slices),
            {arm.name: by_arm[arm.name, counts[-1]] for arm in arms},
        ),
        "warnings": list(context.splits.warnings),
        "notes": [*notes(plan, context, leaks), *majority_notes(majority, summary), *comparability_notes(runs)],
        "details": details(context, arms, by_arm, counts[-1]),
    }
    results["verdicts"] = verdicts(results, unit=context.unit)
    write_json(context.folder / "results.json", results)
    if context.unlabelled_test is not None:
        for arm in arms:
            write_predictions(context, arm, by_arm[arm.name, counts[-1]])
    return results


def majority_baseline(context: ExperimentContext) -> dict[str, Any] | None:
    """The most frequent class (or tag) of the evaluation rows, and the accuracy of always predicting it."""
    columns = context.eval_records.columns
    labels = columns.get("label", list(chain.from_iterable(columns.get("tags", []))))
    if not labels or context.task.predicts_values or getattr(context.task.config, "separator", None) is not None:
        return None
    name, accuracy = majority_class(labels)
    return {"class": name, "accuracy": accuracy}


def majority_notes(majority: Mapping[str, Any] | None, summary: Sequence[dict[str, Any]]) -> list[str]:
    """Arms that are not clearly better than always predicting the majority class, by number of labels."""
    if majority is None:
        return []
    arms: dict[tuple[int, str], list[str]] = {}
    for row in summary:
        metrics = {"accuracy": row["accuracy"], "majority": majority["accuracy"], "majority_class": majority["class"]}
        intervals = {"intervals": {"accuracy": (row.get("accuracy_low"), row.get("accuracy_high"))}}
        if majority_warning(metrics | intervals):
            relation = "below" if row["accuracy"] < majority["accuracy"] else "not clearly above"
            arm = f"{arm_label(row['arm'])} ({row['accuracy']:.1%})"
            arms.setdefault((row["labels"], relation), []).append(arm)
    baseline = f"always predicting {majority['class']!r} ({majority['accuracy']:.1%})"
    return [
        f"With {labels:,} labels, {', '.join(names)} {'are' if len(names) > 1 else 'is'} {relation} {baseline}."
        for (labels, relation), names in arms.items()
    ]


def verdicts(results: Mapping[str, Any], *, unit: str) -> list[str]:
    """For each number of labels, whether pretraining helps and, with `features`, which layers are best."""
    features = results["settings"]["compare"].get("features") or ()
    prefixes = tuple(f"frozen {layers} " for layers in features)  # a run's name may follow
    arms, summary, pairs = results["arms"], results["summary"], results["pairs"]
    feature_arms = [arm for arm in arms if f"{arm['name']} ".startswith(prefixes)] if prefixes else []
    other_arms = [arm for arm in arms if arm not in feature_arms]
    lines = []
    for count in results["labels"]:
        if other_arms:
            lines.append(verdict(count, summary, pairs, other_arms, unit=unit))
        if feature_arms:
            lines.append(features_verdict(count, summary, pairs, feature_arms, unit=unit))
    return lines


def full_texts(records: Records) -> list[str]:
    """The whole input of each row: the same question about another context is another row."""
    contexts = records.columns.get("context", records.columns.get("target", [""] * len(records)))
    return [f"{context} {text}" for context, text in zip(contexts, records.display_texts, strict=True)]


def settings_of(plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    """All settings of the comparison, by section."""
    pretrain = {f"pretrain.{name}": table for name, table in plan.pretrain.items() if isinstance(table, dict)}
    if values := {name: value for name, value in plan.pretrain.items() if not isinstance(value, dict)}:
        pretrain = {"pretrain": values} | pretrain
    arms = {f"arms.{name}": table for name, table in plan.arms.items()}
    return {"compare": config.to_dict(plan.compare), "finetune": plan.settings, **arms, **pretrain}


def title_of(context: ExperimentContext, arms: Sequence[Arm]) -> str:
    runs = list(dict.fromkeys(arm.run.title for arm in arms if arm.run is not None))
    folder, _, file = source_name(context.splits.train.source).rpartition("/")
    data = folder.removeprefix(PREFIX) if folder.startswith(PREFIX) else file
    return f"{', '.join(runs) or 'TF-IDF'} on {data}"


def stacked_probabilities(results: list[TrialResult]) -> np.ndarray:
    """(seeds, rows, classes)"""
    return np.array([result["probabilities"] for result in results])


def summarize_arm(context: ExperimentContext, arm: str, labels: int, results: list[TrialResult]) -> dict[str, Any]:
    primary, metrics = context.task.primary_metric, dict[str, Any]()
    for name in results[0]["tallies"]:
        metrics |= with_bounds(name, *interval(*row_values(context.task, results, name), key=("accuracy",)))
    macro_f1 = [result["macro_f1"] for result in results if result["macro_f1"] is not None]
    f1 = with_bounds("macro_f1", float(np.mean(macro_f1)) if macro_f1 else None)
    if results[0]["probabilities"] is not None:
        true = label_numbers(context.eval_records, context.task.config)
        if true.ndim == 1:
            predicted = stacked_probabilities(results).argmax(-1)
            f1 = with_bounds("macro_f1", *macro_f1_interval(true, predicted, len(context.task.config.classes)))
    speeds = [result["tokens_per_second"] for result in results if result["tokens_per_second"]]
    return {
        "arm": arm,
        "labels": labels,
        "seeds": len(results),
        "metric": primary,
        "score": metrics[primary],
        "low": metrics[f"{primary}_low"],
        "high": metrics[f"{primary}_high"],
        "accuracy": metrics.get("accuracy", metrics.get("exact_match")),
        **metrics,
        **f1,
        "seconds": float(np.mean([result["seconds"] for result in results])),
        "tokens_per_second": float(np.mean(speeds)) if speeds else None,
    }


def with_bounds(name: str, mean: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def describe_arm(arm: Arm, result: TrialResult) -> dict[str, Any]:
    sizes = result["parameters"]
    return {
        "name": arm.name,
        "kind": arm.kind,
        "run": str(arm.run) if arm.run else None,
        "parameters": sizes and {name: sizes[name] for name in ("total", "trainable", "frozen")},
        "settings": arm.settings,
    }


def uses_last_epoch(plan: ComparisonPlan) -> bool:
    """True if all arms are fine-tuned and none selects an epoch."""

    def weights(settings: Mapping[str, Any], default: str) -> str:
        return settings.get("weights", settings.get("train.weights", default))

    common = weights(plan.settings, "best")
    by_arm = {weights(plan.arms.get(name, {}), common) for name in plan.compare.arms}
    kinds = [kind_of_arm(name, plan.arms) for name in plan.compare.arms]
    return by_arm == {"last"} and all(ARM_KINDS.get(kind).is_finetuned for kind in kinds)


def notes(plan: ComparisonPlan, context: ExperimentContext, leaks: LeakageReport) -> list[str]:
    last = uses_last_epoch(plan)
    lines = ["Each arm selected its epoch or classifier on at most as many validation rows as it had training rows."]
    if last:
        lines = ["All arms use the weights of the last epoch; no validation rows were used for selection."]
    lines += [
        f"{metric_name(name)} is sacrebleu's: {signature}."
        for name, signature in context.task.metric_signatures().items()
    ]
    if (seeds := plan.compare.seeds) < 2:
        lines.append(SINGLE_SEED)
    elif seeds < ADVISED_SEEDS:
        lines.append(
            f"The intervals rest on {seeds} seeds only, so a verdict may change with more: --seeds {ADVISED_SEEDS} "
            f"(in Python seeds={ADVISED_SEEDS}) is advised, and reuses the finished trials."
        )
    if context.evaluates_on_valid:
        bias = "" if last else ", which also selected the epochs: the scores of all arms are optimistic"
        lines.append(f"Evaluated on the validation rows{bias}.")
    if leaks.excluded:
        count = len(leaks.excluded)
        lines.append(f"{count:,} evaluation rows were excluded: their texts occur in the pretraining text.")
    lines += [
        f"The pretraining text of {run.run} was not searched for evaluation texts: {run.why}."
        for run in leaks.runs
        if not run.checked
    ]
    if plan.compare.rows == len(context.eval_records):
        lines.append(f"Evaluated on a stratified sample of {len(context.eval_records):,} rows.")
    return lines


def details(context: ExperimentContext, arms: list[Arm], by_arm: ResultsByArm, labels: int) -> dict[str, Any]:
    """Errors of the first seed's models with the most labels, and labels that are probably wrong."""
    first_seed = {arm.name: by_arm[arm.name, labels][0] for arm in arms}
    errors = {name: {"seed": trial["seed"], **trial["told"]} for name, trial in first_seed.items() if trial.get("told")}
    if not errors:  # multi-label tasks have no error analysis
        return {}
    informed = [arm for arm in arms if arm.kind != "scratch"] or arms
    results = [result for arm in informed for result in by_arm[arm.name, labels]]
    if results[0]["probabilities"] is None:
        return {"labels": labels, "arms": errors}
    true = label_numbers(context.eval_records, context.task.config)
    suspects = label_errors(
        stacked_probabilities(results), true, rows=context.eval_records, classes=context.task.config.classes
    )
    return {"labels": labels, "arms": errors, "label_errors": suspects}


def best_valid_loss(result: TrialResult) -> float:
    """At the selected epoch; 0 for TF-IDF and a soup, which have none."""
    return next((row["valid_loss"] for row in result["epochs"] if row["epoch"] == result["best_epoch"]), 0.0)


def write_predictions(context: ExperimentContext, arm: Arm, results: list[TrialResult]) -> None:
    """Predictions of the seed with the best validation score; ties go to the lower validation loss."""
    sign = 1 if is_score(context.task.primary_metric) else -1
    best = max(results, key=lambda result: (sign * result["valid_score"], -best_valid_loss(result)))
    path = context.folder / "predictions" / f"{arm.name.replace(' ', '-').replace('/', '-')}.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in best["predicted"]))


# The pretrained runs side by side. Perplexity is per token: it compares only runs with the same tokenizer, and never a
# bidirectional with a causal model. Bits per byte compare wherever they are defined.


def describe_runs(arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per pretrained run; empty if there is only one."""
    runs = list({arm.run.path: arm.run for arm in arms if arm.run is not None and arm.run.exists()}.values())
    return [describe_run(run, arms, summary) for run in runs] if len(runs) > 1 else []


def describe_run(run: RunFolder, arms: Sequence[Arm], summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    language_model = pretrained_origin(run)
    settings = language_model.config() if language_model else run.config()
    results = language_model.results() if language_model else {}
    metrics = results.get("metrics", {})
    most_labels = max(row["labels"] for row in summary)
    scores = {
        arm.kind: {key: row[key] for key in ("score", "low", "high", "tokens_per_second")}
        for arm in arms
        for row in summary
        if arm.run == run and (row["arm"], row["labels"]) == (arm.name, most_labels)
    }
    return {
        "run": str(run),
        "family": settings["model"]["family"],
        "objective": settings["task"]["name"] if language_model else None,
        "parameters": results.get("parameters", {}).get("total"),
        "tokens": results.get("tokens"),
        "tokens_per_second": results.get("tokens_per_second"),
        "tokenizer": run.data()["tokenizer"],
        **{name: metrics.get(name) for name in RUN_METRICS},
        "bits_per_byte_withheld": results.get("bits_per_byte_withheld"),
        "labels": most_labels,
        "scores": scores,
    }


def pretrained_origin(run: RunFolder) -> RunFolder | None:
    """The language model behind a run: the run itself, or the run it was fine-tuned from if that still exists."""
    source = source_run(run)
    return source if source is not None and source.is_finished() else None


def comparability_notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Differences between the runs that limit what their numbers mean."""
    lines = []
    if len({run["tokenizer"] for run in runs}) > 1:
        lines.append("The runs have different tokenizers: compare their bits per byte, not their perplexities.")
    lines += [
        f"The bits per byte of {run['run']} are withheld: {reason}."
        for run in runs
        if (reason := run.get("bits_per_byte_withheld"))
    ]
    for key, noun in (("parameters", "parameters"), ("tokens", "pretraining tokens")):
        counts = [run[key] for run in runs if run[key]]
        if counts and max(counts) > (1 + SIZE_TOLERANCE) * min(counts):
            lines.append(f"The runs differ in {noun}: from {min(counts):,} to {max(counts):,}.")
    return lines
