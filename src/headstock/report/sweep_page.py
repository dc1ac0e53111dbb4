"""The report of `headstock sweep`, rendered from its results.json."""

from pathlib import Path
from typing import Any

from headstock.errors import UserError
from headstock.report import sweep_charts
from headstock.report.charts import Curve, mean_curve
from headstock.report.format import is_finite
from headstock.report.render import render
from headstock.report.sweep_points import (
    canonical,
    excludes_zero,
    format_interval,
    format_metric,
    gap_to_best,
    point_label,
    value_spreads,
    values_of,
)
from headstock.report.theme import NARROW, SMALL, WIDE, ArmStyle, Gallery, arm_styles, file_name
from headstock.tasks.wording import metric_name
from headstock.train.run_folder import RunFolder

REQUIRED_KEYS = ("points", "cells", "metric", "better", "marginals")
MIN_COVERAGE = 0.5  # of a heat map's cells that must have a point
SHADE_RANGE = 2.5  # times the median's distance from the best; points farther away are palest

Results = dict[str, Any]


def write_sweep_report(folder: Path) -> Path:
    """Write report.html, and its charts as files under figures/."""
    run = RunFolder(folder)
    results = run.results()
    missing = [key for key in REQUIRED_KEYS if key not in results or (key == "points" and not results[key])]
    if missing:
        raise UserError(f"{folder}: its results.json lacks {', '.join(missing)}; run headstock sweep again")
    gallery = Gallery(folder / "figures")
    style = arm_styles([{"name": "best", "kind": "pretrained"}])["best"]
    varied = list(results["marginals"])
    page = render(
        __package__,
        "sweep.html",
        results=results,
        metric_name=metric_name(results["metric"]),
        curve_name=metric_name(results.get("followed") or "loss"),
        keys=list(results["points"][0]["settings"]),
        rows=[describe_point(results, row) for row in results["points"]],
        cells=[{**cell, "shown": format_metric(results["metric"], cell["score"])} for cell in results["cells"]],
        intervals=any(row["low"] is not None for row in results["points"]),
        heat=heat_map(results, varied) if len(varied) == 2 else None,
        line=line_charts(results, varied[0], style, gallery) if len(varied) == 1 else None,
        marginals=marginal_charts(results, style, gallery) if len(varied) > 1 else [],
        learning=learning_charts(results, style, gallery),
    )
    run.write_report(page)
    return run.report


def describe_point(results: Results, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the ranking."""
    metric, gap = results["metric"], row["from_best"]
    gap_text, _, gap_interval = gap_to_best(results, row).partition(" (")
    return {
        **row,
        "score": format_metric(metric, row["mean"]) if not row["failed"] else "failed",
        "interval": format_interval(metric, row).strip(" ()"),
        "gap": gap_text,
        "gap_interval": gap_interval.rstrip(")"),
        "is_clear": gap is not None and excludes_zero(gap),
    }


def heat_map(results: Results, keys: list[str]) -> dict[str, Any] | None:
    """A table of two settings' values; None if most of its cells would be empty."""
    values = values_of([row["settings"] for row in results["points"]])
    down, across = sorted(keys, key=lambda key: len(values[key]), reverse=True)
    points = {(canonical(row["settings"][down]), canonical(row["settings"][across])): row for row in results["points"]}
    if len(points) < MIN_COVERAGE * len(values[down]) * len(values[across]):
        return None
    shades = shades_of(results)
    rows = [
        [heat_cell(results, points.get((canonical(a), canonical(b))), shades) for b in values[across]]
        for a in values[down]
    ]
    return {"down": down, "across": across, "rows": rows, "values": {"down": values[down], "across": values[across]}}


def shades_of(results: Results) -> dict[float, float]:
    """The shade from 0 to 1 of each mean score; an outlier does not make the others look alike."""
    means = sorted(
        (row["mean"] for row in results["points"] if is_finite(row["mean"])), reverse=results["better"] == "higher"
    )
    if not means:
        return {}
    span = SHADE_RANGE * abs(means[len(means) // 2] - means[0]) or abs(means[-1] - means[0])
    return {mean: 1 - min(1.0, abs(mean - means[0]) / span) if span else 1.0 for mean in means}


def heat_cell(results: Results, row: dict[str, Any] | None, shades: dict[float, float]) -> dict[str, Any] | None:
    if row is None:
        return None
    label, metric = point_label(row["settings"]), results["metric"]
    if row["failed"] or row["mean"] is None:
        return {"score": "failed", "share": 0.0, "title": f"{label}: failed", "best": False}
    score = format_metric(metric, row["mean"])
    return {
        "score": score,
        "share": shades[row["mean"]],
        "title": f"{label}: {score}{format_interval(metric, row)}",
        "best": row is results["points"][0],
    }


def line_charts(results: Results, key: str, style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    """The score by the only setting that varies."""
    order = [canonical(value) for value in values_of([row["settings"] for row in results["points"]])[key]]
    rows = [{**row, "value": row["settings"][key]} for row in results["points"]]
    rows.sort(key=lambda row: order.index(canonical(row["value"])))
    if not any(is_finite(row["mean"]) for row in rows):
        return None
    versions = {}
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        figure = sweep_charts.score_by_value(style, key, rows, [], metric=results["metric"], size=size)
        name = f"by-{file_name(key)}-{width}"
        versions[width] = gallery.embed(name, figure, alt_text(results, key, rows), save=width == "wide")
    return versions


def marginal_charts(results: Results, style: ArmStyle, gallery: Gallery) -> list[Any]:
    """The mean score by each setting, the largest effect first."""
    charts = []
    for key in value_spreads(results):
        rows = results["marginals"][key]
        dots = [(row["settings"][key], row["mean"]) for row in results["points"] if is_finite(row["mean"])]
        figure = sweep_charts.score_by_value(style, key, rows, dots, metric=results["metric"], size=SMALL)
        charts.append(gallery.embed(f"by-{file_name(key)}", figure, alt_text(results, key, rows)))
    return charts


def alt_text(results: Results, key: str, rows: list[dict[str, Any]]) -> str:
    metric = results["metric"]
    values = "; ".join(f"{point_label({key: row['value']})} {format_metric(metric, row['mean'])}" for row in rows)
    return f"{metric_name(metric)} by {key}: {values}"


def learning_charts(results: Results, style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    """The mean curve of each point, the best first; None without curves."""
    curves: list[Curve] = []
    for row in results["points"]:
        point_curves = [
            [(step, value) for step, value in cell["curve"] if is_finite(value)]
            for cell in results["cells"]
            if canonical(cell["settings"]) == canonical(row["settings"]) and cell["curve"]
        ]
        if point_curves := [curve for curve in point_curves if curve]:
            curves.append(mean_curve(point_curves))
    if not curves or max(map(len, curves)) < 2:
        return None
    curve_name = metric_name(results.get("followed") or "loss")
    text = f"{curve_name} by step of {len(curves)} points; the best ends at {curves[0][-1][1]:.3f}"
    return {
        width: gallery.embed(
            f"learning-{width}",
            sweep_charts.learning_curves(style, curves, metric_name=curve_name, wide=width == "wide"),
            text,
            save=width == "wide",
        )
        for width in ("wide", "narrow")
    }
