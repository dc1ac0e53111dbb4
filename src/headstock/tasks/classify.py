"""Text classification: pooled features and a linear layer.

B sequences, N examples (one sequence each unless a long text is split), C classes, L layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import ClassificationHead, pool, pooled_positions, pooled_width
from headstock.model.layer_features import feature_width
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, pad_with_special_tokens
from headstock.tasks.class_labels import ClassConfig, balanced_weights, find_classes, label_numbers, split_label
from headstock.tasks.error_analysis import EXPLAINED, calibration, class_errors, confusions, length_analysis
from headstock.tasks.graph_spec import CLASSIFY, SIGMOID, SOFTMAX, TRUNCATION, GraphSpec
from headstock.tasks.label_checks import check_class_labels, label_warnings
from headstock.tasks.labelled import Attribution, CachedFeatures, LabelledTask, RowMetrics
from headstock.tasks.wording import Nouns

Long = Literal["head", "tail", "head+tail", "windows"]


@dataclass(frozen=True)
class ClassifyConfig(ClassConfig):
    separator: str | None = None  # splits a label into several classes (multi-label classification)
    long: Long = "head"  # what is read of a long text; windows overlap by half and are averaged

    def problems(self) -> list[tuple[str, str]]:
        blank = [("separator", "must be at least one character")] if self.separator == "" else []
        return super().problems() + blank


@dataclass
class EncodedTexts:
    """Tokenized texts, with their labels as class ids where they have any."""

    tokens: list[Any]  # ids of each text, or a pair of them
    labels: np.ndarray | None  # (N,) class ids, or (N, C) 0 or 1 for multi-label
    places: list[str]
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Sequence[int]) -> "EncodedTexts":
        labels = None if self.labels is None else self.labels[list(rows)]
        return EncodedTexts([self.tokens[i] for i in rows], labels, [self.places[i] for i in rows], self.bytes)


@TASKS.add("classify")
class Classify(LabelledTask):
    """Predicts one class, or with a separator any number of them."""

    Config: ClassVar[type] = ClassifyConfig
    target = "label"
    huggingface_head = "ForSequenceClassification"
    title = "classifier"
    nouns = Nouns("text", "text", "text", "wrongly classified texts", "accuracy")
    predicts_classes = True
    lens = "class"
    row_is_text = True

    def __init__(self, config: ClassConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        self.multilabel = getattr(config, "separator", None) is not None
        if tokenizer is not None:
            self.marks = 1 + len(self.suffix)  # special tokens of a sequence

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width = pooled_width(feature_width(backbone.width, self.config.layers), self.config.pool)
        mixed = backbone.depth + 1 if self.config.layers == "mix" else None
        c = self.config
        more: dict[str, Any] = {"dense": c.dense, "bias": c.head_bias}
        return {"label": ClassificationHead(width, len(c.classes), dropout=c.dropout, mixed=mixed, **more)}

    def head_passes(self, head: str, length: Any) -> Any:
        return 1 / length

    # From records to batches

    @classmethod
    def read_rows(cls, path: str | Path, config: Any, **options: Any) -> Records:
        return read_records(path, separator=config.separator, **options)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        return {"text": list(rows)}

    @classmethod
    def infer_settings(cls, config: Any, records: Records) -> Any:
        if not config.classes:
            separator = getattr(config, "separator", None)
            config = replace(config, classes=find_classes(records, separator, many=config.many_classes))
        if config.balance and not config.class_weights:
            weights = balanced_weights(label_numbers(records, config), len(config.classes))
            config = replace(config, class_weights=weights)
        return config

    @classmethod
    def check_training_labels(cls, config: Any, records: Records) -> list[str]:
        separator = getattr(config, "separator", None)
        if not config.classes and not config.many_classes:
            names = [name for label in records.labels or [] for name in split_label(label, separator)]
            check_class_labels(records.source, names)
        return label_warnings(records, separator)

    def check(self, records: Records) -> None:
        if records.labels is not None:
            label_numbers(records, self.config)

    def prepare(self, records: Records, *, labelled: bool = True) -> EncodedTexts:
        texts = (
            records.texts if self.tokenizer.kind == "lab" else records.display_texts
        )  # the lab's texts are already cut
        return self.labelled(records, self.tokenizer.encode_batch(texts), texts, labelled=labelled)

    def labelled(self, records: Records, tokens: list[Any], texts: Sequence[str], *, labelled: bool) -> EncodedTexts:
        labels = label_numbers(records, self.config) if labelled and records.labels is not None else None
        places = [records.location(i) for i in range(len(records))]
        return EncodedTexts(tokens, labels, places, sum(len(text.encode()) for text in texts))

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if isinstance(data, CachedFeatures):
            return PooledExamples(data)
        return TextExamples(self, data, length)

    def length_of(self, tokens: Sequence[int], length: int) -> int:
        """The number of tokens that are read of a text."""
        whole = len(tokens) + self.marks
        return whole if self.config.long == "windows" else min(whole, length)

    def rows(self, tokens: Sequence[int], length: int) -> list[list[int]]:
        """A text as one sequence of at most `length` tokens, or as overlapping windows."""
        room = max(1, length - self.marks)
        if len(tokens) <= room:
            parts = [tokens]
        elif self.config.long == "head":
            parts = [tokens[:room]]
        elif self.config.long == "tail":
            parts = [tokens[-room:]]
        elif self.config.long == "head+tail":
            parts = [[*tokens[: room // 4], *tokens[room // 4 - room :]]]
        else:
            parts = [tokens[window.start : window.end] for window in windows(len(tokens), room)]
        return [[self.bos, *part, *self.suffix] for part in parts]

    def which_text(self, tokens: Tensor) -> Tensor | None:
        """Segment ids of paired texts; None for single ones."""
        return None

    # From batches to numbers

    def read(self, model: Model, batch: Batch, *, finished: bool = False) -> Tensor:
        """(N, D) pooled features, averaged over the windows of an example; (N, L + 1, D) for a layer mix.

        With `finished` (inference), only the positions that are pooled are computed in the last layer.
        """
        if batch.features is not None:
            return batch.features
        places = pooled_positions(batch, self.config.pool) if finished and self.config.layers == "last" else None
        if places is None:
            vectors = pool(self.token_features(model, batch), batch.padding, self.config.pool)
        else:
            vectors = model(batch, query_positions=places).hidden.squeeze(1)
        if batch.example_ids is None:
            return vectors
        # reading the count from the labels avoids a GPU synchronization
        count = len(batch.labels["label"]) if "label" in batch.labels else int(batch.example_ids[-1]) + 1
        sums = vectors.new_zeros(count, *vectors.shape[1:]).index_add(0, batch.example_ids, vectors)
        rows = vectors.new_zeros(count).index_add(0, batch.example_ids, vectors.new_ones(len(vectors)))
        return sums / rows.view(-1, *[1] * (vectors.dim() - 1))

    def compute_features(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """Pooled features alone."""
        return [[vector[None]] for vector in self.read(model, batch, finished=True).float().cpu()]

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels = batch.labels["label"]
        scores = model.heads["label"](self.read(model, batch)).float()  # (N, C)
        weights = weights_on(scores.device, self.config.class_weights) if self.config.class_weights else None
        if self.multilabel:
            return self.losses_of_several(scores, labels, weights, smoothing)
        loss = F.cross_entropy(
            scores, labels, weights, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
        )
        return {"label": loss, "correct": (scores.argmax(-1) == labels).sum()}

    def losses_of_several(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float
    ) -> dict[str, Tensor]:
        """Binary cross-entropy, averaged over the classes."""
        kept = labels[:, :1] != IGNORE_INDEX  # (N, 1)
        yes = (labels == 1) & kept
        wanted = yes.float() * (1 - smoothing) + smoothing / 2
        loss = F.binary_cross_entropy_with_logits(scores, wanted, kept.float(), pos_weight=weights, reduction="sum")
        chosen = (scores > 0) & kept
        return {
            "label": loss / scores.size(1),
            "correct": ((chosen == yes).all(1) & kept[:, 0]).sum(),
            "found": (chosen & yes).sum(),
            "chosen": chosen.sum(),
            "wanted": yes.sum(),
        }

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = batch.labels["label"]
        return {"label": int(((labels if labels.dim() == 1 else labels[:, 0]) != IGNORE_INDEX).sum())}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        rows = max(1, counts["label"])
        metrics = {"loss": sums["label"] / rows, "accuracy": sums["correct"] / rows}
        if self.multilabel:
            metrics["micro_f1"] = 2 * sums["found"] / max(1.0, sums["chosen"] + sums["wanted"])
        return metrics

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """Accuracy first; the loss breaks ties."""
        best = metrics["micro_f1" if self.multilabel else "accuracy"]
        return -best + 1e-7 * metrics["loss"] / (1 + metrics["loss"])  # below the weight of one text in a million

    def probabilities(self, model: Model, batch: Batch) -> Tensor:
        """(N, C) class probabilities; they sum to one unless multi-label."""
        scores = model.heads["label"](self.read(model, batch, finished=True)).float()
        return scores.sigmoid() if self.multilabel else scores.softmax(-1)

    def outputs(self, model: Model, batch: Batch) -> Tensor:
        return self.probabilities(model, batch)

    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return as_predictions(self.config, outputs)

    def as_text(self, prediction: dict[str, Any]) -> str:
        return f"{prediction['label']}\t{max(prediction['probabilities'].values()):.3f}"

    def row_metrics(self, data: EncodedTexts, outputs: Sequence[np.ndarray]) -> RowMetrics:
        assert data.labels is not None
        found, labels = np.stack(outputs), data.labels
        tallies = {"accuracy": (right(found, labels).astype(float), np.ones(len(found)))}
        if self.multilabel:  # micro F1
            chosen, wanted = found > 0.5, labels.astype(bool)
            hits, either = 2 * (chosen & wanted).sum(1), chosen.sum(1) + wanted.sum(1)
            tallies["micro_f1"] = (hits.astype(float), either.astype(float))
        return tallies

    def true_and_predicted(
        self, data: EncodedTexts, outputs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, int] | None:
        if self.multilabel or data.labels is None:
            return None
        return data.labels, np.stack(outputs).argmax(1), len(self.config.classes)

    def true_class_ids(self, data: EncodedTexts) -> np.ndarray | None:
        return None if self.multilabel else data.labels

    def class_scores(self, model: Model, batch: Batch) -> Tensor:
        return model.heads["label"](self.read(model, batch))

    def lens_scores(self, model: Model, vectors: Tensor, padding: Tensor | None) -> Tensor:
        return model.heads["label"](pool(vectors, padding, self.config.pool))

    def graph_spec(self) -> GraphSpec:
        config = self.config
        long = getattr(config, "long", "head")
        if long == "windows" and config.dense != "none":
            why = "the windows of a long text are averaged before a head of two layers, which a graph of rows cannot do"
            raise UserError(f"task.long windows with task.dense {config.dense}: {why}")
        likely = SIGMOID if self.multilabel else SOFTMAX
        script = CLASSIFY.replace("PARTS", TRUNCATION[long]).replace("LIKELY", likely)
        settings = {"classes": list(config.classes)}
        return GraphSpec("classification", "Which class a text is of.", settings=settings, script=script)

    def confidences(self, data: Any, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        if self.multilabel:
            return None
        probabilities = np.stack(outputs)
        return probabilities.max(1), probabilities.argmax(1) == data.labels

    def error_analysis(
        self, rows: Records, data: Any, outputs: Sequence[np.ndarray], *, attribute: Attribution | None = None
    ) -> dict[str, Any]:
        """Confusion matrix, lengths, calibration and the most confident mistakes; nothing for multi-label classes."""
        if self.multilabel:
            return {}
        probabilities, true, classes = np.stack(outputs).round(5), data.labels, self.config.classes
        predicted, texts = probabilities.argmax(1), rows.display_texts
        mistakes = [
            {
                "place": rows.location(row),
                "text": texts[row],
                "label": classes[true[row]],
                "predicted": classes[predicted[row]],
                "confidence": float(probabilities[row].max()),
                "tokens": [],
            }
            for row in class_errors(probabilities, true)
        ]
        if attribute is not None:
            for mistake, row in zip(mistakes, class_errors(probabilities, true, limit=EXPLAINED), strict=False):
                mistake["tokens"] = [(token, round(weight, 5)) for token, weight in attribute(row, predicted[row])]
        words = np.array([len(text.split()) for text in texts])
        return {
            **confusions(true, predicted, len(classes)),
            "lengths": length_analysis(words, predicted == true, called=self.nouns.wrong),
            "calibration": calibration(probabilities, true),
            "mistakes": mistakes,
        }

    def extra_metrics(self, data: EncodedTexts, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        found, labels = np.stack(outputs), data.labels
        assert labels is not None
        if not self.multilabel:
            likely = found[np.arange(len(labels)), labels]
            return {"loss": float(-np.log(np.maximum(likely, 1e-12)).mean())}
        chosen, wanted = found > 0.5, labels.astype(bool)
        hits, either = (chosen & wanted).sum(0), chosen.sum(0) + wanted.sum(0)  # by class
        known = np.clip(found, 1e-12, 1 - 1e-12)
        return {
            "macro_f1": float((2 * hits / np.maximum(1, either))[either > 0].mean()) if (either > 0).any() else 0.0,
            "loss": float(-np.where(wanted, np.log(known), np.log(1 - known)).mean()),
        }


@lru_cache(maxsize=8)
def weights_on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """Cached on the device: a copy in every step would synchronize."""
    return torch.tensor(weights, device=device)


def right(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(..., N) whether each row is predicted correctly; multi-label, whether all classes are."""
    if labels.ndim == 1:
        return probabilities.argmax(-1) == labels
    return ((probabilities > 0.5) == labels.astype(bool)).all(-1)


def as_predictions(config: ClassConfig, probabilities: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The predicted class and the probability of every class, for each text."""
    if not len(probabilities):
        return []
    classes, separator = config.classes, getattr(config, "separator", None)
    found = np.array(probabilities)  # (N, C)
    rounded = np.round(found.astype(np.float64), 6)  # the same as round() of each
    told = [dict(zip(classes, row, strict=True)) for row in rounded.tolist()]
    if separator is None:
        best = [classes[number] for number in found.argmax(1).tolist()]
        return [{"label": label, "probabilities": row} for label, row in zip(best, told, strict=True)]
    chosen = [list(compress(classes, row)) for row in (found > 0.5).tolist()]
    return [
        {"label": separator.join(names), "labels": names, "probabilities": row}
        for names, row in zip(chosen, told, strict=True)
    ]


class TextExamples:
    """Texts as sequences of tokens."""

    def __init__(self, task: Classify, data: EncodedTexts, length: int):
        self.task, self.data, self.length = task, data, length
        self.lengths = np.array([task.length_of(tokens, length) for tokens in data.tokens])

    def __len__(self) -> int:
        return len(self.data.tokens)

    def batch(self, indices: Sequence[int]) -> Batch:
        task, labels, owners = self.task, chosen_labels(self.data.labels, indices), None
        chosen = [self.data.tokens[i] for i in indices]
        if task.row_is_text and max(map(len, chosen)) + task.marks <= self.length:  # every text fits into one sequence
            tokens, padding = pad_with_special_tokens(chosen, (task.bos,), task.suffix, task.pad_id)
        else:
            texts = [task.rows(each, self.length) for each in chosen]
            tokens, padding = pad([row for text in texts for row in text], task.pad_id)
            if len(tokens) > len(texts):
                owners = torch.repeat_interleave(torch.tensor([len(text) for text in texts]))
        return Batch(tokens, padding, segments=task.which_text(tokens), example_ids=owners, labels=labels)

    def name(self, index: int) -> str:
        return self.data.places[index]


class PooledExamples:
    """Pooled features of a frozen backbone, one vector per text."""

    def __init__(self, kept: CachedFeatures):
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept.vectors)

    def batch(self, indices: Sequence[int]) -> Batch:
        vectors = self.kept.vectors[list(indices)]
        empty = torch.zeros(len(vectors), 1, dtype=torch.long)
        return Batch(empty, features=vectors, labels=chosen_labels(self.kept.data.labels, indices))

    def name(self, index: int) -> str:
        return self.kept.data.places[index]


def chosen_labels(labels: np.ndarray | None, indices: Sequence[int]) -> dict[str, Tensor]:
    return {} if labels is None else {"label": torch.from_numpy(labels[list(indices)])}
