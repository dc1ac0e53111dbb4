"""What every objective and task promises, so that one loop trains them all."""

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
    """What one pass over the data is made of; example i of a pass is the same whoever asks for it.

    Where they differ in length they also have `lengths`, so that like can be read with like.
    """

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
    bos_role: ClassVar[str] = "start"  # the role of the mark before every text
    is_language_model: bool = False  # the loss is that of tokens, so that its exponential is a perplexity
    bits_per_byte_head: ClassVar[str | None] = (
        None  # the head that reads all text in order: bits per byte are of its loss
    )
    generates: ClassVar[bool] = False  # its token head gives the next token
    is_labelled: ClassVar[bool] = False  # it learns from labelled rows, so that a run of it predicts
    title: ClassVar[str] = "language model"  # what a model trained for it is
    predicts_classes: ClassVar[bool] = False  # its outputs are the probabilities of `config.classes` for each row
    translates: ClassVar[bool] = False  # a run of it has `translate`
    answers_questions: ClassVar[bool] = False  # a run of it has `answer`
    texts_per_row: ClassVar[int] = 1  # how many texts a row joins,
    row_description: ClassVar[str] = "one text"  # and what they are
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
    fills_masks: ClassVar[bool] = False  # its token head gives hidden tokens
    mask_shift: ClassVar[int] = 0  # how many places before a hidden token the state stands that gives it
    needs_sentences: bool = False  # it reads text whose sentences are marked apart
    progress: float = 0.0  # the share of the run that is over, told by the loop before it asks for batches
    causal: ClassVar[bool | None] = None  # whether the backbone must look back only; None leaves it as it is
    needs_encoder_decoder: ClassVar[bool] = False  # its rows bring a source, so the backbone must be one that reads it
    needs_bidirectional: ClassVar[bool] = False  # the backbone must read forward and backward apart
    needs_prefix: bool = (
        False  # batches bring what stands before a row in its document, told when a model is made for it
    )

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
        """For each head the loss summed over everything it predicts; the mean is made once, by the loop.

        Beside them may stand tallies under other names, such as `hits`: summed alike, followed by no gradient.
        """

    @abstractmethod
    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """The metrics of a whole data set from its summed losses and tallies; `size` is its text in bytes, or 0."""

    @classmethod
    def segments(cls, config: Any) -> int:
        """How many kinds of text a row joins, which the model must tell apart; 0 if there is but one."""
        return 0

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        """A few outputs for held-out text, for the report of a pretraining run; the same seed gives the same ones."""
        return []

    def weight(self, head: str) -> float:
        """What a head's mean loss weighs in the total."""
        return 1.0

    def head_passes(self, head: str, length: Any) -> Any:
        """How often a token passes through a head, on average over rows of `length`: what the head costs follows."""
        return 1

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """By what the best weights are chosen on validation data; less is better."""
        return metrics["loss"]

    def tokens(self, batch: Batch) -> int:
        """How many tokens a batch stands for when speed is told."""
        return max(self.counts(batch).values())

    def counts(self, batch: Batch) -> dict[str, int]:
        """For each head how many predictions the batch asks for."""
        return {head: int((labels != IGNORE_INDEX).sum()) for head, labels in batch.labels.items()}


def bos_id(tokenizer: Tokenizer, role: str) -> int:
    """The mark before every text: its own, or else the next best that the tokenizer has (GPT-2 has one for all)."""
    marks = {"start": (tokenizer.bos, tokenizer.cls), "cls": (tokenizer.cls, tokenizer.bos)}[role]
    found = next((mark for mark in (*marks, tokenizer.eos) if mark is not None), None)
    if found is None:
        raise UserError("this tokenizer has no mark to begin a text with (<sos>, [CLS] or an end mark)")
    return found


def closing_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The mark after every text, where there is to be one."""
    found = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
    if found is None:
        raise UserError("this tokenizer has no mark to close a text with ([SEP] or an end mark)")
    return (found,)


def pad_with_special_tokens(
    texts: Sequence[Sequence[int]], before: Sequence[int], after: Sequence[int], filler: int
) -> tuple[Tensor, Tensor | None]:
    """Texts with marks around each as one tensor (B, T), and where it is padding (None if nowhere).

    What `pad` makes of rows that have their marks, but sooner: no list is made for each text, which would also be one
    more for the collector of garbage to look at.
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
    """Summed over the positions that have a label, in single precision whatever the model computes in."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=smoothing,
    )


def correct_count(logits: Tensor, wanted: Tensor) -> Tensor:
    """How many of the best guesses are right; IGNORE_INDEX is never one."""
    return (logits.detach().argmax(-1) == wanted).sum()


def token_loss(head: nn.Module, hidden: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """What a head over the vocabulary loses at vectors (..., D), and how many of its best guesses are right.

    Where there are many scores they are not held all at once: see kernels.
    """
    if isinstance(head, LMHead) and worth_chunking(labels.numel(), len(head.weight)):
        flat = head.transformed(hidden).flatten(0, -2), head.weight, head.bias, labels.flatten()
        return linear_cross_entropy(*flat, smoothing=smoothing)
    logits = head(hidden)
    return cross_entropy(logits, labels, smoothing=smoothing), correct_count(logits, labels)


def padded_batch(examples: Examples, indices: Sequence[int], rows: int, *, filler: int = 0) -> Batch:
    """A batch of these examples and, up to `rows`, of rows that are read like any other but count for nothing."""
    real = len(indices)
    batch = examples.batch([*indices, *[filler] * (rows - real)])
    for labels in batch.labels.values():
        by_row = batch.example_ids is not None and len(labels) == len(batch.example_ids)  # else one a whole example
        labels[batch.example_ids >= real if by_row else slice(real, None)] = IGNORE_INDEX  # type: ignore[operator]
    batch.real_examples = RealExamples(real)
    return batch
