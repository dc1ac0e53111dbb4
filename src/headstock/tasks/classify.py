"""Which class a text is of: its vectors pooled into one, and a linear layer on it.

B rows, N examples (one row each unless a long text is read in several), C classes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch, pad
from headstock.model.heads import ClassHead, Pool, pool, pooled_width
from headstock.model.model import Model
from headstock.tasks.task import TASKS, Task, opening
from headstock.text.records import Records
from headstock.text.tokenizer import Tokenizer

Long = Literal["head", "tail", "head+tail", "windows"]
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # a label such as -1, 10 or 4.5


@dataclass(frozen=True)
class ClassifyConfig:
    classes: tuple[str, ...] = ()  # those of the training labels unless given
    separator: str | None = None  # splits a label into several; then each class is a yes or no of its own
    pool: Pool = "last"
    long: Long = "head"  # what is read of a text longer than a row; windows overlap by half and are averaged
    dropout: float = 0.1  # before the head
    balance: bool = False  # rare classes weigh more, as much as they are rarer
    class_weights: tuple[float, ...] = ()  # of each class, in the order of `classes`
    opening: Literal["start", "cls"] = "start"  # the mark before a text, which is the pretraining's

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        if self.class_weights and len(self.class_weights) != len(self.classes):
            wanted = f"one for each of the {len(self.classes)} classes" if self.classes else "with `classes` set too"
            problems.append(("class_weights", f"must be {wanted}, not {len(self.class_weights)}"))
        if any(weight < 0 for weight in self.class_weights):
            problems.append(("class_weights", "must be 0 or more"))
        if self.separator == "":
            problems.append(("separator", "must be at least one character"))
        if problems:
            raise ConfigError(problems)


@dataclass
class Labelled:
    """Texts as tokens, with their labels as numbers where they have any."""

    tokens: list[list[int]]
    labels: np.ndarray | None  # (N,) the class, or (N, C) yes or no
    places: list[str]
    bytes: int

    def select(self, rows: Sequence[int]) -> "Labelled":
        labels = None if self.labels is None else self.labels[list(rows)]
        return Labelled([self.tokens[i] for i in rows], labels, [self.places[i] for i in rows], self.bytes)


@dataclass
class Features:
    """The same when the backbone is frozen: what it made of each text, computed once."""

    vectors: Tensor  # (N, D)
    labels: np.ndarray | None
    places: list[str]
    bytes: int = 0


@TASKS.add("classify")
class Classify(Task):
    """One of several classes, or with a separator any of them."""

    Config = ClassifyConfig

    def __init__(self, config: ClassifyConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.start = opening(tokenizer, config.opening)
        self.filler = tokenizer.padding or 0
        self.several = config.separator is not None

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        width = pooled_width(backbone.width, self.config.pool)
        return {"label": ClassHead(width, len(self.config.classes), dropout=self.config.dropout)}

    # From records to batches

    def prepare(self, records: Records, *, labelled: bool = True) -> Labelled:
        texts = records.texts if self.tokenizer.kind == "lab" else records.plain  # the lab's texts are already cut
        labels = label_numbers(records, self.config) if labelled and records.labels is not None else None
        places = [records.place(i) for i in range(len(records))]
        return Labelled(self.tokenizer.encode_batch(texts), labels, places, sum(len(t.encode()) for t in texts))

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> "Texts | Vectors":
        return Vectors(data) if isinstance(data, Features) else Texts(self, data, length)

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

    def stride(self, length: int) -> int:
        """How far apart the windows of a long text begin."""
        return max(1, (length - 1) // 2)

    # From batches to numbers

    def read(self, model: Model, batch: Batch) -> Tensor:
        """(N, D) one vector an example: pooled over its tokens, averaged over its rows."""
        if batch.features is not None:
            return batch.features
        vectors = pool(model(batch).hidden, batch.padding, self.config.pool)
        if batch.owners is None:
            return vectors
        sums = vectors.new_zeros(int(batch.owners[-1]) + 1, vectors.size(1)).index_add(0, batch.owners, vectors)
        return sums / batch.owners.bincount()[:, None]

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

    def tokens(self, batch: Batch) -> int:
        return batch.tokens.numel() - (0 if batch.padding is None else int(batch.padding.sum()))

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


class Texts:
    """Texts as rows of tokens."""

    def __init__(self, task: Classify, data: Labelled, length: int):
        self.task, self.data, self.length = task, data, length
        longest = None if task.config.long == "windows" else length
        self.lengths = np.array([len(tokens[:longest]) + 1 for tokens in data.tokens])

    def __len__(self) -> int:
        return len(self.data.tokens)

    def batch(self, indices: Sequence[int]) -> Batch:
        texts = [self.task.rows(self.data.tokens[i], self.length) for i in indices]
        tokens, padding = pad([row for text in texts for row in text], self.task.filler)
        owners = None
        if len(tokens) > len(texts):
            owners = torch.repeat_interleave(torch.tensor([len(text) for text in texts]))
        return Batch(tokens, padding, owners=owners, labels=chosen_labels(self.data.labels, indices))

    def name(self, index: int) -> str:
        return self.data.places[index]


class Vectors:
    """Texts as what a frozen backbone made of them."""

    def __init__(self, data: Features):
        self.data = data

    def __len__(self) -> int:
        return len(self.data.vectors)

    def batch(self, indices: Sequence[int]) -> Batch:
        vectors = self.data.vectors[list(indices)]
        empty = torch.zeros(len(vectors), 1, dtype=torch.long)
        return Batch(empty, features=vectors, labels=chosen_labels(self.data.labels, indices))

    def name(self, index: int) -> str:
        return self.data.places[index]


def chosen_labels(labels: np.ndarray | None, indices: Sequence[int]) -> dict[str, Tensor]:
    return {} if labels is None else {"label": torch.from_numpy(labels[list(indices)])}


def split_label(label: str, separator: str | None) -> list[str]:
    if separator is None:
        return [label]
    return [part.strip() for part in label.split(separator) if part.strip()]


def label_numbers(records: Records, config: ClassifyConfig) -> np.ndarray:
    """(N,) class numbers, or (N, C) of 0 and 1; a label that is no class is named with its place."""
    number = {name: i for i, name in enumerate(config.classes)}
    split = [split_label(label, config.separator) for label in records.labels or []]
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
    if config.separator is None:
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
