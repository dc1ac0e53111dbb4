"""Bidirectional language modelling (ELMo): a forward and a backward language model.

B rows, T tokens, W width of each direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headstock.data.token_store import TokenStore
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, PlanDefaults, bits_per_byte, perplexity, token_loss
from headstock.tasks.packing import PackedExamples, TextTask


@dataclass(frozen=True)
class BidirectionalConfig:
    """No settings."""


@TASKS.add("both-ways")
class BidirectionalLM(TextTask):
    """The sum of a forward and a backward language modelling loss."""

    Config = BidirectionalConfig
    causal = False
    needs_bilm = True
    plan = PlanDefaults(max_epochs=4, family="elmo")
    bits_per_byte_head = "forward"

    def head_passes(self, head: str, length: Any) -> Any:
        return 2  # once per direction

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        return BidirectionalExamples(self.windows(data, length, seed=seed, epoch=epoch))

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        forward, backward = model(batch).hidden.chunk(2, -1)  # (B, T, 2 W) -> (B, T, W) twice
        return {
            direction: token_loss(model.heads["token"], hidden, batch.labels[direction], smoothing=smoothing)[0]
            for direction, hidden in (("forward", forward), ("backward", backward))
        }

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """`loss` is the sum of both directions, `perplexity` that of the forward one."""
        forward, backward = (sums[direction] / max(1, counts[direction]) for direction in ("forward", "backward"))
        return {
            "loss": forward + backward,
            "perplexity": perplexity(forward),
            "forward_perplexity": perplexity(forward),
            "backward_perplexity": perplexity(backward),
            **bits_per_byte(sums["forward"], size),
        }


class BidirectionalExamples(PackedExamples):
    """Packed windows, labelled with the next and the previous token."""

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        previous = np.full_like(rows.tokens, IGNORE_INDEX)
        same_document = rows.document_ids[:, 1:] == rows.document_ids[:, :-1]
        previous[:, 1:] = np.where(same_document & ~rows.padding[:, 1:], rows.tokens[:, :-1], IGNORE_INDEX)
        return rows.batch(rows.tokens, {"forward": rows.next_tokens, "backward": previous})
