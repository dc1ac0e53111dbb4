"""Sentence pairs for next-sentence prediction: in half of them B follows A, in half B comes from another document.

B rows, T positions. Sentence boundaries in the token store decide where texts start; they are not part of the input.

A negative must not differ from a positive in anything but its content, or a model learns the difference instead. So
both kinds of B are whole sentences up to the last boundary in a piece of a document, and the B of a negative is about
as long as the one it replaces. Where a row has no room for a whole sentence behind its only boundary, both kinds of B
are cut off at the same length.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstock.data.token_store import TokenStore
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.rng import uniforms
from headstock.tasks.chunking import DocumentChunks

MARKS = 3  # the first token, and a separator after each text
TRIES = 24  # chunks of other documents that are tried for a B of similar length
TOLERANCE = 0.1  # relative difference in length that is accepted at once

SentencePiece = tuple[np.ndarray, np.ndarray, bool]  # tokens, boundaries between sentences, cut off behind the only one


@dataclass
class PairRows:
    """[CLS] A [SEP] B [SEP], or [CLS] A [SEP] where the text has no second sentence."""

    shown: np.ndarray  # (B, T)
    text: np.ndarray  # (B, T) True at tokens of A and B
    segments: np.ndarray  # (B, T) 0 up to and including the first [SEP], then 1
    padding: np.ndarray  # (B, T) True where there is no token
    follows: np.ndarray  # (B,) 1 where B follows A, 0 where it does not, IGNORE_INDEX without a B


def check_pairs(store: TokenStore, length: int) -> None:
    """Refuse a store that yields no pairs."""
    if store.sep is None:
        raise ValueError("next-sentence prediction needs a store that was built with sentences=True")
    if length < MARKS + 2:
        raise UserError(f"train.length: {length} is too short for two texts and their {MARKS} marks")
    side = "held-out text" if store.split == "valid" else "text to train on"
    if store.documents < 2:
        raise UserError(
            f"next-sentence prediction needs two documents, but the {side} is one: half of its pairs are of different "
            "documents (set documents, valid_fraction or valid otherwise, or leave it out with --no-nsp)"
        )
    if store.split == "train" and store.sentences == store.documents:
        raise UserError(
            "next-sentence prediction needs documents of two sentences or more, and here every one has a single one; "
            "set documents to block or file if sentences stand on lines of their own, or leave it out with --no-nsp"
        )


class NextSentencePairs:
    """Sentence pairs from chunks of documents."""

    def __init__(self, store: TokenStore, length: int, *, seed: int | None, epoch: int):
        assert store.sep is not None
        self.store, self.size, self.separator = store, length - MARKS, store.sep
        cuts = DocumentChunks(store.lengths - 1, self.size, seed=seed, epoch=epoch)  # without the end mark
        self.firsts, self.documents, self.begins, self.stops = cuts.firsts, cuts.documents, cuts.begins, cuts.stops
        self.lengths = cuts.lengths + MARKS

    def name(self, index: int) -> str:
        return self.store.location(int(self.documents[index]))

    def rows(self, indices: Sequence[int], *, key: tuple[int | str, ...], opening: int, filler: int) -> PairRows:
        draws = uniforms(*key, "next", rows=indices, count=2 + TRIES)
        pairs = [self.pair(int(index), draw) for index, draw in zip(indices, draws, strict=True)]
        first = np.array([len(a) for a, _, _ in pairs])[:, None]
        second = np.array([len(b) for _, b, _ in pairs])[:, None]
        ends = 2 + first + np.where(second > 0, second + 1, 0)  # (B, 1) one past the last mark
        place = np.arange(int(ends.max()))
        padding = place >= ends
        text = (place > 0) & (place != first + 1) & (place < ends - 1)
        shown = np.where(padding, filler, np.where(text, 0, self.separator))
        shown[:, 0] = opening
        shown[text] = np.concatenate([part for a, b, _ in pairs for part in (a, b)])  # row by row, as `text` is read
        segments = ((place > first + 1) & ~padding).astype(np.int64)
        return PairRows(shown, text, segments, padding, np.array([follows for _, _, follows in pairs]))

    def pair(self, index: int, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """A, B (empty if there is none) and whether B follows A, by 2 + TRIES numbers from [0, 1)."""
        piece, breaks, cut = self.sentences(index)
        if not len(breaks):
            return self.plain(piece), piece[:0], IGNORE_INDEX
        at = breaks[int(draw[0] * len(breaks))]
        a, b = self.plain(piece[:at]), self.plain(piece[at:])
        if draw[1] < 0.5:
            return a, b, 1
        candidates = (self.sentences(other) for other in self.elsewhere(int(self.documents[index]), draw[2:]))
        other = cut_short(candidates, len(b)) if cut else best_match(candidates, len(b), limit=self.size - len(a))
        return (a, b, IGNORE_INDEX) if other is None else (a, self.plain(other), 0)

    def elsewhere(self, document: int, draws: np.ndarray) -> Iterator[int]:
        """Chunks of other documents."""
        begin, stop = int(self.firsts[document]), int(self.firsts[document + 1])
        for draw in draws:
            index = int(draw * (len(self.documents) - (stop - begin)))
            yield index + (stop - begin if index >= begin else 0)  # skip the document's own pieces

    def sentences(self, index: int) -> SentencePiece:
        """A piece, where in it one sentence ends before another, and whether all behind the only boundary is cut off.

        A sentence that is cut off at the end of the piece is left out where another boundary stands before it.
        """
        document, begin, stop = int(self.documents[index]), int(self.begins[index]), int(self.stops[index])
        goes_on = index + 1 < self.firsts[document + 1]
        piece = self.read(document, begin, stop + goes_on)
        marks = np.flatnonzero(piece == self.separator)
        if goes_on:
            goes_on = bool(piece[-1] != self.separator)
            piece = piece[:-1]
        marks = marks[(marks > 0) & (marks < len(piece) - 1)]
        if goes_on and len(marks) > 1:
            return piece[: marks[-1]], marks[:-1], False
        return piece, marks, goes_on

    def plain(self, piece: np.ndarray) -> np.ndarray:
        return piece[piece != self.separator]

    def read(self, document: int, begin: int, stop: int) -> np.ndarray:
        first, end = int(self.store.offsets[document]), int(self.store.offsets[document + 1]) - 1
        return self.store.slice(first + begin, min(first + stop, end))


def best_match(candidates: Iterable[SentencePiece], target: int, *, limit: int) -> np.ndarray | None:
    """Whole sentences up to the end of a candidate, about `target` tokens and at most `limit`; None if none fits."""
    best, nearest = None, 0
    for piece, breaks, cut in candidates:
        lengths = len(piece) - breaks - np.arange(len(breaks), 0, -1)  # of the text behind each break, without marks
        fits = breaks[lengths <= limit]
        if cut or not len(fits):
            continue
        distances = np.abs(lengths[-len(fits) :] - target)
        closest = int(distances.argmin())
        if best is None or distances[closest] < nearest:
            best, nearest = piece[fits[closest] :], int(distances[closest])
        if nearest <= TOLERANCE * target:
            break
    return best


def cut_short(candidates: Iterable[SentencePiece], length: int) -> np.ndarray | None:
    """The first `length` tokens of a longer sentence; None if no candidate has one."""
    for piece, breaks, _ in candidates:
        begins, ends = breaks + 1, np.append(breaks, len(piece))[1:]
        if len(longer := begins[ends - begins > length]):
            return piece[longer[0] : longer[0] + length]
    return None
