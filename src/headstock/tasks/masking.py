"""Random masking of tokens, whole words or spans.

B rows, T positions. A run is a sequence of maskable tokens of one document without special tokens in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from headstock.data.tokenizer import Tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.rng import uniforms


@dataclass(frozen=True)
class MaskingConfig:
    fraction: float = 0.15  # share of the tokens that are predicted
    fraction_start: float | None = None  # initial share in training, which changes linearly to `fraction`
    masked: float = 0.8  # of those, the share replaced by [MASK]
    random: float = 0.1  # and by a random token; the rest is unchanged
    unit: Literal["token", "word", "span"] = "token"  # what is masked together
    span_mean: float = 3.0  # mean tokens per span
    span_most: int = 10  # most tokens per span

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        for name in ("fraction", "fraction_start"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                problems.append((name, f"must be above 0 and below 1, not {value}"))
        if min(self.masked, self.random) < 0 or self.masked + self.random > 1:
            problems.append(("masked", f"and random must be shares, not {self.masked} and {self.random}"))
        if self.span_most < 1:
            problems.append(("span_most", f"must be at least 1, not {self.span_most}"))
        elif not 1 <= self.span_mean <= self.span_most:
            problems.append(("span_mean", f"must be from 1 to span_most {self.span_most}, not {self.span_mean}"))
        return problems


class TokenMasker:
    """Masks tokens at random. The result is a pure function of (key, row, position), independent of the batch."""

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError("this tokenizer has no [MASK], which masked language modelling needs")
        self.config, self.mask = config, tokenizer.mask
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.all_special_ids))
        if config.unit == "word":
            self.starts, self.marks = tokenizer.word_starts, tokenizer.punctuation

    def fraction(self, done: float) -> float:
        """The share to mask when the share `done` of training is over."""
        first, last = self.config.fraction_start, self.config.fraction
        return last if first is None else first + (last - first) * min(1.0, done)

    def mask_tokens(
        self,
        shown: np.ndarray,
        allowed: np.ndarray,
        documents: np.ndarray,
        *,
        key: tuple[int | str, ...],
        rows: Sequence[int],
        fraction: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) rows with some of the `allowed` tokens masked, and the labels, which are ignored elsewhere.

        Draws do not depend on the fraction: what is masked at a small one is also masked at a larger one.
        """
        count, length = shown.shape
        # the three draws of a token are adjacent, so that they do not depend on the row's length
        draws = uniforms(*key, "mask", rows=rows, count=3 * length).reshape(count, length, 3)
        chance, kind, other = draws[..., 0], draws[..., 1], draws[..., 2]
        if self.config.unit == "span":
            more = uniforms(*key, "span", rows=rows, count=2 * length).reshape(count, length, 2)
            hidden = self.in_spans(runs(allowed, documents), allowed, chance, more, fraction)
        elif self.config.unit == "word":
            hidden = self.by_words(chance, self.begins(shown, allowed, documents)) < fraction
        else:
            hidden = chance < fraction
        hidden &= allowed
        noise = self.words[(other * len(self.words)).astype(np.int64)]
        masked, random = self.config.masked, self.config.random
        seen = np.where(kind < masked, self.mask, np.where(kind < masked + random, noise, shown))
        return np.where(hidden, seen, shown), np.where(hidden, shown, IGNORE_INDEX)

    def begins(self, shown: np.ndarray, allowed: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """(B, T) True where a word starts: by its spelling, after a special token, and at the start of a run."""
        after = np.zeros(shown.shape, dtype=bool)
        after[:, 1:] = self.marks[shown[:, :-1]]
        return self.starts[shown] | after | runs(allowed, documents)

    @staticmethod
    def by_words(chance: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """All tokens of a word share the draw of its first."""
        first = np.maximum.accumulate(np.where(begins, np.arange(chance.shape[1]), 0), 1)
        return np.take_along_axis(chance, first, 1)

    def in_spans(
        self, fresh: np.ndarray, allowed: np.ndarray, chance: np.ndarray, more: np.ndarray, fraction: float
    ) -> np.ndarray:
        """(B, T) True inside a span. Spans start anywhere, may overlap, and end with their run at the latest."""
        spans = Spans.of(fraction, self.config.span_mean, self.config.span_most)
        length = chance.shape[1]
        place = np.arange(length)
        reach = np.where(allowed & (chance < spans.rate), place + spans.lengths(more[..., 0]), 0)
        # no span starts before a run, so the rest of one that would reach into it is drawn
        left = np.where(allowed & fresh, place + spans.left_over(more[..., 1]), 0)
        following = np.minimum.accumulate(np.where(fresh, place, length)[:, ::-1], 1)[:, ::-1]
        ends = np.concatenate([following[:, 1:], np.full((len(chance), 1), length)], 1)  # start of the next run
        return np.maximum.accumulate(np.minimum(np.maximum(reach, left), ends), 1) > place


def runs(allowed: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(B, T) True where a run may start: at the start of a row or document, or after a token that stays."""
    fresh = np.ones(allowed.shape, dtype=bool)
    fresh[:, 1:] = ~allowed[:, :-1] | (documents[:, 1:] != documents[:, :-1])
    return fresh


@dataclass(frozen=True)
class Spans:
    """The rate and lengths of spans that cover a given share of the tokens on average."""

    rate: float  # probability that a span starts at a position
    tails: np.ndarray  # (most,) probability that a span is longer than 0, 1, 2, ... tokens
    remains: np.ndarray  # (most,) probability that at most 0, 1, 2, ... tokens remain of earlier spans

    @staticmethod
    @lru_cache(maxsize=256)
    def of(fraction: float, mean: float, most: int) -> "Spans":
        powers = np.arange(most)
        tails = bisect(lambda ratio: float((ratio**powers).sum()), mean) ** powers  # truncated geometric distribution
        rate = bisect(lambda rate: 1.0 - float(np.prod(1.0 - rate * tails)), fraction)
        remains = np.array([np.prod(1.0 - rate * tails[1 + left :]) for left in range(most)])
        return Spans(rate, tails, remains)

    def lengths(self, draws: np.ndarray) -> np.ndarray:
        return len(self.tails) - np.searchsorted(self.tails[:0:-1], draws, side="right")

    def left_over(self, draws: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.remains[:-1], draws, side="right")


def bisect(increasing: Callable[[float], float], value: float) -> float:
    """The argument in [0, 1] at which an increasing function has a given value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < value else (low, middle)
    return (low + high) / 2
