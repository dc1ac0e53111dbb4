"""Reads sentences with one tag per word: CoNLL, CoNLL-U, and tables with the columns tokens and tags."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any

from headstock.data.formats import PLAIN, TABLES, DataFile, text_lines, unknown_format
from headstock.data.records import (
    Blank,
    Records,
    Unusable,
    find_file,
    parse_text,
    preview,
    read_table,
    resolve_columns,
    unusable_rows,
)
from headstock.errors import UserError

TOKENS, TAGS = "tokens", "tags"
CONLL = (".conll", ".conllu", PLAIN, ".bio", ".iob")
DOCUMENT_START = "-DOCSTART-"  # begins a document in CoNLL-2003
CONLLU_COLUMNS, CONLLU_WORD, CONLLU_TAG = 10, 2, 4  # ID FORM LEMMA UPOS ...
UNSPECIFIED = "_"  # an empty CoNLL-U field
SAMPLE_LINES = 500


def read_tagged(
    path: str | Path, *, columns: Mapping[str, str] | None = None, strict: bool = True, skip_blank: bool = False
) -> Records:
    """Read the columns "tokens" and, if present, "tags": lists of words and of tags.

    In CoNLL the word is the first column and the tag the last; in CoNLL-U they are FORM and UPOS. `columns` may give
    other column numbers, from 1, such as {"tokens": "1", "tags": "3"}; in a table it gives the names of the columns.
    With `strict`, tags that `columns` names must exist. With `skip_blank`, rows of a table without words are left out.
    """
    file = find_file(path)
    if file.is_table and not _is_conll_tsv(file, columns):
        parsers = {TOKENS: _parse_words, TAGS: _parse_tags}
        return read_table(
            file,
            parsers,
            columns=columns,
            optional=(TAGS,),
            strict=strict,
            skip_blank=skip_blank,
            prepare=_drop_empty_tags,
        )
    if file.format not in CONLL and not _looks_like_conll(file):
        layout = "one word and its tag per line with a blank line between sentences"
        raise unknown_format(file, f"{' '.join((*CONLL, *TABLES))}, or {layout}")
    return _read_conll(file, columns, strict)


# Tables


def _is_conll_tsv(file: DataFile, columns: Mapping[str, str] | None) -> bool:
    """Whether a .tsv is CoNLL rather than a table with a header."""
    if file.format != ".tsv":
        return False
    first = next((line for _, line in text_lines(file) if line.strip()), "")
    return (columns or {}).get(TOKENS, TOKENS) not in first.split("\t") and _looks_like_conll(file)


def _drop_empty_tags(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose tags are null or "" is one without tags."""
    return row if row.get(TAGS) not in (None, "") else {name: value for name, value in row.items() if name != TAGS}


def _parse_words(value: Any, row: Any = None) -> list[str]:
    """The words in a cell: a list, or a text with spaces between them."""
    if isinstance(value, str):
        value = value.split()
    elif value is not None and not isinstance(value, list):
        raise Unusable(f"is {preview(value)}, expected a list of words")
    if not value:
        raise Blank
    for number, word in enumerate(value, 1):
        try:
            parse_text(word)
        except Unusable as error:
            raise Unusable(f"is a list in which word {number} {error}") from None
    return value


def _parse_tags(value: Any, row: dict[str, Any]) -> list[str]:
    """The tags in a cell, one for each word; integers become strings."""
    if isinstance(value, list):
        value = [json.dumps(tag) if isinstance(tag, (bool, int)) else tag for tag in value]
    tags = [sys.intern(tag.strip()) for tag in _parse_words(value)]
    if TOKENS in row and len(tags) != len(row[TOKENS]):
        raise Unusable(f"has {len(tags)} tags for {len(row[TOKENS])} words")
    return tags


# CoNLL


@dataclass
class _ConllLayout:
    """The columns of a CoNLL file, determined by its first word line."""

    delimiter: str  # a tab, or a space for any run of spaces and tabs
    width: int  # number of columns
    word: int  # column index
    tag: int | None  # column index; None if there are only words
    is_conllu: bool  # then the first column numbers the words


def _read_conll(file: DataFile, columns: Mapping[str, str] | None, strict: bool) -> Records:
    numbers = _column_numbers(columns)
    layout: _ConllLayout | None = None
    lines: list[int] = []
    words: list[list[str]] = []
    tags: list[list[str]] = []
    problems: list[str] = []
    in_sentence = False
    for line, text in text_lines(file):
        if not text or text.isspace() or text.startswith(DOCUMENT_START):
            in_sentence = False
            continue
        if _is_comment(text, layout, in_sentence):
            continue
        layout = layout or _detect_layout(file, line, text, numbers, strict)
        cells = _cells(text, layout.delimiter)
        if layout.width == 1 and all(cell.isdigit() for cell in cells):
            cells = [" ".join(cells)]  # a number such as 1 000 is one word
        if len(cells) != layout.width:
            problems.append(f"{file.name}:{line}: expected {_count(layout.width)} as above, found {len(cells)}")
            continue
        if layout.is_conllu and not cells[0].isdigit():  # 3-4 is a multiword token, 5.1 an empty node
            continue
        if not in_sentence:
            lines.append(line)
            words.append([])
            tags.append([])
        in_sentence = True
        word, tag = cells[layout.word], cells[layout.tag] if layout.tag is not None else ""
        words[-1].append(word)
        tags[-1].append(sys.intern(tag))
        if not word:
            problems.append(f"{file.name}:{line}: the word (column {layout.word + 1}) is blank")
        if layout.tag is not None and not tag:
            problems.append(f"{file.name}:{line}: the tag of {word!r} (column {layout.tag + 1}) is blank")
    if problems:
        raise unusable_rows(file.name, problems)
    if layout is None or not lines:
        raise UserError(f"{file.name}: no words (expected one per line, and a blank line between sentences)")
    values: dict[str, list[Any]] = {TOKENS: words}
    if layout.tag is not None and not (layout.is_conllu and _all_unspecified(file, lines, tags)):
        values[TAGS] = tags
    return Records(file.name, lines, values)


def _detect_layout(file: DataFile, line: int, text: str, numbers: dict[str, int], strict: bool) -> _ConllLayout:
    delimiter = _delimiter(text)
    cells = _cells(text, delimiter)
    is_conllu = len(cells) == CONLLU_COLUMNS and delimiter == "\t" and cells[0].split("-")[0].split(".")[0].isdigit()
    default_word, default_tag = (CONLLU_WORD, CONLLU_TAG) if is_conllu else (1, len(cells))
    word, tag = numbers.get(TOKENS, default_word), numbers.get(TAGS, default_tag)
    if TAGS in numbers and not strict and tag > len(cells):
        tag = word
    for name, number in ((TOKENS, word), (TAGS, tag)):
        if number > len(cells):
            raise UserError(f"{file.name}:{line}: --columns {name}={number}, but the line has {_count(len(cells))}")
    return _ConllLayout(delimiter, len(cells), word - 1, tag - 1 if tag != word else None, is_conllu)


def _column_numbers(columns: Mapping[str, str] | None) -> dict[str, int]:
    resolve_columns(columns, [TOKENS, TAGS])  # rejects other names
    for name, number in (columns or {}).items():
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            hint = f"the columns of a CoNLL file have numbers from 1, such as {TOKENS}=1,{TAGS}=4"
            raise UserError(f"--columns {name}={number}: {hint}")
    return {name: int(number) for name, number in (columns or {}).items()}


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == "\t":
        return [cell.strip() for cell in line.split("\t")]
    return [cell for cell in line.replace("\t", " ").split(" ") if cell]  # a word may contain other white space


def _delimiter(line: str) -> str:
    return "\t" if "\t" in line.strip() else " "


def _count(columns: int) -> str:
    return "1 column" if columns == 1 else f"{columns} columns"


def _is_comment(line: str, layout: _ConllLayout | None, in_sentence: bool) -> bool:
    """Whether a line that starts with # is a comment, not the word # or a #word."""
    if not line.startswith("#"):
        return False
    if layout is None:
        return "\t" not in line
    is_full_width = len(_cells(line, layout.delimiter)) == layout.width
    # With spaces, `# id = 3` can be as wide as a word line, but it precedes the first word of a sentence.
    return not (is_full_width and (in_sentence or (layout.delimiter == "\t" and layout.width > 1)))


def _all_unspecified(file: DataFile, lines: list[int], tags: list[list[str]]) -> bool:
    """Whether a CoNLL-U file has no tags at all; one with tags for some of its words is refused."""
    untagged = [line for line, sentence in zip(lines, tags, strict=True) if UNSPECIFIED in sentence]
    if all(set(sentence) == {UNSPECIFIED} for sentence in tags):
        return True
    if untagged:
        raise unusable_rows(file.name, [f"{file.name}:{line}: a word without a tag (_)" for line in untagged])
    return False


def _looks_like_conll(file: DataFile) -> bool:
    """Whether the first lines have the same number of columns, at least two, and blank lines between sentences."""
    lines = (line for _, line in text_lines(file) if not line.startswith(("# ", DOCUMENT_START)))
    sample = list(islice(dropwhile(lambda line: not line.strip(), lines), SAMPLE_LINES))
    if not sample:
        return False
    delimiter = _delimiter(sample[0])
    widths = {len(_cells(line, delimiter)) for line in sample if line.strip()}
    has_blank = any(not line.strip() for line in sample)
    return len(widths) == 1 and widths != {1} and (len(sample) < SAMPLE_LINES or has_blank)
