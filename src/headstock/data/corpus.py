"""Reads a corpus of any mix of files as one stream of documents, and says how it cut them."""

import glob
import hashlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from headstock.data import catalog
from headstock.data.formats import (
    COMPRESSIONS,
    FORMATS,
    PLAIN,
    SAMPLE_LINES,
    DataFile,
    column_names,
    column_values,
    detect_format,
    detect_language_file,
    no_column,
    read_chunks,
    text_chunks,
    text_lines,
)
from headstock.errors import UserError, WorkError, did_you_mean, suggest_path
from headstock.io import cache_folder, remove_stale, sha256

Cut = Literal["auto", "line", "block", "file"]
STDIN = "stdin"  # the folder of the cache where standard input is kept
READING = 1  # goes up when the same files would give other documents
CHUNK_CHARACTERS = 1 << 20
LONGEST_DOCUMENT = 1 << 27  # characters; a longer file or block becomes several documents, so that memory is bounded
MANY_FILES, SMALL_BYTES, SMALL_LINES = 10, 20_000, 50
BLOCK_LINES = (1.5, 30)  # the mean length of the runs of lines that are taken for blocks
# the combining marks that are accents on any script's letters; the vowel signs of Indic scripts are not accents
ACCENTS = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")


@dataclass(frozen=True)
class Document:
    text: str  # NFC, not empty, no white space at its ends
    source: str  # the file, as it was given
    line: int  # the line (in parquet: the row) where it starts, from 1


@dataclass
class Chunk:
    """Documents that follow each other in one file; handing them over together is far faster than one by one."""

    file: int  # which of the corpus's files
    texts: list[str]
    lines: list[int]


@dataclass(frozen=True)
class Corpus:
    """Files and how they are read. Iterating streams the documents; it can be done again and again."""

    paths: tuple[str, ...]  # files, folders and globs
    documents: Cut = "auto"
    column: str = "text"
    lowercase: bool = False
    strip_accents: bool = False

    def __iter__(self) -> Iterator[Document]:
        names = self.names()
        for chunk in self.chunks():
            for text, line in zip(chunk.texts, chunk.lines, strict=True):
                yield Document(text, names[chunk.file], line)

    def files(self) -> list[Path]:
        return [source.path for source in resolve_paths(self.paths)]

    def names(self) -> list[str]:
        """What errors and reports call each of the files."""
        return [source.name for source in resolve_paths(self.paths)]

    def chunks(self) -> Iterator[Chunk]:
        """All documents, in the order of the files, many at a time."""
        found = resolve_paths(self.paths)
        cut = self._cut(found)[0]
        any_documents = False
        for file, source in enumerate(found):
            for texts, lines in self._chunks(source, cut):
                if texts:
                    any_documents = True
                    yield Chunk(file, texts, lines)
        if not any_documents:
            raise UserError(f"{', '.join(self.paths)}: no documents: nothing but white space there")

    def fingerprint(self) -> str:
        """Changes with the content of the files and with how they are read, not with where they are."""
        found = resolve_paths(self.paths)
        cut = self._cut(found)[0] if any(source.format == PLAIN for source in found) else None
        column = self.column if any(source.format != PLAIN for source in found) else None
        content = [[source.format, source.compression, sha256(source.path)] for source in found]
        what = [READING, content, cut, column, self.lowercase, self.strip_accents]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def describe(self) -> str:
        """One sentence that says how documents are cut, and why."""
        found = resolve_paths(self.paths)
        plain = [source for source in found if source.format == PLAIN]
        parts = []
        if plain:
            cut, why = self._cut(found)
            parts.append({"line": "lines", "block": "blocks between blank lines", "file": "whole files"}[cut] + why)
        if len(plain) < len(found):
            parts.append(f"the rows of column {self.column!r}")
        return f"documents are {' and '.join(parts)}"

    def _cut(self, found: list[DataFile]) -> tuple[str, str]:
        if self.documents != "auto":
            return self.documents, " (as asked)"
        plain = [source for source in found if source.format == PLAIN]
        return guess_cut(plain) if plain else ("line", "")

    def _chunks(self, source: DataFile, cut: str) -> Iterator[tuple[list[str], list[int]]]:
        if source.format != PLAIN:
            pairs = ((line, self._clean(text)) for line, text in column_values(source, self.column))
            yield from _gathered(pairs)
        elif cut == "line":
            for first, text in text_chunks(source, cut_long=True):
                stripped = [line.strip() for line in self._clean(text).split("\n")]
                yield [text for text in stripped if text], [n for n, text in enumerate(stripped, first) if text]
        else:
            cleaned = ((first, self._clean(text)) for first, text in text_chunks(source, cut_long=True))
            yield from _gathered(_blocks(cleaned) if cut == "block" else _whole(cleaned))

    def _clean(self, text: str) -> str:
        """One form for each text. A chunk of lines can be done at once: a newline composes with nothing."""
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
    documents: Cut = "auto",
    column: str = "text",
    lowercase: bool = False,
    strip_accents: bool = False,
    cache: Path | None = None,
) -> Corpus:
    """A corpus of which everything has been checked that can be without reading all of it.

    `-` is standard input, which is kept in the cache, so that it can be read again.
    """
    given = [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]
    if not given:
        raise UserError("no corpus: give files, folders, globs, or - for standard input")
    if "" in given:  # which as a path would be the current folder
        raise UserError("an empty path in the corpus: give files, folders, globs, or - for standard input")
    if documents not in get_args(Cut):
        raise UserError(
            f"documents: must be one of {', '.join(get_args(Cut))}, not {documents!r}"
            f"{did_you_mean(str(documents), get_args(Cut))}"
        )
    if "-" in given:
        given[given.index("-")] = str(_spooled(cache or cache_folder()))
    corpus = Corpus(tuple(given), documents, column, lowercase, strip_accents)
    problems = []
    for source in resolve_paths(corpus.paths):
        try:
            _check(source, column)
        except UserError as wrong:
            problems.append(str(wrong))
    if problems:
        many = f"{len(problems)} files cannot be read:\n  "
        raise UserError((many if len(problems) > 1 else "") + "\n  ".join(problems))
    return corpus


def _check(source: DataFile, column: str) -> None:
    if not next(read_chunks(source), b""):
        raise UserError(f"{source.name}: empty")
    if source.format == PLAIN:
        next(text_chunks(source, cut_long=True), None)
    elif (there := column_names(source)) is not None and column not in there:
        raise no_column(source.name, column, there)


# Files


def resolve_paths(paths: Iterable[str]) -> list[DataFile]:
    """The files that paths, folders and globs stand for, each once; several problems are reported together."""
    found: dict[Path, DataFile] = {}
    problems = []
    for path in paths:
        try:
            for source in _expanded(path):
                found.setdefault(source.path.resolve(), source)
        except UserError as wrong:
            problems.append(str(wrong))
    if problems:
        many = f"{len(problems)} paths are wrong:\n  "
        raise UserError((many if len(problems) > 1 else "") + "\n  ".join(problems))
    return list(found.values())


def _expanded(given: str) -> list[DataFile]:
    path = catalog.resolve(given) or Path(given).expanduser()
    readable = f"{' '.join(FORMATS)}, plain or {' '.join(COMPRESSIONS)}"
    if path.is_dir():
        inside = _readable(_below(path))
        if not inside:
            raise UserError(f"{given}: no readable files in this folder (wanted {readable})")
        return inside
    if path.exists():
        source = detect_format(path, "-" if _is_spooled(path) else given) or detect_language_file(path, given)
        if source is None:
            raise UserError(f"{given}: cannot tell what is in a {path.suffix or 'nameless'} file (wanted {readable})")
        return [source]
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        inside = _readable(file for match in matches for file in (_below(match) if match.is_dir() else [match]))
        if not inside:
            raise UserError(f"{given}: the pattern matches {'no readable files' if matches else 'nothing'}")
        return inside
    raise UserError(f"{given}: no such file or folder{_nearest(path)}")


def _below(folder: Path) -> list[Path]:
    """All files below a folder, sorted, but hidden ones."""
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _readable(files: Iterable[Path]) -> list[DataFile]:
    """Those we can read; an empty file nobody named holds no documents, so it is passed over."""
    found = [detect_format(file) for file in files]
    return [source for source in found if source and source.path.is_file() and source.path.stat().st_size]


def _nearest(path: Path) -> str:
    """A hint for the first part of the path that is not there."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    beside = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    return suggest_path(missing.name, beside)


def _spooled(cache: Path) -> Path:
    """Standard input as a file named by its content."""
    folder = cache / STDIN
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    beside, digest, first = folder / f".stdin.{os.getpid()}.partial", hashlib.sha256(), b""
    try:
        with beside.open("wb") as file:
            while data := sys.stdin.buffer.read(1 << 20):
                first = first or data
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not first:
            raise UserError("-: standard input is empty")
        path = folder / f"{digest.hexdigest()}{'.jsonl' if _is_json(first) else PLAIN}"
        os.replace(beside, path)
    except OSError as wrong:
        raise WorkError(f"{folder}: standard input could not be kept ({wrong.strerror})") from None
    finally:
        beside.unlink(missing_ok=True)
    return path


def _is_spooled(path: Path) -> bool:
    return path.parent.name == STDIN and len(path.stem) == hashlib.sha256().digest_size * 2


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data.lstrip().partition(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


# Documents


def guess_cut(plain: list[DataFile]) -> tuple[str, str]:
    """How the text files are best cut, by their first lines, and the words that say so."""
    if all(catalog.is_corpus(source.path) for source in plain):
        return "block", " (as the catalog writes them)"
    sampled, runs, gaps = 0, [0], 0
    for source in plain:
        if sum(runs) >= SAMPLE_LINES:
            break
        sampled += 1
        blank = True
        for _, line in islice(text_lines(source, cut_long=True), SAMPLE_LINES - sum(runs)):
            if line.strip():
                if blank:
                    gaps += runs[-1] > 0
                    runs.append(0)
                runs[-1] += 1
                blank = False
            else:
                blank = True
        runs.append(0)  # the end of a file is not a blank line
    lengths = [run for run in runs if run]
    mean = sum(lengths) / max(1, len(lengths))
    names = plain[0].name if len(plain) == 1 else f"{plain[0].name} and {len(plain) - 1} more"
    if gaps and BLOCK_LINES[0] <= mean <= BLOCK_LINES[1]:
        return "block", f" (guessed from {names})"
    size = sum(source.path.stat().st_size for source in plain) / len(plain)
    if len(plain) >= MANY_FILES and size <= SMALL_BYTES and sum(lengths) / sampled <= SMALL_LINES:
        return "file", f" (guessed from {len(plain)} small files)"
    return "line", f" (guessed from {names})"


def _blocks(chunks: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    start, size = 1, 0
    for first, text in chunks:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()  # the chunk's own end, not a blank line
        for number, line in enumerate(lines, first):
            blank = not line or line.isspace()
            if block and (blank or size > LONGEST_DOCUMENT):
                yield start, "\n".join(block)
                block, size = [], 0
            if not blank:
                if not block:
                    start = number
                block.append(line)
                size += len(line)
    if block:
        yield start, "\n".join(block)


def _whole(chunks: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    parts: list[str] = []
    start, size = 1, 0
    for first, text in chunks:
        if not parts:
            if not text or text.isspace():
                continue
            start = first + text.count("\n", 0, len(text) - len(text.lstrip()))
        parts.append(text)
        size += len(text)
        if size > LONGEST_DOCUMENT:
            yield start, "".join(parts)
            parts, size = [], 0
    if parts:
        yield start, "".join(parts)


def _gathered(pairs: Iterator[tuple[int, str]]) -> Iterator[tuple[list[str], list[int]]]:
    texts: list[str] = []
    lines: list[int] = []
    size = 0
    for line, text in pairs:
        if text := text.strip():
            texts.append(text)
            lines.append(line)
            size += len(text)
        if size >= CHUNK_CHARACTERS:
            yield texts, lines
            texts, lines, size = [], [], 0
    yield texts, lines
