"""Causal language modelling: a document A B C is read as <bos> A B C, with the labels A B C <eos>."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.token_store import TokenStore
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, make_cu_seqlens, pad
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, PlanDefaults, Sample, bits_per_byte, perplexity, token_loss
from headstock.tasks.packing import PackedExamples, PackedWindows, TextTask
from headstock.tasks.samples import sample_continuations


@dataclass(frozen=True)
class CausalConfig:
    rows: Literal["packed", "padded"] = "packed"  # full rows of documents, or one document per row


@TASKS.add("causal")
class CausalLM(TextTask):
    """Next-token prediction with teacher forcing."""

    Config = CausalConfig
    causal = True
    copies_unmasked = True
    is_language_model = True
    bits_per_byte_head = "token"
    generates = True
    is_auxiliary = True
    plan = PlanDefaults(max_epochs=4, repeated_dropout=0.1)
    huggingface_head = "ForCausalLM"

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.rows == "padded":
            return DocumentExamples(self, data, length)
        return CausalExamples(self, self.windows(data, length, seed=seed, epoch=epoch))

    def prefix_batch(self, prefixes: Sequence[Sequence[int]]) -> Batch | None:
        """The tokens before rows that continue a document; None where every row starts one."""
        return Batch(*pad(prefixes, self.pad_id)) if any(prefixes) else None

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden, labels = model(batch).hidden, batch.labels["token"]
        if batch.label_positions:  # packed rows have a label nearly everywhere
            hidden, labels = batch.gather_labelled("token", hidden)
        return {"token": token_loss(model.heads["token"], hidden, labels, smoothing=smoothing)[0]}

    def add_lm_labels(self, batch: Batch, *, key: tuple[int | str, ...], rows: np.ndarray) -> Batch:
        labels = batch.tokens.roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        if batch.padding is not None:
            labels.masked_fill_(batch.padding.roll(-1, dims=1), IGNORE_INDEX)
        positions = batch.label_positions | {"token": find_label_positions(labels)}
        return replace(batch, labels=batch.labels | {"token": labels}, label_positions=positions)

    def tokens(self, batch: Batch) -> int:
        return self.counts(batch)["token"]  # packed rows of a single document do not mark padding

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        return sample_continuations(model, self, store, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        return {"loss": loss, "perplexity": perplexity(loss), **bits_per_byte(sums["token"], size)}


class CausalExamples(PackedExamples):
    """Packed windows whose labels are the next tokens."""

    def __init__(self, task: CausalLM, windows: PackedWindows):
        super().__init__(windows)
        self.task = task

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        prefix = self.task.prefix_batch(self.windows.prefixes(indices)) if self.task.needs_prefix else None
        if self.windows.store.documents == 1:
            # the causal mask hides the padding on the right, and one document needs no document mask
            labels = {"token": torch.from_numpy(rows.next_tokens)}
            return Batch(torch.from_numpy(rows.tokens), prefix=prefix, labels=labels)
        cu_seqlens = make_cu_seqlens(torch.from_numpy(rows.document_ids))
        return rows.batch(rows.tokens, {"token": rows.next_tokens}, cu_seqlens=cu_seqlens, prefix=prefix)


class DocumentExamples:
    """One document per row; longer documents are split into several rows."""

    def __init__(self, task: CausalLM, store: TokenStore, length: int):
        self.task, self.store, self.length = task, store, length
        self.row_counts = -(-store.lengths // length)  # of each document
        self.ends = self.row_counts.cumsum()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """The document of a row, and which part of it the row is."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        return document, index - int(self.ends[document] - self.row_counts[document])

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs, targets, prefixes = [], [], []
        for document, part in map(self.locate, indices):
            text = self.store.document(document).tolist()
            start = part * self.length
            end = start + self.length
            inputs.append([self.task.bos, *text][start:end])
            targets.append([*text, self.task.eos][start:end])
            prefixes.append([self.task.bos, *text][max(0, start - self.length) : start])
        tokens, padding = pad(inputs, self.task.pad_id)
        labels, _ = pad(targets, IGNORE_INDEX)
        return Batch(
            tokens,
            padding,
            prefix=self.task.prefix_batch(prefixes) if self.task.needs_prefix else None,
            labels={"token": labels},
            label_positions={"token": find_label_positions(labels)},
        )

    def name(self, index: int) -> str:
        return self.store.location(self.locate(index)[0])
