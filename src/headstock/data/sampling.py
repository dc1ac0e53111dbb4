"""Part of a corpus: enough to learn a tokenizer from, or to look at."""

from collections.abc import Iterator
from itertools import islice

from headstock.data.corpus import Corpus

SAMPLE_BYTES = 100_000_000  # bytes; more text hardly changes a tokenizer


def sample_texts(corpus: Corpus) -> Iterator[str]:
    """The texts of a corpus, of a very large one every n-th."""
    size = sum(file.stat().st_size for file in corpus.files())
    every = max(1, -(-size // SAMPLE_BYTES))
    return (document.text for i, document in enumerate(corpus) if i % every == 0)


def first_texts(corpus: Corpus, count: int) -> list[str]:
    return [document.text for document in islice(corpus, count)]
