"""Randomness as a pure function of its key, such as (seed, epoch, index): nothing to save, nothing to share."""

import zlib
from collections.abc import Sequence

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    """The generator of a key. A word in the key keeps apart draws that serve different ends."""
    return np.random.default_rng(_numbers(key))


def number(*key: int | str) -> int:
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


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _numbers(key: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
