"""Continues prompts by sampling or beam search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import SpecialTokens
from headstock.decoding.beam_search import beam_search
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling, suppressed_tokens
from headstock.decoding.text_streamer import TextStreamer
from headstock.errors import UserError
from headstock.model.model import Model
from headstock.results import Result
from headstock.rng import derive_seed

BEAM_ROWS = 16  # prompts searched at once


@dataclass(frozen=True, eq=False)
class Generation(Result):
    """A generated text."""

    text: str  # the prompt and its continuation
    ended: str  # "length", "end" or "stop"
    slid: bool  # it outgrew the model's context, so that the beginning was no longer read


def sample_texts(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    special: SpecialTokens,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    seed: int,
    stop: Sequence[str],
    stream: Callable[[str], None] | None,
    cache: bool,
) -> list[Generation]:
    """`samples` continuations of each prompt."""
    if max_tokens < 0 or samples < 1:
        raise UserError(f"max_tokens must be 0 or more and samples 1 or more, not {max_tokens} and {samples}")
    texts = [prompt for prompt in prompts for _ in range(samples)]
    encoded = tokenizer.encode_batch(texts)
    streamers = [TextStreamer(tokenizer, ids, stop, stream if i == 0 else None) for i, ids in enumerate(encoded)]
    continuations = generate(
        model,
        [special.wrap(ids) for ids in encoded],
        max_tokens=max_tokens,
        sampling=sampling,
        end=tokenizer.eos,
        seeds=[derive_seed(seed, i % samples, "sample") for i in range(len(texts))],
        suppress_tokens=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
        stop=(lambda row, tokens: streamers[row].update(tokens)) if stop or stream else None,
        cache=cache,
    )
    return [
        Generation(text + streamer.finish(row.tokens), row.ended, row.slid)
        for text, streamer, row in zip(texts, streamers, continuations, strict=True)
    ]


def search_texts(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    special: SpecialTokens,
    max_tokens: int,
    beams: int,
    length_penalty: float,
    no_repeat: int,
    stop: Sequence[str],
) -> list[Generation]:
    """The best continuation of each prompt by beam search."""
    encoded = tokenizer.encode_batch(prompts)
    rows = [special.wrap(ids) for ids in encoded]
    search = partial(
        beam_search,
        model,
        end=tokenizer.eos,
        suppress_tokens=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
        beams=beams,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        no_repeat=no_repeat,
    )
    chunks = [rows[start : start + BEAM_ROWS] for start in range(0, len(rows), BEAM_ROWS)]
    best = [hypotheses[0] for chunk in chunks for hypotheses in search(chunk)]
    streamers = [TextStreamer(tokenizer, ids, stop, None) for ids in encoded]
    return [
        Generation(text + streamer.finish(row.tokens), "stop" if streamer.has_stop(row.tokens) else row.ended, False)
        for text, streamer, row in zip(prompts, streamers, best, strict=True)
    ]
