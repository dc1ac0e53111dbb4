"""Boxes, arrows and sums of architecture diagrams, as SVG that follows light and dark colour schemes.

Diagrams grow upwards, from the input at the bottom to the heads: y decreases towards the top.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 348  # of a box
LINE = 17  # height of a line of text
PADDING = 11  # between the edge of a box and its text
GAP = 24  # between two boxes
SKIP = 30  # distance of a skip connection from the left edge of its box

# fill and stroke of each kind of box, in light and in dark
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
    """The CSS of all diagrams; a page has its own background."""
    paper = ["" if page else f".diagram {{ background: {ink[2]}; }}" for ink in INK]
    return (
        f".diagram {{ font-family: {FONT}; }} .diagram text {{ font-size: 12px; }} "
        ".diagram .title { font-size: 17px; font-weight: 600; } "
        ".diagram .name { font-size: 13.5px; font-weight: 600; } "
        ".diagram .count { font-variant-numeric: tabular-nums; } "
        ".diagram .shape { font-style: italic; } .diagram .line { fill: none; stroke-width: 1.4; } "
        ".diagram .tied { fill: none; stroke-width: 1.2; stroke-dasharray: 2 4; stroke-linecap: round; } "
        ".diagram .frame { fill: none; stroke-width: 1.2; stroke-dasharray: 6 4; } "
        ".diagram .box { stroke-width: 1.2; } "
        f"{paper[0]} {colours(0)} @media screen and (prefers-color-scheme: dark) {{ {paper[1]} {colours(1)} }}"
    )


def colours(scheme: int) -> str:
    ink, soft, paper, line = INK[scheme]
    kinds = " ".join(
        f".diagram .{kind} {{ fill: {pair[scheme][0]}; stroke: {pair[scheme][1]}; }}" for kind, pair in KINDS.items()
    )
    return (
        f"{kinds} .diagram text {{ fill: {ink}; }} .diagram .soft, .diagram .shape {{ fill: {soft}; }} "
        f".diagram .line, .diagram .sum {{ stroke: {ink}; }} .diagram .sum {{ fill: {paper}; }} "
        f".diagram .tip, .diagram .dot, .diagram .allowed {{ fill: {ink}; }} "
        f".diagram .tied, .diagram .frame {{ stroke: {soft}; }} "
        f".diagram .masked {{ fill: {line}; }}"
    )


@dataclass
class Box:
    """A module: its name and parameter count in the first line, details below."""

    name: str
    kind: str
    count: str = ""
    formula: str = ""
    lines: Sequence[str] = ()
    masks: Sequence[str] = ()  # thumbnails of attention masks: "causal", "full"

    @property
    def height(self) -> float:
        rows = 1 + max(len(self.lines), 1 if self.formula and self.lines else 0)
        return max(rows * LINE + 13, 76 if self.masks else 0)


@dataclass
class Diagram:
    """SVG elements and the rectangle that contains them."""

    parts: list[str] = field(default_factory=list)
    left: float = 0
    right: float = 0
    top: float = 0
    bottom: float = 0

    def include(self, x: float, y: float) -> None:
        """Extend the visible rectangle to a point."""
        self.left, self.right = min(self.left, x), max(self.right, x)
        self.top, self.bottom = min(self.top, y), max(self.bottom, y)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        if not text:
            return
        anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
        styled = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{anchored}{styled}>{escape(text)}</text>')

    def box(self, x: float, y: float, box: Box, width: float = WIDTH) -> float:
        """A box centred at x with its lower edge at y; returns the y of its upper edge."""
        top, left, right = y - box.height, x - width / 2, x + width / 2
        self.include(left, top)
        self.include(right, y)
        self.parts.append(
            f'<rect class="box {box.kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{box.height:g}" rx="6"/>'
        )
        first = top + LINE + 3
        self.text(left + PADDING, first, box.name, "name")
        for row, text in enumerate(box.lines, 1):
            self.text(left + PADDING, first + row * LINE, text, "soft")
        if box.lines or not box.formula:
            self.text(right - PADDING, first, box.count, "count", "end")
            self.text(right - PADDING, first + LINE, box.formula, "soft", "end")
        else:  # without details, one line is enough
            self.text(right - PADDING, first, f"{box.formula} = {box.count}", "soft", "end")
        for number, kind in enumerate(reversed(box.masks)):
            self.mask(right - PADDING - 23 - 30 * number, first + LINE + 8, kind)
        return top

    def mask(self, x: float, y: float, kind: str, size: int = 4) -> None:
        """A thumbnail of an attention mask: rows are queries, columns are keys."""
        for row in range(size):
            for column in range(size):
                state = "allowed" if kind == "full" or column <= row else "masked"
                corner = f'x="{x + 6 * column:g}" y="{y + 6 * row:g}"'
                self.parts.append(f'<rect class="{state}" {corner} width="5" height="5" rx="1"/>')

    def line(self, *points: tuple[float, float], tip: bool = True, kind: str = "line") -> None:
        """A polyline, with an arrow's tip at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="{path}"/>')
        for point in points:
            self.include(*point)
        if tip:
            self.tip(points[-2], points[-1])

    def tip(self, before: tuple[float, float], end: tuple[float, float]) -> None:
        (a, b), (x, y) = before, end
        if a == x:
            sign = 1 if y < b else -1
            corners = (x - 4, y + 8 * sign), (x + 4, y + 8 * sign)
        else:
            sign = 1 if x < a else -1
            corners = (x + 8 * sign, y - 4), (x + 8 * sign, y + 4)
        shape = " ".join(f"{p:g},{q:g}" for p, q in (end, *corners))
        self.parts.append(f'<polygon class="tip" points="{shape}"/>')

    def dot(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="2.6"/>')

    def plus(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="sum line" cx="{x:g}" cy="{y:g}" r="10"/>')
        self.parts.append(f'<path class="line" d="M{x - 5:g} {y:g} H{x + 5:g} M{x:g} {y - 5:g} V{y + 5:g}"/>')

    def frame(self, x: float, low: float, high: float, text: str, *, left: float, right: float) -> None:
        """A dashed frame around repeated layers, labelled with their number."""
        area = f'x="{x - left:g}" y="{high:g}" width="{left + right:g}" height="{low - high:g}"'
        self.parts.insert(0, f'<rect class="frame" {area} rx="10"/>')
        self.include(x - left, high)
        self.include(x + right, low)
        self.text(x + right - 10, high + 18, text, "name", "end")

    def svg(self, label: str, *, page: bool) -> str:
        """The SVG; in a page its colours come from the page's style."""
        edge = 14
        width, height = self.right - self.left + 2 * edge, self.bottom - self.top + 2 * edge
        view = f"{self.left - edge:g} {self.top - edge:g} {width:g} {height:g}"
        size = f'style="max-width: {width:g}px; min-width: {0.72 * width:g}px"' if page else ""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" viewBox="{view}" role="img" {size}'
        css = "" if page else f"<style>{style(page=False)}</style>"
        fixed = "" if page else f' width="{width:g}" height="{height:g}"'
        return f'{head}{fixed} aria-label="{escape(label, {chr(34): "&quot;"})}">{css}{"".join(self.parts)}</svg>'
