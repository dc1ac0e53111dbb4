"""What the parts of a model hand each other.  B rows, T tokens in a row, D width."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE = -100  # the label of a position that is not predicted


class State(Protocol):
    """What a backbone remembers of the tokens read so far; opaque to decoding."""

    lengths: Tensor  # (B,) how many real tokens each row has read

    def select(self, rows: Tensor) -> "State":
        """The same memory for other rows: some dropped, reordered or repeated."""
        ...


@dataclass
class Batch:
    """Token rows, padded on the right only, with what is known about each token."""

    tokens: Tensor  # (B, T)
    padding: Tensor | None = None  # (B, T) True where there is no token
    documents: Tensor | None = None  # (B, T) which packed document a token is of; attention stays inside it
    positions: Tensor | None = None  # (B, T) place in its document; counted from what was read before if not given
    segments: Tensor | None = None  # (B, T) which of two texts a token is of
    causal: Tensor | bool | None = None  # (B,) True for rows read left to right, or one for all; None: as the backbone
    source: "Batch | None" = None  # what an encoder-decoder reads
    before: "Batch | None" = None  # what stands before the rows in their first documents, to know what they go on from
    owners: Tensor | None = None  # (B,) which example a row is a part of, where one may have several rows
    features: Tensor | None = None  # (N, D) what a frozen backbone made of N examples, so that it need not read again
    labels: dict[str, Tensor] = field(default_factory=dict)  # by head; IGNORE where nothing is predicted

    def to(self, device: torch.device) -> "Batch":
        def move(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: move(item) for key, item in value.items()}
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            return value.to(device) if isinstance(value, Batch) else value

        return replace(self, **{part.name: move(getattr(self, part.name)) for part in fields(self)})


@dataclass
class Output:
    """What a backbone made of a batch."""

    hidden: Tensor  # (B, T, D)
    layers: list[Tensor] = field(default_factory=list)  # the embedding and every layer's (B, T, D), when asked for
    state: State | None = None  # for the next call, when one was given


def pad(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor | None]:
    """Rows of different lengths as one tensor, and where it is padding (None if nowhere)."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=torch.long)
    if all(len(row) == longest for row in rows):
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(longest)[None] >= lengths[:, None]
