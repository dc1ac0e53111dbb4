"""Running text made of words, and words found in running text, as French and English write them.

Labelled words come in lists, but a model has read text in which `l' eau` is `l'eau` and `do n't` is `don't`. The
spaces of a list are gone, so they are put back by rule: a space between any two words, except

| no space | such as |
|---|---|
| before `. , ) ] } % ... … ”` | `eau .` is `eau.` |
| before `; : ! ?`, in English only: French sets them off | `why ?` is `why?`, `pourquoi ?` stays |
| before what begins with an apostrophe, and before `n't` | `it 's` is `it's` |
| before a hyphen and letters | `a -t-il` is `a-t-il` |
| after what ends in an apostrophe | `l' eau` is `l'eau` |
| after `( [ { “ $ £ #` | `( eau` is `(eau` |
| inside a pair of straight quotes | `" eau "` is `"eau"` |

A list is taken for French if it holds a word that French cannot do without and English does not have.
"""

import re
from collections.abc import Sequence

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
  | ([^\w\s])\1*                                                                 # marks, one or many of a kind
    """,
    re.IGNORECASE | re.VERBOSE,
)


def join_words(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The running text of some words, and where in it each begins and ends."""
    french = any(FRENCH.fullmatch(word) for word in words)
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    at, quoted, close = 0, False, True  # whether inside straight quotes, and whether the next word comes up close
    for word in words:
        ends_quote = word == '"' and quoted
        if not (close or ends_quote or joins_previous(word, french=french)):
            parts.append(" ")
            at += 1
        parts.append(word)
        spans.append((at, at + len(word)))
        at += len(word)
        if word == '"':
            quoted = not quoted
        close = word in OPENING or (word == '"' and quoted) or ELIDED.fullmatch(word) is not None
    return "".join(parts), spans


def joins_previous(word: str, *, french: bool) -> bool:
    """Whether a word stands without a space after the one before."""
    if CLOSING.fullmatch(word) or ENDING.fullmatch(word):
        return True
    return not french and SET_OFF.fullmatch(word) is not None


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end; marks are words too, and an elided article is one by itself."""
    return [found.span() for found in WORD.finditer(text)]
