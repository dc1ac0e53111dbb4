"""Random text, labelled rows and token stores of any size for benchmarks."""

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from headstock.data.token_shards import FORMAT, INDEX, LOCATION, SHARD_TOKENS, SplitWriter
from headstock.data.token_store import SplitStores, open_split_stores
from headstock.io import write_json
from headstock.rng import generator
from headstock.train.models import placeholder_tokenizer

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS, LINE = 20_000, 18  # distinct words, and words per line
DOCUMENT = 120  # tokens per document
FIRST_TOKEN = 16  # lower ids are special tokens
CHUNK = 1 << 20  # tokens generated at a time


def random_lines(seed: int = 0) -> Iterator[str]:
    """An endless stream of lines of about 130 bytes; word frequencies follow Zipf's law."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, range(26, 0, -1), k=rng.randint(2, 10))) for _ in range(WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    while True:
        words_drawn = rng.choices(words, cum_weights=weights, k=1000 * LINE)
        yield from (" ".join(words_drawn[i : i + LINE]) for i in range(0, len(words_drawn), LINE))


def write_corpus(path: Path, megabytes: float) -> Path:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for line in random_lines():
            size += file.write(line + "\n")
            if size >= megabytes * 1e6:
                return path
    raise AssertionError("random_lines is endless")


def write_labelled_rows(path: Path, count: int) -> Path:
    """A CSV file of labelled texts of 4 to 60 words."""
    rng, lines = random.Random(1), random_lines(1)
    rows = ["text,label"]
    for number in range(count):
        words = " ".join(next(lines) for _ in range(4)).split()
        rows.append(f"{' '.join(words[: rng.randint(4, 60)])},{('bad', 'good')[number % 2]}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_token_stores(folder: Path, megabytes: float, *, vocabulary: int) -> SplitStores:
    """A token store of the given size at two bytes per token, and a small validation store."""
    folder.mkdir(parents=True)
    eos = placeholder_tokenizer().eos or 0
    dtype = np.dtype("<u2")
    splits = {"train": SplitWriter(folder, "train", dtype, SHARD_TOKENS)}
    splits["valid"] = SplitWriter(folder, "valid", dtype, SHARD_TOKENS)
    for name, size in (("train", megabytes * 1e6 / 2), ("valid", 20_000)):
        remaining, part = int(size), 0
        while remaining > 0:
            tokens = generator(0, part, name).integers(FIRST_TOKEN, vocabulary, min(remaining, CHUNK), dtype=np.uint16)
            tokens[DOCUMENT - 1 :: DOCUMENT] = tokens[-1] = eos
            lengths = np.diff(np.flatnonzero(tokens == eos), prepend=-1)
            places = np.zeros(len(lengths), LOCATION)
            places["bytes"] = 4 * lengths
            splits[name].write(tokens, lengths, places)
            remaining, part = remaining - len(tokens), part + 1
        splits[name].close()
    index = {"format": FORMAT, "fingerprint": "made-up", "tokenizer": "made-up", "vocabulary": vocabulary, "end": eos}
    index |= {"dtype": dtype.str, "sources": ["made up"], "empty": 0, "sides": list(splits), "summary": {}}
    write_json(folder / INDEX, index | {name: writer.counts() for name, writer in splits.items()})
    return open_split_stores(folder)
