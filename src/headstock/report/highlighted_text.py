"""Highlights a text by the attributions of its tokens, or by marked spans."""

import re
import unicodedata
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from headstock.report.format import minus

if TYPE_CHECKING:
    from markupsafe import Markup

WeightedPieces = list[tuple[str, float]]

SPECIAL = re.compile(r"\[[A-Z]+\]|<\|?[a-z_]+\|?>|</s>")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Thai, Lao, Burmese and Khmer letters, kana and Chinese characters
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
SHADES = 5  # distinguishable strengths
MIN_STRENGTH = 0.08  # of the strongest weight; weaker ones are not highlighted
MARK_KINDS = ("said", "true")  # what the model predicted, and the true answer
SEARCH_WINDOW = 60  # characters searched for the next token: longer than an unknown word, shorter than a sentence


@dataclass(frozen=True)
class HighlightedSpan:
    """A part of a text; its weight is None where no token covers it."""

    text: str
    weight: float | None = None
    kind: str | None = None  # one of MARK_KINDS if it is marked


def decode_tokens(pieces: Sequence[Sequence]) -> WeightedPieces:
    """Tokens such as `Ġgood`, `▁bon`, `##ing` and byte tokens as plain text; the bytes of one letter are joined."""
    named = [(str(piece), float(weight)) for piece, weight in pieces]
    joined = "".join(piece for piece, _ in named)
    letters = byte_letters() if "Ġ" in joined or "Ċ" in joined else None
    decoder = getincrementaldecoder("utf-8")("replace")
    texts: WeightedPieces = []
    text, total = "", 0.0  # of the bytes since the last complete letter
    for piece, weight in named:
        raw = bytes_of(piece, letters)
        text += decoder.decode(raw or b"", final=raw is None)
        total += 0.0 if raw is None else weight
        if text and not decoder.getstate()[0]:
            texts.append((text, total))
            text, total = "", 0.0
        if raw is None:
            texts.append((plain_piece(piece), weight))
    text += decoder.decode(b"", final=True)
    return [*texts, (text, total)] if text else texts


def bytes_of(piece: str, letters: dict[str, int] | None) -> bytes | None:
    """The bytes of a byte-level token; None for others."""
    if fallback := BYTE.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if letters is None or SPECIAL.fullmatch(piece) or any(letter not in letters for letter in piece):
        return None
    return bytes(letters[letter] for letter in piece)


def plain_piece(piece: str) -> str:
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    return piece.replace("▁", " ")


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's byte alphabet: a printable character for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def fold(text: str) -> str:
    """Lower case without accents and of the same length: tokenizers may normalize, and offsets must stay valid."""
    return "".join(folded(letter) for letter in text)


@cache
def folded(letter: str) -> str:
    small = unicodedata.normalize("NFD", letter)[:1].lower()
    return small if len(small) == 1 else letter


def merge_spaces(pieces: Iterable[tuple[str, float]]) -> WeightedPieces:
    """Merge tokens that are only a space into the next one."""
    merged: WeightedPieces = []
    space_weight = 0.0
    for piece, weight in pieces:
        space_weight += weight
        if piece.strip():
            merged.append((piece, space_weight))
            space_weight = 0.0
    return merged


def locate_tokens(text: str, pieces: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float, int | None]]:
    """Each non-blank token, its weight and its offset in the text; None if it is not found."""
    folded_text, end = fold(text), 0
    for piece, weight in pieces:
        if not (core := piece.strip()):
            continue
        offset = folded_text.find(fold(core), end, end + len(core) + SEARCH_WINDOW)
        if offset >= 0:
            end = offset + len(core)
        yield core, weight, offset if offset >= 0 else None


def align_weights(text: str, pieces: WeightedPieces) -> list[HighlightedSpan]:
    """Split the text into spans with the weights of the tokens that cover them."""
    spans: list[HighlightedSpan] = []
    end = 0
    for core, weight, offset in locate_tokens(text, pieces):
        if offset is None:
            if not SPECIAL.fullmatch(core):
                spans.append(HighlightedSpan(f" {core}", weight))
            continue
        if offset > end:
            spans.append(HighlightedSpan(text[end:offset]))
        end = offset + len(core)
        spans.append(HighlightedSpan(text[offset:end], weight))
    return [*spans, HighlightedSpan(text[end:])] if end < len(text) else spans


def merge_into_words(
    text: str, pieces: Iterable[tuple[str, float]], words: Sequence[tuple[int, int]]
) -> WeightedPieces:
    """Merge tokens into the words they begin in and add up their weights.

    `words` are the spans of the words in order. Tokens that do not occur in the text, and tokens of scripts written
    without spaces, stay as they are.
    """
    begins = [begin for begin, _ in words]
    joined: WeightedPieces = []
    last = None  # the number of the word in the last entry of `joined`
    for core, weight, offset in locate_tokens(text, merge_spaces(pieces)):
        number = -1 if offset is None else bisect_right(begins, offset) - 1
        begin, end = words[number] if number >= 0 else (0, 0)
        if offset is None or offset >= end or UNSPACED.search(text, begin, end):
            joined.append((core, weight))
            last = None
        elif number == last:
            joined[-1] = (joined[-1][0], joined[-1][1] + weight)
        else:
            joined.append((text[begin : max(end, offset + len(core))], weight))
            last = number
    return joined


def split_at_marks(text: str, marks: Sequence[Sequence[Any]]) -> list[HighlightedSpan]:
    """Split the text at `marks` (begin, end, kind); of overlapping marks the first takes precedence."""
    kinds: list[str | None] = [None] * len(text)
    for begin, end, kind in reversed(marks):
        kinds[begin:end] = [kind] * len(kinds[begin:end])
    spans, start = [], 0
    for kind, letters in groupby(kinds):
        end = start + len(list(letters))
        spans.append(HighlightedSpan(text[start:end], kind=kind))
        start = end
    return spans


def split_preview(
    spans: list[HighlightedSpan], preview: int, max_length: int
) -> tuple[list[HighlightedSpan], list[HighlightedSpan], int]:
    """The spans of the first `preview` characters, those up to `max_length`, and the number of characters beyond."""
    first: list[HighlightedSpan] = []
    rest: list[HighlightedSpan] = []
    used = 0
    for span in spans:
        for start, end, part in ((0, preview, first), (preview, max_length, rest)):
            piece = span.text[max(0, start - used) : max(0, end - used)]
            if piece:
                part.append(replace(span, text=piece))
        used += len(span.text)
    return first, rest, max(0, used - max_length)


def top_words(pieces: WeightedPieces, number: int = 10) -> list[tuple[str, float, int]]:
    """The words with the largest total weights, with their number of occurrences."""
    weights: dict[str, list[float]] = {}
    for piece, weight in pieces:
        if word := piece.strip():
            weights.setdefault(word, []).append(weight)
    totals = [(word, sum(values), len(values)) for word, values in weights.items()]
    return [row for row in sorted(totals, key=lambda row: -abs(row[1]))[:number] if row[1]]


def to_html(spans: list[HighlightedSpan], max_weight: float) -> "Markup":
    """Spans as HTML with the classes t1 to t5 (for the prediction), a1 to a5 (against it), or the kind of a mark."""
    from markupsafe import Markup, escape

    parts = []
    for span in spans:
        if span.kind in MARK_KINDS:
            parts.append(f'<mark class="{span.kind}">{escape(span.text)}</mark>')
            continue
        share = abs(span.weight or 0.0) / max_weight if max_weight else 0.0
        if share < MIN_STRENGTH or not span.text.strip():
            parts.append(str(escape(span.text)))
            continue
        side = "t" if (span.weight or 0.0) > 0 else "a"
        shade = min(SHADES, 1 + int(share * SHADES))
        tooltip = minus(f"{span.weight:+.3g}")
        parts.append(f'<mark class="{side}{shade}" title="{tooltip}">{escape(span.text)}</mark>')
    return Markup("".join(parts))


@dataclass(frozen=True)
class HighlightedText:
    """A text as HTML: its beginning, the rest, and how much was cut."""

    shown: "Markup"
    rest: "Markup"
    rest_size: int
    left_out: int


def make_passage(
    text: str,
    pieces: Sequence[tuple[str, float]] = (),
    *,
    marks: Sequence = (),
    preview: int = 600,
    max_length: int = 4000,
) -> HighlightedText:
    """Highlight a text by its `marks` if there are any, otherwise by the weights of its pieces."""
    if preview < len(text) <= preview + 100:
        preview = len(text)  # the rest is not worth folding away
    spans = split_at_marks(text, marks) if marks else align_weights(text, list(pieces))
    first, rest, left_out = split_preview(spans, preview, max(preview, max_length))
    max_weight = max((abs(weight) for _, weight in pieces), default=0.0)
    rest_size = sum(len(span.text) for span in rest)
    return HighlightedText(to_html(first, max_weight), to_html(rest, max_weight), rest_size, left_out)
