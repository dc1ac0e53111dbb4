"""Where words begin, as far as a vocabulary's entries tell: so that the pieces of one can be kept together."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

SPACES = ("Ġ", "▁", "Ċ", "ĉ", "č")  # a space in the spelling of byte-level and SentencePiece entries; breaks and tabs
BYTE = re.compile(r"^<0x([0-9A-F]{2})>$")  # how SentencePiece spells a byte
WHOLE = ("word", "char")  # kinds whose every entry stands for itself


def word_tables(backend: Any) -> tuple[np.ndarray, np.ndarray]:
    """(V,) True for entries that begin a word, and (V,) True for marks, after which a new word begins too.

    A mark is an entry without a letter or digit; special entries count as marks.
    """
    pieces = [backend.id_to_token(number) for number in range(backend.size)]
    special = np.isin(np.arange(backend.size), sorted(backend.all_special_ids))
    marks = special | np.array([is_mark(text) for text in spelled(backend, pieces)], dtype=bool)
    if backend.kind in WHOLE:
        return np.ones(backend.size, dtype=bool), marks
    if backend.kind == "wordpiece":
        starts = np.array([not piece.startswith("##") for piece in pieces], dtype=bool)
    else:
        starts = np.array([piece.startswith(SPACES) for piece in pieces], dtype=bool)
        if not starts[~special].any():  # nothing in the spelling tells, so each is taken for a word
            starts[:] = True
    return starts | marks, marks


def spelled(backend: Any, pieces: Sequence[str]) -> list[str]:
    """What each entry writes; byte-level entries spell the bytes of a character, so they are decoded."""
    if not any(piece.startswith("Ġ") for piece in pieces):
        return [BYTE.sub(_character, piece.removeprefix("##").strip("▁")) for piece in pieces]
    return [backend.decode([number]) for number in range(len(pieces))]


def _character(byte: re.Match[str]) -> str:
    number = int(byte[1], 16)
    return chr(number) if number < 0x80 else "\ufffd"


def is_mark(text: str) -> bool:
    """Whether it has no letter or digit, nor half a character; a lone space belongs to the word after it."""
    return bool(text.strip(" ")) and not any(letter.isalnum() or letter == "\ufffd" for letter in text)
