"""Paints the charts of a sweep: the score by each setting's values, and how all points learned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.experiments.grid import canonical, format_value, is_number
from headstock.report.charts import Curve, Rows, plain_log_ticks
from headstock.report.render import is_finite
from headstock.report.theme import GRID, NARROW, SOFT, WIDE, ArmStyle, make_figure, percent_axis
from headstock.tasks.wording import is_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR = 8  # values so many times apart are drawn on a log scale


def scale_of(values: Sequence[Any]) -> str:
    """`linear` or `log` for numbers; `even` where values are words, or a zero would push the others together."""
    if not all(is_number(value) for value in values):
        return "even"
    low, high = min(values), max(values)
    if low > 0:
        return "log" if high >= FAR * low else "linear"
    above = [value for value in values if value > 0]
    return "even" if low == 0 and len(above) > 1 and high >= FAR * min(above) else "linear"


def by_value(
    style: ArmStyle, key: str, rows: Rows, dots: Sequence[tuple[Any, float]], *, metric: str, called: str, size: int
) -> "Figure":
    """The mean at each value with its interval, over faint `dots` of single points."""
    known = [row for row in rows if is_finite(row.get("mean"))]
    values = [row["value"] for row in rows]
    scale = scale_of([*values, *(value for value, _ in dots)])

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        places = {canonical(value): place for place, value in enumerate(values)}

        def at(value: Any) -> Any:
            return places[canonical(value)] if scale == "even" else value

        axes.scatter([at(value) for value, _ in dots], [y for _, y in dots], s=22, color=GRID, alpha=0.7, linewidths=0)
        x, y = [at(row["value"]) for row in known], [row["mean"] for row in known]
        spans = [row for row in known if is_finite(row.get("low")) and is_finite(row.get("high"))]
        if spans:
            reach = np.array([[row["mean"] - row["low"], row["high"] - row["mean"]] for row in spans]).T
            axes.errorbar(
                [at(row["value"]) for row in spans],
                [row["mean"] for row in spans],
                yerr=np.maximum(reach, 0),
                fmt="none",
                ecolor=style.colour,
                elinewidth=1.5,
                capsize=3.5,
            )
        words = scale == "even" and not all(is_number(value) for value in values)
        axes.plot(x, y, linestyle="none" if words else "-", color=style.colour, marker=style.marker)
        value_axis(axes, values, scale)
        axes.set_xlabel(key + (" (log scale)" if scale == "log" else ""))
        score_axis(axes, metric, called)

    return make_figure(paint, size, {WIDE: 350, NARROW: 290}.get(size, 260))


def value_axis(axes: "Axes", values: list[Any], scale: str) -> None:
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
        plain_log_ticks(axes, min(values), max(values))


def score_axis(axes: "Axes", metric: str, called: str) -> None:
    axes.set_ylabel(called)
    axes.grid(axis="y")
    axes.margins(y=0.1)
    if is_score(metric):
        percent_axis(axes.yaxis)


def learning(best: ArmStyle, curves: Sequence[Curve], *, called: str, wide: bool) -> "Figure":
    """All points by step, the first of them, which is the best, in front of the others."""

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        few = max(len(curve) for curve in curves) <= 15
        for place, curve in reversed(list(enumerate(curves))):
            look: dict[str, Any] = {"color": SOFT, "linewidth": 1.0, "alpha": 0.45}
            if place == 0:
                look = {
                    "color": best.colour,
                    "marker": best.marker if few else None,
                    "markersize": 5,
                    "label": "the best",
                }
            elif place == 1:
                look["label"] = "the others"
            axes.plot(*zip(*curve, strict=True), **look)
        axes.set_ylim(*limits(curves))
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if wide else 5, integer=True))
        axes.set_ylabel(called)
        axes.grid(axis="y")
        if len(curves) > 1:
            figure.legend(loc="outside upper left", ncols=2)

    return make_figure(paint, WIDE if wide else NARROW, 350 if wide else 290)


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """From the least of all; up to where most curves begin, so that one that ran away does not flatten the others."""
    values = [y for curve in curves for _, y in curve]
    low, high = min(values), max(values)
    top = min(high, low + 3 * (float(np.median([curve[0][1] for curve in curves])) - low) or high)
    room = 0.05 * (top - low) or 0.5
    return low - room, top + room
