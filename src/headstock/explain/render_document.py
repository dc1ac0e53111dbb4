"""Renders a document in the terminal (rich), as an HTML page, or as its picture."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.symbols import in_html, in_text, power_of_ten
from headstock.report.format import NONE, minus, shorten
from headstock.report.heatmap import draw_heatmap
from headstock.report.highlighted_text import make_passage
from headstock.report.render import render, standalone_svg, write_page_or_svg
from headstock.report.theme import NARROW, WIDE, Gallery, make_figure

if TYPE_CHECKING:
    from markupsafe import Markup

PER_LINE = 8  # numbers in a line of a terminal
STRIP_LINES = 2  # lines of a long vector in a terminal
STRIP = 24  # numbers of a long vector on a page
MIN_WIDTH = 16  # of a column whose text wraps in a terminal
MATRIX = 24  # tokens up to which a terminal prints a token heatmap
UNITS = ("B", "kB", "MB", "GB", "TB")


# Cells


def bytes_text(value: float) -> str:
    size, unit = float(value), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"


def flops_text(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g} {unit}FLOP"
    return f"{value:.4g} FLOP"


def number_html(value: float) -> "Markup":
    """`0.0123`, or `3.7 × 10` to some power."""
    from markupsafe import Markup

    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return Markup(minus(f"{value:.4g}"))
    mantissa, power = f"{value:.1e}".split("e")
    return Markup(f"{minus(mantissa)}&thinsp;×&thinsp;10<sup>{minus(str(int(power)))}</sup>")


def formula_text(value: Any) -> str:
    return in_text(value.expression, *value.by) if isinstance(value, doc.Formula) else str(value)


def formula_html(value: Any) -> Any:
    return in_html(value.expression, *value.by) if isinstance(value, doc.Formula) else str(value)


def code_html(value: str) -> "Markup":
    from markupsafe import Markup

    return Markup("<code>{}</code>").format(value) if value else Markup("")


# By format: how a terminal writes a cell and, where it differs, how a page does.
FORMATS: dict[str, tuple[Callable[[Any], str], Callable[[Any], Any] | None]] = {
    "text": (str, None),
    "code": (str, code_html),
    "formula": (formula_text, formula_html),
    "count": (lambda value: f"{value:,}", None),
    "number": (lambda value: f"{value:.3g}", number_html),
    "error": (lambda value: f"{value:.1e}", number_html),
    "decimal": (lambda value: f"{value:,.2f}", None),
    "cosine": (lambda value: f"{value:.3f}", None),
    "loss": (lambda value: f"{value:.4f}", None),
    "signed": (lambda value: f"{value:+.2f}", None),
    "percent": (lambda value: f"{100 * value:.1f}%", None),
    "share": (lambda value: f"{100 * value:.0f}%", None),
    "bytes": (bytes_text, None),
    "flops": (flops_text, None),
}
LEFT_ALIGNED = ("text", "code", "formula")


def cell_text(value: Any, form: str) -> str:
    return "–" if value is None else FORMATS[form][0](value)


def cell_html(value: Any, form: str) -> Any:
    if value is None:
        return NONE
    text, html = FORMATS[form]
    return html(value) if html else minus(text(value)) if form not in LEFT_ALIGNED else text(value)


def any_html(value: Any) -> Any:
    return formula_html(value) if isinstance(value, doc.Formula) else value


# Terminal


def terminal(document: doc.ExplainDocument) -> Iterator[Any]:
    """Lines of text and rich tables, in the order in which they are printed."""
    yield document.title
    if document.summary:
        yield document.summary
    for block in document.blocks("terminal"):
        yield from terminal_block(block)


def terminal_block(block: doc.DocumentBlock) -> Iterator[Any]:
    match block:
        case doc.Text():
            yield block.text
        case doc.Bullets():
            yield from block.items
        case doc.Checks():
            yield from (f"{'yes' if check.holds else 'NO'}: {check.claim} ({check.measured})" for check in block.checks)
        case doc.KeyFigures():
            yield ", ".join(f"{label} {formula_text(value)}" for label, value, _ in block.tiles)
        case doc.Table():
            rows = block.styled_rows()
            cells = [list(map(cell_text, row.cells, block.columns.values())) for row in rows]
            for row, texts in zip(rows, cells, strict=True):
                texts[0] = "  " * row.level + texts[0]
            yield ""
            yield block.title
            yield rich_table(block.columns, cells, [row.style for row in rows])
        case doc.HeatTable():
            columns = {"": "text"} | dict.fromkeys(block.columns, "count")
            cells = [[name, *(f"{cell.text} {cell.detail}".strip() for cell in row)] for name, row in block.rows]
            yield ""
            yield f"{block.title}: {block.caption}" if block.only is None and block.caption else block.title
            yield rich_table(columns, cells, [""] * len(cells))
        case doc.TokenHeatmap():
            if block.value is not None and max(len(block.rows), len(block.columns)) <= MATRIX:
                widest = max(map(len, block.rows))
                for number, name in enumerate(block.rows):
                    values = (block.value(number, column).replace("−∞", "-inf") for column in range(len(block.columns)))
                    yield f"{name:>{widest}}  " + " ".join(f"{value:>4}" for value in values)
        case doc.NumberStrip():
            yield ""
            yield from strip_lines(block)
        case doc.Grid():
            for inner in block.blocks:
                if inner.only != "page":
                    yield from terminal_block(inner)


def rich_table(columns: Mapping[str, str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> Any:
    """A table that fits the terminal. Numbers are never cut; text and formulas wrap where there is no room."""
    from shutil import get_terminal_size

    from rich.markup import escape
    from rich.table import Table

    room = get_terminal_size().columns
    texts = list(zip(columns, *rows, strict=True))
    widths = [max(map(len, column)) for column in texts]
    if sum(widths) + 2 * len(widths) > room:  # let headers wrap
        widths = [max(map(len, (*head.split(), *cells, ""))) for head, *cells in texts]
    gap = 2 if sum(widths) + 2 * len(widths) <= room else 1
    excess = sum(widths) + gap * len(widths) - room
    for number, form in enumerate(columns.values()):
        if number and form in LEFT_ALIGNED and excess > 0:
            narrower = min(widths[number], max(MIN_WIDTH, widths[number] - excess))
            excess -= widths[number] - narrower
            widths[number] = narrower
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for (name, form), width in zip(columns.items(), widths, strict=True):
        justify: Any = "left" if form in LEFT_ALIGNED else "right"
        table.add_column(escape(name), justify=justify, width=width, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*map(escape, row), style={"tensor": "dim", "top": "bold"}.get(style, ""))
    return table


def strip_lines(block: doc.NumberStrip) -> Iterator[str]:
    yield f"{block.name}: {block.formula}" + (f"  ({block.note})" if block.note else "")
    size = len(block.lines[0][1])
    limit = size if block.columns else STRIP_LINES * PER_LINE
    scaled = [(name, *rescaled(name, values)) for name, values in block.lines]
    for start in range(0, min(size, limit), PER_LINE):
        if block.columns:
            yield " " * 10 + "".join(f"{shorten(name, 8):>9}" for name in block.columns[start : start + PER_LINE])
        for name, values, power in scaled:
            numbers = "".join(f"{strip_number(value):>9}" for value in values[start : start + PER_LINE])
            yield f"  {name:<8}{numbers}" + (f"  × {power_of_ten(-power)}" if power else "")
    if size > limit:
        yield f"  … {size - limit} more in --json"


def rescaled(name: str, values: Sequence[float]) -> tuple[list[float], int]:
    """Values times a power of ten; small gradients are scaled so that the largest has a digit before its point."""
    largest = max(map(abs, values), default=0.0)
    power = 0 if name == "forward" or largest >= 0.1 or not largest else -math.floor(math.log10(largest))
    return [10.0**power * value for value in values], power


def strip_number(value: float) -> str:
    """Three decimals, one for large numbers; never a negative zero."""
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    return f"{value:.{3 if abs(value) < 100 else 1}f}".replace("-0.000", "0.000")


def strip_cells(values: Sequence[float]) -> list[tuple[str, str, float]]:
    """(text, sign, strength of its colour) of each number."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    return [
        (
            minus(strip_number(value)),
            "minus" if value < 0 else "plus",
            min(1.0, abs(value) / largest) if math.isfinite(value) else 0.0,
        )
        for value in values
    ]


# Page


def page(document: doc.ExplainDocument) -> str:
    """A page that needs no other file."""
    from markupsafe import Markup

    gallery = Gallery()

    def chart(block: doc.Chart) -> dict[str, Any]:
        def draw(wide: bool) -> Any:
            width = (block.width or WIDE) if wide else NARROW
            height = block.height if wide else block.narrow_height or block.height + 0.3
            return make_figure(block.paint, width, height * width)

        if block.width is not None:
            return {"wide": gallery.embed(block.name, draw(True), block.label), "narrow": None}
        return gallery.embed_both((block.name, f"{block.name}-narrow"), draw, block.label)

    def table_rows(block: doc.Table, start: int, stop: int | None) -> list[tuple[list[tuple[str, Any]], doc.Row]]:
        forms = block.columns.values()
        return [
            ([(form, cell_html(value, form)) for form, value in zip(forms, row.cells, strict=True)], row)
            for row in block.styled_rows()[start:stop]
        ]

    def strip(block: doc.NumberStrip) -> dict[str, Any]:
        size = len(block.lines[0][1])
        limit = size if block.columns else STRIP
        scaled = [(name, *rescaled(name, values)) for name, values in block.lines]
        names = [f"{name} × {power_of_ten(-power)}" if power else name for name, _, power in scaled]
        columns = list(zip(*(strip_cells(values[:limit]) for _, values, _ in scaled), strict=True))
        return {"names": names, "columns": columns, "more": max(0, size - limit)}

    return render(
        "headstock.explain",
        "document.html",
        document=document,
        chart=chart,
        table_rows=table_rows,
        strip=strip,
        heatmap=lambda block: Markup(heatmap_svg(block)),
        svg=lambda block: Markup(block.draw()),
        passage=make_passage,
        value=any_html,
        is_numeric=lambda form: form not in LEFT_ALIGNED,
    )


def heatmap_svg(block: doc.TokenHeatmap) -> str:
    size = max(len(block.rows), len(block.columns))
    if size > block.max_drawn:
        raise UserError(f"--out: {size} tokens are too many to draw, at most {block.max_drawn}; see --json")
    value = block.value if size <= block.max_written else None
    return draw_heatmap(block.rows, block.columns, block.shares, title=block.title, tooltip=block.hint, cell_text=value)


def chart_svg(name: str, paint: Callable[[Any], None], label: str, width: float, height: float) -> str:
    """A chart as an SVG file of its own."""
    return standalone_svg(str(Gallery().embed(name, make_figure(paint, width, height), label)))


def picture_of(chart: doc.Chart) -> Callable[[], str]:
    """The picture of a document that has one chart to show."""
    width = chart.width or WIDE
    return lambda: chart_svg(chart.name, chart.paint, chart.label, width, chart.height * width)


def write_document(document: doc.ExplainDocument, path: Path) -> None:
    """Write the page (.html) or its picture (.svg)."""
    write_page_or_svg(path, lambda: page(document), document.picture)


# Charts with one or several panels


Panel = Callable[[Any], None]  # draws on matplotlib axes


def with_legend(panel: Panel, *, columns: int = 1) -> Callable[[Any], None]:
    """One panel with its legend below, where it covers nothing."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        panel(axes)
        if axes.get_legend_handles_labels()[1]:
            narrow = figure.get_figwidth() * 72 < (NARROW + WIDE) / 2
            figure.legend(loc="outside lower left", ncols=1 if narrow else columns, fontsize=10)

    return paint


def side_by_side(panels: Sequence[Panel], legend: str = "best") -> Callable[[Any], None]:
    def paint(figure: Any) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axes)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=8.5, loc=legend)

    return paint
