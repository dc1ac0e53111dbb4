"""Beam search: the likeliest continuations that a few rows side by side can find.

The backbone's state is opaque here too, so one search serves every family. R open rows, V vocabulary.
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
    """A continuation, without the end mark, and how likely the model finds it."""

    tokens: list[int]
    score: float  # log-probability / length ** length_penalty; the end mark, where it came, counts in both
    ended: Literal["length", "end"] = "length"


@dataclass(frozen=True)
class _Open:
    """A continuation that may still grow."""

    tokens: list[int] = field(default_factory=list)
    total: float = 0.0  # log-probability
    greedy: bool = True  # each of its tokens was the likeliest after those before it


@dataclass(frozen=True)
class _Rules:
    beams: int
    end: int | None
    length_penalty: float
    no_repeat: int  # no sequence of so many tokens comes twice; 0 if it may

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
    """Up to `beams` continuations of every prompt by up to `max_tokens` tokens, the best first.

    One beam is the greedy continuation; with more of them it stays in the search, so that no result is worse. All that
    the model reads must be in its context, so a continuation ends there at the latest.
    """
    rules = _Rules(beams, end, length_penalty, no_repeat)
    model.eval()
    check_rows(model, prompts, sources)
    searches = [_Search(rules, list(prompt), limit_of(model, prompt, max_tokens)) for prompt in prompts]
    if not searches or max_tokens < 1:
        return [[Hypothesis([], 0.0)] for _ in searches]
    backbone, head, device = strip_modules(model.backbone), strip_modules(model.heads["token"]), model.device
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=device)
    room = max(len(search.prompt) + search.limit for search in searches) - 1  # the last token is not read
    output = backbone(whole(prompts, sources).to(device), model.backbone.new_state(len(prompts), room))
    last, active = ends_of(output.hidden, prompts), searches
    while True:
        scores = head(last).float().log_softmax(-1)  # (R, D) -> (R, V)
        check_scores(scores)
        scores[:, banned] = -torch.inf
        if no_repeat:
            scores[repeats(active, device)] = -torch.inf
        parents, first = [], 0  # of all rows that go on: the row each comes from
        # one more than there are beams: one of them may be the end mark
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
    """What was found for one prompt, and what may still grow into something better."""

    def __init__(self, rules: _Rules, prompt: list[int], limit: int):
        self.rules, self.prompt, self.limit = rules, prompt, limit
        self.open = [_Open()]
        self.done: list[Hypothesis] = []

    def grow(self, values: list[list[float]], tokens: list[list[int]]) -> list[int]:
        """Give the open rows their next tokens, of which each has its likeliest; says which row each one open now was.

        What ends among the best `beams` is done; the best `beams` of the others go on, and the greedy one in any case.
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
        stuck = [row for row, own in zip(old, values, strict=True) if not own[0] > -math.inf]  # no token may follow
        self.cut(stuck)
        kept = self.hopeful(kept)
        self.open = [row for _, row in kept]
        return [place for place, _ in kept]

    def hopeful(self, kept: list[tuple[int, _Open]]) -> list[tuple[int, _Open]]:
        """Those that go on: none if they are as long as they may be, or if none of them can still be the best."""
        if kept and len(kept[0][1].tokens) == self.limit:
            self.cut([row for _, row in kept])
            return []
        if len(self.done) >= self.rules.beams:
            kept = [(place, row) for place, row in kept if row.greedy]
        best = max((hypothesis.score for hypothesis in self.done), default=-math.inf)
        return kept if any(self.ceiling(row) > best for _, row in kept) else []

    def ceiling(self, row: _Open) -> float:
        """What its score would be if all that is to come were certain, at the length that suits it best."""
        lengths = (len(row.tokens) + 1, self.limit)
        return max(self.rules.score(row.total, length) for length in lengths)

    def cut(self, rows: list[_Open]) -> None:
        self.done += [Hypothesis(row.tokens, self.rules.score(row.total, len(row.tokens))) for row in rows]

    def best(self) -> list[Hypothesis]:
        return sorted(self.done, key=lambda hypothesis: -hypothesis.score)[: self.rules.beams]


def limit_of(model: Model, prompt: Sequence[int], max_tokens: int) -> int:
    """How many tokens may follow a prompt: the model must have room to read all but the last."""
    context = model.backbone.context
    if context is None:
        return max_tokens
    if len(prompt) > context:
        room = f"does not fit into the model's context of {context}"
        raise UserError(f"a prompt of {len(prompt)} tokens {room}, and beams cannot forget its beginning")
    return min(max_tokens, context - len(prompt) + 1)


def repeats(searches: list[_Search], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and tokens: what would complete a sequence that the row has already, in its prompt or since."""
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
    """Refuse what does not go with a search for the likeliest text."""
    drawing = [part.name for part in fields(sampling) if getattr(sampling, part.name) != part.default]
    drawing += ["samples"] if samples != 1 else []
    if drawing:
        why = "beams look for the likeliest text, so none is drawn"
        raise UserError(f"{why}: {', '.join(drawing)} cannot be set together with beams")
    if stream is not None:
        raise UserError("beams know their text only in the end, so it cannot be shown as it grows")
    if not cache:
        raise UserError("beams go on from what they have read, so they cannot do without the cache")
