"""Summed losses over a whole data set, whatever the task and however many processes share the work."""

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

FEWEST = 8  # batches; fewer say too little of how much others would differ
RESAMPLES = 1000
TAILS = (2.5, 97.5)  # percent
UNKNOWN = "unknown"  # beside the heads' counts, that of unknown tokens

BatchSums = list[tuple[dict[str, float], dict[str, int], int]]  # each batch's summed losses, their counts, its examples


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
    pieces: BatchSums | None = None,
    unknown: UnknownTokens | None = None,
) -> dict[str, float]:
    """The task's metrics over all examples, or over `most` of them spread evenly; `size` is all their text in bytes.

    `unknown` are the unknown tokens of all the text; where there are some and it is None, there are no bits per byte.
    What each batch of this process gave is added to `pieces`, if there are any, for `spread` to make intervals of.
    """
    chosen: Sequence[int] = range(len(examples))
    if most is not None and most < len(examples):
        chosen = np.linspace(0, len(examples) - 1, most).astype(int).tolist()
    learning = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    if (lengths := getattr(examples, "lengths", None)) is not None:  # like with like, so that little is padding
        chosen = sorted(chosen, key=lengths.__getitem__)
    mine = chosen[distributed.rank :: distributed.size]
    parts = [mine[at : at + rows] for at in range(0, len(mine), rows)]
    for part in parts or [()]:
        batch = padded_batch(examples, part, max(1, len(part)))
        counted = task.counts(batch) | count_unknown(task, batch)
        for head, count in counted.items():
            counts[head] = counts.get(head, 0) + count
        with precision(distributed.device, dtype):
            losses = task.losses(model, batch.to(distributed.device))
        for head, loss in losses.items():
            sums[head] = sums[head] + exact(loss) if head in sums else exact(loss)
        if pieces is not None:
            pieces.append(({head: float(loss) for head, loss in losses.items()}, counted, len(part)))
    model.train(learning)
    names, heads = sorted(sums), sorted(counts)
    totals = distributed.all_reduce([*(float(sums[name]) for name in names), *(float(counts[head]) for head in heads)])
    all_sums = dict(zip(names, totals[: len(names)], strict=True))
    all_counts = {head: int(count) for head, count in zip(heads, totals[len(names) :], strict=True)}
    return score(task, all_sums, all_counts, size=round(size * len(chosen) / max(1, len(examples))), unknown=unknown)


def count_unknown(task: Task, batch: Batch) -> dict[str, int]:
    """How many of the tokens that bits per byte are of are unknown ones; nothing for tasks without bits per byte."""
    if task.bits_per_byte_head is None or task.tokenizer.unk is None:
        return {}
    return {UNKNOWN: int((batch.labels[task.bits_per_byte_head] == task.tokenizer.unk).sum())}


def score(
    task: Task, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int, unknown: UnknownTokens | None
) -> dict[str, float]:
    """The task's metrics, with what unknown tokens hide charged to the bits per byte (see `Unknown.bits`)."""
    metrics = task.score(sums, counts, size=size)
    if "bits_per_byte" in metrics and (count := counts.get(UNKNOWN, 0)):
        if unknown is None or not unknown.tokens:
            return {name: value for name, value in metrics.items() if name != "bits_per_byte"}
        metrics["bits_per_byte"] += count * unknown.bits / unknown.tokens / size
    return metrics


def exact(loss: Tensor) -> Tensor:
    """In double precision, which Apple's GPUs do not have."""
    return (loss.cpu() if loss.device.type == "mps" else loss).double()


def bootstrap_intervals(
    task: Task, pieces: BatchSums, *, size: int, unknown: UnknownTokens | None = None
) -> dict[str, tuple[float, float]]:
    """95% intervals of the metrics of held-out text: had it been other batches of the same kind (bootstrap).

    Batches, and not tokens, are drawn: the tokens of one text are hard or easy together. Batches of different kinds,
    such as the masked and the causal ones of a hybrid, are resampled apart, so that each kind keeps its share.
    """
    if len(pieces) < FEWEST:
        return {}
    sums = {name: np.array([losses[name] for losses, _, _ in pieces]) for name in pieces[0][0]}
    counts = {name: np.array([counted[name] for _, counted, _ in pieces]) for name in pieces[0][1]}
    # what the text in bytes is proportional to: the tokens whose loss is told per byte
    weight = counts[task.bits_per_byte_head] if task.bits_per_byte_head else np.array([piece[2] for piece in pieces])
    heads = [head for head in counts if head != UNKNOWN]
    drawn = _drawn([tuple(head for head in heads if counted[head]) for _, counted, _ in pieces])
    scores = [
        score(
            task,
            {name: float(times @ values) for name, values in sums.items()},
            {name: int(times @ values) for name, values in counts.items()},
            size=round(size * float(times @ weight) / max(1.0, float(weight.sum()))),
            unknown=unknown,
        )
        for times in drawn
    ]
    found = {name: np.percentile([one[name] for one in scores], TAILS) for name in scores[0]}
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def _drawn(kinds: Sequence[tuple[str, ...]]) -> np.ndarray:
    """(R, batches) how often each batch is in each resample; there are as many of each kind as there were."""
    random, drawn = generator("spread"), np.zeros((RESAMPLES, len(kinds)), dtype=np.int64)
    for kind in dict.fromkeys(kinds):
        members = [place for place, one in enumerate(kinds) if one == kind]
        drawn[:, members] = random.multinomial(len(members), np.full(len(members), 1 / len(members)), RESAMPLES)
    return drawn


@contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    """bfloat16 where it is fast, which is on CUDA; single precision elsewhere unless asked otherwise.

    With float8 what learns does its large products in 8 bits; everything else, and whoever looks, stays at bfloat16.
    """
    use = dtype in ("bfloat16", "float8") or (dtype == "auto" and device.type == "cuda")
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use), fp8_matmuls(dtype == "float8"):
        yield


@contextmanager
def weights_swapped(model: Model, tensors: dict[str, Any] | None) -> Iterator[None]:
    """Look at a model with other weights for a while; None leaves it as it is."""
    if tensors is None:
        yield
        return
    own = {name: tensor.clone() for name, tensor in model.tensors().items()}
    model.load_tensors(tensors, source="the averaged weights")
    try:
        yield
    finally:
        model.load_tensors(own, source="the weights before")
