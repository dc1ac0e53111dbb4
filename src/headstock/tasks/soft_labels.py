"""Soft labels: rows whose label is a probability for each class, such as a teacher's prediction or annotators' votes.

N examples, C classes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.config import added
from headstock.data.records import LABEL, Records, Unusable, preview
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.class_labels import ClassConfig, refuse_unknown

PROBABILITIES = "probabilities"  # the column, and the labels of a batch
SUM_TOLERANCE = 0.01  # probabilities are often rounded


@dataclass(frozen=True)
class SoftLabelConfig(ClassConfig):
    soft_labels: bool = added(False)  # learn from the column `probabilities`, as `predict` writes it, not from `label`


def parse_probabilities(value: Any, row: Any = None) -> dict[str, float]:
    """A table of classes and probabilities that sum to one, or its JSON text."""
    table = value
    if isinstance(value, str):
        try:
            table = json.loads(value)
        except (ValueError, RecursionError):
            table = None
    expected = 'expected the probability of each class, such as {"good": 0.9, "bad": 0.1}'
    if not isinstance(table, Mapping) or not table:
        raise Unusable(f"is {preview(value)}, {expected}")
    numbers = {str(name): number for name, number in table.items() if number is not None}
    if not all(type(number) in (int, float) and 0 <= number <= 1 + SUM_TOLERANCE for number in numbers.values()):
        raise Unusable(f"is {preview(value)}, {expected}")
    total = math.fsum(numbers.values())
    if abs(total - 1) > SUM_TOLERANCE:
        raise Unusable(f"sums to {total:.3g}, {expected}")
    return {name: number / total for name, number in numbers.items()}


def with_likeliest_labels(records: Records) -> Records:
    """The rows with their likeliest class as label, unless they have labels."""
    if LABEL in records.columns or PROBABILITIES not in records.columns:
        return records
    labels = [max(row, key=row.__getitem__) for row in records.columns[PROBABILITIES]]
    return replace(records, columns=records.columns | {LABEL: labels})


def probability_array(records: Records, config: ClassConfig) -> np.ndarray | None:
    """(N, C) the probabilities of rows, 0 where a class is left out; None if they have hard labels."""
    rows = records.columns.get(PROBABILITIES)
    if rows is None:
        return None
    class_ids = {name: i for i, name in enumerate(config.classes)}
    unknown = [
        (name, f"{records.location(i)}: class {name!r} is new")
        for i, row in enumerate(rows)
        for name in row
        if name not in class_ids
    ]
    refuse_unknown(unknown, config.classes)
    array = np.zeros((len(rows), len(class_ids)), np.float32)
    for i, row in enumerate(rows):
        for name, probability in row.items():
            array[i, class_ids[name]] = probability
    return array


def soft_losses(
    logits: Tensor, labels: Tensor, probabilities: Tensor, weights: Tensor | None, smoothing: float
) -> dict[str, Tensor]:
    """Cross-entropy with probabilities (N, C); `labels` (N,) mark padding examples and count correct predictions."""
    targets = probabilities * (1 - smoothing) + smoothing / logits.size(-1)
    targets = targets if weights is None else targets * weights
    losses = -(targets * logits.log_softmax(-1)).sum(-1)
    loss = torch.where(labels != IGNORE_INDEX, losses, 0.0).sum()
    return {"label": loss, "correct": (logits.argmax(-1) == labels).sum()}
