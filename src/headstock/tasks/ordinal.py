"""Ordinal regression: predicts one of a few ordered classes, such as one to five stars.

N examples, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.intervals import Formula
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.heads import OrdinalHead, pooled_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS
from headstock.tasks.class_labels import (
    CLASS_NUMBER,
    ClassConfig,
    find_classes,
    infer_class_settings,
    label_numbers,
    label_warnings,
    quote_names,
)
from headstock.tasks.classify import Classify, ClassPrediction
from headstock.tasks.labelled import EncodedRows, Nouns, RowMetrics
from headstock.tasks.pooled_text import LongText, check_same_texts, read_texts_or_pairs
from headstock.tasks.regression_metrics import (
    FORMULAS,
    batch_moments,
    quadratic_kappa,
    regression_metrics,
    total_moments,
)
from headstock.tasks.widgets import DisplayPart, ScaleValue

MAX_LEVELS = 30  # more distinct ratings than this are a regression target


@dataclass(frozen=True)
class OrdinalConfig(ClassConfig):
    pair: bool | None = None  # rows of two texts; from the columns of the training file
    order: tuple[str, ...] = ()  # the classes from the lowest to the highest; numbers have their own order
    cutpoints: tuple[float, ...] = ()  # initial thresholds, from the frequencies of the classes unless given
    long: LongText = "head"  # what is read of a text longer than the context; windows are averaged

    def problems(self) -> list[tuple[str, str]]:
        increasing = all(low < high for low, high in zip(self.cutpoints, self.cutpoints[1:], strict=False))
        problems = [] if increasing else [("cutpoints", "must increase")]
        if self.cutpoints and self.classes and len(self.cutpoints) != len(self.classes) - 1:
            problems.append(("cutpoints", f"must be one fewer than the {len(self.classes)} classes"))
        return super().problems() + problems


@dataclass(frozen=True, eq=False, kw_only=True)
class OrdinalPrediction(ClassPrediction):
    """The class of a row on a scale."""

    expected: float  # the mean of the classes, weighted by their probabilities


@TASKS.add("ordinal")
class Ordinal(Classify):
    """Classification that knows the order of the classes: all of them share one score and differ in thresholds."""

    Config: ClassVar[type] = OrdinalConfig
    prediction_class = OrdinalPrediction
    title = "ordinal classifier"
    nouns = Nouns("row", "row", "text", "wrongly rated rows", "quadratic kappa", training_key="quadratic_kappa")
    example = "--file rows.csv"
    huggingface_head = None
    linear_classes = False
    primary_metric = "quadratic_kappa"
    formulas: ClassVar[dict[str, Formula]] = {name: FORMULAS[name] for name in ("quadratic_kappa", "mae", "spearman")}
    comparison_settings = ("many_classes", "pair", "order")
    shared_settings = ("classes", "pair", "order")

    def __init__(self, config: OrdinalConfig, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.selection_metric = "quadratic_kappa"

    @property
    def levels(self) -> np.ndarray:
        """(C,) the classes as numbers: their own, or where they are words their ranks."""
        classes = self.config.classes
        numeric = all(CLASS_NUMBER.fullmatch(name) for name in classes)
        return np.array([float(name) for name in classes] if numeric else range(1, len(classes) + 1), dtype=float)

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        config = self.config
        width, mixed = self.head_input(backbone)
        options = {"dropout": config.dropout, "mixed": mixed, "dense": config.dense}
        count = len(config.classes)
        cutpoints = config.cutpoints or initial_cutpoints(np.ones(count))
        return {"label": OrdinalHead(pooled_width(width, config.pool), cutpoints, **options)}

    # From records to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        return read_texts_or_pairs(path, pair=config.pair, **options)

    @classmethod
    def check_training_labels(cls, config: Any, records: Records) -> list[str]:
        names = set(records.labels or [])
        if not config.classes and not config.many_classes and len(names) > MAX_LEVELS:
            hint = "predict a number with --task regress" if all_numbers(names) else "is this the right column?"
            raise UserError(f"{records.source}: {len(names):,} distinct labels are too many for ratings; {hint}")
        if not config.classes and not config.order and not all_numbers(names):
            hint = """name them from the lowest to the highest, as in --set 'order=["low", "high"]'"""
            raise UserError(f"{records.source}: the labels ({quote_names(sorted(names))}) are not numbers; {hint}")
        return label_warnings(records)

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        pair = "text_b" in records.columns if config.pair is None else config.pair
        classes = config.classes or config.order or find_classes(records, None, many=True)
        config = infer_class_settings(replace(config, pair=pair, classes=classes), records)
        if config.cutpoints:
            return config
        counts = np.bincount(label_numbers(records, config), minlength=len(config.classes))
        return replace(config, cutpoints=initial_cutpoints(counts))

    def check(self, records: Records) -> None:
        check_same_texts(records, pair=self.config.pair)
        super().check(records)

    # From batches to predictions

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        """Also the moments of the ranks, from which kappa follows."""
        labels, scores = batch.labels["label"], self.class_scores(model, batch).float()
        moments = batch_moments(labels.float(), scores.argmax(-1).float(), (labels != IGNORE_INDEX).float())
        return self.class_losses(scores, batch.labels, smoothing) | moments

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        kappa = float(quadratic_kappa(total_moments(sums, counts["label"])))
        return super().score(sums, counts, size=size) | {"quadratic_kappa": kappa}

    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Also the expected value, which lies between the classes."""
        levels = self.levels
        return [
            {"label": row["label"], "expected": round(float(levels @ output), 4), "probabilities": row["probabilities"]}
            for row, output in zip(super().predictions(data, outputs), outputs, strict=True)
        ]

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        scale = ScaleValue(prediction["expected"], self.levels.min(), self.levels.max(), "expected value")
        return [*super().display(row, prediction), scale]

    # Metrics

    def row_metrics(self, data: EncodedRows, outputs: Sequence[np.ndarray]) -> RowMetrics:
        predicted, levels = self.predicted_ids(np.stack(outputs)), self.levels
        kappa = regression_metrics(data.labels, predicted, ["quadratic_kappa"])
        values = regression_metrics(levels[data.labels], levels[predicted], ["mae", "spearman"])
        return {**kappa, **super().row_metrics(data, outputs), **values}


def all_numbers(names: Sequence[str] | set[str]) -> bool:
    return all(CLASS_NUMBER.fullmatch(name) for name in names)


def initial_cutpoints(counts: np.ndarray) -> tuple[float, ...]:
    """The log-odds of a label at or below each class but the last, from the rows of each class.

    Half a row more of each class keeps the thresholds apart where a class has no rows.
    """
    shares = np.cumsum(counts + 0.5)[:-1] / (counts.sum() + len(counts) / 2)
    return tuple(np.log(shares / (1 - shares)).round(7).tolist())
