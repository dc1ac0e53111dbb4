"""Writes predictions as JSON lines, CSV or TSV, and embeddings as .npy or JSON lines, one row at a time."""

import csv
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headstock.data import tables
from headstock.data.labelled_texts import is_table
from headstock.data.records import TEXT, Records, find_file
from headstock.data.tables import table_rows
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
        source = find_file(file)
        existing = tables.column_names(source)
        for name in self.columns.values():
            if existing is not None and name not in existing:
                raise tables.no_column(f"--with {name}: {file}", name, existing)
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


# Embeddings


def write_vectors(out: Path, rows: Iterable[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Write each text's fields and vectors, and return how many there were.

    A .jsonl file has one line per text. A .npy file has only the vectors; those of tokens or words follow one another,
    and F.tokens.jsonl lists for each text which `rows` of the array are its own.
    """
    with ExitStack() as stack:

        def open_file(path: Path, mode: str) -> Any:
            encoding = None if "b" in mode else "utf-8"
            return stack.enter_context(stack.enter_context(atomic_file(path)).open(mode, encoding=encoding))

        count = 0
        if out.suffix == ".jsonl":
            lines, size, width = open_file(out, "w"), 0, 0
            for fields, vectors in rows:
                name = "vector" if vectors.ndim == 1 else "vectors"
                numbers = np.round(vectors.astype(np.float64), 6).tolist()
                lines.write(json.dumps(fields | {name: numbers}, ensure_ascii=False) + "\n")
                count, size, width = count + 1, size + len(np.atleast_2d(vectors)), vectors.shape[-1]
            return {"texts": count, "shape": [size, width]}
        array, index = NpyWriter(open_file(out, "wb")), None
        for fields, vectors in rows:
            if vectors.ndim == 2:
                index = index or open_file(out.with_suffix(".tokens.jsonl"), "w")
                span = [array.rows, array.rows + len(vectors)]
                index.write(json.dumps(fields | {"rows": span}, ensure_ascii=False) + "\n")
            array.write(np.atleast_2d(vectors))
            count += 1
        return {"texts": count, "shape": array.finish()}


class NpyWriter:
    """A .npy file that is written in parts; the header gets the number of rows at the end."""

    def __init__(self, file: BinaryIO):
        self.file, self.rows, self.width = file, 0, 0

    def write(self, rows: np.ndarray) -> None:
        if not self.width:
            self.width = rows.shape[1]
            self.write_header()
        self.rows += len(rows)
        self.file.write(np.ascontiguousarray(rows, dtype=np.float32).tobytes())

    def write_header(self) -> None:
        """numpy pads the header so that the number of rows can grow in place."""
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def finish(self) -> list[int]:
        self.file.seek(0)
        self.write_header()
        self.file.seek(0, 2)
        return [self.rows, self.width]
