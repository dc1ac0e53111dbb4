"""Continuous batching: rows join and leave a batch between its decoding steps.  B rows, V vocabulary.

Every row gets the tokens that `generate` gives its prompt alone: rows do not depend on each other, each has its own
random numbers, and a window that slides is read again for its row only. Float rounding differs between batch sizes, so
that a near tie of two tokens may fall differently; int8 layers round by the whole batch, and there it is likely.

Rows stay together at the front of one state. A new row is read on its own and copied behind them; when a row leaves,
the last one takes its place. Each copies one row, where concatenating or selecting states would copy all of them: with
a new row before every step, the gpt-mini preset on one CPU thread then takes twice as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from headstock.decoding.batching import max_batch_tokens, token_batches
from headstock.decoding.generate import NextTokenModel, context_window, uniform_draws
from headstock.decoding.sampling import Sampling, choose
from headstock.kernels.backends import fast_cpu_kernels
from headstock.model.batch import DecodingState
from headstock.model.model import Model


@dataclass
class DecodingRequest:
    """A prompt to continue."""

    prompt: list[int]  # with its special tokens
    max_tokens: int
    sampling: Sampling
    seed: int = 0
    stop: Callable[[list[int]], bool] | None = None  # called with all new tokens after each; True ends the row
    logprobs: int | None = None  # number of likeliest tokens to report; 0: the chosen one's log-probability alone


@dataclass
class DecodedToken:
    """A generated token. Log-probabilities are the model's own: before penalty, temperature and filters apply.

    Suppressed tokens have no probability, so that the others' add up to one.
    """

    id: int
    logprob: float | None = None  # None unless requested
    top: list[tuple[int, float]] = field(default_factory=list)  # likeliest tokens and their log-probabilities


@dataclass(eq=False)
class DecodingRow:
    """A request in a batch: its tokens so far, without EOS, and why it ended."""

    request: DecodingRequest
    tokens: list[DecodedToken] = field(default_factory=list)
    ended: Literal["length", "end", "stop", "cancelled"] | None = None
    slid: bool = False  # the text exceeded the context, so its beginning was dropped
    cancelled: bool = False  # ends before the next step

    def __post_init__(self) -> None:
        request = self.request
        self.text, self.new_tokens = list(request.prompt), list[int]()
        self.draws = [] if request.sampling.greedy else uniform_draws(request.max_tokens, request.seed).tolist()
        self.in_text: Tensor | None = None  # (V,) True for tokens of the text, if there is a repetition penalty
        self.tokens_read = 0  # tokens of the row in the state

    def cancel(self) -> None:
        """End the row before the next step; any thread may call this."""
        self.cancelled = True

    def append(self, token: DecodedToken, end: int | None) -> None:
        if token.id == end:
            self.ended = "end"
            return
        self.tokens.append(token)
        self.text.append(token.id)
        self.new_tokens.append(token.id)
        if self.in_text is not None:
            self.in_text[token.id] = True
        if self.request.stop is not None and self.request.stop(self.new_tokens):
            self.ended = "stop"
        elif len(self.tokens) == self.request.max_tokens:
            self.ended = "length"


class ContinuousBatch:
    """Decodes up to `max_rows` rows at a time. One thread calls `step`; any thread may add and cancel rows.

    The model's weights must not be replaced meanwhile.
    """

    def __init__(self, model: Model, *, end: int | None, suppress_tokens: Sequence[int], max_rows: int = 32):
        if model.backbone.is_encoder_decoder:
            raise ValueError("an encoder-decoder cannot continue texts")
        self.model, self.end, self.max_rows = NextTokenModel(model.eval(), suppress_tokens), end, max_rows
        self.rows: list[DecodingRow] = []  # in the order of the state
        self.state: DecodingState | None = None
        self.unread: list[DecodingRow] = []  # admitted, or taken out of the state because their windows slide
        self.finished: list[DecodingRow] = []  # ended, and not returned by a step yet
        self.queue: list[DecodingRow] = []
        self.queue_lock = Lock()

    def add(self, request: DecodingRequest) -> DecodingRow:
        """Queue a request; the steps admit it as soon as there is room."""
        if not request.prompt:
            raise ValueError("a prompt needs at least one token to continue from")
        if not all(0 <= token < self.model.vocabulary for token in request.prompt):
            raise ValueError(f"token ids must be from 0 to {self.model.vocabulary - 1}")
        if request.max_tokens < 0 or (request.logprobs or 0) < 0:
            raise ValueError("max_tokens and logprobs must be 0 or more")
        row = DecodingRow(request)
        with self.queue_lock:
            self.queue.append(row)
        return row

    @property
    def active(self) -> int:
        """The number of rows being decoded."""
        return len(self.rows) + len(self.unread)

    @property
    def waiting(self) -> int:
        """The number of rows that are not admitted yet."""
        return len(self.queue)

    @property
    def idle(self) -> bool:
        return not (self.active or self.queue)

    @torch.inference_mode()
    @fast_cpu_kernels()
    def step(self) -> list[DecodingRow]:
        """Admit waiting rows and decode one token of every row; returns the rows with a new token or an end."""
        for row in self.rows:
            if row.cancelled:
                row.ended = "cancelled"
        self.drop_ended()
        self.slide()
        self.admit()
        logits = [self.advance()] if self.rows else []
        logits += self.read()
        if logits:
            self.append_tokens(torch.cat(logits) if len(logits) > 1 else logits[0])
        self.drop_ended()
        changed, self.finished = self.finished + self.rows, []
        return changed

    def clear(self) -> list[DecodingRow]:
        """Cancel and return all rows, for instance after `step` raised an exception."""
        with self.queue_lock:
            rows, self.queue = self.finished + self.rows + self.unread + self.queue, []
        self.rows, self.unread, self.finished, self.state = [], [], [], None
        for row in rows:
            row.ended = row.ended or "cancelled"
        return rows

    def drop_ended(self) -> None:
        self.finished += [row for row in self.rows if row.ended]
        self.keep([row.ended is None for row in self.rows])

    def slide(self) -> None:
        """Take rows whose state is full out of it, to be read again from a later start."""
        has_room = [row.tokens_read != self.model.context for row in self.rows]
        self.unread += [row for row, room in zip(self.rows, has_room, strict=True) if not room]
        self.keep(has_room)

    def admit(self) -> None:
        """Take rows from the queue while there is room.

        Reading prompts makes all other rows wait, so a step admits only as many as a batch holds, and at least one.
        """
        limit = max_batch_tokens(self.model.device)
        longest = count = 0
        waiting: list[DecodingRow] = []
        with self.queue_lock:
            for row in self.queue:
                length = max(longest, len(context_window(row.text, self.model.context)))
                if row.cancelled or not row.request.max_tokens:
                    row.ended = "cancelled" if row.cancelled else "length"
                    self.finished.append(row)
                elif not waiting and self.active < self.max_rows and (not count or length * (count + 1) <= limit):
                    self.unread.append(row)
                    longest, count = length, count + 1
                else:
                    waiting.append(row)
            self.queue = waiting

    def keep(self, stays: list[bool]) -> None:
        """Drop the other rows; the last ones take their places."""
        if all(stays):
            return
        count = sum(stays)
        last = [index for index in range(count, len(stays)) if stays[index]]
        indices = [index if stays[index] else last.pop() for index in range(count)]
        self.rows = [self.rows[index] for index in indices]
        self.state = self.state.keep(indices) if self.state is not None and indices else None

    def advance(self) -> Tensor:
        """(B, V) logits after the last token of every row."""
        tokens = torch.tensor([row.text[-1:] for row in self.rows], device=self.model.device)
        logits, self.state = self.model.advance(tokens, self.state)
        for row in self.rows:
            row.tokens_read += 1
        return logits

    def read(self) -> list[Tensor]:
        """Read the windows of unread rows from their start, in batches of similar length, and append their states.

        Returns the logits of each batch.
        """
        results = []
        windows = {row: context_window(row.text, self.model.context) for row in self.unread}
        self.unread.sort(key=lambda row: len(windows[row]))
        for rows in token_batches(list(self.unread), lambda row: len(windows[row]), self.model.device):
            texts = [windows[row] for row in rows]
            logits, state = self.model.read(texts, capacity=max(map(self.capacity, rows)))
            assert state is not None
            self.state = state if self.state is None else self.state.append(state)
            self.rows, self.unread = self.rows + rows, self.unread[len(rows) :]
            results.append(logits)
            for row, text in zip(rows, texts, strict=True):
                row.tokens_read, row.slid = len(text), text is not row.text
                if row.request.sampling.repetition_penalty != 1.0 and row.in_text is None:
                    row.in_text = self.model.tokens_in(row.text)
        return results

    def capacity(self, row: DecodingRow) -> int:
        """The tokens that a row may reach before its window slides, rounded up so that a state rarely has to grow."""
        longest = len(row.request.prompt) + row.request.max_tokens
        rounded = 1 << (longest - 1).bit_length()
        return rounded if self.model.context is None else min(rounded, self.model.context)

    def append_tokens(self, logits: Tensor) -> None:
        """Append the next token to every row."""
        tokens = self.choose(logits)
        logprobs = self.log_probabilities(logits, tokens)
        for index, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            row.append(logprobs.get(index) or DecodedToken(token), self.end)

    def choose(self, logits: Tensor) -> list[int]:
        """(B, V) -> one token per row, for all rows with the same settings at once."""
        groups: dict[Sampling, list[int]] = {}
        for index, row in enumerate(self.rows):
            groups.setdefault(row.request.sampling, []).append(index)
        results = []
        for sampling, indices in groups.items():
            rows = [self.rows[index] for index in indices]
            in_text, draws = [row.in_text for row in rows if row.in_text is not None], None
            if not sampling.greedy:
                draws = torch.tensor([row.draws[len(row.tokens)] for row in rows], device=logits.device)
            own = logits if len(groups) == 1 else logits[torch.tensor(indices, device=logits.device)]
            results.append(choose(own, sampling, in_text=torch.stack(in_text) if in_text else None, draws=draws))
        order = [index for indices in groups.values() for index in indices]
        tokens = dict(zip(order, torch.cat(results).tolist(), strict=True))
        return [tokens[index] for index in range(len(self.rows))]

    def log_probabilities(self, logits: Tensor, tokens: list[int]) -> dict[int, DecodedToken]:
        """The tokens of rows that requested log-probabilities, by index."""
        counts = {i: row.request.logprobs for i, row in enumerate(self.rows) if row.request.logprobs is not None}
        if not counts:
            return {}
        indices = torch.tensor(list(counts), device=logits.device)
        chosen = torch.tensor([[tokens[index]] for index in counts], device=logits.device)
        log_probabilities = logits[indices].float().log_softmax(-1)
        own = log_probabilities.gather(1, chosen).squeeze(1).tolist()
        top = log_probabilities.topk(min(max(counts.values()), logits.size(1)))
        top_ids, top_values = top.indices.tolist(), top.values.tolist()
        result = {}
        for i, (index, count) in enumerate(counts.items()):
            pairs = list(zip(top_ids[i], top_values[i], strict=True))[:count]
            result[index] = DecodedToken(tokens[index], own[i], [pair for pair in pairs if pair[1] > -torch.inf])
        return result
