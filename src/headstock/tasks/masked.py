"""Masked language modelling, with next-sentence prediction as an option."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, find_label_positions, make_cu_seqlens
from headstock.model.heads import NextSentenceHead
from headstock.model.model import Model
from headstock.tasks.base import (
    TASKS,
    Examples,
    PlanDefaults,
    Sample,
    correct_count,
    cross_entropy,
    token_losses,
    token_score,
)
from headstock.tasks.masking import EpochMasker, MaskingConfig, MaskingTask
from headstock.tasks.nsp import NextSentenceExamples, check_pairs
from headstock.tasks.packing import PackedExamples, PackedWindows
from headstock.tasks.samples import sample_fills

PLAN_SETTINGS = {"fraction_start": 0.5, "fraction": 0.2}  # recipes/reviews-fr.toml


@dataclass(frozen=True)
class MaskedConfig(MaskingConfig):
    nsp: bool = False  # next-sentence prediction: rows are pairs of texts, half of them from different documents
    transform: bool = False  # BERT's dense layer before the token logits
    closed: bool = False  # a single text ends with a separator, as in BERT


@TASKS.add("masked")
class MaskedLM(MaskingTask):
    """Predicts masked tokens from the context on both sides; with `nsp`, also whether text B follows text A."""

    Config = MaskedConfig
    bos_role = "cls"
    causal = False
    fills_masks = True
    is_auxiliary = True
    plan = PlanDefaults(max_epochs=16, batch_shapes=20, settings=PLAN_SETTINGS)
    huggingface_head = "ForMaskedLM"

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.needs_sentences = config.nsp
        self.is_language_model = not config.nsp
        if config.nsp and tokenizer.sep is None:
            raise UserError("this tokenizer has no [SEP], which next-sentence prediction puts between two texts")

    @classmethod
    def segments(cls, config: MaskedConfig) -> int:
        return 2 if config.nsp else 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        heads = super().heads(backbone)
        return heads | {"next": NextSentenceHead(backbone.width)} if self.config.nsp else heads

    def head_passes(self, head: str, length: Any) -> Any:
        return 1 / length if head == "next" else self.config.fraction

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.nsp:
            check_pairs(data, length)
            return NextSentenceExamples(self, data, length, seed=seed, epoch=epoch)
        windows = self.windows(data, length, seed=seed, epoch=epoch)
        return MaskedExamples(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden = model(batch).hidden
        sums = token_losses(model, hidden, batch, smoothing=smoothing)
        if self.config.nsp:
            logits, labels = model.heads["next"](hidden[:, 0]), batch.labels["next"]  # (B, 2), (B,)
            sums["next"] = cross_entropy(logits, labels, smoothing=smoothing)
            sums["next_correct"] = correct_count(logits, labels)
        return sums

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        return sample_fills(model, self, store, length=length, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        metrics = token_score(sums, counts)
        if pairs := counts.get("next"):
            metrics["loss"] += sums["next"] / pairs  # the training loss: the sum of both means
            metrics |= {"next_loss": sums["next"] / pairs, "next_accuracy": sums["next_correct"] / pairs}
        return metrics


class MaskedExamples(PackedExamples):
    """Packed windows with masked tokens, drawn anew in every epoch."""

    def __init__(self, task: MaskedLM, windows: PackedWindows, *, seed: int | None, epoch: int):
        super().__init__(windows)
        self.bos, self.masker = task.bos, EpochMasker(task, seed=seed, epoch=epoch)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        maskable = ~rows.padding & (rows.tokens != self.bos)
        tokens, labels = self.masker.mask(rows.tokens, maskable, rows.document_ids, indices)
        batch = rows.batch(tokens, {"token": labels}, cu_seqlens=make_cu_seqlens(torch.from_numpy(rows.document_ids)))
        batch.label_positions["token"] = find_label_positions(batch.labels["token"])
        return batch
