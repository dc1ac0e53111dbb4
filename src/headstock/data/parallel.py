"""Reads sentences with their translations: tables, .tsv files without a header, pairs of files (X.en and X.fr)."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from headstock.data import catalog, formats
from headstock.data.formats import COMPRESSIONS, FORMATS, PLAIN, TABLES, DataFile, csv_rows, detect_format, text_lines
from headstock.data.records import (
    Records,
    Unusable,
    all_blank,
    bare_name,
    find_file,
    read_records,
    refused,
    table_names,
    usable_text,
)
from headstock.errors import UserError, suggest_path

SOURCE, TARGET = "source", "target"
NAME = re.compile(r"[\w-]+")  # what a column is called; a sentence has spaces or marks in it
SAMPLE_ROWS = 200
LANGUAGES = f"{SOURCE}=en,{TARGET}=fr"


def read_parallel(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    strict: bool = True,
    skip_blank: bool = False,
) -> Records:
    """The rows of a file as columns "source" and, where there are any, "target".

    `columns` says what a table calls them, or which columns of a .tsv without a header they are, by numbers from 1; or
    for a pair of files, one sentence a line, how their names end: {"source": "en", "target": "fr"} for X.en and X.fr.
    A target that `columns` names must be there if we `insist`. With `skip_blank`, rows with a blank side are left out.
    """
    called = table_names(columns, [SOURCE, TARGET])
    if (sides := _sides(path, columns)) is not None:
        return _read_sides(*sides, strict, skip_blank)
    where, name = find_file(path)
    source = detect_format(where, name)
    if source is None:
        wanted = f"{' '.join(FORMATS)}, or two files and how they end: --columns {LANGUAGES}"
        raise UserError(f"{name}: cannot tell what is in a {where.suffix or 'nameless'} file (wanted {wanted})")
    if source.format == PLAIN:
        return _read_rows(source, ((line, {SOURCE: text}) for line, text in text_lines(source)), skip_blank)
    if source.format == ".tsv" and (numbers := _numbers(source, columns)) is not None:
        return _read_rows(source, _bare_rows(source, numbers, strict and TARGET in (columns or {})), skip_blank)
    if (there := formats.column_names(source)) is not None and len(there) == 1 and called[SOURCE] not in there:
        raise UserError(f"{name}: one column only ({there[0]!r}); wanted two, {SOURCE} and {TARGET}")
    return read_records(
        path, columns=columns, required=(SOURCE,), optional=(TARGET,), strict=strict, skip_blank=skip_blank
    )


# .tsv without a header


def _numbers(source: DataFile, columns: Mapping[str, str] | None) -> dict[str, int] | None:
    """Which columns of a .tsv the sides are, from 1, where it has no header; None where it has one."""
    rows = [row for _, row in islice(csv_rows(source), SAMPLE_ROWS)]
    if not rows:
        return None
    given = columns or {}
    counted = given and all(number.isascii() and number.isdigit() for number in given.values())
    if counted and not set(given.values()) <= set(rows[0]):
        return {SOURCE: 1, TARGET: 2} | {name: int(number) for name, number in given.items()}
    plainly = len(rows[0]) == 2 and not all(NAME.fullmatch(cell) for cell in rows[0])
    return {SOURCE: 1, TARGET: 2} if plainly and not given else None


def _bare_rows(source: DataFile, numbers: Mapping[str, int], insist: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in csv_rows(source):
        for name, number in numbers.items():
            if not 1 <= number <= len(row) and (name == SOURCE or insist):
                raise UserError(f"{source.name}:{line}: --columns {name}={number}, but here are {len(row)} columns")
        yield line, {name: row[number - 1] for name, number in numbers.items() if number <= len(row)}


# Two files


def _sides(path: str | Path, columns: Mapping[str, str] | None) -> tuple[DataFile, DataFile | str] | None:
    """The files of both sides, where a path stands for two; of a target that is not there, the name it should have."""
    given = str(path)
    if given == "-" or given.startswith(catalog.PREFIX):
        return None
    whole = Path(given).expanduser()
    bare = bare_name(whole.name)[0]
    if whole.is_file() and (known := detect_format(whole)) is not None and known.format in TABLES:
        return None
    if not columns or set(columns) != {SOURCE, TARGET}:
        _refuse_one_side(whole, bare, given)
        return None
    ends = {name: f".{end.lstrip('.')}" for name, end in columns.items()}
    stem = next((bare.removesuffix(end) for end in ends.values() if bare.endswith(end)), bare)
    found = {name: _file(whole.with_name(stem + end)) for name, end in ends.items()}
    if found[SOURCE] is None:
        if whole.is_file():
            return None
        wanted = f"{stem}{ends[SOURCE]} and {stem}{ends[TARGET]}"
        beside = [file.name for file in whole.parent.iterdir()] if whole.parent.is_dir() else []
        hint = suggest_path(stem + ends[SOURCE], beside)
        raise UserError(f"{given}: no such file{hint} (wanted {wanted}, plain or {' '.join(COMPRESSIONS)}, or a table)")
    sources = {
        name: file and DataFile(file, str(Path(given).with_name(file.name)), PLAIN, bare_name(file.name)[1])
        for name, file in found.items()
    }
    missing = str(Path(given).with_name(stem + ends[TARGET]))
    return sources[SOURCE], sources[TARGET] or missing  # type: ignore[return-value]


def _refuse_one_side(path: Path, bare: str, given: str) -> None:
    """One side of a pair, and nobody has said which the other is."""
    if not path.is_file() or detect_format(path) is not None:
        return
    stem, _, end = bare.rpartition(".")
    beside = sorted({bare_name(file.name)[0] for file in path.parent.iterdir() if file.is_file()} - {bare})
    ends = [name.rpartition(".")[2] for name in beside if stem and name.rpartition(".")[0] == stem]
    example = f"{SOURCE}={end or 'en'},{TARGET}={ends[0] if len(ends) == 1 else 'fr'}"
    raise UserError(f"{given}: one side of a pair of files? say how both end with --columns {example}")


def _file(path: Path) -> Path | None:
    return next(
        (file for packing in ("", *COMPRESSIONS) if (file := path.with_name(path.name + packing)).is_file()), None
    )


def _read_sides(source: DataFile, target: DataFile | str, insist: bool, skip_blank: bool) -> Records:
    if isinstance(target, str):
        if insist:
            raise UserError(f"{target}: no such file; {source.name} needs it beside it")
        return _read_rows(source, ((line, {SOURCE: text}) for line, text in text_lines(source)), skip_blank)
    lines: list[int] = []
    sides: dict[str, list[str]] = {SOURCE: [], TARGET: []}
    problems: list[str] = []
    skipped = 0
    for pair in zip_longest(text_lines(source), text_lines(target)):
        if None in pair:
            counts = [sum(1 for _ in text_lines(file)) for file in (source, target)]
            raise UserError(
                f"{source.name} has {counts[0]:,} lines, but {target.name} has {counts[1]:,}; "
                "wanted one translation for each sentence"
            )
        if skip_blank and any(not text.strip() for _, text in pair):
            skipped += 1
            continue
        lines.append(pair[0][0])
        for (name, side), file, (line, text) in zip(sides.items(), (source, target), pair, strict=True):
            try:
                side.append(usable_text(text))
            except Unusable as wrong:
                problems.append(f"{file.name}:{line}: the {name} {wrong}")
    return _records(source, lines, sides, problems, skipped)


# Rows


def _read_rows(source: DataFile, rows: Iterator[tuple[int, dict[str, Any]]], skip_blank: bool) -> Records:
    """Rows that have their sides by our own names."""
    lines: list[int] = []
    sides: dict[str, list[str]] = {SOURCE: [], TARGET: []}
    problems: list[str] = []
    skipped = 0
    for line, row in rows:
        if skip_blank and any(not text.strip() for text in row.values()):
            skipped += 1
            continue
        lines.append(line)
        for name, text in row.items():
            try:
                sides[name].append(usable_text(text))
            except Unusable as wrong:
                problems.append(f"{source.name}:{line}: the {name} {wrong}")
    if not sides[TARGET] and not problems:
        del sides[TARGET]
    return _records(source, lines, sides, problems, skipped)


def _records(
    source: DataFile, lines: list[int], sides: dict[str, list[str]], problems: list[str], skipped: int
) -> Records:
    if problems:
        raise refused(source.name, problems)
    if not lines:
        raise all_blank(source.name, skipped) if skipped else UserError(f"{source.name}: no rows (it is empty)")
    return Records(source.name, lines, sides, skipped=skipped)
