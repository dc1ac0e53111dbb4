"""Autoregressive generation for every model family: the backbone's decoding state is opaque.

B rows, V vocabulary.
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

STRETCH = {"cpu": 1}  # tokens between checks for the EOS token
GPU = 16  # on a GPU, where a check synchronizes


@dataclass
class Continuation:
    """The generated tokens of one prompt, and why generation stopped."""

    tokens: list[int] = field(default_factory=list)
    ended: Literal["length", "end", "stop"] = "length"
    slid: bool = False  # the text exceeded the context, so its beginning was dropped


@dataclass
class _Row:
    text: list[int]  # prompt and continuation
    made: Continuation
    source: Sequence[int] | None = None  # input of an encoder
    done: bool = False

    def window(self, context: int | None) -> list[int]:
        """The tokens the model reads: all of them, or a suffix that moves by half a context at a time.

        It depends on the row's length alone, so that batching and caching do not change results.
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

    `seeds` has one entry per prompt, so that results do not depend on the batch; so has `sources`, the inputs of an
    encoder-decoder. `stop(row, tokens)` ends a row, `watch(row, token)` is called with each new token.
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
            if row.made.tokens and len(row.made.tokens) == reader.step:  # has a new token
                if watch is not None:
                    watch(i, row.made.tokens[-1])
                if stop is not None and stop(i, row.made.tokens):
                    row.made.ended, row.done = "stop", True
    return [row.made for row in rows]


def _append(row: _Row, new: list[int], end: int | None) -> None:
    """Append new tokens to a row, up to its EOS token."""
    if end in new:
        new = new[: new.index(end)]
        row.made.ended, row.done = "end", True
    row.text += new
    row.made.tokens += new


class _Reader:
    """Runs the model on rows and samples their next tokens.

    The device is synchronized once per stretch of tokens. Finished rows stay for a while, since removing them copies
    the cache of all others.
    """

    def __init__(
        self, model: Model, rows: list[_Row], luck: Tensor, *, sampling: Sampling, forbidden: Sequence[int], cache: bool
    ):
        self.new_state, self.cache, self.sampling = model.backbone.new_state, cache, sampling
        self.backbone, self.head = strip_modules(model.backbone), strip_modules(model.heads["token"])
        self.device, self.context = model.device, model.backbone.context
        self.banned = torch.tensor(list(forbidden), dtype=torch.long, device=self.device)
        self.rows, self.step, self.steps = rows, 0, luck.size(1)
        self.luck = None if sampling.greedy else luck.to(self.device)  # (B, steps) uniform draws
        self.seen = _seen(rows, model) if sampling.repetition_penalty != 1.0 else None  # (B, V)
        self.state: DecodingState | None = None
        self.read: list[int] = []  # tokens of each row in the state
        self.latest = torch.empty(0)  # (B,) the last token of each row, not yet in the state
        self.replay: DecodeStep | None = None
        self.records = self.warm = False

    def stretch(self, most: int) -> tuple[list[_Row], list[list[int]]]:
        """The rows and up to `most` next tokens of each; fewer where a window has to slide."""
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
        """Whether the state can take one more token; otherwise windows slide and are read again."""
        return self.state is not None and (self.context is None or max(self.read) < self.context)

    def begin(self, windows: list[list[int]]) -> Tensor:
        """(B, V) next-token logits of rows that are read from their start."""
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
        """(B, V) next-token logits after the latest tokens."""
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
        """The number of tokens a row may reach before its window slides or it ends."""
        most = max(len(row.text) for row in self.rows) + self.steps - self.step
        return most if self.context is None else min(most, self.context)

    def keep(self, places: list[int]) -> None:
        """Continue with some of the rows only."""
        self.rows, self.read = [self.rows[i] for i in places], [self.read[i] for i in places]
        rows = torch.tensor(places, device=self.device)
        self.latest = self.latest[rows]
        self.luck = None if self.luck is None else self.luck[rows]
        self.seen = None if self.seen is None else self.seen[rows]
        self.state = None if self.state is None else self.state.select(rows)
        self.replay, self.warm = None, False


def check_rows(model: Model, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None) -> None:
    """Refuse invalid prompts and sources."""
    if not all(prompts):
        raise ValueError("a prompt needs at least one token to continue from")
    if model.backbone.is_encoder_decoder != (sources is not None):
        raise ValueError("an encoder-decoder needs a source for every prompt, and no other model reads any")
    if sources is not None and (len(sources) != len(prompts) or not all(sources)):
        raise ValueError("every prompt needs a source of its own, of at least one token")


def whole(rows: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None) -> Batch:
    """A causal batch of prompts, with their sources where there are any."""
    tokens, padding = pad([list(row) for row in rows], filler=0)
    source = Batch(*pad([list(row) for row in sources], filler=0)) if sources else None
    return Batch(tokens, padding, source=source, causal=True)


def ends_of(hidden: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, T, D) -> (B, D): the vector of each row's last token."""
    last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
    return hidden[torch.arange(len(rows), device=hidden.device), last]


def _seen(rows: list[_Row], model: Model) -> Tensor:
    seen = torch.zeros(len(rows), model.backbone.config.vocabulary, dtype=torch.bool, device=model.device)
    for i, row in enumerate(rows):
        seen[i, torch.tensor(row.text, device=model.device)] = True
    return seen
