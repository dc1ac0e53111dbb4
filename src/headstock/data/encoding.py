"""From batches of documents to their ids, each closed by its end mark, on demand with a mark between its sentences."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from headstock.data.sentences import split_sentences
from headstock.data.token_shards import PLACE, UnknownTokens
from headstock.data.tokenizer import LONG_TEXT, Tokenizer


@dataclass
class DocumentBatch:
    """Documents on their way to one side."""

    role: int
    texts: list[str] = field(default_factory=list)
    locations: list[tuple[int, int]] = field(default_factory=list)  # file and line
    characters: int = 0

    def add(self, text: str, file: int, line: int) -> None:
        self.texts.append(text)
        self.locations.append((file, line))
        self.characters += len(text)


def encode_documents(
    tokenizer: Tokenizer, batch: DocumentBatch, dtype: np.dtype, separator: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One batch as ids with end marks, their lengths and places, and how many documents were left out as empty."""
    if separator is not None:
        ids: Sequence[Any] = encode_sentences(tokenizer, batch.texts, separator)
    else:
        short = iter(tokenizer.encode_batch([text for text in batch.texts if len(text) <= LONG_TEXT]))
        ids = [next(short) if len(text) <= LONG_TEXT else _compact(tokenizer, text) for text in batch.texts]
    texts, spots = batch.texts, batch.locations
    without = sum(not document for document in ids)
    if without:
        kept = [i for i, document in enumerate(ids) if document]
        ids, texts, spots = [ids[i] for i in kept], [texts[i] for i in kept], [spots[i] for i in kept]
    assert tokenizer.eos is not None
    for document in ids:
        document.append(tokenizer.eos)
    count = len(ids)
    lengths = np.fromiter(map(len, ids), np.int64, count)
    tokens = np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum()))
    places = np.empty(count, PLACE)
    places["file"] = [file for file, _ in spots]
    places["line"] = [line for _, line in spots]
    places["bytes"] = [len(text.encode()) for text in texts]
    return tokens, lengths, places, without


def _compact(tokenizer: Tokenizer, text: str) -> array:
    """The ids of a long text; as a list they would take ten times the memory."""
    ids = array("I")
    for part, _ in tokenizer.split_long_text(text):
        ids.extend(tokenizer.encode(part))
    return ids


def count_unknown(tokenizer: Tokenizer, batch: DocumentBatch) -> UnknownTokens:
    """How many unknown tokens the texts of a batch have, and how many bytes they hide."""
    if not tokenizer.can_produce_unk:
        return UnknownTokens()
    tokens = size = 0
    for text in batch.texts:
        spans = tokenizer.unk_spans(text)
        tokens += len(spans)
        size += sum(len(text[begin:end].encode()) for begin, end in spans)
    return UnknownTokens(tokens, size)


def encode_sentences(tokenizer: Tokenizer, texts: Sequence[str], separator: int) -> list[list[int]]:
    """Every document's ids with a mark between its sentences, and otherwise as they are without the marks."""
    sentences = [split_sentences(text) for text in texts]
    if tokenizer.tokenize("a")[0].startswith("▁"):  # it begins every text with a space, and would each sentence
        return [_marked_whole(tokenizer, parts, separator) for parts in sentences]
    encoded = iter(tokenizer.encode_batch([part for parts in sentences for part in parts]))
    rows = []
    for parts in sentences:
        row: list[int] = []
        for ids in islice(encoded, len(parts)):
            row += [separator, *ids] if row and ids else ids
        rows.append(row)
    return rows


def _marked_whole(tokenizer: Tokenizer, parts: list[str], separator: int) -> list[int]:
    """The same where sentences must be cut together: by which sentence each token's first character is in."""
    text = "".join(parts)
    ids, begins = [], []
    for part, at in tokenizer.split_long_text(text):
        ids.append(np.array(tokenizer.encode(part), np.int64))
        begins.append(at + np.array([begin for begin, _ in tokenizer.offsets(part)], np.int64))
    sentence = np.searchsorted(list(accumulate(map(len, parts))), np.concatenate(begins), side="right")
    return np.insert(np.concatenate(ids), 1 + np.flatnonzero(np.diff(sentence)), separator).tolist()
