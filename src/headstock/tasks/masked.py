"""Masked language modelling: some tokens are hidden, and what they were is read from both sides.

With `nsp`, rows are pairs of texts, and whether the second follows the first must be told too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, count_real_tokens, find_label_positions, make_cu_seqlens
from headstock.model.heads import LMHead, NextSentenceHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, Task, cross_entropy, hits, opening, token_loss
from headstock.tasks.masking import Hiding, HidingConfig
from headstock.tasks.nsp import Following, check_pairs
from headstock.tasks.packing import Windows


@dataclass(frozen=True)
class MaskedConfig(HidingConfig):
    nsp: bool = False  # next-sentence prediction: rows are two texts, half of them taken from different documents
    transform: bool = False  # BERT's layer between the backbone and the scores of tokens
    closed: bool = False  # a text that is read alone is closed by a separator, as where the weights come from


@TASKS.add("masked")
class Masked(Task):
    """A model that reads both sides of what it must guess."""

    Config = MaskedConfig
    opening = "cls"
    causal = False
    fills = True

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.eos is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which masked language modelling needs")
        self.hiding = Hiding(config, tokenizer)
        self.mask, self.end = tokenizer.mask, tokenizer.eos
        self.start = opening(tokenizer, self.opening)
        self.filler = tokenizer.pad or 0
        self.sentences = config.nsp
        self.of_tokens = not config.nsp
        if config.nsp and tokenizer.sep is None:
            raise UserError("this tokenizer has no [SEP], which next-sentence prediction puts between two texts")

    @classmethod
    def segments(cls, config: MaskedConfig) -> int:
        return 2 if config.nsp else 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        heads: dict[str, nn.Module] = {"token": LMHead(backbone, transform=self.config.transform)}
        return heads | {"next": NextSentenceHead(backbone.width)} if self.config.nsp else heads

    def passes(self, head: str, length: Any) -> Any:
        return 1 / length if head == "next" else self.config.fraction

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.nsp:
            check_pairs(data, length)
            return Pairs(self, Following(data, length, seed=seed, epoch=epoch), seed=seed, epoch=epoch)
        windows = Windows(data, length, start=self.start, end=self.end, filler=self.filler, seed=seed, epoch=epoch)
        return Hidden(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden = model(batch).hidden
        # the head is by far the widest layer, so only what is guessed passes through it
        loss, right = token_loss(model.heads["token"], *batch.gather_labelled("token", hidden), smoothing=smoothing)
        sums = {"token": loss, "hits": right}
        if self.config.nsp:
            follows, answer = model.heads["next"](hidden[:, 0]), batch.labels["next"]  # (B, 2), (B,)
            sums |= {"next": cross_entropy(follows, answer, smoothing=smoothing), "next_hits": hits(follows, answer)}
        return sums

    def tokens(self, batch: Batch) -> int:
        return count_real_tokens(batch)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "accuracy": sums["hits"] / max(1, counts["token"]),
        }
        if pairs := counts.get("next"):
            metrics["loss"] += sums["next"] / pairs  # what is trained: both tasks, each by its mean
            metrics |= {"next_loss": sums["next"] / pairs, "next_accuracy": sums["next_hits"] / pairs}
        return metrics


def drawn_from(seed: int | None, epoch: int) -> tuple[int | str, ...]:
    """The key of a pass: held-out text is asked the same every time."""
    return ("valid",) if seed is None else (seed, epoch)


class Hidden:
    """Windows of the stream with some of their tokens hidden, anew in every pass."""

    def __init__(self, task: Masked, windows: Windows, *, seed: int | None, epoch: int):
        self.task, self.windows, self.name = task, windows, windows.name
        self.key, self.training = drawn_from(seed, epoch), seed is not None

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, hiding = self.windows.rows(indices), self.task.hiding
        allowed = ~rows.padding & (rows.shown != self.task.start)
        fraction = hiding.fraction(self.task.done if self.training else 1.0)
        tokens, labels = hiding.hide(rows.shown, allowed, rows.documents, key=self.key, rows=indices, fraction=fraction)
        return Batch(
            torch.from_numpy(tokens),
            document_ids=torch.from_numpy(rows.documents),  # the padding is a document of its own
            cu_seqlens=make_cu_seqlens(torch.from_numpy(rows.documents)),
            positions=torch.from_numpy(rows.positions),
            labels={"token": torch.from_numpy(labels)},
            label_positions={"token": find_label_positions(torch.from_numpy(labels))},
        )


class Pairs:
    """Rows [CLS] A [SEP] B [SEP] with some of their tokens hidden, and whether B follows A."""

    def __init__(self, task: Masked, following: Following, *, seed: int | None, epoch: int):
        self.task, self.following, self.name = task, following, following.name
        self.key, self.training = drawn_from(seed, epoch), seed is not None
        self.lengths = following.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        hiding = self.task.hiding
        rows = self.following.rows(indices, key=self.key, opening=self.task.start, filler=self.task.filler)
        fraction = hiding.fraction(self.task.done if self.training else 1.0)
        tokens, labels = hiding.hide(
            rows.shown, rows.text, rows.segments, key=self.key, rows=indices, fraction=fraction
        )
        return Batch(
            torch.from_numpy(tokens),
            padding=torch.from_numpy(rows.padding),
            segments=torch.from_numpy(rows.segments),
            labels={"token": torch.from_numpy(labels), "next": torch.from_numpy(rows.follows)},
            label_positions={"token": find_label_positions(torch.from_numpy(labels))},
        )
