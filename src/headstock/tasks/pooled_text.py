"""The base of tasks whose head reads one vector per row: the pooled features of a text or of two texts.

B sequences, N examples (one sequence each unless a long text is split), D width, L layers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import windows
from headstock.errors import UserError
from headstock.model.batch import Batch
from headstock.model.heads import pool, pooled_positions
from headstock.model.model import Model
from headstock.tasks.base import Examples
from headstock.tasks.labelled import (
    CachedFeatures,
    EncodedRows,
    LabelledTask,
    RowExamples,
    RowLocations,
    pad_sequences,
    texts_in,
)
from headstock.tasks.soft_labels import PROBABILITIES
from headstock.tasks.special_tokens import PAIR_SPECIAL_TOKENS, pad_with_special_tokens, segment_ids
from headstock.tasks.widgets import InputField

PAIR_FORM = "two texts, such as ('It rains.', 'The street is wet.')"

LongText = Literal["head", "tail", "head+tail", "windows"]  # what is read of a long text; windows are averaged


class PooledTextTask(LabelledTask):
    """Reads one text, or two as [CLS] A [SEP] B [SEP], and pools its features to one vector.

    A subclass says in `label_array` what labels are, and adds a head, losses and metrics.
    """

    target = "label"
    huggingface_head: ClassVar[str | None] = "ForSequenceClassification"

    def __init__(self, config: Any, tokenizer: Tokenizer | None):
        if getattr(config, "pair", None):
            self.texts_per_row, self.row_form, self.row_description = 2, PAIR_FORM, "two texts"
            self.input_columns = ("text", "text_b")
        super().__init__(config, tokenizer)

    def head_passes(self, head: str, length: Any) -> Any:
        return 1 / length

    # From records to batches

    @property
    def is_pair(self) -> bool:
        return self.texts_per_row == 2

    def is_row(self, row: Any) -> bool:
        return len(texts_in(row) or ()) == 2 if self.is_pair else super().is_row(row)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        if not self.is_pair:
            return {"text": list(rows)}
        self.check_rows(rows)
        return {"text": [first for first, _ in rows], "text_b": [second for _, second in rows]}

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedRows:
        encode, tokens = self.tokenizer.encode_batch, list[Any]()
        if self.is_pair:
            tokens += zip(*(encode(records.columns[column]) for column in ("text", "text_b")), strict=True)
        else:  # the "lab" tokenizer expects texts that are already split into pieces
            tokens += encode(records.texts if self.tokenizer.kind == "lab" else records.display_texts)
        labels = self.label_array(records) if labelled and records.labels is not None else None
        soft_labels = None if labels is None else self.soft_label_array(records)
        return EncodedRows(tokens, labels, RowLocations(records), soft_labels=soft_labels)

    def soft_label_array(self, records: Records) -> np.ndarray | None:
        """(N, C) probabilities to learn from instead of the labels, where rows have them."""
        return None

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        return PooledExamples(self, data) if isinstance(data, CachedFeatures) else self.row_examples(data, length)

    def row_examples(self, data: EncodedRows, length: int) -> Examples:
        return TextExamples(self, data, length)

    def label_tensors(self, data: EncodedRows, indices: Sequence[int]) -> dict[str, Tensor]:
        """The labels of a batch."""
        if data.labels is None:
            return {}
        rows = list(indices)
        labels = {"label": torch.from_numpy(data.labels[rows])}
        if data.soft_labels is not None:
            labels[PROBABILITIES] = torch.from_numpy(data.soft_labels[rows])
        return labels

    @property
    def long(self) -> str:
        """What is read of a long text; of a pair, the longer text is truncated first."""
        return getattr(self.config, "long", "head")

    def row_lengths(self, rows: Sequence[Any], length: int) -> np.ndarray:
        """The number of tokens that are read of each row, with special tokens."""
        if self.is_pair:
            sizes = np.array([sum(map(len, row)) for row in rows], dtype=np.int64) + PAIR_SPECIAL_TOKENS
        else:
            sizes = np.fromiter(map(len, rows), np.int64, len(rows)) + len(self.special)
            if self.long == "windows":
                long = np.flatnonzero(sizes > length).tolist()
                sizes[long] = [self.window_tokens(len(rows[row]), length) for row in long]
                return sizes
        return np.minimum(sizes, length)

    def window_tokens(self, count: int, length: int) -> int:
        """The tokens in all windows of a text of `count` tokens, with special tokens."""
        parts = windows(count, self.special.capacity(length))
        return sum(part.end - part.start + len(self.special) for part in parts)

    def sequences(self, tokens: Sequence[Any], length: int) -> list[list[int]]:
        """A row as one sequence of at most `length` tokens, or a text as overlapping windows."""
        if self.is_pair:
            first, second = truncate_pair(*tokens, room=length - PAIR_SPECIAL_TOKENS)
            return [[self.bos, *first, self.separator, *second, self.separator]]
        capacity = self.special.capacity(length)
        parts: list[Sequence[int]]
        if len(tokens) <= capacity:
            parts = [tokens]
        elif self.long == "head":
            parts = [tokens[:capacity]]
        elif self.long == "tail":
            parts = [tokens[-capacity:]]
        elif self.long == "head+tail":
            parts = [[*tokens[: capacity // 4], *tokens[capacity // 4 - capacity :]]]
        else:
            parts = [tokens[window.start : window.end] for window in windows(len(tokens), capacity)]
        return [self.special.wrap(part) for part in parts]

    def segment_ids(self, tokens: Tensor) -> Tensor | None:
        """Segment ids of paired texts; None for single ones."""
        return segment_ids(tokens, self.separator) if self.is_pair else None

    @property
    def input_fields(self) -> tuple[InputField, ...]:
        if not self.is_pair:
            return super().input_fields
        first, second = ("A man is playing a guitar.", "A man is playing an instrument.")
        return InputField("text", "First text", example=first), InputField("text_b", "Second text", example=second)

    # From batches to one vector per row

    def pooled_features(self, model: Model, batch: Batch, *, inference: bool = False) -> Tensor:
        """(N, D) pooled features, averaged over the windows of an example; (N, L + 1, D) for a layer mix.

        In inference, only the positions that are pooled are computed in the last layer.
        """
        if batch.features is not None:
            return batch.features
        positions = pooled_positions(batch, self.config.pool) if inference and self.config.layers == "last" else None
        if positions is None:
            vectors = pool(self.token_features(model, batch), batch.padding, self.config.pool)
        else:
            vectors = model(batch, query_positions=positions).hidden.squeeze(1)
        if batch.example_ids is None:
            return vectors
        # reading the count from the labels avoids a GPU synchronization
        count = len(batch.labels["label"]) if "label" in batch.labels else int(batch.example_ids[-1]) + 1
        # a product instead of index_add, which on a GPU adds in any order, and in half precision rounds each sum
        windows_of = batch.example_ids == torch.arange(count, device=vectors.device)[:, None]  # (N, windows)
        dtype = torch.promote_types(vectors.dtype, torch.float32)
        with torch.autocast(vectors.device.type, enabled=False):
            sums = windows_of.to(dtype) @ vectors.to(dtype).flatten(1)
        means = sums / windows_of.sum(1, keepdim=True)
        return means.view(count, *vectors.shape[1:]).type_as(vectors)

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """Only the pooled features."""
        return [[vector[None]] for vector in self.pooled_features(model, batch, inference=True).float().cpu()]


class TextExamples(RowExamples):
    """Texts as sequences of tokens."""

    def __init__(self, task: PooledTextTask, data: EncodedRows, length: int):
        super().__init__(data)
        self.task, self.length = task, length
        self.lengths = task.row_lengths(data.tokens, length)

    def batch(self, indices: Sequence[int]) -> Batch:
        task, special, example_ids = self.task, self.task.special, None
        texts = [self.data.tokens[i] for i in indices]
        if task.row_is_text and max(map(len, texts)) + len(special) <= self.length:  # every text fits into one sequence
            tokens, padding = pad_with_special_tokens(texts, special.prefix, special.suffix, special.pad)
        else:
            sequences = [task.sequences(text, self.length) for text in texts]
            tokens, padding, example_ids = pad_sequences(sequences, special.pad)
        labels = task.label_tensors(self.data, indices)
        return Batch(tokens, padding, segments=task.segment_ids(tokens), example_ids=example_ids, labels=labels)


class PooledExamples(RowExamples):
    """Pooled features of a frozen backbone, one vector per text."""

    def __init__(self, task: PooledTextTask, cache: CachedFeatures):
        super().__init__(cache.data)
        self.task = task
        self.vectors = torch.cat([vector for (vector,) in cache.features])

    def batch(self, indices: Sequence[int]) -> Batch:
        no_tokens = torch.zeros(len(indices), 1, dtype=torch.long)
        labels = self.task.label_tensors(self.data, indices)
        return Batch(no_tokens, features=self.vectors[list(indices)], labels=labels)


def truncate_pair(first: Sequence[int], second: Sequence[int], *, room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both texts, the longer one truncated until they fit."""
    if len(first) + len(second) <= room:
        return first, second
    half = room // 2
    if len(first) <= half:
        return first, second[: room - len(first)]
    if len(second) <= half:
        return first[: room - len(second)], second
    return first[: room - half], second[:half]


def read_texts_or_pairs(path: str | Path, *, pair: bool | None, **options: Any) -> Records:
    """Rows of one or two texts with a label; unless `pair` says which, two if the file has a column `text_b`."""
    required = ("text", "text_b") if pair else ("text",)
    optional = ("text_b", "label") if pair is None else ("label",)
    return read_records(path, required=required, optional=optional, **options)


def check_same_texts(records: Records, *, pair: bool | None) -> None:
    """Refuse rows of two texts for a task that reads one, and the reverse."""
    if pair is not None and pair != ("text_b" in records.columns):
        found, expected = ("one text", "two") if pair else ("two texts", "one")
        hint = "add a column text_b" if pair else "read the first one alone with --set pair=false"
        raise UserError(f"{records.source}: a row has {found}, but {expected} in training; {hint}")


def check_windows(task: PooledTextTask) -> None:
    """Refuse to export a head that is not linear on the average of windows."""
    if task.long == "windows" and task.config.dense != "none":
        problem = "an exported graph cannot average the windows of a long text before the hidden layer"
        raise UserError(f"task.long windows with task.dense {task.config.dense}: {problem}")
