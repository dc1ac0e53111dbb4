"""The interface of objectives and tasks, and the losses they share.

B rows, T tokens, D width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.kernels.cross_entropy import linear_cross_entropy, worth_chunking
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, RealExamples
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.registry import Registry


@dataclass(frozen=True)
class Sample:
    """What a pretrained model makes of a piece of held-out text."""

    kind: Literal["continued", "filled", "denoised"]
    given: str
    output: str  # for a continuation what follows `given`, otherwise the whole text
    true: str


Lens = Literal["token", "class", "tag", "none"]


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

    name: ClassVar[str]
    Config: ClassVar[type]  # a frozen dataclass of the task's own settings
    bos_role: ClassVar[str] = "start"  # the special token that starts every text: start or cls
    is_language_model: bool = False  # the loss is per token, so that its exponential is a perplexity
    bits_per_byte_head: ClassVar[str | None] = None  # whose loss gives bits per byte
    generates: ClassVar[bool] = False  # the token head predicts the next token
    is_labelled: ClassVar[bool] = False  # it learns from labelled rows
    title: ClassVar[str] = "language model"  # what messages call a model of this task
    predicts_classes: ClassVar[bool] = False  # outputs are the probabilities of `config.classes` for each row
    translates: ClassVar[bool] = False  # runs can `translate`
    answers_questions: ClassVar[bool] = False  # runs can `answer`
    texts_per_row: ClassVar[int] = 1  # texts that a row joins
    row_description: ClassVar[str] = "one text"  # what these texts are
    lens: ClassVar[Lens] = "token"  # what the logit lens reads at each layer
    mixes_masks: ClassVar[bool] = False  # some rows are read with a causal mask and others without
    default_family: ClassVar[str] = "transformer"  # the family a plan uses
    max_epochs: ClassVar[int | None] = None  # epochs over a text after which a plan gains nothing; None: not planned
    validation_passes: ClassVar[int] = 1  # how often validation text is read
    batch_shapes: ClassVar[int] = 1  # distinct shapes among 2,500 batches, each of which is captured once
    plan_settings: ClassVar[dict[str, float]] = {}  # of the task, in a plan
    repeated_dropout: ClassVar[float] = 0.0  # dropout of a plan with more than three epochs
    trainable: ClassVar[bool] = True  # a model can be trained for it
    huggingface_head: ClassVar[str | None] = None  # the ending of the transformers class with the same head
    fills_masks: ClassVar[bool] = False  # the token head predicts masked tokens
    mask_shift: ClassVar[int] = 0  # positions between a masked token and the state that predicts it
    needs_sentences: bool = False  # the token store must mark sentence boundaries
    progress: float = 0.0  # share of training that is done, set by the loop
    causal: ClassVar[bool | None] = None  # required attention direction of the backbone; None for either
    needs_encoder_decoder: ClassVar[bool] = False  # batches have a source
    needs_bidirectional: ClassVar[bool] = False  # the backbone must have a forward and a backward direction
    needs_prefix: bool = False  # batches include the tokens before a row, set from the backbone

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

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        """A few outputs for held-out text, for the report of a pretraining run; the same seed gives the same ones."""
        return []

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
        return max(self.counts(batch).values())

    def counts(self, batch: Batch) -> dict[str, int]:
        """The number of predictions of each head."""
        return {head: int((labels != IGNORE_INDEX).sum()) for head, labels in batch.labels.items()}


def bos_id(tokenizer: Tokenizer, role: str) -> int:
    """The first token of every text: the one of this role, or else the nearest that the tokenizer has."""
    marks = {"start": (tokenizer.bos, tokenizer.cls), "cls": (tokenizer.cls, tokenizer.bos)}[role]
    found = next((mark for mark in (*marks, tokenizer.eos) if mark is not None), None)
    if found is None:
        raise UserError("this tokenizer has no mark to begin a text with (<sos>, [CLS] or an end mark)")
    return found


def closing_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token after every text: the separator, or else the EOS token."""
    found = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
    if found is None:
        raise UserError("this tokenizer has no mark to close a text with ([SEP] or an end mark)")
    return (found,)


def pad_with_special_tokens(
    texts: Sequence[Sequence[int]], before: Sequence[int], after: Sequence[int], filler: int
) -> tuple[Tensor, Tensor | None]:
    """Texts between special tokens as one tensor (B, T), and its padding mask (None without padding).

    Equivalent to `pad`, without building a list per text.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = (lengths + len(before))[:, None]  # (B, 1)
    places = np.arange(int(lengths.max(initial=0)) + len(before) + len(after))
    tokens = np.full((len(texts), len(places)), filler, np.int64)
    tokens[:, : len(before)] = before
    inside = (places >= len(before)) & (places < ends)
    tokens[inside] = np.fromiter(chain.from_iterable(texts), np.int64, int(lengths.sum()))
    if after:
        np.put_along_axis(tokens, ends + np.arange(len(after)), np.asarray(after)[None], 1)
    even = len(set(lengths.tolist())) == 1
    return torch.from_numpy(tokens), None if even else torch.from_numpy(places >= ends + len(after))


TASKS: Registry[type[Task]] = Registry("task", "headstock.tasks")


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy summed over labelled positions, in float32."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=smoothing,
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


def padded_batch(examples: Examples, indices: Sequence[int], rows: int, *, filler: int = 0) -> Batch:
    """A batch of these examples, filled up to `rows` with rows that have no labels."""
    real = len(indices)
    batch = examples.batch([*indices, *[filler] * (rows - real)])
    for labels in batch.labels.values():
        by_row = batch.example_ids is not None and len(labels) == len(batch.example_ids)  # else one a whole example
        labels[batch.example_ids >= real if by_row else slice(real, None)] = IGNORE_INDEX  # type: ignore[operator]
    batch.real_examples = RealExamples(real)
    return batch
