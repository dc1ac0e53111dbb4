"""Splits token sequences that are longer than the model's input into overlapping windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens around every text, as in training, and the padding token."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def wrap(self, tokens: Sequence[int]) -> list[int]:
        return [*self.prefix, *tokens, *self.suffix]

    def capacity(self, length: int) -> int:
        """How many tokens of a text fit into a sequence of `length`."""
        return max(1, length - len(self))


class Window(NamedTuple):
    """Tokens `start:end` of a text are read together; the results for `keep_start:keep_end` are kept."""

    start: int
    end: int
    keep_start: int
    keep_end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def windows(length: int, size: int, *, stride: int | None = None, centered: bool = False) -> list[Window]:
    """Windows of at most `size` tokens, `stride` apart (half a window by default), over a text of `length` tokens.

    Each token is kept from exactly one window. By default it is the first window that contains the token, the one
    with the most left context, which suits causal models. With `centered` the last window is shifted left until it is
    full, and a token is kept from the window in which the shorter side of its context is longest, which suits
    bidirectional models.
    """
    if length <= size:
        return [Window(0, length, 0, length)]
    stride = min(stride or max(1, size // 2), size)
    starts = list(range(0, length - size + stride, stride))
    if centered:
        starts[-1] = length - size
    ends = [min(start + size, length) for start in starts]
    overlaps = zip(starts[1:], ends[:-1], strict=True)
    borders = [(start + end + 1) // 2 if centered else end for start, end in overlaps]
    return [Window(*window) for window in zip(starts, ends, [0, *borders], [*borders, length], strict=True)]
