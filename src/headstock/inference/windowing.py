"""How a finished model is shown texts: the marks around them, the parts of long ones, and rows of like length together.

B rows, T places in a row.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from headstock.data.tokenizer import Tokenizer
from headstock.model.batch import Batch, pad
from headstock.tasks.base import Task, bos_id, closing_ids

# About so many are read at once. On a CPU more are slower: what a layer makes then no longer fits into the processor's
# own memory, and is asked from the system anew each time.
MAX_BATCH_TOKENS = {"cpu": 1024, "mps": 16_384, "cuda": 65_536}
TOKENIZER_THREADS = 4  # threads that cut texts at the most while a GPU reads others

Row = TypeVar("Row")


@dataclass(frozen=True)
class SpecialTokens:
    """What stands before and after every text that a model reads, as it did when the model was trained."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int

    def wrap(self, tokens: Sequence[int]) -> list[int]:
        return [*self.prefix, *tokens, *self.suffix]

    def row_length(self, part: "Window") -> int:
        """How long the row of a part is."""
        return part.end - part.start + len(self.prefix) + len(self.suffix)

    def capacity(self, length: int) -> int:
        """How many of a text's own tokens fit into a row of `length`."""
        return max(1, length - len(self.prefix) - len(self.suffix))


def special_tokens_for(task: Task, tokenizer: Tokenizer, *, left_to_right: bool = False) -> SpecialTokens:
    """The marks a task puts around a text; where it learned pairs of texts, one text alone is closed too.

    Whatever reads left to right begins with the start mark and closes nothing: the text may go on.
    """
    filler = tokenizer.pad or 0
    if left_to_right:
        return SpecialTokens((bos_id(tokenizer, "start"),), (), filler)
    start = bos_id(tokenizer, getattr(task.config, "opening", task.bos_role))
    closed = task.needs_sentences or getattr(task.config, "closed", False)
    return SpecialTokens((start,), closing_ids(tokenizer) if closed else (), filler)


class Window(NamedTuple):
    """A stretch of a text that is read in one row, and the tokens of it that are taken from this row."""

    start: int
    end: int
    keep_start: int
    keep_end: int  # one past the last token that is taken

    def covers(self, text: Sequence[int]) -> bool:
        """Whether it is all of its text."""
        return self.end - self.start == len(text)


def windows(length: int, room: int, *, ahead: bool) -> list[Window]:
    """A text of `length` tokens in rows of at most `room` that overlap by half; every token is taken once.

    It is taken where it has most context: `ahead`, the model looks to both sides, so that is the row in whose middle
    it stands; otherwise the row that reaches back furthest.
    """
    if length <= room:
        return [Window(0, length, 0, length)]
    step = max(1, room // 2)
    rows = -(-(length - room) // step) + 1
    begins = [min(row * step, length - room) if ahead else row * step for row in range(rows)]
    ends = [min(begin + room, length) for begin in begins]
    # where a token could be taken from either of two rows, it is taken from the earlier up to here
    turns = [(begins[row + 1] + ends[row]) // 2 if ahead else ends[row] for row in range(rows - 1)]
    return [Window(*part) for part in zip(begins, ends, [0, *turns], [*turns, length], strict=True)]


def max_batch_tokens(device: torch.device) -> int:
    return MAX_BATCH_TOKENS.get(device.type, MAX_BATCH_TOKENS["cpu"])


def tokenizer_threads(device: torch.device) -> int:
    """How many threads cut texts while a model reads others: on a CPU it needs the processors itself."""
    return 1 if device.type == "cpu" else min(TOKENIZER_THREADS, os.cpu_count() or 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on the device; a GPU fetches it by itself, so that the next can be made while it still reads."""
    return (batch.pin_memory() if device.type == "cuda" else batch).to(device)


def token_batches(rows: Iterable[Row], length: Callable[[Row], int], device: torch.device) -> Iterator[list[Row]]:
    """Rows as they come, as many at once as a device reads well; of like length if they come sorted."""
    most = max_batch_tokens(device)
    held: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, length(row))
        if held and longest * (len(held) + 1) > most:
            yield held
            held, longest = [], length(row)
        held.append(row)
    if held:
        yield held


def padded_batch(shown: Sequence[Sequence[int]], filler: int, device: torch.device, **more: Any) -> Batch:
    """Rows of tokens as one batch on the device."""
    tokens, padding = pad(shown, filler)
    return to_device(Batch(tokens, padding, **more), device)
