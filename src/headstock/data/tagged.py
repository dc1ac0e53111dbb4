"""Reads sentences whose words have tags: CoNLL, CoNLL-U, and tables with the columns tokens and tags."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from headstock.data.formats import PLAIN, TABLES, DataFile, detect_format, table_rows, text_lines
from headstock.data.records import (
    Blank,
    Layout,
    Records,
    Unusable,
    all_blank,
    bare_name,
    find_file,
    refused,
    shown,
    table_names,
    usable_text,
)
from headstock.errors import UserError

TOKENS, TAGS = "tokens", "tags"
CONLL = (".conll", ".conllu", PLAIN, ".bio", ".iob")
DOCUMENT = "-DOCSTART-"  # the line by which CoNLL-2003 begins a document
UNIVERSAL_COLUMNS, UNIVERSAL_WORD, UNIVERSAL_TAG = 10, 2, 4  # CoNLL-U: ID FORM LEMMA UPOS ...
UNKNOWN = "_"  # what CoNLL-U writes where nothing is known
SAMPLE_LINES = 500


def read_tagged(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    strict: bool = True,
    skip_blank: bool = False,
) -> Records:
    """The sentences of a file as columns "tokens" and, where there are any, "tags": lists of words and of tags.

    In CoNLL the word is the first and the tag the last column, in CoNLL-U FORM and UPOS; `columns` may say otherwise by
    numbers from 1, such as {"tokens": "1", "tags": "3"}. In a table it says what the two columns are called. Tags that
    `columns` names must be there if we `insist`. With `skip_blank`, rows of a table that are blank are left out.
    """
    where, name = find_file(path)
    source = detect_format(where, name)
    if source and source.format in TABLES and not _is_conll_table(source, columns):
        return _read_table(source, columns, strict, skip_blank)
    bare, packing = bare_name(where.name)
    source = DataFile(where, name, PLAIN, packing)
    if not bare.lower().endswith(CONLL) and not _looks_like_conll(source):
        wanted = f"{' '.join((*CONLL, *TABLES))}, or one word a line with its tag and a blank line between sentences"
        raise UserError(f"{name}: cannot tell what is in a {Path(bare).suffix or 'nameless'} file (wanted {wanted})")
    return _read_conll(source, columns, strict)


# Tables


def _is_conll_table(source: DataFile, columns: Mapping[str, str] | None) -> bool:
    """Whether a .tsv is no table with a header but CoNLL, which is often called so."""
    if source.format != ".tsv":
        return False
    first = next((line for _, line in text_lines(source) if line.strip()), "")
    return (columns or {}).get(TOKENS, TOKENS) not in first.split("\t") and _looks_like_conll(source)


def _read_table(source: DataFile, columns: Mapping[str, str] | None, insist: bool, skip_blank: bool) -> Records:
    called, layout = table_names(columns, [TOKENS, TAGS]), Layout(source)
    layout.check(called, [TOKENS], [TAGS] if insist and TAGS in (columns or {}) else [])
    lines: list[int] = []
    sentences: list[list[str]] = []
    tags: list[list[str] | None] = []
    problems: list[str] = []
    skipped = 0
    for line, row in table_rows(source, list(called.values())):
        lines.append(line)
        try:
            sentences.append(_words(row.get(called[TOKENS])))
        except Unusable as wrong:
            if skip_blank and isinstance(wrong, Blank):
                lines.pop()
                skipped += 1
                continue
            problems.append(layout.problem(TOKENS, called[TOKENS], line, wrong))
            continue
        try:
            tags.append(_tags(row.get(called[TAGS]), len(sentences[-1])))
        except Unusable as wrong:
            problems.append(layout.problem(TAGS, called[TAGS], line, wrong))
    if not lines:
        raise all_blank(source.name, skipped) if skipped else layout.no_rows()
    values: dict[str, list[Any]] = {TOKENS: sentences}
    if any(of_one is not None for of_one in tags):
        values[TAGS] = tags
        if not problems:
            without = (line for line, of_one in zip(lines, tags, strict=True) if of_one is None)
            problems = [
                layout.problem(TAGS, called[TAGS], line, "is not there, but other rows have it") for line in without
            ]
    if problems:
        raise refused(source.name, problems)
    return Records(source.name, lines, values, skipped=skipped)


def _words(value: Any) -> list[str]:
    """The words in a cell: a list, or in .csv and .tsv a text with spaces between them."""
    if isinstance(value, str):
        value = value.split()
    elif not isinstance(value, list):
        raise Blank if value is None else Unusable(f"is {shown(value)}, wanted a list of words")
    if not value:
        raise Blank
    for number, word in enumerate(value, 1):
        try:
            usable_text(word)
        except Unusable as wrong:
            raise Unusable(f"is a list in which word {number} {wrong}") from None
    return value


def _tags(value: Any, words: int) -> list[str] | None:
    """The tags in a cell, None where there are none; numbers are taken for tags as well."""
    if value is None or value == "":
        return None
    if isinstance(value, list):
        value = [json.dumps(tag) if isinstance(tag, (bool, int)) else tag for tag in value]
    tags = [sys.intern(tag.strip()) for tag in _words(value)]
    if len(tags) != words:
        raise Unusable(f"has {len(tags)} tags for {words} words")
    return tags


# CoNLL


@dataclass
class _Form:
    """How the lines of a CoNLL file are to be read; settled by the first of them that holds a word."""

    separator: str  # a tab, or a space for any number of spaces and tabs
    width: int  # columns
    word: int  # which column, from 0
    tag: int | None  # which column, from 0; None where there are only words
    universal: bool  # whether it is CoNLL-U, where the first column numbers the words


@dataclass
class _Sentences:
    lines: list[int] = field(default_factory=list)  # where each starts
    words: list[list[str]] = field(default_factory=list)
    tags: list[list[str]] = field(default_factory=list)


def _cells(line: str, separator: str) -> list[str]:
    if separator == "\t":
        return [cell.strip() for cell in line.split("\t")]
    return [cell for cell in line.replace("\t", " ").split(" ") if cell]  # other white space may be part of a word


def _separator(line: str) -> str:
    return "\t" if "\t" in line.strip() else " "


def _is_comment(line: str, form: _Form | None, inside: bool) -> bool:
    """Whether a line that begins with # is a comment; it may also be the word # or a #word."""
    if not line.startswith("#"):
        return False
    if form is None:
        return "\t" not in line
    as_wide = len(_cells(line, form.separator)) == form.width
    # with spaces, `# id = 3` may be as wide as a word's line, but it stands before the first word of a sentence
    return not (as_wide and (inside or (form.separator == "\t" and form.width > 1)))


def _read_conll(source: DataFile, columns: Mapping[str, str] | None, insist: bool) -> Records:
    numbers = _numbers(columns)
    form: _Form | None = None
    found = _Sentences()
    problems: list[str] = []
    inside = False  # whether the line before holds a word of the same sentence
    for line, text in text_lines(source):
        if not text or text.isspace() or text.startswith(DOCUMENT):
            inside = False
            continue
        if _is_comment(text, form, inside):
            continue
        form = form or _form(source, line, text, numbers, insist)
        cells = _cells(text, form.separator)
        if form.width == 1 and all(cell.isdigit() for cell in cells):
            cells = [" ".join(cells)]  # a number such as 1 000 is one word
        if len(cells) != form.width:
            problems.append(f"{source.name}:{line}: {_of_columns(len(cells))} where the lines before have {form.width}")
            continue
        if form.universal and not cells[0].isdigit():  # 3-4 stands for words that follow, 5.1 for one that is unsaid
            continue
        problems += _take(found, source, line, cells, form, first=not inside)
        inside = True
    if problems:
        raise refused(source.name, problems)
    if form is None or not found.lines:
        raise UserError(f"{source.name}: no words (wanted one a line, and a blank line between sentences)")
    values: dict[str, list[Any]] = {TOKENS: found.words}
    if form.tag is not None and not _all_unknown(source, found, form):
        values[TAGS] = found.tags
    return Records(source.name, found.lines, values)


def _take(found: _Sentences, source: DataFile, line: int, cells: list[str], form: _Form, *, first: bool) -> list[str]:
    """Add the word of a line, and say what is wrong with it."""
    if first:
        found.lines.append(line)
        found.words.append([])
        found.tags.append([])
    word, tag = cells[form.word], cells[form.tag] if form.tag is not None else ""
    found.words[-1].append(word)
    found.tags[-1].append(sys.intern(tag))
    problems = [] if word else [f"{source.name}:{line}: the word (column {form.word + 1}) is blank"]
    if form.tag is not None and not tag:
        problems.append(f"{source.name}:{line}: the tag of {word!r} (column {form.tag + 1}) is blank")
    return problems


def _form(source: DataFile, line: int, text: str, numbers: dict[str, int], insist: bool) -> _Form:
    """What the first line that holds a word tells of all."""
    separator = _separator(text)
    cells = _cells(text, separator)
    universal = len(cells) == UNIVERSAL_COLUMNS and separator == "\t" and cells[0].split("-")[0].split(".")[0].isdigit()
    usual = (UNIVERSAL_WORD, UNIVERSAL_TAG) if universal else (1, len(cells))
    word, tag = numbers.get(TOKENS, usual[0]), numbers.get(TAGS, usual[1])
    if TAGS in numbers and not insist and tag > len(cells):
        tag = word
    for name, number in ((TOKENS, word), (TAGS, tag)):
        if number > len(cells):
            raise UserError(f"{source.name}:{line}: --columns {name}={number}, but here are {_of_columns(len(cells))}")
    return _Form(separator, len(cells), word - 1, tag - 1 if tag != word else None, universal)


def _numbers(columns: Mapping[str, str] | None) -> dict[str, int]:
    table_names(columns, [TOKENS, TAGS])  # refuses what is no name of ours
    numbers: dict[str, int] = {}
    for name, number in (columns or {}).items():
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            hint = f"the columns of a CoNLL file have numbers from 1, such as {TOKENS}=1,{TAGS}=4"
            raise UserError(f"--columns {name}={number}: {hint}")
        numbers[name] = int(number)
    return numbers


def _all_unknown(source: DataFile, found: _Sentences, form: _Form) -> bool:
    """Whether a CoNLL-U file has words only; one that has tags for some of them is refused."""
    if not form.universal:
        return False
    without = [line for line, tags in zip(found.lines, found.tags, strict=True) if UNKNOWN in tags]
    if len(without) == len(found.lines) and all(set(tags) == {UNKNOWN} for tags in found.tags):
        return True
    if without:
        raise refused(source.name, [f"{source.name}:{line}: a word without a tag (_)" for line in without])
    return False


def _of_columns(number: int) -> str:
    return "1 column" if number == 1 else f"{number} columns"


def _looks_like_conll(source: DataFile) -> bool:
    """Whether the first lines are equally wide, of two columns or more, and sentences have blank lines between them."""
    sample = list(islice(_sample(source), SAMPLE_LINES))
    if not sample:
        return False
    separator = _separator(sample[0]) if sample[0] else " "
    widths = {len(_cells(line, separator)) for line in sample if line}
    return len(widths) == 1 and widths != {1} and (len(sample) < SAMPLE_LINES or "" in sample)


def _sample(source: DataFile) -> Iterator[str]:
    """Lines without comments, "" for blank ones."""
    begun = False
    for _, line in text_lines(source):
        if line.startswith(("# ", DOCUMENT)):
            continue
        begun = begun or bool(line.strip())
        if begun:
            yield line if line.strip() else ""
