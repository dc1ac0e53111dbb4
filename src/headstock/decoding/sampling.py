"""Sampling of the next token. B rows, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstock.data.tokenizer import Tokenizer
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


def suppressed_tokens(tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Ids that are never generated: special tokens except EOS, and ids beyond the tokenizer's vocabulary."""
    special = (token for token in tokenizer.all_special_ids if token != tokenizer.eos)
    return [*special, *range(tokenizer.vocabulary, vocabulary)]


def check_logits(logits: Tensor) -> None:
    """Refuse logits (B, V) that are not finite."""
    if not logits.amax(-1).isfinite().all():
        raise WorkError("the model's logits are not finite (NaN or infinity)")


def choose(logits: Tensor, sampling: Sampling, *, in_text: Tensor | None = None, draws: Tensor | None = None) -> Tensor:
    """(B, V) -> (B,): one token per row, sampled with the uniform numbers `draws` (B,).

    `in_text` (B, V) is True for tokens of the text, to which the repetition penalty applies.
    """
    if in_text is not None:
        logits = penalize_repetition(logits, in_text, sampling.repetition_penalty)
    if sampling.greedy:
        return logits.max(-1).indices  # faster than argmax on a CPU
    assert draws is not None
    candidates, find_token = candidate_logits(logits.float(), sampling)
    probabilities = filter_probabilities(candidates, sampling)
    cumulative = probabilities.cumsum(-1)
    # inverse transform sampling with one draw per row, so that rows are independent
    threshold = draws[:, None].to(cumulative) * cumulative[:, -1:]
    possible = (cumulative > threshold) & (probabilities > 0)  # excluded tokens stay excluded despite rounding
    index = possible.byte().argmax(-1, keepdim=True)  # the first one
    return find_token(index).squeeze(-1)


def candidate_logits(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The logits to choose from, and a function from an index into them (B, 1) to the token.

    The vocabulary is sorted only if necessary, since that costs as much as a small model. On a CPU, NumPy sorts the
    values alone 20 times as fast as torch sorts them with their indices.
    """
    if sampling.top_k is not None and sampling.top_k < logits.size(-1):
        values, token_ids = logits.topk(sampling.top_k, -1)
    elif sampling.top_p is None:
        return logits, lambda index: index
    elif logits.device.type == "cpu":
        values = torch.from_numpy(np.sort(logits.numpy())).flip(-1)
        return values, lambda rank: token_of_rank(logits, values, rank)
    else:
        values, token_ids = logits.sort(stable=True, dim=-1, descending=True)
    return values, lambda index: token_ids.gather(-1, index)


def token_of_rank(logits: Tensor, ranked: Tensor, rank: Tensor) -> Tensor:
    """(B, 1) the token whose logit has this rank (B, 1) in `ranked` (B, V); equal logits rank by token id."""
    value = ranked.gather(-1, rank)
    rank_among_equal = rank - (logits > value).sum(-1, keepdim=True)
    equal_so_far = (logits == value).cumsum(-1, dtype=torch.int32)  # in 64 bits it takes four times as long
    return (equal_so_far > rank_among_equal).byte().argmax(-1, keepdim=True)


def filter_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities, zero for excluded tokens. With `top_p`, logits are sorted from the highest."""
    # relative to the highest, so that no temperature overflows
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the most likely token always stays
    if sampling.min_p is not None:
        minimum = sampling.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < minimum, 0.0)
    return probabilities


def penalize_repetition(logits: Tensor, in_text: Tensor, penalty: float) -> Tensor:
    """Make tokens of the text less likely; `in_text` (B, V) is True for them."""
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(in_text, penalized, logits)
