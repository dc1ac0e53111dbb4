"""A few short samples of what a pretrained model does with held-out text, for its report.

Continuations from a model that reads left to right, filled masks from a masked one, repaired texts from a denoising
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
from headstock.decoding.sampling import Sampling
from headstock.decoding.text_streamer import TextStreamer
from headstock.model.model import Model
from headstock.rng import derive_seed
from headstock.tasks.base import Sample, Task
from headstock.tasks.special_tokens import special_tokens_for

SAMPLES = 3  # of each kind
DRAWS = 60  # places in the held-out text that are tried for texts that are long enough
STRETCH = 160  # tokens that are read from such a place
PROMPT_WORDS, NEW_TOKENS = 8, 40
MASKED_WORDS, EVERY = 24, 7  # words of a text whose masks are filled; about one in seven of them is masked
MOST_CHARACTERS = 320  # of the true text that is kept beside a sample
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
WORD = re.compile(r"\S+")
LETTERS = re.compile(r"[^\W\d_]+")


def sample_continuations(model: Model, task: Task, store: TokenStore, *, seed: int) -> list[Sample]:
    """The first words of held-out texts, and how the model goes on."""
    tokenizer = task.tokenizer
    texts = texts_of(store, tokenizer, seed=seed, least=2 * PROMPT_WORDS)
    cuts = [first_words(text, min(PROMPT_WORDS, max(1, len(text.split()) // 2))) for text in texts]
    prompts = tokenizer.encode_batch([given for given, _ in cuts])
    special = special_tokens_for(task, tokenizer, left_to_right=True)
    made = generate(
        model,
        [special.wrap(prompt) for prompt in prompts],
        max_tokens=NEW_TOKENS,
        sampling=SAMPLING,
        end=tokenizer.eos,
        seeds=[derive_seed(seed, row, "sample") for row in range(len(prompts))],
        forbidden=suppressed_tokens(tokenizer, model.backbone.config.vocabulary),
    )
    return [
        Sample("continued", given, TextStreamer(tokenizer, prompt, (), None).finish(row.tokens), rest[:MOST_CHARACTERS])
        for (given, rest), prompt, row in zip(cuts, prompts, made, strict=True)
    ]


def sample_fills(model: Model, task: Task, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
    """Held-out texts in which some words are masked, and the likeliest word for each mask."""
    tokenizer = task.tokenizer
    filler = MaskFiller(
        model, tokenizer, special=special_tokens_for(task, tokenizer), length=length, shift=task.mask_shift
    )
    draw = np.random.default_rng(derive_seed(seed, "sample masks"))
    model.eval()
    samples = []
    for whole in texts_of(store, tokenizer, seed=seed, least=6):
        text, _ = first_words(whole, max(1, min(MASKED_WORDS, length // 2)))
        words = [found.span() for found in LETTERS.finditer(text)]
        if not words or re.search(filler.spelling.mask_pattern, text):
            continue
        masked = sorted(draw.choice(len(words), size=-(-len(words) // EVERY), replace=False).tolist())
        given = text
        for begin, end in (words[place] for place in reversed(masked)):
            given = given[:begin] + MASK + given[end:]
        samples.append(Sample("filled", given, filler.fill(given, top=1, pieces=1).filled, text))
    return samples


def with_masks(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Tokens as text in which a mask can be seen."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.mask:
            parts.append([])
        else:
            parts[-1].append(token)
    return f" {MASK} ".join(tokenizer.decode(part).strip() for part in parts).strip()


def texts_of(store: TokenStore, tokenizer: Tokenizer, *, seed: int, least: int) -> list[str]:
    """Held-out texts of `least` words or more where there are such, or else the longest of those that were tried."""
    tried = list(dict.fromkeys(stretches(store, tokenizer, seed=seed)))
    enough = [text for text in tried if len(text.split()) >= least]
    return (enough or sorted(tried, key=len, reverse=True))[:SAMPLES]


def stretches(store: TokenStore, tokenizer: Tokenizer, *, seed: int) -> Iterator[str]:
    """Texts from places drawn at random: the beginning of a document, or somewhere in a long one."""
    draw = np.random.default_rng(derive_seed(seed, "sample texts"))
    for position in draw.integers(0, store.tokens, size=DRAWS):
        document = store.document_at(int(position))
        first, last = int(store.offsets[document]), int(store.offsets[document + 1]) - 1
        begin = int(position) if last - first > 4 * STRETCH else first
        text = tokenizer.decode(store.slice(begin, min(last, begin + STRETCH)))
        if begin > first:  # a stretch may begin inside a word or a line
            half = text[: len(text) // 2]
            text = text[max(half.rfind("\n"), half.find(" ")) + 1 :]
        if text := text.strip():
            yield text


def first_words(text: str, count: int) -> tuple[str, str]:
    """The first words of a text and the rest; of what is written without spaces, as many characters as words have."""
    ends = [found.end() for found in WORD.finditer(text)]
    at = min(ends[min(count, len(ends)) - 1], 12 * count)
    return text[:at], text[at:]


def suppressed_tokens(tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Entries that are never part of a text: special ones but the end, and those the tokenizer does not have."""
    special = (entry for entry in tokenizer.all_special_ids if entry != tokenizer.eos)
    return [*special, *range(tokenizer.vocabulary, vocabulary)]


def sample_lines(samples: Sequence[Mapping[str, str]]) -> list[str]:
    """Samples for a terminal, each on a line of its own: `given → output`."""
    return [f"{flat(sample['given'])} → {flat(sample['output']) or '(nothing)'}" for sample in samples]


def flat(text: str) -> str:
    return " ".join(text.split())
