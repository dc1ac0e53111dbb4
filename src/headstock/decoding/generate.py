"""Continues rows of tokens, one token at a time, with any backbone that can read without looking ahead.

The backbone's state is opaque here, so one function serves every family. B rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headstock.decoding.sampling import Sampling, check_scores, choose
from headstock.kernels.backends import fast_cpu_kernels
from headstock.kernels.bare_modules import strip_modules
from headstock.kernels.cuda_graphs import DecodeStep, can_capture, capture_step
from headstock.model.batch import Batch, DecodingState, pad
from headstock.model.model import Model

STRETCH = {"cpu": 1}  # tokens that are made before anyone looks whether a text has ended,
GPU = 16  # and where to look is to wait


@dataclass
class Continuation:
    """What was added to one prompt, and why it ended there."""

    tokens: list[int] = field(default_factory=list)
    ended: Literal["length", "end", "stop"] = "length"
    slid: bool = False  # the text outgrew the model's context, so its beginning was forgotten


@dataclass
class _Row:
    text: list[int]  # prompt and continuation
    made: Continuation
    source: Sequence[int] | None = None  # what an encoder-decoder reads beside it
    done: bool = False

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
@fast_cpu_kernels()
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
    beside: Sequence[Sequence[int] | None] = sources or [None] * len(prompts)
    rows = [_Row(list(prompt), Continuation(), source) for prompt, source in zip(prompts, beside, strict=True)]
    seeded = [torch.Generator().manual_seed(seed) for _, seed in zip(rows, seeds or [0] * len(rows), strict=True)]
    drawn = [torch.rand(max_tokens, generator=generator) for generator in seeded]
    if not rows or max_tokens < 1:
        return [row.made for row in rows]
    reader = _Reader(model, rows, torch.stack(drawn), sampling=sampling, forbidden=forbidden, cache=cache)
    at_once = 1 if stop or watch else STRETCH.get(model.device.type, GPU) if end is not None else max_tokens
    while reader.step < max_tokens and not all(row.done for row in rows):
        open_rows, tokens = reader.stretch(min(at_once, max_tokens - reader.step))
        for row, new in zip(open_rows, tokens, strict=True):
            if not row.done:
                _append(row, new, end)
        for i, row in enumerate(rows) if stop or watch else ():
            if row.made.tokens and len(row.made.tokens) == reader.step:  # it has just grown
                if watch is not None:
                    watch(i, row.made.tokens[-1])
                if stop is not None and stop(i, row.made.tokens):
                    row.made.ended, row.done = "stop", True
    return [row.made for row in rows]


def _append(row: _Row, new: list[int], end: int | None) -> None:
    """Give a row its new tokens, up to where it ends: what was made after that is nobody's."""
    if end in new:
        new = new[: new.index(end)]
        row.made.ended, row.done = "end", True
    row.text += new
    row.made.tokens += new


class _Reader:
    """Shows rows to the model and chooses their next tokens, reading again no more than it must.

    All of it happens where the model is: nobody waits for a GPU until the tokens of a stretch are looked at. Rows that
    are done go along for a while, because to leave them out means to copy the memory of all others.
    """

    def __init__(
        self, model: Model, rows: list[_Row], luck: Tensor, *, sampling: Sampling, forbidden: Sequence[int], cache: bool
    ):
        self.new_state, self.cache, self.sampling = model.backbone.new_state, cache, sampling
        self.backbone, self.head = strip_modules(model.backbone), strip_modules(model.heads["token"])
        self.device, self.context = model.device, model.backbone.context
        self.banned = torch.tensor(list(forbidden), dtype=torch.long, device=self.device)
        self.rows, self.step, self.steps = rows, 0, luck.size(1)
        self.luck = None if sampling.greedy else luck.to(self.device)  # (B, steps) what decides each choice
        self.seen = _seen(rows, model) if sampling.repetition_penalty != 1.0 else None  # (B, V)
        self.state: DecodingState | None = None
        self.read: list[int] = []  # how many tokens of each row the state has read
        self.latest = torch.empty(0)  # (B,) the token of each row that it has not
        self.replay: DecodeStep | None = None
        self.records = self.warm = False

    def stretch(self, most: int) -> tuple[list[_Row], list[list[int]]]:
        """The rows that were read, and the next tokens of each: `most`, or fewer if then a window has to slide."""
        done = sum(row.done for row in self.rows)
        if done and (not self.goes_on() or (4 * done >= len(self.rows) and not self.records)):
            self.keep([place for place, row in enumerate(self.rows) if not row.done])
        going = self.goes_on()
        windows = [] if going else [row.window(self.context) for row in self.rows]
        read = [n + 1 for n in self.read] if going else [len(window) for window in windows]
        room = most if self.context is None else self.context - max(read) + 1
        count = min(most, room) if self.cache else 1
        scores = self.onward() if going else self.begin(windows)
        made = [self.choose(scores)]
        while len(made) < count:
            made.append(self.choose(self.onward()))
        self.read = [n + count - 1 for n in read]
        return self.rows, torch.stack(made, 1).tolist()

    def goes_on(self) -> bool:
        """Whether one more token can be read; otherwise windows slide, and are read again from their new beginning."""
        return self.state is not None and (self.context is None or max(self.read) < self.context)

    def begin(self, windows: list[list[int]]) -> Tensor:
        """(B, V) the scores of what follows rows that are read from their beginning."""
        for row, window in zip(self.rows, windows, strict=True):
            row.made.slid = window is not row.text
        batch = whole(windows, [row.source for row in self.rows if row.source is not None]).to(self.device)
        output = self.backbone(batch, self.new_state(len(windows), self.room()) if self.cache else None)
        self.state = output.state
        self.replay, self.warm = None, False
        self.records = can_capture(self.backbone, self.state, self.steps - self.step)
        scores = self.scores(ends_of(output.hidden, windows))
        check_scores(scores)
        return scores

    def onward(self) -> Tensor:
        """(B, V) the scores of what follows the latest tokens."""
        tokens = self.latest[:, None]
        if self.records and self.warm and self.replay is None:
            self.replay = capture_step(self.one_more, tokens)
        self.warm = True
        return self.one_more(tokens) if self.replay is None else self.replay(tokens)

    def one_more(self, tokens: Tensor) -> Tensor:
        output = self.backbone(Batch(tokens, causal=True), self.state)
        self.state = output.state
        return self.scores(output.hidden[:, -1])

    def scores(self, last: Tensor) -> Tensor:
        scores = self.head(last)  # (B, D) -> (B, V)
        return scores.index_fill_(1, self.banned, float("-inf")) if len(self.banned) else scores

    def choose(self, scores: Tensor) -> Tensor:
        luck = None if self.luck is None else self.luck[:, self.step]
        self.latest = choose(scores, self.sampling, seen=self.seen, luck=luck)
        if self.seen is not None:
            self.seen.scatter_(1, self.latest[:, None], True)
        self.step += 1
        return self.latest

    def room(self) -> int:
        """Tokens a row may grow to before its window slides or its continuation ends."""
        most = max(len(row.text) for row in self.rows) + self.steps - self.step
        return most if self.context is None else min(most, self.context)

    def keep(self, places: list[int]) -> None:
        """Go on with some of the rows only."""
        self.rows, self.read = [self.rows[i] for i in places], [self.read[i] for i in places]
        rows = torch.tensor(places, device=self.device)
        self.latest = self.latest[rows]
        self.luck = None if self.luck is None else self.luck[rows]
        self.seen = None if self.seen is None else self.seen[rows]
        self.state = None if self.state is None else self.state.select(rows)
        self.replay, self.warm = None, False


def check_rows(model: Model, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None) -> None:
    """Refuse rows that cannot be continued."""
    if not all(prompts):
        raise ValueError("a prompt needs at least one token to continue from")
    if model.backbone.is_encoder_decoder != (sources is not None):
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
