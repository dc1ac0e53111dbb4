"""The report of `headstock sweep`, rendered from its results.json, and its charts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.errors import UserError
from headstock.report.charts import Curve, Rows, mean_curve, plot_intervals, set_log_ticks
from headstock.report.format import is_finite
from headstock.report.render import render
from headstock.report.sweep_points import (
    canonical,
    excludes_zero,
    format_interval,
    format_metric,
    format_value,
    gap_to_best,
    is_number,
    missing_score,
    point_label,
    value_spreads,
    values_of,
)
from headstock.report.theme import (
    GRID,
    NARROW,
    SMALL,
    SOFT,
    WIDE,
    ArmStyle,
    Gallery,
    arm_styles,
    file_name,
    make_figure,
    percent_axis,
)
from headstock.tasks.text_metrics import is_score, metric_name
from headstock.train.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REQUIRED_KEYS = ("points", "cells", "metric", "better", "marginals")
MIN_COVERAGE = 0.5  # of a heat map's cells that must have a point
SHADE_RANGE = 2.5  # times the median's distance from the best; points farther away are palest
LOG_RATIO = 8  # of the largest to the smallest value, from which an axis is logarithmic

Results = dict[str, Any]


def sweep_page(run: RunFolder) -> str:
    """The page; its charts are also written as files under figures/."""
    results = run.results()
    missing = [key for key in REQUIRED_KEYS if key not in results or (key == "points" and not results[key])]
    if missing:
        raise UserError(f"{run}: its results.json lacks {', '.join(missing)}; run headstock sweep again")
    gallery = Gallery(run.path / "figures")
    style = arm_styles([{"name": "best", "kind": "pretrained"}])["best"]
    varied = list(results["marginals"])
    return render(
        __package__,
        "sweep.html",
        results=results,
        metric_name=metric_name(results["metric"]),
        curve_name=metric_name(results.get("followed") or "loss"),
        keys=list(results["points"][0]["settings"]),
        rows=[describe_point(results, row) for row in results["points"]],
        cells=[{**cell, "shown": cell_score(results, cell)} for cell in results["cells"]],
        intervals=any(row["low"] is not None for row in results["points"]),
        heat=heat_map(results, varied) if len(varied) == 2 else None,
        line=line_charts(results, varied[0], style, gallery) if len(varied) == 1 else None,
        marginals=marginal_charts(results, style, gallery) if len(varied) > 1 else [],
        learning=learning_charts(results, style, gallery),
    )


def describe_point(results: Results, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the ranking."""
    metric, gap = results["metric"], row["from_best"]
    gap_text, _, gap_interval = gap_to_best(results, row).partition(" (")
    return {
        **row,
        "score": format_metric(metric, row["mean"]) if is_scored(row) else missing_score(row),
        "interval": format_interval(metric, row).strip(" ()"),
        "gap": gap_text,
        "gap_interval": gap_interval.rstrip(")"),
        "is_clear": gap is not None and excludes_zero(gap),
    }


def cell_score(results: Results, cell: dict[str, Any]) -> str:
    if cell.get("pruned"):
        return missing_score(cell)
    return cell["failed"] or format_metric(results["metric"], cell["score"])


def is_scored(row: dict[str, Any]) -> bool:
    return not row["failed"] and row["mean"] is not None


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
    if not is_scored(row):
        missing = missing_score(row)
        return {"score": missing, "share": 0.0, "title": f"{label}: {missing}", "best": False}
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

    def draw(wide: bool) -> "Figure":
        return score_by_value(style, key, rows, [], metric=results["metric"], size=WIDE if wide else NARROW)

    name = f"by-{file_name(key)}"
    return gallery.embed_both((f"{name}-wide", f"{name}-narrow"), draw, alt_text(results, key, rows))


def marginal_charts(results: Results, style: ArmStyle, gallery: Gallery) -> list[Any]:
    """The mean score by each setting, the largest effect first."""
    charts = []
    for key in value_spreads(results):
        rows = results["marginals"][key]
        dots = [(row["settings"][key], row["mean"]) for row in results["points"] if is_finite(row["mean"])]
        figure = score_by_value(style, key, rows, dots, metric=results["metric"], size=SMALL)
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
    return gallery.embed_both(
        ("learning-wide", "learning-narrow"), lambda wide: learning_curves(style, curves, curve_name, wide=wide), text
    )


# Charts


def scale_of(values: Sequence[Any]) -> str:
    """`linear` or `log` for numbers; `even` spacing for words, or where zero would crowd the others."""
    if not all(is_number(value) for value in values):
        return "even"
    low, high = min(values), max(values)
    if low > 0:
        return "log" if high >= LOG_RATIO * low else "linear"
    positive = [value for value in values if value > 0]
    return "even" if low == 0 and len(positive) > 1 and high >= LOG_RATIO * min(positive) else "linear"


def score_by_value(
    style: ArmStyle, key: str, rows: Rows, dots: Sequence[tuple[Any, float]], *, metric: str, size: int
) -> "Figure":
    """The mean score at each value with its interval, over grey dots of single points."""
    scored = [row for row in rows if is_finite(row.get("mean"))]
    values = [row["value"] for row in rows]
    scale = scale_of([*values, *(value for value, _ in dots)])
    positions = {canonical(value): position for position, value in enumerate(values)}

    def x_of(value: Any) -> Any:
        return positions[canonical(value)] if scale == "even" else value

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        x_dots, y_dots = [x_of(value) for value, _ in dots], [y for _, y in dots]
        axes.scatter(x_dots, y_dots, s=22, color=GRID, alpha=0.7, linewidths=0)
        x = [x_of(row["value"]) for row in scored]
        plot_intervals(axes, x, scored, colour=style.colour, key="mean")
        is_categorical = not all(is_number(value) for value in values)
        means = [row["mean"] for row in scored]
        axes.plot(x, means, linestyle="none" if is_categorical else "-", color=style.colour, marker=style.marker)
        set_value_axis(axes, values, scale)
        axes.set_xlabel(key + (" (log scale)" if scale == "log" else ""))
        axes.set_ylabel(metric_name(metric))
        axes.grid(axis="y")
        axes.margins(y=0.1)
        if is_score(metric):
            percent_axis(axes.yaxis)

    return make_figure(paint, size, {WIDE: 350, NARROW: 290}.get(size, 260))


def set_value_axis(axes: "Axes", values: list[Any], scale: str) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    if scale == "even":
        axes.set_xticks(range(len(values)), [format_value(value)[:16] for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        return
    if scale == "log":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: format_value(value))  # not as powers in TeX
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08)
    if len(values) <= 6:
        axes.set_xticks(values, [format_value(value) for value in values])
    elif scale == "log" and min(values) >= 1:
        set_log_ticks(axes, min(values), max(values))


def learning_curves(best: ArmStyle, curves: Sequence[Curve], metric_name: str, *, wide: bool) -> "Figure":
    """The curves of all points; the first one, the best, is in front."""

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        has_markers = max(len(curve) for curve in curves) <= 15
        for rank, curve in reversed(list(enumerate(curves))):
            if rank == 0:
                marker = best.marker if has_markers else None
                options: dict[str, Any] = {"color": best.colour, "marker": marker, "markersize": 5, "label": "best"}
            else:
                options = {"color": SOFT, "linewidth": 1.0, "alpha": 0.45, "label": "others" if rank == 1 else None}
            axes.plot(*zip(*curve, strict=True), **options)
        axes.set_ylim(*limits(curves))
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if wide else 5, integer=True))
        axes.set_ylabel(metric_name)
        axes.grid(axis="y")
        if len(curves) > 1:
            figure.legend(loc="outside upper left", ncols=2)

    return make_figure(paint, WIDE if wide else NARROW, 350 if wide else 290)


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Up to where most curves start, so that a diverging one does not flatten the others."""
    values = [y for curve in curves for _, y in curve]
    low, high = min(values), max(values)
    top = min(high, low + 3 * (float(np.median([curve[0][1] for curve in curves])) - low) or high)
    margin = 0.05 * (top - low) or 0.5
    return low - margin, top + margin
