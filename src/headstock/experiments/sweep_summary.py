"""Summarizes the trials of a sweep: ranked points with intervals, the effect of each setting, a verdict."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock import config
from headstock.experiments.comparison_summary import row_values, versions
from headstock.experiments.grid import TrialResult
from headstock.experiments.sweep_settings import Range, SweepPlan
from headstock.experiments.sweep_trials import SweepKind, SweepTrial, run_folder_of
from headstock.intervals import Interval, difference, interval
from headstock.report.sweep_points import (
    Point,
    canonical,
    excludes_zero,
    format_difference,
    format_difference_range,
    format_interval,
    format_metric,
    format_value,
    point_label,
    sorted_values,
    value_spreads,
    values_of,
)
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.wording import metric_name

CELL_KEYS = ("settings", "seed", "score", "metrics", "steps", "seconds", "parameters", "curve", "failed")
BINS = 3  # of the values sampled from a range, to compare their means
SHOWN_FAILURES = 8


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
    ranked = [describe_point(kind.task, points[at], results_by_point[at], results_by_point[order[0]]) for at in order]
    marginals = {
        key: marginal(key, values, points, results_by_point, binned=isinstance(plan.grid.get(key), Range))
        for key, values in values_of(points).items()
        if len(values) > 1
    }
    trials = [result for at in order for result in results_by_point[at]]
    results = {
        "kind": "sweep",
        "of": plan.kind,
        "title": title_of(plan, list(values_of(points))),
        "metric": kind.metric,
        "better": "lower" if kind.lower else "higher",
        "followed": kind.curve_metric,
        "versions": versions(),
        "seed": plan.sweep.seed,
        "seeds": plan.sweep.seeds,
        "seconds": round(max(seconds, sum(result["seconds"] for result in trials)), 1),  # including cached trials
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
    own = {"preset": plan.preset, "objective": plan.objective, "config": str(plan.file) if plan.file else None}
    return {name: value for name, value in own.items() if value} | plan.settings


def title_of(plan: SweepPlan, keys: Sequence[str]) -> str:
    sweep = plan.sweep
    if plan.kind == "finetune":
        subject = f"{sweep.run} on {sweep.train}"
    else:
        texts = ", ".join(path.rpartition("/")[2] for path in sweep.corpus[:3]) or "text"
        subject = f"{plan.preset or 'a model'} on {texts}"
    return f"{' × '.join(keys)}: {subject}"


# Points


def ranking(results_by_point: Sequence[list[TrialResult]], *, lower: bool) -> list[int]:
    """The indices of the points, the best first; points with a failed seed come last."""
    sign = 1 if lower else -1

    def sort_key(at: int) -> tuple[bool, float]:
        scores = scores_of(results_by_point[at])
        return scores is None, 0.0 if scores is None else sign * float(np.mean(scores))

    return sorted(range(len(results_by_point)), key=sort_key)


def scores_of(results: list[TrialResult]) -> list[float] | None:
    """The score of each seed; None if one failed, which the mean of the others would hide."""
    return None if any(result["failed"] for result in results) else [result["score"] for result in results]


def describe_point(
    task: LabelledTask | None, point: Point, results: list[TrialResult], best: list[TrialResult]
) -> dict[str, Any]:
    scores, parameters = scores_of(results), [result["parameters"] for result in results if result["parameters"]]
    mean = score_interval(task, results) if scores else Interval(math.nan, None, None)
    gap = paired_difference(task, results, best) if scores and scores_of(best) and results is not best else None
    return {
        "settings": point,
        "mean": mean.mean if scores else None,
        "low": mean.low,
        "high": mean.high,
        "seeds": len(results),
        "failed": sum(1 for result in results if result["failed"]),
        "seconds": round(float(np.mean([result["seconds"] for result in results])), 3),
        "parameters": parameters[0] if parameters else None,
        "from_best": gap and {"mean": gap.mean, "low": gap.low, "high": gap.high},
    }


def score_interval(task: LabelledTask | None, results: list[TrialResult]) -> Interval:
    """Over seeds and, for labelled tasks, over rows."""
    if task is None:
        return t_interval([result["score"] for result in results])
    return interval(*row_values(task, results, task.primary_metric))


def paired_difference(task: LabelledTask | None, results: list[TrialResult], others: list[TrialResult]) -> Interval:
    """The difference of scores, paired by seed and, for labelled tasks, by row."""
    if task is None:
        return t_interval([a["score"] - b["score"] for a, b in zip(results, others, strict=True)])
    (hits, of), (other_hits, other_of) = (row_values(task, side, task.primary_metric) for side in (results, others))
    return difference(hits, other_hits, of, other_of)


def t_interval(values: Sequence[float]) -> Interval:
    """The mean with Student's 95% interval; without an interval for a single value."""
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    radius = float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Interval(mean, mean - radius, mean + radius)


def describe_best(kind: SweepKind, best: SweepTrial, ranked: list[dict[str, Any]]) -> dict[str, Any]:
    second = next((row for row in ranked[1:] if row["from_best"]), None)
    return {name: ranked[0][name] for name in ("settings", "mean", "low", "high")} | {
        "seed": best.seed,
        "run": str(run_folder_of(kind.folder, best)),
        "second": second
        and {"settings": second["settings"], **second["from_best"], "clear": excludes_zero(second["from_best"])},
    }


# The effect of each setting


def marginal(
    key: str, values: list[Any], points: list[Point], results_by_point: list[list[TrialResult]], *, binned: bool
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
        mean = t_interval(np.mean(scores, axis=0).tolist()) if scores else Interval(math.nan, None, None)
        row = {"value": group[len(group) // 2], "mean": mean.mean if scores else None}
        row |= {"low": mean.low, "high": mean.high, "points": len(scores)}
        rows.append(row | ({"from": group[0], "to": group[-1]} if len(group) > 1 else {}))
    return rows


def bins_of(values: list[Any]) -> list[list[Any]]:
    """Neighbouring values in bins of equal size."""
    return [part.tolist() for part in np.array_split(np.array(sorted_values(values)), BINS)]


# In words


def sweep_verdict(results: dict[str, Any]) -> str:
    """Which point is best, whether the difference is clear, and which setting matters most."""
    metric, best = results["metric"], results["best"]
    if best is None:
        return "Every point failed: the training loss became infinite or NaN. Try lower learning rates."
    score = f"{format_metric(metric, best['mean'])}{format_interval(metric, best)}"
    opening = f"The best point is {point_label(best['settings'])} with {metric_name(metric)} {score}"
    return f"{opening}{against_second(results)}.{most_important(results)}"


def against_second(results: dict[str, Any]) -> str:
    metric, second = results["metric"], results["best"]["second"]
    if second is None:
        return "; there is no other point to compare with"
    gap, name = format_difference(metric, abs(second["mean"])), point_label(second["settings"])
    if second["low"] is None:
        return f"; the second best, {name}, is {gap} behind, but one seed cannot show whether that is chance"
    low, high = sorted(abs(end) if second["clear"] else end for end in (second["low"], second["high"]))
    if second["clear"]:
        span = format_difference_range(metric, low, high)
        return f"; it is clearly better than the second best, {name}, by {gap} (95% CI {span}, paired by seed)"
    if results["better"] == "higher":
        low, high = -high, -low
    span = format_difference_range(metric, low, high)
    return f"; it is not clearly better than the second best, {name}: {gap} ahead (95% CI {span}, paired by seed)"


def most_important(results: dict[str, Any]) -> str:
    """The setting whose values differ most in their mean score."""
    metric, spreads = results["metric"], value_spreads(results)
    if not spreads:
        return ""
    (key, spread), *others = spreads.items()
    hedge = "" if results["seeds"] > 1 else " (one seed only)"
    if len(results["marginals"]) == 1:
        return f" Across its values, {key} changes the score by {format_difference(metric, spread)}{hedge}."
    rows = [row for row in results["marginals"][key] if row["mean"] is not None]
    rows.sort(key=lambda row: row["mean"], reverse=results["better"] == "higher")
    text = f" The most important setting is {key}{hedge}: the means of its values differ by "
    text += f"{format_difference(metric, spread)} (best {values_label(rows[0])}, worst {values_label(rows[-1])})"
    rest = ", ".join(f"{format_difference(metric, value)} for {other}" for other, value in others)
    return f"{text}, compared with {rest}." if rest else f"{text}."


def values_label(row: dict[str, Any]) -> str:
    if "from" in row:
        return f"{format_value(row['from'])} to {format_value(row['to'])}"
    return format_value(row["value"])


def notes(plan: SweepPlan, results: dict[str, Any]) -> list[str]:
    lines = []
    if plan.kind == "finetune":
        lines.append(
            "Points are ranked on the validation rows, which also selected the epochs; no test row was used. The best "
            "score is optimistic: evaluate the selected run once on rows that played no part in the selection."
        )
    else:
        lines.append("The best point was selected on the validation text shown here, so its score is optimistic.")
        if any(key.startswith("task.") for key in plan.grid):
            lines.append("Settings of the objective vary, so losses also differ because the objectives differ.")
    if plan.sweep.seeds < 2:
        lines.append("One seed only: the variation between seeds is unknown, so there are no intervals.")
    if plan.sweep.sample is not None and len(results["marginals"]) > 1:
        lines.append("Points were sampled at random: the mean of a value also depends on its points' other settings.")
    if failed := [point_label(row["settings"]) for row in results["points"] if row["failed"]]:
        names = "; ".join(failed[:SHOWN_FAILURES]) + ("; ..." if len(failed) > SHOWN_FAILURES else "")
        lines.append(f"{len(failed)} points had a trial whose loss became infinite or NaN, and rank last: {names}.")
    return lines
