"""Winograd schemas: a text, a pronoun in it, and candidates for what the pronoun refers to."""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

from headstock.errors import UserError

SYNTAX = '"The cup fell off the table because [it] was wet. | the cup | *the table" (* marks the correct candidate)'
BRACKETED = re.compile(r"\[([^\[\]]+)\]")
POSSESSIVE_PRONOUNS = ("his", "their", "its", "my", "your", "our")
# After the object pronoun `her`, unlike after the possessive, a sentence ends or continues with one of these.
AFTER_OBJECT = re.compile(
    r"(?:an?|the|to|that|and|but|or|so|for|with|from|in|on|at|of|by|as|if|because|when|while)\b", re.I
)
# A candidate that begins with one of these is not a name, so it is not capitalized inside a sentence.
DETERMINER = re.compile(r"(?:an?|the|his|her|their|its|my|your|our|this|that|these|those|some|all|one)\b", re.I)


@dataclass(frozen=True)
class Schema:
    """A text whose pronoun may stand for one of several candidates."""

    before: str
    pronoun: str
    after: str
    candidates: tuple[str, ...]
    correct: int | None  # index of the correct candidate, if known
    location: str

    @property
    def text(self) -> str:
        """The text with its pronoun in brackets."""
        return join(f"{self.before} [{self.pronoun}]" if self.before else f"[{self.pronoun}]", self.after)

    def substituted(self, candidate: int) -> tuple[str, int]:
        """The text with a candidate in place of the pronoun, and where its continuation starts."""
        return substitute(self.before, self.pronoun, self.after, self.candidates[candidate])


def parse_schema(line: str, location: str = "--schema") -> Schema:
    """A schema written as `text with [pronoun] | A | B` or `text | pronoun | A | B`; `*` marks the correct one."""
    text, *candidates = [" ".join(part.split()) for part in line.split("|")]
    if marked := list(BRACKETED.finditer(text)):
        if len(marked) > 1:
            raise UserError(f"{location}: {len(marked)} pronouns are in brackets, expected one, as in {SYNTAX}")
    elif candidates:
        pronoun = candidates.pop(0)
        marked = list(re.finditer(rf"(?<!\w){re.escape(pronoun)}(?!\w)", text)) if pronoun else []
        if len(marked) != 1:
            found = f"{pronoun!r} occurs {len(marked)} times" if pronoun else "no pronoun is named"
            raise UserError(f"{location}: {found} in the text; put the pronoun in brackets, as in {SYNTAX}")
    correct = [number for number, candidate in enumerate(candidates) if candidate.startswith("*")]
    candidates = [candidate.removeprefix("*").strip() for candidate in candidates]
    if len(candidates) < 2 or not all(candidates) or len(correct) > 1:
        problem = "several candidates are marked with *" if len(correct) > 1 else "expected two candidates or more"
        raise UserError(f"{location}: {problem}, as in {SYNTAX}")
    (match,) = marked
    pronoun = match[1] if match.re is BRACKETED else match[0]
    before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
    return Schema(before, pronoun, after, tuple(candidates), correct[0] if correct else None, location)


def read_schemas(path: Path) -> list[Schema]:
    """The schemas of a file: the XML of the Winograd Schema Challenge, or one per line as in `parse_schema`."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".xml":
            return parse_collection(raw, str(path))
        lines = raw.decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path}: no schema in it, expected lines such as {SYNTAX}")
    return [parse_schema(line, f"{path}:{number}") for number, line in numbered]


def parse_collection(raw: bytes, name: str) -> list[Schema]:
    """The schemas of the Winograd Schema Challenge's XML, each with two candidates."""
    schemas = []
    elements = list(_parse_xml(raw, name).iter("schema"))
    if not elements:
        raise UserError(f"{name}: contains no <schema>")
    for number, element in enumerate(elements, 1):
        location = f"{name}: schema {number}"
        before, pronoun, after = (_find_text(element, f"text/{part}") for part in ("txt1", "pron", "txt2"))
        answers = [" ".join((answer.text or "").split()) for answer in element.findall("answers/answer")]
        correct = _find_text(element, "correctAnswer").strip(". ").upper()
        if len(answers) != 2 or not all(answers):
            raise UserError(f"{location}: expected two answers, found {len([answer for answer in answers if answer])}")
        if correct not in ("A", "B"):
            raise UserError(f"{location}: correctAnswer is {correct!r}, expected A or B")
        if not pronoun:
            raise UserError(f"{location}: no <pron>, the pronoun that the candidates replace")
        schemas.append(Schema(before, pronoun, after, tuple(answers), "AB".index(correct), location))
    return schemas


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
    return join(before, txt2), len(before)


def join(before: str, after: str) -> str:
    """Two parts of a sentence, with a space between them unless punctuation follows."""
    return before + (" " if after[:1].isalnum() or (after and after[0] in "\"'“‘(") else "") + after


def _is_possessive(pron: str, txt2: str) -> bool:
    word = pron.lower()
    if word == "her":
        return txt2[:1].isalnum() and not AFTER_OBJECT.match(txt2)
    return word in POSSESSIVE_PRONOUNS
