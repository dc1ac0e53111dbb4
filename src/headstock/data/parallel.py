"""Reads translation pairs from tables, .tsv files without a header, and pairs of files such as X.en and X.fr."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headstock.data import catalog
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    TABLES,
    DataFile,
    column_names,
    csv_rows,
    detect_format,
    find_compressed,
    split_compression,
    text_lines,
    unknown_format,
)
from headstock.data.labelled_texts import find_file, paired_lines, read_records
from headstock.data.records import RecordBuilder, Records, no_rows, parse_text, resolve_columns
from headstock.errors import UserError, suggest_path

SOURCE, TARGET = "source", "target"
COLUMN_NAME = re.compile(r"[\w-]+")  # a sentence has spaces or punctuation
SAMPLE_ROWS = 200
EXAMPLE = f"{SOURCE}=en,{TARGET}=fr"
Rows = Iterator[tuple[int, dict[str, Any]]]


def read_parallel(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    strict: bool = True,
    skip_blank: bool = False,
) -> Records:
    """Read the columns "source" and, if present, "target".

    `columns` gives the names of the two columns of a table, their numbers (from 1) in a .tsv without a header, or the
    suffixes of two files with one sentence per line: {"source": "en", "target": "fr"} for X.en and X.fr. With `strict`,
    a target that `columns` names must exist. With `skip_blank`, rows with a blank side are left out.
    """
    resolved = resolve_columns(columns, [SOURCE, TARGET])
    if (pair := _find_pair(path, columns)) is not None:
        return _read_pair(*pair, strict, skip_blank)
    file_path, name = find_file(path)
    file = detect_format(file_path, name)
    if file is None:
        raise unknown_format(file_path, name, f"{' '.join(FORMATS)}, or two files by suffix: --columns {EXAMPLE}")
    if file.format == PLAIN:
        return _build(file, _source_rows(file), skip_blank)
    if file.format == ".tsv" and (numbers := _column_numbers(file, columns)) is not None:
        return _build(file, _numbered_rows(file, numbers, strict and TARGET in (columns or {})), skip_blank)
    names = column_names(file)
    if names is not None and len(names) == 1 and resolved[SOURCE] not in names:
        raise UserError(f"{name}: only one column ({names[0]!r}); expected two, {SOURCE} and {TARGET}")
    return read_records(
        path, columns=columns, required=(SOURCE,), optional=(TARGET,), strict=strict, skip_blank=skip_blank
    )


def _build(file: DataFile, rows: Rows, skip_blank: bool, describe: Callable[[str, int], str] | None = None) -> Records:
    builder = RecordBuilder(
        file.name, lambda name, value, row: parse_text(value), (SOURCE,), (TARGET,), skip_blank, describe
    )
    for line, row in rows:
        builder.add(line, row)
    return builder.build(lambda: no_rows(file))


def _source_rows(file: DataFile) -> Rows:
    return ((line, {SOURCE: text}) for line, text in text_lines(file))


# .tsv without a header


def _column_numbers(file: DataFile, columns: Mapping[str, str] | None) -> dict[str, int] | None:
    """The columns of source and target, from 1, if a .tsv has no header; None if it has one."""
    rows = [row for _, row in islice(csv_rows(file), SAMPLE_ROWS)]
    if not rows:
        return None
    columns = columns or {}
    numeric = columns and all(number.isascii() and number.isdigit() for number in columns.values())
    if numeric and not set(columns.values()) <= set(rows[0]):
        return {SOURCE: 1, TARGET: 2} | {name: int(number) for name, number in columns.items()}
    has_sentences = len(rows[0]) == 2 and not all(COLUMN_NAME.fullmatch(cell) for cell in rows[0])
    return {SOURCE: 1, TARGET: 2} if has_sentences and not columns else None


def _numbered_rows(file: DataFile, numbers: Mapping[str, int], strict: bool) -> Rows:
    for line, row in csv_rows(file):
        for name, number in numbers.items():
            if not 1 <= number <= len(row) and (name == SOURCE or strict):
                raise UserError(f"{file.name}:{line}: --columns {name}={number}, but the row has {len(row)} columns")
        yield line, {name: row[number - 1] for name, number in numbers.items() if number <= len(row)}


# Two files


def _find_pair(path: str | Path, columns: Mapping[str, str] | None) -> tuple[DataFile, DataFile | str] | None:
    """The files of source and target, if a path stands for two; of a missing target, the name it should have."""
    given = str(path)
    if given == "-" or catalog.is_remote(given):
        return None
    full = Path(given).expanduser()
    bare = split_compression(full.name)[0]
    if full.is_file() and (file := detect_format(full)) is not None and file.format in TABLES:
        return None
    if not columns or set(columns) != {SOURCE, TARGET}:
        _refuse_single_file(full, bare, given)
        return None
    suffixes = {name: f".{suffix.lstrip('.')}" for name, suffix in columns.items()}
    stem = next((bare.removesuffix(suffix) for suffix in suffixes.values() if bare.endswith(suffix)), bare)

    def data_file(suffix: str) -> DataFile | None:
        match = find_compressed(full.with_name(stem + suffix))
        if match is None:
            return None
        return DataFile(match, str(Path(given).with_name(match.name)), PLAIN, split_compression(match.name)[1])

    source = data_file(suffixes[SOURCE])
    if source is None:
        if full.is_file():
            return None
        expected = f"{stem}{suffixes[SOURCE]} and {stem}{suffixes[TARGET]}"
        siblings = [file.name for file in full.parent.iterdir()] if full.parent.is_dir() else []
        hint = suggest_path(stem + suffixes[SOURCE], siblings)
        compressions = " ".join(COMPRESSIONS)
        raise UserError(
            f"{given}: no such file{hint} (expected {expected}, uncompressed or {compressions}, or a table)"
        )
    return source, data_file(suffixes[TARGET]) or str(Path(given).with_name(stem + suffixes[TARGET]))


def _refuse_single_file(path: Path, bare: str, given: str) -> None:
    """Ask for both suffixes if a path is one file of a pair."""
    if not path.is_file() or detect_format(path) is not None:
        return
    stem, _, suffix = bare.rpartition(".")
    siblings = sorted({split_compression(file.name)[0] for file in path.parent.iterdir() if file.is_file()} - {bare})
    others = [name.rpartition(".")[2] for name in siblings if stem and name.rpartition(".")[0] == stem]
    example = f"{SOURCE}={suffix or 'en'},{TARGET}={others[0] if len(others) == 1 else 'fr'}"
    raise UserError(f"{given}: one file of a pair? give both suffixes with --columns {example}")


def _read_pair(source: DataFile, target: DataFile | str, strict: bool, skip_blank: bool) -> Records:
    if isinstance(target, str):
        if strict:
            raise UserError(f"{target}: no such file; {source.name} needs it beside it")
        return _build(source, _source_rows(source), skip_blank)
    rows = ((line, {SOURCE: a, TARGET: b}) for line, a, b in paired_lines(source, target, "translation", "sentence"))
    files = {SOURCE: source.name, TARGET: target.name}
    return _build(source, rows, skip_blank, lambda name, line: f"{files[name]}:{line}: {name}")
