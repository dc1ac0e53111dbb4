"""Summarizes the trials of a sweep: ranked points with intervals, the effect of each setting, a verdict."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock import config
from headstock.experiments.grid import SINGLE_SEED, TrialResult, total_seconds, versions
from headstock.experiments.sweep_search import rung_validations, setting_importances
from headstock.experiments.sweep_settings import Range, SweepPlan
from headstock.experiments.sweep_trials import SweepKind, SweepTrial
from headstock.experiments.trial_evaluation import paired_difference, score_interval, t_interval
from headstock.experiments.verdict import sweep_verdict
from headstock.report.sweep_points import (
    Point,
    canonical,
    excludes_zero,
    format_value,
    point_label,
    sorted_values,
    values_of,
)

CELL_KEYS = (
    "settings",
    "seed",
    "fold",
    "score",
    "metrics",
    "steps",
    "seconds",
    "parameters",
    "curve",
    "failed",
    "pruned",
)
BINS = 3  # of the values sampled from a range, to compare their means
SHOWN_FAILURES = 8
METHODS = {
    "grid": "all points of the grid",
    "random": "random points",
    "tpe": "points proposed by TPE",
    "asha": "random points, pruned by ASHA",
}
FAILED = {"mean": None, "low": None, "high": None}


def summarize_sweep(
    plan: SweepPlan,
    kind: SweepKind,
    points: list[Point],
    results_by_point: list[list[TrialResult]],
    best: SweepTrial | None,
    *,
    seconds: float,
) -> dict[str, Any]:
    """The contents of results.json."""
    order = ranking(results_by_point, lower=kind.lower)
    best_results = results_by_point[order[0]]
    ranked = [describe_point(kind, points[index], results_by_point[index], best_results) for index in order]
    marginals = {
        key: marginal(kind, key, values, points, results_by_point, binned=isinstance(plan.grid.get(key), Range))
        for key, values in values_of(points).items()
        if len(values) > 1
    }
    trials = [result for index in order for result in results_by_point[index]]
    results = {
        "kind": "sweep",
        "of": plan.kind,
        "title": title_of(plan, list(values_of(points))),
        "metric": kind.metric,
        "better": "lower" if kind.lower else "higher",
        "followed": kind.curve_metric,
        "versions": versions(),
        "method": plan.sweep.search_method,
        "points_are": METHODS[plan.sweep.search_method],
        "pruning": describe_pruning(plan, kind, results_by_point),
        "importances": importances(plan, points, results_by_point),
        "seed": plan.sweep.seed,
        "seeds": plan.sweep.trials_per_point,
        "unit": "seed" if plan.sweep.folds is None else "fold",
        "folds": plan.sweep.folds,
        "repeats": plan.sweep.repeats,
        "seconds": total_seconds(seconds, trials),
        "settings": {"sweep": config.to_dict(plan.sweep), "grid": describe_grid(plan), plan.kind: base_settings(plan)},
        "data": kind.describe_data(),
        "points": ranked,
        "cells": [{name: result.get(name) for name in CELL_KEYS} for result in trials],
        "best": best and describe_best(kind, best, ranked),
        "marginals": marginals,
    }
    return results | {"verdict": sweep_verdict(results), "notes": notes(plan, results)}


def describe_grid(plan: SweepPlan) -> dict[str, Any]:
    return {
        key: f"{format_value(values.low)}..{format_value(values.high)}" if isinstance(values, Range) else values
        for key, values in plan.grid.items()
    }


def base_settings(plan: SweepPlan) -> dict[str, Any]:
    options = {"preset": plan.preset, "objective": plan.objective, "config": str(plan.file) if plan.file else None}
    return {name: value for name, value in options.items() if value} | plan.settings


def title_of(plan: SweepPlan, keys: Sequence[str]) -> str:
    sweep = plan.sweep
    if plan.kind == "finetune":
        subject = f"{sweep.run} on {sweep.train}"
    else:
        texts = ", ".join(path.rpartition("/")[2] for path in sweep.corpus[:3]) or "text"
        subject = f"{plan.preset or 'a model'} on {texts}"
    return f"{' × '.join(keys)}: {subject}"


# The search


def describe_pruning(
    plan: SweepPlan, kind: SweepKind, results_by_point: Sequence[list[TrialResult]]
) -> dict[str, Any] | None:
    """How many points ASHA stopped, when, and the steps it trained of those that all trials would take."""
    if plan.sweep.search_method != "asha":
        return None
    pruned = [at["step"] for results in results_by_point if (at := pruned_at(results))]
    complete = [result["steps"] for results in results_by_point for result in results if scores_of([result])]
    rungs = rung_validations(plan.sweep.reduction)
    # a point that was pruned would have taken as many steps as the mean of the others
    trials = len(results_by_point) * plan.sweep.trials_per_point
    full = round(float(np.mean(complete)) * trials) if complete else None
    return {
        "points": len(pruned),
        "of": len(results_by_point),
        "rungs": rungs,
        "first_step": min(pruned, default=None),
        "last_step": max(pruned, default=None),
        "steps": sum(trained_steps(kind, results, rungs) for results in results_by_point),
        "full_steps": full,
    }


def trained_steps(kind: SweepKind, results: list[TrialResult], rungs: Sequence[int]) -> int:
    """The steps of a point's trials; where trials do not continue, the first was trained anew for every rung."""
    steps = sum(result["steps"] or 0 for result in results)
    if not kind.continues:
        curve = results[0]["curve"]
        steps += sum(int(curve[rung - 1][0]) for rung in rungs if rung < len(curve))
    return steps


def importances(
    plan: SweepPlan, points: list[Point], results_by_point: list[list[TrialResult]]
) -> dict[str, float] | None:
    if plan.sweep.search_method != "tpe":  # the others do without Optuna
        return None
    scores = [scores_of(results) for results in results_by_point]
    return setting_importances(
        plan.grid, points, [None if score is None else float(np.mean(score)) for score in scores]
    )


# Points


def ranking(results_by_point: Sequence[list[TrialResult]], *, lower: bool) -> list[int]:
    """The indices of the points, the best first.

    Pruned points come after the others, those that went on longest first; points with a failed seed come last.
    """
    sign = 1 if lower else -1

    def sort_key(index: int) -> tuple[int, float, float]:
        scores, pruned = scores_of(results_by_point[index]), pruned_at(results_by_point[index])
        if scores is not None:
            return 0, sign * float(np.mean(scores)), 0.0
        return (1, -pruned["step"], pruned["loss"]) if pruned else (2, 0.0, 0.0)

    return sorted(range(len(results_by_point)), key=sort_key)


def scores_of(results: list[TrialResult]) -> list[float] | None:
    """The score of each seed; None if one failed or was pruned, which the mean of the others would hide."""
    if any(result["failed"] or result.get("pruned") for result in results):
        return None
    return [result["score"] for result in results]


def pruned_at(results: list[TrialResult]) -> dict[str, Any] | None:
    """The step at which a point was pruned, and the validation loss there."""
    return next((result["pruned"] for result in results if result.get("pruned")), None)


def describe_point(
    kind: SweepKind, point: Point, results: list[TrialResult], best: list[TrialResult]
) -> dict[str, Any]:
    scores, parameters = scores_of(results), [result["parameters"] for result in results if result["parameters"]]
    gap = None
    if scores and scores_of(best) and results is not best:
        gap = paired_difference(kind.task, results, best, overlap=kind.overlap)
    return {
        "settings": point,
        **(score_interval(kind.task, results, overlap=kind.overlap)._asdict() if scores else FAILED),
        "seeds": len(results),
        "failed": sum(1 for result in results if result["failed"]),
        "pruned": pruned_at(results),
        "seconds": round(float(np.mean([result["seconds"] for result in results])), 3),
        "parameters": parameters[0] if parameters else None,
        "from_best": gap and gap._asdict(),
    }


def describe_best(kind: SweepKind, best: SweepTrial, ranked: list[dict[str, Any]]) -> dict[str, Any]:
    second = next((row for row in ranked[1:] if row["from_best"]), None)
    return {name: ranked[0][name] for name in ("settings", "mean", "low", "high")} | {
        "seed": best.seed,
        "run": str(kind.run_folder(best)),
        "second": second
        and {"settings": second["settings"], **second["from_best"], "clear": excludes_zero(second["from_best"])},
    }


# The effect of each setting


def marginal(
    kind: SweepKind,
    key: str,
    values: list[Any],
    points: list[Point],
    results_by_point: list[list[TrialResult]],
    *,
    binned: bool,
) -> list[dict[str, Any]]:
    """The mean over all points with each value; values sampled from a range are binned."""
    rows = []
    for group in bins_of(values) if binned and len(values) > BINS else [[value] for value in values]:
        members = {canonical(value) for value in group}
        scores = [
            point_scores
            for point, results in zip(points, results_by_point, strict=True)
            if canonical(point[key]) in members and (point_scores := scores_of(results))
        ]
        means = np.mean(scores, axis=0).tolist() if scores else []
        mean = t_interval(means, overlap=kind.overlap or 0.0)._asdict() if scores else FAILED
        ends = {"from": group[0], "to": group[-1]} if len(group) > 1 else {}
        rows.append({"value": group[len(group) // 2], **mean, "points": len(scores), **ends})
    return rows


def bins_of(values: list[Any]) -> list[list[Any]]:
    """Neighbouring values in bins of equal size."""
    return [part.tolist() for part in np.array_split(np.array(sorted_values(values)), BINS)]


# In words


def pruning_note(plan: SweepPlan, pruning: dict[str, Any]) -> str:
    first, last = pruning["first_step"], pruning["last_step"]
    when = f"at step {first:,}" if first == last else f"between steps {first:,} and {last:,}"
    saved = ""
    if pruning["full_steps"]:
        share = pruning["steps"] / pruning["full_steps"]
        saved = f" The sweep took {pruning['steps']:,} steps, {share:.0%} of those that all trials would take."
    return (
        f"ASHA pruned {pruning['points']} of {pruning['of']} points {when}: after validation "
        f"{' and '.join(map(str, pruning['rungs']))}, one in {plan.sweep.reduction} went on, by the validation loss of "
        f"the first seed.{saved} A point that learns slowly at first may have been pruned wrongly."
    )


def notes(plan: SweepPlan, results: dict[str, Any]) -> list[str]:
    lines = []
    if plan.sweep.folds is not None:
        lines.append(
            "Points are ranked on rows that their models were not trained on, and intervals allow for the training "
            "rows that folds share (corrected resampled t-test). The score of the best of many points is still "
            "optimistic: evaluate its run, which is trained on all rows, once on others."
        )
    elif plan.kind == "finetune":
        lines.append(
            "Points are ranked on the validation rows, which also selected the epochs; no test row was used. The best "
            "score is optimistic: evaluate the selected run once on rows that played no part in the selection."
        )
    else:
        lines.append("The best point was selected on the validation text shown here, so its score is optimistic.")
        if any(key.startswith("task.") for key in plan.grid):
            lines.append("Settings of the objective vary, so losses also differ because the objectives differ.")
    if plan.sweep.trials_per_point < 2:
        lines.append(SINGLE_SEED)
    if plan.sweep.sample is not None and len(results["marginals"]) > 1:
        how = "proposed by TPE, more where scores were good" if results["method"] == "tpe" else "sampled at random"
        lines.append(f"Points were {how}: the mean of a value also depends on its points' other settings.")
    if (pruning := results["pruning"]) and pruning["points"]:
        lines.append(pruning_note(plan, pruning))
    if results["importances"]:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in results["importances"].items())
        lines.append(f"Share of the variance of the scores that each setting explains (fANOVA): {shares}.")
    if failed := [point_label(row["settings"]) for row in results["points"] if row["failed"]]:
        names = "; ".join(failed[:SHOWN_FAILURES]) + ("; ..." if len(failed) > SHOWN_FAILURES else "")
        lines.append(f"{len(failed)} points had a trial whose loss became infinite or NaN, and rank last: {names}.")
    return lines
