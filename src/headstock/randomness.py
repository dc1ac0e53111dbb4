"""Randomness as a pure function of its key, such as (seed, epoch, index): nothing to save, nothing to share."""

import zlib

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    """The generator of a key. A word in the key keeps apart draws that serve different ends."""
    return np.random.default_rng(_numbers(key))


def number(*key: int | str) -> int:
    """One non-negative 63-bit number of a key: a seed for what cannot take a generator, such as dropout."""
    return int(np.random.SeedSequence(_numbers(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _numbers(key: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
