"""What a trained model says of many rows: read with others of like length, told in the order they came."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import accumulate, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstock.data.records import Records
from headstock.inference.windowing import max_batch_tokens, to_device, tokenizer_threads
from headstock.kernels.backends import fast_cpu_kernels, without_cudnn_attention
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.labelled import CachedFeatures, LabelledTask
from headstock.train.evaluate import precision
from headstock.train.stream_prefetch import AT_ONCE, growing, worked_ahead

Made = TypeVar("Made")
Row = TypeVar("Row")


def prepare_ahead(rows: Iterable[Any] | Records, task: LabelledTask, device: torch.device) -> Iterator[Any]:
    """Rows as their task reads them, in parts; those to come are cut into tokens while a model reads others."""
    prepare = partial(task.prepare, labelled=False)
    return worked_ahead(prepare, record_batches(rows, task), threads=tokenizer_threads(device))


def record_batches(rows: Iterable[Any] | Records, task: LabelledTask) -> Iterator[Records]:
    """Rows as their task has them, up to a few thousand at a time: those are sorted by length together."""
    if isinstance(rows, Records):
        yield from (rows.select(part) for part in growing(range(len(rows)), most=AT_ONCE))
        return
    for part in growing(rows, most=AT_ONCE):
        yield Records("row", list(range(1, len(part) + 1)), task.columns_of(part))


def model_outputs(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> list[np.ndarray]:
    """What the predictions of all rows are made from, in their order."""
    order, made = run_batches(model, task, data, task.outputs, length=length, dtype=dtype)
    return restore_order(order, as_arrays(made))


def as_arrays(batches: Sequence[Tensor | list[Tensor]]) -> list[np.ndarray]:
    """What a model made of each row, batch after batch, where those of a batch are one tensor or one each.

    It is brought over in one piece: a GPU asked for row by row is waited for each time, and every call on a tensor lets
    other threads run in between, here the one that cuts the next texts.
    """
    whole = [tensor for made in batches for tensor in ([made] if isinstance(made, Tensor) else made)]
    if not whole:
        return []
    flat = torch.cat([tensor.flatten() for tensor in whole]).float().cpu().numpy()
    ends = accumulate(tensor.numel() for tensor in whole)
    cut = (flat[end - tensor.numel() : end].reshape(tensor.shape) for tensor, end in zip(whole, ends, strict=True))
    return [row for made in batches for row in (next(cut) if isinstance(made, Tensor) else islice(cut, len(made)))]


def ensemble_mean(models: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The mean of what several models give, row by row."""
    return models[0] if len(models) == 1 else [reduce(np.add, row) / len(row) for row in zip(*models, strict=True)]


def cache_features(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> CachedFeatures:
    """What the backbone makes of each row, computed once: all that the head of a frozen model ever sees."""
    order, made = run_batches(model, task, data, task.compute_features, length=length, dtype=dtype)
    return CachedFeatures.of(data, restore_order(order, [parts for batch in made for parts in batch]))


@torch.no_grad()
@fast_cpu_kernels()
def run_batches(
    model: Model,
    task: LabelledTask,
    data: Any,
    what: Callable[[Model, Batch], Made],
    *,
    length: int,
    dtype: str,
) -> tuple[list[int], list[Made]]:
    """The order in which rows are read, and what `what` makes of each batch of them."""
    device = model.eval().device
    examples = task.examples(data, length=length)
    order, made = [], []
    lengths = getattr(examples, "lengths", np.ones(len(examples), dtype=np.int64))
    with without_cudnn_attention(device), precision(device, dtype):
        for part in length_batches(lengths, max_batch_tokens(device)):
            made.append(what(model, to_device(examples.batch(part), device)))
            order += part
    return order, made


def restore_order(order: list[int], found: list[Row]) -> list[Row]:
    """What was found in this order of the rows, in that of the rows themselves."""
    assert len(order) == len(found), "each row has its own"
    return [found[place] for place in np.argsort(order).tolist()]


def length_batches(lengths: np.ndarray, most: int) -> Iterator[list[int]]:
    """All indices in parts of like length and up to `most` tokens; the longest first, so that memory peaks early."""
    order = np.argsort(-lengths, kind="stable").tolist()
    at = 0
    while at < len(order):
        rows = max(1, most // int(lengths[order[at]]))
        yield order[at : at + rows]
        at += rows
