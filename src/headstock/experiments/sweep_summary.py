"""From the trials of a sweep to its answer: points in their order, what each setting moves, and how sure that is."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock import config
from headstock.experiments.comparison_summary import tallied, versions
from headstock.experiments.grid import (
    Point,
    Range,
    SweepPlan,
    canonical,
    format_value,
    is_number,
    label,
    sorted_values,
    values_of,
)
from headstock.experiments.sweep_trials import Field, Made, Trial, run_of
from headstock.intervals import Interval, difference, interval
from headstock.tasks.labelled import LabelledTask
from headstock.tasks.wording import NOT_PERCENT, is_score, metric_name

TOLD = ("settings", "seed", "score", "metrics", "steps", "seconds", "parameters", "curve", "failed")
BANDS = 3  # into which values that were drawn from a range are put, to compare their means
SMALL = 0.005  # a gap of losses below this is written with more digits


def summarize_sweep(
    plan: SweepPlan, field: Field, points: list[Point], made: list[list[Made]], best: Trial | None, *, seconds: float
) -> dict[str, Any]:
    """Everything the report shows: what results.json holds."""
    order = best_first(made, lower=field.lower)
    ranked = [describe_point(field.judge, points[place], made[place], made[order[0]]) for place in order]
    marginals = {
        key: marginal(key, values, points, made, banded=isinstance(plan.grid.get(key), Range))
        for key, values in values_of(points).items()
        if len(values) > 1
    }
    cells = [cell for place in order for cell in made[place]]
    results = {
        "kind": "sweep",
        "of": plan.kind,
        "title": title_of(plan, list(values_of(points))),
        "metric": field.metric,
        "better": "lower" if field.lower else "higher",
        "followed": field.followed,
        "versions": versions(),
        "seed": plan.sweep.seed,
        "seeds": plan.sweep.seeds,
        "seconds": round(max(seconds, sum(cell["seconds"] for cell in cells)), 1),  # also of what was there already
        "settings": {"sweep": config.to_dict(plan.sweep), "grid": written(plan), plan.kind: settings_of(plan)},
        "data": field.about(),
        "points": ranked,
        "cells": [{name: cell.get(name) for name in TOLD} for cell in cells],
        "best": best and describe_best(field, best, ranked),
        "marginals": marginals,
    }
    return results | {"verdict": verdict(results), "notes": notes(plan, field, results)}


def written(plan: SweepPlan) -> dict[str, Any]:
    return {
        key: f"{format_value(values.low)}..{format_value(values.high)}" if isinstance(values, Range) else values
        for key, values in plan.grid.items()
    }


def settings_of(plan: SweepPlan) -> dict[str, Any]:
    own = {"preset": plan.preset, "objective": plan.objective, "config": str(plan.file) if plan.file else None}
    return {name: value for name, value in own.items() if value} | plan.settings


def title_of(plan: SweepPlan, keys: Sequence[str]) -> str:
    asked = plan.sweep
    what = f"{asked.run} on {asked.train}" if plan.kind == "finetune" else f"{plan.preset or 'a model'} on text"
    if plan.kind == "pretrain" and asked.corpus:
        what = f"{plan.preset or 'a model'} on {', '.join(path.rpartition('/')[2] for path in asked.corpus[:3])}"
    return f"{' × '.join(keys)}: {what}"


# Points


def best_first(made: Sequence[list[Made]], *, lower: bool) -> list[int]:
    """The places of the points, the best first; those of which a seed failed come last."""
    sign = 1 if lower else -1

    def merit(place: int) -> tuple[bool, float]:
        scores = scores_of(made[place])
        return scores is None, 0.0 if scores is None else sign * float(np.mean(scores))

    return sorted(range(len(made)), key=merit)


def scores_of(cells: list[Made]) -> list[float] | None:
    """By seed; none where one failed: the mean of the others would hide that."""
    return None if any(cell["failed"] for cell in cells) else [cell["score"] for cell in cells]


def describe_point(judge: LabelledTask | None, point: Point, cells: list[Made], best: list[Made]) -> dict[str, Any]:
    scores, parameters = scores_of(cells), [cell["parameters"] for cell in cells if cell["parameters"]]
    around = score_interval(judge, cells) if scores else Interval(math.nan, None, None)
    gap = gap_between(judge, cells, best) if scores and scores_of(best) and cells is not best else None
    return {
        "settings": point,
        "mean": around.mean if scores else None,
        "low": around.low,
        "high": around.high,
        "seeds": len(cells),
        "failed": sum(1 for cell in cells if cell["failed"]),
        "seconds": round(float(np.mean([cell["seconds"] for cell in cells])), 3),
        "parameters": parameters[0] if parameters else None,
        "from_best": gap and {"mean": gap.mean, "low": gap.low, "high": gap.high},
    }


def score_interval(judge: LabelledTask | None, cells: list[Made]) -> Interval:
    """Over the seeds and, where rows were judged one by one, over these too."""
    if judge is None:
        return over_seeds([cell["score"] for cell in cells])
    return interval(*tallied(judge, cells, judge.primary_metric))


def gap_between(judge: LabelledTask | None, cells: list[Made], others: list[Made]) -> Interval:
    """Scores minus the others', paired by seed, and by row where there are rows."""
    if judge is None:
        return over_seeds([a["score"] - b["score"] for a, b in zip(cells, others, strict=True)])
    (hits, of), (other_hits, other_of) = (tallied(judge, those, judge.primary_metric) for those in (cells, others))
    return difference(hits, other_hits, of, other_of)


def over_seeds(values: Sequence[float]) -> Interval:
    """Student's t: the mean of few values and how far that of all seeds may lie from it."""
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    reach = float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Interval(mean, mean - reach, mean + reach)


def describe_best(field: Field, best: Trial, ranked: list[dict[str, Any]]) -> dict[str, Any]:
    second = next((row for row in ranked[1:] if row["from_best"]), None)
    first = {name: ranked[0][name] for name in ("settings", "mean", "low", "high")}
    clear = second and leaves_out_zero(second["from_best"])
    return first | {
        "seed": best.seed,
        "run": str(run_of(field.folder, best)),
        "second": second and {"settings": second["settings"], **second["from_best"], "clear": clear},
    }


def leaves_out_zero(gap: dict[str, Any]) -> bool:
    return gap["low"] is not None and (gap["low"] > 0 or gap["high"] < 0)


# What each setting moves


def marginal(
    key: str, values: list[Any], points: list[Point], made: list[list[Made]], *, banded: bool
) -> list[dict[str, Any]]:
    """The mean of all points with a value, value by value, the same for bands of those drawn from a range."""
    rows = []
    for band in bands(values) if banded and len(values) > BANDS else [[value] for value in values]:
        known = {canonical(value) for value in band}
        scores = [
            found
            for point, cells in zip(points, made, strict=True)
            if canonical(point[key]) in known and (found := scores_of(cells))
        ]
        around = over_seeds(np.mean(scores, axis=0).tolist()) if scores else Interval(math.nan, None, None)
        middle = band[len(band) // 2]
        row = {"value": middle, "mean": around.mean if scores else None, "low": around.low, "high": around.high}
        rows.append(row | {"points": len(scores)} | ({"from": band[0], "to": band[-1]} if len(band) > 1 else {}))
    return rows


def bands(values: list[Any]) -> list[list[Any]]:
    """As many neighbours in each."""
    return [part.tolist() for part in np.array_split(np.array(sorted_values(values)), BANDS)]


def spreads(results: dict[str, Any]) -> dict[str, float]:
    """How far apart the means of each setting's values are, the farthest first."""
    found = {}
    for key, rows in results["marginals"].items():
        means = [row["mean"] for row in rows if row["mean"] is not None]
        if len(means) > 1:
            found[key] = max(means) - min(means)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# In words


def format_score(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    if not is_score(metric):
        return f"{value:.4f}"
    return f"{100 * value:.1f}{'' if metric in NOT_PERCENT else '%'}"


def bare(metric: str, value: float | None) -> str:
    """The same without its unit, as the ends of an interval are written."""
    return format_score(metric, value).removesuffix("%")


def format_difference(metric: str, value: float) -> str:
    """A difference: `3.1 points`, `0.041`."""
    if is_score(metric):
        return f"{100 * value:.1f} points"
    return f"{value:.3f}" if abs(value) >= SMALL else f"{value:.2g}"


def format_interval(metric: str, row: dict[str, Any]) -> str:
    return "" if row["low"] is None else f" ({bare(metric, row['low'])} to {bare(metric, row['high'])})"


def verdict(results: dict[str, Any]) -> str:
    """Which point is best, whether that is sure, and which setting matters most."""
    metric, best = results["metric"], results["best"]
    if best is None:
        return "Every point failed: in each a training's loss was no longer a number; try lower learning rates."
    score = f"{format_score(metric, best['mean'])}{format_interval(metric, best)}"
    said = f"Best is {label(best['settings'])} with {metric_name(metric)} {score}"
    return f"{said}{against_second(results)}.{most(results)}"


def against_second(results: dict[str, Any]) -> str:
    metric, second = results["metric"], results["best"]["second"]
    if second is None:
        return "; there is no other point to compare it with"
    gap, name = format_difference(metric, abs(second["mean"])), label(second["settings"])
    if second["low"] is None:
        return f"; the second, {name}, is {gap} behind, and one seed cannot tell whether that would be so again"
    low, high = sorted(abs(edge) if second["clear"] else edge for edge in (second["low"], second["high"]))
    span = f"{format_difference(metric, low).removesuffix(' points')} to {format_difference(metric, high)}"
    if second["clear"]:
        return f"; it is clearly better than the second, {name}, by {gap} ({span}, the same seeds paired)"
    if results["better"] == "higher":
        span = f"{format_difference(metric, -high).removesuffix(' points')} to {format_difference(metric, -low)}"
    return f"; it is not clearly better than the second, {name}: {gap} ahead, but with the same seeds paired {span}"


def most(results: dict[str, Any]) -> str:
    """The setting whose values lie farthest apart, and the next one."""
    metric, found = results["metric"], spreads(results)
    if not found:
        return ""
    (key, far), *others = found.items()
    hedge = "" if results["seeds"] > 1 else " as far as one seed tells"
    if len(results["marginals"]) == 1:
        return f" Over its values, {key} moves it by {format_difference(metric, far)}{hedge}."
    rows = [row for row in results["marginals"][key] if row["mean"] is not None]
    ends = sorted(rows, key=lambda row: row["mean"], reverse=results["better"] == "higher")
    said = f" What matters most is {key}{hedge}: the means of its values lie {format_difference(metric, far)} apart"
    said += f" (best {values_told(ends[0])}, worst {values_told(ends[-1])})"
    rest = ", ".join(f"{format_difference(metric, value)} for {other}" for other, value in others)
    return f"{said}, against {rest}." if rest else f"{said}."


def values_told(row: dict[str, Any]) -> str:
    return f"{format_value(row['from'])} to {format_value(row['to'])}" if "from" in row else format_value(row["value"])


def notes(plan: SweepPlan, field: Field, results: dict[str, Any]) -> list[str]:
    said = []
    if plan.kind == "finetune":
        said.append(
            "Ranked by the validation rows, by which the epochs were chosen too; no test row was looked at. The best "
            "number flatters: measure the chosen run once on rows that played no part."
        )
    else:
        said.append("The best was chosen on the same held-out text that is told here, so its number flatters a little.")
        if any(key.startswith("task.") for key in plan.grid):
            said.append("Settings of the objective vary: losses then also differ because they ask different things.")
    if plan.sweep.seeds < 2:
        said.append("One seed only: nothing is known of how much another would differ, so intervals are left out.")
    if plan.sweep.sample is not None and len(results["marginals"]) > 1:
        said.append("Points were drawn at random: a value's mean also carries what else its points happened to have.")
    failed = [row for row in results["points"] if row["failed"]]
    if failed:
        named = "; ".join(label(row["settings"]) for row in failed[:8]) + ("; ..." if len(failed) > 8 else "")
        said.append(
            f"Of {len(failed)} points a training failed, its loss no longer a number: {named}. They are ranked last."
        )
    return said


def ranked_table(results: dict[str, Any]) -> Any:
    """The points for the terminal, the best first."""
    from rich.table import Table

    metric, keys = results["metric"], list(results["points"][0]["settings"])
    made = Table(title=f"{metric_name(metric)}, {results['better']} is better; seeds of each point: {results['seeds']}")
    made.add_column("", justify="right")
    for key in keys:
        made.add_column(key, justify="right" if is_number(results["points"][0]["settings"][key]) else "left")
    for name in (metric_name(metric), "behind the best", "time"):
        made.add_column(name, justify="right")
    for place, row in enumerate(results["points"], 1):
        score = (
            f"{format_score(metric, row['mean'])}{format_interval(metric, row)}"
            if row["mean"] is not None
            else "failed"
        )
        made.add_row(
            str(place),
            *(format_value(row["settings"][key]) for key in keys),
            f"[bold]{score}[/bold]" if place == 1 else score,
            behind(results, row),
            f"{row['seconds']:.1f} s",
        )
    return made


def behind(results: dict[str, Any], row: dict[str, Any]) -> str:
    """`0.041 (0.012 to 0.070)`: how much worse than the best, paired."""
    gap = row["from_best"]
    if gap is None:
        return ""
    sign = 1 if results["better"] == "lower" else -1
    metric = results["metric"]
    said = format_difference(metric, sign * gap["mean"])
    if gap["low"] is None:
        return said
    low, high = sorted((sign * gap["low"], sign * gap["high"]))
    ends = [format_difference(metric, edge).removesuffix(" points") for edge in (low, high)]
    return f"{said} ({ends[0]} to {ends[1]})"
