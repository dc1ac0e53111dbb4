"""Sampling of the next token. B rows, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headstock.errors import ConfigError, WorkError


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_k: int | None = None  # only the k most likely tokens
    top_p: float | None = None  # only the most likely tokens with total probability p
    min_p: float | None = None  # only tokens with this share of the highest probability
    repetition_penalty: float = 1.0  # above 1, tokens of the text become less likely

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(("temperature", f"must be 0 (greedy) or more, not {self.temperature}"))
        if self.top_k is not None and self.top_k < 1:
            problems.append(("top_k", f"must be at least 1, not {self.top_k}"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(("top_p", f"must be above 0 and at most 1, not {self.top_p}"))
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            problems.append(("min_p", f"must be from 0 to 1, not {self.min_p}"))
        if self.repetition_penalty <= 0:
            problems.append(("repetition_penalty", f"must be above 0, not {self.repetition_penalty}"))
        if problems:
            raise ConfigError(problems)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def check_scores(scores: Tensor) -> None:
    """Refuse logits (B, V) that are not finite."""
    if not scores.amax(-1).isfinite().all():
        raise WorkError("the model gives values that are not finite numbers")


def choose(scores: Tensor, how: Sampling, *, seen: Tensor | None = None, luck: Tensor | None = None) -> Tensor:
    """(B, V) -> (B,): one token per row, sampled with the uniform draws `luck` (B,)."""
    if seen is not None:
        scores = penalise(scores, seen, how.repetition_penalty)
    if how.greedy:
        return scores.max(-1).indices  # faster than argmax on a CPU
    assert luck is not None
    probabilities, order = candidates(scores.float(), how)
    reached = probabilities.cumsum(-1)
    # inverse transform sampling with one draw per row, so that rows are independent
    wanted = luck[:, None].to(reached) * reached[:, -1:]
    possible = (reached > wanted) & (probabilities > 0)  # excluded tokens stay excluded despite rounding
    place = possible.byte().argmax(-1, keepdim=True)  # the first of them
    return place.squeeze(-1) if order is None else order.gather(-1, place).squeeze(-1)


def candidates(scores: Tensor, how: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities, zero for excluded tokens, and their token ids; None for the vocabulary in its own order.

    The vocabulary is sorted only where it must be, since that costs as much as a small model.
    """
    order = None
    if how.top_k is not None and how.top_k < scores.size(-1):
        scores, order = scores.topk(how.top_k, -1)
    elif how.top_p is not None:
        scores, order = scores.sort(stable=True, dim=-1, descending=True)
    # relative to the highest, so that no temperature overflows
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / how.temperature).softmax(-1)
    if how.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= how.top_p, 0.0)  # the most likely token always stays
    if how.min_p is not None:
        least = how.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities, order


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens of the text less likely; `seen` (B, V) is True for them."""
    weaker = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(seen, weaker, scores)
