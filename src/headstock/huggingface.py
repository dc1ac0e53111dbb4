"""Functions for `datasets.Dataset.map`: predictions, embeddings and token ids of a run as columns of a dataset.

They are objects that contain the path of a run and the hash of its weights, so `datasets` can send them to other
processes, and recomputes a cached column if the weights change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headstock.errors import UserError, did_you_mean
from headstock.inference.inputs import list_texts
from headstock.inference.pipeline import Pipeline
from headstock.inference.run_reference import RunReference
from headstock.tasks.special_tokens import special_tokens_for

__all__ = ["embed_batch", "predict_batch", "tokenize_batch"]

Batch = Mapping[str, Sequence[Any]]  # the values of each column
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class BatchFunction:
    """A function of a batch of rows, with the run that it uses."""

    run: RunReference
    columns: Mapping[str, str] = field(default_factory=dict)  # names of the run's columns in the dataset
    device: str = "auto"

    @property
    def pipeline(self) -> Pipeline:
        return self.run.load(device=self.device)

    def values(self, batch: Batch, name: str) -> Sequence[Any]:
        """The values of a column of the run."""
        column = self.columns.get(name, name)
        if column not in batch:
            names = ", ".join(map(repr, batch))
            hint = "" if column != name else f'; name it with columns={{"{name}": ...}}'
            raise UserError(f"no column {column!r}{did_you_mean(column, list(batch))} (columns: {names}){hint}")
        return batch[column]

    def texts(self, batch: Batch) -> list[str]:
        return list_texts(self.values(batch, "text"), self.columns.get("text", "text"))


@dataclass(frozen=True)
class PredictBatch(BatchFunction):
    """Adds the predictions of a fine-tuned run."""

    prefix: str = "predicted_"

    def __call__(self, batch: Batch) -> Columns:
        pipeline = self.pipeline
        task = pipeline.labelled_task()
        inputs = {name: self.values(batch, name) for name in task.input_columns}
        rows = [
            task.row_from_columns(dict(zip(inputs, row, strict=True))) for row in zip(*inputs.values(), strict=True)
        ]
        predictions = list(pipeline.iter_predictions(rows))
        names = list(predictions[0]) if predictions else []
        return {self.prefix + name: [row[name] for row in predictions] for name in names}


@dataclass(frozen=True)
class EmbedBatch(BatchFunction):
    """Adds the embedding of a text."""

    layers: str = "last"
    pool: str | None = None

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"embedding": np.asarray(self.pipeline.embed(self.texts(batch), layers=self.layers, pool=self.pool))}


@dataclass(frozen=True)
class TokenizeBatch(BatchFunction):
    """Adds the token ids of a text."""

    truncate: bool = True

    def __call__(self, batch: Batch) -> Columns:
        pipeline = self.pipeline
        special = special_tokens_for(pipeline.task, pipeline.tokenizer)
        end = special.capacity(pipeline.length) if self.truncate else None
        rows = [special.wrap(row[:end]) for row in pipeline.tokenizer.encode_batch(self.texts(batch))]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


def predict_batch(
    run: str | Path, *, columns: Mapping[str, str] | None = None, prefix: str = "predicted_", device: str = "auto"
) -> PredictBatch:
    """A function that predicts with a fine-tuned run: `dataset.map(predict_batch("runs/x"), batched=True)`.

    It adds the columns `predicted_label` and `predicted_probabilities`, or those of another task after `prefix`.
    `columns` names the run's columns in the dataset: {"text": "review"}.
    """
    return PredictBatch(RunReference.to(run), dict(columns or {}), device, prefix)


def embed_batch(
    run: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    layers: str = "last",
    pool: str | None = None,
    device: str = "auto",
) -> EmbedBatch:
    """A function that adds a column `embedding` with a vector for each text; `layers` and `pool` as in `embed`."""
    if pool == "none":
        raise UserError("pool='none' gives a vector for each token, expected one for each text")
    return EmbedBatch(RunReference.to(run), dict(columns or {}), device, layers, pool)


def tokenize_batch(
    run: str | Path, *, columns: Mapping[str, str] | None = None, truncate: bool = True
) -> TokenizeBatch:
    """A function that adds `input_ids`, with the special tokens of the run, and `attention_mask`.

    With `truncate` a text is cut to the number of tokens that the model reads at once.
    """
    return TokenizeBatch(RunReference.to(run), dict(columns or {}), "cpu", truncate)
