"""Positions of labels and boundaries of documents, which the data side precomputes."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, make_cu_seqlens


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.floats(0, 1), st.integers(0, 99))
def test_label_positions_are_those_of_labels_and_a_few_without(rows, length, share, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.where(torch.rand(rows, length, generator=generator) < share, 1, IGNORE_INDEX)
    positions = find_label_positions(labels)
    expected = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    assert torch.equal(positions[: len(expected)], expected)
    assert (labels.flatten()[positions[len(expected) :]] == IGNORE_INDEX).all()
    assert len(positions) - len(expected) <= max(8, labels.numel() // 64)
    hidden = torch.randn(rows, length, 3, generator=generator)
    batch = Batch(labels, labels={"token": labels}, label_positions={"token": positions})
    vectors, gathered = batch.gather_labelled("token", hidden)
    all_vectors, all_labels = Batch(labels, labels={"token": labels}).gather_labelled("token", hidden)
    is_labelled = gathered != IGNORE_INDEX
    assert torch.equal(vectors[is_labelled], all_vectors) and torch.equal(gathered[is_labelled], all_labels)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5))
def test_cu_seqlens_split_rows_into_documents(sizes):
    length = max(map(sum, sizes))
    documents = torch.full((len(sizes), length), -1)
    for row, counts in enumerate(sizes):
        documents[row, : sum(counts)] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    cu_seqlens = make_cu_seqlens(documents)
    assert cu_seqlens.dtype == torch.int32 and len(cu_seqlens) & (len(cu_seqlens) - 1) == 0
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == documents.numel()
    parts = [documents.flatten()[begin:end] for begin, end in pairwise(cu_seqlens) if begin < end]
    assert all((part == part[0]).all() for part in parts)
    assert len(parts) == sum(len(set(row)) for row in documents.tolist())
