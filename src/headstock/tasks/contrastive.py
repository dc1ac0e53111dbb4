"""Contrastive learning on labelled rows: embeddings of one class become similar, those of different classes do not.

N examples, D width.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import Examples, Task
from headstock.tasks.classify import Classify

SIMILAR = 0.5  # a cosine similarity above this predicts that two rows have the same class


class ContrastivePairs(Task):
    """SetFit's first stage: the cosine similarity of all pairs of rows in a batch, 1 within a class and 0 between.

    Every row of a batch is read once and takes part in N - 1 pairs. Pairs of the same class and of different classes
    have the same total weight.
    """

    is_labelled = True

    def __init__(self, classifier: Classify):
        super().__init__(classifier.config, classifier.tokenizer)
        self.classifier = classifier
        self.has_unused_parameters = classifier.has_unused_parameters

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {}

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        return UnsortedExamples(self.classifier.row_examples(data, length))

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        vectors = F.normalize(self.classifier.pooled_features(model, batch).float(), dim=-1)  # (N, D)
        similarity, (same, different) = vectors @ vectors.T, pair_masks(batch.labels["label"])  # (N, N) each
        error, pairs = (similarity - same) ** 2, same.sum() + different.sum()
        kinds = [(error * mask).sum() / mask.sum().clamp(min=1) for mask in (same, different)]
        present = ((same.sum() > 0).float() + (different.sum() > 0).float()).clamp(min=1)
        correct = ((similarity > SIMILAR) * same + (similarity <= SIMILAR) * different).sum()
        return {"label": pairs * (kinds[0] + kinds[1]) / present, "correct": correct}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"label": int(sum(mask.sum() for mask in pair_masks(batch.labels["label"])))}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        pairs = max(1, counts["label"])
        return {"loss": sums["label"] / pairs, "pair_accuracy": sums["correct"] / pairs}


def is_classifier(task: Task) -> TypeGuard[Classify]:
    """Whether a task has one class and one pooled vector for each row."""
    return isinstance(task, Classify) and not task.multilabel


def pair_masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N, N) 1 for each pair of rows, counted once, with the same class; likewise with different classes."""
    labelled = labels != IGNORE_INDEX
    pairs = torch.triu(labelled[:, None] & labelled, diagonal=1)
    same = labels[:, None] == labels
    return (pairs & same).float(), (pairs & ~same).float()


class UnsortedExamples:
    """Examples without `lengths`: batches of similar lengths would always contain the same pairs."""

    def __init__(self, examples: Examples):
        self.examples, self.batch, self.name = examples, examples.batch, examples.name

    def __len__(self) -> int:
        return len(self.examples)
