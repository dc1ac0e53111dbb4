"""Builds token stores: a corpus, split by document into training and validation, as token ids on disk."""

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, compress, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from headstock.cache_use import mark_used
from headstock.data.corpus import Corpus
from headstock.data.document_split import (
    TRAIN,
    VALID,
    DocumentBatch,
    SplitPlan,
    document_batches,
    hash_documents,
    make_plans,
)
from headstock.data.sentences import split_sentences
from headstock.data.shared_stores import fetch_store, share_store
from headstock.data.token_shards import (
    FORMAT,
    INDEX,
    LOCATION,
    SHARD_TOKENS,
    SplitWriter,
    TokenStore,
    UnknownTokens,
    index_digest,
    read_index,
    verify_store,
)
from headstock.data.tokenizer import LONG_TEXT, Tokenizer
from headstock.errors import UserError, WorkError
from headstock.io import atomic_folder, cache_folder, fingerprint, write_json

logger = logging.getLogger(__name__)

SPLITS = {TRAIN: "train", VALID: "valid"}
ENCODER_THREADS = 2  # while one hands its ids over to Python, the other keeps the cores busy
PROGRESS_BYTES = 1 << 26


@dataclass
class SplitStores:
    train: TokenStore
    valid: TokenStore
    summary: dict[str, Any]
    folder: Path
    reused: bool = False


def build_split_stores(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    valid: Corpus | None = None,
    valid_fraction: float = 0.05,
    deduplicate: bool = True,
    sentences: bool = False,
    seed: int = 0,
    cache: Path | None = None,
    shared: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    on: str | None = None,
) -> SplitStores:
    """Token stores for training and validation, built once per corpus, tokenizer and settings, then reused.

    Without a `valid` corpus, validation is the `valid_fraction` of documents with the smallest seeded hash, so it
    depends on the documents' content and the seed, not on their order. Exact duplicates are dropped; if kept, all
    copies are in the same split. With a `valid` corpus, its documents are dropped from training. With `sentences`, the
    tokenizer's sep separates the sentences of a document. With `on="ray"` or `"ray:ADDRESS"` the nodes of a Ray cluster
    read and encode the documents; the store has the same bytes. `shared` is a URL where stores are
    looked for, and put.
    """
    if not 0 < valid_fraction < 1:
        raise UserError(f"valid_fraction: must be between 0 and 1, not {valid_fraction}")
    split = [valid.fingerprint()] if valid else [valid_fraction, seed]
    key = [corpus.fingerprint(), tokenizer.fingerprint, tokenizer.eos, deduplicate, *split, *_sentences_key(sentences)]

    def write(folder: Path) -> dict[str, Any]:
        logger.info(corpus.describe())
        start = time.perf_counter()
        with builder_on(on) as builder:
            plans = make_plans(corpus, valid, valid_fraction, deduplicate, seed, hasher=builder.hash_documents)
            logger.info(f"hashed the documents in {time.perf_counter() - start:.1f} s")
            return _write(folder, plans, tokenizer, (TRAIN, VALID), valid_fraction, shard_tokens, sentences, builder)

    folder, reused = _find_or_build(key, write, tokenizer, cache, shared)
    stores = _open(folder)  # verified, or just written
    if reused:
        names = corpus.names() + (valid.names() if valid else [])  # the same text may have moved
        stores.train.sources = stores.valid.sources = names
        logger.info(f"reusing the tokens of an earlier run: {_counts(stores.summary)}")
    else:
        seconds, speed = stores.summary["seconds"], stores.summary["megabytes_per_second"]
        logger.info(f"{_counts(stores.summary)} ({seconds:.1f} s, {speed:.1f} MB/s)")
    stores.reused = reused
    return stores


def build_store(
    corpus: Corpus, tokenizer: Tokenizer, *, sentences: bool = False, cache: Path | None = None
) -> TokenStore:
    """A token store of all documents, including duplicates: text to evaluate a model on."""

    def write(folder: Path) -> dict[str, Any]:
        plan = SplitPlan(corpus, np.full(len(hash_documents(corpus)[0]), VALID, np.uint8))
        return _write(folder, [plan], tokenizer, (VALID,), 0.0, SHARD_TOKENS, sentences, LocalBuilder())

    key = [corpus.fingerprint(), tokenizer.fingerprint, tokenizer.eos, "all of it", *_sentences_key(sentences)]
    return TokenStore(_find_or_build(key, write, tokenizer, cache)[0], "valid")


def open_split_stores(folder: Path) -> SplitStores:
    """Open and verify stores that were built earlier."""
    verify_store(mark_used(folder))
    return _open(folder)


def _open(folder: Path) -> SplitStores:
    return SplitStores(TokenStore(folder, "train"), TokenStore(folder, "valid"), read_index(folder)["summary"], folder)


def _sentences_key(sentences: bool) -> list[str]:
    """Separated sentences change a store's fingerprint; stores without them keep the one they always had."""
    return ["sentences"] if sentences else []


def _find_or_build(
    key: list[Any],
    write: Callable[[Path], dict[str, Any]],
    tokenizer: Tokenizer,
    cache: Path | None,
    shared: str | None = None,
) -> tuple[Path, bool]:
    """The folder of the store with this key, and whether it existed already, here or at the URL `shared`."""
    if tokenizer.eos is None:
        raise UserError("this tokenizer has no eos token, which must separate documents")
    digest = fingerprint([FORMAT, *key])
    folder = mark_used((cache or cache_folder()) / "stores" / digest)
    if (folder / INDEX).exists():
        try:
            index = read_index(folder)
            if {"files", "digest"} <= index.keys():
                verify_store(folder)
                return folder, True
            logger.info(f"{folder}: written by an earlier version without checksums; rebuilding it")
        except UserError as error:
            logger.info(f"{error}; rebuilding it")
    if shared and fetch_store(shared, digest, folder):
        return folder, True
    try:
        with atomic_folder(folder) as temporary:
            start = time.perf_counter()
            index = write(temporary)
            index["summary"] |= _speed(index["summary"], time.perf_counter() - start)
            index = {"format": FORMAT, "fingerprint": digest, **index}
            write_json(temporary / INDEX, index | {"digest": index_digest(index)})
    except OSError as error:
        if not (folder / INDEX).exists():  # another process may have finished the same store first
            raise WorkError(f"{folder}: the token store could not be written ({error.strerror or error})") from None
    if shared:
        share_store(shared, folder)
    return folder, False


def _write(
    folder: Path,
    plans: list[SplitPlan],
    tokenizer: Tokenizer,
    splits: Sequence[int],
    valid_fraction: float,
    shard_tokens: int,
    sentences: bool,
    builder: "Builder",
) -> dict[str, Any]:
    """Write the files of a store; returns its index."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    sep = tokenizer.sep if sentences else None
    if sentences and sep is None:
        raise UserError("this tokenizer has no [SEP], which must separate sentences")
    writers = {split: SplitWriter(folder, SPLITS[split], dtype, shard_tokens, sep=sep) for split in splits}
    sources: list[str] = []
    empty = 0
    try:
        for plan in plans:
            empty += _write_all(builder.encode(plan, valid_fraction, len(sources), tokenizer, dtype, sep), writers)
            sources += plan.corpus.names()
    finally:
        for writer in writers.values():
            writer.close()
    for split, writer in writers.items():
        if not writer.documents:
            raise UserError(f"no tokens for {'training' if split == TRAIN else 'validation'}: too little text")
    index = {"tokenizer": tokenizer.fingerprint, "vocabulary": tokenizer.vocabulary, "end": tokenizer.eos}
    index |= {} if sep is None else {"separator": sep}
    index |= {"dtype": dtype.str, "sources": sources, "empty": empty, "sides": [w.split for w in writers.values()]}
    index |= {writer.split: writer.counts() for writer in writers.values()}
    index["files"] = {name: entry for writer in writers.values() for name, entry in writer.checksums().items()}
    return index | {"summary": _summary(index, plans)}


def _summary(index: dict[str, Any], plans: list[SplitPlan]) -> dict[str, Any]:
    summary: dict[str, Any] = {"documents": len(plans[0].assignment), "duplicates": plans[0].duplicates}
    summary |= {"in_validation": plans[0].in_validation, "empty": index["empty"]}
    for split in index["sides"]:
        summary |= {f"{split}_{name}": index[split][name] for name in ("documents", "tokens", "bytes")}
    return summary


def _speed(summary: dict[str, Any], seconds: float) -> dict[str, float]:
    size = summary.get("train_bytes", 0) + summary["valid_bytes"]
    return {"seconds": round(seconds, 3), "megabytes_per_second": round(size / seconds / 1e6, 3)}


def _counts(summary: dict[str, Any]) -> str:
    reasons = {"duplicates": "duplicates", "in_validation": "also in validation", "empty": "without tokens"}
    dropped = ", ".join(f"{summary[key]:,} {reason}" for key, reason in reasons.items() if summary[key])
    train, valid = (
        f"{name}: {summary[f'{key}_documents']:,} documents of {summary[f'{key}_tokens']:,} tokens"
        for key, name in (("train", "training"), ("valid", "validation"))
    )
    return f"{train}; {valid}" + (f"; dropped {dropped}" if dropped else "")


# Encoding


class EncodedBatch(NamedTuple):
    """Encoded documents of one split."""

    split: int
    tokens: np.ndarray
    lengths: np.ndarray
    locations: np.ndarray
    empty: int  # documents without tokens
    unknown: UnknownTokens | None  # of validation text


class Builder(Protocol):
    """The two passes over a corpus: hashes of all documents, then the encoded ones that a plan keeps, in order."""

    def hash_documents(self, corpus: Corpus) -> tuple[np.ndarray, int]: ...

    def encode(
        self, plan: SplitPlan, fraction: float, first_file: int, tokenizer: Tokenizer, dtype: np.dtype, sep: int | None
    ) -> Iterator[EncodedBatch]: ...


class LocalBuilder:
    """Hashes and encodes in this process."""

    def hash_documents(self, corpus: Corpus) -> tuple[np.ndarray, int]:
        return hash_documents(corpus)

    def encode(
        self, plan: SplitPlan, fraction: float, first_file: int, tokenizer: Tokenizer, dtype: np.dtype, sep: int | None
    ) -> Iterator[EncodedBatch]:
        pending: deque[tuple[int, Future, Future | None]] = deque()

        def finish() -> EncodedBatch:
            split, encoded, unknown = pending.popleft()
            tokens, lengths, locations, empty = encoded.result()
            counted = None if unknown is None else unknown.result()
            return EncodedBatch(split, tokens, lengths, locations, empty, counted)

        with ThreadPoolExecutor(ENCODER_THREADS) as threads:
            for batch in document_batches(plan, fraction, first_file):
                encoded = threads.submit(encode_documents, tokenizer, batch, dtype, sep)
                # only validation text is scored, and locating unknown tokens is slow
                unknown = threads.submit(count_unknown, tokenizer, batch) if batch.split == VALID else None
                pending.append((batch.split, encoded, unknown))
                if len(pending) > ENCODER_THREADS:
                    yield finish()
            while pending:
                yield finish()


def builder_on(on: str | None) -> AbstractContextManager[Builder]:
    """Build here, or on a Ray cluster."""
    if on is None:
        return nullcontext(LocalBuilder())
    from headstock.data.ray_store import ray_builder

    return ray_builder(on)


def _write_all(batches: Iterator[EncodedBatch], writers: dict[int, SplitWriter]) -> int:
    """Write every batch, in order; returns the number of documents without tokens."""
    empty = reports = 0
    for split, tokens, lengths, locations, without_tokens, unknown in batches:
        writers[split].write(tokens, lengths, locations)
        if unknown is not None:
            writers[split].unknown = (writers[split].unknown or UnknownTokens()) + unknown
        empty += without_tokens
        if sum(writer.bytes for writer in writers.values()) >= (reports + 1) * PROGRESS_BYTES:
            reports += 1
            logger.info(f"tokenized {sum(writer.documents for writer in writers.values()):,} documents")
    return empty


def encode_documents(
    tokenizer: Tokenizer, batch: DocumentBatch, dtype: np.dtype, sep: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Ids with eos after each document, document lengths and locations, and the number of documents without tokens."""
    if sep is not None:
        ids: Sequence[Any] = encode_sentences(tokenizer, batch.texts, sep)
    else:
        short = iter(tokenizer.encode_batch([text for text in batch.texts if len(text) <= LONG_TEXT]))
        ids = [next(short) if len(text) <= LONG_TEXT else _encode_long(tokenizer, text) for text in batch.texts]
    texts, sources = batch.texts, batch.locations
    without_tokens = sum(not document for document in ids)
    if without_tokens:
        has_tokens = [bool(document) for document in ids]
        ids, texts, sources = (list(compress(column, has_tokens)) for column in (ids, texts, sources))
    assert tokenizer.eos is not None
    for document in ids:
        document.append(tokenizer.eos)
    count = len(ids)
    lengths = np.fromiter(map(len, ids), np.int64, count)
    tokens = np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum()))
    locations = np.empty(count, LOCATION)
    locations["file"] = [file for file, _ in sources]
    locations["line"] = [line for _, line in sources]
    locations["bytes"] = [len(text.encode()) for text in texts]
    return tokens, lengths, locations, without_tokens


def _encode_long(tokenizer: Tokenizer, text: str) -> array:
    """The ids of a long text as an array, which takes a tenth of the memory of a list."""
    ids = array("I")
    for part, _ in tokenizer.split_long_text(text):
        ids.extend(tokenizer.encode(part))
    return ids


def count_unknown(tokenizer: Tokenizer, batch: DocumentBatch) -> UnknownTokens:
    """The number of unknown tokens in a batch, and of the bytes they stand for."""
    if not tokenizer.can_produce_unk:
        return UnknownTokens()
    tokens = size = 0
    for text in batch.texts:
        spans = tokenizer.unk_spans(text)
        tokens += len(spans)
        size += sum(len(text[begin:end].encode()) for begin, end in spans)
    return UnknownTokens(tokens, size)


def encode_sentences(tokenizer: Tokenizer, texts: Sequence[str], sep: int) -> list[list[int]]:
    """The ids of every document with sep between its sentences; the other ids are the same as without it."""
    sentences = [split_sentences(text) for text in texts]
    if tokenizer.tokenize("a")[0].startswith("▁"):  # it would prepend a space to every sentence
        return [_encode_sentences_jointly(tokenizer, parts, sep) for parts in sentences]
    encoded = iter(tokenizer.encode_batch([part for parts in sentences for part in parts]))
    rows = []
    for parts in sentences:
        row: list[int] = []
        for ids in islice(encoded, len(parts)):
            row += [sep, *ids] if row and ids else ids
        rows.append(row)
    return rows


def _encode_sentences_jointly(tokenizer: Tokenizer, parts: list[str], sep: int) -> list[int]:
    """Encode a document at once and insert sep where the tokens' first characters pass a sentence end."""
    text = "".join(parts)
    ids, begins = [], []
    for part, offset in tokenizer.split_long_text(text):
        ids.append(np.array(tokenizer.encode(part), np.int64))
        begins.append(offset + np.array([begin for begin, _ in tokenizer.offsets(part)], np.int64))
    sentence = np.searchsorted(list(accumulate(map(len, parts))), np.concatenate(begins), side="right")
    return np.insert(np.concatenate(ids), 1 + np.flatnonzero(np.diff(sentence)), sep).tolist()
