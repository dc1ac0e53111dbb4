"""Paints pretrained runs side by side."""

from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.report.charts import reach, shorten
from headstock.report.theme import NARROW, WIDE, ArmStyle, make_figure, percent_axis, styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART = 0.2  # how far the dots of one run stand apart


def looks_of(kinds: list[str]) -> dict[str, ArmStyle]:
    """Colour and mark of each way to begin, as the arms of those names have them."""
    return styles([{"name": kind, "kind": kind} for kind in kinds])


def scores_of_runs(runs: list[dict[str, Any]], kinds: list[str], *, metric: str, wide: bool) -> "Figure":
    """A line a run, on it a dot with its interval for each way to begin."""
    looks = looks_of(kinds)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for height, run in enumerate(reversed(runs)):
            for place, (kind, style) in enumerate(looks.items()):
                if (found := run["scores"].get(kind)) is None:
                    continue
                span = reach(found)
                axes.errorbar(
                    found["score"],
                    height + APART * ((len(looks) - 1) / 2 - place),
                    xerr=None if span is None else np.array([span]).T,
                    color=style.colour,
                    marker=style.marker,
                    markerfacecolor=style.face,
                    markersize=8,
                    elinewidth=2,
                    capsize=4,
                    linestyle="none",
                    label=kind if height == len(runs) - 1 else None,
                )
        names = [shorten(str(run["run"]).rpartition("/")[2], 30 if wide else 16) for run in reversed(runs)]
        axes.set_yticks(range(len(runs)), names)
        axes.set_ylim(-0.6, len(runs) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(metric)
        percent_axis(axes.xaxis)
        axes.margins(x=0.1)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(looks), frameon=False)

    return make_figure(paint, WIDE if wide else NARROW, 120 + 56 * len(runs))
