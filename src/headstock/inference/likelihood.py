"""How likely texts are: each token given those before it, or given all others (pseudo-log-likelihood).

B rows, T places in a row, N places that are scored, D width, V vocabulary. Always in single precision: small
differences count here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.windowing import SpecialTokens, windows
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.model import Model

LikelihoodKind = Literal["log-likelihood", "pseudo-log-likelihood"]
SCORES = 1 << 24  # numbers that the widest layer makes at once


@dataclass(frozen=True)
class TextScore:
    """How likely a text is; natural logarithms."""

    text: str
    log_likelihood: float
    tokens: list[tuple[str, float]]  # each token and its part in the sum


@dataclass(frozen=True)
class ScoredPositions:
    """A row as the model is shown it, where in it tokens are told, and which ones are asked for there."""

    shown: list[int]
    places: Sequence[int]  # whose vectors the head is given
    wanted: Sequence[int]  # a token for each of them
    text: int  # which text it is of
    first: int  # where in that text the asked tokens begin


def token_log_probabilities(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    special: SpecialTokens,
    length: int,
    mask: int | None = None,
    shift: int = 0,
    watch: Callable[[float], None] | None = None,
) -> list[np.ndarray]:
    """The log-probability of every token of every text, in their order.

    Without `mask` texts are read left to right, each token being told by those before it. With it, each token is
    hidden alone behind `mask` and told from both sides, `shift` places before it (Salazar et al. 2020). `watch` hears
    the share of the tokens that is done.
    """
    found = [np.zeros(len(text)) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # the longest first, so that memory peaks early
    rows = (
        row
        for i in order
        for row in (
            causal_rows(i, texts[i], special, length)
            if mask is None
            else masked_rows(i, texts[i], special, length, mask=mask, shift=shift)
        )
    )
    done, total = 0, sum(map(len, texts))
    for batch in token_batches(rows, lambda row: len(row.shown), model.device):
        values = score_rows(model, batch, filler=special.pad, causal=mask is None)
        for row, told in zip(batch, values, strict=True):
            found[row.text][row.first : row.first + len(told)] = told
            done += len(told)
        if watch is not None and total:
            watch(done / total)
    return found


def causal_rows(number: int, text: Sequence[int], special: SpecialTokens, length: int) -> Iterator[ScoredPositions]:
    """A text after its opening mark; a long one in overlapping rows, each token after half a row at least."""
    shown = [*special.prefix, *text]
    lead = len(special.prefix)
    for part in windows(len(text), length - lead + 1):
        places = range(part.keep_start - part.start + lead - 1, part.keep_end - part.start + lead - 1)
        # a row that begins inside the text has no opening mark, but as many of the text's tokens in its place
        yield ScoredPositions(
            shown[part.start : part.end + lead - 1],
            places,
            text[part.keep_start : part.keep_end],
            number,
            part.keep_start,
        )


def masked_rows(
    number: int, text: Sequence[int], special: SpecialTokens, length: int, *, mask: int, shift: int
) -> Iterator[ScoredPositions]:
    """One row for each token of a text, in which it alone is hidden; made as they are asked for, for they are many."""
    for part in windows(len(text), special.capacity(length), centered=True):
        row = special.wrap(text[part.start : part.end])
        for place in range(part.keep_start, part.keep_end):
            at = place - part.start + len(special.prefix)
            yield ScoredPositions([*row[:at], mask, *row[at + 1 :]], [at - shift], [text[place]], number, place)


@torch.inference_mode()
@fast_cpu_kernels()
def score_rows(model: Model, rows: Sequence[ScoredPositions], *, filler: int, causal: bool) -> list[np.ndarray]:
    """The log-probability of each asked token, row by row; only the places that are asked pass through the head."""
    batch = batch_from_rows([row.shown for row in rows], filler, model.device, causal=causal)
    counts = [len(row.places) for row in rows]
    owners = torch.repeat_interleave(torch.tensor(counts)).to(model.device)
    places = torch.tensor([place for row in rows for place in row.places], dtype=torch.long, device=model.device)
    wanted = torch.tensor([token for row in rows for token in row.wanted], dtype=torch.long, device=model.device)
    hidden = model(batch).hidden[owners, places]  # (B, T, D) -> (N, D)
    told = target_log_probabilities(model, hidden, wanted).cpu().double().numpy()
    return np.split(told, np.cumsum(counts)[:-1])


def target_log_probabilities(model: Model, hidden: Tensor, wanted: Tensor) -> Tensor:
    """(N, D) vectors and (N,) tokens -> (N,) how likely those tokens are there."""
    head = model.heads["token"]
    step = max(1, SCORES // model.backbone.config.vocabulary)
    found = [hidden.new_zeros(0)]
    for at in range(0, len(hidden), step):
        scores = head(hidden[at : at + step]).float()  # (N, V)
        found.append(scores.gather(1, wanted[at : at + step, None]).squeeze(1) - scores.logsumexp(1))
    return torch.cat(found)
