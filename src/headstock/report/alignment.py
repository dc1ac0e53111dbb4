"""Draws what the words of a translation looked at: a square for every pair of words, the stronger the more."""

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
    def told(row: int, column: int) -> str:
        return f"{found.target[row]} \u2192 {found.source[column]}: {found.weights[row, column]:.1%}"

    return draw_heatmap(found.target, found.source, found.weights.tolist(), title=found.text, tooltip=told)
