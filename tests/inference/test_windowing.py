"""How a finished model is shown texts."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstock.inference.windowing import (
    MAX_BATCH_TOKENS,
    TOKENIZER_THREADS,
    SpecialTokens,
    token_batches,
    tokenizer_threads,
    windows,
)


@given(st.integers(0, 90), st.integers(1, 17), st.booleans())
def test_every_token_is_taken_once_from_where_it_has_most_context(length, room, ahead):
    found = windows(length, room, ahead=ahead)
    taken = [place for part in found for place in range(part.keep_start, part.keep_end)]
    assert taken == list(range(length))

    def context(part, place):
        """What the model sees on the poorer side of a token; where the text itself ends, nothing is missing."""
        left = place - part.start if part.start else length
        right = part.end - 1 - place if part.end < length and ahead else length
        return min(left, right)

    for part in found:
        assert part.start <= part.keep_start <= part.keep_end <= part.end <= part.start + room
        for place in range(part.keep_start, part.keep_end):
            others = [other for other in found if other.start <= place < other.end]
            assert context(part, place) >= max(context(other, place) for other in others) - 1
            if room > 1 and not ahead and part.start:
                assert place - part.start >= room // 2  # half a row stands before it


@given(st.lists(st.integers(1, 9000), max_size=40))
def test_batches_keep_the_order_and_the_limit(lengths):
    batches = list(token_batches(range(len(lengths)), lengths.__getitem__, torch.device("cpu")))
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= MAX_BATCH_TOKENS["cpu"]


@pytest.mark.parametrize(("after", "room"), [((), 7), ((3,), 6)])
def test_marks_stand_around_a_text(after, room):
    special = SpecialTokens((1,), after, 0)
    assert special.wrap([5, 6]) == [1, 5, 6, *after]
    assert special.capacity(8) == room
    assert special.row_length(windows(20, room, ahead=True)[0]) == 8


def test_a_model_on_the_processors_has_them_for_itself():
    assert tokenizer_threads(torch.device("cpu")) == 1
    assert tokenizer_threads(torch.device("cuda")) == min(TOKENIZER_THREADS, os.cpu_count())
