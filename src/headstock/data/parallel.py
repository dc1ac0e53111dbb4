"""Reads translation pairs from tables, .tsv files without a header, and pairs of files such as X.en and X.fr."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from headstock.data import catalog, urls
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    DataFile,
    detect_format,
    find_beside,
    split_compression,
    text_lines,
    unknown_format,
)
from headstock.data.records import (
    RecordBuilder,
    Records,
    find_file,
    paired_lines,
    parse_text,
    read_table,
    resolve_columns,
)
from headstock.data.tables import column_names, csv_rows
from headstock.errors import UserError, suggest_path

SOURCE, TARGET = "source", "target"
COLUMN_NAME = re.compile(r"[\w-]+")  # a sentence has spaces or punctuation
SAMPLE_ROWS = 200
EXAMPLE = f"{SOURCE}=en,{TARGET}=fr"
PARSERS = {SOURCE: parse_text, TARGET: parse_text}
Rows = Iterator[tuple[int, dict[str, Any]]]


def read_parallel(
    path: str | Path, *, columns: Mapping[str, str] | None = None, strict: bool = True, skip_blank: bool = False
) -> Records:
    """Read the columns "source" and, if present, "target".

    `columns` gives the names of the two columns of a table, their numbers (from 1) in a .tsv without a header, or the
    suffixes of two files with one sentence per line: {"source": "en", "target": "fr"} for X.en and X.fr. With `strict`,
    a target that `columns` names must exist. With `skip_blank`, rows with a blank side are left out.
    """
    resolved = resolve_columns(columns, [SOURCE, TARGET])
    files = _find_pair(path, columns)
    if files is not None:
        return _build(_pair_rows(files, strict), skip_blank, **files)
    file = find_file(path)
    if file.format not in FORMATS:
        raise unknown_format(file, f"{' '.join(FORMATS)}, or two files by suffix: --columns {EXAMPLE}")
    if file.format == PLAIN:
        return _build(_source_rows(file), skip_blank, file)
    if file.format == ".tsv" and (numbers := _column_numbers(file, columns)) is not None:
        return _build(_numbered_rows(file, numbers, strict and TARGET in (columns or {})), skip_blank, file)
    names = column_names(file)
    if names is not None and len(names) == 1 and resolved[SOURCE] not in names:
        raise UserError(f"{file.name}: only one column ({names[0]!r}); expected two, {SOURCE} and {TARGET}")
    return read_table(file, PARSERS, columns=columns, optional=(TARGET,), strict=strict, skip_blank=skip_blank)


def _build(rows: Rows, skip_blank: bool, source: DataFile, target: DataFile | None = None) -> Records:
    builder = RecordBuilder(source, PARSERS, (TARGET,), skip_blank, files={TARGET: target or source})
    for line, row in rows:
        builder.add(line, row)
    return builder.build()


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


def _find_pair(path: str | Path, columns: Mapping[str, str] | None) -> dict[str, DataFile] | None:
    """The files of source and target, if a path stands for two; the target may not exist."""
    if str(path) == "-" or catalog.is_name(str(path)):
        return None
    shown = urls.redact(str(path))
    is_url, full = urls.is_url(shown), Path(path).expanduser()
    if (is_url or full.is_file()) and detect_format(full).is_table:
        return None
    if not columns or set(columns) != {SOURCE, TARGET}:
        _refuse_single_file(full, str(path))
        return None
    suffixes = {name: f".{suffix.lstrip('.')}" for name, suffix in columns.items()}
    bare = split_compression(urls.file_name(shown))[0]
    stem = next((bare.removesuffix(suffix) for suffix in suffixes.values() if bare.endswith(suffix)), bare)
    files = {}
    for name, suffix in suffixes.items():
        expected = detect_format(full.with_name(stem + suffix), str(Path(shown).with_name(stem + suffix)))
        files[name] = find_beside(full, stem + suffix, shown) or expected
    if files[SOURCE].path.is_file():
        return files
    if is_url or full.is_file():
        return None
    siblings = [file.name for file in full.parent.iterdir()] if full.parent.is_dir() else []
    hint = suggest_path(stem + suffixes[SOURCE], siblings)
    expected_names = f"{stem}{suffixes[SOURCE]} and {stem}{suffixes[TARGET]}"
    compressions = " ".join(COMPRESSIONS)
    raise UserError(
        f"{path}: no such file{hint} (expected {expected_names}, uncompressed or {compressions}, or a table)"
    )


def _refuse_single_file(path: Path, name: str) -> None:
    """Ask for both suffixes if a path is one file of a pair."""
    if not path.is_file() or detect_format(path).format in FORMATS:
        return
    bare = split_compression(path.name)[0]
    stem, _, suffix = bare.rpartition(".")
    siblings = sorted({split_compression(file.name)[0] for file in path.parent.iterdir() if file.is_file()} - {bare})
    others = [sibling.rpartition(".")[2] for sibling in siblings if stem and sibling.rpartition(".")[0] == stem]
    example = f"{SOURCE}={suffix or 'en'},{TARGET}={others[0] if len(others) == 1 else 'fr'}"
    raise UserError(f"{name}: one file of a pair? give both suffixes with --columns {example}")


def _pair_rows(files: Mapping[str, DataFile], strict: bool) -> Rows:
    source, target = files[SOURCE], files[TARGET]
    if target.path.is_file():
        return paired_lines({SOURCE: source, TARGET: target}, "one translation for each sentence")
    if strict:
        raise UserError(f"{target.name}: no such file; {source.name} needs it beside it")
    return _source_rows(source)
