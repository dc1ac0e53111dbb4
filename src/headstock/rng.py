"""Random numbers as pure functions of a key such as (seed, epoch, index), so that no generator state is saved."""

import zlib
from collections.abc import Sequence

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    """The generator of a key. Strings in the key separate independent uses of the same seed."""
    return np.random.default_rng(_integers(key))


def derive_seed(*key: int | str) -> int:
    """A non-negative 63-bit seed, for code that cannot take a generator, such as dropout."""
    return int(np.random.SeedSequence(_integers(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def uniforms(*key: int | str, rows: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """(rows, count) numbers in [0, 1), each a pure function of the key, its row number and its column.

    Uses splitmix64 in counter mode for all rows at once; one generator per row would cost more than the draws.
    """
    base = np.random.SeedSequence(_integers(key)).generate_state(2, np.uint64)
    row_step, column_step = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        row = splitmix64(np.asarray(rows).astype(np.uint64) * row_step + base[0])
        x = splitmix64(row[:, None] + base[1] + np.arange(1, count + 1, dtype=np.uint64) * column_step)
    return (x >> np.uint64(11)) * 2.0**-53


class RandomPermutation:
    """A pseudorandom permutation of range(count), evaluated one slice at a time in constant memory.

    A Feistel network permutes all integers of a fixed number of bits. Results of `count` or above, at most three in
    four, are permuted again until they fall below `count`, which keeps the mapping one-to-one.
    """

    def __init__(self, count: int, *key: int | str):
        self.count = count
        self.half_bits = np.uint64(max(1, ((max(1, count) - 1).bit_length() + 1) // 2))
        self.round_keys = np.random.SeedSequence(_integers(key)).generate_state(6, np.uint64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: slice) -> np.ndarray:
        numbers = self._permute(np.arange(*indices.indices(self.count), dtype=np.uint64))
        while len(outside := np.flatnonzero(numbers >= self.count)):
            numbers[outside] = self._permute(numbers[outside])
        return numbers.astype(np.int64)

    def _permute(self, x: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self.half_bits) - np.uint64(1)
        left, right = x >> self.half_bits, x & mask
        with np.errstate(over="ignore"):
            for key in self.round_keys:
                left, right = right, left ^ (splitmix64(right + key) & mask)
        return (left << self.half_bits) | right


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, a hash of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _integers(key: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
