"""Fills [MASK] in texts with words of one or several tokens, by beam search over the tokens of a word.

N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headstock.data.mask_gaps import MASK, MaskGap, SurfaceForms
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.decoding.sampling import check_logits
from headstock.errors import UserError
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.model import Model
from headstock.results import Result

MIN_BEAMS = 16
MAX_SCORES = 2**25  # held at once: vocabulary times hypotheses


@dataclass(frozen=True)
class FillCandidate:
    """A word for a mask."""

    token: str
    probability: float
    pieces: int  # number of tokens
    log_probability: float  # natural logarithm; the sum over the tokens, each given those before it
    share: float | None = None  # probability normalized over the given candidates


@dataclass(frozen=True, eq=False)
class FilledText(Result):
    """A text with masks, and words for them."""

    text: str
    fills: list[list[FillCandidate]]  # per mask, likeliest first
    filled: str  # the text with the likeliest word for every mask

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"text": self.text, "mask": mask, "token": word.token, "probability": word.probability}
            for mask, words in enumerate(self.fills)
            for word in words
        ]


@dataclass(frozen=True)
class WordPrefix:
    """The first tokens of a word and their log-probability."""

    pieces: tuple[int, ...] = ()
    score: float = 0.0


class MaskFiller:
    """Predicts masked words with a bidirectional language model."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, special: SpecialTokens, length: int, shift: int):
        self.model, self.tokenizer, self.spelling = model, tokenizer, SurfaceForms(tokenizer)
        self.special, self.room, self.shift = special, special.capacity(length), shift

    def fill(
        self, text: str, *, top: int, pieces: int, among: Sequence[str] = (), normalize: bool = False
    ) -> FilledText:
        """The likeliest words for each mask; the other masks stay masked."""
        limit = MAX_SCORES // self.tokenizer.vocabulary // 2
        if top > limit and pieces > 1 and not among:
            limits = f"at most {limit:,} words of up to {pieces} pieces are available (or use pieces=1)"
            raise UserError(f"top {top:,}: {limits}")
        self.tokenizer.encode_batch([text, *among])  # validates the original text
        ids, gaps = self.spelling.tokenize(text)
        fills = []
        for gap in gaps:
            if among:
                words = self.score_words(ids, gap, among)
                fills.append(normalize_candidates(rank_candidates(words), per_token=normalize))
            else:
                words = [
                    word
                    for count in range(1, pieces + 1)
                    for word in self.search_words(ids, gap, count, beams=max(MIN_BEAMS, 2 * top))
                ]
                fills.append(rank_candidates(words)[:top])
        best = [row[0].token if row else MASK for row in fills]
        return FilledText(text, fills, self.spelling.fill(text, best))

    def search_words(self, ids: list[int], gap: MaskGap, count: int, *, beams: int) -> list[tuple[str, WordPrefix]]:
        """The likeliest words of `count` tokens, predicted left to right at `count` masks."""
        spelling = self.spelling
        fits = spelling.has_space == gap.expects_space  # (V,)
        fits &= spelling.is_complete if count == 1 else spelling.can_begin_word
        continues = spelling.is_word_part & ~spelling.has_space
        beam = [WordPrefix()]
        for step in range(count):
            rows = [self.masked_row(ids, gap, prefix.pieces, count) for prefix in beam]
            scores = self.mask_log_probabilities(rows)  # (N, V)
            scores[:, ~(continues if step else fits)] = -math.inf
            totals = np.array([prefix.score for prefix in beam])[:, None] + scores
            best = np.argpartition(-totals, min(beams, totals.size) - 1, axis=None)[:beams]
            beam = [
                WordPrefix((*beam[row].pieces, int(piece)), float(totals[row, piece]))
                for row, piece in zip(*np.unravel_index(np.sort(best), totals.shape), strict=True)
                if totals[row, piece] > -math.inf
            ]
            if not beam:
                return []
        words = [(spelling.word(prefix.pieces), prefix) for prefix in beam]
        # drop incomplete characters and tokenizations that the tokenizer itself does not produce
        return [
            (word, prefix)
            for word, prefix in words
            if count == 1 or ("\ufffd" not in word and tuple(spelling.tokens_at(gap, word)) == prefix.pieces)
        ]

    def score_words(self, ids: list[int], gap: MaskGap, words: Sequence[str]) -> list[tuple[str, WordPrefix]]:
        """The log-probability of each of the given words."""
        tokenized = [self.spelling.tokens_at(gap, word) for word in words]
        for word, pieces in zip(words, tokenized, strict=True):
            if not pieces or self.tokenizer.unk in pieces:
                raise UserError(f"{word!r}: the tokenizer cannot represent it, so it has no probability")
            if len(pieces) > self.room:
                raise UserError(f"{word!r}: is {len(pieces):,} tokens; this run reads rows of {self.room:,}")
        rows = [
            self.masked_row(ids, gap, pieces[:step], len(pieces)) for pieces in tokenized for step in range(len(pieces))
        ]
        scores = iter(self.mask_log_probabilities(rows))  # N times (V,)
        return [
            (word, WordPrefix(tuple(pieces), float(sum(next(scores)[piece] for piece in pieces))))
            for word, pieces in zip(words, tokenized, strict=True)
        ]

    def masked_row(self, ids: list[int], gap: MaskGap, pieces: Sequence[int], count: int) -> tuple[list[int], int]:
        """The input with the first tokens of a word filled in and the others masked, and the next token's position."""
        masks = [self.spelling.mask] * (count - len(pieces))
        text = [*ids[: gap.position], *pieces, *masks, *ids[gap.position + 1 :]]
        # of a long text, the part around the word is read
        start = max(0, min(gap.position + count // 2 - self.room // 2, len(text) - self.room))
        row = self.special.wrap(text[start : start + self.room])
        return row, gap.position + len(pieces) - start + len(self.special.prefix)

    @torch.inference_mode()
    @fast_cpu_kernels()
    def mask_log_probabilities(self, rows: Sequence[tuple[list[int], int]]) -> np.ndarray:
        """(N, V) the log-probabilities at the masked position of each row."""
        device, results = self.model.device, []
        for group in token_batches(rows, lambda row: len(row[0]), device):
            batch = batch_from_rows([row for row, _ in group], self.special.pad, device, causal=False)
            positions = torch.tensor([position - self.shift for _, position in group], device=device)
            hidden = self.model(batch, query_positions=positions).hidden.squeeze(1)
            scores = self.model.heads["token"](hidden).float().log_softmax(-1)
            check_logits(scores)
            results.append(scores[:, : self.tokenizer.vocabulary].cpu().double().numpy())
        return np.concatenate(results)


def rank_candidates(words: Sequence[tuple[str, WordPrefix]]) -> list[FillCandidate]:
    """Candidates by probability; a word with several tokenizations appears once."""
    candidates: dict[str, FillCandidate] = {}
    for word, prefix in sorted(words, key=lambda pair: -pair[1].score):
        candidate = FillCandidate(word, math.exp(prefix.score), len(prefix.pieces), prefix.score)
        candidates.setdefault(word, candidate)
    return list(candidates.values())


def normalize_candidates(fills: Sequence[FillCandidate], *, per_token: bool = False) -> list[FillCandidate]:
    """The candidates with shares, the largest first: a softmax, since the probabilities may underflow.

    It is that of the log-probabilities or, with `per_token`, of their means over the tokens of each candidate.
    """
    scores = [fill.log_probability / (fill.pieces if per_token else 1) for fill in fills]
    weights = [math.exp(score - max(scores)) for score in scores]
    shared = [replace(fill, share=weight / sum(weights)) for fill, weight in zip(fills, weights, strict=True)]
    return sorted(shared, key=lambda fill: -(fill.share or 0.0))
