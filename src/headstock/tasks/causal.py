"""Causal language modelling: a document A B C is read as <bos> A B C, with the labels A B C <eos>."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.token_store import TokenStore
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, make_cu_seqlens, pad
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, Sample, token_loss
from headstock.tasks.packing import PackedWindows, StreamTask
from headstock.tasks.samples import sample_continuations


@dataclass(frozen=True)
class CausalConfig:
    rows: Literal["packed", "padded"] = "packed"  # full rows of documents, or one document per row


@TASKS.add("causal")
class CausalLM(StreamTask):
    """Next-token prediction with teacher forcing."""

    Config = CausalConfig
    causal = True
    is_language_model = True
    bits_per_byte_head = "token"
    generates = True
    max_epochs = 4
    repeated_dropout = 0.1
    huggingface_head = "ForCausalLM"

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.rows == "padded":
            return DocumentExamples(self, data, length)
        return PackedExamples(self, self.windows(data, length, seed=seed, epoch=epoch))

    def collate(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        """A batch from pairs of input ids and labels, one text per row."""
        tokens, padding = pad([shown for shown, _ in pairs], self.pad_id)
        labels, _ = pad([wanted for _, wanted in pairs], IGNORE_INDEX)
        return Batch(tokens, padding, labels={"token": labels}, label_positions={"token": find_label_positions(labels)})

    def before(self, texts: Sequence[Sequence[int]]) -> Batch | None:
        """The tokens before rows that continue a document; None where every row starts one."""
        return Batch(*pad(texts, self.pad_id)) if any(texts) else None

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden, labels = model(batch).hidden, batch.labels["token"]
        if batch.label_positions:  # packed rows have a label nearly everywhere
            hidden, labels = batch.gather_labelled("token", hidden)
        return {"token": token_loss(model.heads["token"], hidden, labels, smoothing=smoothing)[0]}

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        return sample_continuations(model, self, store, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        bits = {"bits_per_byte": sums["token"] / math.log(2) / size} if size else {}
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), **bits}


class PackedExamples:
    """Packed windows whose labels are the next tokens."""

    def __init__(self, task: CausalLM, windows: PackedWindows):
        self.task, self.windows, self.name = task, windows, windows.name

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        labels = {"token": torch.from_numpy(np.where(rows.padding, IGNORE_INDEX, rows.wanted))}
        before = self.task.before(self.windows.before(indices)) if self.task.needs_prefix else None
        # the causal mask keeps real tokens from the padding at their right, so nothing else need say where it is;
        # a stream of one document needs no document mask either, and every batch of a run has the same parts
        if self.windows.store.documents == 1:
            return Batch(torch.from_numpy(rows.shown), prefix=before, labels=labels)
        return Batch(
            torch.from_numpy(rows.shown),
            document_ids=torch.from_numpy(rows.documents),
            cu_seqlens=make_cu_seqlens(torch.from_numpy(rows.documents)),
            positions=torch.from_numpy(rows.positions),
            prefix=before,
            labels=labels,
        )


class DocumentExamples:
    """One document per row; longer documents are split into several rows."""

    def __init__(self, task: CausalLM, store: TokenStore, length: int):
        self.task, self.store, self.length = task, store, length
        self.pieces = -(-store.lengths // length)  # rows that each document takes
        self.ends = self.pieces.cumsum()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """The document of a row, and which part of it the row is."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        return document, index - int(self.ends[document] - self.pieces[document])

    def batch(self, indices: Sequence[int]) -> Batch:
        pairs, before = [], []
        for document, piece in map(self.locate, indices):
            text = self.store.document(document).tolist()
            begin = piece * self.length
            here = slice(begin, begin + self.length)
            pairs.append(([self.task.bos, *text][here], [*text, self.task.eos][here]))
            before.append([self.task.bos, *text][max(0, begin - self.length) : begin])
        batch = self.task.collate(pairs)
        batch.prefix = self.task.before(before) if self.task.needs_prefix else None
        return batch

    def name(self, index: int) -> str:
        return self.store.location(self.locate(index)[0])
