"""What a trained model says of many texts: read with others of like length, told in the order they came."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.model.model import Model
from headstock.tasks.classify import Classify, Features, Labelled
from headstock.train.evaluate import precision

TOKENS = 8192  # about so many are read at once, whatever the texts' lengths


def probabilities(model: Model, task: Classify, data: Any, *, length: int, dtype: str = "auto") -> np.ndarray:
    """(N, C) for all texts, in their order."""
    return read(model, task, data, task.probabilities, length=length, dtype=dtype).numpy()


def features(model: Model, task: Classify, data: Labelled, *, length: int, dtype: str = "auto") -> Features:
    """What the backbone makes of each text, computed once: all that the head of a frozen model ever sees."""
    vectors = read(model, task, data, task.read, length=length, dtype=dtype)
    return Features(vectors, data.labels, data.places, data.bytes)


@torch.no_grad()
def read(model: Model, task: Classify, data: Any, what: Any, *, length: int, dtype: str) -> Tensor:
    """One vector of `what` a text, (N, ...), on the CPU."""
    model.eval()
    examples = task.examples(data, length=length)
    found: list[Tensor] = []
    order: list[int] = []
    for part in by_size(getattr(examples, "lengths", np.ones(len(examples), dtype=np.int64))):
        with precision(model.device, dtype):
            found.append(what(model, examples.batch(part).to(model.device)).float().cpu())
        order += part
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(found)[back]


def by_size(lengths: np.ndarray) -> Iterator[list[int]]:
    """All indices in parts of like length and about TOKENS tokens; the longest first, so that memory peaks early."""
    order = np.argsort(-lengths, kind="stable").tolist()
    at = 0
    while at < len(order):
        rows = max(1, TOKENS // int(lengths[order[at]]))
        yield order[at : at + rows]
        at += rows
