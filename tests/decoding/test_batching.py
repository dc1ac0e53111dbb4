"""Sequences are grouped into batches that fit the device."""

import os

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstock.decoding.batching import (
    MAX_BATCH_TOKENS,
    TOKENIZER_THREADS,
    length_batches,
    token_batches,
    tokenizer_threads,
)


@given(st.lists(st.integers(1, 9000), max_size=40))
def test_batches_keep_the_order_and_the_limit(lengths):
    batches = list(token_batches(range(len(lengths)), lengths.__getitem__, torch.device("cpu")))
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= MAX_BATCH_TOKENS["cpu"]


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 200))
def test_length_batches_read_the_longest_rows_first(lengths, limit):
    batches = list(length_batches(np.array(lengths, dtype=np.int64), limit))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert [lengths[row] for batch in batches for row in batch] == sorted(lengths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= limit for batch in batches)


def test_tokenizer_threads():
    assert tokenizer_threads(torch.device("cpu")) == 1
    assert tokenizer_threads(torch.device("cuda")) == min(TOKENIZER_THREADS, os.cpu_count())
