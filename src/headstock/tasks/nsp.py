"""Sentence pairs for next-sentence prediction: in half of them B follows A, in half B comes from another document.

B rows, T positions. Sentence boundaries in the token store decide where texts start; they are not part of the input.

A negative must not differ from a positive in anything but its content, or a model learns the difference instead. So
both kinds of B are complete sentences up to the last boundary in a chunk of a document, and the B of a negative is
about as long as the one it replaces. Where a row has no room for a complete sentence after its only boundary, both
kinds of B are truncated to the same length.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from headstock.data.token_store import TokenStore
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions
from headstock.rng import uniforms
from headstock.tasks.masking import EpochMasker, MaskingTask
from headstock.tasks.packing import DocumentChunks
from headstock.tasks.special_tokens import PAIR_SPECIAL_TOKENS

TRIES = 24  # chunks of other documents that are tried for a B of similar length
TOLERANCE = 0.1  # relative difference in length that is accepted at once

# A chunk: its tokens, the boundaries between its sentences, and whether the text after its only boundary is truncated
Chunk = tuple[np.ndarray, np.ndarray, bool]


def check_pairs(store: TokenStore, length: int) -> None:
    """Refuse a store that yields no pairs."""
    if store.sep is None:
        raise ValueError("next-sentence prediction needs a store that was built with sentences=True")
    if length < PAIR_SPECIAL_TOKENS + 2:
        raise UserError(f"train.length: {length} is too short for two texts and {PAIR_SPECIAL_TOKENS} special tokens")
    if store.documents < 2:
        text = "held-out text" if store.split == "valid" else "training text"
        raise UserError(
            f"next-sentence prediction needs two documents, but the {text} is one: half of the pairs are from "
            "different documents (change documents, valid_fraction or valid, or disable it with --no-nsp)"
        )
    if store.split == "train" and store.sentences == store.documents:
        raise UserError(
            "next-sentence prediction needs documents of two or more sentences, but each document here has one; "
            "set documents to block or file if every line is a sentence, or disable it with --no-nsp"
        )


class NextSentenceExamples:
    """Rows [CLS] A [SEP] B [SEP] with masked tokens, labelled with whether B follows A.

    A row is [CLS] A [SEP], without that label, where the text has no second sentence.
    """

    def __init__(self, task: MaskingTask, store: TokenStore, length: int, *, seed: int | None, epoch: int):
        assert store.sep is not None
        self.task, self.store, self.separator = task, store, store.sep
        self.masker = EpochMasker(task, seed=seed, epoch=epoch)
        self.size = length - PAIR_SPECIAL_TOKENS
        self.chunks = DocumentChunks(store.lengths - 1, self.size, seed=seed, epoch=epoch)  # without the EOS token
        self.lengths = self.chunks.lengths + PAIR_SPECIAL_TOKENS

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, index: int) -> str:
        return self.store.location(int(self.chunks.documents[index]))

    def batch(self, indices: Sequence[int]) -> Batch:
        draws = uniforms(*self.masker.key, "next", rows=indices, count=2 + TRIES)
        pairs = [self.pair(int(index), draw) for index, draw in zip(indices, draws, strict=True)]
        first = np.array([len(a) for a, _, _ in pairs])[:, None]  # (B, 1)
        second = np.array([len(b) for _, b, _ in pairs])[:, None]
        ends = 2 + first + np.where(second > 0, second + 1, 0)  # one past the last [SEP]
        columns = np.arange(int(ends.max()))
        padding = columns >= ends  # (B, T)
        is_text = (columns > 0) & (columns != first + 1) & (columns < ends - 1)
        inputs = np.where(padding, self.task.pad_id, np.where(is_text, 0, self.separator))
        inputs[:, 0] = self.task.bos
        inputs[is_text] = np.concatenate([text for a, b, _ in pairs for text in (a, b)])  # row-major, like `is_text`
        segments = ((columns > first + 1) & ~padding).astype(np.int64)
        tokens, labels = self.masker.mask(inputs, is_text, segments, indices)
        return Batch(
            torch.from_numpy(tokens),
            padding=torch.from_numpy(padding),
            segments=torch.from_numpy(segments),
            labels={"token": torch.from_numpy(labels), "next": torch.tensor([follows for _, _, follows in pairs])},
            label_positions={"token": find_label_positions(torch.from_numpy(labels))},
        )

    def pair(self, index: int, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """A, B (empty if there is none) and the label: whether B follows A. `draw` has 2 + TRIES numbers in [0, 1)."""
        tokens, boundaries, truncated = self.chunk(index)
        if not len(boundaries):
            return self.without_separators(tokens), tokens[:0], IGNORE_INDEX
        boundary = boundaries[int(draw[0] * len(boundaries))]
        a, b = self.without_separators(tokens[:boundary]), self.without_separators(tokens[boundary:])
        if draw[1] < 0.5:
            return a, b, 1
        candidates = (self.chunk(other) for other in self.other_chunks(int(self.chunks.documents[index]), draw[2:]))
        limit = self.size - len(a)
        other = truncated_match(candidates, len(b)) if truncated else best_match(candidates, len(b), limit=limit)
        return (a, b, IGNORE_INDEX) if other is None else (a, self.without_separators(other), 0)

    def other_chunks(self, document: int, draws: np.ndarray) -> Iterator[int]:
        """Indices of chunks of other documents."""
        start, end = int(self.chunks.firsts[document]), int(self.chunks.firsts[document + 1])
        for draw in draws:
            index = int(draw * (len(self.chunks.documents) - (end - start)))
            yield index + (end - start if index >= start else 0)  # skip the document's own chunks

    def chunk(self, index: int) -> Chunk:
        """A sentence that is truncated at the end of the chunk is left out where another boundary precedes it."""
        document = int(self.chunks.documents[index])
        start, end = int(self.chunks.starts[index]), int(self.chunks.ends[index])
        truncated = index + 1 < self.chunks.firsts[document + 1]  # the document continues
        tokens = self.read(document, start, end + truncated)
        boundaries = np.flatnonzero(tokens == self.separator)
        if truncated:
            truncated = bool(tokens[-1] != self.separator)
            tokens = tokens[:-1]
        boundaries = boundaries[(boundaries > 0) & (boundaries < len(tokens) - 1)]
        if truncated and len(boundaries) > 1:
            return tokens[: boundaries[-1]], boundaries[:-1], False
        return tokens, boundaries, truncated

    def without_separators(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[tokens != self.separator]

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        first, last = int(self.store.offsets[document]), int(self.store.offsets[document + 1]) - 1
        return self.store.slice(first + start, min(first + end, last))


def best_match(candidates: Iterable[Chunk], target: int, *, limit: int) -> np.ndarray | None:
    """Complete sentences up to the end of a candidate, about `target` tokens and at most `limit`; None if none fits."""
    best, smallest = None, 0
    for tokens, boundaries, truncated in candidates:
        lengths = len(tokens) - boundaries - np.arange(len(boundaries), 0, -1)  # of the text after each boundary
        fitting = boundaries[lengths <= limit]
        if truncated or not len(fitting):
            continue
        distances = np.abs(lengths[-len(fitting) :] - target)
        closest = int(distances.argmin())
        if best is None or distances[closest] < smallest:
            best, smallest = tokens[fitting[closest] :], int(distances[closest])
        if smallest <= TOLERANCE * target:
            break
    return best


def truncated_match(candidates: Iterable[Chunk], length: int) -> np.ndarray | None:
    """The first `length` tokens of a longer sentence; None if no candidate has one."""
    for tokens, boundaries, _ in candidates:
        starts, ends = boundaries + 1, np.append(boundaries, len(tokens))[1:]
        if len(longer := starts[ends - starts > length]):
            return tokens[longer[0] : longer[0] + length]
    return None
