"""Random masking of tokens, whole words or spans.

B rows, T positions. A run is a sequence of maskable tokens of one document without special tokens in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from headstock.data.tokenizer import Tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions
from headstock.rng import uniforms
from headstock.tasks.packing import TextTask


@dataclass(frozen=True)
class MaskingConfig:
    fraction: float = 0.15  # share of the tokens that are predicted
    fraction_start: float | None = None  # initial share in training, which changes linearly to `fraction`
    masked: float = 0.8  # of those, the share replaced by [MASK]
    random: float = 0.1  # and by a random token; the others are unchanged
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

    def masking_config(self) -> "MaskingConfig":
        return self


class TokenMasker:
    """Masks tokens at random. The result is a pure function of (key, row, position), independent of the batch."""

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError("this tokenizer has no [MASK], which masked language modelling needs")
        self.config, self.mask = config, tokenizer.mask
        self.ordinary_tokens = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.all_special_ids))
        if config.unit == "word":
            self.word_starts, self.punctuation = tokenizer.word_starts, tokenizer.punctuation

    def fraction(self, progress: float) -> float:
        """The share to mask when the share `progress` of training is done."""
        first, last = self.config.fraction_start, self.config.fraction
        return last if first is None else first + (last - first) * min(1.0, progress)

    def mask_tokens(
        self,
        tokens: np.ndarray,
        maskable: np.ndarray,
        documents: np.ndarray,
        *,
        key: tuple[int | str, ...],
        rows: Sequence[int] | np.ndarray,
        fraction: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) rows with some of the `maskable` tokens masked, and the labels: the original tokens.

        Draws do not depend on the fraction: what is masked at a small one is also masked at a larger one.
        """
        count, length = tokens.shape
        # the three draws of a token are adjacent, so that they do not depend on the row's length
        draws = uniforms(*key, "mask", rows=rows, count=3 * length).reshape(count, length, 3)
        chance, replacement, token_draw = draws[..., 0], draws[..., 1], draws[..., 2]
        if self.config.unit == "span":
            span_draws = uniforms(*key, "span", rows=rows, count=2 * length).reshape(count, length, 2)
            selected = self.in_spans(run_starts(maskable, documents), maskable, chance, span_draws, fraction)
        elif self.config.unit == "word":
            selected = self.by_words(chance, self.is_word_start(tokens, maskable, documents)) < fraction
        else:
            selected = chance < fraction
        selected &= maskable
        random_tokens = self.ordinary_tokens[(token_draw * len(self.ordinary_tokens)).astype(np.int64)]
        masked, random = self.config.masked, self.config.random
        replaced = np.where(replacement < masked + random, random_tokens, tokens)
        replaced = np.where(replacement < masked, self.mask, replaced)
        return np.where(selected, replaced, tokens), np.where(selected, tokens, IGNORE_INDEX)

    def is_word_start(self, tokens: np.ndarray, maskable: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """(B, T) True where a word starts: by its spelling, after punctuation, and at the start of a run."""
        after_punctuation = np.zeros(tokens.shape, dtype=bool)
        after_punctuation[:, 1:] = self.punctuation[tokens[:, :-1]]
        return self.word_starts[tokens] | after_punctuation | run_starts(maskable, documents)

    @staticmethod
    def by_words(chance: np.ndarray, is_word_start: np.ndarray) -> np.ndarray:
        """All tokens of a word share the draw of its first."""
        first = np.maximum.accumulate(np.where(is_word_start, np.arange(chance.shape[1]), 0), 1)
        return np.take_along_axis(chance, first, 1)

    def in_spans(
        self, is_start: np.ndarray, maskable: np.ndarray, chance: np.ndarray, draws: np.ndarray, fraction: float
    ) -> np.ndarray:
        """(B, T) True inside a span. Spans start anywhere, may overlap, and end with their run at the latest."""
        spans = Spans.of(fraction, self.config.span_mean, self.config.span_most)
        length = chance.shape[1]
        columns = np.arange(length)
        span_ends = np.where(maskable & (chance < spans.rate), columns + spans.lengths(draws[..., 0]), 0)
        # no span starts before a run, so the remainder of one that would reach into it is drawn
        earlier = np.where(maskable & is_start, columns + spans.remainders(draws[..., 1]), 0)
        next_start = np.minimum.accumulate(np.where(is_start, columns, length)[:, ::-1], 1)[:, ::-1]
        run_ends = np.concatenate([next_start[:, 1:], np.full((len(chance), 1), length)], 1)
        return np.maximum.accumulate(np.minimum(np.maximum(span_ends, earlier), run_ends), 1) > columns


class MaskingTask(TextTask):
    """A pretraining objective with masked tokens."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.masker = TokenMasker(config.masking_config(), tokenizer)

    def add_lm_labels(self, batch: Batch, *, key: tuple[int | str, ...], rows: np.ndarray) -> Batch:
        tokens, masker = batch.tokens.numpy(), self.masker
        maskable = ~np.isin(tokens, sorted(self.tokenizer.all_special_ids))
        if batch.padding is not None:
            maskable &= ~batch.padding.numpy()
        inputs, originals = masker.mask_tokens(
            tokens, maskable, np.zeros_like(tokens), key=key, rows=rows, fraction=masker.config.fraction
        )
        labels = np.full_like(originals, IGNORE_INDEX)
        labels[:, : labels.shape[1] - self.mask_shift] = originals[:, self.mask_shift :]
        masked = Batch(torch.from_numpy(inputs), batch.padding, segments=batch.segments)
        masked.labels = {"token": torch.from_numpy(labels)}
        masked.label_positions = {"token": find_label_positions(masked.labels["token"])}
        return replace(batch, masked=masked)


class EpochMasker:
    """Masks the rows of one epoch; validation has the same masks every time."""

    def __init__(self, task: MaskingTask, *, seed: int | None, epoch: int):
        self.task, self.training = task, seed is not None
        self.key: tuple[int | str, ...] = ("valid",) if seed is None else (seed, epoch)

    def mask(
        self, tokens: np.ndarray, maskable: np.ndarray, documents: np.ndarray, rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        masker = self.task.masker
        fraction = masker.fraction(self.task.progress if self.training else 1.0)
        return masker.mask_tokens(tokens, maskable, documents, key=self.key, rows=rows, fraction=fraction)


def run_starts(maskable: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(B, T) True where a run may start: at the start of a row or document, or after a token that is not maskable."""
    is_start = np.ones(maskable.shape, dtype=bool)
    is_start[:, 1:] = ~maskable[:, :-1] | (documents[:, 1:] != documents[:, :-1])
    return is_start


@dataclass(frozen=True)
class Spans:
    """The rate and lengths of spans that cover a given share of the tokens on average."""

    rate: float  # probability that a span starts at a position
    tails: np.ndarray  # (most,) probability that a span is longer than 0, 1, 2, ... tokens
    remainder: np.ndarray  # (most,) probability that at most 0, 1, 2, ... tokens remain of earlier spans

    @staticmethod
    @lru_cache(maxsize=256)
    def of(fraction: float, mean: float, most: int) -> "Spans":
        powers = np.arange(most)
        tails = bisect(lambda ratio: float((ratio**powers).sum()), mean) ** powers  # truncated geometric distribution
        rate = bisect(lambda rate: 1.0 - float(np.prod(1.0 - rate * tails)), fraction)
        remainder = np.array([np.prod(1.0 - rate * tails[1 + count :]) for count in range(most)])
        return Spans(rate, tails, remainder)

    def lengths(self, draws: np.ndarray) -> np.ndarray:
        return len(self.tails) - np.searchsorted(self.tails[:0:-1], draws, side="right")

    def remainders(self, draws: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.remainder[:-1], draws, side="right")


def bisect(increasing: Callable[[float], float], value: float) -> float:
    """The argument in [0, 1] at which an increasing function has a given value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < value else (low, middle)
    return (low + high) / 2
