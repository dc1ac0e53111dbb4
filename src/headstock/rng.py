"""Randomness as a pure function of its key, such as (seed, epoch, index): nothing to save, nothing to share."""

import zlib
from collections.abc import Sequence

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    """The generator of a key. A word in the key keeps apart draws that serve different ends."""
    return np.random.default_rng(_numbers(key))


def derive_seed(*key: int | str) -> int:
    """One non-negative 63-bit number of a key: a seed for what cannot take a generator, such as dropout."""
    return int(np.random.SeedSequence(_numbers(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def uniforms(*key: int | str, rows: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """(rows, count) numbers in [0, 1), each a pure function of the key, its row and its place in the row.

    A generator for every row would cost more than the draws: this counts through splitmix64, all rows at once.
    """
    base = np.random.SeedSequence(_numbers(key)).generate_state(2, np.uint64)
    step, golden = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        row = _mixed(np.asarray(rows).astype(np.uint64) * step + base[0])
        x = _mixed(row[:, None] + base[1] + np.arange(1, count + 1, dtype=np.uint64) * golden)
    return (x >> np.uint64(11)) * 2.0**-53


class RandomPermutation:
    """The numbers below `count` in an order that a key decides: any stretch of it, and nothing is held.

    A network of Feistel's shuffles all numbers of so many bits. What lands at `count` or above, never more than three
    in four, is shuffled on until it is below; no two land at the same place.
    """

    def __init__(self, count: int, *key: int | str):
        self.count = count
        self.bits = np.uint64(max(1, ((max(1, count) - 1).bit_length() + 1) // 2))  # of each half
        self.keys = np.random.SeedSequence(_numbers(key)).generate_state(6, np.uint64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, stretch: slice) -> np.ndarray:
        numbers = self.shuffled(np.arange(*stretch.indices(self.count), dtype=np.uint64))
        while len(above := np.flatnonzero(numbers >= self.count)):
            numbers[above] = self.shuffled(numbers[above])
        return numbers.astype(np.int64)

    def shuffled(self, x: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self.bits) - np.uint64(1)
        left, right = x >> self.bits, x & mask
        with np.errstate(over="ignore"):
            for key in self.keys:
                left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << self.bits) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _numbers(key: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
