"""Hybrid language modelling: one Transformer trained on masked rows and on causal rows (GPT-BERT).

In both, the hidden state before a token predicts it, so that they share one head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions
from headstock.model.model import Model
from headstock.rng import uniforms
from headstock.tasks.base import TASKS, Examples, PlanDefaults, Sample, bits_per_byte, perplexity, token_loss
from headstock.tasks.masked import PLAN_SETTINGS
from headstock.tasks.masking import EpochMasker, MaskingConfig, MaskingTask
from headstock.tasks.packing import PackedWindows
from headstock.tasks.samples import sample_continuations, sample_fills
from headstock.tasks.special_tokens import bos_id


@dataclass(frozen=True)
class HybridConfig(MaskingConfig):
    causal_share: float = 0.25  # share of causal rows, and weight of their loss
    transform: bool = False  # BERT's dense layer before the token logits

    def problems(self) -> list[tuple[str, str]]:
        wrong = f"must be above 0 and below 1, not {self.causal_share} (the objectives masked and causal are the ends)"
        return super().problems() + ([] if 0 < self.causal_share < 1 else [("causal_share", wrong)])


@TASKS.add("hybrid")
class HybridLM(MaskingTask):
    """Masked and causal language modelling in one model."""

    Config = HybridConfig
    bos_role = "cls"
    causal = False  # bidirectional unless a row asks for a causal mask
    bits_per_byte_head = "causal"
    generates = True
    fills_masks = True
    is_auxiliary = True
    mask_shift = 1
    plan = PlanDefaults(max_epochs=10, validation_passes=2, batch_shapes=250, settings=PLAN_SETTINGS)
    huggingface_head = "ForCausalLM"

    def __init__(self, config: HybridConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos, self.cls = bos_id(tokenizer, "start"), bos_id(tokenizer, "cls")

    def head_passes(self, head: str, length: Any) -> Any:
        return self.config.causal_share + (1 - self.config.causal_share) * self.config.fraction

    def weight(self, head: str) -> float:
        return self.config.causal_share if head == "causal" else 1.0 - self.config.causal_share

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        windows = self.windows(data, length, seed=seed, epoch=epoch)
        return HybridExamples(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden, head = model(batch).hidden, model.heads["token"]
        # only labelled positions pass through the head
        masked, correct = token_loss(head, *batch.gather_labelled("masked", hidden), smoothing=smoothing)
        causal, _ = token_loss(head, *batch.gather_labelled("causal", hidden), smoothing=smoothing)
        return {"masked": masked, "causal": causal, "correct": correct}

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        continuations = sample_continuations(model, self, store, seed=seed)
        return continuations + sample_fills(model, self, store, length=length, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """`perplexity` is that of causal rows, `accuracy` that of masked tokens."""
        masked, causal = (sums[head] / max(1, counts[head]) for head in ("masked", "causal"))
        return {
            "loss": self.weight("masked") * masked + self.weight("causal") * causal,
            "perplexity": perplexity(causal),
            "causal_perplexity": perplexity(causal),
            "masked_perplexity": perplexity(masked),
            **bits_per_byte(sums["causal"], size),
            "accuracy": sums["correct"] / max(1, counts["masked"]),
        }


class HybridExamples:
    """Packed windows, masked or causal at random; validation reads each window both ways."""

    def __init__(self, task: HybridLM, windows: PackedWindows, *, seed: int | None, epoch: int):
        self.task, self.windows = task, windows
        self.masker = EpochMasker(task, seed=seed, epoch=epoch)

    def __len__(self) -> int:
        return len(self.windows) * (1 if self.masker.training else 2)

    def name(self, index: int) -> str:
        return self.windows.name(index % len(self.windows))

    def is_causal(self, indices: Sequence[int]) -> np.ndarray:
        """(B,) True for causal examples."""
        if not self.masker.training:
            return np.asarray(indices) >= len(self.windows)
        return uniforms(*self.masker.key, "way", rows=indices, count=1)[:, 0] < self.task.config.causal_share

    def batch(self, indices: Sequence[int]) -> Batch:
        task, causal = self.task, self.is_causal(indices)
        rows = self.windows.rows(np.asarray(indices) % len(self.windows))
        is_bos = rows.tokens == task.bos
        inputs = np.where(is_bos & ~causal[:, None], task.cls, rows.tokens)
        maskable = ~(rows.padding | is_bos | causal[:, None])
        maskable[:, 0] = False  # no hidden state precedes the first token of a row
        tokens, originals = self.masker.mask(inputs, maskable, rows.document_ids, indices)
        masked_labels = np.full_like(originals, IGNORE_INDEX)
        masked_labels[:, :-1] = originals[:, 1:]  # predicted one position earlier
        causal_labels = np.where(causal[:, None], rows.next_tokens, IGNORE_INDEX)
        labels = {"masked": masked_labels, "causal": causal_labels}
        batch = rows.batch(tokens, labels, causal=torch.from_numpy(causal))
        batch.label_positions = {head: find_label_positions(values) for head, values in batch.labels.items()}
        return batch
