"""Continues rows of tokens, one token at a time, with any backbone that can read without looking ahead.

The backbone's state is opaque here, so one function serves every family. B rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headstock.model.batch import Batch, State, pad
from headstock.model.light import light
from headstock.model.model import Model
from headstock.model.sampling import Sampling, choose


@dataclass
class Continuation:
    """What was added to one prompt, and why it ended there."""

    tokens: list[int] = field(default_factory=list)
    ended: Literal["length", "end", "stop"] = "length"
    slid: bool = False  # the text outgrew the model's context, so its beginning was forgotten


@dataclass
class _Row:
    text: list[int]  # prompt and continuation
    luck: list[float]  # one number from [0, 1) for each token to come
    made: Continuation
    source: Sequence[int] | None = None  # what an encoder-decoder reads beside it

    def window(self, context: int | None) -> list[int]:
        """What the model is shown: all of it, or after that the end, moved on by half a context at a time.

        It depends on the row's own length alone, so a batch, a single row, and a run with or without the
        cache all show the model the same tokens.
        """
        if context is None or len(self.text) <= context:
            return self.text
        half = max(1, context // 2)
        steps = -(-(len(self.text) - context) // half)
        return self.text[steps * half :]


@torch.inference_mode()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    end: int | None = None,
    seeds: Sequence[int] | None = None,
    forbidden: Sequence[int] = (),
    sources: Sequence[Sequence[int]] | None = None,
    stop: Callable[[int, list[int]], bool] | None = None,
    watch: Callable[[int, int], None] | None = None,
    cache: bool = True,
) -> list[Continuation]:
    """Continue every prompt by up to `max_tokens` tokens.

    `seeds` are one a prompt, so that a prompt's continuation does not depend on its neighbours. So are `sources`, which
    an encoder-decoder reads and no other does. `stop(row, tokens)` says whether a row is done, `watch(row, token)`
    hears each token as it comes.
    """
    model.eval()
    check_rows(model, prompts, sources)
    draw = [torch.Generator().manual_seed(seed) for seed in seeds or [0] * len(prompts)]
    beside: Sequence[Sequence[int] | None] = sources or [None] * len(prompts)
    rows = [
        _Row(list(prompt), torch.rand(max_tokens, generator=generator).tolist(), Continuation(), source)
        for prompt, generator, source in zip(prompts, draw, beside, strict=True)
    ]
    reader = _Reader(model, cache=cache)
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=model.device)
    seen = _seen(rows, model) if sampling.repetition_penalty != 1.0 else None
    active = list(range(len(rows)))
    for step in range(max_tokens if rows else 0):
        scores = reader.scores([rows[i] for i in active])  # (B, V)
        if len(banned):
            scores[:, banned] = float("-inf")
        luck = None if sampling.greedy else torch.tensor([rows[i].luck[step] for i in active], device=model.device)
        chosen = choose(scores, sampling, seen=None if seen is None else seen[active], luck=luck)
        going_on = []
        for place, (i, token) in enumerate(zip(active, chosen.tolist(), strict=True)):
            row = rows[i]
            if token == end:
                row.made.ended = "end"
                continue
            row.text.append(token)
            row.made.tokens.append(token)
            if seen is not None:
                seen[i, token] = True
            if watch is not None:
                watch(i, token)
            if stop is not None and stop(i, row.made.tokens):
                row.made.ended = "stop"
                continue
            going_on.append(place)
        if not going_on:
            break
        if len(going_on) < len(active):
            reader.keep(going_on)
            active = [active[place] for place in going_on]
    return [row.made for row in rows]


class _Reader:
    """Shows rows to the model and gives the scores of their next tokens, reading again no more than it must."""

    def __init__(self, model: Model, *, cache: bool):
        self.new_state, self.cache = model.backbone.new_state, cache
        self.backbone, self.head = light(model.backbone), light(model.heads["token"])
        self.device, self.context = model.device, model.backbone.context
        self.state: State | None = None
        self.read: list[int] = []  # how long each row's window was when last shown

    def scores(self, rows: list[_Row]) -> Tensor:
        windows = [row.window(self.context) for row in rows]
        # one more token than before in each window: otherwise it has slid, and is read again from its new beginning
        goes_on = self.state is not None and [len(w) for w in windows] == [n + 1 for n in self.read]
        self.read = [len(window) for window in windows]
        if goes_on:
            tokens = torch.tensor([window[-1:] for window in windows], device=self.device)
            output = self.backbone(Batch(tokens, causal=True), self.state)
            last = output.hidden[:, -1]
        else:
            for row, window in zip(rows, windows, strict=True):
                row.made.slid = window is not row.text
            batch = whole(windows, [row.source for row in rows if row.source is not None]).to(self.device)
            state = self.new_state(len(rows), self.room(rows)) if self.cache else None
            output = self.backbone(batch, state)
            last = ends_of(output.hidden, windows)
        self.state = output.state
        return self.head(last)

    def room(self, rows: list[_Row]) -> int:
        """Tokens a row may grow to before its window slides or its continuation ends."""
        most = max(len(row.text) - len(row.made.tokens) + len(row.luck) for row in rows)
        return most if self.context is None else min(most, self.context)

    def keep(self, places: list[int]) -> None:
        """Go on with some of the rows only."""
        self.read = [self.read[place] for place in places]
        if self.state is not None:
            self.state = self.state.select(torch.tensor(places, device=self.device))


def check_rows(model: Model, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None) -> None:
    """Refuse rows that cannot be continued."""
    if not all(prompts):
        raise ValueError("a prompt needs at least one token to continue from")
    if model.backbone.reads_source != (sources is not None):
        raise ValueError("an encoder-decoder needs a source for every prompt, and no other model reads any")
    if sources is not None and (len(sources) != len(prompts) or not all(sources)):
        raise ValueError("every prompt needs a source of its own, of at least one token")


def whole(rows: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None) -> Batch:
    """Rows to be read from their beginning and then continued, with their sources if they have some."""
    tokens, padding = pad([list(row) for row in rows], filler=0)
    source = Batch(*pad([list(row) for row in sources], filler=0)) if sources else None
    return Batch(tokens, padding, source=source, causal=True)  # left to right, whatever else the backbone can do


def ends_of(hidden: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, D) out of (B, T, D): the vector of each row's last token."""
    last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
    return hidden[torch.arange(len(rows), device=hidden.device), last]


def _seen(rows: list[_Row], model: Model) -> Tensor:
    seen = torch.zeros(len(rows), model.backbone.config.vocabulary, dtype=torch.bool, device=model.device)
    for i, row in enumerate(rows):
        seen[i, torch.tensor(row.text, device=model.device)] = True
    return seen
