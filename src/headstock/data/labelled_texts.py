"""Reads labelled texts from tables, and from a file of texts beside a file of labels."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from headstock.data import formats
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    TABLES,
    DataFile,
    detect_format,
    find_beside,
    split_compression,
    text_lines,
    unknown_format,
)
from headstock.data.records import (
    LAB_TEXTS,
    LABEL,
    LABELS,
    TEXT,
    Blank,
    Parser,
    RecordBuilder,
    Records,
    Unusable,
    check_columns,
    describe_cell,
    find_file,
    no_rows,
    paired_lines,
    parse_text,
    preview,
    read_table,
    resolve_columns,
    unusable_rows,
)
from headstock.data.tables import table_rows
from headstock.errors import UserError

PIECES = ".spm"  # suffix of texts tokenized into SentencePiece pieces


def read_records(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    required: Sequence[str] = (TEXT,),
    optional: Sequence[str] = (LABEL,),
    separator: str | None = None,
    strict: bool = True,
    skip_blank: bool = False,
    further: Mapping[str, Parser] | None = None,
) -> Records:
    """Read all rows of a file; values that cannot be used are reported together.

    `columns` maps canonical names to the table's own, such as {"text": "review"}. An optional column may be missing
    from the file, unless `columns` names it and `strict` is set. With `separator`, a label may be a list, whose items
    are joined by it. With `skip_blank`, rows with a blank value are left out instead of refused. `further`
    columns are optional and have parsers of their own.
    """
    parsers: dict[str, Parser] = dict.fromkeys([*required, *optional], parse_text) | dict(further or {})
    optional = (*optional, *(further or {}))
    if LABEL in parsers:
        parsers[LABEL] = partial(_parse_label, separator=separator)
    file = _find_texts(path)
    if file.is_table:
        return read_table(file, parsers, columns=columns, optional=optional, strict=strict, skip_blank=skip_blank)
    resolve_columns(columns, list(parsers))  # rejects other names
    labels = _find_labels(file)
    _check_two_files(file, labels, required)
    files = {TEXT: file, LABEL: labels} if labels and LABEL in parsers else {TEXT: file}
    builder = RecordBuilder(file, parsers, optional, skip_blank, files=files)
    rows = paired_lines(files, "one label for each text") if len(files) == 2 else _single_lines(file)
    for line, row in rows:
        builder.add(line, row)
    return builder.build()


def stream_texts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, skipped: list[int] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, or of standard input for `-`, with their line numbers, in constant memory.

    A blank line of a plain text file is the text "", so that there can be one output per line; in a table it is an
    error. If `skipped` is a list, blank texts are left out and their lines appended to it.
    """
    column = resolve_columns(columns, [TEXT, LABEL])[TEXT]
    if str(path) == "-":
        stdin = cast(BufferedReader, sys.stdin.buffer)
        # read1 returns what is available, so that slow input from a pipe is processed at once
        chunks = iter(lambda: stdin.read1(formats.READ_BYTES), b"")
        file = DataFile(Path("-"), "-", PLAIN, "")
        return _stream(file, text_lines(file, chunks), column, skipped)
    file = _find_texts(path)
    if not file.is_table:
        return _stream(file, text_lines(file), column, skipped)
    check_columns(file, {TEXT: column}, [TEXT])
    values = ((line, row.get(column)) for line, row in table_rows(file, [column]))
    return _stream(file, values, column, skipped)


def _stream(
    file: DataFile, values: Iterable[tuple[int, Any]], column: str, skipped: list[int] | None
) -> Iterator[tuple[int, str]]:
    line = 0
    for line, value in values:
        try:
            yield line, parse_text(value)
        except Unusable as error:
            if isinstance(error, Blank) and skipped is not None:
                skipped.append(line)
            elif isinstance(error, Blank) and not file.is_table:
                yield line, ""
            else:
                cell = describe_cell(f"{file.name}:{line}", TEXT, {TEXT: column})
                raise unusable_rows(file.name, [f"{cell} {error}"]) from None
    if not line:
        raise no_rows(file)


def _parse_label(value: Any, row: Any, separator: str | None) -> str:
    if isinstance(value, str) and value:
        return sys.intern(parse_text(value).strip())  # few labels, many rows
    if isinstance(value, list):
        if separator is None:
            raise Unusable(f'is the list {preview(value)}, expected one label (lists need separator="|")')
        labels = [_parse_label(item, row, None) for item in value]
        if ambiguous := next((label for label in labels if separator in label), None):
            raise Unusable(f"is a list with {ambiguous!r}, which contains the separator {separator!r}")
        return separator.join(labels)
    if separator is not None and (value is None or value == ""):
        return ""  # in multi-label data a row may have no label
    if isinstance(value, float) and math.isnan(value):  # how pandas writes a missing value
        raise Blank
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return parse_text(value, expected="a label")


# Files


def is_table(path: str | Path) -> bool:
    """Whether a file is a table, by its name alone."""
    return detect_format(path).is_table


def _find_texts(path: str | Path) -> DataFile:
    """A table, or a file with one text per line."""
    file = find_file(path)
    if file.format == LABELS:
        raise UserError(f"{file.name}: contains only labels; give the file with the texts")
    if file.format not in (*FORMATS, PIECES) and _find_labels(file) is None:
        compressions = f"uncompressed or {' '.join(COMPRESSIONS)}"
        raise unknown_format(file, f"{' '.join(FORMATS)} {PIECES}, {compressions}, or a {LABELS} file beside it")
    return file


def _find_labels(file: DataFile) -> DataFile | None:
    """The labels of a file of texts: for `X.review.spm`, `X.review.label` or else `X.label`, compressed or not."""
    stem = split_compression(file.path.name)[0].rpartition(".")[0]
    while stem:
        if labels := find_beside(file.path, stem + LABELS, file.name):
            return labels
        stem = stem.rpartition(".")[0]
    return None


def _check_two_files(texts: DataFile, labels: DataFile | None, required: Sequence[str]) -> None:
    """Refuse files of texts and labels that lack required columns."""
    missing = [name for name in required if name not in ((TEXT, LABEL) if labels else (TEXT,))]
    if missing == [LABEL]:
        bare = split_compression(texts.path.name)[0]
        stem = bare.removesuffix(LAB_TEXTS) if bare.endswith(LAB_TEXTS) else bare.rpartition(".")[0]
        raise UserError(f"{texts.name}: no labels (expected {stem}{LABELS} beside it, or a table with labels)")
    if missing:
        tables = f"expected a table, {' '.join(TABLES)}"
        raise UserError(f"{texts.name}: one text per line, so no {' and no '.join(missing)} ({tables})")


def _single_lines(file: DataFile) -> Iterator[tuple[int, dict[str, str]]]:
    return ((line, {TEXT: text}) for line, text in text_lines(file))
