"""Reads files, folders, globs and URLs of any mix of formats as one stream of documents."""

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Literal, get_args

from headstock.cache_use import mark_used
from headstock.data import catalog, urls
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    SAMPLE_LINES,
    DataFile,
    expand_path,
    read_chunks,
    text_chunks,
    text_lines,
    unknown_format,
)
from headstock.data.saved_inputs import MEMORY, STDIN, is_saved, save_input
from headstock.data.tables import column_names, column_values, no_column
from headstock.errors import UserError, did_you_mean
from headstock.io import cache_folder, fingerprint, sha256

DocumentUnit = Literal["auto", "line", "block", "file"]
LANGUAGE_SUFFIX = re.compile(r"\.[a-z]{2}([-_][a-z]{2})?")  # of plain text in one language, such as corpus.fr
READER_VERSION = 1  # incremented when the same files would give other documents
CHUNK_CHARACTERS = 1 << 20
MAX_DOCUMENT_CHARACTERS = 1 << 27  # a longer file or block becomes several documents, which bounds memory
MANY_FILES, SMALL_FILE_BYTES, SMALL_FILE_LINES = 10, 20_000, 50
BLOCK_LINES = (1.5, 30)  # mean length of paragraphs that are taken for documents
TOKENIZER_SAMPLE_BYTES = 100_000_000  # more text hardly changes a tokenizer
# combining marks that are accents in any script; the vowel signs of Indic scripts are not among them
ACCENTS = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")


@dataclass(frozen=True)
class Document:
    text: str  # NFC, stripped, not empty
    source: str  # the file, as the user named it
    line: int  # where it starts (in parquet: the row number), from 1


@dataclass
class DocumentChunk:
    """Consecutive documents of one file; chunks are far faster to hand over than single documents."""

    file: int  # index among the corpus's files
    texts: list[str]
    lines: list[int]


@dataclass(frozen=True)
class Corpus:
    """Files and how to read them. Iterating streams the documents, any number of times."""

    paths: tuple[str, ...]  # files, folders, globs and URLs
    documents: DocumentUnit = "auto"
    column: str = "text"
    lowercase: bool = False
    strip_accents: bool = False

    def __iter__(self) -> Iterator[Document]:
        names = self.names()
        for chunk in self.chunks():
            for text, line in zip(chunk.texts, chunk.lines, strict=True):
                yield Document(text, names[chunk.file], line)

    @cached_property
    def data_files(self) -> list[DataFile]:
        """Found once: folders are listed and URLs downloaded at the first use, and stay as they were then."""
        return resolve_paths(self.paths)

    def files(self) -> list[Path]:
        return [file.path for file in self.data_files]

    def names(self) -> list[str]:
        """The name of each file in messages and reports."""
        return [file.name for file in self.data_files]

    def chunks(self) -> Iterator[DocumentChunk]:
        """All documents, in the order of the files."""
        unit, is_empty = self.unit, True
        for index, file in enumerate(self.data_files):
            for chunk in self.file_chunks(file, index, unit):
                is_empty = False
                yield chunk
        if is_empty:
            raise self.is_empty()

    def file_chunks(self, file: DataFile, index: int, unit: str) -> Iterator[DocumentChunk]:
        """The documents of one file."""
        for texts, lines in self._file_chunks(file, unit):
            if texts:
                yield DocumentChunk(index, texts, lines)

    def is_empty(self) -> UserError:
        return UserError(f"{', '.join(self.paths)}: no documents, only white space")

    @property
    def unit(self) -> str:
        """What a document is in a text file: line, block or file."""
        return self._unit(self.data_files)[0]

    def fingerprint(self) -> str:
        """Changes with the content of the files and how they are read, not with where they are."""
        files = self.data_files
        unit = self._unit(files)[0] if any(file.format == PLAIN for file in files) else None
        column = self.column if any(file.format != PLAIN for file in files) else None
        content = [[file.format, file.compression, sha256(file.path)] for file in files]
        return fingerprint([READER_VERSION, content, unit, column, self.lowercase, self.strip_accents])

    def describe(self) -> str:
        """A sentence that says what a document is, and why."""
        files = self.data_files
        plain = [file for file in files if file.format == PLAIN]
        parts = []
        if plain:
            unit, reason = self._unit(files)
            parts.append({"line": "lines", "block": "blocks between blank lines", "file": "whole files"}[unit] + reason)
        if len(plain) < len(files):
            parts.append(f"the rows of column {self.column!r}")
        return f"documents are {' and '.join(parts)}"

    def sample_texts(self) -> Iterator[str]:
        """The texts to train a tokenizer on: of a very large corpus only every n-th."""
        size = sum(file.stat().st_size for file in self.files())
        step = max(1, -(-size // TOKENIZER_SAMPLE_BYTES))
        return (document.text for i, document in enumerate(self) if i % step == 0)

    def first_texts(self, count: int) -> list[str]:
        return [document.text for document in islice(self, count)]

    def _unit(self, files: list[DataFile]) -> tuple[str, str]:
        """How text files are split into documents, and the reason in words."""
        if self.documents != "auto":
            return self.documents, " (as requested)"
        plain = [file for file in files if file.format == PLAIN]
        return guess_unit(plain) if plain else ("line", "")

    def _file_chunks(self, file: DataFile, unit: str) -> Iterator[tuple[list[str], list[int]]]:
        if file.format != PLAIN:
            yield from _group((line, self._normalize(text)) for line, text in column_values(file, self.column))
        elif unit == "line":
            for first, text in text_chunks(file, split_long=True):
                stripped = [line.strip() for line in self._normalize(text).split("\n")]
                yield [text for text in stripped if text], [n for n, text in enumerate(stripped, first) if text]
        else:
            chunks = ((first, self._normalize(text)) for first, text in text_chunks(file, split_long=True))
            yield from _group(_join_lines(chunks, split_at_blank=unit == "block"))

    def _normalize(self, text: str) -> str:
        """Normalize whole chunks at once, which is safe because a newline composes with nothing."""
        if text.isascii():
            return text.lower() if self.lowercase else text
        if self.strip_accents:
            text = ACCENTS.sub("", unicodedata.normalize("NFD", text))
        if self.lowercase:
            text = text.lower()
        return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def read_corpus(
    paths: str | Path | Iterable[str | Path],
    *,
    documents: DocumentUnit = "auto",
    column: str = "text",
    lowercase: bool = False,
    strip_accents: bool = False,
    cache: Path | None = None,
) -> Corpus:
    """A corpus, checked as far as possible without reading all of it.

    `-` is standard input, which is copied to the cache so that it can be read again.
    """
    names = [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]
    names = [urls.redact(name) for name in names]
    if not names:
        raise UserError("no corpus: give files, folders, globs, URLs, or - for standard input")
    if "" in names:  # as a path this would be the current folder
        raise UserError("an empty path in the corpus: give files, folders, globs, URLs, or - for standard input")
    if documents not in get_args(DocumentUnit):
        units = get_args(DocumentUnit)
        hint = did_you_mean(str(documents), units)
        raise UserError(f"documents: must be one of {', '.join(units)}, not {documents!r}{hint}")
    if "-" in names:
        names[names.index("-")] = str(_save_stdin(cache or cache_folder()))
    corpus = Corpus(tuple(names), documents, column, lowercase, strip_accents)
    problems = []
    for file in corpus.data_files:
        try:
            _check(file, column)
        except UserError as error:
            problems.append(str(error))
    _raise_together(problems, "files cannot be read")
    return corpus


def _check(file: DataFile, column: str) -> None:
    if not next(read_chunks(file), b""):
        raise UserError(f"{file.name}: empty")
    if file.format == PLAIN:
        next(text_chunks(file, split_long=True), None)
    elif (columns := column_names(file)) is not None and column not in columns:
        raise no_column(file.name, column, columns)


def _raise_together(problems: list[str], summary: str) -> None:
    if problems:
        header = f"{len(problems)} {summary}:\n  " if len(problems) > 1 else ""
        raise UserError(header + "\n  ".join(problems))


# Files


def resolve_paths(paths: Iterable[str]) -> list[DataFile]:
    """The files that paths, folders, globs and URLs stand for, each once; several problems are reported together."""
    files: dict[Path, DataFile] = {}
    problems = []
    for path in paths:
        try:
            for file in _expand(path):
                files.setdefault(file.path.resolve(), file)
        except UserError as error:
            problems.append(str(error))
    _raise_together(problems, "invalid paths")
    return list(files.values())


def _expand(path: str) -> list[DataFile]:
    readable = f"{' '.join(FORMATS)}, uncompressed or {' '.join(COMPRESSIONS)}"
    files = []
    for file in expand_path(path, FORMATS, readable):
        if LANGUAGE_SUFFIX.fullmatch(file.format):
            file = replace(file, format=PLAIN)
        elif file.format not in FORMATS:
            raise unknown_format(file, readable)
        if is_saved(file.path, STDIN, MEMORY):
            mark_used(file.path)
        files.append(replace(file, name="-") if is_saved(file.path, STDIN) else file)
    return files


def _save_stdin(cache: Path) -> Path:
    """Copy standard input to a file named by its hash."""

    def suffix(first: bytes) -> str:
        if not first:
            raise UserError("-: standard input is empty")
        return ".jsonl" if _is_json(first) else PLAIN

    return save_input(iter(lambda: sys.stdin.buffer.read(1 << 20), b""), cache / STDIN, suffix)


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data.lstrip().partition(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


# Documents


def guess_unit(plain: list[DataFile]) -> tuple[str, str]:
    """How to split text files into documents, by their first lines, and the reason in words."""
    if all(catalog.is_corpus(file.path) for file in plain):
        return "block", " (as the catalog writes them)"
    sampled, lengths, gaps = 0, list[int](), 0  # lengths of the runs of lines between blank lines
    for file in plain:
        if sum(lengths) >= SAMPLE_LINES:
            break
        sampled += 1
        lines = islice(text_lines(file, split_long=True), SAMPLE_LINES - sum(lengths))
        groups = groupby(lines, key=lambda numbered: not numbered[1].strip())
        runs = [sum(1 for _ in group) for is_blank, group in groups if not is_blank]
        gaps += max(0, len(runs) - 1)
        lengths += runs
    mean = sum(lengths) / max(1, len(lengths))
    names = plain[0].name if len(plain) == 1 else f"{plain[0].name} and {len(plain) - 1} more"
    if gaps and BLOCK_LINES[0] <= mean <= BLOCK_LINES[1]:
        return "block", f" (guessed from {names})"
    size = sum(file.path.stat().st_size for file in plain) / len(plain)
    if len(plain) >= MANY_FILES and size <= SMALL_FILE_BYTES and sum(lengths) / sampled <= SMALL_FILE_LINES:
        return "file", f" (guessed from {len(plain)} small files)"
    return "line", f" (guessed from {names})"


def _join_lines(chunks: Iterator[tuple[int, str]], *, split_at_blank: bool) -> Iterator[tuple[int, str]]:
    """The text of a file as one document, or split at blank lines; a document that is too long becomes several."""
    document: list[str] = []
    start, size = 1, 0
    for first, text in chunks:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()  # the end of the chunk, not a blank line
        for number, line in enumerate(lines, first):
            is_blank = not line or line.isspace()
            if document and ((is_blank and split_at_blank) or size > MAX_DOCUMENT_CHARACTERS):
                yield start, "\n".join(document)
                document, size = [], 0
            if document or not is_blank:
                start = start if document else number
                document.append(line)
                size += len(line) + 1
    if document:
        yield start, "\n".join(document)


def _group(documents: Iterator[tuple[int, str]]) -> Iterator[tuple[list[str], list[int]]]:
    """Group documents into chunks of about CHUNK_CHARACTERS; blank ones are dropped."""
    texts: list[str] = []
    lines: list[int] = []
    size = 0
    for line, text in documents:
        if text := text.strip():
            texts.append(text)
            lines.append(line)
            size += len(text)
        if size >= CHUNK_CHARACTERS:
            yield texts, lines
            texts, lines, size = [], [], 0
    yield texts, lines
