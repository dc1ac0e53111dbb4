"""The report of `headstock sweep`, made from its results.json alone."""

from pathlib import Path
from typing import Any

from headstock.errors import UserError
from headstock.experiments.grid import Point, canonical, label, values_of
from headstock.experiments.sweep_summary import behind, format_interval, format_score, leaves_out_zero, spreads
from headstock.report import sweep_charts
from headstock.report.charts import Curve, mean_curve
from headstock.report.render import is_finite, render
from headstock.report.theme import NARROW, SMALL, WIDE, ArmStyle, Gallery, file_name, styles
from headstock.tasks.wording import metric_name
from headstock.train.run_folder import RunFolder

NEEDED = ("points", "cells", "metric", "better", "marginals")
FULL = 0.5  # of a table's cells that must have a point, or it would be mostly holes
REACH = 2.5  # times the median's distance from the best, beyond which all is as pale as can be

Results = dict[str, Any]


def write_sweep_report(folder: Path) -> Path:
    """Make report.html, and its charts as files under figures/, from the folder's results.json."""
    run = RunFolder(folder)
    results = run.results()
    missing = [key for key in NEEDED if key not in results or (key == "points" and not results[key])]
    if missing:
        raise UserError(f"{folder}: its results.json lacks {', '.join(missing)}; run headstock sweep again")
    gallery = Gallery(folder / "figures")
    style = styles([{"name": "best", "kind": "pretrained"}])["best"]
    varied = list(results["marginals"])
    heat = heat_map(results, varied) if len(varied) == 2 else None
    page = render(
        __package__,
        "sweep.html",
        results=results,
        called=metric_name(results["metric"]),
        followed=metric_name(results.get("followed") or "loss"),
        keys=list(results["points"][0]["settings"]),
        rows=[describe(results, row) for row in results["points"]],
        cells=[{**cell, "shown": format_score(results["metric"], cell["score"])} for cell in results["cells"]],
        intervals=any(row["low"] is not None for row in results["points"]),
        heat=heat,
        line=line_charts(results, varied[0], style, gallery) if len(varied) == 1 else None,
        marginals=marginal_charts(results, style, gallery) if len(varied) > 1 else [],
        learning=learning_charts(results, style, gallery),
    )
    run.write_report(page)
    return run.report


def describe(results: Results, row: dict[str, Any]) -> dict[str, Any]:
    """A point as the ranked table shows it."""
    metric, gap = results["metric"], row["from_best"]
    return {
        **row,
        "score": format_score(metric, row["mean"]) if not row["failed"] else "failed",
        "around": format_interval(metric, row).strip(" ()"),
        "behind": behind(results, row).partition(" (")[0],
        "behind_around": behind(results, row).partition(" (")[2].rstrip(")"),
        "sure": gap is not None and leaves_out_zero(gap),
    }


def heat_map(results: Results, keys: list[str]) -> dict[str, Any] | None:
    """The points as a table of the two settings that vary, better ones in a stronger shade."""
    values = values_of([row["settings"] for row in results["points"]])
    down, across = sorted(keys, key=lambda key: len(values[key]), reverse=True)
    points = {place(row["settings"], (down, across)): row for row in results["points"]}
    if len(points) < FULL * len(values[down]) * len(values[across]):
        return None
    shade = shades(results)
    rows = [
        [heat_cell(results, points.get((canonical(a), canonical(b))), shade) for b in values[across]]
        for a in values[down]
    ]
    return {"down": down, "across": across, "rows": rows, "values": {"down": values[down], "across": values[across]}}


def place(point: Point, keys: tuple[str, str]) -> tuple[str, str]:
    return canonical(point[keys[0]]), canonical(point[keys[1]])


def shades(results: Results) -> dict[float, float]:
    """By mean how strong its shade is, 0 to 1; one point that is far off does not make the others look alike."""
    means = sorted(
        (row["mean"] for row in results["points"] if is_finite(row["mean"])), reverse=results["better"] == "higher"
    )
    if not means:
        return {}
    far = REACH * abs(means[len(means) // 2] - means[0]) or abs(means[-1] - means[0])
    return {mean: 1 - min(1.0, abs(mean - means[0]) / far) if far else 1.0 for mean in means}


def heat_cell(results: Results, row: dict[str, Any] | None, shade: dict[float, float]) -> dict[str, Any] | None:
    if row is None:
        return None
    if row["failed"] or row["mean"] is None:
        return {"score": "failed", "share": 0.0, "title": f"{label(row['settings'])}: failed", "best": False}
    said = f"{format_score(results['metric'], row['mean'])}{format_interval(results['metric'], row)}"
    best = row is results["points"][0]
    return {
        "score": format_score(results["metric"], row["mean"]),
        "share": shade[row["mean"]],
        "title": f"{label(row['settings'])}: {said}",
        "best": best,
    }


def dots_of(results: Results, key: str) -> list[tuple[Any, float]]:
    return [(row["settings"][key], row["mean"]) for row in results["points"] if is_finite(row["mean"])]


def line_charts(results: Results, key: str, style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    """The one setting that varies: its points with their own intervals."""
    rows = sorted_by_value(results, key)
    if not any(is_finite(row["mean"]) for row in rows):
        return None
    both = {}
    for width, size in (("wide", WIDE), ("narrow", NARROW)):
        figure = sweep_charts.by_value(style, key, rows, [], size=size, **names(results))
        both[width] = gallery.embed(
            f"by-{file_name(key)}-{width}", figure, told(results, key, rows), keep=width == "wide"
        )
    return both


def sorted_by_value(results: Results, key: str) -> list[dict[str, Any]]:
    order = [canonical(value) for value in values_of([row["settings"] for row in results["points"]])[key]]
    rows = [{**row, "value": row["settings"][key]} for row in results["points"]]
    return sorted(rows, key=lambda row: order.index(canonical(row["value"])))


def marginal_charts(results: Results, style: ArmStyle, gallery: Gallery) -> list[Any]:
    """One chart a setting, that which moves most first."""
    found, charts = spreads(results), []
    for key in found:
        rows = results["marginals"][key]
        dots = dots_of(results, key)
        figure = sweep_charts.by_value(style, key, rows, dots, size=SMALL, **names(results))
        charts.append(gallery.embed(f"by-{file_name(key)}", figure, told(results, key, rows)))
    return charts


def names(results: Results) -> dict[str, str]:
    return {"metric": results["metric"], "called": metric_name(results["metric"])}


def told(results: Results, key: str, rows: list[dict[str, Any]]) -> str:
    """A chart in words."""
    said = "; ".join(f"{label({key: row['value']})} {format_score(results['metric'], row['mean'])}" for row in rows)
    return f"{metric_name(results['metric'])} by {key}: {said}"


def learning_charts(results: Results, style: ArmStyle, gallery: Gallery) -> dict[str, Any] | None:
    """The mean curve of each point, the best first."""
    curves: list[Curve] = []
    for row in results["points"]:
        own = [
            [(step, value) for step, value in cell["curve"] if is_finite(value)]
            for cell in results["cells"]
            if canonical(cell["settings"]) == canonical(row["settings"]) and cell["curve"]
        ]
        if own := [curve for curve in own if curve]:
            curves.append(mean_curve(own))
    if not curves or max(map(len, curves)) < 2:
        return None
    called = metric_name(results.get("followed") or "loss")
    label_of = f"{called} by step of {len(curves)} points; the best ends at {curves[0][-1][1]:.3f}"
    return {
        width: gallery.embed(
            f"learning-{width}",
            sweep_charts.learning(style, curves, called=called, wide=width == "wide"),
            label_of,
            keep=width == "wide",
        )
        for width in ("wide", "narrow")
    }
