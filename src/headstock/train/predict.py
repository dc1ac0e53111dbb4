"""What a trained model says of many rows: read with others of like length, told in the order they came."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.labelled import Features, LabelledTask
from headstock.text.records import Records
from headstock.train.evaluate import precision
from headstock.train.onward import AT_ONCE, growing
from headstock.train.rows import tokens_at_once


def in_parts(rows: Iterable[Any] | Records, task: LabelledTask) -> Iterator[Records]:
    """Rows as their task has them, up to a few thousand at a time: those are sorted by length together."""
    if isinstance(rows, Records):
        yield from (rows.select(part) for part in growing(range(len(rows)), most=AT_ONCE))
        return
    for part in growing(rows, most=AT_ONCE):
        yield Records("row", list(range(1, len(part) + 1)), task.columns_of(part))


def outputs(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> list[np.ndarray]:
    """What the predictions of all rows are made from, in their order."""
    return as_arrays(read(model, task, data, task.outputs, length=length, dtype=dtype))


def as_arrays(rows: Sequence[Tensor]) -> list[np.ndarray]:
    """What a model made of each row, brought over in one piece: a GPU asked for row by row is waited for each time."""
    if not rows:
        return []
    flat = torch.cat([row.flatten() for row in rows]).float().cpu().numpy()
    ends = accumulate(row.numel() for row in rows)
    return [flat[end - row.numel() : end].reshape(row.shape) for row, end in zip(rows, ends, strict=True)]


def together(models: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The mean of what several models give, row by row."""
    return models[0] if len(models) == 1 else [np.mean(row, axis=0) for row in zip(*models, strict=True)]


def features(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> Features:
    """What the backbone makes of each row, computed once: all that the head of a frozen model ever sees."""
    kept = read(model, task, data, task.remember, length=length, dtype=dtype)
    return Features.of(data, [[part.float().cpu() for part in parts] for parts in kept])


@torch.no_grad()
def read(
    model: Model,
    task: LabelledTask,
    data: Any,
    what: Callable[[Model, Batch], list[Any]],
    *,
    length: int,
    dtype: str,
) -> list[Any]:
    """What `what` makes of every row, in the order of the rows."""
    model.eval()
    examples = task.examples(data, length=length)
    found: list[Any] = [None] * len(examples)
    lengths = getattr(examples, "lengths", np.ones(len(examples), dtype=np.int64))
    for part in by_size(lengths, tokens_at_once(model.device)):
        with precision(model.device, dtype):
            made = what(model, examples.batch(part).to(model.device))
        for place, one in zip(part, made, strict=True):
            found[place] = one
    return found


def by_size(lengths: np.ndarray, most: int) -> Iterator[list[int]]:
    """All indices in parts of like length and up to `most` tokens; the longest first, so that memory peaks early."""
    order = np.argsort(-lengths, kind="stable").tolist()
    at = 0
    while at < len(order):
        rows = max(1, most // int(lengths[order[at]]))
        yield order[at : at + rows]
        at += rows
