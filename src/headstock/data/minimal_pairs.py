"""Reads minimal pairs: BLiMP's tables, and Winograd schemas with each candidate substituted."""

import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headstock.data.formats import READ_BYTES, DataFile, check_expansion, expand_path, is_valid_unicode
from headstock.data.tables import json_rows, no_column
from headstock.data.winograd import Schema, parse_collection
from headstock.errors import UserError

GOOD, BAD = "sentence_good", "sentence_bad"
GROUPS = ("UID", "linguistics_term", "field")  # columns by which scores are grouped
TARS = (".tar", ".tgz", ".txz", ".tbz2")  # a .tar may also be compressed
EXPECTED = f".jsonl with {GOOD} and {BAD}, compressed or not, a .tar of them, or Winograd schemas in .xml"


@dataclass(frozen=True)
class MinimalPair:
    """An acceptable and an unacceptable text that differ little."""

    good: str
    bad: str
    location: str
    groups: dict[str, str] = field(default_factory=dict)
    continuation: tuple[int, int] | None = None  # where the text after the candidate starts in each, if known


def read_minimal_pairs(paths: Sequence[str | Path], *, rows: int | None = None) -> list[MinimalPair]:
    """All pairs in files, folders, globs and tars; at most `rows` of each file, evenly spaced."""
    if rows is not None and rows < 1:
        raise UserError(f"--rows {rows}: must be 1 or more")
    if not paths:
        raise UserError(f"no minimal pairs: give their files ({EXPECTED})")
    pairs: list[MinimalPair] = []
    for path in paths:
        for file in expand_path(str(path), (*TARS, ".jsonl", ".xml"), EXPECTED):
            for table in _read_file(file):
                pairs += spread(table, rows)
    return pairs


def spread(pairs: list[MinimalPair], limit: int | None) -> list[MinimalPair]:
    """At most `limit` pairs, evenly spaced."""
    if limit is None or len(pairs) <= limit:
        return pairs
    return [pairs[i * len(pairs) // limit] for i in range(limit)]


# Files


def _read_file(file: DataFile) -> Iterator[list[MinimalPair]]:
    if file.format in TARS:
        yield from _read_tar(file)
    elif file.format == ".jsonl":
        yield _read_table(file)
    elif file.format == ".xml" and not file.compression:
        yield [schema_pair(schema) for schema in parse_collection(file.path.read_bytes(), file.name)]
    else:
        raise UserError(f"{file.name}: cannot tell the format by its name (expected {EXPECTED})")


def _read_tar(file: DataFile) -> Iterator[list[MinimalPair]]:
    """The tables in a tar, streamed: nothing is written to disk, so member names cannot do harm."""
    has_tables = False
    try:
        with tarfile.open(file.path, "r|*") as tar:
            for member in tar:
                check_expansion(file.name, file.path.stat().st_size, member.offset_data + member.size)
                base = Path(member.name).name.lower()
                if not member.isfile() or not base.endswith(".jsonl") or base.startswith("."):
                    continue
                stream = tar.extractfile(member)
                assert stream is not None
                has_tables = True
                chunks = iter(partial(stream.read, READ_BYTES), b"")
                yield _read_table(DataFile(file.path, f"{file.name}/{member.name}", ".jsonl", ""), chunks)
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise UserError(f"{file.name}: the tar is truncated or damaged ({error}); download it again") from None
    if not has_tables:
        raise UserError(f"{file.name}: contains no .jsonl file (expected {EXPECTED})")


def schema_pair(schema: Schema) -> MinimalPair:
    """A schema of two candidates with either substituted; the text with the correct one is the good one."""
    if len(schema.candidates) != 2 or schema.correct is None:
        raise UserError(f"{schema.location}: a minimal pair needs two candidates and the correct one")
    good, bad = schema.correct, 1 - schema.correct
    (good_text, good_end), (bad_text, bad_end) = schema.substituted(good), schema.substituted(bad)
    return MinimalPair(good_text, bad_text, schema.location, continuation=(good_end, bad_end))


# BLiMP's tables


def _read_table(file: DataFile, chunks: Iterator[bytes] | None = None) -> list[MinimalPair]:
    pairs = []
    for line, row in json_rows(file, chunks):
        location = f"{file.name}:{line}"
        if not isinstance(row, dict):
            raise UserError(f"{location}: expected an object with {GOOD} and {BAD}, found {type(row).__name__}")
        groups = {name: str(row[name]) for name in GROUPS if row.get(name) not in (None, "")}
        pairs.append(MinimalPair(_sentence(row, GOOD, location), _sentence(row, BAD, location), location, groups))
    if not pairs:
        raise UserError(f"{file.name}: no rows (the file is empty)")
    return pairs


def _sentence(row: dict[str, Any], column: str, location: str) -> str:
    if column not in row:
        raise no_column(location, column, list(row))
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{location}: {column} is {json.dumps(text, ensure_ascii=False)[:40]}, expected a sentence")
    if not is_valid_unicode(text):
        raise UserError(f"{location}: {column} contains half of a surrogate pair, which is not a character")
    return text
