"""Text and tokens that mean nothing but cost what real ones cost, of any amount."""

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from headstock.data.token_shards import FORMAT, INDEX, PLACE, SHARD_TOKENS, SplitWriter
from headstock.data.token_store import SplitStores, open_split_stores
from headstock.io import write_json
from headstock.rng import generator
from headstock.train.blueprint import placeholder_tokenizer

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS, LINE = 20_000, 18
DOCUMENT = 120  # tokens in a document
FIRST = 16  # token numbers below are left to marks
CHUNK = 1 << 20  # tokens that are made at a time


def random_lines(seed: int = 0) -> Iterator[str]:
    """Lines of about 130 bytes of words whose frequencies fall as they do in real text, without end."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, range(26, 0, -1), k=draw.randint(2, 10))) for _ in range(WORDS)]
    often = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    while True:
        drawn = draw.choices(words, cum_weights=often, k=1000 * LINE)
        yield from (" ".join(drawn[i : i + LINE]) for i in range(0, len(drawn), LINE))


def write_corpus(path: Path, megabytes: float) -> Path:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for line in random_lines():
            size += file.write(line + "\n")
            if size >= megabytes * 1e6:
                return path
    raise AssertionError("the lines have no end")


def write_labelled_rows(path: Path, count: int) -> Path:
    """Labelled texts of 4 to 60 words, as a table."""
    draw, some = random.Random(1), random_lines(1)
    rows = ["text,label"]
    for number in range(count):
        words = (next(some) + " " + next(some) + " " + next(some) + " " + next(some)).split()
        rows.append(f"{' '.join(words[: draw.randint(4, 60)])},{('bad', 'good')[number % 2]}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_token_stores(folder: Path, megabytes: float, *, vocabulary: int) -> SplitStores:
    """A token store of so many megabytes on disk, two bytes a token; a small one for validation beside it."""
    folder.mkdir(parents=True)
    end = placeholder_tokenizer().eos or 0
    dtype = np.dtype("<u2")
    sides = {"train": SplitWriter(folder, "train", dtype, SHARD_TOKENS)}
    sides["valid"] = SplitWriter(folder, "valid", dtype, SHARD_TOKENS)
    for name, size in (("train", megabytes * 1e6 / 2), ("valid", 20_000)):
        left, part = int(size), 0
        while left > 0:
            tokens = generator(0, part, name).integers(FIRST, vocabulary, min(left, CHUNK), dtype=np.uint16)
            tokens[DOCUMENT - 1 :: DOCUMENT] = tokens[-1] = end
            lengths = np.diff(np.flatnonzero(tokens == end), prepend=-1)
            places = np.zeros(len(lengths), PLACE)
            places["bytes"] = 4 * lengths
            sides[name].write(tokens, lengths, places)
            left, part = left - len(tokens), part + 1
        sides[name].close()
    about = {"format": FORMAT, "fingerprint": "made-up", "tokenizer": "made-up", "vocabulary": vocabulary, "end": end}
    about |= {"dtype": dtype.str, "sources": ["made up"], "empty": 0, "sides": list(sides), "summary": {}}
    write_json(folder / INDEX, about | {name: side.counts() for name, side in sides.items()})
    return open_split_stores(folder)
