"""A few short samples of what a pretrained model does with held-out text, for its report.

Continuations from a causal model, filled masks from a masked one, reconstructed texts from a denoising
encoder-decoder. The same seed gives the same samples. They cost a few forward passes over three short rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headstock.data.mask_gaps import MASK
from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.decoding.fill_mask import MaskFiller
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling, suppressed_tokens
from headstock.decoding.text_streamer import TextStreamer
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import Examples, Sample, Task
from headstock.tasks.packing import TextTask
from headstock.tasks.special_tokens import special_tokens_for

SAMPLES = 3  # of each kind
DRAWS = 60  # random positions in the held-out text that are tried
EXCERPT_TOKENS = 160  # read from each position
PROMPT_WORDS, NEW_TOKENS = 8, 40
MASKED_WORDS, MASK_EVERY = 24, 7  # words of a text with masks; about one in seven is masked
MAX_CHARACTERS = 320  # of the true text
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
WORD = re.compile(r"\S+")
LETTERS = re.compile(r"[^\W\d_]+")


def sample_continuations(model: Model, task: Task, store: TokenStore, *, seed: int) -> list[Sample]:
    """The first words of held-out texts, and how the model continues them."""
    tokenizer = task.tokenizer
    texts = held_out_texts(store, tokenizer, seed=seed, min_words=2 * PROMPT_WORDS)
    splits = [split_words(text, min(PROMPT_WORDS, max(1, len(text.split()) // 2))) for text in texts]
    prompts = tokenizer.encode_batch([given for given, _ in splits])
    special = special_tokens_for(task, tokenizer, left_to_right=True)
    continuations = generate(
        model,
        [special.wrap(prompt) for prompt in prompts],
        max_tokens=NEW_TOKENS,
        sampling=SAMPLING,
        end=tokenizer.eos,
        seeds=[derive_seed(seed, row, "sample") for row in range(len(prompts))],
        suppress_tokens=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
    )
    outputs = [
        TextStreamer(tokenizer, prompt, (), None).finish(continuation.tokens)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    return [
        Sample("continued", given, output, true[:MAX_CHARACTERS])
        for (given, true), output in zip(splits, outputs, strict=True)
    ]


def sample_fills(model: Model, task: Task, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
    """Held-out texts in which some words are masked, and the likeliest word for each mask."""
    tokenizer = task.tokenizer
    special = special_tokens_for(task, tokenizer)
    filler = MaskFiller(model, tokenizer, special=special, length=length, shift=task.mask_shift)
    rng = np.random.default_rng(derive_seed(seed, "sample masks"))
    model.eval()
    samples = []
    for excerpt in held_out_texts(store, tokenizer, seed=seed, min_words=6):
        text, _ = split_words(excerpt, max(1, min(MASKED_WORDS, length // 2)))
        words = [match.span() for match in LETTERS.finditer(text)]
        if not words or re.search(filler.spelling.mask_pattern, text):
            continue
        masked = sorted(rng.choice(len(words), size=-(-len(words) // MASK_EVERY), replace=False).tolist())
        given = text
        for start, end in (words[index] for index in reversed(masked)):
            given = given[:start] + MASK + given[end:]
        samples.append(Sample("filled", given, filler.fill(given, top=1, pieces=1).filled, text))
    return samples


def sample_denoising(
    model: Model, task: TextTask, examples: Examples, indices: np.ndarray, *, seed: int
) -> list[Sample]:
    """Some of these denoising examples: the source with masked spans, and the text that the model writes."""
    tokenizer = task.tokenizer
    rng = np.random.default_rng(derive_seed(seed, "sample rows"))
    sampled = sorted(rng.choice(indices, size=min(SAMPLES, len(indices)), replace=False).tolist())
    batches = [examples.batch([index]) for index in sampled]
    sources = [batch.source.tokens[0].tolist() for batch in batches if batch.source is not None]
    continuations = generate(
        model,
        [[task.bos]] * len(sources),
        max_tokens=NEW_TOKENS,
        sampling=Sampling(temperature=0.0),
        end=task.eos,
        suppress_tokens=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
        sources=sources,
    )
    return [
        Sample(
            "denoised",
            decode_with_masks(source, tokenizer),
            tokenizer.decode(continuation.tokens),
            tokenizer.decode(batch.labels["token"][0].tolist()),
        )
        for source, continuation, batch in zip(sources, continuations, batches, strict=True)
    ]


def decode_with_masks(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, with [MASK] for each mask token."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.mask:
            parts.append([])
        else:
            parts[-1].append(token)
    return f" {MASK} ".join(tokenizer.decode(part).strip() for part in parts).strip()


def held_out_texts(store: TokenStore, tokenizer: Tokenizer, *, seed: int, min_words: int) -> list[str]:
    """Excerpts of at least `min_words` words, or the longest ones if there are none."""
    excerpts = list(dict.fromkeys(random_excerpts(store, tokenizer, seed=seed)))
    long = [text for text in excerpts if len(text.split()) >= min_words]
    return (long or sorted(excerpts, key=len, reverse=True))[:SAMPLES]


def random_excerpts(store: TokenStore, tokenizer: Tokenizer, *, seed: int) -> Iterator[str]:
    """Texts from random positions: the beginning of a document, or a part of a long one."""
    rng = np.random.default_rng(derive_seed(seed, "sample texts"))
    for position in rng.integers(0, store.tokens, size=DRAWS):
        document = store.document_at(int(position))
        first, last = int(store.offsets[document]), int(store.offsets[document + 1]) - 1
        start = int(position) if last - first > 4 * EXCERPT_TOKENS else first
        text = tokenizer.decode(store.slice(start, min(last, start + EXCERPT_TOKENS)))
        if start > first:  # it may start inside a word or a line
            half = text[: len(text) // 2]
            text = text[max(half.rfind("\n"), half.find(" ")) + 1 :]
        if text := text.strip():
            yield text


def split_words(text: str, count: int) -> tuple[str, str]:
    """The first words of a text and the remaining text; without spaces, as many characters as words have."""
    ends = [match.end() for match in WORD.finditer(text)]
    end = min(ends[min(count, len(ends)) - 1], 12 * count)
    return text[:end], text[end:]


def sample_lines(samples: Sequence[Mapping[str, str]]) -> list[str]:
    """Samples for a terminal, each on its own line: `given → output`."""
    return [f"{one_line(sample['given'])} → {one_line(sample['output']) or '(nothing)'}" for sample in samples]


def one_line(text: str) -> str:
    return " ".join(text.split())
