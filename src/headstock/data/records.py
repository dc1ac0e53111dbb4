"""Reads labelled rows from tables and from pairs of files, and says which rows cannot be used and why."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, cast

from headstock.data import catalog, formats
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    TABLES,
    DataFile,
    csv_rows,
    detect_format,
    table_rows,
    text_lines,
)
from headstock.errors import UserError, did_you_mean, suggest_path

TEXT, TEXT_B, LABEL = "text", "text_b", "label"
TARGETS = (LABEL, "tags", "answers", "target")  # the columns in which people say what is true of a row
LABELS = ".label"  # what the file with one label a line is called, beside the file with one text a line
PIECES = ".spm"  # what a file of texts that are cut into SentencePiece pieces is called
LAB_TEXTS = ".review.spm"  # what the course lab calls the texts whose labels are in X.label
WORD = "▁"  # what a piece that starts a word begins with
NAMED_PROBLEMS = 5
HEADER_CHARACTERS, HEADER_WORDS, HEADER_ROWS = 60, 4, 200  # beyond these, a header is taken for data; rows to judge by


@dataclass(frozen=True)
class Records:
    """The rows of one file, column by column."""

    source: str  # the file, as errors call it
    lines: list[int]  # where each row starts in it (in parquet: which row it is), from 1
    columns: dict[str, list[Any]]  # by our own names, such as "text" and, where there is one, "label"
    locations: list[str] | None = None  # where each row is, in words, in a file whose lines say nothing
    skipped: int = 0  # blank rows of the file that were left out

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
        """Whether the rows say what is true of them."""
        return any(name in self.columns for name in TARGETS)

    @property
    def strata(self) -> list[str]:
        """Which group each row is of, where a fair sample should hold some of all."""
        return self.labels or [""] * len(self)

    @property
    def display_texts(self) -> list[str]:
        """What a person reads of each row: its text, also where that is already cut into pieces; of an answer's row
        the question, of a translation's the source."""
        columns = self.columns
        if TEXT_B in columns:
            return [f"{first} {second}" for first, second in zip(columns[TEXT], columns[TEXT_B], strict=True)]
        if TEXT in columns:
            return [_uncut(text) for text in columns[TEXT]]
        if "tokens" in columns:
            return [" ".join(words) for words in columns["tokens"]]
        return columns["source"] if "source" in columns else columns["question"]

    @property
    def documents(self) -> list[str]:
        """All the text there is in the rows, each once: what a language model can learn from."""
        every = [*self.display_texts, *self.columns.get("context", []), *self.columns.get("target", [])]
        return list(dict.fromkeys(every)) if "context" in self.columns else every

    def location(self, index: int) -> str:
        """Where a row is, as errors say it: `train.csv:17`."""
        return f"{self.source}: {self.locations[index]}" if self.locations else f"{self.source}:{self.lines[index]}"

    def select(self, indices: Iterable[int]) -> "Records":
        """Some of the rows, in the order asked for."""
        chosen = list(indices)
        columns = {name: [values[i] for i in chosen] for name, values in self.columns.items()}
        places = [self.locations[i] for i in chosen] if self.locations else None
        return Records(self.source, [self.lines[i] for i in chosen], columns, places)


def _uncut(text: str) -> str:
    return text.replace(" ", "").replace(WORD, " ").strip() if WORD in text else text


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
    """All rows of a file; those that cannot be used are reported together.

    A row in which a value is blank cannot be used; with `skip_blank` it is left out.

    `columns` says what a table calls our columns, such as {"text": "review"}. A column that is optional is left out
    where the file does not have it, unless `columns` names it and we `insist` on what it names. With `separator`, a
    label may be a list of labels, which are joined by it.
    """
    called = table_names(columns, [*required, *optional])
    layout = _located(path)
    layout.check(called, required, [name for name in optional if strict and name in (columns or {})])
    lines: list[int] = []
    values: dict[str, list[str]] = {name: [] for name in called}
    lacking: dict[str, list[int]] = {name: [] for name in called}  # the lines without the column
    problems: list[str] = []
    skipped = 0
    for line, row in layout.rows(called):
        found: dict[str, str] = {}
        wrong: dict[str, Unusable] = {}
        for name, column in called.items():
            if column in row:
                try:
                    found[name] = _label(row[column], separator) if name == LABEL else usable_text(row[column])
                except Unusable as why:
                    wrong[name] = why
        absent = [name for name in required if called[name] not in row]
        if skip_blank and (absent or any(isinstance(why, Blank) for why in wrong.values())):
            skipped += 1
            continue
        lines.append(line)
        problems += [layout.problem(name, called[name], line, why) for name, why in wrong.items()]
        for name, column in called.items():
            values[name].append(found.get(name, ""))
            if column not in row:
                lacking[name].append(line)
    if not lines:
        raise all_blank(layout.source.name, skipped) if skipped else layout.no_rows()
    for name, without in lacking.items():
        if name not in required and len(without) == len(lines):
            del values[name]
        else:
            problems += [layout.problem(name, called[name], line, "is not there") for line in without]
    if problems:
        raise refused(layout.source.name, problems)
    return Records(layout.source.name, lines, values, skipped=skipped)


def stream_texts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, skipped: list[int] | None = None
) -> Iterator[tuple[int, str]]:
    """The texts of a file, or of standard input for `-`, one by one with their lines, however many there are.

    A blank line of what is no table is the text "", so that there can be one answer a line; in a table it is refused.
    Where `skipped` is a list, both are left out and their lines are added to it.
    """
    if skipped is None:
        return _streamed(path, columns, None)
    return _without_blank(_streamed(path, columns, skipped), skipped)


def _without_blank(texts: Iterator[tuple[int, str]], skipped: list[int]) -> Iterator[tuple[int, str]]:
    for line, text in texts:
        if text:
            yield line, text
        else:
            skipped.append(line)


def _streamed(
    path: str | Path, columns: Mapping[str, str] | None, skipped: list[int] | None
) -> Iterator[tuple[int, str]]:
    called = {TEXT: table_names(columns, [TEXT, LABEL])[TEXT]}
    if str(path) == "-":
        stdin = cast(BufferedReader, sys.stdin.buffer)
        # read1 does not wait for a whole stretch, so that what comes slowly through a pipe is handed on at once
        stretches = iter(lambda: stdin.read1(formats.READ_BYTES), b"")
        return _plain_texts(Layout(DataFile(Path("-"), "-", PLAIN, "")), stretches)
    layout = _located(path)
    layout.check(called, [TEXT], [])
    return _plain_texts(layout) if layout.source.format == PLAIN else _table_texts(layout, called, skipped)


def _plain_texts(layout: "Layout", stretches: Iterator[bytes] | None = None) -> Iterator[tuple[int, str]]:
    line = 0
    for line, text in text_lines(layout.source, stretches):
        yield line, "" if text.isspace() else text
    if not line:
        raise layout.no_rows()


def _table_texts(layout: "Layout", called: Mapping[str, str], skipped: list[int] | None) -> Iterator[tuple[int, str]]:
    line, column = 0, called[TEXT]
    for line, row in layout.rows(called):
        try:
            text = usable_text(row.get(column))
        except Unusable as wrong:
            if skipped is not None and isinstance(wrong, Blank):
                skipped.append(line)
                continue
            raise refused(layout.source.name, [layout.problem(TEXT, column, line, wrong)]) from None
        yield line, text
    if not line:
        raise layout.no_rows()


# Columns


def parse_columns(text: str) -> dict[str, str]:
    """`text=review,label=stars` -> {"text": "review", "label": "stars"}."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = (piece.strip() for piece in part.partition("="))
        if not (equals and name and column):
            raise UserError(f"--columns {text}: wanted pairs such as text=review,label=stars, got {part.strip()!r}")
        if name in columns:
            raise UserError(f"--columns {text}: {name!r} is there twice")
        columns[name] = column
    return columns


def table_names(columns: Mapping[str, str] | None, known: Sequence[str]) -> dict[str, str]:
    """What a table calls each of our columns."""
    columns = columns or {}
    unknown = [f"unknown name {name!r}{did_you_mean(name, known)}" for name in columns if name not in known]
    if unknown:
        raise UserError(f"--columns: {'; '.join(unknown)} (the names are {', '.join(known)})")
    called = {name: columns.get(name, name) for name in known}
    for name, column in called.items():
        if other := next((other for other in called if other != name and called[other] == column), None):
            raise UserError(f"--columns: column {column!r} cannot be both; name both: {name}=NAME,{other}=NAME")
    return called


def _missing(source: DataFile, called: Mapping[str, str], missing: Sequence[str], there: list[str]) -> UserError:
    told = "\n  ".join(str(formats.no_column(source.name, called[name], there)) for name in missing)
    hint = f"; say which it is with --columns {','.join(f'{name}=NAME' for name in missing)}"
    if source.format in (".csv", ".tsv") and _is_data(source, there):
        delimiter = "," if source.format == ".csv" else "<tab>"
        hint += f"; or, as the first line looks like data, put a header above it, such as {delimiter.join(called)}"
    return UserError(told + hint)


def _is_data(source: DataFile, header: list[str]) -> bool:
    """Whether what stands where the header should looks like a row: long, blank or a number, or there again below."""
    for cell in header:
        words = len(cell.split())
        if not words or words > HEADER_WORDS or len(cell) > HEADER_CHARACTERS or cell.strip("+-.0123456789") == "":
            return True
    with suppress(UserError):  # a broken row further down is not what is to be said now
        rows = (row for _, row in islice(csv_rows(source), 1, HEADER_ROWS))
        return any(cell == value for row in rows for cell, value in zip(header, row, strict=True))
    return False


# Values


class Unusable(Exception):
    """What is wrong with a value, in words that follow the name of its column."""


class Blank(Unusable):
    """There is no value, or one of spaces only."""

    def __init__(self) -> None:
        super().__init__("is blank")


def usable_text(value: Any, wanted: str = "text") -> str:
    if isinstance(value, str):
        if not value or value.isspace():
            raise Blank
        if not formats.is_valid_unicode(value):
            raise Unusable("holds half of a surrogate pair, which is no character")
        return value
    if value is None:
        raise Blank
    raise Unusable(f"is {shown(value)}, wanted {wanted}")


def _label(value: Any, separator: str | None) -> str:
    if isinstance(value, list):
        if separator is None:
            raise Unusable(f'is the list {shown(value)}, wanted one label (several are read with separator="|")')
        labels = [_label(item, None) for item in value]
        if held := next((label for label in labels if separator in label), None):
            raise Unusable(f"is a list with {held!r}, which holds the separator {separator!r}")
        value = separator.join(labels)
    if separator is not None and (value is None or value == ""):
        return ""  # none of the classes, which is an answer where there may be several
    if isinstance(value, float) and math.isnan(value):  # how some programs write that there is none
        raise Blank
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return sys.intern(usable_text(value, "a label").strip())  # few labels, many rows


def shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= HEADER_CHARACTERS else text[:HEADER_CHARACTERS] + "..."


def all_blank(name: str, rows: int) -> UserError:
    return UserError(f"{name}: all its {rows:,} rows are blank, so none is left")


def refused(name: str, problems: list[str]) -> UserError:
    hint = "correct or remove the row"
    if any(problem.endswith(" is blank") for problem in problems):
        hint += ", or leave out blank ones with --skip-blank"
    if len(problems) == 1:
        return UserError(f"{problems[0]}; {hint}")
    more = [f"and {len(problems) - NAMED_PROBLEMS} more"] if len(problems) > NAMED_PROBLEMS else []
    told = [f"{name}: {len(problems)} values cannot be used; for each, {hint}:", *problems[:NAMED_PROBLEMS], *more]
    return UserError("\n  ".join(told))


# Files


@dataclass(frozen=True)
class Layout:
    """Which files hold the rows."""

    source: DataFile  # a table, or a file with one text a line
    labels: DataFile | None = None  # the file with one label a line, where there is one

    def rows(self, called: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each row with its line, by what the columns are called; those that are not there are left out."""
        if self.source.format != PLAIN:
            yield from table_rows(self.source, list(called.values()))
        elif self.labels is None or LABEL not in called:
            for line, text in text_lines(self.source):
                yield line, {called[TEXT]: text}
        else:
            for text_line, label_line in zip_longest(text_lines(self.source), text_lines(self.labels)):
                if text_line is None or label_line is None:
                    texts, labels = (sum(1 for _ in text_lines(source)) for source in (self.source, self.labels))
                    counts = f"{texts} lines, but {self.labels.name} has {labels}"
                    raise UserError(f"{self.source.name} has {counts}; wanted one label for each text")
                yield text_line[0], {called[TEXT]: text_line[1], called[LABEL]: label_line[1]}

    def check(self, called: Mapping[str, str], wanted: Sequence[str], named: Sequence[str]) -> None:
        """Refuse a table that has not the columns that are wanted or that the user named, and a file without labels."""
        if self.source.format == PLAIN:
            there = (TEXT, LABEL) if self.labels else (TEXT,)
            missing = [name for name in wanted if name not in there]
            if missing == [LABEL]:
                beside = _label_stem(self.source.path) + LABELS
                raise UserError(f"{self.source.name}: no labels (wanted {beside} beside it, or a table that has them)")
            if missing:
                tables = f"wanted a table, {' '.join(TABLES)}"
                raise UserError(f"{self.source.name}: one text a line, so no {' and no '.join(missing)} ({tables})")
        elif (columns := formats.column_names(self.source)) is not None:  # else: no rows, or rows that are bare strings
            needed = [*wanted, *named]
            if missing := [name for name in needed if called[name] not in columns]:
                raise _missing(self.source, called, missing, columns)
            if twice := [column for column in called.values() if columns.count(column) > 1]:
                raise UserError(f"{self.source.name}: more than one column is called {twice[0]!r}")

    def problem(self, name: str, column: str, line: int, what: object) -> str:
        if self.source.format == PLAIN:
            source = self.labels if self.labels and name == LABEL else self.source
            return f"{source.name}:{line}: {name} {what}"
        return f"{self.source.name}:{line}: {name}{f' (column {column!r})' if column != name else ''} {what}"

    def no_rows(self) -> UserError:
        header = self.source.format in (".csv", ".tsv") and formats.column_names(self.source)
        return UserError(f"{self.source.name}: no rows ({'only a header' if header else 'it is empty'})")


def is_table(given: str | Path) -> bool:
    """Whether a file is a table, by its name alone."""
    source = detect_format(Path(given))
    return source is not None and source.format in TABLES


def find_file(given: str | Path) -> tuple[Path, str]:
    """The file that a path, or the beginning of one, stands for, and what errors call it."""
    path, name = catalog.resolve(str(given)) or Path(given).expanduser(), str(given)
    try:
        if not path.exists() or path.is_dir():
            path = _of_prefix(path, name)
            name = str(Path(given).with_name(path.name))
    except OSError as wrong:  # such as a text given in place of a name, which is too long for one
        raise UserError(f"{name}: cannot be read ({wrong.strerror})") from None
    return path, name


def _located(given: str | Path) -> Layout:
    """The files that a path stands for: a file, or what the names of two files begin with."""
    path, name = find_file(given)
    bare, packing = bare_name(path.name)
    if bare.endswith(LABELS):
        raise UserError(f"{name}: the labels alone; give the file that holds the texts")
    source = detect_format(path, name)
    if source and source.format in TABLES:
        return Layout(source)
    labels = _labels_of(path)
    if source is None and labels is None and not bare.endswith(PIECES):
        wanted = f"{' '.join(FORMATS)} {PIECES}, plain or {' '.join(COMPRESSIONS)}, or a file beside its {LABELS} file"
        raise UserError(f"{name}: cannot tell what is in a {path.suffix or 'nameless'} file (wanted {wanted})")
    if labels is None:
        return Layout(DataFile(path, name, PLAIN, packing))
    beside = str(Path(name).with_name(labels.name))
    return Layout(DataFile(path, name, PLAIN, packing), DataFile(labels, beside, PLAIN, bare_name(labels.name)[1]))


def bare_name(name: str) -> tuple[str, str]:
    """A file's name without its packing, and the packing."""
    packing = next((packing for packing in COMPRESSIONS if name.lower().endswith(packing)), "")
    return name[: len(name) - len(packing)], packing


def _label_stem(path: Path) -> str:
    """What a file of texts and its file of labels are both called, where the second is still to be made."""
    bare = bare_name(path.name)[0]
    return bare.removesuffix(LAB_TEXTS) if bare.endswith(LAB_TEXTS) else bare.rpartition(".")[0]


def _labels_of(path: Path) -> Path | None:
    """The file of labels of a file of texts: for `X.review.spm` it is `X.review.label` or else `X.label`."""
    stem = bare_name(path.name)[0].rpartition(".")[0]
    while stem:
        for packing in ("", *COMPRESSIONS):
            if (labels := path.with_name(stem + LABELS + packing)).is_file():
                return labels
        stem = stem.rpartition(".")[0]
    return None


def _of_prefix(path: Path, name: str) -> Path:
    """The one file of texts whose name begins with `path`, of which nothing has just that name."""
    beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    found = [file for file in beside if file.name.startswith(f"{path.name}.") and file.is_file()]
    found = [file for file in found if not bare_name(file.name)[0].endswith(LABELS)]
    likely = [file for file in found if bare_name(file.name)[0] == path.name + LAB_TEXTS]
    if path.is_dir() and not likely:
        raise UserError(f"{name}: a folder, wanted a file")
    likely = likely or found
    if len(likely) == 1:
        return likely[0]
    if likely:
        raise UserError(f"{name}: no such file, but {', '.join(file.name for file in likely)}; give one of them")
    if not path.parent.is_dir():
        raise UserError(f"{name}: no such file, nor a folder {path.parent}")
    raise UserError(f"{name}: no such file{suggest_path(path.name, [file.name for file in beside])}")
