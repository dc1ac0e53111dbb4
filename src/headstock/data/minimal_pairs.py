"""Reads minimal pairs: BLiMP's tables, and Winograd schemas with each candidate substituted."""

import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

from headstock.data.formats import READ_BYTES, DataFile, expand_path, is_valid_unicode
from headstock.data.tables import json_rows, no_column
from headstock.errors import UserError

GOOD, BAD = "sentence_good", "sentence_bad"
GROUPS = ("UID", "linguistics_term", "field")  # columns by which scores are grouped
TARS = (".tar", ".tgz", ".txz", ".tbz2")  # a .tar may also be compressed
EXPECTED = f".jsonl with {GOOD} and {BAD}, compressed or not, a .tar of them, or Winograd schemas in .xml"
POSSESSIVE_PRONOUNS = ("his", "their", "its", "my", "your", "our")
# After the object pronoun `her`, unlike after the possessive, a sentence ends or continues with one of these.
AFTER_OBJECT = re.compile(
    r"(?:an?|the|to|that|and|but|or|so|for|with|from|in|on|at|of|by|as|if|because|when|while)\b", re.I
)
# A candidate that begins with one of these is not a name, so it is not capitalized inside a sentence.
DETERMINER = re.compile(r"(?:an?|the|his|her|their|its|my|your|our|this|that|these|those|some|all|one)\b", re.I)


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
        yield _read_schemas(file.path.read_bytes(), file.name)
    else:
        raise UserError(f"{file.name}: cannot tell the format by its name (expected {EXPECTED})")


def _read_tar(file: DataFile) -> Iterator[list[MinimalPair]]:
    """The tables in a tar, streamed: nothing is written to disk, so member names cannot do harm."""
    has_tables = False
    try:
        with tarfile.open(file.path, "r|*") as tar:
            for member in tar:
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


# Winograd schemas


def _read_schemas(raw: bytes, name: str) -> list[MinimalPair]:
    """Schemas with two candidates for a pronoun; the text with the correct one substituted is the good one."""
    pairs = []
    schemas = list(_parse_xml(raw, name).iter("schema"))
    if not schemas:
        raise UserError(f"{name}: contains no <schema> (expected {EXPECTED})")
    for number, schema in enumerate(schemas, 1):
        location = f"{name}: schema {number}"
        parts = {part: _find_text(schema, f"text/{part}") for part in ("txt1", "pron", "txt2")}
        answers = [" ".join((answer.text or "").split()) for answer in schema.findall("answers/answer")]
        correct = _find_text(schema, "correctAnswer").strip(". ").upper()
        if len(answers) != 2 or not all(answers):
            raise UserError(f"{location}: expected two answers, found {len([answer for answer in answers if answer])}")
        if correct not in ("A", "B"):
            raise UserError(f"{location}: correctAnswer is {correct!r}, expected A or B")
        if not parts["pron"]:
            raise UserError(f"{location}: no <pron>, the pronoun that the candidates replace")
        first, second = (substitute(**parts, candidate=answer) for answer in answers)
        good, bad = (first, second) if correct == "A" else (second, first)
        pairs.append(MinimalPair(good[0], bad[0], location, continuation=(good[1], bad[1])))
    return pairs


def _find_text(schema: ElementTree.Element, path: str) -> str:
    return " ".join((schema.findtext(path) or "").split())


def _parse_xml(raw: bytes, name: str) -> ElementTree.Element:
    """Parse XML; a DOCTYPE is refused, because its entities could expand without limit or name other files."""

    def refuse(*_: Any) -> None:
        raise UserError(f"{name}: contains a DOCTYPE, which is not supported; remove it")

    scan = expat.ParserCreate()
    scan.StartDoctypeDeclHandler = refuse
    try:
        scan.Parse(raw, True)
        return ElementTree.parse(io.BytesIO(raw)).getroot()
    except (expat.ExpatError, ElementTree.ParseError, LookupError, ValueError) as error:
        raise UserError(f"{name}: not valid XML ({error})") from None


def substitute(txt1: str, pron: str, txt2: str, candidate: str) -> tuple[str, int]:
    """The text with a candidate in place of the pronoun, and where its continuation starts."""
    candidate = re.sub(r"['’]s$|(?<=s)['’]$", "", candidate)
    if _is_possessive(pron, txt2):
        candidate += "'s"
    if pron[0].isupper():
        candidate = candidate[0].upper() + candidate[1:]
    elif DETERMINER.match(candidate):
        candidate = candidate[0].lower() + candidate[1:]
    before = f"{txt1} {candidate}" if txt1 else candidate
    return before + (" " if txt2[:1].isalnum() or txt2[:1] in "\"'“‘(" else "") + txt2, len(before)


def _is_possessive(pron: str, txt2: str) -> bool:
    word = pron.lower()
    if word == "her":
        return txt2[:1].isalnum() and not AFTER_OBJECT.match(txt2)
    return word in POSSESSIVE_PRONOUNS
