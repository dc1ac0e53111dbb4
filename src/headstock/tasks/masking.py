"""Which tokens are hidden and what is shown instead: the draws that masked and hybrid language modelling share.

B rows, T places in a row. A run is a stretch of tokens that may be hidden, of one document, with no mark inside.
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
    fraction: float = 0.15  # share of the tokens that must be guessed;
    fraction_start: float | None = None  # in training it may begin here and go to `fraction` in a line over the run
    masked: float = 0.8  # of those, the share shown as [MASK],
    random: float = 0.1  # and the share shown as any other token; the rest is shown as it is
    unit: Literal["token", "word", "span"] = "token"  # what is hidden together
    span_mean: float = 3.0  # tokens in a span,
    span_most: int = 10  # and the most there may be

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
    """Hides tokens; what becomes of one is a pure function of (key, row, place), whatever else is in the batch."""

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError("this tokenizer has no [MASK], which masked language modelling needs")
        self.config, self.mask = config, tokenizer.mask
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.all_special_ids))
        if config.unit == "word":
            self.starts, self.marks = tokenizer.word_starts, tokenizer.punctuation

    def fraction(self, done: float) -> float:
        """The share to hide when `done` of the run is over."""
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
        """(B, T) rows with some of the `allowed` tokens hidden, and what these were (IGNORE_INDEX at all others).

        The draws do not depend on the fraction: what is hidden at a small one is hidden at a larger one too.
        """
        count, length = shown.shape
        # a token's three numbers stand together, so that they are the same however long the row is
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
        """(B, T) True where a word begins: by its spelling, after a mark, and at the start of every run."""
        after = np.zeros(shown.shape, dtype=bool)
        after[:, 1:] = self.marks[shown[:, :-1]]
        return self.starts[shown] | after | runs(allowed, documents)

    @staticmethod
    def by_words(chance: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """Every piece takes the draw of its word's first."""
        first = np.maximum.accumulate(np.where(begins, np.arange(chance.shape[1]), 0), 1)
        return np.take_along_axis(chance, first, 1)

    def in_spans(
        self, fresh: np.ndarray, allowed: np.ndarray, chance: np.ndarray, more: np.ndarray, fraction: float
    ) -> np.ndarray:
        """(B, T) True inside a span. Spans begin anywhere, may overlap, and end at the latest with their run."""
        spans = Spans.of(fraction, self.config.span_mean, self.config.span_most)
        length = chance.shape[1]
        place = np.arange(length)
        reach = np.where(allowed & (chance < spans.rate), place + spans.lengths(more[..., 0]), 0)
        # a run's first tokens have no span begun before them to lie in: what one would have left over is drawn
        left = np.where(allowed & fresh, place + spans.left_over(more[..., 1]), 0)
        following = np.minimum.accumulate(np.where(fresh, place, length)[:, ::-1], 1)[:, ::-1]
        ends = np.concatenate([following[:, 1:], np.full((len(chance), 1), length)], 1)  # where the next run begins
        return np.maximum.accumulate(np.minimum(np.maximum(reach, left), ends), 1) > place


def runs(allowed: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(B, T) True where a run may begin: first in the row, after what may not be hidden, with another document."""
    fresh = np.ones(allowed.shape, dtype=bool)
    fresh[:, 1:] = ~allowed[:, :-1] | (documents[:, 1:] != documents[:, :-1])
    return fresh


@dataclass(frozen=True)
class Spans:
    """How often spans begin and how long they are, so that in the mean just the wanted share lies in one."""

    rate: float  # the chance that one begins at a place
    tails: np.ndarray  # (most,) the chance that one is longer than 0, 1, 2, ... tokens
    remains: np.ndarray  # (most,) the chance that at most 0, 1, 2, ... tokens are left of those begun before a place

    @staticmethod
    @lru_cache(maxsize=256)
    def of(fraction: float, mean: float, most: int) -> "Spans":
        powers = np.arange(most)
        tails = bisect(lambda ratio: float((ratio**powers).sum()), mean) ** powers  # geometric, cut at the most
        rate = bisect(lambda rate: 1.0 - float(np.prod(1.0 - rate * tails)), fraction)
        remains = np.array([np.prod(1.0 - rate * tails[1 + left :]) for left in range(most)])
        return Spans(rate, tails, remains)

    def lengths(self, draws: np.ndarray) -> np.ndarray:
        return len(self.tails) - np.searchsorted(self.tails[:0:-1], draws, side="right")

    def left_over(self, draws: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.remains[:-1], draws, side="right")


def bisect(rising: Callable[[float], float], wanted: float) -> float:
    """The number from 0 to 1 at which a rising function has the wanted value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
