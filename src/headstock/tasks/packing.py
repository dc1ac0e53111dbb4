"""Packing: all documents are concatenated and cut into rows of equal length.

B rows, T positions, S the stream of all documents, each followed by its EOS token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.heads import LMHead
from headstock.rng import generator
from headstock.tasks.base import Task, bos_id


@dataclass
class PackedRows:
    """Some windows. A document is read as <bos> A B C, and its next tokens are A B C <eos>."""

    shown: np.ndarray  # (B, T) input ids, with a BOS token before each document
    wanted: np.ndarray  # (B, T) next tokens
    documents: np.ndarray  # (B, T) document id within the row; -1 at padding
    positions: np.ndarray  # (B, T) position within the part of the document in this row
    padding: np.ndarray  # (B, T) True at padding positions


class PackedWindows:
    """Windows of equal length that partition the stream. Their offset is drawn anew in every epoch."""

    def __init__(
        self, store: TokenStore, length: int, *, start: int, end: int, filler: int, seed: int | None, epoch: int
    ):
        self.store, self.length = store, length
        self.start, self.end, self.filler = start, end, filler
        self.count = max(1, -(-store.tokens // length))
        slack = self.count * length - store.tokens  # a shift within this keeps the number of windows
        self.shift = 0 if seed is None else int(generator(seed, epoch, "shift").integers(0, slack + 1))

    def __len__(self) -> int:
        return self.count

    def begin(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(B,) the stream position at which each window starts."""
        return np.maximum(np.asarray(indices, dtype=np.int64) * self.length - self.shift, 0)

    def rows(self, indices: Sequence[int] | np.ndarray) -> PackedRows:
        at = np.asarray(indices, dtype=np.int64)
        begin = self.begin(at)
        sizes = np.minimum((at + 1) * self.length - self.shift, self.store.tokens) - begin
        # position p reads S[p-1] and predicts S[p]; an EOS token is assumed before the first document
        stream = self.store.windows(begin - 1, self.length + 1).astype(np.int64)  # (B, T + 1)
        stream[begin == 0, 0] = self.end
        before, wanted = stream[:, :-1], stream[:, 1:]
        starts = before == self.end
        shown = np.where(starts, self.start, before)
        documents = starts.cumsum(1)
        place = np.arange(self.length)
        newest = np.maximum.accumulate(np.where(starts, place, 0), 1)  # start of the document at each position
        padding = place >= sizes[:, None]
        documents[padding] = -1
        shown[padding] = self.filler
        return PackedRows(shown, wanted, documents, place - newest, padding)

    def before(self, indices: Sequence[int] | np.ndarray) -> list[list[int]]:
        """The tokens before each window that belong to its first document, at most a window of them."""
        stream = self.store.windows(self.begin(indices) - 1 - self.length, self.length + 1)  # (B, T + 1)
        found = []
        for row in stream:
            ends = np.flatnonzero(row == self.end)  # the last one opens the document; at the very end, the window does
            shown = row[ends[-1] if len(ends) else 0 : -1].tolist()
            found.append([self.start, *shown[1:]] if len(ends) and shown else shown)
        return found

    def name(self, index: int) -> str:
        begin = int(self.begin([index])[0])
        last = min(begin + self.length, self.store.tokens) - 1
        first, final = self.store.document_at(begin), self.store.document_at(last)
        names = self.store.location(first)
        return names if first == final else f"{names} to {self.store.location(final)}"


class StreamTask(Task):
    """A language model trained on packed windows."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.eos is None:
            raise UserError("this tokenizer has no end mark, which a language model must learn to give")
        self.eos = tokenizer.eos
        self.bos = bos_id(tokenizer, "start")
        self.pad_id = tokenizer.pad or 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone)}

    def windows(self, data: TokenStore, length: int, *, seed: int | None, epoch: int) -> PackedWindows:
        marks = {"start": self.bos, "end": self.eos, "filler": self.pad_id}
        return PackedWindows(data, length, **marks, seed=seed, epoch=epoch)
