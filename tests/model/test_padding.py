"""Padding rows of tokens into one batch."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headstock.model.batch import IGNORE_INDEX, pad


@given(st.lists(st.lists(st.integers(-100, 60_000), max_size=9), min_size=1, max_size=9))
@example([[], []])
@example([[], [1]])
@example([[1, 2], [3, 4]])
def test_rows_are_padded_on_the_right_if_necessary(rows):
    tokens, padding = pad(rows, IGNORE_INDEX)
    longest = max(map(len, rows))
    assert tokens.dtype == torch.long
    assert tokens.shape == (len(rows), longest)
    assert tokens.tolist() == [row + [IGNORE_INDEX] * (longest - len(row)) for row in rows]
    if padding is None:
        assert all(len(row) == longest for row in rows)
    else:
        assert padding.tolist() == [[position >= len(row) for position in range(longest)] for row in rows]
        assert padding.any()


def test_rows_may_be_any_sequence():
    tokens, _ = pad([(1, 2), range(3, 6), torch.tensor([6]).tolist()], 0)
    assert tokens.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
