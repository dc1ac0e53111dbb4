"""How much text a corpus holds and what its documents are like, without reading all of a large one."""

import bz2
import lzma
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headstock.data.corpus import Corpus, resolve_paths
from headstock.data.formats import PLAIN
from headstock.data.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

READ_ALL = 50_000_000  # bytes of files up to which everything is read
SAMPLE = 2_000_000  # characters that tokens are counted in
FILES = 8  # of a corpus of many, so many are looked into
TABLE_SHARE = 0.9  # of a table's bytes, those that are text
PARQUET_TEXT = 2.0  # bytes of text for each of a parquet file's, which packs them


@dataclass(frozen=True)
class Extent:
    bytes: int  # of text
    documents: int
    sample: tuple[str, ...]  # some of the documents
    read: bool  # all of it was read, so the numbers are exact
    whole: bool  # the sample is everything


@dataclass(frozen=True)
class Counted:
    """A sample in tokens."""

    tokenizer: Tokenizer
    bytes_per_token: float
    nine_in_ten: float  # tokens in a document that is longer than nine in ten
    middle: float  # tokens in the middle one


def extent(corpus: Corpus) -> Extent:
    found = resolve_paths(corpus.paths)
    if sum(source.path.stat().st_size for source in found) <= READ_ALL:
        return read_through(corpus)
    chosen = found[:: -(-len(found) // FILES)]
    parts = [look_into(corpus, source.path, SAMPLE // len(chosen)) for source in chosen]
    sample = tuple(text for part in parts for text in part)
    size = sum(map(byte_length, sample))
    grown = sum(text_bytes(source.path, source.format, source.compression, sample) for source in found)
    return Extent(round(grown), max(1, round(grown * len(sample) / size)), sample, read=False, whole=False)


def read_through(corpus: Corpus) -> Extent:
    """Everything is counted, and about every n-th document kept, so that the sample is of all parts alike."""
    size = documents = held = 0
    kept: list[str] = []
    every = 1
    for document in corpus:
        size += byte_length(document.text)
        if documents % every == 0:
            kept.append(document.text)
            held += len(document.text)
            if held > 2 * SAMPLE:
                kept, every = kept[::2], 2 * every
                held = sum(map(len, kept))
        documents += 1
    return Extent(size, documents, tuple(kept), read=True, whole=every == 1)


def look_into(corpus: Corpus, path: Path, characters: int) -> list[str]:
    kept: list[str] = []
    for chunk in replace(corpus, paths=(str(path),)).chunks():
        for text in chunk.texts:
            kept.append(text)
            characters -= len(text)
            if characters <= 0:
                return kept
    return kept


def text_bytes(path: Path, format: str, packing: str, sample: tuple[str, ...]) -> float:
    """How much text a file holds, by its size and by how far the sample can be packed."""
    size = path.stat().st_size * packed_share(packing, "\n".join(sample)[:SAMPLE].encode())
    return size * {PLAIN: 1.0, ".parquet": PARQUET_TEXT}.get(format, TABLE_SHARE)


def packed_share(packing: str, text: bytes) -> float:
    packs: dict[str, Callable[[bytes], bytes]] = {
        ".gz": zlib.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zlib.compress,
    }
    return len(text) / max(1, len(packs[packing](text))) if packing else 1.0


def count(found: Extent, vocabulary: int) -> Counted:
    """How many tokens the text has in a vocabulary of its own of this size.

    Of a part of the text, one half makes the vocabulary and the other is counted: text that a vocabulary was made
    from takes fewer tokens than text that it has not seen.
    """
    learned, counted = (found.sample, found.sample) if found.whole else (found.sample[::2], found.sample[1::2])
    tokenizer = train_tokenizer(learned or counted, TokenizerSettings(kind="bpe", vocabulary=vocabulary))
    texts = list(counted or learned)
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)]
    tokens = sum(lengths) + len(lengths)  # each is closed by an end mark
    return Counted(
        tokenizer,
        sum(map(byte_length, texts)) / max(1, tokens),
        float(np.quantile(lengths, 0.9)),
        statistics.median(lengths),
    )


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
