"""Regression: predicts a number for a text or for two, such as a star rating or the similarity of two sentences.

N examples, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.intervals import Formula
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import RegressionHead, pooled_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.tasks.class_labels import MAX_PROBLEMS, join_some
from headstock.tasks.error_analysis import MAX_ATTRIBUTED, MAX_ERRORS, error_record
from headstock.tasks.graph_spec import PAIR_VALUE, TRUNCATION, VALUE, GraphSpec, pair_graph
from headstock.tasks.labelled import Attribution, EncodedRows, Nouns, PooledHeadConfig, RowMetrics
from headstock.tasks.pooled_text import LongText, PooledTextTask, check_same_texts, check_windows, read_texts_or_pairs
from headstock.tasks.predictions import Prediction
from headstock.tasks.regression_metrics import FORMULAS, batch_moments, pearson, r2, regression_metrics, total_moments
from headstock.tasks.widgets import DisplayPart, ScaleValue

MAX_POINTS = 1000  # labels and predictions that a report draws
STRATA = 10  # quantiles of the labels, for stratified samples


@dataclass(frozen=True)
class RegressConfig(PooledHeadConfig):
    """Statistics of the labels come from the training rows unless they are given."""

    pair: bool | None = None  # rows of two texts; from the columns of the training file
    metric: Literal["pearson", "spearman", "mae", "rmse", "r2"] = "pearson"  # by which models are compared
    mean: float | None = None  # of the labels, which the head predicts standardized
    std: float | None = None  # standard deviation of the labels
    lowest: float | None = None  # smallest label
    highest: float | None = None  # largest label
    integers: bool | None = None  # all labels are whole numbers: kappa of the rounded predictions is reported too
    long: LongText = "head"  # what is read of a text longer than the context; windows are averaged

    def problems(self) -> list[tuple[str, str]]:
        too_small = self.std is not None and self.std <= 0
        return super().problems() + ([("std", f"must be above 0, not {self.std}")] if too_small else [])


@dataclass(frozen=True, eq=False)
class ValuePrediction(Prediction):
    """The number that belongs to a row."""

    label: float


@TASKS.add("regress")
class Regress(PooledTextTask):
    """Predicts one number for each row, trained by the squared error of standardized labels."""

    Config: ClassVar[type] = RegressConfig
    prediction_class: ClassVar[type[Prediction]] = ValuePrediction
    title = "regression model"
    nouns = Nouns("row", "row", "text", "badly predicted rows", training_metric="Pearson r", training_key="pearson")
    formulas: ClassVar[dict[str, Formula]] = FORMULAS
    predicts_values = True
    example = "--file rows.csv"
    comparison_settings = ("metric", "pair", "integers")
    shared_settings = ("pair", "integers")

    def __init__(self, config: RegressConfig, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.primary_metric = config.metric

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        config = self.config
        width, mixed = self.head_input(backbone)
        options = {"dropout": config.dropout, "mixed": mixed, "dense": config.dense, "bias": config.head_bias}
        units = {"mean": config.mean or 0.0, "std": config.std or 1.0}
        return {"label": RegressionHead(pooled_width(width, config.pool), **units, **options)}

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_texts_or_pairs(path, pair=config.pair, **options)

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        numbers = label_values(records)
        if numbers.min() == numbers.max():
            raise UserError(f"{records.source}: all labels are {numbers[0]:g}; there is nothing to learn")
        inferred = {
            "pair": "text_b" in records.columns,
            "mean": float(numbers.mean()),
            "std": float(numbers.std()),
            "lowest": float(numbers.min()),
            "highest": float(numbers.max()),
            "integers": bool((numbers == np.rint(numbers)).all()),
        }
        return replace(config, **{name: value for name, value in inferred.items() if getattr(config, name) is None})

    @classmethod
    def check_training_labels(cls, config: Any, records: Records) -> list[str]:
        count = len(np.unique(label_values(records)))
        if count == 2:
            return [f"{records.source}: the labels have two values only; --task classify predicts classes"]
        return []

    @classmethod
    def strata(cls, records: Records) -> list[str]:
        """Quantiles of the labels: hardly two rows have the same label."""
        if records.labels is None:
            return records.strata
        numbers = label_values(records)
        edges = np.unique(np.quantile(numbers, np.arange(1, STRATA) / STRATA))
        return [str(number) for number in np.searchsorted(edges, numbers, side="right")]

    @classmethod
    def describe_labels(cls, records: Records) -> dict[str, Any]:
        if records.labels is None:
            return {"classes": None}
        numbers = label_values(records)
        statistics = {"mean": numbers.mean(), "std": numbers.std(), "lowest": numbers.min(), "highest": numbers.max()}
        return {"classes": None, "labels": {name: float(f"{value:.6g}") for name, value in statistics.items()}}

    def check(self, records: Records) -> None:
        check_same_texts(records, pair=self.config.pair)
        if records.labels is not None:
            label_values(records)

    def label_array(self, records: Records) -> np.ndarray:
        return label_values(records)

    def label_tensors(self, data: EncodedRows, indices: Sequence[int]) -> dict[str, Tensor]:
        """Standardized labels."""
        if data.labels is None:
            return {}
        return {"label": torch.from_numpy(self.standardized(data.labels[list(indices)]).astype(np.float32))}

    def standardized(self, values: Any) -> Any:
        return (values - (self.config.mean or 0.0)) / (self.config.std or 1.0)

    # From batches to predictions

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        """(N, 1) the predicted value, which attributions explain."""
        return model.heads["label"](self.pooled_features(model, batch)).float()

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        """The squared error, and the moments from which the correlation follows."""
        labels = batch.labels["label"]  # (N,)
        mask = (labels != IGNORE_INDEX).float()
        predicted = self.standardized(self.class_scores(model, batch)[:, 0])
        return {"label": (mask * (predicted - labels) ** 2).sum(), **batch_moments(labels, predicted, mask)}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        rows = max(1, counts["label"])
        loss, moments = sums["label"] / rows, total_moments(sums, rows)
        scores = {"pearson": float(pearson(moments)), "r2": float(r2(moments))}
        return {"loss": loss, **scores, "rmse": (self.config.std or 1.0) * loss**0.5}

    def outputs(self, model: Model, batch: Batch) -> Tensor:
        """(N, 1)"""
        return model.heads["label"](self.pooled_features(model, batch, inference=True)).float()

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        return [ScaleValue(prediction[self.target], self.config.lowest, self.config.highest)]

    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return [{self.target: float(f"{value:.6g}")} for value in values_of(outputs).tolist()]

    def as_text(self, prediction: dict[str, Any]) -> str:
        return f"{prediction[self.target]:.4g}"

    # Metrics and error analysis

    def row_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> RowMetrics:
        names = dict.fromkeys([self.primary_metric, "pearson", "spearman", "mae", "rmse", "r2"])
        predicted = values_of(outputs)
        metrics = regression_metrics(data.labels, predicted, list(names))
        if self.config.integers:
            rounded = np.clip(np.rint(predicted), self.config.lowest, self.config.highest)
            metrics |= regression_metrics(data.labels, rounded, ["quadratic_kappa"])
        return metrics

    def extra_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        return {"loss": float(np.mean(((values_of(outputs) - data.labels) / (self.config.std or 1.0)) ** 2))}

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Labels and predictions, and the rows with the largest errors."""
        predicted, labels, texts = values_of(outputs), data.labels, rows.display_texts
        worst = np.argsort(-np.abs(predicted - labels), kind="stable")[:MAX_ERRORS].tolist()
        mistakes = []
        for number, row in enumerate(worst):
            difference = float(predicted[row] - labels[row])
            values = {"label": f"{labels[row]:g}", "predicted": f"{predicted[row]:.4g}"}
            record = error_record(rows.location(row), texts[row], **values, confidence=None, error=difference)
            if attribute is not None and number < MAX_ATTRIBUTED:
                record["tokens"] = [(token, round(weight, 5)) for token, weight in attribute(row, 0)]
            mistakes.append(record)
        drawn = np.linspace(0, len(labels) - 1, min(MAX_POINTS, len(labels))).astype(int)
        points = {"true": labels[drawn].tolist(), "predicted": predicted[drawn].astype(float).round(5).tolist()}
        return {"points": points, "mistakes": mistakes}

    # Export

    def graph_spec(self) -> GraphSpec:
        if self.is_pair:
            return pair_graph("regression", "The value of two texts.", PAIR_VALUE, outputs=("value",))
        check_windows(self)
        script = VALUE.replace("PARTS", TRUNCATION[self.long])
        return GraphSpec("regression", "The value of a text.", ("value",), script=script)


def values_of(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """(N,) predicted values from the outputs of each row."""
    return np.stack(outputs)[:, 0].astype(np.float64) if len(outputs) else np.zeros(0)


def label_values(records: Records) -> np.ndarray:
    """(N,) labels as numbers; others are refused with their locations."""
    values, problems = np.empty(len(records)), []
    for row, label in enumerate(records.labels or []):
        try:
            values[row] = float(label)
        except ValueError:
            values[row] = np.nan
        if not np.isfinite(values[row]):
            hint = ", decimals are written with a point" if "," in label else ""
            problems.append(f"{records.location(row)}: label {label!r} is not a number{hint}")
    if problems:
        raise UserError(join_some(problems, MAX_PROBLEMS))
    return values
