"""Draws what the words of a translation looked at: a square for every pair of words, the stronger the more."""

from html import escape
from pathlib import Path

from headstock.errors import UserError
from headstock.files import write_text
from headstock.train.translation import Alignment

SQUARE, GAP, LETTER, MARGIN = 26, 8, 7.6, 16  # pixels; a letter's width is about so many
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1c2128 }
.paper { fill: #fdfcfa } .cell { fill: #0072b2 } .grid { fill: none; stroke: #8a8f98; stroke-opacity: .35 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8eb } .paper { fill: #15181d } .cell { fill: #5cb8ec } }"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>body {{ margin: 2rem; font-family: system-ui, sans-serif; background: #fdfcfa; color: #1c2128 }}
svg {{ max-width: 100%; height: auto }}
@media (prefers-color-scheme: dark) {{ body {{ background: #15181d; color: #e6e8eb }} }}</style></head>
<body><h1><bdi>{title}</bdi></h1>
<p>Down: the translation. Across: the source. A square is as strong as its word looked at the word above it,
in the mean over the heads of the decoder's last layer; each row sums to one.</p>
{picture}</body></html>
"""


def draw_alignment(path: Path, found: Alignment) -> None:
    """Write the picture as a page (.html) or by itself (.svg)."""
    if path.suffix not in (".html", ".svg"):
        raise UserError(f"--alignment {path}: must end in .svg or .html")
    picture = as_svg(found)
    write_text(path, picture if path.suffix == ".svg" else PAGE.format(title=escape(found.text), picture=picture))


def as_svg(found: Alignment) -> str:
    left = MARGIN + GAP + LETTER * max(map(len, found.target))
    top = MARGIN + GAP + LETTER * max(map(len, found.source))
    across, down = SQUARE * len(found.source), SQUARE * len(found.target)
    width, height = left + across + MARGIN, top + down + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(found.text)}</title><style>{STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
    ]
    for column, word in enumerate(found.source):
        x, y = left + SQUARE * (column + 0.68), top - GAP
        parts.append(f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)">{escape(word)}</text>')
    for row, word in enumerate(found.target):
        y = top + SQUARE * row
        parts.append(f'<text x="{left - GAP:.1f}" y="{y + 0.68 * SQUARE:.1f}" text-anchor="end">{escape(word)}</text>')
        for column, weight in enumerate(found.weights[row].tolist()):
            place = f'x="{left + SQUARE * column:.1f}" y="{y:.1f}" width="{SQUARE}" height="{SQUARE}"'
            told = escape(f"{word} \u2192 {found.source[column]}: {weight:.1%}")
            parts.append(f'<rect class="cell" {place} fill-opacity="{weight:.3f}"><title>{told}</title></rect>')
            parts.append(f'<rect class="grid" {place}/>')
    return "\n".join([*parts, "</svg>\n"])
