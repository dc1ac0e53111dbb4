"""Splits a corpus by document, so that no validation text was trained on, and keeps both sides as tokens on disk."""

import hashlib
import json
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock.data.corpus import Corpus
from headstock.data.encoding import DocumentBatch, count_unknown, encode_documents
from headstock.data.token_shards import (
    FORMAT,
    INDEX,
    SHARD_TOKENS,
    SplitWriter,
    TokenStore,
    UnknownTokens,
    digest_of,
    read_index,
    verify_store,
)
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError, WorkError
from headstock.io import atomic_folder, cache_folder, write_json

DROP, TRAIN, VALID, CUT = range(4)  # what becomes of a document; CUT: its tail is held out
SIDES = {TRAIN: "train", VALID: "valid"}
CUT_CHARACTERS = 1000  # a single document shorter than this is too small to hold anything out
BATCH_CHARACTERS = 1 << 19  # larger ones only take memory: their encodings no longer fit the caches
ENCODERS = 2  # while one hands its ids over to Python, the other keeps the cores busy
PROGRESS_BYTES = 1 << 26


@dataclass
class SplitStores:
    train: TokenStore
    valid: TokenStore
    summary: dict[str, Any]
    folder: Path
    reused: bool = False


@dataclass
class SplitPlan:
    """What becomes of each document of a corpus, in the order they are read."""

    corpus: Corpus
    roles: np.ndarray  # uint8: DROP, TRAIN, VALID or CUT
    duplicates: int = 0  # dropped as copies of earlier documents
    in_validation: int = 0  # dropped from training as copies of validation documents


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
    say: Callable[[str], None] = lambda text: None,
    shard_tokens: int = SHARD_TOKENS,
) -> SplitStores:
    """Tokens of a corpus, for training and for validation, made once and then reused.

    Without a `valid` corpus, validation is the `valid_fraction` of documents whose keyed hash is smallest: it depends
    on what the documents say and on the seed, never on their order. Exact duplicates are dropped (or, when they are
    kept, all copies go to the same side); with a `valid` corpus, its documents are dropped from training. With
    `sentences`, the tokenizer's separator stands between the sentences of a document.
    """
    if not 0 < valid_fraction < 1:
        raise UserError(f"valid_fraction: must be between 0 and 1, not {valid_fraction}")
    split = [valid.fingerprint()] if valid else [valid_fraction, seed]
    what = [corpus.fingerprint(), tokenizer.fingerprint, tokenizer.eos, deduplicate, *split, *_apart(sentences)]

    def make(folder: Path) -> dict[str, Any]:
        say(corpus.describe())
        begun = time.perf_counter()
        plans = _plans(corpus, valid, valid_fraction, deduplicate, seed, say)
        say(f"surveyed the documents in {time.perf_counter() - begun:.1f} s")
        return _write(folder, plans, tokenizer, (TRAIN, VALID), valid_fraction, say, shard_tokens, sentences)

    folder, reused = _made(what, make, tokenizer, cache, say)
    stores = _opened(folder)  # it was checked, or has just been written
    if reused:
        names = corpus.names() + (valid.names() if valid else [])  # the same text may lie elsewhere now
        stores.train.sources = stores.valid.sources = names
        say(f"reusing the tokens of an earlier run: {_counts(stores.summary)}")
    else:
        seconds, speed = stores.summary["seconds"], stores.summary["megabytes_per_second"]
        say(f"{_counts(stores.summary)} ({seconds:.1f} s, {speed:.1f} MB/s)")
    stores.reused = reused
    return stores


def build_store(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    sentences: bool = False,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> TokenStore:
    """Tokens of all documents of a corpus, copies too: text to measure a model on."""

    def make(folder: Path) -> dict[str, Any]:
        everything = SplitPlan(corpus, np.full(len(survey(corpus)[0]), VALID, np.uint8))
        return _write(folder, [everything], tokenizer, (VALID,), 0.0, say, SHARD_TOKENS, sentences)

    what = [corpus.fingerprint(), tokenizer.fingerprint, tokenizer.eos, "all of it", *_apart(sentences)]
    return TokenStore(_made(what, make, tokenizer, cache, say)[0], "valid")


def _apart(sentences: bool) -> list[str]:
    """What marks between sentences add to a store's fingerprint: nothing where there are none, as it always was."""
    return ["sentences"] if sentences else []


def _made(
    what: list[Any],
    make: Callable[[Path], dict[str, Any]],
    tokenizer: Tokenizer,
    cache: Path | None,
    say: Callable[[str], None],
) -> tuple[Path, bool]:
    """The folder that holds `what`, made whole now or found whole from an earlier time, and which of the two."""
    if tokenizer.eos is None:
        raise UserError("this tokenizer has no end mark, which must stand between documents")
    fingerprint = hashlib.sha256(json.dumps([FORMAT, *what]).encode()).hexdigest()
    folder = (cache or cache_folder()) / "stores" / fingerprint
    if (folder / INDEX).exists():
        try:
            index = read_index(folder)
            if {"files", "digest"} <= index.keys():
                verify_store(folder)
                return folder, True
            say(f"{folder}: a token store of an earlier version, which cannot be checked: building it anew")
        except UserError as wrong:
            say(f"{wrong}: building it anew")
    try:
        with atomic_folder(folder) as beside:
            begun = time.perf_counter()
            index = make(beside)
            index["summary"] |= _speed(index["summary"], time.perf_counter() - begun)
            index = {"format": FORMAT, "fingerprint": fingerprint, **index}
            write_json(beside / INDEX, index | {"digest": digest_of(index)})
    except OSError as wrong:
        if not (folder / INDEX).exists():  # another process may have finished the same store first
            raise WorkError(f"{folder}: the token store could not be written ({wrong.strerror or wrong})") from None
    return folder, False


def open_split_stores(folder: Path) -> SplitStores:
    """Stores that were built earlier."""
    verify_store(folder)
    return _opened(folder)


def _opened(folder: Path) -> SplitStores:
    index = read_index(folder)
    return SplitStores(TokenStore(folder, "train"), TokenStore(folder, "valid"), index["summary"], folder)


def _write(
    folder: Path,
    plans: list[SplitPlan],
    tokenizer: Tokenizer,
    roles: Sequence[int],
    valid_fraction: float,
    say: Callable[[str], None],
    shard_tokens: int,
    sentences: bool,
) -> dict[str, Any]:
    """The sides that are asked for, as files in `folder`; returns what the index says of them."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    separator = tokenizer.sep if sentences else None
    if sentences and separator is None:
        raise UserError("this tokenizer has no [SEP], which must stand between sentences")
    sides = {role: SplitWriter(folder, SIDES[role], dtype, shard_tokens, separator=separator) for role in roles}
    sources: list[str] = []
    empty = 0
    try:
        for plan in plans:
            empty += _tokenize(_batches(plan, valid_fraction, len(sources)), tokenizer, sides, say)
            sources += plan.corpus.names()
    finally:
        for side in sides.values():
            side.close()
    for role, side in sides.items():
        if not side.documents:
            raise UserError(f"no tokens for {'training' if role == TRAIN else 'validation'}: too little text")
    index = {"tokenizer": tokenizer.fingerprint, "vocabulary": tokenizer.vocabulary, "end": tokenizer.eos}
    index |= {} if separator is None else {"separator": separator}
    index |= {"dtype": dtype.str, "sources": sources, "empty": empty, "sides": [side.side for side in sides.values()]}
    index |= {side.side: side.counts() for side in sides.values()}
    index["files"] = {name: found for side in sides.values() for name, found in side.checksums().items()}
    return index | {"summary": _summary(index, plans)}


def _summary(index: dict[str, Any], plans: list[SplitPlan]) -> dict[str, Any]:
    summary: dict[str, Any] = {"documents": len(plans[0].roles), "duplicates": plans[0].duplicates}
    summary |= {"in_validation": plans[0].in_validation, "empty": index["empty"]}
    for side in index["sides"]:
        summary |= {f"{side}_{name}": index[side][name] for name in ("documents", "tokens", "bytes")}
    return summary


def _speed(summary: dict[str, Any], seconds: float) -> dict[str, float]:
    size = summary.get("train_bytes", 0) + summary["valid_bytes"]
    return {"seconds": round(seconds, 3), "megabytes_per_second": round(size / seconds / 1e6, 3)}


def _counts(summary: dict[str, Any]) -> str:
    reasons = {"duplicates": "duplicates", "in_validation": "also in validation", "empty": "without tokens"}
    dropped = ", ".join(f"{summary[key]:,} {words}" for key, words in reasons.items() if summary[key])
    train, valid = (
        f"{side}: {summary[f'{key}_documents']:,} documents of {summary[f'{key}_tokens']:,} tokens"
        for key, side in (("train", "training"), ("valid", "validation"))
    )
    return f"{train}; {valid}" + (f"; dropped {dropped}" if dropped else "")


# Which document goes where


def survey(corpus: Corpus) -> tuple[np.ndarray, int]:
    """A 64-bit hash of every document, in order, and the length of the longest document."""
    hashes, longest = array("Q"), 0
    for chunk in corpus.chunks():
        hashes.frombytes(b"".join([hashlib.blake2b(text.encode(), digest_size=8).digest() for text in chunk.texts]))
        longest = max(longest, max(map(len, chunk.texts)))
    return np.frombuffer(hashes, np.uint64), longest


def first_copies(hashes: np.ndarray) -> np.ndarray:
    """True for each document that no earlier one repeats."""
    order = np.argsort(hashes, kind="stable")
    in_order = hashes[order]
    new = np.ones(len(hashes), dtype=bool)
    new[1:] = in_order[1:] != in_order[:-1]
    first = np.zeros(len(hashes), dtype=bool)
    first[order[new]] = True
    return first


def keyed(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Another hash of each document for every seed (the mixing steps of splitmix64)."""
    key = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), np.uint64)
    mixed = hashes ^ key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _plans(
    corpus: Corpus,
    valid: Corpus | None,
    fraction: float,
    deduplicate: bool,
    seed: int,
    say: Callable[[str], None],
) -> list[SplitPlan]:
    hashes, longest = survey(corpus)
    if valid:
        valid_hashes, _ = survey(valid)
        plan = plan_apart(corpus, hashes, valid_hashes, deduplicate)
        return [plan, SplitPlan(valid, np.full(len(valid_hashes), VALID, np.uint8))]
    plan = plan_split(corpus, hashes, fraction, deduplicate, seed)
    if CUT in plan.roles:
        if longest < CUT_CHARACTERS:
            raise UserError(
                f"the corpus is too small to split: one document of {longest} characters "
                f"(wanted two documents, or one of at least {CUT_CHARACTERS} characters, or a validation corpus)"
            )
        say(f"the corpus is a single document: about the last {fraction:.0%} of it is held out for validation")
    return [plan]


def plan_split(corpus: Corpus, hashes: np.ndarray, fraction: float, deduplicate: bool, seed: int) -> SplitPlan:
    """Hold out the documents with the smallest keyed hashes."""
    first = first_copies(hashes)
    unique = int(first.sum())
    if unique == 1:  # copies are dropped in any case: they would train on what the first holds out
        return SplitPlan(corpus, np.where(first, np.uint8(CUT), np.uint8(DROP)), duplicates=len(hashes) - 1)
    count = min(max(1, round(fraction * unique)), unique - 1)
    rank = keyed(hashes, seed)
    threshold = np.partition(rank[first], count - 1)[count - 1]
    roles = np.where(rank <= threshold, np.uint8(VALID), np.uint8(TRAIN))  # all copies, when kept, go to one side
    if deduplicate:
        roles[~first] = DROP
    return SplitPlan(corpus, roles, duplicates=int((roles == DROP).sum()))


def plan_apart(corpus: Corpus, hashes: np.ndarray, valid_hashes: np.ndarray, deduplicate: bool) -> SplitPlan:
    """Train on what is not in the validation corpus."""
    roles = np.full(len(hashes), TRAIN, np.uint8)
    if deduplicate:
        roles[~first_copies(hashes)] = DROP
    duplicates = int((roles == DROP).sum())
    roles[np.isin(hashes, valid_hashes)] = DROP
    if TRAIN not in roles:
        raise UserError("every training document is also in the validation corpus")
    return SplitPlan(corpus, roles, duplicates, int((roles == DROP).sum()) - duplicates)


# From documents to tokens


def _batches(plan: SplitPlan, fraction: float, first_file: int) -> Iterator[DocumentBatch]:
    """The documents that are kept, in batches for one side each."""
    under_way = {role: DocumentBatch(role) for role in (TRAIN, VALID)}
    seen = 0
    for chunk in plan.corpus.chunks():
        roles = plan.roles[seen : seen + len(chunk.texts)].tolist()
        seen += len(chunk.texts)
        file = first_file + chunk.file
        for text, line, role in zip(chunk.texts, chunk.lines, roles, strict=False):
            if role == DROP:
                continue
            if role == CUT:
                cut = tail_start(text, fraction)
                under_way[VALID].add(text[cut:].lstrip(), file, line + text.count("\n", 0, cut))
                text, role = text[:cut].rstrip(), TRAIN
            batch = under_way[role]
            batch.add(text, file, line)
            if batch.characters >= BATCH_CHARACTERS:
                yield batch
                under_way[role] = DocumentBatch(role)
    if seen != len(plan.roles):
        raise WorkError(f"{', '.join(plan.corpus.paths)}: changed while it was being read")
    yield from (batch for batch in under_way.values() if batch.texts)


def tail_start(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins: after a line or, failing that, a word."""
    target = min(max(1, int(len(text) * (1 - fraction))), len(text) - 1)
    earliest = target - (len(text) - target)  # a cut this early still holds out at most twice the fraction
    for boundary in ("\n", " "):
        at = text.rfind(boundary, max(1, earliest), target)
        if at > 0:
            return at + 1
    return target


def _tokenize(
    batches: Iterator[DocumentBatch], tokenizer: Tokenizer, sides: dict[int, SplitWriter], say: Callable[[str], None]
) -> int:
    """Encode and write every batch, in order; returns how many documents gave no tokens."""
    under_way: deque[tuple[int, Future, Future | None]] = deque()
    empty = said = 0

    def finish() -> None:
        nonlocal empty, said
        role, result, unknown = under_way.popleft()
        tokens, lengths, places, without = result.result()
        sides[role].write(tokens, lengths, places)
        if unknown is not None:
            sides[role].unknown = (sides[role].unknown or UnknownTokens()) + unknown.result()
        empty += without
        if sum(side.bytes for side in sides.values()) >= (said + 1) * PROGRESS_BYTES:
            said += 1
            say(f"tokenized {sum(side.documents for side in sides.values()):,} documents")

    side = next(iter(sides.values()))
    with ThreadPoolExecutor(ENCODERS) as encoders:
        for batch in batches:
            encoded = encoders.submit(encode_documents, tokenizer, batch, side.dtype, side.separator)
            # only held-out text is measured, and looking behind unknown tokens is slow
            unknown = encoders.submit(count_unknown, tokenizer, batch) if batch.role == VALID else None
            under_way.append((batch.role, encoded, unknown))
            if len(under_way) > ENCODERS:
                finish()
        while under_way:
            finish()
    return empty
