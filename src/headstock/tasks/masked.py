"""Masked language modelling, with next-sentence prediction as an option."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, count_real_tokens, find_label_positions, make_cu_seqlens
from headstock.model.heads import LMHead, NextSentenceHead
from headstock.model.model import Model
from headstock.tasks.base import TASKS, Examples, Sample, Task, bos_id, correct_count, cross_entropy, token_loss
from headstock.tasks.masking import MaskingConfig, TokenMasker
from headstock.tasks.nsp import NextSentencePairs, check_pairs
from headstock.tasks.packing import PackedWindows
from headstock.tasks.samples import sample_fills


@dataclass(frozen=True)
class MaskedConfig(MaskingConfig):
    nsp: bool = False  # next-sentence prediction: rows are pairs of texts, half of them from different documents
    transform: bool = False  # BERT's dense layer before the token logits
    closed: bool = False  # a single text ends with a separator, as in BERT


@TASKS.add("masked")
class MaskedLM(Task):
    """Predicts masked tokens from the context on both sides; with `nsp`, also whether text B follows text A."""

    Config = MaskedConfig
    bos_role = "cls"
    causal = False
    fills_masks = True
    max_epochs = 16
    batch_shapes = 20
    plan_settings: ClassVar[dict[str, float]] = {"fraction_start": 0.5, "fraction": 0.2}  # recipes/reviews-fr.toml
    huggingface_head = "ForMaskedLM"

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.eos is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which masked language modelling needs")
        self.masker = TokenMasker(config, tokenizer)
        self.mask, self.eos = tokenizer.mask, tokenizer.eos
        self.bos = bos_id(tokenizer, self.bos_role)
        self.pad_id = tokenizer.pad or 0
        self.needs_sentences = config.nsp
        self.is_language_model = not config.nsp
        if config.nsp and tokenizer.sep is None:
            raise UserError("this tokenizer has no [SEP], which next-sentence prediction puts between two texts")

    @classmethod
    def segments(cls, config: MaskedConfig) -> int:
        return 2 if config.nsp else 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        heads: dict[str, nn.Module] = {"token": LMHead(backbone, transform=self.config.transform)}
        return heads | {"next": NextSentenceHead(backbone.width)} if self.config.nsp else heads

    def head_passes(self, head: str, length: Any) -> Any:
        return 1 / length if head == "next" else self.config.fraction

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.nsp:
            check_pairs(data, length)
            return NextSentenceExamples(
                self, NextSentencePairs(data, length, seed=seed, epoch=epoch), seed=seed, epoch=epoch
            )
        windows = PackedWindows(data, length, start=self.bos, end=self.eos, filler=self.pad_id, seed=seed, epoch=epoch)
        return MaskedExamples(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden = model(batch).hidden
        # the token head is the widest layer, so only masked positions pass through it
        loss, right = token_loss(model.heads["token"], *batch.gather_labelled("token", hidden), smoothing=smoothing)
        sums = {"token": loss, "correct": right}
        if self.config.nsp:
            follows, answer = model.heads["next"](hidden[:, 0]), batch.labels["next"]  # (B, 2), (B,)
            sums |= {
                "next": cross_entropy(follows, answer, smoothing=smoothing),
                "next_correct": correct_count(follows, answer),
            }
        return sums

    def tokens(self, batch: Batch) -> int:
        return count_real_tokens(batch)

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        return sample_fills(model, self, store, length=length, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "accuracy": sums["correct"] / max(1, counts["token"]),
        }
        if pairs := counts.get("next"):
            metrics["loss"] += sums["next"] / pairs  # the training loss: the sum of both means
            metrics |= {"next_loss": sums["next"] / pairs, "next_accuracy": sums["next_correct"] / pairs}
        return metrics


def epoch_key(seed: int | None, epoch: int) -> tuple[int | str, ...]:
    """The random key of an epoch; validation always has the same one."""
    return ("valid",) if seed is None else (seed, epoch)


class MaskedExamples:
    """Packed windows with masked tokens, drawn anew in every epoch."""

    def __init__(self, task: MaskedLM, windows: PackedWindows, *, seed: int | None, epoch: int):
        self.task, self.windows, self.name = task, windows, windows.name
        self.key, self.training = epoch_key(seed, epoch), seed is not None

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, masker = self.windows.rows(indices), self.task.masker
        allowed = ~rows.padding & (rows.shown != self.task.bos)
        fraction = masker.fraction(self.task.progress if self.training else 1.0)
        tokens, labels = masker.mask_tokens(
            rows.shown, allowed, rows.documents, key=self.key, rows=indices, fraction=fraction
        )
        return Batch(
            torch.from_numpy(tokens),
            document_ids=torch.from_numpy(rows.documents),  # padding has its own document id
            cu_seqlens=make_cu_seqlens(torch.from_numpy(rows.documents)),
            positions=torch.from_numpy(rows.positions),
            labels={"token": torch.from_numpy(labels)},
            label_positions={"token": find_label_positions(torch.from_numpy(labels))},
        )


class NextSentenceExamples:
    """Rows [CLS] A [SEP] B [SEP] with masked tokens, labelled with whether B follows A."""

    def __init__(self, task: MaskedLM, following: NextSentencePairs, *, seed: int | None, epoch: int):
        self.task, self.following, self.name = task, following, following.name
        self.key, self.training = epoch_key(seed, epoch), seed is not None
        self.lengths = following.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        masker = self.task.masker
        rows = self.following.rows(indices, key=self.key, opening=self.task.bos, filler=self.task.pad_id)
        fraction = masker.fraction(self.task.progress if self.training else 1.0)
        tokens, labels = masker.mask_tokens(
            rows.shown, rows.text, rows.segments, key=self.key, rows=indices, fraction=fraction
        )
        return Batch(
            torch.from_numpy(tokens),
            padding=torch.from_numpy(rows.padding),
            segments=torch.from_numpy(rows.segments),
            labels={"token": torch.from_numpy(labels), "next": torch.from_numpy(rows.follows)},
            label_positions={"token": find_label_positions(torch.from_numpy(labels))},
        )
