"""What all tasks learned from labelled rows share, so that one fine-tuning, comparison and report serve them all.

B rows read, N examples (one row each unless a long one is read in several), T tokens, D width, L layers.
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


def metric_value(tally: RowMetric) -> float:
    """A metric over all rows."""
    if isinstance(tally, SufficientStatistics):
        return float(tally.total())
    hits, of = tally
    return float(hits.sum() / max(of.sum(), 1e-9))


UNLIMITED = 1 << 30  # a sequence length that cuts no row


class EncodedRows(Protocol):
    """Rows as a task reads them: cut into tokens, their labels as numbers where they have any."""

    labels: Any  # None where the rows have none
    places: list[str]
    bytes: int

    def __len__(self) -> int: ...


class LabelledTask(Task):
    """A task whose labels come from people: its rows have a column for them, and a run of it predicts."""

    is_labelled = True
    lens: ClassVar[Lens] = "none"
    target: ClassVar[str]  # the column with what people said
    input_column: ClassVar[str] = "text"  # the column that --column names
    nouns: ClassVar[Nouns] = Nouns()  # how reports speak of its rows
    multilabel: bool = False  # a row may have several classes
    primary_metric: str = "accuracy"  # the metric by which models are compared
    verb: ClassVar[str] = "predict"  # the verb that a run of it is for,
    example: ClassVar[str] = '"..."'  # and what `headstock predict RUN` is given
    row_form: ClassVar[str] = "a text (str)"  # what a program hands over as one row
    row_is_text: ClassVar[bool] = False  # a row is one text, so that files of any size can be read as they come
    formulas: ClassVar[dict[str, Callable[[np.ndarray], np.ndarray]]] = {}  # of metrics that are no ratio of sums
    can_ensemble: ClassVar[bool] = True  # the outputs of several models have a mean, so that there can be an ensemble
    can_freeze_backbone: ClassVar[bool] = True  # there is a head to be trained alone
    reuses_head: ClassVar[bool] = False  # the run it begins from has a head of the same use, which is taken over
    training_defaults: ClassVar[
        dict[str, Any]
    ] = {}  # settings of training that suit it, where those of all others do not

    def __init__(self, config: Any, tokenizer: Tokenizer | None):
        """Without a tokenizer it can read nothing, but still judge what others predict."""
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
        """Whether a program handed over a row as this task reads it, of the form that `row_form` names."""
        return isinstance(row, str)

    def row_from_texts(self, texts: Sequence[str]) -> Any:
        """A row, as a program hands it over, from its texts."""
        return tuple(texts) if self.texts_per_row > 1 else texts[0]

    def check_rows(self, rows: Sequence[Any]) -> None:
        if not all(self.is_row(row) for row in rows):
            raise UserError(f"a row of this run is {self.row_form}")

    @abstractmethod
    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Rows as a program hands them over, such as bare texts, column by column."""

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        """The settings with what only the training rows can tell, such as the classes."""
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
        """Refuse labels that this task does not know, each named with its place."""

    @abstractmethod
    def prepare(self, records: Records, *, labelled: bool = True) -> Any:
        """Rows as this task reads them."""

    # From batches to answers

    @abstractmethod
    def outputs(self, model: Model, batch: Batch) -> Tensor | list[Tensor]:
        """For each example the numbers its prediction is made from; those of several models may be averaged.

        Where they are as many for each example, one tensor (N, ...) has them all.
        """

    @abstractmethod
    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """What `predict` says of each row."""

    def as_text(self, prediction: dict[str, Any]) -> str:
        """A prediction as a person reads it."""
        return json.dumps(prediction, ensure_ascii=False)

    @abstractmethod
    def row_metrics(self, data: Any, outputs: Sequence[np.ndarray]) -> RowMetrics:
        """By metric a numerator and a denominator for each row: the metric is the one sum over the other.

        A metric of `formulas` has Statistics instead.
        """

    def true_and_predicted(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, int] | None:
        """(N,) what is true, (N,) what is predicted, and how many classes there are, where a row is of one class."""
        return None

    def true_class_ids(self, data: Any) -> np.ndarray | None:
        """The class numbers that accuracy is counted over, of texts or of words; None where there are none."""
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
        """Metrics that are no ratio of sums over the rows, such as the mean loss."""
        return {}

    def metric_signatures(self) -> dict[str, str]:
        """By metric, how it was counted, where a name alone does not say it."""
        return {}

    def reading_warnings(self, data: Any, *, length: int) -> list[str]:
        """What a user should know of how rows are read, such as that some were cut."""
        return []

    def token_features(self, model: Model, batch: Batch) -> Tensor:
        """(B, T, D) of the layers that the settings ask for; (B, T, L + 1, D) where the head mixes them."""
        if batch.features is not None:
            return batch.features
        if self.config.layers == "last":
            return model(batch).hidden
        return select_layers(model.backbone, model(batch, keep_layers=True), self.config.layers)

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """What a frozen backbone makes of each example, to be kept off a GPU: one tensor a row of it, (T, ...)."""
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
        """The examples with what the frozen backbone made of them in the place of what it would read."""
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
    """Rows together with what a frozen backbone made of them, computed once."""

    data: Any  # the rows as the task reads them
    vectors: Tensor  # all that was kept, end to end
    parts: list[list[tuple[int, int]]]  # where in it the rows of each example begin and end

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
    """Examples whose batches bring the features of their tokens with them."""

    def __init__(self, examples: Examples, kept: CachedFeatures):
        self.examples, self.kept, self.name = examples, kept, examples.name
        if hasattr(examples, "lengths"):  # the same order of reading as without a memory
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
    """The texts that a row is a list, tuple or array of; None where it is something else."""
    several = (isinstance(row, Sequence) and not isinstance(row, str | bytes)) or getattr(row, "ndim", 0) == 1
    return list(row) if several and all(isinstance(text, str) for text in row) else None


def segment_ids(tokens: Tensor, separator: int) -> Tensor:
    """(B, T) 0 up to and with a row's first separator, 1 after it: which of two texts a token is of."""
    marks = (tokens == separator).long()
    marks[:, 0] = 0  # the opening mark, which in some tokenizers (GPT-2's) is the same one
    return ((marks.cumsum(1) - marks) > 0).long()


def separator_id(tokenizer: Tokenizer) -> int:
    """The mark between two texts: its own, or else the end mark."""
    found = tokenizer.sep if tokenizer.sep is not None else tokenizer.eos
    if found is None:
        raise UserError("this tokenizer has no mark to put between two texts ([SEP] or an end mark)")
    return found
