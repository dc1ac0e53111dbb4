"""Predictions as files (JSON lines, CSV, TSV), with columns of the input carried along."""

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
TABLES = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".json", ".ndjson", ".txt", "")


def check_suffix(out: Path | None) -> None:
    if out is not None and out.suffix.lower() not in (*TABLES, *JSON_LINES):
        raise UserError(f"--out {out}: must end in .jsonl, .csv or .tsv")


@contextmanager
def open_prediction_file(out: Path) -> Iterator[Callable[[Row], None]]:
    """Writes one prediction at a time; the name of the file says how. In a table, nested values are flattened:
    `probabilities` become columns such as `probabilities.good`, and lists are JSON."""
    check_suffix(out)
    with atomic_file(out) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        delimiter = TABLES.get(out.suffix.lower())
        if delimiter is None:
            yield lambda row: print(json.dumps(row, ensure_ascii=False), file=file)
            return
        writer: list[csv.DictWriter] = []

        def write(row: Row) -> None:
            flat = flatten(row)
            if not writer:
                writer.append(csv.DictWriter(file, list(flat), delimiter=delimiter, lineterminator="\n"))
                writer[0].writeheader()
            writer[0].writerow(flat)

        yield write


def flatten(row: Mapping[str, Any], above: str = "") -> Row:
    found: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return found


class InputColumns:
    """Columns of the input that stand beside each prediction, such as its id and text.

    Predictions come behind their rows, as rows are read ahead: `note` remembers where each row is and `beside` gives
    what is carried for the next prediction, as `input.NAME` where the prediction has a value of that name itself. Of a
    table any column can be carried, of other files the text alone.
    """

    def __init__(self, names: Sequence[str], file: str | None, columns: Mapping[str, str] | None):
        self.names, self.waiting = list(names), deque[tuple[int, str]]()
        self.called = {name: (columns or {}).get(name, name) for name in names}
        self.table = self.open_table(file) if file and file != "-" and is_table(file) else None
        if self.table is None and (other := [name for name in names if name != TEXT]):
            where = "texts alone" if file is None else f"{file} is no table"
            raise UserError(f"--with {other[0]}: {where}, so only text can be carried")

    def open_table(self, file: str) -> Iterator[tuple[int, Row]]:
        source = detect_format(*find_file(file))
        assert source is not None, "a table by its name"
        there = formats.column_names(source)
        for name in self.called.values():
            if there is not None and name not in there:
                raise formats.no_column(f"--with {name}: {file}", name, there)
        return table_rows(source, list(dict.fromkeys(self.called.values())))

    def track(self, rows: Iterable[tuple[int, str]]) -> Iterator[str]:
        for line, text in rows:
            if self.names:
                self.waiting.append((line, text))
            yield text

    def track_records(self, records: Records) -> Records:
        if self.names:
            self.waiting.extend(zip(records.lines, records.display_texts, strict=True))
        return records

    def merge(self, prediction: Row) -> Row:
        """The prediction with what is carried in front of it."""
        if not self.names:
            return prediction
        line, text = self.waiting.popleft()
        if self.table is None:
            return {TEXT: text} | prediction
        values = next(row for at, row in self.table if at == line)
        named = {f"input.{name}" if name in prediction else name: column for name, column in self.called.items()}
        return {name: values.get(column) for name, column in named.items()} | prediction
