"""Draws a matrix of values from 0 to 1 as an SVG heatmap with labelled rows and columns."""

from collections.abc import Callable, Sequence
from html import escape

CELL, GAP, LETTER, MARGIN = 26, 8, 7.6, 16  # pixels; LETTER is the approximate width of a letter
MAX_LABEL = 18  # letters of a row or column label
# all rules are scoped to the picture, so that it can be part of a page
STYLE = """.squares text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.squares .said { font-size: 11px; text-anchor: middle; pointer-events: none }
.squares .paper { fill: #fdfcfa } .squares .cell { fill: #0072b2 }
.squares .grid { fill: none; stroke: #8a8f98; stroke-opacity: .35; pointer-events: none }
@media screen and (prefers-color-scheme: dark) {
.squares text { fill: #e6e8eb } .squares .paper { fill: #15181d } .squares .cell { fill: #5cb8ec } }"""


def draw_heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    title: str,
    tooltip: Callable[[int, int], str],
    cell_text: Callable[[int, int], str] | None = None,
) -> str:
    """A standalone SVG. `tooltip` and `cell_text` give the texts of the cell at (row, column)."""
    rows, columns = [shorten_word(word) for word in rows], [shorten_word(word) for word in columns]
    left = MARGIN + GAP + LETTER * max(map(len, rows))
    top = MARGIN + GAP + LETTER * max(map(len, columns))
    width, height = left + CELL * len(columns) + MARGIN, top + CELL * len(rows) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="squares" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
    ]
    for column, word in enumerate(columns):
        x, y = left + CELL * (column + 0.68), top - GAP
        parts.append(f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)">{escape(word)}</text>')
    for row, word in enumerate(rows):
        y = top + CELL * row
        parts.append(f'<text x="{left - GAP:.1f}" y="{y + 0.68 * CELL:.1f}" text-anchor="end">{escape(word)}</text>')
        for column in range(len(columns)):
            x = left + CELL * column
            box = f'x="{x:.1f}" y="{y:.1f}" width="{CELL}" height="{CELL}"'
            hint = f"<title>{escape(tooltip(row, column))}</title>"
            parts.append(f'<rect class="cell" {box} fill-opacity="{values[row][column]:.3f}">{hint}</rect>')
            parts.append(f'<rect class="grid" {box}/>')
            if cell_text is not None:
                centre = f'x="{x + CELL / 2:.1f}" y="{y + 0.65 * CELL:.1f}"'
                parts.append(f'<text class="said" {centre}>{escape(cell_text(row, column))}</text>')
    return "\n".join([*parts, "</svg>\n"])


def shorten_word(word: str) -> str:
    return word if len(word) <= MAX_LABEL else f"{word[: MAX_LABEL - 1]}…"
