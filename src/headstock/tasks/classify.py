"""Text classification: pooled features and a linear layer.

B sequences, N examples (one sequence each unless a long text is split), C classes, D width, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.data.windowing import windows
from headstock.errors import UserError
from headstock.intervals import WeightedMetric
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import ClassificationHead, pool, pooled_positions, pooled_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples
from headstock.tasks.class_labels import (
    ClassConfig,
    check_class_labels,
    infer_class_settings,
    label_numbers,
    label_warnings,
)
from headstock.tasks.class_metrics import class_metrics
from headstock.tasks.error_analysis import MAX_ATTRIBUTED, confusions, most_confident_errors
from headstock.tasks.graph_spec import CLASSIFY, SIGMOID, SOFTMAX, TRUNCATION, GraphSpec
from headstock.tasks.labelled import (
    Attribution,
    CachedFeatures,
    EncodedRows,
    LabelledTask,
    Nouns,
    RowExamples,
    RowMetrics,
    pad_sequences,
    row_locations,
)
from headstock.tasks.special_tokens import pad_with_special_tokens

MIN_PROBABILITY = 1e-12  # in logarithms


@dataclass(frozen=True)
class ClassifyConfig(ClassConfig):
    separator: str | None = None  # splits a label into several classes (multi-label classification)
    long: Literal["head", "tail", "head+tail", "windows"] = "head"  # what is read of a long text; windows are averaged

    def problems(self) -> list[tuple[str, str]]:
        empty = [("separator", "must be at least one character")] if self.separator == "" else []
        return super().problems() + empty


@TASKS.add("classify")
class Classify(LabelledTask):
    """Predicts one class, or with a separator any number of them."""

    Config: ClassVar[type] = ClassifyConfig
    target = "label"
    huggingface_head = "ForSequenceClassification"
    title = "classifier"
    nouns = Nouns("text", "text", "text", "wrongly classified texts")
    predicts_classes = True
    lens = "class"

    def __init__(self, config: ClassConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        self.multilabel = getattr(config, "separator", None) is not None
        self.selection_metric = "micro_f1" if self.multilabel else "accuracy"

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        config = self.config
        width, mixed = self.head_input(backbone)
        options = {"dropout": config.dropout, "mixed": mixed, "dense": config.dense, "bias": config.head_bias}
        return {"label": ClassificationHead(pooled_width(width, config.pool), len(config.classes), **options)}

    def head_passes(self, head: str, length: Any) -> Any:
        return 1 / length

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_records(path, separator=config.separator, **options)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        return {"text": list(rows)}

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        return infer_class_settings(config, records)

    @classmethod
    def check_training_labels(cls, config: Any, records: Records) -> list[str]:
        separator = getattr(config, "separator", None)
        if not config.classes and not config.many_classes:
            check_class_labels(records, separator)
        return label_warnings(records, separator)

    def check(self, records: Records) -> None:
        if records.labels is not None:
            label_numbers(records, self.config)

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedRows:
        # the "lab" tokenizer expects texts that are already split into pieces
        texts = records.texts if self.tokenizer.kind == "lab" else records.display_texts
        return self.encoded(records, self.tokenizer.encode_batch(texts), labelled=labelled)

    def encoded(self, records: Records, tokens: list[Any], *, labelled: bool) -> EncodedRows:
        labels = label_numbers(records, self.config) if labelled and records.labels is not None else None
        return EncodedRows(tokens, labels, row_locations(records))

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        return PooledExamples(data) if isinstance(data, CachedFeatures) else self.row_examples(data, length)

    def row_examples(self, data: EncodedRows, length: int) -> Examples:
        return TextExamples(self, data, length)

    def row_tokens(self, tokens: Sequence[int], length: int) -> int:
        """The number of tokens that are read of a text, with special tokens."""
        total = len(tokens) + len(self.special)
        return total if self.config.long == "windows" else min(total, length)

    def sequences(self, tokens: Sequence[int], length: int) -> list[list[int]]:
        """A text as one sequence of at most `length` tokens, or as overlapping windows."""
        capacity = self.special.capacity(length)
        parts: list[Sequence[int]]
        if len(tokens) <= capacity:
            parts = [tokens]
        elif self.config.long == "head":
            parts = [tokens[:capacity]]
        elif self.config.long == "tail":
            parts = [tokens[-capacity:]]
        elif self.config.long == "head+tail":
            parts = [[*tokens[: capacity // 4], *tokens[capacity // 4 - capacity :]]]
        else:
            parts = [tokens[window.start : window.end] for window in windows(len(tokens), capacity)]
        return [self.special.wrap(part) for part in parts]

    def segment_ids(self, tokens: Tensor) -> Tensor | None:
        """Segment ids of paired texts; None for single ones."""
        return None

    # From batches to predictions

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
        sums = vectors.new_zeros(count, *vectors.shape[1:]).index_add(0, batch.example_ids, vectors)
        window_counts = vectors.new_zeros(count).index_add(0, batch.example_ids, vectors.new_ones(len(vectors)))
        return sums / window_counts.view(-1, *[1] * (vectors.dim() - 1))

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """Only the pooled features."""
        return [[vector[None]] for vector in self.pooled_features(model, batch, inference=True).float().cpu()]

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels, logits = batch.labels["label"], self.class_scores(model, batch).float()  # (N,) or (N, C); (N, C)
        weights = weights_on(logits.device, self.config.class_weights) if self.config.class_weights else None
        if self.multilabel:
            return multilabel_losses(logits, labels, weights, smoothing)
        loss = F.cross_entropy(
            logits, labels, weights, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
        )
        return {"label": loss, "correct": (logits.argmax(-1) == labels).sum()}

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = batch.labels["label"]
        return {"label": int(((labels if labels.dim() == 1 else labels[:, 0]) != IGNORE_INDEX).sum())}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        rows = max(1, counts["label"])
        metrics = {"loss": sums["label"] / rows, "accuracy": sums["correct"] / rows}
        if self.multilabel:
            positives = sums["predicted_positives"] + sums["actual_positives"]
            metrics["micro_f1"] = 2 * sums["true_positives"] / max(1.0, positives)
        return metrics

    def outputs(self, model: Model, batch: Batch) -> Tensor:
        """(N, C) class probabilities; they sum to one unless multi-label."""
        logits = model.heads["label"](self.pooled_features(model, batch, inference=True)).float()
        return logits.sigmoid() if self.multilabel else logits.softmax(-1)

    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return class_predictions(self.config, outputs)

    def as_text(self, prediction: dict[str, Any]) -> str:
        return f"{prediction['label']}\t{max(prediction['probabilities'].values()):.3f}"

    # Metrics and error analysis

    def row_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> RowMetrics:
        probabilities, labels = np.stack(outputs), data.labels
        if not self.multilabel:
            correct = probabilities.argmax(1) == labels
            return {"accuracy": (correct.astype(float), np.ones(len(correct)))}
        predicted, actual = probabilities > 0.5, labels.astype(bool)
        correct = (predicted == actual).all(1)
        true_positives = 2.0 * (predicted & actual).sum(1)
        positives = (predicted.sum(1) + actual.sum(1)).astype(float)
        return {"accuracy": (correct.astype(float), np.ones(len(correct))), "micro_f1": (true_positives, positives)}

    def weighted_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> Mapping[str, WeightedMetric]:
        return class_metrics(data.labels, np.stack(outputs)) if len(outputs) else {}

    def extra_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        probabilities = np.stack(outputs)
        if not self.multilabel:
            return {"loss": mean_nll(probabilities, data.labels)}
        predicted, actual = probabilities > 0.5, data.labels.astype(bool)
        true_positives, positives = (predicted & actual).sum(0), predicted.sum(0) + actual.sum(0)  # by class
        f1 = (2 * true_positives / np.maximum(1, positives))[positives > 0]
        clipped = np.clip(probabilities, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        return {
            "macro_f1": float(f1.mean()) if len(f1) else 0.0,
            "loss": float(-np.where(actual, np.log(clipped), np.log(1 - clipped)).mean()),
        }

    def true_and_predicted(
        self, data: EncodedRows, outputs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, int] | None:
        if self.multilabel or data.labels is None:
            return None
        return data.labels, np.stack(outputs).argmax(1), len(self.config.classes)

    def true_class_ids(self, data: EncodedRows) -> np.ndarray | None:
        return None if self.multilabel else data.labels

    def confidences(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        if self.multilabel:
            return None
        probabilities = np.stack(outputs)
        return probabilities.max(1), probabilities.argmax(1) == data.labels

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Confusion matrix, lengths, calibration and the most confident errors; nothing for multi-label classes."""
        if self.multilabel:
            return {}
        probabilities = np.stack(outputs)
        predicted = probabilities.argmax(1)
        analysis = super().error_analysis(rows, data, list(probabilities))
        if attribute is not None:
            errors = most_confident_errors(probabilities.max(1), predicted == data.labels, limit=MAX_ATTRIBUTED)
            for record, row in zip(analysis["mistakes"], errors, strict=False):
                record["tokens"] = [(token, round(weight, 5)) for token, weight in attribute(row, predicted[row])]
        return analysis | confusions(data.labels, predicted, len(self.config.classes))

    # Explanations and export

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        return model.heads["label"](self.pooled_features(model, batch))

    def lens_scores(self, model: Model, vectors: Tensor, padding: Tensor | None) -> Tensor:
        return model.heads["label"](pool(vectors, padding, self.config.pool))

    def graph_spec(self) -> GraphSpec:
        config = self.config
        long = getattr(config, "long", "head")
        if long == "windows" and config.dense != "none":
            problem = "an exported graph cannot average the windows of a long text before the hidden layer"
            raise UserError(f"task.long windows with task.dense {config.dense}: {problem}")
        activation = SIGMOID if self.multilabel else SOFTMAX
        script = CLASSIFY.replace("PARTS", TRUNCATION[long]).replace("PROBABILITIES", activation)
        settings = {"classes": list(config.classes)}
        return GraphSpec("classification", "Which class a text is of.", settings=settings, script=script)


def multilabel_losses(logits: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float) -> dict[str, Tensor]:
    """Binary cross-entropy, averaged over the classes, for labels (N, C)."""
    is_labelled = labels[:, :1] != IGNORE_INDEX  # (N, 1)
    actual = (labels == 1) & is_labelled
    predicted = (logits > 0) & is_labelled
    targets = actual.float() * (1 - smoothing) + smoothing / 2
    loss = F.binary_cross_entropy_with_logits(logits, targets, is_labelled.float(), pos_weight=weights, reduction="sum")
    return {
        "label": loss / logits.size(1),
        "correct": ((predicted == actual).all(1) & is_labelled[:, 0]).sum(),
        "true_positives": (predicted & actual).sum(),
        "predicted_positives": predicted.sum(),
        "actual_positives": actual.sum(),
    }


@lru_cache(maxsize=8)
def weights_on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """Cached on the device: a copy in every step would synchronize."""
    return torch.tensor(weights, device=device)


def mean_nll(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean negative log-likelihood of labels (N,) under probabilities (N, C)."""
    return float(-np.log(np.maximum(probabilities[np.arange(len(labels)), labels], MIN_PROBABILITY)).mean())


def class_predictions(config: ClassConfig, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The predicted class and the probability of every class, for each text."""
    if not len(outputs):
        return []
    classes, separator = config.classes, getattr(config, "separator", None)
    array = np.array(outputs)  # (N, C)
    rounded = np.round(array.astype(np.float64), 6).tolist()  # the same as round() of each
    probabilities = [dict(zip(classes, row, strict=True)) for row in rounded]
    if separator is None:
        labels = [classes[index] for index in array.argmax(1).tolist()]
        return [{"label": label, "probabilities": row} for label, row in zip(labels, probabilities, strict=True)]
    label_lists = [list(compress(classes, row)) for row in (array > 0.5).tolist()]
    return [
        {"label": separator.join(names), "labels": names, "probabilities": row}
        for names, row in zip(label_lists, probabilities, strict=True)
    ]


class TextExamples(RowExamples):
    """Texts as sequences of tokens."""

    def __init__(self, task: Classify, data: EncodedRows, length: int):
        super().__init__(data)
        self.task, self.length = task, length
        self.lengths = np.array([task.row_tokens(tokens, length) for tokens in data.tokens])

    def batch(self, indices: Sequence[int]) -> Batch:
        task, special, example_ids = self.task, self.task.special, None
        texts = [self.data.tokens[i] for i in indices]
        if task.row_is_text and max(map(len, texts)) + len(special) <= self.length:  # every text fits into one sequence
            tokens, padding = pad_with_special_tokens(texts, special.prefix, special.suffix, special.pad)
        else:
            sequences = [task.sequences(text, self.length) for text in texts]
            tokens, padding, example_ids = pad_sequences(sequences, special.pad)
        labels = label_tensor(self.data, indices)
        return Batch(tokens, padding, segments=task.segment_ids(tokens), example_ids=example_ids, labels=labels)


class PooledExamples(RowExamples):
    """Pooled features of a frozen backbone, one vector per text."""

    def __init__(self, cache: CachedFeatures):
        super().__init__(cache.data)
        self.vectors = torch.cat([vector for (vector,) in cache.features])

    def batch(self, indices: Sequence[int]) -> Batch:
        no_tokens = torch.zeros(len(indices), 1, dtype=torch.long)
        return Batch(no_tokens, features=self.vectors[list(indices)], labels=label_tensor(self.data, indices))


def label_tensor(data: EncodedRows, indices: Sequence[int]) -> dict[str, Tensor]:
    return {} if data.labels is None else {"label": torch.from_numpy(data.labels[list(indices)])}
