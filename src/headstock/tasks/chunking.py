"""Splits documents into chunks, at different positions in every epoch."""

import numpy as np

from headstock.rng import uniforms


class DocumentChunks:
    """Chunks of at most `size` tokens; all but the first and last of a document have full length."""

    def __init__(self, lengths: np.ndarray, size: int, *, seed: int | None, epoch: int):
        counts = -(-lengths // size)  # chunks of each document
        self.firsts = np.concatenate([[0], counts.cumsum()])  # first chunk of each document
        shift = np.zeros(len(lengths), np.int64)
        if seed is not None:  # a random offset that keeps the number of chunks
            draws = uniforms(seed, epoch, "cut", rows=np.arange(len(lengths)), count=1)[:, 0]
            shift = (draws * (counts * size - lengths + 1)).astype(np.int64)
        self.documents = np.repeat(np.arange(len(lengths)), counts)  # document of each chunk
        nth = np.arange(len(self.documents)) - self.firsts[self.documents]
        shift, whole = shift[self.documents], lengths[self.documents]
        self.begins = np.maximum(nth * size - shift, 0)
        self.stops = np.minimum((nth + 1) * size - shift, whole)
        self.lengths = self.stops - self.begins
