"""The interface of tasks that learn from labelled rows.

B sequences, N examples (one sequence each unless a long one is split), T tokens, D width, L layers, C classes.
"""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeGuard, overload

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.slices import built_in_slices
from headstock.data.tokenizer import Tokenizer
from headstock.errors import ConfigError, UserError
from headstock.intervals import Formula, SufficientStatistics, WeightedMetric
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, pad
from headstock.model.heads import HeadActivation, Pooling
from headstock.model.layer_features import feature_width, select_layers
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, Lens, Task
from headstock.tasks.calibration import risk_coverage
from headstock.tasks.error_analysis import error_record, length_analysis, most_confident_errors, reliability
from headstock.tasks.graph_spec import GraphSpec
from headstock.tasks.predictions import Prediction, UntypedPrediction
from headstock.tasks.slice_scores import slice_scores
from headstock.tasks.special_tokens import separator_id, special_tokens_for
from headstock.tasks.widgets import DisplayPart, InputField, Widget, prediction_table

UNLIMITED = 1 << 30  # a sequence length that truncates no row

RowMetric = tuple[np.ndarray, np.ndarray] | SufficientStatistics
RowMetrics = Mapping[str, RowMetric]
Attribution = Callable[[int, int], list[tuple[str, float]]]  # row and class -> tokens and their weights


def metric_value(metric: RowMetric) -> float:
    """A metric over all rows."""
    if isinstance(metric, SufficientStatistics):
        return float(metric.total())
    numerator, denominator = metric
    return float(numerator.sum() / max(denominator.sum(), 1e-9))


@dataclass(frozen=True)
class Nouns:
    """What a report calls the rows of a task and what is predicted for them, in the singular except `errors`."""

    row: str = "row"
    item: str = "row"  # what one prediction is about
    input: str = "text"  # what may be long or short
    errors: str = "wrongly predicted rows"
    training_metric: str = "accuracy"  # the quantity of the training curves, in words
    note: str = ""  # what counts as a correct prediction, where that needs explaining
    unit: str = "label"  # what the number of training rows counts
    training_key: str = "accuracy"  # `training_metric` in the task's scores; higher is better

    @property
    def rows(self) -> str:
        return f"{self.row}s"


@dataclass(frozen=True)
class HeadConfig:
    """Settings of a head on a pretrained backbone."""

    layers: str = "last"  # features to read: last, sum4, concat4, mix, or a layer's number
    dropout: float = 0.1  # before the head
    opening: Literal["start", "cls"] = "start"  # the first special token, as in pretraining

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self) -> list[tuple[str, str]]:
        return [] if 0 <= self.dropout < 1 else [("dropout", f"must be from 0 to below 1, not {self.dropout}")]


@dataclass(frozen=True)
class PooledHeadConfig(HeadConfig):
    """Settings of a head that reads one vector per row."""

    pool: Pooling = "last"  # the vector of a text: last real token, first special token, mean, max, or three of them
    closed: bool = False  # a separator ends the text, as in pretraining
    dense: HeadActivation = "none"  # activation of an additional hidden layer; BERT's classifiers have tanh
    head_bias: bool = True  # Hugging Face's classifiers of causal models have no bias


@dataclass
class EncodedRows:
    """Tokenized rows. Subclasses add one list per further column."""

    tokens: list[Any]  # the ids of each row
    labels: Any  # one entry per row, as the task's loss needs them; None where the rows have none
    locations: Sequence[str]  # where each row comes from
    soft_labels: np.ndarray | None = field(default=None, kw_only=True)  # (N, C) probabilities that replace the labels

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Sequence[int]) -> Self:
        """Some of the rows, in the given order."""

        def pick(column: Any) -> Any:
            if column is None:
                return None
            return column[list(rows)] if isinstance(column, np.ndarray) else [column[row] for row in rows]

        return replace(self, **{column.name: pick(getattr(self, column.name)) for column in fields(self)})


class RowExamples:
    """The base of examples that are encoded rows."""

    lengths: np.ndarray  # tokens of each example, in all of its sequences

    def __init__(self, data: EncodedRows):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def name(self, index: int) -> str:
        return self.data.locations[index]


class LabelledTask(Task):
    """A task that learns from rows with a target column and predicts it for others."""

    is_labelled = True
    lens: ClassVar[Lens] = "none"
    multilabel: bool = False  # a row may have several classes
    thresholds: Sequence[float] = ()  # decision thresholds of the classes, set by a calibrated pipeline

    # Rows
    target: ClassVar[str]  # the column that is predicted
    input_column: ClassVar[str] = "text"  # the column that --column names
    input_columns: tuple[str, ...] = ("text",)  # all columns that are read, in the order of `row_from_texts`
    example_row: ClassVar[Any] = "A dull film with a great ending."  # in the documentation of an API
    prediction_settings: ClassVar[dict[str, tuple[float, float]]] = {}  # that may differ by request, with their range
    row_form: str = "a text (str)"  # a row in Python, for messages
    prediction_class: ClassVar[type[Prediction]] = UntypedPrediction  # its fields are the keys of `predictions`

    # Metrics and reports
    nouns: ClassVar[Nouns] = Nouns()
    primary_metric: str = "accuracy"  # the metric that comparisons use
    selection_metric: str | None = None  # the validation metric that selects the best checkpoint; None for the loss
    formulas: ClassVar[dict[str, Formula]] = {}  # of corpus-level metrics
    verb: ClassVar[str] = "predict"  # the command that uses a run,
    example: ClassVar[str] = '"..."'  # and its example argument
    input_example: ClassVar[str] = "A warm, funny film with a heart."  # a text that the web page starts with

    # Training
    can_freeze_backbone: ClassVar[bool] = True  # the head can be trained alone
    reuses_head: ClassVar[bool] = False  # training starts from the head of the pretrained run
    can_ensemble: ClassVar[bool] = True  # outputs of several models can be averaged
    training_defaults: ClassVar[dict[str, Any]] = {}  # overrides of the training settings

    # Comparisons
    comparison_settings: ClassVar[tuple[str, ...]] = ("many_classes",)  # that also say how arms are compared
    shared_settings: ClassVar[tuple[str, ...]] = ("classes", "separator", "unanswerable")  # from all training rows

    def __init__(self, config: Any, tokenizer: Tokenizer | None):
        """Without a tokenizer, only predictions can be scored."""
        super().__init__(config, tokenizer)  # type: ignore[arg-type]
        self.has_unused_parameters = getattr(config, "layers", "last").isdecimal()  # those of the layers above
        if tokenizer is not None:
            self.special = special_tokens_for(self, tokenizer)
            self.bos, self.pad_id = self.special.prefix[0], self.special.pad
            if self.texts_per_row > 1:
                self.separator = separator_id(tokenizer)

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """The selection metric first; the loss breaks ties."""
        loss = metrics["loss"]
        if self.selection_metric is None:
            return loss
        return -metrics[self.selection_metric] + 1e-7 * loss / (1 + loss)  # below one prediction in a million

    # From files to batches

    @classmethod
    def read_file(cls, path: str | Path, *, config: Any, **options: Any) -> Records:
        """The rows of a file, by default of texts with a label. The options are those of `read_records`."""
        return read_records(path, **options)

    @property
    def row_is_text(self) -> bool:
        """Whether a row is one text, so that files can be streamed."""
        return self.texts_per_row == 1 and self.input_column == "text"

    def is_row(self, row: Any) -> bool:
        """Whether a Python value has the form that `row_form` describes."""
        return isinstance(row, str)

    def row_from_texts(self, texts: Sequence[str]) -> Any:
        """A row, in the form that `row_form` describes, from its texts."""
        return tuple(texts) if self.texts_per_row > 1 else texts[0]

    def row_from_columns(self, columns: Mapping[str, Any]) -> Any:
        """A row, in the form that `row_form` describes, from its columns by name."""
        if set(columns) != set(self.input_columns):
            names = ", ".join(map(repr, self.input_columns))
            raise UserError(f"a row has the columns {', '.join(map(repr, columns)) or 'of nothing'}, expected {names}")
        return self.row_from_texts([columns[name] for name in self.input_columns])

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

    @classmethod
    def strata(cls, records: Records) -> list[str]:
        """The group of each row, for stratified samples."""
        return records.strata

    @classmethod
    def describe_labels(cls, records: Records) -> dict[str, Any]:
        """What data.json and results.json say about the labels of a file: the rows of each class."""
        return {"classes": None if records.labels is None else dict(sorted(Counter(records.labels).items()))}

    def with_settings(self, **settings: Any) -> Self:
        """The same task with other settings."""
        return type(self)(replace(self.config, **settings), self.tokenizer) if settings else self

    def check(self, records: Records) -> None:
        """Refuse unknown labels, naming the location of each; by default, any label is valid."""

    def label_array(self, records: Records) -> np.ndarray:
        """The labels of rows as numbers, one entry each; where `predicts_classes` or `predicts_values`."""
        raise NotImplementedError(f"{type(self).__name__} predicts no class and no value")

    @abstractmethod
    def prepare(self, records: Records, *, labelled: bool = True) -> Any:
        """Tokenize rows to EncodedRows, without labels unless `labelled`."""

    @abstractmethod
    def row_examples(self, data: Any, length: int) -> Examples:
        """Encoded rows as examples in sequences of at most `length` tokens."""

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if isinstance(data, CachedFeatures):
            return ExamplesWithFeatures(self.row_examples(data.data, length), data)
        return self.row_examples(data, length)

    def row_length(self, data: Any) -> int:
        """The number of tokens of the first row, with special tokens, if it is not truncated."""
        return int(self.row_examples(data, UNLIMITED).lengths[0])  # type: ignore[attr-defined]

    def reading_warnings(self, data: Any, *, length: int) -> list[str]:
        """Warnings about how rows are read, such as truncation."""
        return []

    # From batches to predictions

    def head_input(self, backbone: Backbone) -> tuple[int, int | None]:
        """The width of the features that a head reads, and the number of layers it mixes, if any."""
        layers = self.config.layers
        return feature_width(backbone.width, layers), backbone.depth + 1 if layers == "mix" else None

    def token_features(self, model: Model, batch: Batch) -> Tensor:
        """(B, T, D) features of the configured layers; (B, T, L + 1, D) where the head mixes layers."""
        if batch.features is not None:
            return batch.features
        if self.config.layers == "last":
            return model(batch).hidden
        return select_layers(model.backbone, model(batch, keep_layers=True), self.config.layers)

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """The features of a frozen backbone on the CPU: for each example one (T, ...) tensor per sequence."""
        features = self.token_features(model, batch).float().cpu()
        lengths = [features.size(1)] * len(features) if batch.padding is None else (~batch.padding).sum(1).tolist()
        sequences = [row[:length] for row, length in zip(features, lengths, strict=True)]
        if batch.example_ids is None:
            return [[sequence] for sequence in sequences]
        examples: list[list[Tensor]] = [[] for _ in range(int(batch.example_ids[-1]) + 1)]
        for example, sequence in zip(batch.example_ids.tolist(), sequences, strict=True):
            examples[example].append(sequence)
        return examples

    @abstractmethod
    def outputs(self, model: Model, batch: Batch) -> Tensor | list[Tensor]:
        """The numbers from which each example is predicted; an ensemble averages them.

        One tensor (N, ...) where all examples have the same shape, otherwise a list of N.
        """

    @abstractmethod
    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The results of `predict`, one per row."""

    def predicted_target(self, prediction: Mapping[str, Any]) -> Any:
        """The predicted value of the target column."""
        return prediction[self.target]

    def as_text(self, prediction: dict[str, Any]) -> str:
        """A prediction for the terminal."""
        return json.dumps(prediction, ensure_ascii=False)

    # The web page

    @property
    def input_fields(self) -> tuple[InputField, ...]:
        """The texts of a row by the names of their columns, in the order of `row_from_texts`."""
        return (InputField(self.input_columns[0], self.nouns.row.capitalize(), example=self.input_example),)

    @property
    def widgets(self) -> tuple[Widget, ...]:
        title, endpoint = self.name.capitalize(), f"/v1/{self.name}"
        action, explains = self.verb.capitalize(), self.predicts_classes
        return (Widget(self.name, title, endpoint, self.input_fields, action=action, explains=explains),)

    def display(self, row: Any, prediction: Mapping[str, Any]) -> list[DisplayPart]:
        """How the web page shows the prediction for a row; by default bars of probabilities and a table."""
        return prediction_table(prediction)

    # Metrics and error analysis

    @abstractmethod
    def row_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> RowMetrics:
        """For each metric the numerator and denominator of every row; the metric is the ratio of their sums.

        A metric of `formulas` has SufficientStatistics instead.
        """

    def weighted_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> Mapping[str, WeightedMetric]:
        """Metrics that are no ratio of sums over rows, such as AUROC."""
        return {}

    def extra_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
        """Metrics without an interval, such as the mean loss."""
        return {}

    def metric_signatures(self) -> dict[str, str]:
        """How metrics were computed, such as sacreBLEU signatures."""
        return {}

    def true_and_predicted(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, int] | None:
        """True and predicted class ids, (N,) both, and the number of classes, where each row has one class."""
        return None

    def true_class_ids(self, data: Any) -> np.ndarray | None:
        """The class ids over which accuracy is computed, of rows or words; None for other tasks."""
        return None

    def confidences(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        """The confidence of each prediction and whether it is correct, (N,) both; None for tasks without confidence."""
        return None

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """What a report shows of a model's errors: any of `confusion`, `lengths`, `calibration`, `risk_coverage`,
        `slices` and `mistakes`.

        `attribute` gives the weights of a row's tokens in the score of a class.
        """
        if (confidences := self.confidences(data, outputs)) is None:
            return {}
        confidence, correct = confidences
        predictions = self.predictions(data, outputs)
        words = np.array([len(text.split()) for text in self.input_texts(rows)])
        errors = most_confident_errors(confidence, correct)
        return {
            "lengths": length_analysis(words, correct, errors=self.nouns.errors),
            "calibration": reliability(confidence, correct),
            "risk_coverage": risk_coverage(confidence, correct),
            "slices": self.built_in_slice_scores(rows, data, outputs),
            "mistakes": [self.describe_error(rows, row, predictions[row], confidence[row]) for row in errors],
        }

    def built_in_slice_scores(self, rows: Records, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """The primary metric of texts with contrast, with negation, and by length."""
        metric = self.row_metrics(data, outputs)[self.primary_metric]
        scored = slice_scores(metric, built_in_slices(self.input_texts(rows)))
        return [{"metric": self.primary_metric, **part} for part in scored]

    def input_texts(self, rows: Records) -> list[str]:
        """The texts whose lengths the error analysis considers."""
        return rows.display_texts

    def describe_error(
        self, rows: Records, row: int, prediction: Mapping[str, Any], confidence: float
    ) -> dict[str, Any]:
        """A wrong prediction, for the report."""
        label, predicted = rows.columns[self.target][row], self.predicted_target(prediction)
        (text,) = rows.select([row]).display_texts
        return error_record(rows.location(row), text, label=str(label), predicted=str(predicted), confidence=confidence)

    # Explanations and export

    def for_loss(self) -> Self:
        """The task with settings under which `losses` does nothing but compute the loss."""
        return self

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        """(N, C) the unnormalized score of every class, which attributions explain; where `predicts_classes`."""
        raise NotImplementedError(f"{type(self).__name__} predicts no class for a row")

    def lens_scores(self, model: Model, vectors: Tensor, padding: Tensor | None) -> Tensor:
        """(B, C) the class scores from one layer's vectors (B, T, D), where `lens` is "class"."""
        raise NotImplementedError(f"{type(self).__name__} has no class head to read a layer with")

    def graph_spec(self) -> GraphSpec:
        """How an exported graph of a model of this task is described."""
        settings = {"classes": list(self.config.classes)} if self.predicts_classes else {}
        return GraphSpec(self.name, f"A {self.title}.", settings=settings)

    def graph_outputs(self, model: Model, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """What an exported graph computes, in the order of the spec's outputs."""
        return self.class_scores(model, batch)


def is_labelled(task: Task) -> TypeGuard[LabelledTask]:
    """Whether a task learns from labelled rows, as a type guard."""
    return task.is_labelled


def nouns_of(task: str | None) -> Nouns:
    """How reports name the rows of a task; those of `classify` where it is unknown (results of older runs)."""
    task_class = TASKS.get(task) if task in TASKS.names() else TASKS.get("classify")
    return task_class.nouns if issubclass(task_class, LabelledTask) else Nouns()


@dataclass
class CachedFeatures:
    """Rows with the features of a frozen backbone, computed once."""

    data: Any  # EncodedRows
    features: list[list[Tensor]]  # for each example, those of its sequences


class ExamplesWithFeatures:
    """Examples whose batches have cached features."""

    def __init__(self, examples: Examples, cache: CachedFeatures):
        self.examples, self.cache, self.name = examples, cache, examples.name
        if hasattr(examples, "lengths"):  # the same batches as without a cache
            self.lengths = examples.lengths

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = self.examples.batch(indices)
        sequences = [sequence for index in indices for sequence in self.cache.features[index]]
        batch.features = nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # (B, T, ...)
        return batch


class RowLocations(Sequence[str]):
    """Where each row comes from, such as `train.csv:17`; written out only where it is asked for."""

    def __init__(self, records: Records):
        self.records = replace(records, columns={})  # the texts need not stay in memory

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self.records.location(index) for index in range(*row.indices(len(self)))]
        return self.records.location(row)


def pad_sequences(
    examples: Sequence[Sequence[Sequence[int]]], filler: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sequences of each example as one tensor (B, T), its padding mask, and (B,) the example of each sequence.

    The mask is None without padding, the examples are None where each has one sequence.
    """
    tokens, padding = pad([sequence for sequences in examples for sequence in sequences], filler)
    if len(tokens) == len(examples):
        return tokens, padding, None
    return tokens, padding, torch.repeat_interleave(torch.tensor([len(sequences) for sequences in examples]))


def texts_in(row: Any) -> list[str] | None:
    """The texts of a list, tuple or array; None for anything else."""
    is_list = (isinstance(row, Sequence) and not isinstance(row, str | bytes)) or getattr(row, "ndim", 0) == 1
    return list(row) if is_list and all(isinstance(text, str) for text in row) else None
