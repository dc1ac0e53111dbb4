"""Boxes, arrows and sums of architecture diagrams, as SVG that follows light and dark colour schemes.

Diagrams grow upwards, from the input at the bottom to the heads: y decreases towards the top.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 348  # of a box
LINE = 17  # height of a line of text
PADDING = 11  # between the edge of a box and its text
GAP = 24  # between two boxes
SKIP = 30  # distance of a skip connection from the left edge of its box
STYLE_SHEET = Path(__file__).parent / "templates" / "diagram.css"  # it has the colours of each kind of box


@dataclass
class Box:
    """A module: its name and parameter count in the first line, details below."""

    name: str
    kind: str
    count: str = ""
    formula: str = ""
    lines: Sequence[str] = ()
    masks: Sequence[str] = ()  # thumbnails of attention masks: "causal", "full", "backward"

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
                allowed = {"causal": column <= row, "backward": column >= row}.get(kind, True)
                state = "allowed" if allowed else "masked"
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
        """The SVG: a part of a page that has the style sheet, or a file of its own."""
        edge = 14
        width, height = self.right - self.left + 2 * edge, self.bottom - self.top + 2 * edge
        view = f"{self.left - edge:g} {self.top - edge:g} {width:g} {height:g}"
        name = escape(label, {chr(34): "&quot;"})
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img" aria-label="{name}"'
        if page:
            head += f' class="diagram" style="max-width: {width:g}px; min-width: {0.72 * width:g}px">'
        else:
            head += f' class="diagram file" width="{width:g}" height="{height:g}">'
            head += f"<style>{STYLE_SHEET.read_text(encoding='utf-8')}</style>"
        return f"{head}{''.join(self.parts)}</svg>"
