"""Validates texts and rows passed to a pipeline; errors name the first invalid one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headstock.errors import UserError
from headstock.tasks.labelled import LabelledTask


def iter_texts(texts: str | Iterable[Any], name: str = "texts") -> Iterator[str]:
    """Each text: of a single str, or of any iterable of str (list, Series, array, generator)."""
    for index, text in enumerate([texts] if isinstance(texts, str) else check_iterable(texts, name)):
        if not isinstance(text, str):
            raise UserError(f"{name}[{index}] is {describe_value(text)}, expected a text (str)")
        yield str(text)  # converts numpy.str_


def list_texts(texts: str | Iterable[Any], name: str = "texts") -> list[str]:
    return list(iter_texts(texts, name))


def iter_rows(rows: str | Iterable[Any], task: LabelledTask) -> Iterator[Any]:
    """Each row, in the form that the task reads."""
    for index, row in enumerate([rows] if isinstance(rows, str) else check_iterable(rows, "rows")):
        if not task.is_row(row):
            raise UserError(f"rows[{index}] is {describe_value(row)}, expected {task.row_form}")
        yield row


def check_iterable(values: Any, name: str) -> Iterable[Any]:
    """Refuse values whose iteration gives column names, keys or bytes."""
    if hasattr(values, "columns") and hasattr(values, "shape"):  # pandas, polars and similar
        columns = [str(column) for column in values.columns]
        example = "text" if "text" in columns or not columns else columns[0]
        listed = ", ".join(map(repr, columns[:8])) + (", ..." if len(columns) > 8 else "")
        raise UserError(f"{name}: is a DataFrame; pass one column, such as df[{example!r}] (columns: {listed})")
    if isinstance(values, Mapping | bytes | bytearray) or not isinstance(values, Iterable):
        raise UserError(f"{name}: is {describe_value(values)}, expected a text or an iterable of texts")
    return values


def describe_value(value: Any) -> str:
    """A value for an error message: `None`, `nan (float)`, `a list of 4`."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, list | tuple | Mapping):
        return f"a {kind} of {len(value)}"
    shown = repr(value)
    return f"{shown} ({kind})" if len(shown) <= 40 else f"a {kind}"
