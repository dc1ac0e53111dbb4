"""Turns a tokenizer's pieces and their weights back into the text they came from, the heavy ones marked."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from headstock.report.render import minus

if TYPE_CHECKING:
    from markupsafe import Markup

Weighted = list[tuple[str, float]]

SPECIAL = re.compile(r"\[[A-Z]+\]|<\|?[a-z_]+\|?>|</s>")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Thai, Lao, Burmese and Khmer letters, kana and Chinese characters
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
SHADES = 5  # strengths of a mark; more could not be told apart
FAINT = 0.08  # of the strongest weight; less is not marked, so that the eye finds what matters
KINDS = ("said", "true")  # of what is pointed out
REACH = 60  # characters in which the next piece is looked for: more than an unknown word, less than a sentence


@dataclass(frozen=True)
class HighlightedSpan:
    """A stretch of text; its weight is None where no piece stands for it."""

    text: str
    weight: float | None = None
    kind: str | None = None  # what is pointed out here: what the model said, or what is true


def decode_tokens(pieces: Sequence[Sequence]) -> Weighted:
    """`Ġgood`, `▁bon`, `##ing` and bytes of letters as plain text; bytes that make one letter together are joined."""
    named = [(str(piece), float(weight)) for piece, weight in pieces]
    joined = "".join(piece for piece, _ in named)
    letters = byte_letters() if "Ġ" in joined or "Ċ" in joined else None
    shown: Weighted = []
    waiting, held = b"", 0.0
    for piece, weight in named:
        raw = bytes_of(piece, letters)
        if raw is None:
            if waiting:
                shown.append((waiting.decode("utf-8", "replace"), held))
                waiting, held = b"", 0.0
            shown.append((plain_piece(piece), weight))
            continue
        waiting, held = waiting + raw, held + weight
        if whole := decoded(waiting):
            shown.append((whole, held))
            waiting, held = b"", 0.0
    return [*shown, (waiting.decode("utf-8", "replace"), held)] if waiting else shown


def bytes_of(piece: str, letters: dict[str, int] | None) -> bytes | None:
    """The bytes a piece stands for, or None when it is spelled in letters."""
    if fallback := BYTE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if letters is None or SPECIAL.fullmatch(piece) or any(letter not in letters for letter in piece):
        return None
    return bytes(letters[letter] for letter in piece)


def plain_piece(piece: str) -> str:
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    return piece.replace("▁", " ")


def decoded(raw: bytes) -> str:
    """The text of whole letters; nothing while the last one is still incomplete."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return "" if wrong.end == len(raw) and "end of data" in wrong.reason else raw.decode("utf-8", "replace")


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable letter for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def fold(text: str) -> str:
    """Small letters without accents, as many as before: tokenizers may spell so, and places must stay the same."""
    return "".join(folded(letter) for letter in text)


@cache
def folded(letter: str) -> str:
    small = unicodedata.normalize("NFD", letter)[:1].lower()
    return small if len(small) == 1 else letter


def merge_spaces(pieces: Iterable[tuple[str, float]]) -> Weighted:
    """Pieces in which a lone space is part of what it stands before."""
    joined: Weighted = []
    held = 0.0
    for piece, weight in pieces:
        if piece.strip():
            joined.append((piece, weight + held))
            held = 0.0
        else:
            held += weight
    return joined


def locate_tokens(text: str, pieces: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float, int | None]]:
    """Each piece that is not blank, its weight, and where in the text it begins; None for one that is not there."""
    known, at = fold(text), 0
    for piece, weight in pieces:
        if not (core := piece.strip()):
            continue
        found = known.find(fold(core), at, at + len(core) + REACH)
        if found < 0:
            yield core, weight, None
            continue
        at = found + len(core)
        yield core, weight, found


def lay_over(text: str, pieces: Weighted) -> list[HighlightedSpan]:
    """The text in spans, each piece's weight where the piece stands; what no piece covers stays without one."""
    spans: list[HighlightedSpan] = []
    at = 0
    for core, weight, found in locate_tokens(text, pieces):
        if found is None:
            if not SPECIAL.fullmatch(core):
                spans.append(HighlightedSpan(f" {core}", weight))
            continue
        if found > at:
            spans.append(HighlightedSpan(text[at:found]))
        at = found + len(core)
        spans.append(HighlightedSpan(text[found:at], weight))
    return [*spans, HighlightedSpan(text[at:])] if at < len(text) else spans


def merge_into_words(text: str, pieces: Iterable[tuple[str, float]], words: Sequence[tuple[int, int]]) -> Weighted:
    """The pieces joined into the words of the text that they begin in, their weights added up.

    `words` says where the words begin and end, in order. Pieces stay as they are where they are not in the text, and
    inside what is written without spaces between its words.
    """
    begins = [begin for begin, _ in words]
    joined: Weighted = []
    last = None  # the word that the last entry of `joined` stands for
    for core, weight, found in locate_tokens(text, merge_spaces(pieces)):
        number = -1 if found is None else bisect_right(begins, found) - 1
        begin, end = words[number] if number >= 0 else (0, 0)
        if found is None or found >= end or UNSPACED.search(text, begin, end):
            joined.append((core, weight))
            last = None
        elif number == last:
            joined[-1] = (joined[-1][0], joined[-1][1] + weight)
        else:
            joined.append((text[begin : max(end, found + len(core))], weight))
            last = number
    return joined


def point_out(text: str, marks: Sequence[Sequence[Any]]) -> list[HighlightedSpan]:
    """The text in spans, those of `marks` (begin, end, kind) pointed out; the first of two that overlap goes before."""
    kinds: list[str | None] = [None] * len(text)
    for begin, end, kind in reversed(marks):
        kinds[begin:end] = [kind] * len(kinds[begin:end])
    spans, at = [], 0
    for kind, letters in groupby(kinds):
        end = at + len(list(letters))
        spans.append(HighlightedSpan(text[at:end], kind=kind))
        at = end
    return spans


def cut(
    spans: list[HighlightedSpan], first: int, room: int
) -> tuple[list[HighlightedSpan], list[HighlightedSpan], int]:
    """What is shown at once, what is folded away, and how many characters are left out beyond `room`."""
    shown: list[HighlightedSpan] = []
    folded_away: list[HighlightedSpan] = []
    used = 0
    for span in spans:
        for start, end, part in ((0, first, shown), (first, room, folded_away)):
            piece = span.text[max(0, start - used) : max(0, end - used)]
            if piece:
                part.append(replace(span, text=piece))
        used += len(span.text)
    return shown, folded_away, max(0, used - room)


def top_words(pieces: Weighted, number: int = 10) -> list[tuple[str, float, int]]:
    """The words that weighed most, with their weight in all and how often they came."""
    totals: dict[str, tuple[float, int]] = {}
    for piece, weight in pieces:
        if word := piece.strip():
            before, times = totals.get(word, (0.0, 0))
            totals[word] = (before + weight, times + 1)
    ranked = sorted(((word, *rest) for word, rest in totals.items()), key=lambda row: -abs(row[1]))
    return [row for row in ranked[:number] if row[1]]


def mark(spans: list[HighlightedSpan], heaviest: float) -> "Markup":
    """The spans as HTML: towards the predicted class `t1` to `t5`, against it `a1` to `a5`, pointed out by kind."""
    from markupsafe import Markup, escape

    parts = []
    for span in spans:
        if span.kind in KINDS:
            parts.append(f'<mark class="{span.kind}">{escape(span.text)}</mark>')
            continue
        share = abs(span.weight or 0.0) / heaviest if heaviest else 0.0
        if share < FAINT or not span.text.strip():
            parts.append(str(escape(span.text)))
            continue
        side = "t" if (span.weight or 0.0) > 0 else "a"
        shade = min(SHADES, 1 + int(share * SHADES))
        told = minus(f"{span.weight:+.3g}")
        parts.append(f'<mark class="{side}{shade}" title="{told}">{escape(span.text)}</mark>')
    return Markup("".join(parts))


@dataclass(frozen=True)
class Passage:
    """A text ready for the page: its beginning, what is folded away, and what was left out."""

    shown: "Markup"
    rest: "Markup"
    rest_size: int
    left_out: int


def make_passage(
    text: str, pieces: Sequence[tuple[str, float]] = (), *, marks: Sequence = (), first: int = 600, room: int = 4000
) -> Passage:
    """The passage of a text, with its pieces marked where there are any, or else what `marks` point out."""
    if first < len(text) <= first + 100:
        first = len(text)  # a fold that hides a few words only gets in the way
    spans = point_out(text, marks) if marks else lay_over(text, list(pieces))
    shown, rest, left_out = cut(spans, first, max(first, room))
    heaviest = max((abs(weight) for _, weight in pieces), default=0.0)
    return Passage(mark(shown, heaviest), mark(rest, heaviest), sum(len(span.text) for span in rest), left_out)
