"""Beam search for every model family: the backbone's decoding state is opaque.

R open hypotheses, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.decoding.generate import check_rows, ends_of, whole
from headstock.decoding.sampling import Sampling, check_scores
from headstock.errors import ConfigError, UserError
from headstock.kernels.backends import fast_cpu_kernels
from headstock.kernels.bare_modules import strip_modules
from headstock.model.batch import Batch
from headstock.model.model import Model


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation without its EOS token."""

    tokens: list[int]
    score: float  # log-probability / length ** length_penalty, with the EOS token where there is one
    ended: Literal["length", "end"] = "length"


@dataclass(frozen=True)
class _Open:
    """An unfinished hypothesis."""

    tokens: list[int] = field(default_factory=list)
    total: float = 0.0  # log-probability
    greedy: bool = True  # each token is the most likely one


@dataclass(frozen=True)
class _Rules:
    beams: int
    end: int | None
    length_penalty: float
    no_repeat: int  # size of n-grams that may not repeat; 0 for no limit

    def __post_init__(self) -> None:
        problems = []
        if self.beams < 1:
            problems.append(("beams", f"must be 1 or more, not {self.beams}"))
        if not math.isfinite(self.length_penalty):
            problems.append(("length_penalty", f"must be a number, not {self.length_penalty}"))
        if self.no_repeat < 0:
            problems.append(("no_repeat", f"must be 0 (repeats may come) or more, not {self.no_repeat}"))
        if problems:
            raise ConfigError(problems)

    def score(self, total: float, length: int) -> float:
        return total / max(1, length) ** self.length_penalty


@torch.inference_mode()
@fast_cpu_kernels()
def beam_search(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int,
    max_tokens: int,
    end: int | None,
    length_penalty: float = 1.0,
    no_repeat: int = 0,
    forbidden: Sequence[int] = (),
    sources: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Up to `beams` continuations of every prompt, of up to `max_tokens` tokens each, best first.

    The greedy continuation always stays in the search, so that no result is worse. Continuations end with the model's
    context at the latest.
    """
    rules = _Rules(beams, end, length_penalty, no_repeat)
    model.eval()
    check_rows(model, prompts, sources)
    searches = [_Search(rules, list(prompt), limit_of(model, prompt, max_tokens)) for prompt in prompts]
    if not searches or max_tokens < 1:
        return [[Hypothesis([], 0.0)] for _ in searches]
    backbone, head, device = strip_modules(model.backbone), strip_modules(model.heads["token"]), model.device
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=device)
    room = max(len(search.prompt) + search.limit for search in searches) - 1  # the last token is never an input
    output = backbone(whole(prompts, sources).to(device), model.backbone.new_state(len(prompts), room))
    last, active = ends_of(output.hidden, prompts), searches
    while True:
        scores = head(last).float().log_softmax(-1)  # (R, D) -> (R, V)
        check_scores(scores)
        scores[:, banned] = -torch.inf
        if no_repeat:
            scores[repeats(active, device)] = -torch.inf
        parents, first = [], 0  # for each hypothesis that continues, the row it extends
        # one more than beams, since one may be the EOS token
        found = scores.topk(min(beams + 1, scores.size(1)))
        values, tokens = found.values.tolist(), found.indices.tolist()
        for search in active:
            rows = slice(first, first + len(search.open))
            parents += [first + place for place in search.grow(values[rows], tokens[rows])]
            first = rows.stop
        active = [search for search in active if search.open]
        if not active:
            return [search.best() for search in searches]
        state = output.state
        if parents != list(range(first)):
            state = state.select(torch.tensor(parents, device=device))
        latest = torch.tensor([[row.tokens[-1]] for search in active for row in search.open], device=device)
        output = backbone(Batch(latest, causal=True), state)
        last = output.hidden[:, -1]


class _Search:
    """The finished and open hypotheses of one prompt."""

    def __init__(self, rules: _Rules, prompt: list[int], limit: int):
        self.rules, self.prompt, self.limit = rules, prompt, limit
        self.open = [_Open()]
        self.done: list[Hypothesis] = []

    def grow(self, values: list[list[float]], tokens: list[list[int]]) -> list[int]:
        """Extend the open hypotheses by their most likely tokens; returns the parent of each new one.

        Those that end among the best `beams` are finished; the best `beams` of the others continue, and the greedy one.
        """
        rules, old, full = self.rules, self.open, len(self.done) >= self.rules.beams
        candidates = [
            (row.total + value, token, place, row.greedy and rank == 0)
            for place, row in enumerate(old)
            for rank, (value, token) in enumerate(zip(values[place], tokens[place], strict=True))
            if value > -math.inf and (not full or (row.greedy and rank == 0))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        kept: list[tuple[int, _Open]] = []
        for rank, (total, token, place, greedy) in enumerate(candidates):
            before = old[place].tokens
            if token == rules.end:
                if rank < rules.beams or greedy:
                    self.done.append(Hypothesis(before, rules.score(total, len(before) + 1), "end"))
            elif len(kept) < rules.beams or greedy:
                kept.append((place, _Open([*before, token], total, greedy)))
        stuck = [row for row, own in zip(old, values, strict=True) if not own[0] > -math.inf]  # no token is allowed
        self.cut(stuck)
        kept = self.hopeful(kept)
        self.open = [row for _, row in kept]
        return [place for place, _ in kept]

    def hopeful(self, kept: list[tuple[int, _Open]]) -> list[tuple[int, _Open]]:
        """The hypotheses that continue: none at the length limit, or if none can still become the best."""
        if kept and len(kept[0][1].tokens) == self.limit:
            self.cut([row for _, row in kept])
            return []
        if len(self.done) >= self.rules.beams:
            kept = [(place, row) for place, row in kept if row.greedy]
        best = max((hypothesis.score for hypothesis in self.done), default=-math.inf)
        return kept if any(self.ceiling(row) > best for _, row in kept) else []

    def ceiling(self, row: _Open) -> float:
        """An upper bound of its final score, as if all further tokens had probability one."""
        lengths = (len(row.tokens) + 1, self.limit)
        return max(self.rules.score(row.total, length) for length in lengths)

    def cut(self, rows: list[_Open]) -> None:
        self.done += [Hypothesis(row.tokens, self.rules.score(row.total, len(row.tokens))) for row in rows]

    def best(self) -> list[Hypothesis]:
        return sorted(self.done, key=lambda hypothesis: -hypothesis.score)[: self.rules.beams]


def limit_of(model: Model, prompt: Sequence[int], max_tokens: int) -> int:
    """The number of tokens that may follow a prompt within the context."""
    context = model.backbone.context
    if context is None:
        return max_tokens
    if len(prompt) > context:
        room = f"does not fit into the model's context of {context}"
        raise UserError(f"a prompt of {len(prompt)} tokens {room}, and beams cannot forget its beginning")
    return min(max_tokens, context - len(prompt) + 1)


def repeats(searches: list[_Search], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token ids of tokens that would repeat an n-gram of the row."""
    found: tuple[list[int], list[int]] = ([], [])
    texts = [(search, [*search.prompt, *row.tokens]) for search in searches for row in search.open]
    for place, (search, text) in enumerate(texts):
        before = search.rules.no_repeat - 1
        tail = text[len(text) - before :]
        again = {text[at + before] for at in range(len(text) - before) if text[at : at + before] == tail}
        again.discard(search.rules.end)
        found[0].extend([place] * len(again))
        found[1].extend(again)
    rows, tokens = (torch.tensor(part, dtype=torch.long, device=device) for part in found)
    return rows, tokens


def check_beams(sampling: Sampling, *, samples: int, stream: Any, cache: bool) -> None:
    """Refuse options that beam search does not support."""
    drawing = [part.name for part in fields(sampling) if getattr(sampling, part.name) != part.default]
    drawing += ["samples"] if samples != 1 else []
    if drawing:
        why = "beam search does not sample"
        raise UserError(f"{why}: {', '.join(drawing)} cannot be set together with beams")
    if stream is not None:
        raise UserError("beam search cannot stream: the text is known only at the end")
    if not cache:
        raise UserError("beam search needs the cache")
