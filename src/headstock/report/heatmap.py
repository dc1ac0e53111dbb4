"""SVG heatmaps of values from 0 to 1 with labelled rows and columns, such as the alignment of a translation."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from headstock.errors import UserError
from headstock.inference.translate import Alignment
from headstock.io import write_text
from headstock.report.format import shorten

CELL, GAP, LETTER, MARGIN = 26, 8, 7.6, 16  # pixels; LETTER is the approximate width of a letter
MAX_LABEL = 18  # letters of a row or column label
# all rules are scoped to the picture, so that it can be part of a page
STYLE = """.squares text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.squares .said { font-size: 11px; text-anchor: middle; pointer-events: none }
.squares .paper { fill: #fdfcfa } .squares .cell { fill: #0072b2 }
.squares .grid { fill: none; stroke: #8a8f98; stroke-opacity: .35; pointer-events: none }
@media screen and (prefers-color-scheme: dark) {
.squares text { fill: #e6e8eb } .squares .paper { fill: #15181d } .squares .cell { fill: #5cb8ec } }"""
ALIGNMENT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>body {{ margin: 2rem; font-family: system-ui, sans-serif; background: #fdfcfa; color: #1c2128 }}
svg {{ max-width: 100%; height: auto }}
@media (prefers-color-scheme: dark) {{ body {{ background: #15181d; color: #e6e8eb }} }}</style></head>
<body><h1><bdi>{title}</bdi></h1>
<p>Rows: the translation. Columns: the source. Each cell is a cross-attention weight, averaged over the heads of the
decoder's last layer; rows sum to one.</p>
{picture}</body></html>
"""


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
    rows, columns = ([shorten(word, MAX_LABEL) for word in words] for words in (rows, columns))
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


def draw_alignment(path: Path, alignment: Alignment) -> None:
    """Write the cross-attention weights of a translation as a page (.html) or as a picture (.svg)."""
    if path.suffix not in (".html", ".svg"):
        raise UserError(f"--alignment {path}: must end in .svg or .html")
    picture = alignment_svg(alignment)
    page = ALIGNMENT_PAGE.format(title=escape(alignment.text), picture=picture)
    write_text(path, picture if path.suffix == ".svg" else page)


def alignment_svg(alignment: Alignment) -> str:
    def tooltip(row: int, column: int) -> str:
        weight = alignment.weights[row, column]
        return f"{alignment.target[row]} \N{RIGHTWARDS ARROW} {alignment.source[column]}: {weight:.1%}"

    rows, columns, weights = alignment.target, alignment.source, alignment.weights.tolist()
    return draw_heatmap(rows, columns, weights, title=alignment.text, tooltip=tooltip)
