"""Measures of generated text that need no model: repetition, diversity, vocabulary, and copies of training text.

Texts are compared as words, so that texts of different tokenizers can be compared. S texts, N words of a text.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from headstock.intervals import Interval, ratio_interval

WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
COPY_WORDS = 8  # a span of this many words that occurs in the training text counts as copied
BLEU_ORDER = 4
Words = Sequence[str]


def split_words(text: str) -> list[str]:
    """The words and punctuation marks of a text.

    >>> split_words("It's well-made, isn't it?")
    ["It's", 'well-made', ',', "isn't", 'it', '?']
    """
    return WORD.findall(text)


def ngrams(words: Words, n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def mean_interval(values: Sequence[float], weights: Sequence[float] | None = None, *, key: str) -> Interval:
    """The (weighted) mean of values per text, with its bootstrap interval over the texts."""
    sums = np.asarray(values, dtype=float)
    counts = np.ones_like(sums) if weights is None else np.asarray(weights, dtype=float)
    return ratio_interval(sums * counts, counts, key=("text-quality", key))


# Repetition within a text


def repetition(words: Words, n: int) -> float:
    """rep-n: the share of a text's n-grams that it has had before (Welleck et al., 2020).

    >>> repetition("a b a b a b".split(), 2)
    0.6
    """
    grams = ngrams(words, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def longest_repeat(words: Words) -> int:
    """The longest span of words that occurs twice in a text, overlaps included.

    >>> longest_repeat("to be or not to be".split())
    2
    """
    low, high = 0, len(words) - 1  # if a span of n words repeats, so do shorter ones
    while low < high:
        n = (low + high + 1) // 2
        if len(set(ngrams(words, n))) < len(words) - n + 1:
            low = n
        else:
            high = n - 1
    return max(0, low)


# Diversity across texts


def distinct(texts: Sequence[Words], n: int) -> float:
    """distinct-n: the share of different ones among the n-grams of all texts (Li et al., 2016); falls with size."""
    grams = Counter(gram for words in texts for gram in ngrams(words, n))
    return len(grams) / max(1, grams.total())


def zipf_coefficient(texts: Sequence[Words]) -> float:
    """The exponent s of frequency ~ 1 / rank^s, by least squares in the logarithms; about 1 for human text."""
    counts = np.sort(np.fromiter(Counter(word for words in texts for word in words).values(), float))[::-1]
    if len(counts) < 2:
        return math.nan
    slope, _ = np.polyfit(np.log(np.arange(1, len(counts) + 1)), np.log(counts), 1)
    return -float(slope)


def self_bleu(texts: Sequence[Words]) -> list[float]:
    """The BLEU-4 of each text with all others as its references, from 0 to 100 (Zhu et al., 2018): high if alike.

    Smoothed like sacrebleu's sentence BLEU. The largest two counts of each n-gram over all texts give the clipped
    counts without a comparison of every pair.
    """
    counts = [[Counter(ngrams(words, n)) for n in range(1, BLEU_ORDER + 1)] for words in texts]
    largest: dict[tuple[str, ...], tuple[int, int]] = {}
    for text in counts:
        for grams in text:
            for gram, count in grams.items():
                first, second = largest.get(gram, (0, 0))
                largest[gram] = (count, first) if count > first else (first, max(second, count))
    lengths = np.sort([len(words) for words in texts])
    return [
        _bleu(
            [
                (
                    sum(
                        min(count, largest[gram][1 if count == largest[gram][0] else 0])
                        for gram, count in grams.items()
                    ),
                    grams.total(),
                )
                for grams in text
            ],
            len(words),
            _closest_other(lengths, len(words)),
        )
        for text, words in zip(counts, texts, strict=True)
    ]


def _closest_other(lengths: np.ndarray, own: int) -> int:
    """The length among the other texts that is closest to a text's own; the shorter one of two."""
    others = np.delete(lengths, int(np.searchsorted(lengths, own)))
    return int(min(others, key=lambda length: (abs(length - own), length), default=own))


def _bleu(matches: Sequence[tuple[int, int]], length: int, reference: int) -> float:
    logs, smoothing = [], 1.0
    for correct, total in matches:
        if not total:
            break  # effective order: a short text has no longer n-grams
        if not correct:
            smoothing *= 2
        logs.append(math.log(correct / total if correct else 1 / (smoothing * total)))
    if not logs or not any(correct for correct, _ in matches):
        return 0.0
    brevity = min(0.0, 1 - reference / max(1, length))
    return 100 * math.exp(brevity + sum(logs) / len(logs))


# Copies of training text


class CopyDetector:
    """Finds the spans of texts that occur word for word in a training text, by hashes of its n-grams."""

    def __init__(self, texts: Sequence[Words], training: Iterable[str]):
        vocabulary = {word: i for i, word in enumerate(dict.fromkeys(word for words in texts for word in words), 1)}
        self.texts = [np.array([vocabulary[word] for word in words], dtype=np.uint64) for words in texts]
        # words that no text has are 0, and so are the ends of documents: copied spans do not contain them
        numbers = (vocabulary.get(word, 0) for document in training for word in (*split_words(document), ""))
        self.stream = np.fromiter(numbers, dtype=np.uint64)

    def occurrences(self) -> Iterator[list[np.ndarray]]:
        """For spans of 1, 2, ... words and each text: True where a span that occurs in the training text starts."""
        for hashes, *own in zip(span_hashes(self.stream), *map(span_hashes, self.texts), strict=False):
            known = np.unique(hashes[0][hashes[1]])
            yield [is_member(values, known) for values, _ in own]

    def measure(self, n: int = COPY_WORDS) -> tuple[list[int], list[float]]:
        """Of each text the longest copied span, and the share of words in copied spans of n words or more."""
        longest, shares = [0] * len(self.texts), [0.0] * len(self.texts)
        for size, found in enumerate(self.occurrences(), 1):
            longest = [size if starts.any() else before for starts, before in zip(found, longest, strict=True)]
            if size == n:
                shares = [covered_share(starts, n) for starts in found]
            if not any(starts.any() for starts in found):
                break
        return longest, shares


def is_member(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """True where a value occurs in an ordered array, which np.isin would sort again for every text."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def covered_share(starts: np.ndarray, n: int) -> float:
    """The share of words that belong to a span of n words that starts at a True."""
    covered = np.zeros(len(starts) + n - 1, dtype=bool)
    for start in np.flatnonzero(starts):
        covered[start : start + n] = True
    return float(covered.mean())


def span_hashes(words: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For n = 1, 2, ...: a 64-bit hash of every span of n words, and True where the span has no 0 in it."""
    hashes, whole = np.zeros(len(words) + 1, dtype=np.uint64), np.ones(len(words) + 1, dtype=bool)
    with np.errstate(over="ignore"):
        mixed = (words + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
        for n in itertools.count(1):
            last = slice(min(n - 1, len(words)), None)
            hashes = (hashes[:-1] * np.uint64(0x9E3779B97F4A7C15)) ^ mixed[last]
            hashes ^= hashes >> np.uint64(29)
            whole = whole[:-1] & (words[last] != 0)
            yield hashes, whole
