"""Charts of a sweep: the score by the values of a setting, and learning curves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.report.charts import Curve, Rows, set_log_ticks
from headstock.report.format import is_finite
from headstock.report.sweep_points import canonical, format_value, is_number
from headstock.report.theme import GRID, NARROW, SOFT, WIDE, ArmStyle, make_figure, percent_axis
from headstock.tasks.wording import is_score, metric_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_RATIO = 8  # of the largest to the smallest value, from which the axis is logarithmic


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
        with_interval = [row for row in scored if is_finite(row.get("low")) and is_finite(row.get("high"))]
        if with_interval:
            spans = np.array([[row["mean"] - row["low"], row["high"] - row["mean"]] for row in with_interval]).T
            axes.errorbar(
                [x_of(row["value"]) for row in with_interval],
                [row["mean"] for row in with_interval],
                yerr=np.maximum(spans, 0),
                fmt="none",
                ecolor=style.colour,
                elinewidth=1.5,
                capsize=3.5,
            )
        is_categorical = scale == "even" and not all(is_number(value) for value in values)
        axes.plot(
            [x_of(row["value"]) for row in scored],
            [row["mean"] for row in scored],
            linestyle="none" if is_categorical else "-",
            color=style.colour,
            marker=style.marker,
        )
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
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08)
    if len(values) <= 6:
        axes.set_xticks(values, [format_value(value) for value in values])
    elif scale == "log" and min(values) >= 1:
        set_log_ticks(axes, min(values), max(values))


def learning_curves(best: ArmStyle, curves: Sequence[Curve], *, metric_name: str, wide: bool) -> "Figure":
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
