"""The base of what the Python API returns: values with JSON, data frame and notebook forms."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeVar, overload

from headstock.errors import UserError
from headstock.io import finite

if TYPE_CHECKING:
    import pandas

MAX_ROWS = 60  # of a table in a notebook
# colours are inherited, so a table suits a light and a dark notebook
TABLE_STYLE = (
    "<style>.headstock-table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".headstock-table th,.headstock-table td{padding:.25em .8em;text-align:left;vertical-align:top;"
    "border-top:1px solid color-mix(in srgb,currentColor 20%,transparent);color:inherit;background:none}"
    ".headstock-table thead th{border-top:0}.headstock-table .n{text-align:right}"
    ".headstock-table bdi{white-space:pre-wrap;overflow-wrap:anywhere}</style>"
)


class Tabular(Protocol):
    """What a `ResultList` may hold: a result, or a list of them."""

    def to_dict(self) -> Any: ...
    def _rows(self) -> list[dict[str, Any]]: ...


T = TypeVar("T", bound=Tabular)


class Result(Mapping[str, Any]):
    """A result of the API. Subclasses are frozen dataclasses.

    A result is also a mapping: `result["loss"]` is a value of `result.to_dict()`.
    """

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it. A field that is None by default is left out while it is None."""
        return {
            field.name: json_value(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if not (field.default is None and getattr(self, field.name) is None)
        }

    def to_frame(self) -> "pandas.DataFrame":
        """The result as a pandas DataFrame."""
        return make_frame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of the data frame and of the table in a notebook."""
        return [self.to_dict()]

    def _repr_html_(self) -> str:
        rows = self._rows()
        if len(rows) == 1:  # a table with one row is easier to read on its side
            return html_table([{"": name, "value": value} for name, value in rows[0].items()])
        return html_table(rows)

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}


class ResultList(list[T]):
    """A list of results.

    `index_name` names the column that numbers the items in a data frame, if any. `inputs` are the values that each
    item is a result of, by column: they precede the item's own in the data frame. `index` is that of the pandas frame
    from which they came.
    """

    def __init__(
        self,
        items: Iterable[T] = (),
        *,
        index_name: str | None = None,
        inputs: Sequence[Mapping[str, Any]] | None = None,
        index: Any = None,
    ):
        super().__init__(items)
        self.index_name, self.inputs, self.index_labels = index_name, inputs, index

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "ResultList[T]": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "T | ResultList[T]":
        if isinstance(index, slice):
            inputs = None if self.inputs is None else self.inputs[index]
            labels = None if self.index_labels is None else self.index_labels[index]
            items = super().__getitem__(index)
            return ResultList(items, index_name=self.index_name, inputs=inputs, index=labels)
        return super().__getitem__(index)

    def to_dict(self) -> list[Any]:
        """The items as JSON has them."""
        return [item.to_dict() for item in self]

    def to_frame(self) -> "pandas.DataFrame":
        """All items in one pandas DataFrame, with the index of the frame that they are results of."""
        frame = make_frame(self._rows())
        if self.index_labels is not None and len(self.index_labels) == len(frame):
            frame.index = self.index_labels
        return frame

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for number, item in enumerate(self):
            given = {} if self.index_name is None else {self.index_name: number}
            given |= {} if self.inputs is None else self.inputs[number]
            for row in item._rows():
                rows.append({name: value for name, value in given.items() if name not in row} | row)
        return rows

    def _repr_html_(self) -> str:
        return html_table(self._rows())


def json_value(value: Any) -> Any:
    """A value as JSON has it: paths are text, NaN and infinity None."""
    if isinstance(value, Result | ResultList):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy
        return json_value(value.tolist())
    return finite(value)


def make_frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError:
        raise UserError("to_frame() needs pandas: pip install pandas") from None
    return pandas.DataFrame(rows)


def html_table(rows: list[dict[str, Any]]) -> str:
    """Rows as an HTML table; everything in them is escaped."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(html_cell(row.get(name)) for name in columns)}</tr>" for row in rows[:MAX_ROWS])
    more = f"<p>{len(rows) - MAX_ROWS:,} more rows</p>" if len(rows) > MAX_ROWS else ""
    table = f'<table class="headstock-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f"{TABLE_STYLE}{table}{more}"


def html_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="n">{value:,}</td>' if isinstance(value, int) else f'<td class="n">{value:.4g}</td>'
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"<td><bdi>{escape(text)}</bdi></td>"
