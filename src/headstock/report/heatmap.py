"""Draws a table of shares as squares with words beside and above them: the stronger a square, the larger its share."""

from collections.abc import Callable, Sequence
from html import escape

SQUARE, GAP, LETTER, MARGIN = 26, 8, 7.6, 16  # pixels; a letter's width is about so many
LONGEST = 18  # letters of a word that are shown beside the squares
# every rule is the picture's own, so that it may stand inside a page
STYLE = """.squares text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.squares .said { font-size: 11px; text-anchor: middle; pointer-events: none }
.squares .paper { fill: #fdfcfa } .squares .cell { fill: #0072b2 }
.squares .grid { fill: none; stroke: #8a8f98; stroke-opacity: .35; pointer-events: none }
@media screen and (prefers-color-scheme: dark) {
.squares text { fill: #e6e8eb } .squares .paper { fill: #15181d } .squares .cell { fill: #5cb8ec } }"""


def draw_heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    shares: Sequence[Sequence[float]],
    *,
    title: str,
    tooltip: Callable[[int, int], str],
    cell_text: Callable[[int, int], str] | None = None,
) -> str:
    """An SVG by itself; `told` is what a square says when it is pointed at, `written` what stands in it."""
    rows, columns = [shorten_word(word) for word in rows], [shorten_word(word) for word in columns]
    left = MARGIN + GAP + LETTER * max(map(len, rows))
    top = MARGIN + GAP + LETTER * max(map(len, columns))
    width, height = left + SQUARE * len(columns) + MARGIN, top + SQUARE * len(rows) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="squares" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
    ]
    for column, word in enumerate(columns):
        x, y = left + SQUARE * (column + 0.68), top - GAP
        parts.append(f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)">{escape(word)}</text>')
    for row, word in enumerate(rows):
        y = top + SQUARE * row
        parts.append(f'<text x="{left - GAP:.1f}" y="{y + 0.68 * SQUARE:.1f}" text-anchor="end">{escape(word)}</text>')
        for column in range(len(columns)):
            x = left + SQUARE * column
            place = f'x="{x:.1f}" y="{y:.1f}" width="{SQUARE}" height="{SQUARE}"'
            said = f"<title>{escape(tooltip(row, column))}</title>"
            parts.append(f'<rect class="cell" {place} fill-opacity="{shares[row][column]:.3f}">{said}</rect>')
            parts.append(f'<rect class="grid" {place}/>')
            if cell_text is not None:
                middle = f'x="{x + SQUARE / 2:.1f}" y="{y + 0.65 * SQUARE:.1f}"'
                parts.append(f'<text class="said" {middle}>{escape(cell_text(row, column))}</text>')
    return "\n".join([*parts, "</svg>\n"])


def shorten_word(word: str) -> str:
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"
