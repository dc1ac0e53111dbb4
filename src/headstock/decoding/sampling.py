"""From scores to the next token.  B rows, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headstock.errors import ConfigError, WorkError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int | None = None  # only the k likeliest
    top_p: float | None = None  # only the likeliest that together reach probability p
    min_p: float | None = None  # only those at least this share as likely as the likeliest
    repetition_penalty: float = 1.0  # above 1, tokens already in the text are made less likely

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
    """Refuse (B, V) scores of which none can be chosen, or one is not a number: nothing follows from them."""
    if not scores.amax(-1).isfinite().all():
        raise WorkError("the model gives values that are not finite numbers")


def choose(scores: Tensor, how: Sampling, *, seen: Tensor | None = None, luck: Tensor | None = None) -> Tensor:
    """(B, V) -> (B,): one token a row. `luck` (B,) from [0, 1) decides where `how` leaves a choice."""
    if seen is not None:
        scores = penalise(scores, seen, how.repetition_penalty)
    if how.greedy:
        return scores.max(-1).indices  # what argmax gives, in two thirds of its time on a CPU
    assert luck is not None
    probabilities, order = candidates(scores.float(), how)
    reached = probabilities.cumsum(-1)
    # inverse of the distribution: each row has its own number, so rows do not disturb each other's choice
    wanted = luck[:, None].to(reached) * reached[:, -1:]
    possible = (reached > wanted) & (probabilities > 0)  # what was ruled out is not chosen, however the sum is rounded
    place = possible.byte().argmax(-1, keepdim=True)  # the first of them
    return place.squeeze(-1) if order is None else order.gather(-1, place).squeeze(-1)


def candidates(scores: Tensor, how: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities (those ruled out are zero) and the tokens they are of: None if the whole vocabulary in its order.

    Otherwise they fall. To sort a vocabulary costs as much as a small model does, so it is done only where it must be.
    """
    order = None
    if how.top_k is not None and how.top_k < scores.size(-1):
        scores, order = scores.topk(how.top_k, -1)
    elif how.top_p is not None:
        scores, order = scores.sort(stable=True, dim=-1, descending=True)
    # less the highest, so that the smallest temperature cannot make a score infinite
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / how.temperature).softmax(-1)
    if how.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= how.top_p, 0.0)  # the likeliest always stays
    if how.min_p is not None:
        least = how.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities, order


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make what the row already holds less likely, whatever the sign of its score. `seen` is (B, V)."""
    weaker = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(seen, weaker, scores)
