"""Stateless random numbers: each depends only on its key, row and column."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.rng import derive_seed, generator, uniforms


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    st.integers(1, 30),
    st.integers(0, 30),
    st.randoms(use_true_random=False),
)
def test_a_draw_depends_only_on_key_row_and_column(rows, count, extra, pick):
    draws = uniforms(7, "mask", rows=rows, count=count)
    assert draws.shape == (len(rows), count)
    shuffled = list(range(len(rows)))
    pick.shuffle(shuffled)
    again = uniforms(7, "mask", rows=[rows[i] for i in shuffled], count=count + extra)
    assert np.array_equal(again[:, :count], draws[shuffled])
    for i, row in enumerate(rows):
        assert np.array_equal(uniforms(7, "mask", rows=np.array([row]), count=count)[0], draws[i])


def test_draws_are_uniform_and_independent():
    draws = uniforms(3, 1, "mask", rows=range(1000), count=400)
    assert draws.min() >= 0
    assert draws.max() < 1
    error = 5 / np.sqrt(draws.size)  # five standard errors of the mean
    assert abs(draws.mean() - 1 / 2) < error * np.sqrt(1 / 12)
    assert abs(draws.var() - 1 / 12) < error * np.sqrt(1 / 180)
    shares = np.bincount((draws * 100).astype(int).ravel(), minlength=100) / draws.size
    assert np.abs(shares - 0.01).max() < error * np.sqrt(0.01 * 0.99)
    centred = (draws - 1 / 2) / np.sqrt(1 / 12)
    for lag in (1, 2, 3, 200):
        assert abs((centred[:, :-lag] * centred[:, lag:]).mean()) < 5 / np.sqrt(centred[:, lag:].size)  # within a row
        assert abs((centred[:-lag] * centred[lag:]).mean()) < 5 / np.sqrt(centred[lag:].size)  # between rows
    assert len(np.unique(draws)) == draws.size


@pytest.mark.parametrize("other", [(3, 0, "mask"), (4, 1, "mask"), (3, 1, "noise"), (1, 3, "mask"), (3, 1)])
def test_other_keys_give_other_draws(other):
    mine = uniforms(3, 1, "mask", rows=range(200), count=50)
    theirs = uniforms(*other, rows=range(200), count=50)
    assert not np.isin(mine, theirs).any()  # also not in another column
    assert abs(np.corrcoef(mine.ravel(), theirs.ravel())[0, 1]) < 5 / np.sqrt(mine.size)


def test_seeds_and_generators_depend_only_on_the_key():
    assert derive_seed(1, 2, "dropout") == derive_seed(1, 2, "dropout")
    assert len({derive_seed(*key) for key in [(1, 2), (2, 1), (1, 2, "a"), (1, 2, "b"), (1,)]}) == 5
    assert all(0 <= derive_seed(seed, "seed") < 2**63 for seed in range(100))
    assert generator(5, "order").permutation(50).tolist() == generator(5, "order").permutation(50).tolist()
    assert generator(5, "order").permutation(50).tolist() != generator(6, "order").permutation(50).tolist()
