"""What the parts of a model hand each other.  B rows, T tokens in a row, D width."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE_INDEX = -100  # the label of a position that is not predicted


class DecodingState(Protocol):
    """What a backbone remembers of the tokens read so far; opaque to decoding."""

    lengths: Tensor  # (B,) how many real tokens each row has read

    def select(self, rows: Tensor) -> "DecodingState":
        """The same memory for other rows: some dropped, reordered or repeated."""
        ...

    def make_static(self) -> bool:
        """Keep all shapes from here on, so that a step of one token can be recorded; False where that cannot be."""
        ...


@dataclass(frozen=True)
class RealExamples:
    """How many of a batch's examples are real, the first ones; the others fill it up and count for nothing.

    All are read alike, so that two of these are equal however many it is: a step is recorded once for both.
    """

    count: int = field(compare=False)


@dataclass
class Batch:
    """Token rows, padded on the right only, with what is known about each token."""

    tokens: Tensor  # (B, T)
    padding: Tensor | None = None  # (B, T) True where there is no token
    document_ids: Tensor | None = None  # (B, T) which packed document a token is of; attention stays inside it
    cu_seqlens: Tensor | None = None  # (M,) where these begin and end in all rows end to end: see make_cu_seqlens
    positions: Tensor | None = None  # (B, T) place in its document; counted from what was read before if not given
    segments: Tensor | None = None  # (B, T) which of two texts a token is of
    causal: Tensor | bool | None = None  # (B,) True for rows read left to right, or one for all; None: as the backbone
    source: "Batch | None" = None  # what an encoder-decoder reads
    prefix: "Batch | None" = None  # what stands before the rows in their first documents, to know what they go on from
    example_ids: Tensor | None = None  # (B,) which example a row is a part of, where one may have several rows
    query_positions: Tensor | None = (
        None  # (B,) the one place of each row whose vector is wanted; None: all are. See Model.at
    )
    features: Tensor | None = None  # (N, D) what a frozen backbone made of N examples, so that it need not read again
    real_examples: RealExamples | None = None  # None: all examples are
    labels: dict[str, Tensor] = field(default_factory=dict)  # by head; IGNORE_INDEX where nothing is predicted
    label_positions: dict[str, Tensor] = field(
        default_factory=dict
    )  # by head (N,) which of all B T tokens have a label: see at

    def to(self, device: torch.device) -> "Batch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same where a GPU can fetch it by itself, so that nobody waits for the copy."""
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same of changed tensors."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: changed(item) for key, item in value.items()}
            if isinstance(value, Tensor):
                return change(value)
            return value.map_tensors(change) if isinstance(value, Batch) else value

        return replace(self, **{part.name: changed(getattr(self, part.name)) for part in fields(self)})

    def gather_labelled(self, head: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) the vectors that a head predicts from, (N,) and what it should: those without a label are left out.

        Which these are is known where batches are made. To find it out from the labels, a GPU would have to be waited
        for; where nobody said it, that is done.
        """
        labels = self.labels[head].flatten()
        places = self.label_positions.get(head)
        if places is None:
            places = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        return hidden.flatten(0, 1).index_select(0, places), labels.index_select(0, places)


@dataclass
class Output:
    """What a backbone made of a batch."""

    hidden: Tensor  # (B, T, D), or (B, 1, D) where one place of each row was all that was wanted
    layers: list[Tensor] = field(default_factory=list)  # the embedding and every layer's (B, T, D), when asked for
    state: DecodingState | None = None  # for the next call, when one was given


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor | None]:
    """Rows of different lengths as one tensor, and where it is padding (None if nowhere)."""
    lengths = [len(row) for row in rows]
    numbers = array("q", list(chain.from_iterable(rows)))  # taken in sooner than by torch.tensor, all rows end to end
    flat = torch.frombuffer(numbers, dtype=torch.long) if numbers else torch.empty(0, dtype=torch.long)
    if len(set(lengths)) == 1:
        return flat.view(len(rows), lengths[0]), None
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return torch.full(padding.shape, filler, dtype=torch.long).masked_scatter_(~padding, flat), padding


def count_real_tokens(batch: Batch) -> int:
    """How many tokens are read, with those of a source: no padding, and nothing of examples that only fill up."""
    real: Tensor | slice = slice(None)
    if batch.real_examples is not None:
        real = (
            slice(batch.real_examples.count)
            if batch.example_ids is None
            else batch.example_ids < batch.real_examples.count
        )
    count = 0
    for part in (batch, batch.source):
        if part is not None and part.document_ids is not None:  # padding is of none
            count += int((part.document_ids[real] >= 0).sum())
        elif part is not None:
            count += part.tokens[real].numel() - (0 if part.padding is None else int(part.padding[real].sum()))
    return count


def pad_to_multiple(batch: Batch, multiple: int) -> Batch:
    """The same rows with padding up to a length that is such a multiple, so that few different lengths come."""
    rows, length = batch.tokens.shape
    more = -length % multiple

    def wide(tensor: Any, filler: Any) -> Any:
        return None if tensor is None else torch.nn.functional.pad(tensor, (0, more), value=filler)

    padding = torch.zeros(rows, length, dtype=torch.bool) if batch.padding is None else batch.padding
    labels = {
        head: wide(told, IGNORE_INDEX) if head in batch.label_positions else told for head, told in batch.labels.items()
    }
    return replace(
        batch,
        tokens=wide(batch.tokens, 0),
        padding=wide(padding, True),
        document_ids=wide(batch.document_ids, -1),
        cu_seqlens=None,
        positions=wide(batch.positions, 0),
        segments=wide(batch.segments, 0),
        source=None if batch.source is None else pad_to_multiple(batch.source, multiple),
        labels=labels,
        label_positions={head: places + places // length * more for head, places in batch.label_positions.items()},
    )


def make_cu_seqlens(documents: Tensor) -> Tensor:
    """(M,) where the documents of (B, T) begin and end in all rows end to end; none goes on from one row to the next.

    Some are empty and lie at the end, so that M is of few different sizes.
    """
    fresh = torch.ones(documents.shape, dtype=torch.bool)
    fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = fresh.flatten().nonzero().squeeze(1)
    size = max(64, 1 << len(begins).bit_length())  # a power of two, with room for the end of the last
    return torch.cat([begins, begins.new_full((size - len(begins),), documents.numel())]).int()


def find_label_positions(labels: Tensor) -> Tensor:
    """(N,) where labels are, in (B, T) read row by row; and some where none is, so that N is of few different sizes.

    A step is recorded anew for each size.
    """
    wanted = labels.flatten() != IGNORE_INDEX
    found = wanted.nonzero().squeeze(1)
    step = max(8, len(wanted) // 64)
    missing = min(-(-max(1, len(found)) // step) * step, len(wanted)) - len(found)
    nowhere = wanted.byte().argmin().expand(missing)  # the first that has none
    return torch.cat([found, nowhere]) if missing else found
