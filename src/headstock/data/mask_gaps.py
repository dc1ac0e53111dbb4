"""Locates [MASK] in a text and determines which tokens can fill it as a word.  V vocabulary."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError

MASK = "[MASK]"  # as users write it, whatever the tokenizer's own mask token is
PLACEHOLDER = "\u2042"  # replaces the mask while the text around it is tokenized: rare punctuation, which joins no word
CONTEXT_CHARACTERS = 40  # before a mask that can influence how a word there is tokenized
WORD_CHARACTERS = "-'’\ufffd"  # allowed in a word besides letters and digits; the last is a partial character


@dataclass(frozen=True)
class MaskGap:
    """One mask of a text."""

    before: str  # the text to its left, without the space that belongs to the word
    space: str  # that space, or ""
    position: int  # of the mask among the text's tokens
    expects_space: bool  # tokens that fit here are those that include a space


class SurfaceForms:
    """The text that each token of a vocabulary contributes inside a text, including a preceding space."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError(f"this tokenizer has no {MASK}, so nothing can be filled in")
        self.tokenizer, self.mask = tokenizer, tokenizer.mask
        self.mask_pattern = "|".join(map(re.escape, {MASK, tokenizer.id_to_token(tokenizer.mask)}))
        ordinary = [i for i in range(tokenizer.vocabulary) if i not in tokenizer.all_special_ids]
        # A token decoded alone may lose its space, so each is decoded after an ordinary word.
        anchor = next((i for i in ordinary if tokenizer.decode([i]).strip().isalpha()), ordinary[0])
        self.anchor = tokenizer.decode([anchor])
        self.texts = [""] * tokenizer.vocabulary
        for i in ordinary:
            joined = tokenizer.decode([anchor, i])
            self.texts[i] = joined[len(self.anchor) :] if joined.startswith(self.anchor) else tokenizer.decode([i])
        self.has_space = np.array([text.startswith(" ") for text in self.texts])  # (V,)
        self.is_word_part = np.array([is_word_part(text.strip()) for text in self.texts])
        self.can_begin_word = self.is_word_part | np.array([text == " " for text in self.texts])
        self.is_complete = np.array([bool(text.strip()) and "\ufffd" not in text for text in self.texts])

    @cached_property
    def words_include_space(self) -> bool:
        """Whether the first token of a word includes the space before it; single characters do not."""
        return bool((self.has_space & self.is_word_part).any())

    def word(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without surrounding spaces."""
        anchor = self.tokenizer.encode(self.anchor)
        joined, before = self.tokenizer.decode([*anchor, *tokens]), self.tokenizer.decode(anchor)
        return (joined[len(before) :] if joined.startswith(before) else self.tokenizer.decode(tokens)).strip()

    def tokens_at(self, gap: MaskGap, word: str) -> list[int]:
        """The tokens of a word in place of a mask."""
        context = gap.before[-CONTEXT_CHARACTERS:]
        before, joined = self.tokenizer.encode(context), self.tokenizer.encode(context + gap.space + word)
        return joined[len(before) :] if joined[: len(before)] == before else self.tokenizer.encode(word)

    def fill(self, text: str, words: Sequence[str]) -> str:
        """The text with each mask replaced by a word."""
        replacements = iter(words)
        return re.sub(self.mask_pattern, lambda _: next(replacements), text)

    def tokenize(self, text: str) -> tuple[list[int], list[MaskGap]]:
        """The tokens of a text with its masks, and the masks."""
        parts = re.split(self.mask_pattern, text)
        if len(parts) == 1:
            raise UserError(f'no {MASK} in {text[:60]!r}: write it in place of a word, as in "It was {MASK}."')
        plain, spans = parts[0], []
        for part in parts[1:]:
            space = self.words_include_space and plain.endswith(" ")
            spans.append((len(plain) - space, len(plain) + 1))
            plain += PLACEHOLDER + part
        ids, positions = self.tokenize_spans(plain, spans)
        gaps = []
        for (begin, end), position in zip(spans, positions, strict=True):
            before, space = plain[:begin], plain[begin : end - 1]
            gaps.append(MaskGap(before, space, position, bool(space) or self.expects_space_after(before)))
        return ids, gaps

    def tokenize_spans(self, plain: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """The tokens of a text with one mask in place of each character span, and the positions of these masks."""
        ids: list[int] = []
        positions: list[int] = []
        tokens = zip(self.tokenizer.encode(plain), self.tokenizer.offsets(plain), strict=True)
        for token, (first, last) in [*tokens, (None, (len(plain) + 1, len(plain) + 2))]:
            while len(positions) < len(spans) and spans[len(positions)][0] < max(last, first + 1):
                positions.append(len(ids))
                ids.append(self.mask)
            in_span = bool(positions) and first < spans[len(positions) - 1][1]
            if token is not None and not in_span:
                ids.append(token)
        return ids, positions

    def expects_space_after(self, before: str) -> bool:
        """Whether a word here is tokenized as after a space, though there is none, as at the start of a text."""
        if before and (before[-1].isalnum() or before[-1] == PLACEHOLDER):
            return False
        text = before[-CONTEXT_CHARACTERS:] + self.anchor.strip()
        start = len(text) - len(self.anchor.strip())
        tokens = zip(self.tokenizer.encode(text), self.tokenizer.offsets(text), strict=True)
        first = next((token for token, (begin, last) in tokens if begin >= start or last > start), None)
        return first is not None and bool(self.has_space[first])


def is_word_part(text: str) -> bool:
    """Whether a text can be part of a word."""
    return bool(text) and all(letter.isalnum() or letter in WORD_CHARACTERS for letter in text)
