"""The texts that one request generates: from decoded rows in the worker's thread to updates in the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from headstock.data.tokenizer import Tokenizer
from headstock.decoding.continuous_batching import DecodedToken, DecodingRequest, DecodingRow
from headstock.decoding.sampling import Sampling
from headstock.decoding.text_streamer import TextStreamer


@dataclass
class TextUpdate:
    """What a step added to one text."""

    index: int  # of the text within its request
    text: str
    tokens: list[DecodedToken]
    ended: Literal["length", "end", "stop", "cancelled"] | None


@dataclass(eq=False)
class GrowingText:
    """One text: what has been decoded, and how much of it is delivered."""

    streamer: TextStreamer
    pieces: list[str] = field(default_factory=list)  # not yet delivered
    delivered: int = 0  # tokens


class Generation:
    """One request for texts. Created in the event loop, where `updates` is read; the worker calls the rest."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        *,
        wrap: Callable[[list[int]], list[int]],
        max_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        stream: bool = False,
        timeout: float,
    ):
        """`prompts` and `seeds` have one entry per text; `wrap` adds special tokens. Without `stream`, texts arrive at
        once when all have ended."""
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[list[TextUpdate] | BaseException]()
        self.stream, self.deadline = stream, time.monotonic() + timeout
        self.texts, self.requests, self.rows = list[GrowingText](), list[DecodingRequest](), list[DecodingRow]()
        self.failed = False
        for prompt, seed in zip(prompts, seeds, strict=True):
            pieces: list[str] = []
            text = GrowingText(TextStreamer(tokenizer, prompt, stop, pieces.append), pieces)
            watched = text.streamer.update if stop or stream else None
            self.texts.append(text)
            request = DecodingRequest(wrap(prompt), max_tokens, sampling, seed, stop=watched, logprobs=logprobs)
            self.requests.append(request)

    async def updates(self) -> AsyncIterator[list[TextUpdate]]:
        """What each step added, until all texts have ended. Leaving early cancels the rest."""
        try:
            remaining = len(self.texts)
            while remaining:
                item = await self.queue.get()
                if isinstance(item, BaseException):
                    raise item
                remaining -= sum(update.ended is not None for update in item)
                yield item
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End all rows before the next step."""
        for row in self.rows:
            row.cancel()

    def fail(self, error: BaseException) -> None:
        if not self.failed:
            self.failed = True
            call_soon(self.loop, partial(self.queue.put_nowait, error))

    def update(self, row: DecodingRow) -> TextUpdate | None:
        """What is new in a row; None where there is nothing to deliver yet."""
        if row.ended is None and not self.stream:
            return None
        index = next(index for index, own in enumerate(self.rows) if own is row)
        text = self.texts[index]
        if row.ended is not None:
            text.streamer.finish(row.new_tokens)
        tokens = row.tokens[text.delivered :]
        text.delivered = len(row.tokens)
        piece = "".join(text.pieces)
        text.pieces.clear()
        return TextUpdate(index, piece, tokens, row.ended) if piece or tokens or row.ended else None


def deliver(changed: Sequence[tuple[DecodingRow, Generation]]) -> None:
    """Put what a step added into the queues of its requests, by one call into their event loop."""
    items: dict[Generation, list[TextUpdate]] = {}
    for row, generation in changed:
        if not generation.failed and (update := generation.update(row)) is not None:
            items.setdefault(generation, []).append(update)

    def put(loop: asyncio.AbstractEventLoop) -> None:
        for generation, updates in items.items():
            if generation.loop is loop:
                generation.queue.put_nowait(updates)

    for loop in {generation.loop for generation in items}:
        call_soon(loop, partial(put, loop))


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call in an event loop of another thread, unless it has been closed meanwhile."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
