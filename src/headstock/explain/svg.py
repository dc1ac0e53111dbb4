"""Boxes, arrows and sums from which pictures of models are put together, as SVG that suits light and dark pages.

Pictures grow upwards, as a text does on its way through a model: y gets smaller the higher something stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 348  # of a box
ROW = 17  # of a line of text in it
EDGE = 11  # between a box and its text
GAP = 24  # between two boxes, where an arrow is
SKIP = 30  # how far to the left of a box the way around it runs

# fill and line of each kind of part, on a light page and on a dark one
KINDS = {
    "embedding": (("#e3f0f9", "#0072b2"), ("#10293a", "#5cb8ec")),
    "attention": (("#fdebdd", "#d55e00"), ("#3a2413", "#ff8f43")),
    "cross": (("#fdf1dd", "#b97d00"), ("#3a3013", "#f0c263")),
    "feed": (("#e0f3ee", "#00876a"), ("#0f2f27", "#34cfa3")),
    "cells": (("#e0f3ee", "#00876a"), ("#0f2f27", "#34cfa3")),
    "norm": (("#f1efea", "#8a8f98"), ("#25282e", "#8a8f98")),
    "head": (("#f6e6f1", "#a8488a"), ("#351f2e", "#e79bcb")),
    "plain": (("#ffffff", "#8a8f98"), ("#1c1f24", "#8a8f98")),
}
INK = (("#1c2128", "#62676f", "#fdfcfa", "#dedad2"), ("#e8e6e1", "#a0a5ae", "#15171b", "#363a42"))
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def style(*, page: bool) -> str:
    """The look of all pictures; a page has its own background already."""
    light, dark = (colours(side) for side in (0, 1))
    paper = "" if page else f".sketch {{ background: {INK[0][2]}; }}"
    dark_paper = "" if page else f".sketch {{ background: {INK[1][2]}; }}"
    return (
        f".sketch {{ font-family: {FONT}; }} .sketch text {{ font-size: 12px; }} "
        ".sketch .title { font-size: 17px; font-weight: 600; } "
        ".sketch .name { font-size: 13.5px; font-weight: 600; } .sketch .count { font-variant-numeric: tabular-nums; } "
        ".sketch .shape { font-style: italic; } .sketch .way { fill: none; stroke-width: 1.4; } "
        ".sketch .tie { fill: none; stroke-width: 1.2; stroke-dasharray: 2 4; stroke-linecap: round; } "
        ".sketch .frame { fill: none; stroke-width: 1.2; stroke-dasharray: 6 4; } .sketch .box { stroke-width: 1.2; } "
        f"{paper} {light} @media screen and (prefers-color-scheme: dark) {{ {dark_paper} {dark} }}"
    )


def colours(side: int) -> str:
    ink, soft, paper, line = INK[side]
    kinds = " ".join(
        f".sketch .{kind} {{ fill: {looks[side][0]}; stroke: {looks[side][1]}; }}" for kind, looks in KINDS.items()
    )
    return (
        f"{kinds} .sketch text {{ fill: {ink}; }} .sketch .soft, .sketch .shape {{ fill: {soft}; }} "
        f".sketch .way, .sketch .sum {{ stroke: {ink}; }} .sketch .sum, .sketch .free {{ fill: {paper}; }} "
        f".sketch .tip, .sketch .dot, .sketch .seen {{ fill: {ink}; }} "
        f".sketch .tie, .sketch .frame {{ stroke: {soft}; }} "
        f".sketch .hidden {{ fill: {line}; }}"
    )


@dataclass
class Box:
    """A part: its name and its weights in the first line, the rest below."""

    name: str
    kind: str
    count: str = ""
    formula: str = ""
    lines: Sequence[str] = ()
    masks: Sequence[str] = ()  # small pictures of who looks at whom: "causal", "full"

    @property
    def height(self) -> float:
        rows = 1 + max(len(self.lines), 1 if self.formula and self.lines else 0)
        return max(rows * ROW + 13, 76 if self.masks else 0)


@dataclass
class Sketch:
    """A picture that is being drawn."""

    parts: list[str] = field(default_factory=list)
    left: float = 0
    right: float = 0
    top: float = 0
    bottom: float = 0

    def reach(self, x: float, y: float) -> None:
        self.left, self.right = min(self.left, x), max(self.right, x)
        self.top, self.bottom = min(self.top, y), max(self.bottom, y)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        if not words:
            return
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        named = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{side}{named}>{escape(words)}</text>')

    def box(self, x: float, y: float, box: Box, width: float = WIDTH) -> float:
        """A box whose lower edge is at y and whose middle is at x; where its upper edge is."""
        top, left, right = y - box.height, x - width / 2, x + width / 2
        self.reach(left, top)
        self.reach(right, y)
        self.parts.append(
            f'<rect class="box {box.kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{box.height:g}" rx="6"/>'
        )
        line = top + ROW + 3
        self.text(left + EDGE, line, box.name, "name")
        for row, words in enumerate(box.lines, 1):
            self.text(left + EDGE, line + row * ROW, words, "soft")
        if box.lines or not box.formula:
            self.text(right - EDGE, line, box.count, "count", "end")
            self.text(right - EDGE, line + ROW, box.formula, "soft", "end")
        else:  # a part without anything to say takes one line
            self.text(right - EDGE, line, f"{box.formula} = {box.count}", "soft", "end")
        for place, kind in enumerate(reversed(box.masks)):
            self.mask(right - EDGE - 23 - 30 * place, line + ROW + 8, kind)
        return top

    def mask(self, x: float, y: float, kind: str, size: int = 4) -> None:
        """A table of queries (down) and keys (across): filled where one may look."""
        for row in range(size):
            for column in range(size):
                seen = "seen" if kind == "full" or column <= row else "hidden"
                place = f'x="{x + 6 * column:g}" y="{y + 6 * row:g}"'
                self.parts.append(f'<rect class="{seen}" {place} width="5" height="5" rx="1"/>')

    def way(self, *points: tuple[float, float], tip: bool = True, kind: str = "way") -> None:
        """A line through points, with an arrow's tip at the last."""
        (x, y), *rest = points
        path = f"M{x:g} {y:g}" + "".join(f" L{a:g} {b:g}" for a, b in rest)
        self.parts.append(f'<path class="{kind}" d="{path}"/>')
        for point in points:
            self.reach(*point)
        if tip:
            self.tip(points[-2], points[-1])

    def tip(self, before: tuple[float, float], end: tuple[float, float]) -> None:
        (a, b), (x, y) = before, end
        if a == x:
            turn = 1 if y < b else -1
            corners = (x - 4, y + 8 * turn), (x + 4, y + 8 * turn)
        else:
            turn = 1 if x < a else -1
            corners = (x + 8 * turn, y - 4), (x + 8 * turn, y + 4)
        shape = " ".join(f"{p:g},{q:g}" for p, q in (end, *corners))
        self.parts.append(f'<polygon class="tip" points="{shape}"/>')

    def dot(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="2.6"/>')

    def plus(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="sum way" cx="{x:g}" cy="{y:g}" r="10"/>')
        self.parts.append(f'<path class="way" d="M{x - 5:g} {y:g} H{x + 5:g} M{x:g} {y - 5:g} V{y + 5:g}"/>')

    def frame(self, x: float, low: float, high: float, words: str, *, left: float, right: float) -> None:
        """What is repeated, and how often."""
        place = f'x="{x - left:g}" y="{high:g}" width="{left + right:g}" height="{low - high:g}"'
        self.parts.insert(0, f'<rect class="frame" {place} rx="10"/>')
        self.reach(x - left, high)
        self.reach(x + right, low)
        self.text(x + right - 10, high + 18, words, "name", "end")

    def svg(self, label: str, *, page: bool) -> str:
        """The whole picture; in a page its colours come from the page's style."""
        edge = 14
        width, height = self.right - self.left + 2 * edge, self.bottom - self.top + 2 * edge
        view = f"{self.left - edge:g} {self.top - edge:g} {width:g} {height:g}"
        size = f'style="max-width: {width:g}px; min-width: {min(width, 0.72 * width):g}px"' if page else ""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="sketch" viewBox="{view}" role="img" {size}'
        own = "" if page else f"<style>{style(page=False)}</style>"
        given = "" if page else f' width="{width:g}" height="{height:g}"'
        return f'{head}{given} aria-label="{escape(label, {chr(34): "&quot;"})}">{own}{"".join(self.parts)}</svg>'
