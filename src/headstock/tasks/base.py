"""The interface of objectives and tasks, and the losses they share.

B rows, T tokens, D width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.kernels.cross_entropy import linear_cross_entropy, worth_chunking
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, RealExamples, count_real_tokens
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.registry import Registry
from headstock.tasks.widgets import FILL, GENERATE, Widget

Lens = Literal["token", "class", "tag", "none"]


@dataclass(frozen=True)
class Sample:
    """The output of a pretrained model for a piece of held-out text."""

    kind: Literal["continued", "filled", "denoised"]
    given: str
    output: str  # for a continuation what follows `given`, otherwise the complete text
    true: str


@dataclass(frozen=True)
class PlanDefaults:
    """What the planner assumes about an objective."""

    max_epochs: int  # over the same text; further epochs gain nothing
    family: str = "transformer"
    validation_passes: int = 1  # how often validation text is read
    batch_shapes: int = 1  # distinct shapes among 2,500 batches, each of which is captured once
    settings: Mapping[str, float] = field(default_factory=dict)  # task settings
    repeated_dropout: float = 0.0  # dropout with more than three epochs


class Examples(Protocol):
    """The examples of one epoch. Example i depends on the seed and the epoch alone.

    Examples of different lengths also have `lengths`, by which they are batched.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Collate some examples."""
        ...

    def name(self, index: int) -> str:
        """Where an example comes from, such as `train.csv:17`."""
        ...


class Task(ABC):
    """How data becomes batches, which heads a model needs, the loss, the metrics, and how results are shown.

    Everything specific to a task is here, so that no other package asks which task it has.
    """

    # Identity
    name: ClassVar[str]  # set by the registry
    Config: ClassVar[type]  # a frozen dataclass of the task's own settings
    title: ClassVar[str] = "language model"  # what messages call a model of this task
    is_labelled: ClassVar[bool] = False  # it learns from labelled rows, not from plain text
    trainable: ClassVar[bool] = True  # a model can be trained for it

    # Requirements of the data and the backbone
    bos_role: ClassVar[str] = "start"  # the special token that starts every text: start or cls
    causal: ClassVar[bool | None] = None  # required attention direction; None for either
    # without a causal mask, labels are in the input: a model learns to copy them, which may be demonstrated
    copies_unmasked: ClassVar[bool] = False
    needs_encoder_decoder: ClassVar[bool] = False  # batches have a source
    needs_bilm: ClassVar[bool] = False  # the backbone must have a forward and a backward direction
    needs_sentences: bool = False  # the token store must mark sentence boundaries
    has_unused_parameters: bool = False  # some weights of the model get no gradient

    # What a model of this task can do
    is_language_model: bool = False  # the loss is per token, so that its exponential is a perplexity
    bits_per_byte_head: ClassVar[str | None] = None  # the head whose loss gives bits per byte
    generates: ClassVar[bool] = False  # the token head predicts the next token
    fills_masks: ClassVar[bool] = False  # the token head predicts masked tokens
    mask_shift: ClassVar[int] = 0  # positions between a masked token and the hidden state that predicts it
    predicts_classes: ClassVar[bool] = False  # outputs are the probabilities of `config.classes` for each row
    linear_classes: ClassVar[bool] = False  # a linear layer computes a score of each class, all independent
    predicts_values: ClassVar[bool] = False  # outputs are one number for each row
    translates: ClassVar[bool] = False  # runs can `translate`
    pretraining_objective: ClassVar[str | None] = None  # continues the pretraining of an imported run of this task
    answers_questions: ClassVar[bool] = False  # runs can `answer`
    is_auxiliary: ClassVar[bool] = False  # its loss can be added to that of a labelled task: see `add_lm_labels`

    # For planning, explanations and export
    plan: ClassVar[PlanDefaults | None] = None  # None: `plan` does not consider this task
    texts_per_row: int = 1  # texts that a row joins
    row_description: str = "one text"  # what these texts are
    lens: ClassVar[Lens] = "token"  # what the logit lens reads at each layer
    huggingface_head: ClassVar[str | None] = None  # the suffix of the transformers class with the same head

    # Set from outside
    progress: float = 0.0  # share of training that is done, by BatchSampler
    needs_prefix: bool = False  # by build_task: batches include the tokens before a row, for backbones that carry state

    def __init__(self, config: Any, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer

    @abstractmethod
    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        """New heads, keyed like the labels of a batch."""

    @abstractmethod
    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        """One epoch of the data in rows of at most `length` tokens; without a seed, the fixed order of validation."""

    @abstractmethod
    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        """The loss of each head, summed over its predictions; the loop takes the mean once.

        Other entries, such as `correct`, are counts that are summed alike and have no gradient.
        """

    @abstractmethod
    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """The metrics of a data set from its summed losses and counts; `size` is its text in bytes, or 0."""

    @classmethod
    def segments(cls, config: Any) -> int:
        """The number of segment embeddings the model needs; 0 for none."""
        return 0

    @property
    def widgets(self) -> tuple[Widget, ...]:
        """The forms of the web page that use a run of this task."""
        return (*([GENERATE] if self.generates else []), *([FILL] if self.fills_masks else []))

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        """A few outputs for held-out text, for the report of a pretraining run; the same seed gives the same ones."""
        return []

    def add_lm_labels(self, batch: Batch, *, key: tuple[int | str, ...], rows: np.ndarray) -> Batch:
        """Rows of a labelled task with this objective's labels for the token head, where `is_auxiliary`.

        They are in the batch itself, or in its `masked` batch if the objective reads other tokens. `rows` (B,) are
        the numbers of the rows for random draws with this key.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be learnt beside a labelled task")

    def weight(self, head: str) -> float:
        """The weight of a head's mean loss in the total loss."""
        return 1.0

    def head_passes(self, head: str, length: Any) -> Any:
        """The mean number of times a token of a row of `length` passes through a head, for cost estimates."""
        return 1

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """The validation score by which the best checkpoint is selected; lower is better."""
        return metrics["loss"]

    def tokens(self, batch: Batch) -> int:
        """The number of tokens in a batch, for throughput."""
        return count_real_tokens(batch)

    def counts(self, batch: Batch) -> dict[str, int]:
        """The number of predictions of each head."""
        return {head: int((labels != IGNORE_INDEX).sum()) for head, labels in batch.labels.items()}


TASKS: Registry[type[Task]] = Registry("task", "headstock.tasks")


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over labelled positions, in float32, or float64 like the logits."""
    logits, labels = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2), labels.flatten()
    return nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
    )


def correct_count(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of correct top-1 predictions; positions without a label never count."""
    return (logits.detach().argmax(-1) == labels).sum()


def token_loss(head: nn.Module, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The summed loss of a token head at vectors (..., D), and the number of correct top-1 predictions.

    Large logits are never materialized: see kernels.
    """
    if isinstance(head, LMHead) and worth_chunking(labels.numel(), len(head.weight)):
        flat = head.transformed(hidden).flatten(0, -2), head.weight, head.bias, labels.flatten()
        return linear_cross_entropy(*flat, smoothing=smoothing)
    logits = head(hidden)
    return cross_entropy(logits, labels, smoothing=smoothing), correct_count(logits, labels)


def token_losses(model: Model, hidden: Tensor, batch: Batch, *, smoothing: float) -> dict[str, Tensor]:
    """The loss and the correct predictions of the token head at hidden states (B, T, D).

    The head is the widest layer, so only labelled positions pass through it.
    """
    labelled = batch.gather_labelled("token", hidden)
    loss, correct = token_loss(model.heads["token"], *labelled, smoothing=smoothing)
    return {"token": loss, "correct": correct}


def token_score(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    """The metrics of `token_losses`."""
    count = max(1, counts["token"])
    loss = sums["token"] / count
    return {"loss": loss, "perplexity": perplexity(loss), "accuracy": sums["correct"] / count}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # a larger loss would overflow


def bits_per_byte(loss_sum: float, size: int) -> dict[str, float]:
    """The metric `bits_per_byte` of a text of `size` bytes; nothing where its size is unknown (0)."""
    return {"bits_per_byte": loss_sum / math.log(2) / size} if size else {}


def padded_batch(examples: Examples, indices: Sequence[int], rows: int, *, filler: int = 0) -> Batch:
    """A batch of these examples, padded to `rows` with examples that have no labels."""
    real = len(indices)
    batch = examples.batch([*indices, *[filler] * (rows - real)])
    for labels in batch.labels.values():
        by_row = batch.example_ids is not None and len(labels) == len(batch.example_ids)  # otherwise one per example
        labels[batch.example_ids >= real if by_row else slice(real, None)] = IGNORE_INDEX  # type: ignore[operator]
    if batch.masked is not None:
        for labels in batch.masked.labels.values():  # one row per sequence
            labels[slice(real, None) if batch.example_ids is None else batch.example_ids >= real] = IGNORE_INDEX
    batch.real_examples = RealExamples(real)
    return batch
