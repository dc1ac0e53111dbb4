"""Cuts a token store into rows: packed windows over all documents, or chunks of single documents.

B rows, T positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import LMHead
from headstock.rng import generator, uniforms
from headstock.tasks.base import Task
from headstock.tasks.special_tokens import bos_id


@dataclass
class PackedRows:
    """Some windows. A document is read as <bos> A B C, and its next tokens are A B C <eos>."""

    tokens: np.ndarray  # (B, T) input ids, with a BOS token before each document
    next_tokens: np.ndarray  # (B, T) IGNORE_INDEX at padding
    document_ids: np.ndarray  # (B, T) numbered within the row; -1 at padding
    positions: np.ndarray  # (B, T) position within the part of the document in this row
    padding: np.ndarray  # (B, T) True at padding positions

    def batch(self, tokens: np.ndarray, labels: Mapping[str, np.ndarray], **fields: Any) -> Batch:
        """A batch of these rows with other input ids."""
        return Batch(
            torch.from_numpy(tokens),
            document_ids=torch.from_numpy(self.document_ids),
            positions=torch.from_numpy(self.positions),
            labels={head: torch.from_numpy(values) for head, values in labels.items()},
            **fields,
        )


class PackedWindows:
    """Windows of equal length that partition the stream of all documents, each followed by its EOS token.

    Their offset is drawn anew in every epoch.
    """

    def __init__(
        self, store: TokenStore, length: int, *, bos: int, eos: int, filler: int, seed: int | None, epoch: int
    ):
        self.store, self.length = store, length
        self.bos, self.eos, self.filler = bos, eos, filler
        self.count = max(1, -(-store.tokens // length))
        slack = self.count * length - store.tokens  # a shift within this keeps the number of windows
        self.shift = 0 if seed is None else int(generator(seed, epoch, "shift").integers(0, slack + 1))

    def __len__(self) -> int:
        return self.count

    def starts(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(B,) the stream position at which each window starts."""
        return np.maximum(np.asarray(indices, dtype=np.int64) * self.length - self.shift, 0)

    def rows(self, indices: Sequence[int] | np.ndarray) -> PackedRows:
        starts = self.starts(indices)
        ends = (np.asarray(indices, dtype=np.int64) + 1) * self.length - self.shift
        sizes = np.minimum(ends, self.store.tokens) - starts
        # position p reads token p - 1 of the stream and predicts token p; an EOS token precedes the first document
        stream = self.store.windows(starts - 1, self.length + 1).astype(np.int64)  # (B, T + 1)
        stream[starts == 0, 0] = self.eos
        is_start = stream[:, :-1] == self.eos  # of a document
        columns = np.arange(self.length)
        padding = columns >= sizes[:, None]
        document_start = np.maximum.accumulate(np.where(is_start, columns, 0), 1)
        return PackedRows(
            tokens=np.where(padding, self.filler, np.where(is_start, self.bos, stream[:, :-1])),
            next_tokens=np.where(padding, IGNORE_INDEX, stream[:, 1:]),
            document_ids=np.where(padding, -1, is_start.cumsum(1)),
            positions=columns - document_start,
            padding=padding,
        )

    def prefixes(self, indices: Sequence[int] | np.ndarray) -> list[list[int]]:
        """The tokens before each window that belong to its first document, at most a window of them."""
        stream = self.store.windows(self.starts(indices) - 1 - self.length, self.length + 1)  # (B, T + 1)
        prefixes = []
        for row in stream:
            ends = np.flatnonzero(row == self.eos)  # the last one precedes the document; in the last column, its start
            tokens = row[ends[-1] if len(ends) else 0 : -1].tolist()
            prefixes.append([self.bos, *tokens[1:]] if len(ends) and tokens else tokens)
        return prefixes

    def name(self, index: int) -> str:
        start = int(self.starts([index])[0])
        end = min(start + self.length, self.store.tokens)
        first, last = self.store.document_at(start), self.store.document_at(end - 1)
        name = self.store.location(first)
        return name if first == last else f"{name} to {self.store.location(last)}"


class DocumentChunks:
    """Chunks of documents, cut at different positions in every epoch.

    They have at most `size` tokens; all but the first and last of a document have full length.
    """

    def __init__(self, lengths: np.ndarray, size: int, *, seed: int | None, epoch: int):
        counts = -(-lengths // size)  # chunks of each document
        self.firsts = np.concatenate([[0], counts.cumsum()])  # first chunk of each document
        shift = np.zeros(len(lengths), np.int64)
        if seed is not None:  # a random offset that keeps the number of chunks
            draws = uniforms(seed, epoch, "cut", rows=np.arange(len(lengths)), count=1)[:, 0]
            shift = (draws * (counts * size - lengths + 1)).astype(np.int64)
        self.documents = np.repeat(np.arange(len(lengths)), counts)  # document of each chunk
        ends = (np.arange(len(self.documents)) - self.firsts[self.documents] + 1) * size - shift[self.documents]
        self.starts = np.maximum(ends - size, 0)
        self.ends = np.minimum(ends, lengths[self.documents])
        self.lengths = self.ends - self.starts


class TextTask(Task):
    """A pretraining objective: a task whose labels come from plain text."""

    def __init__(self, config: Any, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.eos is None:
            raise UserError("this tokenizer has no EOS token, which a language model must learn to predict")
        self.eos, self.bos, self.pad_id = tokenizer.eos, bos_id(tokenizer, self.bos_role), tokenizer.pad or 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone, transform=getattr(self.config, "transform", False))}

    def windows(self, store: TokenStore, length: int, *, seed: int | None, epoch: int) -> PackedWindows:
        special = {"bos": self.bos, "eos": self.eos, "filler": self.pad_id}
        return PackedWindows(store, length, **special, seed=seed, epoch=epoch)


class PackedExamples:
    """The base of examples that are packed windows."""

    def __init__(self, windows: PackedWindows):
        self.windows, self.name = windows, windows.name

    def __len__(self) -> int:
        return len(self.windows)
