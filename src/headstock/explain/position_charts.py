"""Draws position encodings: what stands for each position, and how alike two positions are by their distance.

T positions, D width.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from headstock.explain.positions import PositionFacts
from headstock.report.render import render
from headstock.report.theme import GRID, INK, NARROW, SMALL, SOFT, WIDE, Gallery, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 256  # positions that are drawn: more are finer than a page's points
POSITIVE, NEGATIVE = (0.85, 0.42, 0.10), (0.13, 0.52, 0.78)  # seen on light and on dark ground alike


def shaded(values: np.ndarray) -> np.ndarray:
    """Numbers from -1 to 1 as colours, the fainter the nearer to 0, so that any ground shows through."""
    colours = np.where(values[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    return np.concatenate([colours, np.abs(values).clip(0, 1)[..., None]], -1)


def scaled(table: np.ndarray) -> tuple[np.ndarray, float]:
    """A table in which the largest number is 1, or nearly: a few stray ones must not make all others faint."""
    most = float(np.quantile(np.abs(table), 0.995)) or 1.0
    return table / most, most


def heat_map(found: PositionFacts, width: int) -> "Figure":
    table, most = scaled(found.table[:SHOWN].numpy())
    split = table.shape[1] // 2

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(shaded(table), aspect="auto", interpolation="none")
        axes.set_xlabel("cosines, then sines, of each pair's angle" if found.kind == "rotary" else "feature")
        axes.set_ylabel("position")
        axes.set_title(f"blue −{most:.3g}, faint 0, orange +{most:.3g}", fontsize=10, color=SOFT)
        if found.kind == "rotary":
            axes.axvline(split - 0.5, color=INK, linewidth=0.8)

    return draw(paint, width, 0.62 * width if width > SMALL + 20 else width)


def alikeness(found: PositionFacts, width: int) -> "Figure":
    table = found.table[:SHOWN].numpy()
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-30)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(shaded(unit @ unit.T), interpolation="none")
        axes.set_xlabel("position")
        axes.set_ylabel("position")

    return draw(paint, width, width)


def by_distance(found: PositionFacts, width: int) -> "Figure":
    distances = np.arange(len(found.similarity))

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.fill_between(distances, found.low, found.high, color="#0072b2", alpha=0.22, linewidth=0)
        axes.plot(distances, found.similarity, color="#0072b2")
        axes.axhline(0, color=GRID, linewidth=0.8)
        axes.set_xlabel("distance of two positions")
        axes.set_ylabel("cosine of their vectors")
        axes.grid(axis="y")

    return draw(paint, width, 0.8 * width)


def picture(found: PositionFacts) -> str:
    """The heat map alone."""
    return Gallery().show("positions", heat_map(found, WIDE), label(found))


def label(found: PositionFacts) -> str:
    length, width = found.table.shape
    return f"{found.kind} encodings of {length} positions, {width} features each"


def page(tables: list[PositionFacts]) -> str:
    gallery, parts = Gallery(), []
    for found in tables:
        charts = {
            "wide": gallery.show("heat", heat_map(found, WIDE), label(found)),
            "narrow": gallery.show("heat", heat_map(found, NARROW), label(found)),
            "alike": gallery.show("alike", alikeness(found, SMALL), "cosine of every two positions"),
            "distance": gallery.show("distance", by_distance(found, SMALL), "cosine by distance"),
        }
        parts.append({"found": found, "length": len(found.table), "width": found.table.shape[1]} | charts)
    return render("headstock.explain", "positions.html", parts=parts, name=tables[0].name, shown=SHOWN)
