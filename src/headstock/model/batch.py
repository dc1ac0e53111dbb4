"""What data, tasks and models pass to each other.  B rows, T tokens in a row, D width."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from headstock.kernels.cross_entropy import IGNORE_INDEX as IGNORE_INDEX


class DecodingState(Protocol):
    """What a backbone keeps of the tokens read so far (KV cache or recurrent state); opaque to decoding."""

    lengths: Tensor  # (B,) real tokens read by each row

    def select(self, rows: Tensor) -> "DecodingState":
        """The state of other rows: a subset, reordered or repeated."""
        ...

    def append(self, other: Any) -> "DecodingState":
        """The state of these rows and then those of `other`, of the same type; neither may be used afterwards."""
        ...

    def keep(self, rows: list[int]) -> "DecodingState":
        """Like `select` without repeats, for a state that is not used afterwards: only moved rows are copied."""
        ...

    def make_static(self) -> bool:
        """Keep all shapes from now on, for CUDA graph capture; False if the state cannot."""
        ...


@dataclass(frozen=True)
class RealExamples:
    """The number of real examples in a batch, which come first; the remaining ones pad it to a fixed shape.

    Two of these compare equal whatever the count, so that a captured step serves both.
    """

    count: int = field(compare=False)


@dataclass
class Batch:
    """Rows of tokens, padded on the right only.

    The fields that only some models or tasks need are optional. `cu_seqlens` and `label_positions` repeat what
    `document_ids` and `labels` contain: the data side knows them without a search, and searching on a GPU would
    synchronize and give tensors of data-dependent shape, which neither torch.compile nor CUDA graphs can handle.
    """

    tokens: Tensor  # (B, T)
    padding: Tensor | None = None  # (B, T) True at padding positions
    document_ids: Tensor | None = None  # (B, T) document of each token in packed rows; attention stays inside it
    cu_seqlens: Tensor | None = None  # (M,) boundaries of these documents in all rows end to end: see make_cu_seqlens
    positions: Tensor | None = None  # (B, T) position in its document; None: counted from what was read before
    segments: Tensor | None = None  # (B, T) BERT's segment ids
    causal: Tensor | bool | None = None  # (B,) True for causal rows, or one value for all; None: the backbone's default
    source: "Batch | None" = None  # the input of the encoder
    prefix: "Batch | None" = None  # what precedes the rows in their first documents, for recurrent models
    example_ids: Tensor | None = None  # (B,) the example of each row, where a long example has several rows
    masked: "Batch | None" = None  # the same rows with masked tokens, for an auxiliary language-model loss
    # computed by a frozen backbone before training: (N, D) pooled or (B, T, D); (..., L + 1, D) for a layer mix
    features: Tensor | None = None
    draws: Tensor | None = None  # (B, T) uniform random numbers, for objectives that sample tokens
    real_examples: RealExamples | None = None  # None: all examples are real
    labels: dict[str, Tensor] = field(default_factory=dict)  # by head; IGNORE_INDEX where nothing is predicted
    label_positions: dict[str, Tensor] = field(default_factory=dict)  # by head (N,) indices of labels in B T positions

    def to(self, device: torch.device) -> "Batch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """A batch with `function` applied to every tensor."""

        def apply(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: apply(item) for key, item in value.items()}
            if isinstance(value, Tensor):
                return function(value)
            return value.map_tensors(function) if isinstance(value, Batch) else value

        return replace(self, **{part.name: apply(getattr(self, part.name)) for part in fields(self)})

    def gather_labelled(self, head: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) the vectors of `hidden` (B, T, D) that have a label for this head, and (N,) these labels."""
        labels = self.labels[head].flatten()
        positions = self.label_positions.get(head)
        if positions is None:
            positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        return hidden.flatten(0, 1).index_select(0, positions), labels.index_select(0, positions)


@dataclass
class Output:
    """The result of a backbone."""

    hidden: Tensor  # (B, T, D), or (B, 1, D) with query_positions
    layers: list[Tensor] = field(default_factory=list)  # with keep_layers: the embedding and each layer, (B, T, D)
    state: DecodingState | None = None  # for the next call, if one was passed


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor | None]:
    """Rows of different lengths as one tensor, and its padding mask (None if all have the same length)."""
    lengths = [len(row) for row in rows]
    numbers = array("q", list(chain.from_iterable(rows)))  # torch reads a buffer faster than nested lists
    flat = torch.frombuffer(numbers, dtype=torch.long) if numbers else torch.empty(0, dtype=torch.long)
    if len(set(lengths)) == 1:
        return flat.view(len(rows), lengths[0]), None
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return torch.full(padding.shape, filler, dtype=torch.long).masked_scatter_(~padding, flat), padding


def count_real_tokens(batch: Batch) -> int:
    """The number of tokens, with those of the source, without padding positions and padding examples."""
    real: Tensor | slice = slice(None)
    if batch.real_examples is not None:
        count = batch.real_examples.count
        real = slice(count) if batch.example_ids is None else batch.example_ids < count
    total = 0
    for part in (batch, batch.source):
        if part is not None and part.document_ids is not None:  # padding has a negative id
            total += int((part.document_ids[real] >= 0).sum())
        elif part is not None:
            total += part.tokens[real].numel() - (0 if part.padding is None else int(part.padding[real].sum()))
    return total


def pad_to_multiple(batch: Batch, multiple: int) -> Batch:
    """Pad rows to a multiple of a length, so that batches have few different shapes."""
    rows, length = batch.tokens.shape
    extra = -length % multiple

    def extend(tensor: Any, value: Any) -> Any:
        return None if tensor is None else torch.nn.functional.pad(tensor, (0, extra), value=value)

    padding = torch.zeros(rows, length, dtype=torch.bool) if batch.padding is None else batch.padding
    labels = {
        head: extend(values, IGNORE_INDEX) if head in batch.label_positions else values  # else one label per row
        for head, values in batch.labels.items()
    }
    return replace(
        batch,
        tokens=extend(batch.tokens, 0),
        padding=extend(padding, True),
        document_ids=extend(batch.document_ids, -1),
        cu_seqlens=None,
        positions=extend(batch.positions, 0),
        segments=extend(batch.segments, 0),
        draws=extend(batch.draws, 0.0),
        source=None if batch.source is None else pad_to_multiple(batch.source, multiple),
        masked=None if batch.masked is None else pad_to_multiple(batch.masked, multiple),
        labels=labels,
        label_positions={head: index + index // length * extra for head, index in batch.label_positions.items()},
    )


def make_cu_seqlens(document_ids: Tensor) -> Tensor:
    """(M,) boundaries of the documents (B, T) in all rows end to end; a document ends with its row.

    Empty documents at the end fill M up to a power of two, so that it has few different values.
    """
    is_first = torch.ones(document_ids.shape, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = is_first.flatten().nonzero().squeeze(1)
    size = max(64, 1 << len(begins).bit_length())  # includes the end of the last document
    return torch.cat([begins, begins.new_full((size - len(begins),), document_ids.numel())]).int()


def find_label_positions(labels: Tensor) -> Tensor:
    """(N,) indices of the labels (B, T) in row-major order.

    Some positions without a label are added, so that N has few different values: CUDA graphs are captured for each.
    """
    has_label = labels.flatten() != IGNORE_INDEX
    positions = has_label.nonzero().squeeze(1)
    step = max(8, len(has_label) // 64)
    extra = min(-(-max(1, len(positions)) // step) * step, len(has_label)) - len(positions)
    unlabelled = has_label.byte().argmin().expand(extra)  # the first position without a label
    return torch.cat([positions, unlabelled]) if extra else positions
