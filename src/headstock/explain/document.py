"""The document model of an explanation: text, tables and figures, described once for terminal, page and JSON.

A subject (parameters, attention, gradients, ...) computes facts and describes them as an `ExplainDocument`;
`render_document.py` prints it, writes it as a page or picture, and `ExplainDocument.json` is what --json prints.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DocumentBlock:
    """A part of a document; `only` restricts it to one medium."""

    only: Literal["terminal", "page"] | None = None

    @property
    def kind(self) -> str:
        """How the template of a page knows it."""
        return type(self).__name__


@dataclass(frozen=True)
class Text(DocumentBlock):
    """A paragraph; `markupsafe.Markup` passes through to the page unescaped."""

    text: str
    style: Literal["plain", "soft", "formula", "callout", "quote"] = "plain"


@dataclass(frozen=True)
class Bullets(DocumentBlock):
    items: Sequence[str]
    style: Literal["plain-list", "verdicts many"] = "plain-list"


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and the measurement that decides."""

    claim: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class Checks(DocumentBlock):
    checks: Sequence[Check]


@dataclass(frozen=True)
class KeyFigures(DocumentBlock):
    """A few headline values: (label, value, note)."""

    tiles: Sequence[tuple[str, Any, Any]]


@dataclass(frozen=True)
class Formula:
    """A sympy expression as a table cell, grouped by some of its symbols."""

    expression: Any
    by: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Row:
    """A table row with an indentation level and a CSS class; a plain sequence of cells is a row without them."""

    cells: Sequence[Any]
    level: int = 0
    style: str = ""


@dataclass(frozen=True)
class Table(DocumentBlock):
    title: str
    columns: Mapping[str, str]  # name -> format, a key of render_document.FORMATS
    rows: Sequence[Row | Sequence[Any]]
    caption: str = ""
    fold_after: int | None = None  # on a page, rows beyond this are folded away
    heading: bool = True  # whether a page shows the title as a heading; a terminal always does

    @classmethod
    def from_records(
        cls,
        title: str,
        records: Iterable[Any],
        columns: Mapping[str, tuple[str, str | Callable[[Any], Any]]],
        caption: str = "",
        **options: Any,
    ) -> "Table":
        """A row per record; a column has a format, and an attribute or a function of a record."""

        def cell(record: Any, source: str | Callable[[Any], Any]) -> Any:
            return getattr(record, source) if isinstance(source, str) else source(record)

        rows = [[cell(record, source) for _, source in columns.values()] for record in records]
        return cls(title, {name: form for name, (form, _) in columns.items()}, rows, caption, **options)

    def styled_rows(self) -> list[Row]:
        return [row if isinstance(row, Row) else Row(row) for row in self.rows]


@dataclass(frozen=True)
class HeatCell:
    text: str
    share: float  # 0 to 1, the strength of its colour
    detail: str = ""
    hint: str = ""  # shown when the pointer rests on the cell


@dataclass(frozen=True)
class HeatTable(DocumentBlock):
    """A table whose cells are shaded by their value."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell]]]
    caption: str = ""
    colour: Literal["pretrained", "scratch"] = "pretrained"


@dataclass(frozen=True)
class TokenHeatmap(DocumentBlock):
    """A square for every pair of tokens."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    shares: Sequence[Sequence[float]]
    hint: Callable[[int, int], str]
    value: Callable[[int, int], str] | None = None  # written into the square, and printed in a terminal
    caption: str = ""
    max_written: int = 20  # tokens up to which a square has room for its value
    max_drawn: int = 64  # tokens up to which squares are large enough


@dataclass(frozen=True)
class NumberStrip(DocumentBlock):
    """A named vector: its formula, and one line of values per direction (forward, backward)."""

    name: str
    formula: str
    lines: Sequence[tuple[str, Sequence[float]]]
    columns: Sequence[str] = ()  # what each number belongs to
    note: str = ""
    own_column: int | None = None  # the column that is emphasized
    remark: str = ""


@dataclass(frozen=True)
class WeightedText(DocumentBlock):
    """A text with its words marked by signed weights."""

    title: str
    text: str
    weights: Sequence[tuple[str, float]]
    caption: str = ""
    only: Literal["terminal", "page"] | None = field(default="page", kw_only=True)


@dataclass(frozen=True)
class Chart(DocumentBlock):
    """A matplotlib figure, drawn only where it is shown: in a wide and in a narrow version."""

    name: str
    label: str  # what it shows, for screen readers
    paint: Callable[[Any], None]
    caption: str = ""
    height: float = 0.62  # as a share of its width
    narrow_height: float | None = None
    width: int | None = None  # pixels; one version of this width instead of two
    only: Literal["terminal", "page"] | None = field(default="page", kw_only=True)


@dataclass(frozen=True)
class Svg(DocumentBlock):
    """A drawing that is SVG already."""

    draw: Callable[[], str]
    caption: str = ""
    only: Literal["terminal", "page"] | None = field(default="page", kw_only=True)


@dataclass(frozen=True)
class Grid(DocumentBlock):
    """Blocks beside each other where a page is wide enough."""

    blocks: Sequence[DocumentBlock]
    broad: bool = False


@dataclass(frozen=True)
class Html(DocumentBlock):
    """A part of a page with a template of its own, such as the interactive attention maps."""

    template: str
    values: dict[str, Any]
    only: Literal["terminal", "page"] | None = field(default="page", kw_only=True)


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[DocumentBlock]
    anchor: str = ""
    style: str = ""


@dataclass(frozen=True)
class ExplainDocument:
    subject: str  # the line above the title
    title: str
    summary: str
    sections: Sequence[Section]
    json: dict[str, Any]
    picture: Callable[[], str]  # the SVG that `--out FILE.svg` writes
    page_title: str = ""
    style_sheet: str = ""  # a file among the templates
    script: str = ""  # likewise

    def blocks(self, medium: Literal["terminal", "page"]) -> list[DocumentBlock]:
        return [block for section in self.sections for block in section.blocks if block.only in (None, medium)]


def notes(lines: Sequence[str], *, text: str = "") -> list[DocumentBlock]:
    """Remarks on how an input was read; on a page after the `text` itself."""
    quote = [Text(text, "quote", only="page")] if text else []
    return [*quote, *(Text(sentence(line), "soft") for line in lines)]


def sentence(text: str) -> str:
    """Capitalized, with a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
