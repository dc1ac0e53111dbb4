"""Log-likelihood of texts: each token given those before it, or given all others (pseudo-log-likelihood).

B rows, T positions in a row, N scored positions, D width, V vocabulary. Computed in single precision throughout, since
small differences matter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.minimal_pairs import GROUPS, MinimalPair
from headstock.data.windowing import SpecialTokens, windows
from headstock.decoding.batching import batch_from_rows, token_batches
from headstock.intervals import item_interval
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.model import Model
from headstock.results import Result

LikelihoodKind = Literal["log-likelihood", "pseudo-log-likelihood"]
MAX_LOGITS = 1 << 24  # computed by the LM head at once


@dataclass(frozen=True, eq=False)
class TextScore(Result):
    """The log-likelihood of a text (natural logarithm)."""

    text: str
    log_likelihood: float
    tokens: list[tuple[str, float]]  # each token and its log-probability

    def _rows(self) -> list[dict[str, Any]]:
        return [{"text": self.text, "tokens": len(self.tokens), "log_likelihood": self.log_likelihood}]


@dataclass(frozen=True)
class ScoredPositions:
    """A row of input tokens, and the positions at which target tokens are scored."""

    tokens: list[int]
    positions: Sequence[int]
    targets: Sequence[int]
    text: int  # index of the text
    start: int  # index within the text of the first target


def token_log_probabilities(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    special: SpecialTokens,
    length: int,
    mask: int | None = None,
    shift: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[np.ndarray]:
    """The log-probability of every token of every text.

    Without `mask` each token is predicted from those before it. With `mask` each token is masked alone and predicted
    from both sides, by the hidden state `shift` positions before it (Salazar et al. 2020). `progress` is called with
    the fraction of tokens done.
    """
    result = [np.zeros(len(text)) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # longest first, so that memory peaks early
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
    for batch in token_batches(rows, lambda row: len(row.tokens), model.device):
        scores = score_rows(model, batch, pad_id=special.pad, causal=mask is None)
        for row, values in zip(batch, scores, strict=True):
            result[row.text][row.start : row.start + len(values)] = values
            done += len(values)
        if progress is not None and total:
            progress(done / total)
    return result


def causal_rows(index: int, text: Sequence[int], special: SpecialTokens, length: int) -> Iterator[ScoredPositions]:
    """A text after its BOS token; in a long text each scored token follows at least half a window of context."""
    tokens, lead = [*special.prefix, *text], len(special.prefix)
    # a window inside the text starts with text tokens in place of the BOS token
    for window in windows(len(text), length - lead + 1):
        first = window.keep_start - window.start + lead - 1
        targets = text[window.keep_start : window.keep_end]
        positions = range(first, first + len(targets))
        yield ScoredPositions(
            tokens[window.start : window.end + lead - 1], positions, targets, index, window.keep_start
        )


def masked_rows(
    index: int, text: Sequence[int], special: SpecialTokens, length: int, *, mask: int, shift: int
) -> Iterator[ScoredPositions]:
    """One row per token of a text, with that token masked."""
    for window in windows(len(text), special.capacity(length), centered=True):
        row = special.wrap(text[window.start : window.end])
        for token in range(window.keep_start, window.keep_end):
            position = token - window.start + len(special.prefix)
            masked = [*row[:position], mask, *row[position + 1 :]]
            yield ScoredPositions(masked, [position - shift], [text[token]], index, token)


@torch.inference_mode()
@fast_cpu_kernels()
def score_rows(model: Model, rows: Sequence[ScoredPositions], *, pad_id: int, causal: bool) -> list[np.ndarray]:
    """The log-probability of each row's targets; only the scored positions pass through the head."""
    device = model.device
    batch = batch_from_rows([row.tokens for row in rows], pad_id, device, causal=causal)
    counts = [len(row.positions) for row in rows]
    owners = torch.repeat_interleave(torch.tensor(counts)).to(device)
    positions = torch.tensor([position for row in rows for position in row.positions], dtype=torch.long, device=device)
    targets = torch.tensor([token for row in rows for token in row.targets], dtype=torch.long, device=device)
    hidden = model(batch).hidden[owners, positions]  # (B, T, D) -> (N, D)
    values = target_log_probabilities(model, hidden, targets).cpu().double().numpy()
    return np.split(values, np.cumsum(counts)[:-1])


def target_log_probabilities(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    """(N, D), (N,) -> (N,) log-probability of each target."""
    step = max(1, MAX_LOGITS // model.backbone.config.vocabulary)
    parts = [hidden.new_zeros(0)]
    for chunk, chunk_targets in zip(hidden.split(step), targets.split(step), strict=True):
        logits = model.heads["token"](chunk).float()  # (N, V)
        parts.append(logits.gather(1, chunk_targets[:, None]).squeeze(1) - logits.logsumexp(1))
    return torch.cat(parts)


# Minimal pairs


def score_minimal_pairs(
    pairs: Sequence[MinimalPair],
    encode: Callable[[list[str]], list[list[int]]],
    offsets: Callable[[str], list[tuple[int, int]]],
    log_probabilities: Callable[[list[list[int]]], list[np.ndarray]],
    *,
    write: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The share of pairs whose good text is likelier, overall and by kind, with 95% intervals; a tie counts half.

    `partial_accuracy` compares only the part after the two candidates, which is the same in both texts, so that a
    frequent candidate has no advantage. It covers the pairs for which that part is known. `write` is called with each
    pair and its log-likelihoods.
    """
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    rows = [tuple(row) for row in encode(texts)]
    unique = list(dict.fromkeys(rows))  # equal texts are scored once, so that they tie exactly
    scores = dict(zip(unique, log_probabilities([list(row) for row in unique]), strict=True))
    values = [scores[row] for row in rows]
    outcomes = pair_outcomes(np.array([value.sum() for value in values]).reshape(-1, 2))
    accuracy = item_interval(outcomes)
    metrics: dict[str, Any] = {
        "accuracy": accuracy.mean,
        "rows": len(pairs),
        "ties": int((outcomes == 0.5).sum()),
        "intervals": {"accuracy": [accuracy.low, accuracy.high]},
    }
    after: list[float] = []
    if partial := [(i, pair.continuation) for i, pair in enumerate(pairs) if pair.continuation is not None]:
        after = [
            log_likelihood_after(values[2 * i + side], offsets(texts[2 * i + side]), continuation[side])
            for i, continuation in partial
            for side in (0, 1)
        ]
        share = item_interval(pair_outcomes(np.array(after).reshape(-1, 2)))
        metrics["partial_accuracy"] = share.mean
        metrics["intervals"]["partial_accuracy"] = [share.low, share.high]
    if write is not None:
        by_pair = {i: after[2 * number : 2 * number + 2] for number, (i, _) in enumerate(partial)}
        for i, (pair, outcome) in enumerate(zip(pairs, outcomes.tolist(), strict=True)):
            good, bad = (float(value.sum()) for value in values[2 * i : 2 * i + 2])
            row = asdict(pair) | {"log_likelihood_good": good, "log_likelihood_bad": bad, "outcome": outcome}
            row |= dict(zip(("partial_good", "partial_bad"), by_pair.get(i, ()), strict=False))
            write({name: value for name, value in row.items() if name != "continuation"})
    return metrics | {"by": accuracy_by_kind(pairs, outcomes)}


def pair_outcomes(scores: np.ndarray) -> np.ndarray:
    """(N, 2) of the good and the bad text -> (N,): 1 if the good one is likelier, 0.5 for a tie."""
    return (scores[:, 0] > scores[:, 1]) + 0.5 * (scores[:, 0] == scores[:, 1])


def log_likelihood_after(values: np.ndarray, offsets: Sequence[tuple[int, int]], character: int) -> float:
    """The log-likelihood of the tokens that start at or after a character."""
    return float(sum(value for value, (start, _) in zip(values, offsets, strict=True) if start >= character))


def accuracy_by_kind(pairs: Sequence[MinimalPair], outcomes: np.ndarray) -> dict[str, dict[str, dict[str, Any]]]:
    """The accuracy of each group of pairs, lowest first."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in GROUPS:
        members: dict[str, list[int]] = {}
        for i, pair in enumerate(pairs):
            if kind in pair.groups:
                members.setdefault(pair.groups[kind], []).append(i)
        groups: dict[str, dict[str, Any]] = {}
        for name, indices in members.items():
            share = item_interval(outcomes[indices])
            groups[name] = {"accuracy": share.mean, "low": share.low, "high": share.high, "rows": len(indices)}
        if groups:
            result[kind] = dict(sorted(groups.items(), key=lambda item: item[1]["accuracy"]))
    return result
