"""Bidirectional language modelling (ELMo): a forward and a backward language model.

B rows, T tokens, W width of each direction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.data.token_store import TokenStore
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, token_loss
from headstock.tasks.packing import PackedWindows, StreamTask


@dataclass(frozen=True)
class BidirectionalConfig:
    """No settings."""


@TASKS.add("both-ways")
class BidirectionalLM(StreamTask):
    """The sum of a forward and a backward language modelling loss."""

    Config = BidirectionalConfig
    causal = False
    needs_bidirectional = True
    default_family = "elmo"
    max_epochs = 4
    bits_per_byte_head = "forward"

    def head_passes(self, head: str, length: Any) -> Any:
        return 2  # once per direction

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        return BidirectionalExamples(self.windows(data, length, seed=seed, epoch=epoch))

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        found = {}
        halves = model(batch).hidden.chunk(2, -1)  # (B, T, 2 W) -> (B, T, W) twice
        for way, hidden in zip(("forward", "backward"), halves, strict=True):
            found[way], _ = token_loss(model.heads["token"], hidden, batch.labels[way], smoothing=smoothing)
        return found

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """`loss` is the sum of both directions, `perplexity` that of the forward one."""
        loss = {way: sums[way] / max(1, counts[way]) for way in ("forward", "backward")}
        ppl = {f"{way}_perplexity": math.exp(min(value, 700.0)) for way, value in loss.items()}
        bits = {"bits_per_byte": sums["forward"] / math.log(2) / size} if size else {}
        return {"loss": sum(loss.values()), "perplexity": ppl["forward_perplexity"], **ppl, **bits}


class BidirectionalExamples:
    """Packed windows, labelled with the next and the previous token."""

    def __init__(self, windows: PackedWindows):
        self.windows, self.name = windows, windows.name

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        same = rows.documents[:, 1:] == rows.documents[:, :-1]  # the previous token is of the same document
        preceding = np.full_like(rows.shown, IGNORE_INDEX)
        preceding[:, 1:] = np.where(same & ~rows.padding[:, 1:], rows.shown[:, :-1], IGNORE_INDEX)
        following = np.where(rows.padding, IGNORE_INDEX, rows.wanted)
        return Batch(
            torch.from_numpy(rows.shown),
            document_ids=torch.from_numpy(rows.documents),  # -1 at padding
            positions=torch.from_numpy(rows.positions),
            labels={"forward": torch.from_numpy(following), "backward": torch.from_numpy(preceding)},
        )
