"""Streams the rows of .jsonl, .csv, .tsv and .parquet files with their line numbers."""

import csv
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from headstock.data.formats import (
    MAX_LINE_BYTES,
    READ_BYTES,
    SAMPLE_LINES,
    DataFile,
    check_expansion,
    is_valid_unicode,
    read_chunks,
    text_lines,
)
from headstock.errors import UserError, did_you_mean

LONG_JSON = 1 << 24  # characters of a line from which on its lists and objects are counted
MAX_JSON_VALUES = 1_000_000  # lists and objects in one long line: each takes more memory than its text
PARQUET_ROWS = 128  # decoded at once; more are not faster


def column_names(file: DataFile) -> list[str] | None:
    """The columns of a table, by its header or first row; None if it is empty or its rows are plain strings."""
    if file.format == ".parquet":
        with _open_parquet(file) as table:
            return list(table.schema_arrow.names)
    if file.format == ".jsonl":
        first = next(json_rows(file), None)
        return list(first[1]) if first and isinstance(first[1], dict) else None
    header = next(csv_rows(file), None)
    return header[1] if header else None


def column_values(file: DataFile, column: str) -> Iterator[tuple[int, str]]:
    """The text in one column, each with the line (in parquet: the row) where it starts; null becomes ""."""
    for line, row in table_rows(file, [column]):
        if column not in row:
            raise no_column(f"{file.name}:{line}", column, list(row))
        value = row[column]
        if value is None:
            value = ""
        if not isinstance(value, str):
            raise UserError(f"{file.name}:{line}: column {column!r} contains {type(value).__name__}, expected text")
        if file.format == ".jsonl" and not is_valid_unicode(value):
            raise UserError(f"{file.name}:{line}: half of a surrogate pair, which is not a character")
        yield line, value


def table_rows(file: DataFile, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row as a dictionary with at least the columns `names`, as far as the file has them, and its line.

    A .jsonl row that is a plain string counts as an object with the first of the columns only.
    """
    if file.format == ".parquet":
        yield from _parquet_rows(file, names)
    elif file.format == ".jsonl":
        for line, row in json_rows(file):
            if isinstance(row, str):
                row = {names[0]: row}
            elif not isinstance(row, dict):
                raise UserError(f"{file.name}:{line}: expected an object or a string, found {type(row).__name__}")
            yield line, row
    else:
        rows = csv_rows(file)
        _, header = next(rows, (1, []))
        if header and not set(names) & set(header):
            raise no_column(file.name, names[0], header)
        indices = [(name, header.index(name)) for name in names if name in header]
        for line, cells in rows:
            yield line, {name: cells[i] for name, i in indices}


def no_column(location: str, column: str, columns: list[str]) -> UserError:
    names = ", ".join(map(repr, columns)) or "none"
    return UserError(f"{location}: no column {column!r}{did_you_mean(column, columns)} (columns: {names})")


def csv_rows(file: DataFile) -> Iterator[tuple[int, list[str]]]:
    """The rows of a .csv or .tsv, header first, each with its first line; all are as wide as the header."""
    csv.field_size_limit(MAX_LINE_BYTES)  # the default rejects texts longer than 131,072 characters
    delimiter, quoting = _dialect(file)
    lines = (line + "\n" for _, line in text_lines(file))
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for row in reader:
            if header is None and row:
                header = [name.strip() for name in row]
                yield start, header
            elif row and header is not None:
                if len(row) != len(header):
                    raise UserError(
                        f"{file.name}:{start}: expected {len(header)} fields as in the header, found {len(row)} "
                        f"(quote a text that contains {delimiter!r} or a line break)"
                    )
                yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file.name}:{start}: not a valid {file.format[1:]} row ({error})") from None


def _dialect(file: DataFile) -> tuple[str, Any]:
    """The delimiter, by the header, and the quoting mode: in many .tsv files quotes are ordinary characters."""
    sample = [line + "\n" for _, line in islice(text_lines(file), SAMPLE_LINES)]
    if file.format == ".csv":
        header = next((line for line in sample if line.strip()), "")
        return max(",;\t", key=header.count), csv.QUOTE_MINIMAL
    if any(_has_literal_quote(line) for _, line in text_lines(file)):
        return "\t", csv.QUOTE_NONE
    try:
        rows = list(csv.reader(sample, delimiter="\t", strict=True))
    except csv.Error as error:
        # The end of the sample may split a row; any other error means that quotes are ordinary characters.
        split = len(sample) == SAMPLE_LINES and "unexpected end" in str(error)
        return "\t", csv.QUOTE_MINIMAL if split else csv.QUOTE_NONE
    widths = {len(row) for row in rows if row}
    return "\t", csv.QUOTE_MINIMAL if len(widths) <= 1 else csv.QUOTE_NONE


def _has_literal_quote(line: str) -> bool:
    """Whether a .tsv row has a quoted part that ends before its field does, so the quote is an ordinary character."""
    if not line.startswith('"') and '\t"' not in line:
        return False
    try:
        list(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error as error:
        return "unexpected end" not in str(error)  # this may be a quoted text with a line break
    return False


def json_rows(file: DataFile, chunks: Iterator[bytes] | None = None) -> Iterator[tuple[int, Any]]:
    """The JSON value on each line that is not blank."""
    decode = json.JSONDecoder().decode  # json.loads checks its arguments each time
    for line, text in text_lines(file, chunks):
        if not text or text.isspace():
            continue
        if len(text) > LONG_JSON and text.count("[") + text.count("{") > MAX_JSON_VALUES:
            raise UserError(f"{file.name}:{line}: more than {MAX_JSON_VALUES:,} lists and objects in one line")
        try:
            value = decode(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{file.name}:{line}: invalid JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file.name}:{line}: unreadable JSON ({error})") from None
        yield line, value


@contextmanager
def _open_parquet(file: DataFile) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file.name}: reading .parquet needs: pip install 'headstock[tables]'") from None
    with tempfile.TemporaryFile() if file.compression else nullcontext(file.path) as seekable:
        if not isinstance(seekable, Path):  # parquet is read from its end, so it must be decompressed first
            for data in read_chunks(file):
                seekable.write(data)
            seekable.seek(0)
        try:
            # Without these two options a whole row group, often the whole file, is held in memory.
            table = pyarrow.parquet.ParquetFile(seekable, pre_buffer=False, buffer_size=READ_BYTES)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.name}: not a parquet file ({_first_line(error)})") from None
        with table:
            yield table


def _parquet_rows(file: DataFile, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open_parquet(file) as table:
        import pyarrow

        available = list(table.schema_arrow.names)
        columns = [name for name in names if name in available]
        if not columns:
            raise no_column(file.name, names[0], available)
        row, produced, size = 1, 0, file.path.stat().st_size
        _check_declared_sizes(file, table, columns, size)
        try:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                produced += batch.nbytes  # a dictionary of long texts can stand for any number of rows
                check_expansion(file.name, size, produced)
                for values in batch.to_pylist():
                    yield row, values
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.name}: damaged near row {row} ({_first_line(error)})") from None


def _check_declared_sizes(file: DataFile, table: Any, columns: Sequence[str], size: int) -> None:
    """Refuse pages that would take far more memory than the file has bytes, before they are decompressed."""
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        parts = [group.column(i) for i in range(group.num_columns)]
        used = [part for part in parts if part.path_in_schema.partition(".")[0] in columns]
        check_expansion(file.name, size, max((part.total_uncompressed_size for part in used), default=0))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
