"""Cuts each document into pieces of at most so many tokens, at other places in every pass."""

import numpy as np

from headstock.rng import uniforms


class DocumentChunks:
    """Pieces of documents, one after the other; all but the first and the last of a document are as long as may be."""

    def __init__(self, lengths: np.ndarray, size: int, *, seed: int | None, epoch: int):
        counts = -(-lengths // size)  # pieces of each document
        self.firsts = np.concatenate([[0], counts.cumsum()])  # each document's first piece
        shift = np.zeros(len(lengths), np.int64)
        if seed is not None:  # long documents are cut at other places in every pass, into as many pieces
            draws = uniforms(seed, epoch, "cut", rows=np.arange(len(lengths)), count=1)[:, 0]
            shift = (draws * (counts * size - lengths + 1)).astype(np.int64)
        self.documents = np.repeat(np.arange(len(lengths)), counts)  # which one each piece is of
        nth = np.arange(len(self.documents)) - self.firsts[self.documents]
        shift, whole = shift[self.documents], lengths[self.documents]
        self.begins = np.maximum(nth * size - shift, 0)
        self.stops = np.minimum((nth + 1) * size - shift, whole)
        self.lengths = self.stops - self.begins
