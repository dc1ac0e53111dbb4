"""Which words fit where a text has [MASK], with their probabilities; also words of several pieces.

N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headstock.data.mask_gaps import MASK, MaskGap, SurfaceForms
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.decoding.sampling import check_scores
from headstock.errors import UserError
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.model import Model

BEAMS = 16  # beginnings of a word that are followed at the least
SCORES = 2**25  # that are held at once at the most, one for each entry of the vocabulary after each beginning


@dataclass(frozen=True)
class FillCandidate:
    """A word for a mask, as a person reads it."""

    token: str
    probability: float
    pieces: int  # how many tokens it is
    log_probability: float  # natural logarithm; of several tokens the sum, each given those before it
    share: float | None = None  # probability relative to all candidates, where candidates were given


@dataclass(frozen=True)
class FilledText:
    text: str
    fills: list[list[FillCandidate]]  # for each mask, the likeliest first
    filled: str  # the text with the likeliest word at every mask


@dataclass(frozen=True)
class WordPrefix:
    """Some pieces of a word and the logarithm of their probability."""

    pieces: tuple[int, ...] = ()
    score: float = 0.0


class MaskFiller:
    """A model that tells hidden tokens from both sides, at work on texts with masks."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, special: SpecialTokens, length: int, shift: int):
        self.model, self.tokenizer, self.spelling = model, tokenizer, SurfaceForms(tokenizer)
        self.special, self.room, self.shift = special, special.capacity(length), shift

    def fill(self, text: str, *, top: int, pieces: int, among: Sequence[str] = ()) -> FilledText:
        """The likeliest words for each mask, while all other masks stay masks."""
        most = SCORES // self.tokenizer.vocabulary // 2
        if top > most and pieces > 1 and not among:
            hint = "with one piece, any number"
            raise UserError(f"top {top:,}: of words of up to {pieces} pieces at most {most:,} can be found; {hint}")
        self.tokenizer.encode_batch([text, *among])  # what is no text is refused as it was given, masks and all
        ids, gaps = self.spelling.tokenize(text)
        fills = []
        for gap in gaps:
            if among:
                fills.append(normalize_candidates(rank_candidates(self.score_words(ids, gap, among))))
            else:
                words = [
                    word
                    for count in range(1, pieces + 1)
                    for word in self.search_words(ids, gap, count, beams=max(BEAMS, 2 * top))
                ]
                fills.append(rank_candidates(words)[:top])
        best = [row[0].token if row else MASK for row in fills]
        return FilledText(text, fills, self.spelling.fill(text, best))

    def search_words(self, ids: list[int], gap: MaskGap, count: int, *, beams: int) -> list[tuple[str, WordPrefix]]:
        """The likeliest words of `count` pieces, found left to right with so many masks in the place of one."""
        spelling = self.spelling
        fits = spelling.spaced == gap.spaced  # (V,)
        fits &= spelling.whole if count == 1 else spelling.begins
        goes_on = spelling.lettered & ~spelling.spaced
        held = [WordPrefix()]
        for step in range(count):
            scores = self.mask_log_probabilities(
                [self.masked_row(ids, gap, one.pieces, count) for one in held]
            )  # (N, V)
            scores[:, ~(goes_on if step else fits)] = -math.inf
            longer = np.array([one.score for one in held])[:, None] + scores
            best = np.argpartition(-longer, min(beams, longer.size) - 1, axis=None)[:beams]
            held = [
                WordPrefix((*held[row].pieces, int(piece)), float(longer[row, piece]))
                for row, piece in zip(*np.unravel_index(np.sort(best), longer.shape), strict=True)
                if longer[row, piece] > -math.inf
            ]
            if not held:
                return []
        words = [(spelling.word(one.pieces), one) for one in held]
        # other cuts of a word are not how the tokenizer writes it, and half a character is none
        return [
            (word, one)
            for word, one in words
            if count == 1 or ("\ufffd" not in word and tuple(spelling.tokens_at(gap, word)) == one.pieces)
        ]

    def score_words(self, ids: list[int], gap: MaskGap, words: Sequence[str]) -> list[tuple[str, WordPrefix]]:
        """How likely each of the given words is, of however many pieces."""
        cut = [self.spelling.tokens_at(gap, word) for word in words]
        for word, pieces in zip(words, cut, strict=True):
            if not pieces or self.tokenizer.unk in pieces:
                raise UserError(f"{word!r}: this tokenizer cannot write it, so it has no probability")
            if len(pieces) > self.room:
                raise UserError(f"{word!r}: is {len(pieces):,} tokens; this run reads rows of {self.room:,}")
        rows = [self.masked_row(ids, gap, pieces[:step], len(pieces)) for pieces in cut for step in range(len(pieces))]
        scores = self.mask_log_probabilities(rows)  # (N, V)
        found, at = [], 0
        for word, pieces in zip(words, cut, strict=True):
            score = float(sum(scores[at + step, piece] for step, piece in enumerate(pieces)))
            found.append((word, WordPrefix(tuple(pieces), score)))
            at += len(pieces)
        return found

    def masked_row(self, ids: list[int], gap: MaskGap, pieces: Sequence[int], count: int) -> tuple[list[int], int]:
        """What the model is shown, a word's first pieces being known and the others hidden, and where the next is."""
        hidden = [self.spelling.mask] * (count - len(pieces))
        text = [*ids[: gap.position], *pieces, *hidden, *ids[gap.position + 1 :]]
        next_one = gap.position + len(pieces)
        # a text too long for a row is read around the word
        begin = max(0, min(gap.position + count // 2 - self.room // 2, len(text) - self.room))
        shown = self.special.wrap(text[begin : begin + self.room])
        return shown, next_one - begin + len(self.special.prefix)

    @torch.inference_mode()
    @fast_cpu_kernels()
    def mask_log_probabilities(self, rows: Sequence[tuple[list[int], int]]) -> np.ndarray:
        """(N, V) the logarithm of each entry's probability at the hidden place of each row."""
        device, found = self.model.device, []
        for part in token_batches(rows, lambda row: len(row[0]), device):
            batch = batch_from_rows([shown for shown, _ in part], self.special.pad, device, causal=False)
            places = torch.tensor([place - self.shift for _, place in part], device=device)
            scores = (
                self.model.heads["token"](self.model(batch, query_positions=places).hidden.squeeze(1))
                .float()
                .log_softmax(-1)
            )
            check_scores(scores)
            found.append(scores[:, : self.tokenizer.vocabulary].cpu().double().numpy())
        return np.concatenate(found)


def rank_candidates(words: Sequence[tuple[str, WordPrefix]]) -> list[FillCandidate]:
    """The likeliest first, a word that can be written in several ways once."""
    found: dict[str, FillCandidate] = {}
    for word, one in sorted(words, key=lambda pair: -pair[1].score):
        found.setdefault(word, FillCandidate(word, math.exp(one.score), len(one.pieces), one.score))
    return list(found.values())


def normalize_candidates(fills: Sequence[FillCandidate]) -> list[FillCandidate]:
    """The same candidates with their probabilities normalised over them: a softmax of the log-probabilities.

    The probabilities themselves may all be too small for a float, as those of long words are.
    """
    most = max(fill.log_probability for fill in fills)
    weights = [math.exp(fill.log_probability - most) for fill in fills]
    return [replace(fill, share=weight / sum(weights)) for fill, weight in zip(fills, weights, strict=True)]
