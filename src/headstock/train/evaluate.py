"""Evaluates models: summed losses and the task's metrics, bootstrap intervals, and outputs for labelled rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.token_shards import UnknownTokens
from headstock.decoding.batching import length_batches, max_batch_tokens, to_device
from headstock.kernels.backends import fast_cpu_kernels, single_host_thread, without_cudnn_attention
from headstock.kernels.fp8 import fp8_matmuls
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.rng import generator
from headstock.tasks.base import Examples, Task, padded_batch
from headstock.tasks.labelled import CachedFeatures, LabelledTask
from headstock.train.budget import ValidationBudget
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.optimizers import EMA
from headstock.train.settings import TrainSettings
from headstock.train.sharding import reshard

MIN_BATCHES = 8  # for intervals: fewer do not represent the variation
RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)
UNKNOWN = "unknown"  # key of the unknown-token count, beside those of the heads

BatchSums = list[tuple[dict[str, float], dict[str, int], int]]  # per batch: summed losses, counts, examples
Result = TypeVar("Result")


class EvaluationStopped(Exception):
    """The caller of an evaluation asked to stop it."""


@contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    """Autocast to bfloat16 on CUDA, float32 elsewhere, unless `dtype` says otherwise.

    float8 computes the large matrix products of training in 8 bits and everything else in bfloat16.
    """
    enabled = uses_bfloat16(device, dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled), fp8_matmuls(dtype == "float8"):
        yield


def uses_bfloat16(device: torch.device, dtype: str) -> bool:
    return dtype in ("bfloat16", "float8") or (dtype == "auto" and device.type == "cuda")


@torch.inference_mode()
@fast_cpu_kernels()
def evaluate(
    model: Model,
    task: Task,
    examples: Examples,
    *,
    distributed: DistributedContext,
    batch_size: int,
    size: int,
    dtype: str = "auto",
    max_examples: int | None = None,
    losses: Callable[[Batch], dict[str, Tensor]] | None = None,
    batch_sums: BatchSums | None = None,
    unknown: UnknownTokens | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """The task's metrics over all examples, or over `max_examples` of them evenly spaced.

    `size` is the text of all examples in bytes. `unknown` describes its unknown tokens; if it is None and there are
    some, bits per byte are left out. `losses` computes the losses of a batch instead of the task, for a sharded model.
    The sums of each batch of this process are appended to `batch_sums`, for `bootstrap_intervals`. If `stop` returns
    True after a batch, EvaluationStopped is raised.
    """
    indices: Sequence[int] = range(len(examples))
    if max_examples is not None and max_examples < len(examples):
        indices = np.linspace(0, len(examples) - 1, max_examples).astype(int).tolist()
    if (lengths := getattr(examples, "lengths", None)) is not None:  # similar lengths need little padding
        indices = sorted(indices, key=lengths.__getitem__)
    was_training = model.training
    model.eval()
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    own = indices[distributed.rank :: distributed.size]
    rows = -(-len(indices) // distributed.size)  # of the first process; all take equally many batches
    for start in range(0, max(1, rows), batch_size):
        batch_indices = own[start : start + batch_size]
        batch = padded_batch(examples, batch_indices, max(1, len(batch_indices)))
        batch_counts = task.counts(batch) | count_unknown(task, batch)
        for head, count in batch_counts.items():
            counts[head] = counts.get(head, 0) + count
        with precision(distributed.device, dtype):
            batch = batch.to(distributed.device)
            batch_losses = task.losses(model, batch) if losses is None else losses(batch)
        for head, loss in batch_losses.items():
            sums[head] = sums[head] + as_double(loss) if head in sums else as_double(loss)
        if batch_sums is not None:
            summed = {head: float(loss) for head, loss in batch_losses.items()}
            batch_sums.append((summed, batch_counts, len(batch_indices)))
        if stop():
            raise EvaluationStopped
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
    """The task's metrics, with the text behind unknown tokens charged to the bits per byte (`UnknownTokens.bits`)."""
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
    examples = np.array([number for _, _, number in batch_sums])
    share = counts[task.bits_per_byte_head] if task.bits_per_byte_head else examples
    heads = [head for head in counts if head != UNKNOWN]
    scores = [
        score_with_unknown(
            task,
            {name: float(repeats @ values) for name, values in sums.items()},
            {name: int(repeats @ values) for name, values in counts.items()},
            size=round(size * float(repeats @ share) / max(1.0, float(share.sum()))),
            unknown=unknown,
        )
        for repeats in _resample([tuple(head for head in heads if counted[head]) for _, counted, _ in batch_sums])
    ]
    bounds = {name: np.percentile([metrics[name] for metrics in scores], PERCENTILES) for name in scores[0]}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def _resample(kinds: Sequence[tuple[str, ...]]) -> np.ndarray:
    """(R, batches) how often each batch occurs in each resample, with the number of each kind fixed."""
    random, repeats = generator("spread"), np.zeros((RESAMPLES, len(kinds)), dtype=np.int64)
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        repeats[:, members] = random.multinomial(len(members), np.full(len(members), 1 / len(members)), RESAMPLES)
    return repeats


# Validation during training


@dataclass
class Validator:
    """Evaluates the weights that would be kept, and updates the state's validation metrics and best step."""

    model: Model
    task: Task
    data: Any
    settings: TrainSettings
    budget: ValidationBudget
    distributed: DistributedContext
    ema: EMA | None
    clock: Callable[[], float]
    module: nn.Module | None = None  # from batch to losses, where the model is sharded

    def __call__(self, state: TrainState, stop: Callable[[], bool] = lambda: False) -> bool:
        """Returns whether the validation is complete: if `stop` returns True meanwhile, the state does not change."""
        began = self.clock() if state.seconds_per_valid_example is None else 0.0
        max_examples = self.budget.examples(state, on_cpu=self.distributed.device.type == "cpu")
        examples = self.task.examples(self.data, length=self.budget.length)
        try:
            with swapped_weights(self.model, None if self.ema is None else self.ema.tensors):
                state.valid = evaluate(
                    self.model,
                    self.task,
                    examples,
                    distributed=self.distributed,
                    batch_size=state.micro_batch or self.settings.batch // self.distributed.size,
                    max_examples=max_examples,
                    size=getattr(self.data, "bytes", 0),  # of plain text
                    unknown=getattr(self.data, "unknown", None),
                    dtype=self.settings.dtype,
                    losses=self.module,
                    stop=stop,
                )
                if self.module is not None:
                    reshard(self.module)
        except EvaluationStopped:
            return False
        score = self.task.selection_score(state.valid)
        state.validations_since_best += 1
        if score < state.best_score:
            state.best_score, state.best_step, state.validations_since_best = score, state.step, 0
        if state.seconds_per_valid_example is None:
            state.valid_examples = min(max_examples, len(examples))
            state.seconds_per_valid_example = (self.clock() - began) / max(1, state.valid_examples)
        return True


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


# Outputs for labelled rows


def model_outputs(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> list[np.ndarray]:
    """The task's raw outputs for each row, from which predictions and metrics are computed."""
    order, batches = run_batches(model, task, data, task.outputs, length=length, dtype=dtype)
    return restore_order(order, as_arrays(batches))


def cache_features(model: Model, task: LabelledTask, data: Any, *, length: int, dtype: str = "auto") -> CachedFeatures:
    """The backbone's features of each row, computed once to train the head of a frozen model."""
    order, batches = run_batches(model, task, data, task.compute_features, length=length, dtype=dtype)
    return CachedFeatures(data, restore_order(order, [row for batch in batches for row in batch]))


@torch.no_grad()
@fast_cpu_kernels()
def run_batches(
    model: Model, task: LabelledTask, data: Any, compute: Callable[[Model, Batch], Result], *, length: int, dtype: str
) -> tuple[list[int], list[Result]]:
    """The row indices in the order they were read, and the result of `compute` for each batch of similar lengths."""
    device = model.eval().device
    examples = task.examples(data, length=length)
    order, results = [], []
    lengths = getattr(examples, "lengths", np.ones(len(examples), dtype=np.int64))
    with single_host_thread(device), without_cudnn_attention(device), precision(device, dtype):
        for indices in length_batches(lengths, max_batch_tokens(device)):
            results.append(compute(model, to_device(examples.batch(indices), device)))
            order += indices
    return order, results


def restore_order(order: list[int], results: list[Result]) -> list[Result]:
    """Results that were computed in `order`, sorted by row."""
    assert len(order) == len(results), "one result per row"
    return [results[index] for index in np.argsort(order).tolist()]


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
