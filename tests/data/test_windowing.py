"""Long texts are split into overlapping windows; each token is kept once, where it has the most context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.data.windowing import SpecialTokens, windows


@given(st.integers(0, 90), st.integers(1, 17), st.booleans(), st.none() | st.integers(1, 20))
def test_each_token_is_kept_once_where_it_has_most_context(length, size, centered, stride):
    result = windows(length, size, stride=stride, centered=centered)
    assert [position for window in result for position in range(window.keep_start, window.keep_end)] == list(
        range(length)
    )

    def context(window, position):
        """The tokens on the shorter side; at the ends of the text no context is missing."""
        left = position - window.start if window.start else length
        right = window.end - 1 - position if window.end < length and centered else length
        return min(left, right)

    for window in result:
        assert window.start <= window.keep_start <= window.keep_end <= window.end == window.start + window.size
        assert window.size <= size
        for position in range(window.keep_start, window.keep_end):
            others = [other for other in result if other.start <= position < other.end]
            assert context(window, position) == max(context(other, position) for other in others)


@given(st.integers(1, 90), st.integers(1, 17), st.none() | st.integers(1, 20))
def test_windows_are_a_stride_apart(length, size, stride):
    step = min(stride or max(1, size // 2), size)
    starts = [window.start for window in windows(length, size, stride=stride)]
    assert starts == [i * step for i in range(len(starts))]
    shifted = windows(length, size, stride=stride, centered=True)
    assert len(shifted) == len(starts) and shifted[-1].end == length
    assert all(window.size == min(size, length) for window in shifted)


@pytest.mark.parametrize(("suffix", "capacity"), [((), 7), ((3,), 6)])
def test_special_tokens_take_room(suffix, capacity):
    special = SpecialTokens((1,), suffix, 0)
    assert special.wrap([5, 6]) == [1, 5, 6, *suffix]
    assert special.capacity(8) == capacity
    assert windows(20, capacity)[0].size + len(special) == 8
