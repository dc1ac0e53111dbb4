"""The interface of tasks that learn from labelled rows.

B sequences, N examples (one sequence each unless a long one is split), T tokens, D width, L layers, C classes.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.intervals import SufficientStatistics
from headstock.model.batch import Batch, count_real_tokens
from headstock.model.layer_features import select_layers
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, Lens, Task, bos_id, closing_ids
from headstock.tasks.error_analysis import length_analysis, most_confident_errors, reliability
from headstock.tasks.graph_spec import GraphSpec
from headstock.tasks.wording import Nouns

RowMetric = tuple[np.ndarray, np.ndarray] | SufficientStatistics
RowMetrics = Mapping[str, RowMetric]
Attribution = Callable[[int, int], list[tuple[str, float]]]  # row and class -> tokens and their weights


def metric_value(metric: RowMetric) -> float:
    """A metric over all rows."""
    if isinstance(metric, SufficientStatistics):
        return float(metric.total())
    numerator, denominator = metric
    return float(numerator.sum() / max(denominator.sum(), 1e-9))


UNLIMITED = 1 << 30  # a sequence length that cuts no row


class EncodedRows(Protocol):
    """Tokenized rows, with their labels as numbers where they have any."""

    labels: Any  # None where the rows have none
    places: list[str]
    bytes: int

    def __len__(self) -> int: ...


class LabelledTask(Task):
    """A task that learns from rows with a target column and predicts it for others."""

    is_labelled = True
    lens: ClassVar[Lens] = "none"
    target: ClassVar[str]  # the column that is predicted
    input_column: ClassVar[str] = "text"  # the column that --column names
    nouns: ClassVar[Nouns] = Nouns()  # the words of reports
    multilabel: bool = False  # a row may have several classes
    primary_metric: str = "accuracy"  # the metric that comparisons use
    verb: ClassVar[str] = "predict"  # the command that uses a run,
    example: ClassVar[str] = '"..."'  # and its example argument
    row_form: ClassVar[str] = "a text (str)"  # a row in Python, for messages
    row_is_text: ClassVar[bool] = False  # a row is one text, so that files can be streamed
    formulas: ClassVar[dict[str, Callable[[np.ndarray], np.ndarray]]] = {}  # of corpus-level metrics
    can_ensemble: ClassVar[bool] = True  # outputs of several models can be averaged
    can_freeze_backbone: ClassVar[bool] = True  # the head can be trained alone
    reuses_head: ClassVar[bool] = False  # the head of the pretrained run is reused
    training_defaults: ClassVar[dict[str, Any]] = {}  # overrides of the training settings

    def __init__(self, config: Any, tokenizer: Tokenizer | None):
        """Without a tokenizer, only predictions can be scored."""
        super().__init__(config, tokenizer)  # type: ignore[arg-type]
        if tokenizer is not None:
            self.bos = bos_id(tokenizer, getattr(config, "opening", self.bos_role))
            self.pad_id = tokenizer.pad or 0
            self.suffix = closing_ids(tokenizer) if getattr(config, "closed", False) else ()

    # From files to batches

    @classmethod
    def read_file(
        cls,
        path: str | Path,
        *,
        config: Any,
        columns: Mapping[str, str] | None = None,
        strict: bool = True,
        skip_blank: bool = False,
    ) -> Records:
        """The rows of a file, with the columns of this task; `strict` requires the target column."""
        return cls.read_rows(path, config, columns=columns, strict=strict, skip_blank=skip_blank)

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        """Read a file with the reader of this task, by default one for texts with a label."""
        return read_records(path, **options)

    @staticmethod
    def is_row(row: Any) -> bool:
        """Whether a Python value has the form that `row_form` describes."""
        return isinstance(row, str)

    def row_from_texts(self, texts: Sequence[str]) -> Any:
        """A row, as a program hands it over, from its texts."""
        return tuple(texts) if self.texts_per_row > 1 else texts[0]

    def check_rows(self, rows: Sequence[Any]) -> None:
        if not all(self.is_row(row) for row in rows):
            raise UserError(f"a row of this run is {self.row_form}")

    @abstractmethod
    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Rows given in Python as columns."""

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        """Fill in the settings that the training rows determine, such as the classes."""
        return config

    @classmethod
    def check_training_labels(cls, config: Any, records: Records) -> list[str]:
        """Warnings about the labels of the training file; labels that make no sense are refused."""
        return []

    def with_settings(self, **settings: Any) -> Self:
        """The same task with other settings."""
        return type(self)(replace(self.config, **settings), self.tokenizer) if settings else self

    @abstractmethod
    def check(self, records: Records) -> None:
        """Refuse unknown labels, naming the location of each."""

    @abstractmethod
    def prepare(self, records: Records, *, labelled: bool = True) -> Any:
        """Tokenize rows."""

    # From batches to answers

    @abstractmethod
    def outputs(self, model: Model, batch: Batch) -> Tensor | list[Tensor]:
        """The numbers from which each example is predicted; an ensemble averages them.

        One tensor (N, ...) where all examples have the same shape, otherwise a list of N.
        """

    @abstractmethod
    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The results of `predict`, one per row."""

    def as_text(self, prediction: dict[str, Any]) -> str:
        """A prediction for the terminal."""
        return json.dumps(prediction, ensure_ascii=False)

    @abstractmethod
    def row_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> RowMetrics:
        """For each metric the numerator and denominator of every row; the metric is the ratio of their sums.

        A metric of `formulas` has SufficientStatistics instead.
        """

    def true_and_predicted(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, int] | None:
        """True and predicted class ids, (N,) both, and the number of classes, where each row has one class."""
        return None

    def true_class_ids(self, data: Any) -> np.ndarray | None:
        """The class ids over which accuracy is computed, of rows or words; None for other tasks."""
        return None

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        """(N, C) the unnormalized score of every class, which attributions explain; where `predicts_classes`."""
        raise NotImplementedError(f"{type(self).__name__} predicts no class for a whole row")

    def graph_spec(self) -> GraphSpec:
        """How an exported graph of a model of this task is described."""
        settings = {"classes": list(self.config.classes)} if self.predicts_classes else {}
        return GraphSpec(self.name, f"A {self.title}.", settings=settings)

    def graph_outputs(self, model: Model, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """What an exported graph computes for whole rows, in the order of the spec's outputs."""
        return self.class_scores(model, batch)

    def lens_scores(self, model: Model, vectors: Tensor, padding: Tensor | None) -> Tensor:
        """(B, C) the class scores from one layer's vectors (B, T, D), where `lens` is "class"."""
        raise NotImplementedError(f"{type(self).__name__} has no class head to read a layer with")

    def row_length(self, data: Any) -> int:
        """The tokens, with special tokens, that the first row takes when nothing of it is cut."""
        return int(self.examples(data, length=UNLIMITED).lengths[0])  # type: ignore[attr-defined]

    def for_loss(self) -> Self:
        """The task without any decoding that validation may add to its loss."""
        return self

    def confidences(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        """The confidence in each prediction and whether it is correct, (N,) both; None where there is no such thing."""
        return None

    def predicted_target(self, prediction: Mapping[str, Any]) -> Any:
        """The predicted value of the target column."""
        return prediction[self.target]

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """What a report shows of a model's errors: any of `confusion`, `lengths`, `calibration` and `mistakes`.

        `attribute` gives the weights of a row's tokens in the score of a class.
        """
        if (judged := self.confidences(data, outputs)) is None:
            return {}
        confidence, correct = judged
        texts, predictions = rows.display_texts, self.predictions(data, outputs)
        words = np.array([len(text.split()) for text in texts])
        return {
            "lengths": length_analysis(words, correct, called=self.nouns.wrong),
            "calibration": reliability(confidence, correct),
            "mistakes": [
                {
                    "place": rows.location(row),
                    "text": texts[row],
                    "label": str(rows.columns[self.target][row]),
                    "predicted": str(self.predicted_target(predictions[row])),
                    "confidence": round(float(confidence[row]), 5),
                    "tokens": [],
                }
                for row in most_confident_errors(confidence, correct)
            ],
        }

    def extra_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
        """Metrics without an interval, such as the mean loss."""
        return {}

    def metric_signatures(self) -> dict[str, str]:
        """How metrics were computed, such as sacreBLEU signatures."""
        return {}

    def reading_warnings(self, data: Any, *, length: int) -> list[str]:
        """Warnings about how rows are read, such as truncation."""
        return []

    def token_features(self, model: Model, batch: Batch) -> Tensor:
        """(B, T, D) features of the configured layers; (B, T, L + 1, D) where the head mixes layers."""
        if batch.features is not None:
            return batch.features
        if self.config.layers == "last":
            return model(batch).hidden
        return select_layers(model.backbone, model(batch, keep_layers=True), self.config.layers)

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """The features of a frozen backbone on the CPU: for each example one (T, ...) tensor per sequence."""
        found = self.token_features(model, batch).float().cpu()
        real = [found.size(1)] * len(found) if batch.padding is None else (~batch.padding).sum(1).tolist()
        rows = [row[:count] for row, count in zip(found, real, strict=True)]
        if batch.example_ids is None:
            return [[row] for row in rows]
        kept: list[list[Tensor]] = [[] for _ in range(int(batch.example_ids[-1]) + 1)]
        for owner, row in zip(batch.example_ids.tolist(), rows, strict=True):
            kept[owner].append(row)
        return kept

    def with_features(self, examples: Examples, kept: "CachedFeatures") -> Examples:
        """The examples with cached features instead of tokens."""
        return ExamplesWithFeatures(examples, kept)

    def tokens(self, batch: Batch) -> int:
        return count_real_tokens(batch)


def is_labelled(task: Task) -> TypeGuard[LabelledTask]:
    """Whether a task learns from labelled rows, known to a type checker."""
    return task.is_labelled


def nouns_of(task: str | None) -> Nouns:
    """How reports speak of the rows of a task; of an unnamed or unknown one (results of older runs), of texts."""
    known = TASKS.get(task) if task in TASKS.names() else TASKS.get("classify")
    return known.nouns if issubclass(known, LabelledTask) else Nouns()


@dataclass
class CachedFeatures:
    """Rows with the features of a frozen backbone, computed once."""

    data: Any  # EncodedRows
    vectors: Tensor  # all features, concatenated
    parts: list[list[tuple[int, int]]]  # for each example, the spans of its sequences

    @property
    def bytes(self) -> int:
        return self.data.bytes

    @classmethod
    def of(cls, data: Any, kept: Sequence[Sequence[Tensor]]) -> "CachedFeatures":
        parts, at = [], 0
        for rows in kept:
            spans = []
            for row in rows:
                spans.append((at, at + len(row)))
                at += len(row)
            parts.append(spans)
        return cls(data, torch.cat([row for rows in kept for row in rows]), parts)


class ExamplesWithFeatures:
    """Examples whose batches carry cached features."""

    def __init__(self, examples: Examples, kept: CachedFeatures):
        self.examples, self.kept, self.name = examples, kept, examples.name
        if hasattr(examples, "lengths"):  # the same batches as without a cache
            self.lengths = examples.lengths

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = self.examples.batch(indices)
        spans = [span for index in indices for span in self.kept.parts[index]]
        vectors = self.kept.vectors
        features = vectors.new_zeros(*batch.tokens.shape, *vectors.shape[1:])  # (B, T, ...)
        for row, (begin, end) in enumerate(spans):
            features[row, : end - begin] = vectors[begin:end]
        batch.features = features
        return batch


def texts_in(row: Any) -> list[str] | None:
    """The texts of a list, tuple or array; None for anything else."""
    several = (isinstance(row, Sequence) and not isinstance(row, str | bytes)) or getattr(row, "ndim", 0) == 1
    return list(row) if several and all(isinstance(text, str) for text in row) else None


def segment_ids(tokens: Tensor, separator: int) -> Tensor:
    """(B, T) segment ids: 0 up to and including the first separator, then 1."""
    marks = (tokens == separator).long()
    marks[:, 0] = 0  # the opening mark, which in some tokenizers (GPT-2's) is the same one
    return ((marks.cumsum(1) - marks) > 0).long()


def separator_id(tokenizer: Tokenizer) -> int:
    """The token between two texts: the separator, or else the EOS token."""
    found = tokenizer.sep if tokenizer.sep is not None else tokenizer.eos
    if found is None:
        raise UserError("this tokenizer has no mark to put between two texts ([SEP] or an end mark)")
    return found
