"""Autoregressive generation for every model family: the backbone's decoding state is opaque.

B rows, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from headstock.decoding.sampling import Sampling, check_logits, choose
from headstock.kernels.backends import fast_cpu_kernels
from headstock.kernels.bare_modules import strip_modules
from headstock.kernels.cuda_graphs import DecodeStep, can_capture, capture_step
from headstock.model.batch import Batch, DecodingState, pad
from headstock.model.model import Model

STEPS_PER_CHECK = {"cpu": 1, "cuda": 16}  # tokens between checks for EOS, each of which synchronizes a GPU


@dataclass
class Continuation:
    """The generated tokens of one prompt, and why generation stopped."""

    tokens: list[int] = field(default_factory=list)
    ended: Literal["length", "end", "stop"] = "length"
    slid: bool = False  # the text exceeded the context, so its beginning was dropped


@dataclass
class _Row:
    text: list[int]  # prompt and continuation
    continuation: Continuation
    source: Sequence[int] | None = None  # input of an encoder
    done: bool = False

    def append(self, tokens: list[int], end: int | None) -> None:
        """Append new tokens up to the EOS token."""
        if end in tokens:
            tokens = tokens[: tokens.index(end)]
            self.continuation.ended, self.done = "end", True
        self.text += tokens
        self.continuation.tokens += tokens


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
    suppress_tokens: Sequence[int] = (),
    sources: Sequence[Sequence[int]] | None = None,
    stop: Callable[[int, list[int]], bool] | None = None,
    cache: bool = True,
) -> list[Continuation]:
    """Continue every prompt by up to `max_tokens` tokens.

    `seeds` has one entry per prompt, so that results do not depend on the batch; so has `sources`, the inputs of an
    encoder-decoder. `stop(row, tokens)` is called after each new token of a row; it ends the row by returning True.
    """
    model.eval()
    check_prompts(model, prompts, sources)
    row_sources: Sequence[Sequence[int] | None] = sources or [None] * len(prompts)
    rows = [_Row(list(prompt), Continuation(), source) for prompt, source in zip(prompts, row_sources, strict=True)]
    row_seeds = [seed for _, seed in zip(rows, seeds or [0] * len(rows), strict=True)]
    if not rows or max_tokens < 1:
        return [row.continuation for row in rows]
    draws = torch.stack([uniform_draws(max_tokens, seed) for seed in row_seeds])
    decoder = _Decoder(NextTokenModel(model, suppress_tokens), rows, draws, sampling, cache=cache)
    steps = 1 if stop else STEPS_PER_CHECK.get(model.device.type, 16) if end is not None else max_tokens
    while decoder.step < max_tokens and not all(row.done for row in rows):
        active, tokens = decoder.next_tokens(min(steps, max_tokens - decoder.step))
        for row, new_tokens in zip(active, tokens, strict=True):
            if not row.done:
                row.append(new_tokens, end)
        for index, row in enumerate(rows) if stop else ():
            has_new_token = 0 < len(row.continuation.tokens) == decoder.step
            if has_new_token and stop(index, row.continuation.tokens):  # type: ignore[misc]
                row.continuation.ended, row.done = "stop", True
    return [row.continuation for row in rows]


class NextTokenModel:
    """Computes the logits of next tokens by bare copies of the modules, which do not notice replaced weights."""

    def __init__(self, model: Model, suppress_tokens: Sequence[int]):
        self.new_state, self.vocabulary = model.backbone.new_state, model.backbone.config.vocabulary
        self.backbone, self.head = strip_modules(model.backbone), strip_modules(model.heads["token"])
        self.device, self.context = model.device, model.backbone.context
        self.suppress_tokens = torch.tensor(list(suppress_tokens), dtype=torch.long, device=self.device)

    def read(
        self, texts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] = (), *, capacity: int | None
    ) -> tuple[Tensor, DecodingState | None]:
        """(B, V) logits after texts that are read from their start, and a state for `capacity` tokens per row."""
        state = None if capacity is None else self.new_state(len(texts), capacity)
        output = self.backbone(prompt_batch(texts, sources).to(self.device), state)
        logits = self.logits(last_vectors(output.hidden, texts))
        check_logits(logits)
        return logits, output.state

    def advance(self, tokens: Tensor, state: DecodingState | None) -> tuple[Tensor, DecodingState | None]:
        """(B, V) logits after one more token (B, 1) of each row, and the next state."""
        output = self.backbone(Batch(tokens, causal=True), state)
        return self.logits(output.hidden[:, -1]), output.state

    def logits(self, vectors: Tensor) -> Tensor:
        logits = self.head(vectors)  # (B, D) -> (B, V)
        return logits.index_fill_(1, self.suppress_tokens, float("-inf")) if len(self.suppress_tokens) else logits

    def tokens_in(self, text: list[int]) -> Tensor:
        """(V,) True for the tokens of a text, to which a repetition penalty applies."""
        in_text = torch.zeros(self.vocabulary, dtype=torch.bool, device=self.device)
        in_text[torch.tensor(text, device=self.device)] = True
        return in_text


class _Decoder:
    """Runs the model on rows and samples their next tokens.

    The device is synchronized once per `next_tokens`. Finished rows stay for a while, since removing them copies the
    cache of all others.
    """

    def __init__(self, model: NextTokenModel, rows: list[_Row], draws: Tensor, sampling: Sampling, *, cache: bool):
        self.model, self.device, self.context = model, model.device, model.context
        self.cache, self.sampling = cache, sampling
        self.rows, self.step, self.max_tokens = rows, 0, draws.size(1)
        self.draws = None if sampling.greedy else draws.to(self.device)  # (B, max_tokens) uniform
        self.in_text: Tensor | None = None  # (B, V) True for tokens of the text
        if sampling.repetition_penalty != 1.0:
            self.in_text = torch.stack([model.tokens_in(row.text) for row in rows])
        self.state: DecodingState | None = None
        self.lengths: list[int] = []  # tokens of each row in the state
        self.latest = torch.empty(0)  # (B,) the last token of each row, not yet in the state
        self.captured_step: DecodeStep | None = None
        self.capture = self.warm = False

    def next_tokens(self, limit: int) -> tuple[list[_Row], list[list[int]]]:
        """The rows and up to `limit` next tokens of each; fewer where a window has to slide."""
        done = sum(row.done for row in self.rows)
        if done and (not self.can_continue() or (4 * done >= len(self.rows) and not self.capture)):
            self.select([index for index, row in enumerate(self.rows) if not row.done])
        continues = self.can_continue()
        windows = [] if continues else [context_window(row.text, self.context) for row in self.rows]
        lengths = [length + 1 for length in self.lengths] if continues else [len(window) for window in windows]
        room = limit if self.context is None else self.context - max(lengths) + 1
        count = min(limit, room) if self.cache else 1
        tokens = [self.sample(self.decode() if continues else self.prefill(windows))]
        while len(tokens) < count:
            tokens.append(self.sample(self.decode()))
        self.lengths = [length + count - 1 for length in lengths]
        return self.rows, torch.stack(tokens, 1).tolist()

    def can_continue(self) -> bool:
        """Whether the state can take one more token; otherwise windows slide and are read again."""
        return self.state is not None and (self.context is None or max(self.lengths) < self.context)

    def prefill(self, windows: list[list[int]]) -> Tensor:
        """(B, V) next-token logits of rows that are read from their start."""
        for row, window in zip(self.rows, windows, strict=True):
            row.continuation.slid = window is not row.text
        sources = [row.source for row in self.rows if row.source is not None]
        logits, self.state = self.model.read(windows, sources, capacity=self.capacity() if self.cache else None)
        self.captured_step, self.warm = None, False
        self.capture = can_capture(self.model.backbone, self.state, self.max_tokens - self.step)
        return logits

    def decode(self) -> Tensor:
        """(B, V) next-token logits after the latest tokens."""
        tokens = self.latest[:, None]
        if self.capture and self.warm and self.captured_step is None:
            self.captured_step = capture_step(self.decode_step, tokens)
        self.warm = True
        return self.decode_step(tokens) if self.captured_step is None else self.captured_step(tokens)

    def decode_step(self, tokens: Tensor) -> Tensor:
        logits, self.state = self.model.advance(tokens, self.state)
        return logits

    def sample(self, logits: Tensor) -> Tensor:
        draws = None if self.draws is None else self.draws[:, self.step]
        self.latest = choose(logits, self.sampling, in_text=self.in_text, draws=draws)
        if self.in_text is not None:
            self.in_text.scatter_(1, self.latest[:, None], True)
        self.step += 1
        return self.latest

    def capacity(self) -> int:
        """The number of tokens a row may reach before its window slides or it ends."""
        longest = max(len(row.text) for row in self.rows) + self.max_tokens - self.step
        return longest if self.context is None else min(longest, self.context)

    def select(self, indices: list[int]) -> None:
        """Continue with some of the rows only."""
        self.rows, self.lengths = [self.rows[i] for i in indices], [self.lengths[i] for i in indices]
        rows = torch.tensor(indices, device=self.device)
        self.latest = self.latest[rows]
        self.draws = None if self.draws is None else self.draws[rows]
        self.in_text = None if self.in_text is None else self.in_text[rows]
        self.state = None if self.state is None else self.state.select(rows)
        self.captured_step, self.warm = None, False


def context_window(text: list[int], context: int | None) -> list[int]:
    """The tokens the model reads: the text itself, or a suffix of it that moves by half a context at a time.

    It depends on the text's length alone, so that batching and caching do not change results.
    """
    if context is None or len(text) <= context:
        return text
    half = max(1, context // 2)
    steps = -(-(len(text) - context) // half)
    return text[steps * half :]


def uniform_draws(count: int, seed: int) -> Tensor:
    """(count,) uniform numbers, with which `count` tokens of a row are sampled."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def check_prompts(
    model: Model, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
) -> None:
    """Refuse invalid prompts and sources."""
    if not all(prompts):
        raise ValueError("a prompt needs at least one token to continue from")
    if model.backbone.is_encoder_decoder != (sources is not None):
        raise ValueError("an encoder-decoder needs a source for every prompt, and no other model reads any")
    if sources is not None and (len(sources) != len(prompts) or not all(sources)):
        raise ValueError("every prompt needs its own source of at least one token")


def prompt_batch(prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None) -> Batch:
    """A causal batch of prompts, with their sources if there are any."""
    tokens, padding = pad(prompts, filler=0)
    return Batch(tokens, padding, source=Batch(*pad(sources, filler=0)) if sources else None, causal=True)


def last_vectors(hidden: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, T, D) -> (B, D): the vector of each row's last token."""
    last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
    return hidden[torch.arange(len(rows), device=hidden.device), last]
