"""Class labels: settings of classification heads, class ids and class weights.

N examples, C classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headstock.data.records import Records
from headstock.errors import ConfigError, UserError, did_you_mean
from headstock.model.heads import HeadActivation, Pooling
from headstock.tasks.label_checks import check_class_labels

NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # a label such as -1, 10 or 4.5


@dataclass(frozen=True)
class ClassConfig:
    """Settings of a classification head."""

    classes: tuple[str, ...] = ()  # from the training labels unless given
    many_classes: bool = False  # accept labels that look like a regression target or the wrong column
    pool: Pooling = "last"
    layers: str = "last"  # features to pool: last, sum4, concat4, mix, or a layer's number
    dropout: float = 0.1  # before the head
    balance: bool = False  # weight classes by their inverse frequency
    class_weights: tuple[float, ...] = ()  # in the order of `classes`
    opening: Literal["start", "cls"] = "start"  # the first special token, as in pretraining
    closed: bool = False  # a separator ends the text, as in pretraining
    dense: HeadActivation = "none"  # one more layer in the head, bent so; BERT's classifiers have tanh
    head_bias: bool = True  # Hugging Face's classifiers of causal models have no bias

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


def split_label(label: str, separator: str | None) -> list[str]:
    if separator is None:
        return [label]
    return [part.strip() for part in label.split(separator) if part.strip()]


def label_numbers(records: Records, config: ClassConfig) -> np.ndarray:
    """(N,) class ids, or (N, C) of 0 and 1; unknown labels are refused with their locations."""
    number = {name: i for i, name in enumerate(config.classes)}
    separator = getattr(config, "separator", None)
    split = [split_label(label, separator) for label in records.labels or []]
    problems = [
        f"{records.location(i)}: label {name!r} is new; training has {listed(config.classes)}"
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


def find_classes(records: Records, separator: str | None, *, many: bool = False) -> tuple[str, ...]:
    """The distinct classes, numbers in numerical and words in alphabetical order.

    Labels that do not look like classes are refused unless `many`.
    """
    every = [name for label in records.labels or [] for name in split_label(label, separator)]
    names = set(every)
    if len(names) < 2 and not (separator and names):
        only = f"one class only, {next(iter(names))!r}" if names else "no label at all"
        raise UserError(f"{records.source}: {only}; there must be at least two to tell apart")
    if not many:
        check_class_labels(records.source, every)
    if all(NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Inverse-frequency class weights; for multi-label classes, the weight of positives."""
    if labels.ndim == 2:
        yes = labels.sum(0)
        return tuple(float(w) for w in (len(labels) - yes) / np.maximum(1, yes))
    counts = np.bincount(labels, minlength=classes)
    return tuple(float(w) for w in len(labels) / (classes * np.maximum(1, counts)))


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
