"""Groups token sequences into padded batches that fit the device."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from headstock.model.batch import Batch, pad

# Larger batches are slower on a CPU: activations no longer fit into its caches.
MAX_BATCH_TOKENS = {"cpu": 1024, "mps": 16_384, "cuda": 65_536}
TOKENIZER_THREADS = 4

Row = TypeVar("Row")


def max_batch_tokens(device: torch.device) -> int:
    return MAX_BATCH_TOKENS.get(device.type, MAX_BATCH_TOKENS["cpu"])


def tokenizer_threads(device: torch.device) -> int:
    """How many threads tokenize ahead of the model; a model on the CPU needs the cores itself."""
    return 1 if device.type == "cpu" else min(TOKENIZER_THREADS, os.cpu_count() or 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; copied from pinned memory to a GPU, so that the copy does not block."""
    return (batch.pin_memory() if device.type == "cuda" else batch).to(device)


def batch_from_rows(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device, **fields: Any) -> Batch:
    tokens, padding = pad(rows, pad_id)
    return to_device(Batch(tokens, padding, **fields), device)


def batch_by_tokens(rows: Iterable[Row], length: Callable[[Row], int], limit: int) -> Iterator[list[Row]]:
    """Consecutive rows in batches as large as `limit` tokens including padding allow; sort rows by length first."""
    batch: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, length(row))
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], length(row)
        batch.append(row)
    if batch:
        yield batch


def token_batches(rows: Iterable[Row], length: Callable[[Row], int], device: torch.device) -> Iterator[list[Row]]:
    """Consecutive rows in batches of as many padded tokens as the device handles well."""
    return batch_by_tokens(rows, length, max_batch_tokens(device))


def length_batches(lengths: np.ndarray, limit: int) -> Iterator[list[int]]:
    """All indices in batches of similar length and up to `limit` tokens, longest first so that memory peaks early."""
    order = np.argsort(-lengths, kind="stable")
    sizes, indices, start = lengths[order].tolist(), order.tolist(), 0
    while start < len(indices):
        end = start + max(1, limit // max(1, sizes[start]))  # the first row of a batch is its longest
        yield indices[start:end]
        start = end
