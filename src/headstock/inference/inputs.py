"""Validates and reads the inputs of a pipeline: texts, rows and files."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headstock.data import in_memory, tables
from headstock.data.labelled_texts import is_table, stream_texts
from headstock.data.records import LABEL, Records, find_file, parse_columns
from headstock.decoding.batching import tokenizer_threads
from headstock.errors import UserError
from headstock.tasks.labelled import LabelledTask
from headstock.train.prefetch import MAX_CHUNK, growing_chunks, prefetch_map
from headstock.train.settings import LabelledSettings, RunConfig


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
        names = ", ".join(map(repr, columns[:8])) + (", ..." if len(columns) > 8 else "")
        raise UserError(f"{name}: is a DataFrame; pass one column, such as df[{example!r}] (columns: {names})")
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
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 40 else f"a {kind}"


def rows_in_memory(
    data: Any, task: LabelledTask, config: RunConfig, columns: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """The rows of a data frame, a dataset or a list, in the form that the task reads. Of dicts, other keys are ignored.

    `columns` are names of the task's columns in the data; by default they are those of the training data, if it has
    them.
    """
    names = own_columns(config, columns, in_memory.column_names(data))
    inputs = {name: names.get(name, name) for name in task.input_columns}
    if not in_memory.is_table(data):
        for index, row in enumerate(check_iterable(data, "rows")):
            is_table_row = isinstance(row, Mapping) and (columns or not task.is_row(row))
            yield row_from_table(row, inputs, task, index) if is_table_row else row
        return
    for index, row in enumerate(in_memory.iter_rows(data, "rows", list(inputs.values()))):
        yield row_from_table(row, inputs, task, index)


def refuse_file_name(text: str) -> None:
    """Refuse a single str that names a file: it would be read as a text, although elsewhere a str is a path."""
    if len(text) <= in_memory.MAX_PATH and in_memory.is_file_name(text):
        raise UserError(
            f"rows: {text!r} is the name of a file; pass Path({text!r}) for the rows of the file, or [{text!r}] for "
            "this text"
        )


def displayed_inputs(
    rows: list[Any] | Records, task: LabelledTask, names: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The input columns of each row, for a table of predictions; `names` are their names in the data."""
    columns = rows.columns if isinstance(rows, Records) else task.columns_of(rows)
    own = {(names or {}).get(name, name): columns[name] for name in task.input_columns if name in columns}
    return [dict(zip(own, values, strict=True)) for values in zip(*own.values(), strict=True)]


def row_from_table(row: Mapping[str, Any], inputs: Mapping[str, str], task: LabelledTask, index: int) -> Any:
    values = {}
    for name, column in inputs.items():
        if column not in row:
            raise in_memory.no_column(f"rows[{index}]", column, list(row))
        if (value := row[column]) is None or value != value:
            raise UserError(f"rows[{index}]: column {column!r} is {describe_value(value)}, expected a text")
        values[name] = value
    return task.row_from_columns(values)


# Files


def own_columns(config: RunConfig, columns: Mapping[str, str] | None, existing: Collection[str]) -> dict[str, str]:
    """The names of the run's columns in rows that have the columns `existing`: `columns`, otherwise the training's."""
    own = config.data.columns if isinstance(config.data, LabelledSettings) else ()
    names = parse_columns(",".join(own)) if own else {}
    return {name: column for name, column in names.items() if column in existing} | dict(columns or {})


def resolve_columns(
    config: RunConfig, file: str | Path, columns: dict[str, str] | None = None
) -> dict[str, str] | None:
    """The names of the run's columns in a file: `columns`, otherwise the names in the training file.

    The training file's names apply to files of the same kind, and in a table only if it has such a column.
    """
    own = config.data.columns if isinstance(config.data, LabelledSettings) else ()
    if not own or str(file) == "-" or is_table(file) != is_table(config.data.train):
        return columns
    names = parse_columns(",".join(own))
    if is_table(file):
        existing = tables.column_names(find_file(file)) or ()
        names = {name: column for name, column in names.items() if column.isdigit() or column in existing}
    return names | (columns or {}) or None


def read_numbered_rows(
    task: LabelledTask, file: str | Path, *, columns: dict[str, str] | None, skipped: list[int] | None
) -> Iterator[tuple[int, str]] | Records:
    """The rows of a file: texts with their line numbers, or records if a row is more than a text.

    If `skipped` is a list, blank rows are skipped, and the line numbers of blank texts are added to it.
    """
    if task.row_is_text or str(file) == "-":
        inputs = {name: column for name, column in (columns or {}).items() if name != LABEL}
        return stream_texts(file, columns=inputs, skipped=skipped)
    skip_blank = skipped is not None
    return task.read_file(file, config=task.config, columns=columns, strict=False, skip_blank=skip_blank)


# Streams


def prepare_ahead(rows: Iterable[Any] | Records, task: LabelledTask, device: torch.device) -> Iterator[Any]:
    """Chunks of rows as the task prepares them; the next ones are tokenized while the model runs."""
    prepare = partial(task.prepare, labelled=False)
    return prefetch_map(prepare, record_batches(rows, task), threads=tokenizer_threads(device))


def record_batches(rows: Iterable[Any] | Records, task: LabelledTask) -> Iterator[Records]:
    """Rows in chunks of up to a few thousand, within which they are sorted by length."""
    if isinstance(rows, Records):
        yield from (rows.select(chunk) for chunk in growing_chunks(range(len(rows)), max_size=MAX_CHUNK))
        return
    for chunk in growing_chunks(rows, max_size=MAX_CHUNK):
        yield Records("row", list(range(1, len(chunk) + 1)), task.columns_of(chunk))
