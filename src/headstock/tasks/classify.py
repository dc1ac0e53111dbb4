"""Text classification: pooled features and a linear layer.

N examples, C classes, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.intervals import WeightedMetric
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import ClassificationHead, pool, pooled_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.tasks.calibration import calibration_metrics, decision_scores
from headstock.tasks.class_labels import (
    ClassConfig,
    check_class_labels,
    infer_class_settings,
    label_numbers,
    label_warnings,
)
from headstock.tasks.class_metrics import class_metrics
from headstock.tasks.error_analysis import MAX_ATTRIBUTED, confusions, most_confident_errors
from headstock.tasks.graph_spec import CLASSIFY, PAIR, SIGMOID, SOFTMAX, TRUNCATION, GraphSpec, pair_graph
from headstock.tasks.labelled import Attribution, EncodedRows, Nouns, RowMetrics
from headstock.tasks.pooled_text import LongText, PooledTextTask, check_windows
from headstock.tasks.predictions import Prediction
from headstock.tasks.soft_labels import (
    PROBABILITIES,
    SoftLabelConfig,
    parse_probabilities,
    probability_array,
    soft_losses,
    with_likeliest_labels,
)
from headstock.tasks.widgets import Bars, DisplayPart

MIN_PROBABILITY = 1e-12  # in logarithms


@dataclass(frozen=True)
class ClassifyConfig(SoftLabelConfig):
    separator: str | None = None  # splits a label into several classes (multi-label classification)
    long: LongText = "head"  # what is read of a text longer than the context; windows are averaged

    def problems(self) -> list[tuple[str, str]]:
        empty = [("separator", "must be at least one character")] if self.separator == "" else []
        if self.soft_labels and self.separator is not None:
            empty.append(("soft_labels", "conflicts with separator: a row of several classes has hard labels"))
        return super().problems() + empty


@dataclass(frozen=True, eq=False)
class ClassPrediction(Prediction):
    """The class of a row. `labels` are the classes of a run that predicts any number of them."""

    label: str
    probabilities: dict[str, float]  # of every class
    labels: list[str] | None = None
    abstained: bool | None = None  # True: no class is probable enough, so the label is empty

    def _rows(self) -> list[dict[str, Any]]:
        row = {name: value for name, value in self.to_dict().items() if name != "probabilities"}
        return [row | {f"p({name})": value for name, value in self.probabilities.items()}]


@TASKS.add("classify")
class Classify(PooledTextTask):
    """Predicts one class, or with a separator any number of them."""

    Config: ClassVar[type] = ClassifyConfig
    prediction_class: ClassVar[type[Prediction]] = ClassPrediction
    title = "classifier"
    nouns = Nouns("text", "text", "text", "wrongly classified texts")
    predicts_classes = True
    linear_classes = True
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

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_class_records(path, config, separator=config.separator, **options)

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
            self.label_array(records)

    def label_array(self, records: Records) -> np.ndarray:
        return label_numbers(records, self.config)

    def soft_label_array(self, records: Records) -> np.ndarray | None:
        return probability_array(records, self.config)

    # From batches to predictions

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        return self.class_losses(self.class_scores(model, batch).float(), batch.labels, smoothing)

    def class_losses(self, logits: Tensor, targets: Mapping[str, Tensor], smoothing: float) -> dict[str, Tensor]:
        """From logits (N, C) and labels (N,), or (N, C) if multi-label, and soft labels (N, C) if there are any."""
        labels = targets["label"]
        weights = weights_on(logits.device, self.config.class_weights) if self.config.class_weights else None
        if PROBABILITIES in targets:
            return soft_losses(logits, labels, targets[PROBABILITIES], weights, smoothing)
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
        return class_predictions(self.config, outputs, self.thresholds)

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        selected = prediction.get("labels", [prediction["label"]])
        return [Bars(list(prediction["probabilities"].items()), list(selected))]

    def as_text(self, prediction: dict[str, Any]) -> str:
        label, probabilities = prediction["label"], prediction["probabilities"]
        name = "(abstains)" if prediction.get("abstained") else label
        return f"{name}\t{probabilities.get(label, max(probabilities.values())):.3f}"

    def predicted_ids(self, probabilities: np.ndarray) -> np.ndarray:
        """(N,) the class of the highest score after decision thresholds; (N, C) bool where multi-label."""
        if self.multilabel:
            return above_thresholds(probabilities, self.thresholds)
        return decision_scores(probabilities, self.thresholds).argmax(1)

    # Metrics and error analysis

    def row_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> RowMetrics:
        probabilities, labels = np.stack(outputs), data.labels
        if not self.multilabel:
            correct = self.predicted_ids(probabilities) == labels
            return {"accuracy": (correct.astype(float), np.ones(len(correct)))}
        predicted, actual = self.predicted_ids(probabilities), labels.astype(bool)
        correct = (predicted == actual).all(1)
        true_positives = 2.0 * (predicted & actual).sum(1)
        positives = (predicted.sum(1) + actual.sum(1)).astype(float)
        return {"accuracy": (correct.astype(float), np.ones(len(correct))), "micro_f1": (true_positives, positives)}

    def weighted_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> Mapping[str, WeightedMetric]:
        if not len(outputs):
            return {}
        probabilities = np.stack(outputs)
        return class_metrics(data.labels, probabilities, self.predicted_ids(probabilities))

    def extra_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        probabilities = np.stack(outputs)
        if not self.multilabel:
            return {"loss": mean_nll(probabilities, data.labels), **calibration_metrics(data.labels, probabilities)}
        predicted, actual = self.predicted_ids(probabilities), data.labels.astype(bool)
        true_positives, positives = (predicted & actual).sum(0), predicted.sum(0) + actual.sum(0)  # by class
        f1 = (2 * true_positives / np.maximum(1, positives))[positives > 0]
        clipped = np.clip(probabilities, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        return {
            "macro_f1": float(f1.mean()) if len(f1) else 0.0,
            "loss": float(-np.where(actual, np.log(clipped), np.log(1 - clipped)).mean()),
            **calibration_metrics(data.labels, probabilities),
        }

    def true_and_predicted(
        self, data: EncodedRows, outputs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, int] | None:
        if self.multilabel or data.labels is None:
            return None
        return data.labels, self.predicted_ids(np.stack(outputs)), len(self.config.classes)

    def true_class_ids(self, data: EncodedRows) -> np.ndarray | None:
        return None if self.multilabel else data.labels

    def confidences(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        if self.multilabel:
            return None
        scores = decision_scores(np.stack(outputs), self.thresholds)
        return scores.max(1), scores.argmax(1) == data.labels

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Confusion matrix, lengths, calibration and the most confident errors; nothing for multi-label classes."""
        if self.multilabel:
            return {}
        probabilities = np.stack(outputs)
        scores = decision_scores(probabilities, self.thresholds)
        predicted = scores.argmax(1)
        analysis = super().error_analysis(rows, data, list(probabilities))
        if attribute is not None:
            errors = most_confident_errors(scores.max(1), predicted == data.labels, limit=MAX_ATTRIBUTED)
            for record, row in zip(analysis["mistakes"], errors, strict=False):
                record["tokens"] = [(token, round(weight, 5)) for token, weight in attribute(row, predicted[row])]
        return analysis | confusions(data.labels, predicted, len(self.config.classes))

    # Explanations and export

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        return model.heads["label"](self.pooled_features(model, batch))

    def lens_scores(self, model: Model, vectors: Tensor, padding: Tensor | None) -> Tensor:
        return model.heads["label"](pool(vectors, padding, self.config.pool))

    def graph_spec(self) -> GraphSpec:
        settings = {"classes": list(self.config.classes)}
        if self.is_pair:
            script = PAIR.replace("PROBABILITIES", SOFTMAX)
            return pair_graph("classification", "Which class two texts are of.", script, settings=settings)
        check_windows(self)
        activation = SIGMOID if self.multilabel else SOFTMAX
        script = CLASSIFY.replace("PARTS", TRUNCATION[self.long]).replace("PROBABILITIES", activation)
        return GraphSpec("classification", "Which class a text is of.", settings=settings, script=script)


def read_class_records(path: str | Path, config: SoftLabelConfig, **options: Any) -> Records:
    """Rows with a label or, if the settings ask for them, with a probability for each class."""
    if not config.soft_labels:
        return read_records(path, **options)
    return with_likeliest_labels(read_records(path, further={PROBABILITIES: parse_probabilities}, **options))


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
    with torch.inference_mode(False):  # the first call may be in a validation, and training cannot use its tensors
        return torch.tensor(weights, device=device)


def mean_nll(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean negative log-likelihood of labels (N,) under probabilities (N, C)."""
    return float(nll(probabilities, labels).mean())


def nll(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) the negative log-likelihood of each label."""
    return -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], MIN_PROBABILITY))


def above_thresholds(probabilities: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """(N, C) True for the predicted ones of multi-label classes."""
    return probabilities > (np.asarray(thresholds) if len(thresholds) else 0.5)


def class_predictions(
    config: ClassConfig, outputs: Sequence[np.ndarray], thresholds: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """The predicted class and the probability of every class, for each text."""
    if not len(outputs):
        return []
    classes, separator = config.classes, getattr(config, "separator", None)
    array = np.array(outputs)  # (N, C)
    rounded = np.round(array.astype(np.float64), 6).tolist()  # the same as round() of each
    probabilities = [dict(zip(classes, row, strict=True)) for row in rounded]
    if separator is None:
        labels = [classes[index] for index in decision_scores(array, thresholds).argmax(1).tolist()]
        return [{"label": label, "probabilities": row} for label, row in zip(labels, probabilities, strict=True)]
    label_lists = [list(compress(classes, row)) for row in above_thresholds(array, thresholds).tolist()]
    return [
        {"label": separator.join(names), "labels": names, "probabilities": row}
        for names, row in zip(label_lists, probabilities, strict=True)
    ]
