"""Streams rows to a task: reads them in growing chunks and tokenizes ahead of the model."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from headstock.data.records import Records
from headstock.decoding.batching import tokenizer_threads
from headstock.tasks.labelled import LabelledTask
from headstock.train.prefetch import MAX_CHUNK, growing_chunks, prefetch_map


def prepare_ahead(rows: Iterable[Any] | Records, task: LabelledTask, device: torch.device) -> Iterator[Any]:
    """Chunks of rows as the task prepares them; the next ones are tokenized while the model runs."""
    prepare = partial(task.prepare, labelled=False)
    return prefetch_map(prepare, record_batches(rows, task), threads=tokenizer_threads(device))


def record_batches(rows: Iterable[Any] | Records, task: LabelledTask) -> Iterator[Records]:
    """Rows in chunks of up to a few thousand, within which they are sorted by length."""
    if isinstance(rows, Records):
        yield from (rows.select(part) for part in growing_chunks(range(len(rows)), most=MAX_CHUNK))
        return
    for part in growing_chunks(rows, most=MAX_CHUNK):
        yield Records("row", list(range(1, len(part) + 1)), task.columns_of(part))
