"""Which class a text is of: its vectors pooled into one, and a linear layer on it.

B rows, N examples (one row each unless a long text is read in several), C classes, L layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch, pad
from headstock.model.features import feature_width
from headstock.model.heads import ClassHead, Pool, pool, pooled_width
from headstock.model.model import Model
from headstock.tasks.labelled import Features, LabelledTask, Tallies
from headstock.tasks.task import TASKS, Examples
from headstock.text.records import Records, read_records
from headstock.text.tokenizer import Tokenizer

Long = Literal["head", "tail", "head+tail", "windows"]
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # a label such as -1, 10 or 4.5


@dataclass(frozen=True)
class ClassConfig:
    """What a head that chooses among classes can be told, whatever it reads."""

    classes: tuple[str, ...] = ()  # those of the training labels unless given
    pool: Pool = "last"
    layers: str = "last"  # whose vectors are pooled: last, sum4, concat4, mix, or a layer's number
    dropout: float = 0.1  # before the head
    balance: bool = False  # rare classes weigh more, as much as they are rarer
    class_weights: tuple[float, ...] = ()  # of each class, in the order of `classes`
    opening: Literal["start", "cls"] = "start"  # the mark before a text, which is the pretraining's

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError(problems)

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        if self.class_weights and len(self.class_weights) != len(self.classes):
            wanted = f"one for each of the {len(self.classes)} classes" if self.classes else "with `classes` set too"
            problems.append(("class_weights", f"must be {wanted}, not {len(self.class_weights)}"))
        if any(weight < 0 for weight in self.class_weights):
            problems.append(("class_weights", "must be 0 or more"))
        return problems


@dataclass(frozen=True)
class ClassifyConfig(ClassConfig):
    separator: str | None = None  # splits a label into several; then each class is a yes or no of its own
    long: Long = "head"  # what is read of a text longer than a row; windows overlap by half and are averaged

    def problems(self) -> list[tuple[str, str]]:
        blank = [("separator", "must be at least one character")] if self.separator == "" else []
        return super().problems() + blank


@dataclass
class Labelled:
    """Texts as tokens, with their labels as numbers where they have any."""

    tokens: list[Any]  # of each text; of each of two where they come in pairs
    labels: np.ndarray | None  # (N,) the class, or (N, C) yes or no
    places: list[str]
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Sequence[int]) -> "Labelled":
        labels = None if self.labels is None else self.labels[list(rows)]
        return Labelled([self.tokens[i] for i in rows], labels, [self.places[i] for i in rows], self.bytes)


@TASKS.add("classify")
class Classify(LabelledTask):
    """One of several classes, or with a separator any of them."""

    Config: ClassVar[type] = ClassifyConfig
    target = "label"
    title = "classifier"
    of_texts = True

    def __init__(self, config: ClassConfig, tokenizer: Tokenizer | None):
        super().__init__(config, tokenizer)
        self.several = getattr(config, "separator", None) is not None

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width = pooled_width(feature_width(backbone.width, self.config.layers), self.config.pool)
        mixed = backbone.depth + 1 if self.config.layers == "mix" else None
        return {"label": ClassHead(width, len(self.config.classes), dropout=self.config.dropout, mixed=mixed)}

    # From records to batches

    @classmethod
    def read_file(
        cls, path: str | Path, *, config: Any, columns: Mapping[str, str] | None = None, insist: bool = True
    ) -> Records:
        return read_records(path, columns=columns, separator=config.separator, insist=insist)

    def columns_of(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        return {"text": list(rows)}

    @classmethod
    def settle(cls, config: Any, records: Records) -> Any:
        if not config.classes:
            config = replace(config, classes=find_classes(records, getattr(config, "separator", None)))
        if config.balance and not config.class_weights:
            weights = balanced_weights(label_numbers(records, config), len(config.classes))
            config = replace(config, class_weights=weights)
        return config

    def check(self, records: Records) -> None:
        if records.labels is not None:
            label_numbers(records, self.config)

    def prepare(self, records: Records, *, labelled: bool = True) -> Labelled:
        texts = records.texts if self.tokenizer.kind == "lab" else records.plain  # the lab's texts are already cut
        return self.labelled(records, self.tokenizer.encode_batch(texts), texts, labelled=labelled)

    def labelled(self, records: Records, tokens: list[Any], texts: Sequence[str], *, labelled: bool) -> Labelled:
        labels = label_numbers(records, self.config) if labelled and records.labels is not None else None
        places = [records.place(i) for i in range(len(records))]
        return Labelled(tokens, labels, places, sum(len(text.encode()) for text in texts))

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if isinstance(data, Features):
            return Vectors(data)
        return Texts(self, data, length)

    def length_of(self, tokens: Sequence[int], length: int) -> int:
        """How many tokens of a text are read."""
        return len(tokens) + 1 if self.config.long == "windows" else min(len(tokens) + 1, length)

    def rows(self, tokens: Sequence[int], length: int) -> list[list[int]]:
        """A text as one row of at most `length` tokens, or as several that overlap."""
        room = length - 1  # the opening mark takes one
        ids = list(tokens)
        if len(ids) <= room:
            parts = [ids]
        elif self.config.long == "head":
            parts = [ids[:room]]
        elif self.config.long == "tail":
            parts = [ids[-room:]]
        elif self.config.long == "head+tail":
            parts = [ids[: room // 4] + ids[room // 4 - room :]]
        else:
            stride = self.stride(length)
            parts = [ids[at : at + room] for at in range(0, len(ids) - room + stride, stride)]
        return [[self.start, *part] for part in parts]

    def which_text(self, tokens: Tensor) -> Tensor | None:
        """Which of two texts each token is of; None where there is one."""
        return None

    def stride(self, length: int) -> int:
        """How far apart the windows of a long text begin."""
        return max(1, (length - 1) // 2)

    # From batches to numbers

    def read(self, model: Model, batch: Batch) -> Tensor:
        """(N, D) one vector an example, pooled over its tokens and averaged over its rows; (N, L + 1, D) for a mix."""
        if batch.features is not None:
            return batch.features
        vectors = pool(self.vectors(model, batch), batch.padding, self.config.pool)
        if batch.owners is None:
            return vectors
        sums = vectors.new_zeros(int(batch.owners[-1]) + 1, *vectors.shape[1:]).index_add(0, batch.owners, vectors)
        return sums / batch.owners.bincount().view(-1, *[1] * (vectors.dim() - 1))

    def remember(self, model: Model, batch: Batch) -> list[list[Tensor]]:
        """The pooled vector alone: that is all the head ever sees."""
        return [[vector[None]] for vector in self.read(model, batch)]

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels = batch.labels["label"]
        scores = model.heads["label"](self.read(model, batch)).float()  # (N, C)
        weights = torch.tensor(self.config.class_weights, device=scores.device) if self.config.class_weights else None
        if self.several:
            return self.losses_of_several(scores, labels, weights, smoothing)
        loss = F.cross_entropy(scores, labels, weights, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
        return {"label": loss, "hits": (scores.argmax(-1) == labels).sum()}

    def losses_of_several(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None, smoothing: float
    ) -> dict[str, Tensor]:
        """Each class by itself; the loss of an example is the mean over them, so it does not grow with their number."""
        kept = labels[:, 0] != IGNORE
        scores, labels = scores[kept], labels[kept]
        wanted = labels.float() * (1 - smoothing) + smoothing / 2
        loss = F.binary_cross_entropy_with_logits(scores, wanted, pos_weight=weights, reduction="sum")
        chosen = scores > 0
        return {
            "label": loss / scores.size(1),
            "hits": (chosen == labels.bool()).all(1).sum(),
            "found": (chosen & labels.bool()).sum(),
            "chosen": chosen.sum(),
            "wanted": labels.sum(),
        }

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = batch.labels["label"]
        return {"label": int(((labels if labels.dim() == 1 else labels[:, 0]) != IGNORE).sum())}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        rows = max(1, counts["label"])
        metrics = {"loss": sums["label"] / rows, "accuracy": sums["hits"] / rows}
        if self.several:
            metrics["micro_f1"] = 2 * sums["found"] / max(1.0, sums["chosen"] + sums["wanted"])
        return metrics

    def merit(self, metrics: Mapping[str, float]) -> float:
        """Accuracy first; among equals, the smaller loss."""
        best = metrics["micro_f1" if self.several else "accuracy"]
        return -best + 1e-7 * metrics["loss"] / (1 + metrics["loss"])  # less than one text in a million

    def probabilities(self, model: Model, batch: Batch) -> Tensor:
        """(N, C) how likely each class is; they sum to one unless several may be true."""
        scores = model.heads["label"](self.read(model, batch)).float()
        return scores.sigmoid() if self.several else scores.softmax(-1)

    def outputs(self, model: Model, batch: Batch) -> list[Tensor]:
        return list(self.probabilities(model, batch))

    def predictions(self, data: Any, outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        return as_predictions(self.config, outputs)

    def as_text(self, prediction: dict[str, Any]) -> str:
        return f"{prediction['label']}\t{max(prediction['probabilities'].values()):.3f}"

    def tallies(self, data: Labelled, outputs: Sequence[np.ndarray]) -> Tallies:
        assert data.labels is not None
        found, labels = np.stack(outputs), data.labels
        tallies = {"accuracy": (right(found, labels).astype(float), np.ones(len(found)))}
        if self.several:  # F1 over all yes-or-no answers together
            chosen, wanted = found > 0.5, labels.astype(bool)
            hits, either = 2 * (chosen & wanted).sum(1), chosen.sum(1) + wanted.sum(1)
            tallies["micro_f1"] = (hits.astype(float), either.astype(float))
        return tallies

    def class_numbers(self, data: Labelled, outputs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, int] | None:
        if self.several or data.labels is None:
            return None
        return data.labels, np.stack(outputs).argmax(1), len(self.config.classes)

    def extras(self, data: Labelled, outputs: Sequence[np.ndarray]) -> dict[str, float]:
        found, labels = np.stack(outputs), data.labels
        assert labels is not None
        if not self.several:
            likely = found[np.arange(len(labels)), labels]
            return {"loss": float(-np.log(np.maximum(likely, 1e-12)).mean())}
        chosen, wanted = found > 0.5, labels.astype(bool)
        hits, either = (chosen & wanted).sum(0), chosen.sum(0) + wanted.sum(0)  # by class
        known = np.clip(found, 1e-12, 1 - 1e-12)
        return {
            "macro_f1": float((2 * hits / np.maximum(1, either))[either > 0].mean()) if (either > 0).any() else 0.0,
            "loss": float(-np.where(wanted, np.log(known), np.log(1 - known)).mean()),
        }


def right(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(..., N) whether each row's answer is right; where there are several, all of it."""
    if labels.ndim == 1:
        return probabilities.argmax(-1) == labels
    return ((probabilities > 0.5) == labels.astype(bool)).all(-1)


def as_predictions(config: ClassConfig, probabilities: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """What `predict` says of each text: the class, and the probability of every class."""
    classes, separator = config.classes, getattr(config, "separator", None)
    made = []
    for row in probabilities:
        told = {name: round(float(p), 6) for name, p in zip(classes, row, strict=True)}
        if separator is not None:
            names = [name for name, p in zip(classes, row, strict=True) if p > 0.5]
            made.append({"label": separator.join(names), "labels": names, "probabilities": told})
        else:
            made.append({"label": classes[int(np.argmax(row))], "probabilities": told})
    return made


class Texts:
    """Texts as rows of tokens."""

    def __init__(self, task: Classify, data: Labelled, length: int):
        self.task, self.data, self.length = task, data, length
        self.lengths = np.array([task.length_of(tokens, length) for tokens in data.tokens])

    def __len__(self) -> int:
        return len(self.data.tokens)

    def batch(self, indices: Sequence[int]) -> Batch:
        texts = [self.task.rows(self.data.tokens[i], self.length) for i in indices]
        tokens, padding = pad([row for text in texts for row in text], self.task.filler)
        owners = None
        if len(tokens) > len(texts):
            owners = torch.repeat_interleave(torch.tensor([len(text) for text in texts]))
        labels = chosen_labels(self.data.labels, indices)
        return Batch(tokens, padding, segments=self.task.which_text(tokens), owners=owners, labels=labels)

    def name(self, index: int) -> str:
        return self.data.places[index]


class Vectors:
    """Texts as what a frozen backbone made of them: one pooled vector each."""

    def __init__(self, kept: Features):
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


def split_label(label: str, separator: str | None) -> list[str]:
    if separator is None:
        return [label]
    return [part.strip() for part in label.split(separator) if part.strip()]


def label_numbers(records: Records, config: ClassConfig) -> np.ndarray:
    """(N,) class numbers, or (N, C) of 0 and 1; a label that is no class is named with its place."""
    number = {name: i for i, name in enumerate(config.classes)}
    separator = getattr(config, "separator", None)
    split = [split_label(label, separator) for label in records.labels or []]
    problems = [
        f"{records.place(i)}: label {name!r} is new; training has {listed(config.classes)}"
        + did_you_mean(name, config.classes)
        for i, names in enumerate(split)
        for name in names
        if name not in number
    ]
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise UserError("; ".join([*problems[:5], *more]))
    if separator is None:
        return np.array([number[names[0]] for names in split])
    chosen = np.zeros((len(split), len(number)), dtype=np.int64)
    for row, names in enumerate(split):
        chosen[row, [number[name] for name in names]] = 1
    return chosen


def find_classes(records: Records, separator: str | None) -> tuple[str, ...]:
    """The classes of the labels, in their natural order: numbers by size, words by letter."""
    names = {name for label in records.labels or [] for name in split_label(label, separator)}
    if len(names) < 2 and not (separator and names):
        only = f"one class only, {next(iter(names))!r}" if names else "no label at all"
        raise UserError(f"{records.source}: {only}; there must be at least two to tell apart")
    if all(NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """What each class weighs so that all count alike; for yes-or-no classes, how much a yes weighs."""
    if labels.ndim == 2:
        yes = labels.sum(0)
        return tuple(float(w) for w in (len(labels) - yes) / np.maximum(1, yes))
    counts = np.bincount(labels, minlength=classes)
    return tuple(float(w) for w in len(labels) / (classes * np.maximum(1, counts)))


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
