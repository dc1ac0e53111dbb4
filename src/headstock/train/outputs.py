"""Runs a model over prepared rows, batched by length, and returns the results in row order."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstock.decoding.batching import length_batches, max_batch_tokens, to_device
from headstock.kernels.backends import fast_cpu_kernels, without_cudnn_attention
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.labelled import CachedFeatures, LabelledTask
from headstock.train.evaluate import precision

Result = TypeVar("Result")


def model_outputs(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> list[np.ndarray]:
    """The task's raw outputs for each row, from which predictions and metrics are computed."""
    order, batches = run_batches(model, task, data, task.outputs, length=length, dtype=dtype)
    return restore_order(order, as_arrays(batches))


def cache_features(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> CachedFeatures:
    """The backbone's features of each row, computed once to train the head of a frozen model."""
    order, batches = run_batches(model, task, data, task.compute_features, length=length, dtype=dtype)
    return CachedFeatures.of(data, restore_order(order, [row for batch in batches for row in batch]))


@torch.no_grad()
@fast_cpu_kernels()
def run_batches(
    model: Model,
    task: LabelledTask,
    data: Any,
    compute: Callable[[Model, Batch], Result],
    *,
    length: int,
    dtype: str,
) -> tuple[list[int], list[Result]]:
    """The row indices in the order they were read, and the result of `compute` for each batch."""
    device = model.eval().device
    examples = task.examples(data, length=length)
    order, results = [], []
    lengths = getattr(examples, "lengths", np.ones(len(examples), dtype=np.int64))
    with without_cudnn_attention(device), precision(device, dtype):
        for indices in length_batches(lengths, max_batch_tokens(device)):
            results.append(compute(model, to_device(examples.batch(indices), device)))
            order += indices
    return order, results


def restore_order(order: list[int], results: list[Result]) -> list[Result]:
    """Results that were computed in `order`, sorted by row."""
    assert len(order) == len(results), "one result per row"
    return [results[at] for at in np.argsort(order).tolist()]


def as_arrays(batches: Sequence[Tensor | list[Tensor]]) -> list[np.ndarray]:
    """One array per row from batches that are one tensor or a list of tensors.

    All are copied from the device at once: a copy per row would synchronize each time, and release the GIL to the
    tokenizer thread between rows.
    """
    tensors = [tensor for batch in batches for tensor in ([batch] if isinstance(batch, Tensor) else batch)]
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors]).float().cpu().numpy()
    ends = accumulate(tensor.numel() for tensor in tensors)
    arrays = (flat[end - tensor.numel() : end].reshape(tensor.shape) for tensor, end in zip(tensors, ends, strict=True))
    return [
        row for batch in batches for row in (next(arrays) if isinstance(batch, Tensor) else islice(arrays, len(batch)))
    ]


def ensemble_mean(outputs: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The mean over models of each row's outputs."""
    return outputs[0] if len(outputs) == 1 else [reduce(np.add, row) / len(row) for row in zip(*outputs, strict=True)]
