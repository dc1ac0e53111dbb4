"""Rows of labelled data, and what its readers share: files, columns, cell values, and the reporting of problems."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from headstock.data import catalog, urls
from headstock.data.formats import DataFile, detect_format, is_valid_unicode, split_compression, text_lines
from headstock.data.tables import column_names, csv_rows, no_column, table_rows
from headstock.errors import UserError, did_you_mean, suggest_path

TEXT, TEXT_B, LABEL = "text", "text_b", "label"
LABELS = ".label"  # suffix of a file with one label per line
LAB_TEXTS = ".review.spm"  # the course lab's texts, whose labels are in X.label
TARGETS = (LABEL, "tags", "answers", "target")  # the columns that hold labels
SENTENCEPIECE_SPACE = "▁"
PIECES = re.compile(rf"\s*{SENTENCEPIECE_SPACE}[^\u2580-\u259f]")  # not a chart of block elements, such as ▁▃▅
MAX_PROBLEMS = 5  # listed in one error
PREVIEW_CHARACTERS = 60
MAX_HEADER_WORDS, HEADER_SAMPLE_ROWS = 4, 200  # a longer cell is data, not a column name; rows compared with the header


@dataclass(frozen=True)
class Records:
    """The rows of one labelled file, by column."""

    source: str  # the file, as error messages name it
    lines: list[int]  # where each row starts (in parquet: the row number), from 1
    columns: dict[str, list[Any]]  # by canonical name, such as "text" and, if present, "label"
    locations: list[str] | None = None  # of each row, in files where line numbers are meaningless
    skipped: int = 0  # blank rows that were left out

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def texts(self) -> list[str]:
        return self.columns[TEXT]

    @property
    def labels(self) -> list[str] | None:
        return self.columns.get(LABEL)

    @property
    def has_labels(self) -> bool:
        return any(name in self.columns for name in TARGETS)

    @property
    def strata(self) -> list[str]:
        """The group of each row, for stratified sampling."""
        return self.labels or [""] * len(self)

    @property
    def display_texts(self) -> list[str]:
        """The readable text of each row: detokenized text, joined pair or words, question, or translation source."""
        columns = self.columns
        if TEXT_B in columns:
            return [f"{first} {second}" for first, second in zip(columns[TEXT], columns[TEXT_B], strict=True)]
        if TEXT in columns:
            return [_detokenize(text) for text in columns[TEXT]]
        if "tokens" in columns:
            return [" ".join(words) for words in columns["tokens"]]
        return columns["source"] if "source" in columns else columns["question"]

    def fingerprint(self) -> str:
        """Of the texts and labels, in any order."""
        names = sorted(self.columns)
        rows = sorted(json.dumps(row) for row in zip(*(self.columns[name] for name in names), strict=True))
        return hashlib.sha256("\n".join([*names, *rows]).encode()).hexdigest()

    @property
    def documents(self) -> list[str]:
        """All text in the rows, for pretraining on it; each context only once."""
        texts = [*self.display_texts, *self.columns.get("context", []), *self.columns.get("target", [])]
        return list(dict.fromkeys(texts)) if "context" in self.columns else texts

    def location(self, index: int) -> str:
        """Where a row is, such as `train.csv:17`."""
        return f"{self.source}: {self.locations[index]}" if self.locations else f"{self.source}:{self.lines[index]}"

    def select(self, indices: Iterable[int]) -> "Records":
        """Some of the rows, in the given order."""
        rows = list(indices)
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        locations = [self.locations[i] for i in rows] if self.locations else None
        return Records(self.source, [self.lines[i] for i in rows], columns, locations)


def join_records(first: Records, second: Records) -> Records:
    """The rows of two files of the same columns, one after the other."""
    if first.columns.keys() != second.columns.keys():
        names = [", ".join(sorted(records.columns)) for records in (first, second)]
        raise UserError(f"{second.source}: has the columns {names[1]}, but {first.source} has {names[0]}")
    columns = {name: [*first.columns[name], *second.columns[name]] for name in first.columns}
    locations = [records.location(row) for records in (first, second) for row in range(len(records))]
    skipped = first.skipped + second.skipped
    return Records(f"{first.source} and {second.source}", [*first.lines, *second.lines], columns, locations, skipped)


def _detokenize(text: str) -> str:
    """Join SentencePiece pieces, which begin with a marked space, to plain text; other text is returned unchanged."""
    if not PIECES.match(text):
        return text
    return text.replace(" ", "").replace(SENTENCEPIECE_SPACE, " ").strip()


# Files


def find_file(name: str | Path) -> DataFile:
    """The file that a path, a URL, or the beginning of a file name stands for."""
    name = urls.redact(str(name))
    path = catalog.resolve(name) or Path(name).expanduser()
    if urls.is_url(name):
        return detect_format(path, name)
    try:
        if not path.exists() or path.is_dir():
            path = _complete_name(path, name)
            name = str(Path(name).with_name(path.name))
    except OSError as error:  # such as a text instead of a file name, which is too long for one
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    return detect_format(path, name)


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


def paired_lines(files: Mapping[str, DataFile], expected: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The lines of two parallel files as rows, by column; files of different lengths are an error."""
    (first, second), (file, other) = files, files.values()
    for pair in zip_longest(text_lines(file), text_lines(other)):
        if None in pair:
            counts = [sum(1 for _ in text_lines(each)) for each in (file, other)]
            raise UserError(
                f"{file.name} has {counts[0]:,} lines, but {other.name} has {counts[1]:,}; expected {expected}"
            )
        (line, text), (_, other_text) = pair
        yield line, {first: text, second: other_text}


# Column names


def parse_columns(text: str) -> dict[str, str]:
    """`text=review,label=stars` -> {"text": "review", "label": "stars"}."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = (piece.strip() for piece in part.partition("="))
        if not (equals and name and column):
            raise UserError(f"--columns {text}: expected pairs such as text=review,label=stars, found {part.strip()!r}")
        if name in columns:
            raise UserError(f"--columns {text}: {name!r} is given twice")
        columns[name] = column
    return columns


def resolve_columns(columns: Mapping[str, str] | None, names: Sequence[str]) -> dict[str, str]:
    """The file's own name of each column in `names`: as `columns` says, otherwise the same name."""
    columns = columns or {}
    unknown = [f"unknown name {name!r}{did_you_mean(name, names)}" for name in columns if name not in names]
    if unknown:
        raise UserError(f"--columns: {'; '.join(unknown)} (the names are {', '.join(names)})")
    resolved = {name: columns.get(name, name) for name in names}
    for name, column in resolved.items():
        if other := next((other for other in resolved if other != name and resolved[other] == column), None):
            raise UserError(f"--columns: column {column!r} cannot be both; name both: {name}=NAME,{other}=NAME")
    return resolved


def check_columns(file: DataFile, resolved: Mapping[str, str], required: Sequence[str]) -> None:
    """Refuse a table that lacks a required column or has one of the columns twice."""
    columns = column_names(file)
    if columns is None:  # no rows, or rows that are plain strings
        return
    if missing := [name for name in required if resolved[name] not in columns]:
        problems = "\n  ".join(str(no_column(file.name, resolved[name], columns)) for name in missing)
        hint = f"; name the right column with --columns {','.join(f'{name}=NAME' for name in missing)}"
        if file.format in (".csv", ".tsv") and _looks_like_data(file, columns):
            header = ("," if file.format == ".csv" else "<tab>").join(resolved)
            hint += f"; or, as the first line looks like data, insert a header line such as {header}"
        raise UserError(problems + hint)
    if repeated := [column for column in resolved.values() if columns.count(column) > 1]:
        raise UserError(f"{file.name}: more than one column is called {repeated[0]!r}")


def _looks_like_data(file: DataFile, header: list[str]) -> bool:
    """Whether a header looks like a data row: a long, blank or numeric cell, or a value that recurs below it."""
    for cell in header:
        words = len(cell.split())
        if not words or words > MAX_HEADER_WORDS or len(cell) > PREVIEW_CHARACTERS or not cell.strip("+-.0123456789"):
            return True
    with suppress(UserError):  # a malformed row below is not the problem to report now
        rows = (row for _, row in islice(csv_rows(file), 1, HEADER_SAMPLE_ROWS))
        return any(cell == value for row in rows for cell, value in zip(header, row, strict=True))
    return False


# Values


class Unusable(Exception):
    """Why a value cannot be used, as a phrase that follows the name of its column."""


class Blank(Unusable):
    """The value is missing or only white space."""

    def __init__(self) -> None:
        super().__init__("is blank")


# Converts the value of a cell, given the converted values of the columns before it, or raises `Unusable`.
Parser = Callable[[Any, dict[str, Any]], Any]


def parse_text(value: Any, row: Any = None, *, expected: str = "text") -> str:
    if value is None:
        raise Blank
    if not isinstance(value, str):
        raise Unusable(f"is {preview(value)}, expected {expected}")
    if not value or value.isspace():
        raise Blank
    if not (value.isascii() or is_valid_unicode(value)):
        raise Unusable("contains half of a surrogate pair, which is not a character")
    return value


def preview(value: Any) -> str:
    """A short JSON rendering of a value, for error messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= PREVIEW_CHARACTERS else text[:PREVIEW_CHARACTERS] + "..."


# Rows


@dataclass
class RecordBuilder:
    """Collects the rows of a file and everything wrong with them, then builds `Records` or raises one error.

    A column that no row has is left out if it is optional; one that only some rows have is a problem of the others.
    """

    file: DataFile
    parsers: Mapping[str, Parser]  # by column
    optional: Sequence[str] = ()
    skip_blank: bool = False  # leave out rows with a blank value
    own_names: Mapping[str, str] = field(default_factory=dict)  # the table's own names of the columns
    files: Mapping[str, DataFile] = field(default_factory=dict)  # of columns that are in another file
    missing_hint: str = ""
    lines: list[int] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in self.parsers}
        self.missing: dict[str, list[tuple[int, str | None]]] = {name: [] for name in self.parsers}

    def add(self, line: int, row: Mapping[str, Any], location: str | None = None) -> None:
        """Add a row, by canonical column names. `location` replaces the line number in messages."""
        values: dict[str, Any] = {}
        errors: list[tuple[str, Unusable]] | None = None  # created only if needed, since most rows are fine
        for name, parse in self.parsers.items():
            if name in row:
                try:
                    values[name] = parse(row[name], values)
                except Unusable as error:
                    errors = [*(errors or []), (name, error)]
        if len(values) < len(self.parsers):
            missing = [name for name in self.parsers if name not in row]
            is_blank = any(isinstance(error, Blank) for _, error in errors or [])
            if self.skip_blank and (is_blank or not set(missing) <= set(self.optional)):
                self.skipped += 1
                return
            self.problems += [f"{self.location_of(name, line, location)} {error}" for name, error in errors or []]
            for name in missing:
                self.missing[name].append((line, location))
        self.lines.append(line)
        if location is not None:
            self.locations.append(location)
        for name, column in self.columns.items():
            column.append(values.get(name))

    def location_of(self, name: str, line: int, location: str | None) -> str:
        source = self.files.get(name, self.file).name
        return describe_cell(f"{source}: {location}" if location else f"{source}:{line}", name, self.own_names)

    def build(self) -> Records:
        if not self.lines and not self.problems:
            if self.skipped:
                raise UserError(f"{self.file.name}: all {self.skipped:,} rows are blank")
            raise no_rows(self.file)
        problems = list(self.problems)
        for name, missing in self.missing.items():
            if name in self.optional and len(missing) == len(self.lines):
                del self.columns[name]
            else:
                in_others = " (other rows have it)" if len(missing) < len(self.lines) else ""
                problems += [
                    f"{self.location_of(name, *cell)} is missing{in_others}{self.missing_hint}" for cell in missing
                ]
        if problems:
            raise unusable_rows(self.file.name, problems)
        return Records(self.file.name, self.lines, self.columns, self.locations or None, self.skipped)


def describe_cell(location: str, name: str, own_names: Mapping[str, str]) -> str:
    """How messages name a cell, such as `train.csv:3: text (column 'review')`."""
    own_name = own_names.get(name, name)
    return f"{location}: {name}" + (f" (column {own_name!r})" if own_name != name else "")


def read_table(
    file: DataFile,
    parsers: Mapping[str, Parser],
    *,
    columns: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    strict: bool = True,
    skip_blank: bool = False,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    missing_hint: str = "",
) -> Records:
    """Read the columns of a table that have a parser; values that cannot be used are reported together.

    `columns` maps canonical names to the table's own, such as {"text": "review"}. An optional column may be missing,
    unless `columns` names it and `strict` is set. `prepare` converts each row, by canonical names, before it is parsed.
    """
    resolved = resolve_columns(columns, list(parsers))
    strictly_required = columns or {} if strict else {}
    check_columns(file, resolved, [name for name in parsers if name not in optional or name in strictly_required])
    builder = RecordBuilder(file, parsers, optional, skip_blank, resolved, missing_hint=missing_hint)
    is_renamed = any(name != column for name, column in resolved.items())
    for line, row in table_rows(file, list(resolved.values())):
        if is_renamed:
            row = {name: row[column] for name, column in resolved.items() if column in row}
        builder.add(line, prepare(row) if prepare else row)
    return builder.build()


def unusable_rows(source: str, problems: list[str]) -> UserError:
    hint = "correct or remove the row"
    if any(problem.endswith(" is blank") for problem in problems):
        hint += ", or skip blank rows with --skip-blank"
    if len(problems) == 1:
        return UserError(f"{problems[0]}; {hint}")
    lines = [f"{source}: {len(problems)} values cannot be used; for each, {hint}:", *problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return UserError("\n  ".join(lines))


def no_rows(file: DataFile) -> UserError:
    header = file.format in (".csv", ".tsv") and column_names(file)
    return UserError(f"{file.name}: no rows ({'only a header' if header else 'the file is empty'})")
