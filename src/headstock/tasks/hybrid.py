"""Hybrid language modelling: one Transformer trained on masked rows and on causal rows (GPT-BERT).

In both, the state before a token predicts it, so that they share one head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.token_store import TokenStore
from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, count_real_tokens, find_label_positions
from headstock.model.heads import LMHead
from headstock.model.model import Model
from headstock.rng import uniforms
from headstock.tasks.base import TASKS, Examples, Sample, Task, bos_id, token_loss
from headstock.tasks.masked import epoch_key
from headstock.tasks.masking import MaskingConfig, TokenMasker
from headstock.tasks.packing import PackedWindows
from headstock.tasks.samples import sample_continuations, sample_fills


@dataclass(frozen=True)
class HybridConfig(MaskingConfig):
    causal_share: float = 0.25  # share of causal rows, and weight of their loss
    transform: bool = False  # BERT's dense layer before the token logits

    def problems(self) -> list[tuple[str, str]]:
        wrong = f"must be above 0 and below 1, not {self.causal_share} (the objectives masked and causal are the ends)"
        return super().problems() + ([] if 0 < self.causal_share < 1 else [("causal_share", wrong)])


@TASKS.add("hybrid")
class HybridLM(Task):
    """Masked and causal language modelling in one model."""

    Config = HybridConfig
    bos_role = "cls"
    causal = False  # bidirectional unless a row asks for a causal mask
    bits_per_byte_head = "causal"
    generates = True
    huggingface_head = "ForCausalLM"
    fills_masks = True
    mixes_masks = True
    max_epochs = 10
    validation_passes = 2
    batch_shapes = 250
    plan_settings: ClassVar[dict[str, float]] = {"fraction_start": 0.5, "fraction": 0.2}  # recipes/reviews-fr.toml
    mask_shift = 1

    def __init__(self, config: HybridConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.eos is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which hybrid language modelling needs")
        self.masker = TokenMasker(config, tokenizer)
        self.eos, self.pad_id = tokenizer.eos, tokenizer.pad or 0
        self.bos, self.cls = bos_id(tokenizer, "start"), bos_id(tokenizer, "cls")

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": LMHead(backbone, transform=self.config.transform)}

    def head_passes(self, head: str, length: Any) -> Any:
        return self.config.causal_share + (1 - self.config.causal_share) * self.config.fraction

    def weight(self, head: str) -> float:
        return self.config.causal_share if head == "causal" else 1.0 - self.config.causal_share

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        windows = PackedWindows(data, length, start=self.bos, end=self.eos, filler=self.pad_id, seed=seed, epoch=epoch)
        return HybridExamples(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden, head = model(batch).hidden, model.heads["token"]
        # only labelled positions pass through the head
        masked, right = token_loss(head, *batch.gather_labelled("masked", hidden), smoothing=smoothing)
        causal, _ = token_loss(head, *batch.gather_labelled("causal", hidden), smoothing=smoothing)
        return {"masked": masked, "causal": causal, "correct": right}

    def tokens(self, batch: Batch) -> int:
        return count_real_tokens(batch)

    def samples(self, model: Model, store: TokenStore, *, length: int, seed: int) -> list[Sample]:
        continued = sample_continuations(model, self, store, seed=seed)
        return continued + sample_fills(model, self, store, length=length, seed=seed)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """`perplexity` is that of causal rows, `accuracy` that of masked tokens."""
        loss = {head: sums[head] / max(1, counts[head]) for head in ("masked", "causal")}
        ppl = {head: math.exp(min(value, 700.0)) for head, value in loss.items()}
        return {
            "loss": sum(self.weight(head) * value for head, value in loss.items()),
            "perplexity": ppl["causal"],
            "causal_perplexity": ppl["causal"],
            "masked_perplexity": ppl["masked"],
            **({"bits_per_byte": sums["causal"] / math.log(2) / size} if size else {}),
            "accuracy": sums["correct"] / max(1, counts["masked"]),
        }


class HybridExamples:
    """Packed windows, masked or causal at random; validation reads each window both ways."""

    def __init__(self, task: HybridLM, windows: PackedWindows, *, seed: int | None, epoch: int):
        self.task, self.windows = task, windows
        self.key, self.training = epoch_key(seed, epoch), seed is not None

    def __len__(self) -> int:
        return len(self.windows) * (1 if self.training else 2)

    def name(self, index: int) -> str:
        return self.windows.name(index % len(self.windows))

    def ways(self, indices: Sequence[int]) -> np.ndarray:
        """(B,) True for causal examples."""
        if not self.training:
            return np.asarray(indices) >= len(self.windows)
        return uniforms(*self.key, "way", rows=indices, count=1)[:, 0] < self.task.config.causal_share

    def batch(self, indices: Sequence[int]) -> Batch:
        task, causal = self.task, self.ways(indices)
        rows = self.windows.rows(np.asarray(indices) % len(self.windows))
        openings = rows.shown == task.bos
        shown = np.where(openings & ~causal[:, None], task.cls, rows.shown)
        allowed = ~(rows.padding | openings | causal[:, None])
        allowed[:, 0] = False  # no state precedes the first token of a row
        fraction = task.masker.fraction(task.progress if self.training else 1.0)
        tokens, were = task.masker.mask_tokens(
            shown, allowed, rows.documents, key=self.key, rows=indices, fraction=fraction
        )
        masked = np.concatenate([were[:, 1:], np.full((len(were), 1), IGNORE_INDEX)], 1)  # one position earlier
        following = np.where(rows.padding | ~causal[:, None], IGNORE_INDEX, rows.wanted)
        labels = {"masked": torch.from_numpy(masked), "causal": torch.from_numpy(following)}
        return Batch(
            torch.from_numpy(tokens),
            document_ids=torch.from_numpy(rows.documents),
            positions=torch.from_numpy(rows.positions),
            causal=torch.from_numpy(causal),
            labels=labels,
            label_positions={head: find_label_positions(wanted) for head, wanted in labels.items()},
        )
