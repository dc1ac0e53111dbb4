"""What every objective and task promises, so that one loop trains them all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch
from headstock.model.model import Model
from headstock.registry import Registry
from headstock.text.tokenizer import Tokenizer


class Examples(Protocol):
    """What one pass over the data is made of; example i of a pass is the same whoever asks for it."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """These examples as the model reads them."""
        ...

    def name(self, index: int) -> str:
        """Where an example comes from, in words a user can look up."""
        ...


class Task(ABC):
    """How examples become a batch, which heads it needs, what it loses and how it is scored."""

    name: ClassVar[str]
    Config: ClassVar[type]  # a frozen dataclass of the task's own settings

    def __init__(self, config: Any, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer

    @abstractmethod
    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        """New heads for this task, by the names that its labels have."""

    @abstractmethod
    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        """One pass over the data in rows of at most `length`; without a seed, the same plain pass every time."""

    @abstractmethod
    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        """For each head the loss summed over everything it predicts; the mean is made once, by the loop."""

    @abstractmethod
    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """The metrics of a whole data set from its summed losses; `size` is its text in bytes."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """For each head how many predictions the batch asks for."""
        return {head: int((labels != IGNORE).sum()) for head, labels in batch.labels.items()}


TASKS: Registry[type[Task]] = Registry("task", "headstock.tasks")


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Summed over the positions that have a label, in single precision whatever the model computes in."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
        label_smoothing=smoothing,
    )


def filled(examples: Examples, indices: Sequence[int], rows: int, *, filler: int = 0) -> Batch:
    """A batch of these examples and, up to `rows`, of rows that are read like any other but count for nothing."""
    batch = examples.batch([*indices, *[filler] * (rows - len(indices))])
    for labels in batch.labels.values():
        labels[len(indices) :] = IGNORE
    return batch
