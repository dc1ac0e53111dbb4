"""The curve of a learning-rate range test: in the terminal, as a picture, and as a page."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.report.charts import terminal_chart
from headstock.report.render import render, standalone_svg, write_page_or_svg
from headstock.report.theme import NARROW, RIGHT, SOFT, WIDE, WRONG, Gallery, make_figure
from headstock.train.lr_finder import LRFinderResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANINGS = {
    "valley": "the middle of the longest fall of the loss: the one to start with",
    "steepest": "where the loss falls fastest",
    "minimum": "a tenth of the rate at which the loss is lowest",
}
DASHES = {"valley": "-", "steepest": "--", "minimum": ":"}


def terminal_lr_chart(result: LRFinderResult) -> str:
    curve = [(math.log10(lr), loss) for lr, loss in zip(result.lrs, result.smoothed, strict=True)]
    return terminal_chart(curve, name="learning rate", format_x=lambda x: f"{10**x:.1e}")


def write_lr_chart(path: Path, result: LRFinderResult, title: str) -> None:
    """Write the page (.html) or its picture (.svg)."""
    gallery = Gallery()
    rates = ", ".join(f"{name} {lr:g}" for name, lr in result.suggestions.items()) or "none"
    alt_text = f"training loss by learning rate; suggestions: {rates}"

    def page() -> str:
        chart = gallery.embed_both(("lr-wide", "lr-narrow"), lambda wide: lr_figure(result, wide=wide), alt_text)
        return render(__package__, "lr_finder.html", title=title, result=result, chart=chart, meanings=MEANINGS)

    write_page_or_svg(
        path, page, lambda: standalone_svg(gallery.embed("lr", lr_figure(result, wide=True), alt_text, save=False))
    )


def lr_figure(result: LRFinderResult, *, wide: bool) -> "Figure":
    """The loss of each step, the smoothed loss, and a vertical line at each suggestion."""

    def paint(figure: "Figure") -> None:
        from matplotlib.ticker import NullFormatter

        axes = figure.subplots()
        axes.plot(result.lrs, result.losses, color=SOFT, linewidth=0.9, alpha=0.6, label="loss of a step")
        axes.plot(result.lrs, result.smoothed, color=RIGHT, linewidth=2, label="smoothed")
        for name, lr in result.suggestions.items():
            axes.axvline(lr, color=WRONG, linestyle=DASHES[name], linewidth=1.3, label=f"{name} {lr:g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}")  # labels are plain text, without exponents
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("learning rate (log scale)")
        axes.set_ylabel("training loss")
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3 if wide else 2)

    return make_figure(paint, WIDE if wide else NARROW, 350 if wide else 320)
