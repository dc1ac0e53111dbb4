"""Words: joining them to text, finding them in text (French and English), and which tokens begin one.

Tagged data comes as lists of words, but models have read text in which `l' eau` is `l'eau` and `do n't` is `don't`.
Words are joined by a space, except

| no space | example |
|---|---|
| before `. , ) ] } % ... … ”` | `eau .` becomes `eau.` |
| before `; : ! ?`, in English only, as French puts a space there | `why ?` becomes `why?`, `pourquoi ?` stays |
| before an initial apostrophe, and before `n't` | `it 's` becomes `it's` |
| before a hyphen and letters | `a -t-il` becomes `a-t-il` |
| after a final apostrophe | `l' eau` becomes `l'eau` |
| after `( [ { “ $ £ #` | `( eau` becomes `(eau` |
| inside a pair of straight quotes | `" eau "` becomes `"eau"` |

A list is taken for French if it contains a common French word that English does not have.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

APOSTROPHES = "'’"
CLOSING = re.compile(r"[.,)\]}%…”]|\.\.+|[.,]+")
SET_OFF = re.compile(r"[;:!?]+")
ENDING = re.compile(rf"[{APOSTROPHES}]\w+|n[{APOSTROPHES}]t|-\w+(-\w+)*", re.IGNORECASE)
ELIDED = re.compile(rf".*\w[{APOSTROPHES}]")
OPENING = frozenset("([{“$£#")
COMMON = r"l[ea]s?|l['’]|une?|d[eu]s?|d['’]|et|est|ils?|elles?|je|ne|n['’]|pas|qu[ei]|qu['’]|c['’]|à|«|»"
FRENCH = re.compile(COMMON, re.IGNORECASE)

WORD = re.compile(
    rf"""
    [^\W\d_]+(?=n[{APOSTROPHES}]t\b) | (?<=\w)n[{APOSTROPHES}]t\b                    # do|n't
  | (?<=\w)[{APOSTROPHES}](?:s|re|ve|ll|d|m)\b                                    # it|'s
  | (?<!\w)(?:[cdjlmnst]|(?:jus|lors|puis|quoi)?qu)[{APOSTROPHES}](?=\w)           # l'|eau, qu'|il
  | (?<=\w)-(?:t-)?(?:je|tu|ils?|elles?|on|ce)\b                                  # a|-t-il
  | (?<!\w)(?:mm?|mr|mrs|ms|dr|cf|etc)\. | (?<!\w)(?:[^\W\d_]\.){{2,}}            # M. and U.S.
  | \d+(?:[.,]\d+)+                                                              # 1,500.25
  | (?:aujourd|quelqu)[{APOSTROPHES}]\w+
  | \w+(?:-(?!(?:t-)?(?:je|tu|ils?|elles?|on|ce)\b)\w+)*                         # avant-hier
  | ([^\w\s])\1*                                                                 # punctuation, repeated or not
    """,
    re.IGNORECASE | re.VERBOSE,
)


def join_words(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words to text; returns the text and the character span of each word."""
    french = any(FRENCH.fullmatch(word) for word in words)
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    end, in_quotes, no_space = 0, False, True
    for word in words:
        ends_quote = word == '"' and in_quotes
        if not (no_space or ends_quote or joins_previous(word, french=french)):
            parts.append(" ")
            end += 1
        parts.append(word)
        spans.append((end, end + len(word)))
        end += len(word)
        if word == '"':
            in_quotes = not in_quotes
        no_space = word in OPENING or (word == '"' and in_quotes) or ELIDED.fullmatch(word) is not None
    return "".join(parts), spans


def joins_previous(word: str, *, french: bool) -> bool:
    """Whether a word follows the previous one without a space."""
    if CLOSING.fullmatch(word) or ENDING.fullmatch(word):
        return True
    return not french and SET_OFF.fullmatch(word) is not None


def word_spans(text: str) -> list[tuple[int, int]]:
    """The character spans of the words of a text; punctuation marks and elided articles are words of their own."""
    return [match.span() for match in WORD.finditer(text)]


# Tokens

SPACE_PREFIXES = ("Ġ", "▁", "Ċ", "ĉ", "č")  # spaces, line breaks and tabs of byte-level and SentencePiece vocabularies
BYTE_TOKEN = re.compile(r"^<0x([0-9A-F]{2})>$")  # SentencePiece's byte fallback
WHOLE_WORD_KINDS = ("word", "char")  # every token of these is a word


def word_tables(backend: Any) -> tuple[np.ndarray, np.ndarray]:
    """(V,) True for tokens that begin a word, and (V,) True for punctuation, after which a new word begins.

    Punctuation is a token without a letter or digit; special tokens count as punctuation.
    """
    tokens = [backend.id_to_token(number) for number in range(backend.size)]
    special = np.isin(np.arange(backend.size), sorted(backend.all_special_ids))
    punctuation = special | np.array([is_punctuation(text) for text in token_texts(backend, tokens)], dtype=bool)
    if backend.kind in WHOLE_WORD_KINDS:
        return np.ones(backend.size, dtype=bool), punctuation
    if backend.kind == "wordpiece":
        starts = np.array([not token.startswith("##") for token in tokens], dtype=bool)
    else:
        starts = np.array([token.startswith(SPACE_PREFIXES) for token in tokens], dtype=bool)
        if not starts[~special].any():  # the spelling does not tell, so every token counts as a word
            starts[:] = True
    return starts | punctuation, punctuation


def token_texts(backend: Any, tokens: Sequence[str]) -> list[str]:
    """The text of each token; byte-level tokens spell bytes, so they are decoded."""
    if not any(token.startswith("Ġ") for token in tokens):
        return [BYTE_TOKEN.sub(_byte_text, token.removeprefix("##").strip("▁")) for token in tokens]
    return [backend.decode([number]) for number in range(len(tokens))]


def _byte_text(byte: re.Match[str]) -> str:
    number = int(byte[1], 16)
    return chr(number) if number < 0x80 else "\ufffd"


def is_punctuation(text: str) -> bool:
    """Whether a text has no letter, digit or partial character; a lone space belongs to the next word."""
    return bool(text.strip(" ")) and not any(letter.isalnum() or letter == "\ufffd" for letter in text)
