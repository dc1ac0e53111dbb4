"""Checks the texts and rows that a program hands to a loaded run, and names the first that cannot be used."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headstock.errors import UserError
from headstock.tasks.labelled import LabelledTask


def iter_texts(texts: str | Iterable[Any], name: str = "texts") -> Iterator[str]:
    """The texts one by one: a single str is one text, else any iterable of str (list, Series, array, generator)."""
    for index, text in enumerate([texts] if isinstance(texts, str) else iterable(texts, name)):
        if not isinstance(text, str):
            raise UserError(f"{name}[{index}] is {describe_value(text)}, wanted a text (str)")
        yield str(text)  # a plain str also where numpy has its own


def list_texts(texts: str | Iterable[Any], name: str = "texts") -> list[str]:
    return list(iter_texts(texts, name))


def iter_rows(rows: str | Iterable[Any], task: LabelledTask) -> Iterator[Any]:
    """The rows one by one, each of the form that the task reads."""
    for index, row in enumerate([rows] if isinstance(rows, str) else iterable(rows, "rows")):
        if not task.is_row(row):
            raise UserError(f"rows[{index}] is {describe_value(row)}, wanted {task.row_form}")
        yield row


def iterable(values: Any, name: str) -> Iterable[Any]:
    """Refuse what would be iterated over by its column names, keys or bytes."""
    if hasattr(values, "columns") and hasattr(values, "shape"):  # pandas, polars and those made alike
        columns = [str(column) for column in values.columns]
        example = "text" if "text" in columns or not columns else columns[0]
        have = ", ".join(map(repr, columns[:8])) + (", ..." if len(columns) > 8 else "")
        raise UserError(f"{name}: a DataFrame came; pass one of its columns, such as df[{example!r}] (columns: {have})")
    if isinstance(values, Mapping | bytes | bytearray) or not isinstance(values, Iterable):
        raise UserError(f"{name}: {describe_value(values)} came, wanted a text or an iterable of texts")
    return values


def describe_value(value: Any) -> str:
    """`None`, `nan (float)`, `3 (int)`, `a list of 4`: what came in place of a text."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, list | tuple | Mapping):
        return f"a {kind} of {len(value)}"
    shown = repr(value)
    return f"{shown} ({kind})" if len(shown) <= 40 else f"a {kind}"
