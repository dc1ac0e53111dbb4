"""Evaluates a model on a data set: summed losses, the task's metrics, and bootstrap intervals."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.data.token_shards import UnknownTokens
from headstock.kernels.backends import fast_cpu_kernels
from headstock.kernels.fp8 import fp8_matmuls
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.rng import generator
from headstock.tasks.base import Examples, Task, padded_batch
from headstock.train.distributed import DistributedContext

MIN_BATCHES = 8  # for intervals: fewer do not represent the variation
RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)
UNKNOWN = "unknown"  # key of the unknown-token count, beside those of the heads

BatchSums = list[tuple[dict[str, float], dict[str, int], int]]  # per batch: summed losses, counts, examples


@torch.inference_mode()
@fast_cpu_kernels()
def evaluate(
    model: Model,
    task: Task,
    examples: Examples,
    *,
    distributed: DistributedContext,
    rows: int,
    size: int,
    dtype: str = "auto",
    most: int | None = None,
    batch_sums: BatchSums | None = None,
    unknown: UnknownTokens | None = None,
) -> dict[str, float]:
    """The task's metrics over all examples, or over `most` of them evenly spaced, in batches of `rows`.

    `size` is the text of all examples in bytes. `unknown` describes its unknown tokens; if it is None and there are
    some, bits per byte are left out. The sums of each batch of this process are appended to `batch_sums`, for
    `bootstrap_intervals`.
    """
    indices: Sequence[int] = range(len(examples))
    if most is not None and most < len(examples):
        indices = np.linspace(0, len(examples) - 1, most).astype(int).tolist()
    if (lengths := getattr(examples, "lengths", None)) is not None:  # similar lengths need little padding
        indices = sorted(indices, key=lengths.__getitem__)
    was_training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    own = indices[distributed.rank :: distributed.size]
    parts = [own[at : at + rows] for at in range(0, len(own), rows)]
    for part in parts or [()]:
        batch = padded_batch(examples, part, max(1, len(part)))
        batch_counts = task.counts(batch) | count_unknown(task, batch)
        for head, count in batch_counts.items():
            counts[head] = counts.get(head, 0) + count
        with precision(distributed.device, dtype):
            losses = task.losses(model, batch.to(distributed.device))
        for head, loss in losses.items():
            sums[head] = sums[head] + as_double(loss) if head in sums else as_double(loss)
        if batch_sums is not None:
            batch_sums.append(({head: float(loss) for head, loss in losses.items()}, batch_counts, len(part)))
    model.train(was_training)
    names, heads = sorted(sums), sorted(counts)
    totals = distributed.all_reduce([*(float(sums[name]) for name in names), *(float(counts[head]) for head in heads)])
    all_sums = dict(zip(names, totals[: len(names)], strict=True))
    all_counts = {head: int(count) for head, count in zip(heads, totals[len(names) :], strict=True)}
    share = len(indices) / max(1, len(examples))
    return score_with_unknown(task, all_sums, all_counts, size=round(size * share), unknown=unknown)


def count_unknown(task: Task, batch: Batch) -> dict[str, int]:
    """The unknown tokens among those that bits per byte measure; empty for tasks without bits per byte."""
    if task.bits_per_byte_head is None or task.tokenizer.unk is None:
        return {}
    return {UNKNOWN: int((batch.labels[task.bits_per_byte_head] == task.tokenizer.unk).sum())}


def score_with_unknown(
    task: Task, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int, unknown: UnknownTokens | None
) -> dict[str, float]:
    """The task's metrics, with the text behind unknown tokens charged to the bits per byte (see `Unknown.bits`)."""
    metrics = task.score(sums, counts, size=size)
    if "bits_per_byte" in metrics and (count := counts.get(UNKNOWN, 0)):
        if unknown is None or not unknown.tokens:
            return {name: value for name, value in metrics.items() if name != "bits_per_byte"}
        metrics["bits_per_byte"] += count * unknown.bits / unknown.tokens / size
    return metrics


def as_double(loss: Tensor) -> Tensor:
    """In double precision, which MPS lacks."""
    return (loss.cpu() if loss.device.type == "mps" else loss).double()


def bootstrap_intervals(
    task: Task, batch_sums: BatchSums, *, size: int, unknown: UnknownTokens | None = None
) -> dict[str, tuple[float, float]]:
    """95% bootstrap intervals of the metrics of held-out text.

    Batches are resampled rather than tokens, because the tokens of one text are correlated. Batches of different
    kinds, such as the masked and causal ones of a hybrid model, are resampled separately.
    """
    if len(batch_sums) < MIN_BATCHES:
        return {}
    sums = {name: np.array([losses[name] for losses, _, _ in batch_sums]) for name in batch_sums[0][0]}
    counts = {name: np.array([counted[name] for _, counted, _ in batch_sums]) for name in batch_sums[0][1]}
    # the text in bytes is proportional to the tokens that bits per byte measure
    weight = (
        counts[task.bits_per_byte_head]
        if task.bits_per_byte_head
        else np.array([examples for _, _, examples in batch_sums])
    )
    heads = [head for head in counts if head != UNKNOWN]
    draws = _resample([tuple(head for head in heads if counted[head]) for _, counted, _ in batch_sums])
    scores = [
        score_with_unknown(
            task,
            {name: float(times @ values) for name, values in sums.items()},
            {name: int(times @ values) for name, values in counts.items()},
            size=round(size * float(times @ weight) / max(1.0, float(weight.sum()))),
            unknown=unknown,
        )
        for times in draws
    ]
    bounds = {name: np.percentile([one[name] for one in scores], PERCENTILES) for name in scores[0]}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def _resample(kinds: Sequence[tuple[str, ...]]) -> np.ndarray:
    """(R, batches) how often each batch occurs in each resample, with the number of each kind fixed."""
    random, draws = generator("spread"), np.zeros((RESAMPLES, len(kinds)), dtype=np.int64)
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        draws[:, members] = random.multinomial(len(members), np.full(len(members), 1 / len(members)), RESAMPLES)
    return draws


@contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    """Autocast to bfloat16 on CUDA, float32 elsewhere, unless `dtype` says otherwise.

    float8 computes the large matrix products of training in 8 bits and everything else in bfloat16.
    """
    enabled = dtype in ("bfloat16", "float8") or (dtype == "auto" and device.type == "cuda")
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled), fp8_matmuls(dtype == "float8"):
        yield


@contextmanager
def swapped_weights(model: Model, tensors: dict[str, Any] | None) -> Iterator[None]:
    """Use other weights for a block; None keeps the model's own."""
    if tensors is None:
        yield
        return
    own = {name: tensor.clone() for name, tensor in model.tensors().items()}
    model.load_tensors(tensors, source="the averaged weights")
    try:
        yield
    finally:
        model.load_tensors(own, source="the original weights")
