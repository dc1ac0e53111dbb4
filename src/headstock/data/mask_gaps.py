"""Where a text has [MASK], and which entries of a vocabulary can stand there as a word.  V vocabulary."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError

MASK = "[MASK]"  # how a person writes it, whatever the tokenizer calls its own
HOLE = "\u2042"  # stands for the mask while the text around it is cut: a rare punctuation mark, which joins no word
BEFORE = 40  # characters before a mask that can matter for how a word there is cut
JOINING = "-'’\ufffd"  # what may stand inside a word beside letters and digits; the last is a part of a character


@dataclass(frozen=True)
class MaskGap:
    """One mask of a text."""

    before: str  # what stands to its left, without the space that belongs to the word
    space: str  # that space, or ""
    position: int  # of the mask among the text's tokens
    spaced: bool  # the entries that fit here are those which bring a space with them


class SurfaceForms:
    """What each entry of a vocabulary writes inside a text, with the space before it where it brings one."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError(f"this tokenizer has no {MASK}, so nothing can be filled in")
        self.tokenizer, self.mask = tokenizer, tokenizer.mask
        self.masks = "|".join(map(re.escape, {MASK, tokenizer.id_to_token(tokenizer.mask)}))  # a pattern
        entries = range(tokenizer.vocabulary)
        ordinary = [i for i in entries if i not in tokenizer.all_special_ids]
        anchor = next((i for i in ordinary if tokenizer.decode([i]).strip().isalpha()), ordinary[0])
        self.anchor = tokenizer.decode([anchor])
        self.written = [""] * len(entries)
        for i in ordinary:
            whole = tokenizer.decode([anchor, i])
            self.written[i] = whole[len(self.anchor) :] if whole.startswith(self.anchor) else tokenizer.decode([i])
        self.spaced = np.array([text.startswith(" ") for text in self.written])  # (V,)
        self.lettered = np.array([joins(text.strip()) for text in self.written])
        self.begins = self.lettered | np.array([text == " " for text in self.written])
        self.whole = np.array([bool(text.strip()) and "\ufffd" not in text for text in self.written])

    @cached_property
    def brings_spaces(self) -> bool:
        """Whether a word's first entry stands for the space before it too; for single characters it does not."""
        return bool((self.spaced & self.lettered).any())

    def word(self, pieces: Sequence[int]) -> str:
        """Pieces as a person reads them."""
        anchor = self.tokenizer.encode(self.anchor)
        whole, before = self.tokenizer.decode([*anchor, *pieces]), self.tokenizer.decode(anchor)
        return (whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(pieces)).strip()

    def tokens_at(self, gap: MaskGap, word: str) -> list[int]:
        """The pieces that a word is cut into at a mask."""
        before = self.tokenizer.encode(gap.before[-BEFORE:])
        whole = self.tokenizer.encode(gap.before[-BEFORE:] + gap.space + word)
        return whole[len(before) :] if whole[: len(before)] == before else self.tokenizer.encode(word)

    def fill(self, text: str, words: Sequence[str]) -> str:
        """The text with a word in the place of each mask."""
        waiting = iter(words)
        return re.sub(self.masks, lambda _: next(waiting), text)

    def tokenize(self, text: str) -> tuple[list[int], list[MaskGap]]:
        """A text as tokens with the mask where it says so, and what is known of each mask."""
        around = re.split(self.masks, text)
        if len(around) == 1:
            raise UserError(f'no {MASK} in {text[:60]!r}: write it where a word is wanted, as in "It was {MASK}."')
        plain, spans = around[0], []
        for part in around[1:]:
            space = self.brings_spaces and plain.endswith(" ")
            spans.append((len(plain) - space, len(plain) + 1))
            plain += HOLE + part
        ids, places = self.tokenize_spans(plain, spans)
        gaps = []
        for (begin, end), place in zip(spans, places, strict=True):
            before, space = plain[:begin], plain[begin : end - 1]
            gaps.append(MaskGap(before, space, place, bool(space) or self.spaced_after(before)))
        return ids, gaps

    def tokenize_spans(self, plain: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """The tokens of a text, a mask for those that lie in each of the spans, and where these masks are."""
        ids: list[int] = []
        places: list[int] = []
        cut = zip(self.tokenizer.encode(plain), self.tokenizer.offsets(plain), strict=True)
        for token, (first, last) in [*cut, (None, (len(plain) + 1, len(plain) + 2))]:
            while len(places) < len(spans) and spans[len(places)][0] < max(last, first + 1):
                places.append(len(ids))
                ids.append(self.mask)
            inside = bool(places) and first < spans[len(places) - 1][1]
            if token is not None and not inside:
                ids.append(token)
        return ids, places

    def spaced_after(self, before: str) -> bool:
        """Whether a word here is spelled as after a space, though there is none: at the start of a text, many do."""
        if before and (before[-1].isalnum() or before[-1] == HOLE):
            return False
        whole = before[-BEFORE:] + self.anchor.strip()
        at = len(whole) - len(self.anchor.strip())
        cut = zip(self.tokenizer.encode(whole), self.tokenizer.offsets(whole), strict=True)
        first = next((token for token, (begin, last) in cut if begin >= at or last > at), None)
        return first is not None and bool(self.spaced[first])


def joins(text: str) -> bool:
    """Whether a text can be part of a word."""
    return bool(text) and all(letter.isalnum() or letter in JOINING for letter in text)
