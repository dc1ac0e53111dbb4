"""Reads pairs of texts of which one is right: BLiMP's tables, and Winograd schemas with each candidate put in."""

import glob
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

from headstock.data import catalog
from headstock.data.formats import (
    COMPRESSIONS,
    READ_BYTES,
    DataFile,
    detect_format,
    is_valid_unicode,
    json_rows,
    no_column,
)
from headstock.errors import UserError, suggest_path

GOOD, BAD = "sentence_good", "sentence_bad"
KINDS = ("UID", "linguistics_term", "field")  # what pairs are grouped by, where a file says it
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
WANTED = f"wanted .jsonl with {GOOD} and {BAD}, plain or packed or many of them in a .tar, or Winograd schemas in .xml"
POSSESSIVE = ("his", "their", "its", "my", "your", "our")
# after `her` as an object, unlike after the possessive, a sentence goes on with one of these or ends
AFTER_OBJECT = re.compile(
    r"(?:an?|the|to|that|and|but|or|so|for|with|from|in|on|at|of|by|as|if|because|when|while)\b", re.I
)
# with one of these a candidate begins that is no name, so that inside a sentence it begins small
NO_NAME = re.compile(r"(?:an?|the|his|her|their|its|my|your|our|this|that|these|those|some|all|one)\b", re.I)


@dataclass(frozen=True)
class MinimalPair:
    """Two texts that differ in little; the first is the right one."""

    good: str
    bad: str
    location: str  # where it is, as errors say it
    groups: dict[str, str] = field(default_factory=dict)
    continuation: tuple[int, int] | None = (
        None  # where in each text begins what comes after the candidate, if that is known
    )


def read_minimal_pairs(paths: Sequence[str | Path], *, rows: int | None = None) -> list[MinimalPair]:
    """All pairs of files, folders, globs and tars; of each file at most `rows`, evenly spread."""
    if rows is not None and rows < 1:
        raise UserError(f"--rows {rows}: must be 1 or more")
    if not paths:
        raise UserError(f"no minimal pairs: name their files ({WANTED})")
    found: list[MinimalPair] = []
    for path in paths:
        for file in _files(str(path)):
            for pairs in _pairs_of(file, str(path) if file == Path(str(path)).expanduser() else str(file)):
                found += spread(pairs, rows)
    return found


def spread(pairs: list[MinimalPair], most: int | None) -> list[MinimalPair]:
    """At most so many, evenly taken from beginning to end."""
    if most is None or len(pairs) <= most:
        return pairs
    return [pairs[i * len(pairs) // most] for i in range(most)]


# Files


def _files(given: str) -> list[Path]:
    path = catalog.resolve(given) or Path(given).expanduser()
    if path.is_dir():
        inside = [file for file in sorted(path.rglob("*")) if file.is_file() and _layout(file.name)]
        if not inside:
            raise UserError(f"{given}: no minimal pairs in this folder ({WANTED})")
        return inside
    if path.exists():
        return [path]
    if glob.has_magic(given):
        inside = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if _layout(match)]
        if not inside:
            raise UserError(f"{given}: the pattern matches no minimal pairs ({WANTED})")
        return inside
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"{given}: no such file or folder{suggest_path(path.name, beside)}")


def _layout(name: str) -> str | None:
    """How a file is read, by its name."""
    low = name.lower()
    if low.endswith(TARS):
        return "tar"
    bare = next((low.removesuffix(packing) for packing in COMPRESSIONS if low.endswith(packing)), low)
    return "jsonl" if bare.endswith(".jsonl") else "xml" if low.endswith(".xml") else None


def _pairs_of(path: Path, name: str) -> Iterator[list[MinimalPair]]:
    layout = _layout(path.name)
    if layout == "tar":
        yield from _tar_pairs(path, name)
    elif layout == "jsonl":
        source = detect_format(path, name)
        assert source is not None
        yield _table_pairs(source)
    elif layout == "xml":
        yield _schema_pairs(path.read_bytes(), name)
    else:
        raise UserError(f"{name}: cannot tell what is in it ({WANTED})")


def _tar_pairs(path: Path, name: str) -> Iterator[list[MinimalPair]]:
    """The tables in a tar, read as they stream by: nothing is written to disk, whatever the members are called."""
    some = False
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                if not member.isfile() or not member.name.lower().endswith(".jsonl") or _hidden(member.name):
                    continue
                stream = tar.extractfile(member)
                assert stream is not None
                some = True
                stretches = iter(partial(stream.read, READ_BYTES), b"")
                yield _table_pairs(DataFile(path, f"{name}/{member.name}", ".jsonl", ""), stretches)
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as wrong:
        raise UserError(f"{name}: the tar is cut short or damaged ({wrong}); fetch it again") from None
    if not some:
        raise UserError(f"{name}: no .jsonl file in it ({WANTED})")


def _hidden(name: str) -> bool:
    return Path(name).name.startswith(".")


# BLiMP's tables


def _table_pairs(source: DataFile, stretches: Iterator[bytes] | None = None) -> list[MinimalPair]:
    pairs = []
    for line, row in json_rows(source, stretches):
        place = f"{source.name}:{line}"
        if not isinstance(row, dict):
            raise UserError(f"{place}: wanted an object with {GOOD} and {BAD}, got {type(row).__name__}")
        kinds = {kind: str(row[kind]) for kind in KINDS if row.get(kind) not in (None, "")}
        pairs.append(MinimalPair(_sentence(row, GOOD, place), _sentence(row, BAD, place), place, kinds))
    if not pairs:
        raise UserError(f"{source.name}: no rows (it is empty)")
    return pairs


def _sentence(row: dict[str, Any], column: str, place: str) -> str:
    if column not in row:
        raise no_column(place, column, list(row))
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: {column} is {json.dumps(text, ensure_ascii=False)[:40]}, wanted a sentence")
    if not is_valid_unicode(text):
        raise UserError(f"{place}: {column} holds half of a surrogate pair, which is no character")
    return text


# Winograd schemas


def _schema_pairs(raw: bytes, name: str) -> list[MinimalPair]:
    """Schemas of two candidates for a pronoun; the text with the right one in its place is the good one."""
    pairs = []
    schemas = list(_parsed(raw, name).iter("schema"))
    if not schemas:
        raise UserError(f"{name}: no <schema> in it ({WANTED})")
    for number, schema in enumerate(schemas, 1):
        place = f"{name}: schema {number}"
        parts = {part: _said(schema, f"text/{part}") for part in ("txt1", "pron", "txt2")}
        answers = [" ".join((answer.text or "").split()) for answer in schema.findall("answers/answer")]
        right = _said(schema, "correctAnswer").strip(". ").upper()
        if len(answers) != 2 or not all(answers):
            raise UserError(f"{place}: wanted two answers, got {len([answer for answer in answers if answer])}")
        if right not in ("A", "B"):
            raise UserError(f"{place}: correctAnswer is {right!r}, wanted A or B")
        if not parts["pron"]:
            raise UserError(f"{place}: no <pron>, the pronoun that the candidates stand for")
        first, second = (resolved(**parts, candidate=answer) for answer in answers)
        good, bad = (first, second) if right == "A" else (second, first)
        pairs.append(MinimalPair(good[0], bad[0], place, continuation=(good[1], bad[1])))
    return pairs


def _said(schema: ElementTree.Element, path: str) -> str:
    return " ".join((schema.findtext(path) or "").split())


def _parsed(raw: bytes, name: str) -> ElementTree.Element:
    """The XML of a file; a document type is refused, for its entities could grow without end or name other files."""

    def refuse(*_: Any) -> None:
        raise UserError(f"{name}: has a DOCTYPE, which is not read; remove it")

    scan = expat.ParserCreate()
    scan.StartDoctypeDeclHandler = refuse
    try:
        scan.Parse(raw, True)
        return ElementTree.parse(io.BytesIO(raw)).getroot()
    except (expat.ExpatError, ElementTree.ParseError, LookupError, ValueError) as wrong:
        raise UserError(f"{name}: not XML ({wrong})") from None


def resolved(txt1: str, pron: str, txt2: str, candidate: str) -> tuple[str, int]:
    """The text with a candidate in the pronoun's place, and where in it the rest begins."""
    candidate = re.sub(r"['’]s$|(?<=s)['’]$", "", candidate)
    if _is_possessive(pron, txt2):
        candidate += "'s"
    if pron[0].isupper():
        candidate = candidate[0].upper() + candidate[1:]
    elif NO_NAME.match(candidate):
        candidate = candidate[0].lower() + candidate[1:]
    before = f"{txt1} {candidate}" if txt1 else candidate
    return before + (" " if txt2[:1].isalnum() or txt2[:1] in "\"'“‘(" else "") + txt2, len(before)


def _is_possessive(pron: str, txt2: str) -> bool:
    word = pron.lower()
    if word == "her":
        return txt2[:1].isalnum() and not AFTER_OBJECT.match(txt2)
    return word in POSSESSIVE
