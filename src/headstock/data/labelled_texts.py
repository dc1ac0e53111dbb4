"""Reads labelled texts from tables, and from a file of texts beside a file of labels."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from headstock.data import catalog, formats
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    TABLES,
    DataFile,
    detect_format,
    find_compressed,
    split_compression,
    table_rows,
    text_lines,
    unknown_format,
)
from headstock.data.records import (
    LABEL,
    TEXT,
    Blank,
    RecordBuilder,
    Records,
    Unusable,
    check_columns,
    describe_cell,
    no_rows,
    parse_text,
    preview,
    resolve_columns,
    unusable_rows,
)
from headstock.errors import UserError, suggest_path

LABELS = ".label"  # suffix of a file with one label per line
PIECES = ".spm"  # suffix of texts tokenized into SentencePiece pieces
LAB_TEXTS = ".review.spm"  # the course lab's texts, whose labels are in X.label


def read_records(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    required: Sequence[str] = (TEXT,),
    optional: Sequence[str] = (LABEL,),
    separator: str | None = None,
    strict: bool = True,
    skip_blank: bool = False,
) -> Records:
    """Read all rows of a file; values that cannot be used are reported together.

    `columns` maps canonical names to the table's own, such as {"text": "review"}. An optional column may be missing
    from the file, unless `columns` names it and `strict` is set. With `separator`, a label may be a list, whose items
    are joined by it. With `skip_blank`, rows with a blank value are left out instead of refused.
    """
    resolved = resolve_columns(columns, [*required, *optional])
    files = _locate(path)
    files.check(resolved, required, [name for name in optional if strict and name in (columns or {})])

    def parse(name: str, value: Any, row: dict[str, Any]) -> str:
        return _parse_label(value, separator) if name == LABEL else parse_text(value)

    builder = RecordBuilder(files.texts.name, parse, required, optional, skip_blank, files.describe_cell(resolved))
    for line, row in files.rows(resolved):
        builder.add(line, row)
    return builder.build(lambda: no_rows(files.texts))


def stream_texts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, skipped: list[int] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, or of standard input for `-`, with their line numbers, in constant memory.

    A blank line of a plain text file is the text "", so that there can be one output per line; in a table it is an
    error. If `skipped` is a list, blank texts are left out and their lines appended to it.
    """
    texts = _stream(path, columns, skipped)
    return texts if skipped is None else _skip_blank(texts, skipped)


def _skip_blank(texts: Iterator[tuple[int, str]], skipped: list[int]) -> Iterator[tuple[int, str]]:
    for line, text in texts:
        if text:
            yield line, text
        else:
            skipped.append(line)


def _stream(
    path: str | Path, columns: Mapping[str, str] | None, skipped: list[int] | None
) -> Iterator[tuple[int, str]]:
    resolved = {TEXT: resolve_columns(columns, [TEXT, LABEL])[TEXT]}
    if str(path) == "-":
        stdin = cast(BufferedReader, sys.stdin.buffer)
        # read1 returns what is available, so that slow input from a pipe is processed at once
        chunks = iter(lambda: stdin.read1(formats.READ_BYTES), b"")
        return _stream_lines(DataFile(Path("-"), "-", PLAIN, ""), chunks)
    files = _locate(path)
    files.check(resolved, [TEXT], [])
    return _stream_lines(files.texts) if files.texts.format == PLAIN else _stream_table(files.texts, resolved, skipped)


def _stream_lines(file: DataFile, chunks: Iterator[bytes] | None = None) -> Iterator[tuple[int, str]]:
    line = 0
    for line, text in text_lines(file, chunks):
        yield line, "" if text.isspace() else text
    if not line:
        raise no_rows(file)


def _stream_table(file: DataFile, resolved: Mapping[str, str], skipped: list[int] | None) -> Iterator[tuple[int, str]]:
    line = 0
    for line, row in table_rows(file, list(resolved.values())):
        try:
            text = parse_text(row.get(resolved[TEXT]))
        except Unusable as error:
            if skipped is not None and isinstance(error, Blank):
                skipped.append(line)
                continue
            raise unusable_rows(file.name, [f"{describe_cell(file, resolved)(TEXT, line)} {error}"]) from None
        yield line, text
    if not line:
        raise no_rows(file)


def _parse_label(value: Any, separator: str | None) -> str:
    if isinstance(value, list):
        if separator is None:
            raise Unusable(f'is the list {preview(value)}, expected one label (lists need separator="|")')
        labels = [_parse_label(item, None) for item in value]
        if ambiguous := next((label for label in labels if separator in label), None):
            raise Unusable(f"is a list with {ambiguous!r}, which contains the separator {separator!r}")
        value = separator.join(labels)
    if separator is not None and (value is None or value == ""):
        return ""  # in multi-label data a row may have no label
    if isinstance(value, float) and math.isnan(value):  # how pandas writes a missing value
        raise Blank
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return sys.intern(parse_text(value, "a label").strip())  # few labels, many rows


# Files


@dataclass(frozen=True)
class LabelledFiles:
    """The file or files that hold the rows."""

    texts: DataFile  # a table, or a file with one text per line
    labels: DataFile | None = None  # a file with one label per line

    def rows(self, resolved: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each row, by canonical column names, with its line."""
        if self.texts.format != PLAIN:
            rows = table_rows(self.texts, list(resolved.values()))
            if all(name == column for name, column in resolved.items()):
                yield from rows
            else:
                for line, row in rows:
                    yield line, {name: row[column] for name, column in resolved.items() if column in row}
        elif self.labels is None or LABEL not in resolved:
            for line, text in text_lines(self.texts):
                yield line, {TEXT: text}
        else:
            for line, text, label in paired_lines(self.texts, self.labels, "label", "text"):
                yield line, {TEXT: text, LABEL: label}

    def check(self, resolved: Mapping[str, str], required: Sequence[str], named: Sequence[str]) -> None:
        """Refuse files that lack required columns, or columns that the user named."""
        if self.texts.format != PLAIN:
            check_columns(self.texts, resolved, [*required, *named])
            return
        missing = [name for name in required if name not in ((TEXT, LABEL) if self.labels else (TEXT,))]
        if missing == [LABEL]:
            expected = f"{_label_stem(self.texts.path)}{LABELS} beside it, or a table with labels"
            raise UserError(f"{self.texts.name}: no labels (expected {expected})")
        if missing:
            tables = f"expected a table, {' '.join(TABLES)}"
            raise UserError(f"{self.texts.name}: one text per line, so no {' and no '.join(missing)} ({tables})")

    def describe_cell(self, resolved: Mapping[str, str]) -> Any:
        if self.texts.format != PLAIN:
            return describe_cell(self.texts, resolved)
        files = {LABEL: self.labels or self.texts}
        return lambda name, line: f"{files.get(name, self.texts).name}:{line}: {name}"


def paired_lines(first: DataFile, second: DataFile, item: str, of: str) -> Iterator[tuple[int, str, str]]:
    """The lines of two parallel files; files of different lengths are an error."""
    for pair in zip_longest(text_lines(first), text_lines(second)):
        if None in pair:
            counts = [sum(1 for _ in text_lines(file)) for file in (first, second)]
            raise UserError(
                f"{first.name} has {counts[0]:,} lines, but {second.name} has {counts[1]:,}; "
                f"expected one {item} for each {of}"
            )
        (line, a), (_, b) = pair
        yield line, a, b


def is_table(path: str | Path) -> bool:
    """Whether a file is a table, by its name alone."""
    file = detect_format(Path(path))
    return file is not None and file.format in TABLES


def find_file(given: str | Path) -> tuple[Path, str]:
    """The file that a path, a URL, or the beginning of a file name stands for, and its name for messages."""
    path, name = catalog.resolve(str(given)) or Path(given).expanduser(), str(given)
    try:
        if not path.exists() or path.is_dir():
            path = _complete_name(path, name)
            name = str(Path(given).with_name(path.name))
    except OSError as error:  # such as a text instead of a file name, which is too long for one
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    return path, name


def _locate(given: str | Path) -> LabelledFiles:
    path, name = find_file(given)
    bare, compression = split_compression(path.name)
    if bare.endswith(LABELS):
        raise UserError(f"{name}: contains only labels; give the file with the texts")
    file = detect_format(path, name)
    if file and file.format in TABLES:
        return LabelledFiles(file)
    labels = _labels_file(path)
    if file is None and labels is None and not bare.endswith(PIECES):
        compressions = f"uncompressed or {' '.join(COMPRESSIONS)}"
        raise unknown_format(path, name, f"{' '.join(FORMATS)} {PIECES}, {compressions}, or a {LABELS} file beside it")
    texts = DataFile(path, name, PLAIN, compression)
    if labels is None:
        return LabelledFiles(texts)
    labels_name = str(Path(name).with_name(labels.name))
    return LabelledFiles(texts, DataFile(labels, labels_name, PLAIN, split_compression(labels.name)[1]))


def _label_stem(path: Path) -> str:
    """The common name of a file of texts and its file of labels."""
    bare = split_compression(path.name)[0]
    return bare.removesuffix(LAB_TEXTS) if bare.endswith(LAB_TEXTS) else bare.rpartition(".")[0]


def _labels_file(path: Path) -> Path | None:
    """The labels of a file of texts: for `X.review.spm`, `X.review.label` or else `X.label`, compressed or not."""
    stem = split_compression(path.name)[0].rpartition(".")[0]
    while stem:
        if labels := find_compressed(path.with_name(stem + LABELS)):
            return labels
        stem = stem.rpartition(".")[0]
    return None


def _complete_name(path: Path, name: str) -> Path:
    """The one file of texts whose name begins with that of `path`, which is not a file itself."""
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    matches = [file for file in siblings if file.name.startswith(f"{path.name}.") and file.is_file()]
    matches = [file for file in matches if not split_compression(file.name)[0].endswith(LABELS)]
    lab_texts = [file for file in matches if split_compression(file.name)[0] == path.name + LAB_TEXTS]
    if path.is_dir() and not lab_texts:
        raise UserError(f"{name}: expected a file, found a folder")
    matches = lab_texts or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{name}: no such file; give one of {', '.join(file.name for file in matches)}")
    if not path.parent.is_dir():
        raise UserError(f"{name}: no such file, and no folder {path.parent}")
    raise UserError(f"{name}: no such file{suggest_path(path.name, [file.name for file in siblings])}")
