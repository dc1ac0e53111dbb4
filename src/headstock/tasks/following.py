"""Two texts a row, half of which follow each other and half of which come from different documents.

B rows, T places in a row. The store's sentences are marked apart; the marks choose where texts begin and are not shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstock.errors import UserError
from headstock.model.batch import IGNORE
from headstock.randomness import uniforms
from headstock.tasks.cuts import Cuts
from headstock.text.store import Store

MARKS = 3  # the opening, one after each text


@dataclass
class PairRows:
    """[CLS] A [SEP] B [SEP], or [CLS] A [SEP] where the text has no second sentence."""

    shown: np.ndarray  # (B, T)
    text: np.ndarray  # (B, T) True at tokens of A and B
    segments: np.ndarray  # (B, T) 0 up to and with the first [SEP], then 1
    padding: np.ndarray  # (B, T) True where there is no token
    follows: np.ndarray  # (B,) 1 where B follows A, 0 where it is from elsewhere, IGNORE where there is none


def check_pairs(store: Store, length: int) -> None:
    """Refuse text from which no pairs can be made."""
    if store.separator is None:
        raise ValueError("next-sentence prediction needs a store that was built with sentences=True")
    if length < MARKS + 2:
        raise UserError(f"train.length: {length} is too short for two texts and their {MARKS} marks")
    side = "held-out text" if store.side == "valid" else "text to train on"
    if store.documents < 2:
        raise UserError(
            f"next-sentence prediction needs two documents, but the {side} is one: half of its pairs are of different "
            "documents (set documents, valid_fraction or valid otherwise, or leave it out with --no-nsp)"
        )
    if store.side == "train" and store.sentences == store.documents:
        raise UserError(
            "next-sentence prediction needs documents of two sentences or more, and here every one has a single one; "
            "set documents to block or file if sentences stand on lines of their own, or leave it out with --no-nsp"
        )


class Following:
    """Pieces of documents, each of at most a row less its marks; example i of a pass is the same whoever asks."""

    def __init__(self, store: Store, length: int, *, seed: int | None, epoch: int):
        assert store.separator is not None
        self.store, self.size, self.separator = store, length - MARKS, store.separator
        cuts = Cuts(store.lengths - 1, self.size, seed=seed, epoch=epoch)  # without the end mark
        self.firsts, self.documents, self.begins, self.stops = cuts.firsts, cuts.documents, cuts.begins, cuts.stops
        self.lengths = cuts.lengths + MARKS

    def name(self, index: int) -> str:
        return self.store.place(int(self.documents[index]))

    def rows(self, indices: Sequence[int], *, key: tuple[int | str, ...], opening: int, filler: int) -> PairRows:
        draws = uniforms(*key, "next", rows=indices, count=4)
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
        """A, B (empty if there is none) and whether B follows A, by four numbers from [0, 1)."""
        document = int(self.documents[index])
        piece = self.read(document, int(self.begins[index]), int(self.stops[index]))
        breaks = self.breaks(piece)
        if not len(breaks):
            return self.plain(piece), piece[:0], IGNORE
        cut = breaks[int(draw[0] * len(breaks))]
        a, b = self.plain(piece[:cut]), self.plain(piece[cut:])
        if draw[1] < 0.5:
            return a, b, 1
        return a, self.elsewhere(document, len(b), draw[2:]), 0

    def elsewhere(self, document: int, most: int, draw: np.ndarray) -> np.ndarray:
        """Up to `most` tokens of another document, from the beginning of one of its sentences."""
        begin, stop = int(self.firsts[document]), int(self.firsts[document + 1])
        index = int(draw[0] * (len(self.documents) - (stop - begin)))
        index += stop - begin if index >= begin else 0  # over the document's own pieces
        other, at = int(self.documents[index]), int(self.begins[index])
        starts = at + self.breaks(self.read(other, at, int(self.stops[index]))) + 1
        if at == 0 or not len(starts):  # a document begins with a sentence
            starts = np.concatenate([[0], starts])
        chosen = int(starts[int(draw[1] * len(starts))])
        # no sentence is empty, so that at most every second token is a mark
        return self.plain(self.read(other, chosen, chosen + 2 * most))[:most]

    def breaks(self, piece: np.ndarray) -> np.ndarray:
        """Where the marks are that have text on both sides."""
        marks = np.flatnonzero(piece == self.separator)
        return marks[(marks > 0) & (marks < len(piece) - 1)]

    def plain(self, piece: np.ndarray) -> np.ndarray:
        return piece[piece != self.separator]

    def read(self, document: int, begin: int, stop: int) -> np.ndarray:
        first, end = int(self.store.offsets[document]), int(self.store.offsets[document + 1]) - 1
        return self.store.stretch(first + begin, min(first + stop, end))
