"""Beam search for every model family: the backbone's decoding state is opaque.

R open hypotheses, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.decoding.generate import check_prompts, last_vectors, prompt_batch
from headstock.decoding.sampling import Sampling, check_logits
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
    log_probability: float = 0.0
    greedy: bool = True  # each token is the most likely one


@dataclass(frozen=True)
class _Settings:
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
            problems.append(("no_repeat", f"must be 0 (no limit) or more, not {self.no_repeat}"))
        if problems:
            raise ConfigError(problems)

    def score(self, log_probability: float, length: int) -> float:
        return log_probability / max(1, length) ** self.length_penalty


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
    suppress_tokens: Sequence[int] = (),
    sources: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Up to `beams` continuations of every prompt, of up to `max_tokens` tokens each, best first.

    The greedy continuation always stays in the search, so that no result is worse. Continuations end with the model's
    context at the latest.
    """
    settings = _Settings(beams, end, length_penalty, no_repeat)
    model.eval()
    check_prompts(model, prompts, sources)
    searches = [_Search(settings, list(prompt), token_limit(model, prompt, max_tokens)) for prompt in prompts]
    if not searches or max_tokens < 1:
        return [[Hypothesis([], 0.0)] for _ in searches]
    backbone, head, device = strip_modules(model.backbone), strip_modules(model.heads["token"]), model.device
    suppressed = torch.tensor(list(suppress_tokens), dtype=torch.long, device=device)
    capacity = max(len(search.prompt) + search.limit for search in searches) - 1  # the last token is never an input
    output = backbone(prompt_batch(prompts, sources).to(device), model.backbone.new_state(len(prompts), capacity))
    vectors, active = last_vectors(output.hidden, prompts), searches
    while True:
        scores = head(vectors).float().log_softmax(-1)  # (R, D) -> (R, V)
        check_logits(scores)
        scores[:, suppressed] = -torch.inf
        if no_repeat:
            scores[repeated_tokens(active, device)] = -torch.inf
        top = scores.topk(min(beams + 1, scores.size(1)))  # one more than beams, since one may be the EOS token
        values, tokens = top.values.tolist(), top.indices.tolist()
        parents, first = [], 0  # for each hypothesis that continues, the row it extends
        for search in active:
            rows = slice(first, first + len(search.open))
            parents += [first + parent for parent in search.grow(values[rows], tokens[rows])]
            first = rows.stop
        active = [search for search in active if search.open]
        if not active:
            return [search.best() for search in searches]
        state = output.state
        if parents != list(range(first)):
            state = state.select(torch.tensor(parents, device=device))
        latest = torch.tensor([[row.tokens[-1]] for search in active for row in search.open], device=device)
        output = backbone(Batch(latest, causal=True), state)
        vectors = output.hidden[:, -1]


class _Search:
    """The finished and open hypotheses of one prompt."""

    def __init__(self, settings: _Settings, prompt: list[int], limit: int):
        self.settings, self.prompt, self.limit = settings, prompt, limit
        self.open = [_Open()]
        self.finished: list[Hypothesis] = []

    def grow(self, values: list[list[float]], tokens: list[list[int]]) -> list[int]:
        """Extend the open hypotheses by their most likely tokens; returns the parent of each new one.

        Those that end among the best `beams` are finished; the best `beams` of the others continue, and the greedy one.
        """
        settings, parents, full = self.settings, self.open, len(self.finished) >= self.settings.beams
        candidates = [
            (row.log_probability + value, token, parent, row.greedy and rank == 0)
            for parent, row in enumerate(parents)
            for rank, (value, token) in enumerate(zip(values[parent], tokens[parent], strict=True))
            if value > -math.inf and (not full or (row.greedy and rank == 0))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        children: list[tuple[int, _Open]] = []
        for rank, (log_probability, token, parent, greedy) in enumerate(candidates):
            prefix = parents[parent].tokens
            if token == settings.end:
                if rank < settings.beams or greedy:
                    self.finished.append(Hypothesis(prefix, settings.score(log_probability, len(prefix) + 1), "end"))
            elif len(children) < settings.beams or greedy:
                children.append((parent, _Open([*prefix, token], log_probability, greedy)))
        self.finish(row for row, own in zip(parents, values, strict=True) if not own[0] > -math.inf)  # no token allowed
        children = self.prune(children)
        self.open = [row for _, row in children]
        return [parent for parent, _ in children]

    def prune(self, children: list[tuple[int, _Open]]) -> list[tuple[int, _Open]]:
        """The hypotheses that continue: none at the length limit, or if none can still become the best."""
        if children and len(children[0][1].tokens) == self.limit:
            self.finish(row for _, row in children)
            return []
        if len(self.finished) >= self.settings.beams:
            children = [(parent, row) for parent, row in children if row.greedy]
        best = max((hypothesis.score for hypothesis in self.finished), default=-math.inf)
        return children if any(self.upper_bound(row) > best for _, row in children) else []

    def upper_bound(self, row: _Open) -> float:
        """Of its final score, as if all further tokens had probability one."""
        lengths = (len(row.tokens) + 1, self.limit)
        return max(self.settings.score(row.log_probability, length) for length in lengths)

    def finish(self, rows: Iterable[_Open]) -> None:
        """Finish hypotheses without an EOS token."""
        for row in rows:
            self.finished.append(Hypothesis(row.tokens, self.settings.score(row.log_probability, len(row.tokens))))

    def best(self) -> list[Hypothesis]:
        return sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.settings.beams]


def token_limit(model: Model, prompt: Sequence[int], max_tokens: int) -> int:
    """The number of tokens that may follow a prompt within the context."""
    context = model.backbone.context
    if context is None:
        return max_tokens
    if len(prompt) > context:
        problem = f"does not fit into the model's context of {context}"
        raise UserError(f"a prompt of {len(prompt)} tokens {problem}, and beam search cannot drop its beginning")
    return min(max_tokens, context - len(prompt) + 1)


def repeated_tokens(searches: list[_Search], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token ids of tokens that would repeat an n-gram of the row."""
    rows: list[int] = []
    tokens: list[int] = []
    texts = [(search.settings, [*search.prompt, *row.tokens]) for search in searches for row in search.open]
    for row, (settings, text) in enumerate(texts):
        size = settings.no_repeat - 1
        suffix = text[len(text) - size :]
        repeats = {text[i + size] for i in range(len(text) - size) if text[i : i + size] == suffix} - {settings.end}
        rows += [row] * len(repeats)
        tokens += repeats
    return torch.tensor(rows, dtype=torch.long, device=device), torch.tensor(tokens, dtype=torch.long, device=device)


def check_beams(sampling: Sampling, *, samples: int, stream: Any, cache: bool) -> None:
    """Refuse options that beam search does not support."""
    options = [option.name for option in fields(sampling) if getattr(sampling, option.name) != option.default]
    options += ["samples"] if samples != 1 else []
    if options:
        raise UserError(f"beam search does not sample: {', '.join(options)} cannot be set together with beams")
    if stream is not None:
        raise UserError("beam search cannot stream: the text is known only at the end")
    if not cache:
        raise UserError("beam search needs the cache")
