"""Measures a corpus: bytes, documents and tokens. Large corpora are sampled."""

import bz2
import lzma
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headstock.data.corpus import Corpus
from headstock.data.formats import PLAIN
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

READ_ALL_BYTES = 50_000_000  # corpora up to this size are read completely
SAMPLE_CHARACTERS = 2_000_000
SAMPLED_FILES = 8
TABLE_SHARE = 0.9  # share of text in the bytes of a table
PARQUET_RATIO = 2.0  # bytes of text per byte of a parquet file, which is compressed


@dataclass(frozen=True)
class CorpusSize:
    bytes: int  # of text
    documents: int
    sample: tuple[str, ...]
    exact: bool  # True if the whole corpus was read
    sample_is_complete: bool  # True if the sample is the whole corpus


@dataclass(frozen=True)
class TokenCounts:
    tokenizer: Tokenizer
    bytes_per_token: float
    p90_length: float  # 90th percentile of document lengths, in tokens
    median_length: float


def measure_corpus(corpus: Corpus) -> CorpusSize:
    files = corpus.data_files
    if sum(source.path.stat().st_size for source in files) <= READ_ALL_BYTES:
        return read_all(corpus)
    sampled = files[:: -(-len(files) // SAMPLED_FILES)]
    parts = [sample_file(corpus, source.path, SAMPLE_CHARACTERS // len(sampled)) for source in sampled]
    sample = tuple(text for part in parts for text in part)
    total = sum(text_bytes(source.path, source.format, source.compression, sample) for source in files)
    documents = total * len(sample) / sum(map(byte_length, sample))
    return CorpusSize(round(total), max(1, round(documents)), sample, exact=False, sample_is_complete=False)


def read_all(corpus: Corpus) -> CorpusSize:
    """Count everything and keep every n-th document, so that the sample covers the whole corpus evenly."""
    size = documents = characters = 0
    sample: list[str] = []
    every = 1
    for document in corpus:
        size += byte_length(document.text)
        if documents % every == 0:
            sample.append(document.text)
            characters += len(document.text)
            if characters > 2 * SAMPLE_CHARACTERS:
                sample, every = sample[::2], 2 * every
                characters = sum(map(len, sample))
        documents += 1
    return CorpusSize(size, documents, tuple(sample), exact=True, sample_is_complete=every == 1)


def sample_file(corpus: Corpus, path: Path, characters: int) -> list[str]:
    """The first documents of a file, up to about so many characters."""
    sample: list[str] = []
    for chunk in replace(corpus, paths=(str(path),)).chunks():
        for text in chunk.texts:
            sample.append(text)
            characters -= len(text)
            if characters <= 0:
                return sample
    return sample


def text_bytes(path: Path, format: str, compression: str, sample: tuple[str, ...]) -> float:
    """Estimate how much text a file holds from its size and how well the sample compresses."""
    size = path.stat().st_size * compression_ratio(compression, "\n".join(sample)[:SAMPLE_CHARACTERS].encode())
    return size * {PLAIN: 1.0, ".parquet": PARQUET_RATIO}.get(format, TABLE_SHARE)


def compression_ratio(compression: str, text: bytes) -> float:
    compressors: dict[str, Callable[[bytes], bytes]] = {
        ".gz": zlib.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zlib.compress,
    }
    return len(text) / max(1, len(compressors[compression](text))) if compression else 1.0


def count_tokens(corpus: CorpusSize, vocabulary: int) -> TokenCounts:
    """Count tokens with a tokenizer of this vocabulary, trained on the sample.

    A partial sample is split in halves, one to train the tokenizer and one to count: a tokenizer needs fewer tokens
    for the text it was trained on than for other text.
    """
    sample = corpus.sample
    training, counted = (sample, sample) if corpus.sample_is_complete else (sample[::2], sample[1::2])
    tokenizer = train_tokenizer(training or counted, TokenizerSettings(kind="bpe", vocabulary=vocabulary))
    texts = list(counted or training)
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)]
    tokens = sum(lengths) + len(lengths)  # each document ends with an eos token
    bytes_per_token = sum(map(byte_length, texts)) / max(1, tokens)
    return TokenCounts(tokenizer, bytes_per_token, float(np.quantile(lengths, 0.9)), statistics.median(lengths))


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
