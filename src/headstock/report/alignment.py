"""Draws the cross-attention alignment of a translation as a heatmap."""

from html import escape
from pathlib import Path

from headstock.errors import UserError
from headstock.inference.translate import Alignment
from headstock.io import write_text
from headstock.report.heatmap import draw_heatmap

PAGE = """<!doctype html>
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


def draw_alignment(path: Path, alignment: Alignment) -> None:
    """Write the heatmap as a page (.html) or as a picture (.svg)."""
    if path.suffix not in (".html", ".svg"):
        raise UserError(f"--alignment {path}: must end in .svg or .html")
    picture = alignment_svg(alignment)
    write_text(path, picture if path.suffix == ".svg" else PAGE.format(title=escape(alignment.text), picture=picture))


def alignment_svg(alignment: Alignment) -> str:
    def tooltip(row: int, column: int) -> str:
        weight = alignment.weights[row, column]
        return f"{alignment.target[row]} \N{RIGHTWARDS ARROW} {alignment.source[column]}: {weight:.1%}"

    rows, columns, weights = alignment.target, alignment.source, alignment.weights.tolist()
    return draw_heatmap(rows, columns, weights, title=alignment.text, tooltip=tooltip)
