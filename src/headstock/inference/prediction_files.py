"""Writes predictions as JSON lines, CSV or TSV, together with columns of the input."""

import csv
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstock.data import formats
from headstock.data.formats import detect_format, table_rows
from headstock.data.labelled_texts import find_file, is_table
from headstock.data.records import TEXT, Records
from headstock.errors import UserError
from headstock.io import atomic_file

Row = dict[str, Any]
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".json", ".ndjson", ".txt", "")


def check_suffix(out: Path | None) -> None:
    if out is not None and out.suffix.lower() not in (*DELIMITERS, *JSON_LINES):
        raise UserError(f"--out {out}: must end in .jsonl, .csv or .tsv")


@contextmanager
def open_prediction_file(out: Path) -> Iterator[Callable[[Row], None]]:
    """A function that writes one prediction, in the format given by the file's suffix.

    In a table nested values become columns such as `probabilities.good`, and lists become JSON.
    """
    check_suffix(out)
    with atomic_file(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        delimiter = DELIMITERS.get(out.suffix.lower())
        if delimiter is None:
            yield lambda row: print(json.dumps(row, ensure_ascii=False), file=file)
            return
        writer: csv.DictWriter | None = None

        def write(row: Row) -> None:
            nonlocal writer
            flat = flatten(row)
            if writer is None:
                writer = csv.DictWriter(file, list(flat), delimiter=delimiter, lineterminator="\n")
                writer.writeheader()
            writer.writerow(flat)

        yield write


def flatten(row: Mapping[str, Any], prefix: str = "") -> Row:
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat


class InputColumns:
    """Input columns that are written beside each prediction, such as its id and text.

    Rows are read ahead of their predictions: `track` records the position of each row, and `merge` adds the columns to
    the next prediction, as `input.NAME` if the prediction has a value of that name. Of a table any column can be
    written, of other files only the text.
    """

    def __init__(self, names: Sequence[str], file: str | None, columns: Mapping[str, str] | None):
        self.names, self.pending = list(names), deque[tuple[int, str]]()
        self.columns = {name: (columns or {}).get(name, name) for name in names}
        self.table = self.open_table(file) if file and file != "-" and is_table(file) else None
        if self.table is None and (other := [name for name in names if name != TEXT]):
            reason = "the input has only texts" if file is None else f"{file} is not a table"
            raise UserError(f"--with {other[0]}: {reason}, so only text is available")

    def open_table(self, file: str) -> Iterator[tuple[int, Row]]:
        source = detect_format(*find_file(file))
        assert source is not None, "is_table checked the suffix"
        existing = formats.column_names(source)
        for name in self.columns.values():
            if existing is not None and name not in existing:
                raise formats.no_column(f"--with {name}: {file}", name, existing)
        return table_rows(source, list(dict.fromkeys(self.columns.values())))

    def track(self, rows: Iterable[tuple[int, str]]) -> Iterator[str]:
        for line, text in rows:
            if self.names:
                self.pending.append((line, text))
            yield text

    def track_records(self, records: Records) -> Records:
        if self.names:
            self.pending.extend(zip(records.lines, records.display_texts, strict=True))
        return records

    def merge(self, prediction: Row) -> Row:
        """The prediction after its input columns."""
        if not self.names:
            return prediction
        line, text = self.pending.popleft()
        if self.table is None:
            return {TEXT: text} | prediction
        values = next(row for number, row in self.table if number == line)
        keys = {f"input.{name}" if name in prediction else name: column for name, column in self.columns.items()}
        return {key: values.get(column) for key, column in keys.items()} | prediction
