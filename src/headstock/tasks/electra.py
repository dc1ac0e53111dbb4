"""Replaced token detection (ELECTRA): which tokens of a text did a small masked language model write?

B rows, T tokens, N masked tokens, G width of the generator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.data.token_store import TokenStore
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import IGNORE_INDEX, Batch, find_label_positions, make_cu_seqlens
from headstock.model.generator import Generator, GeneratorHead
from headstock.model.heads import ClassificationHead
from headstock.model.model import Model
from headstock.rng import uniforms
from headstock.tasks.base import TASKS, Examples, PlanDefaults, perplexity, token_loss
from headstock.tasks.masking import EpochMasker, MaskingConfig, MaskingTask
from headstock.tasks.packing import PackedExamples, PackedWindows


@dataclass(frozen=True)
class ElectraConfig(MaskingConfig):
    masked: float = 1.0  # share of the predicted tokens replaced by [MASK] in the generator's input
    random: float = 0.0  # and by a random token; the others are unchanged
    generator_width: float = 0.25  # width of the generator, as a share of the backbone's
    generator_depth: int | None = None  # blocks of the generator; default: as many as the backbone
    detection_weight: float = 50.0  # of the loss of the detected tokens, beside that of the generator

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not 0 < self.generator_width <= 1:
            problems.append(("generator_width", f"must be above 0 and at most 1, not {self.generator_width}"))
        if self.generator_depth is not None and self.generator_depth < 1:
            problems.append(("generator_depth", f"must be at least 1, not {self.generator_depth}"))
        if self.detection_weight <= 0:
            problems.append(("detection_weight", f"must be above 0, not {self.detection_weight}"))
        return problems


@TASKS.add("electra")
class ReplacedTokenDetection(MaskingTask):
    """A generator fills masked tokens; the model tells for every token whether it is the original one.

    The loss covers all tokens instead of the masked ones, and the model never sees [MASK]. The generator has its own
    loss, which no gradient of the model's reaches, and is not used after pretraining.
    """

    Config = ElectraConfig
    title = "ELECTRA model"
    bos_role = "cls"
    causal = False
    lens = "none"
    plan = PlanDefaults(max_epochs=16, batch_shapes=20)

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        if not isinstance(backbone, Transformer):
            raise UserError("the objective electra needs a Transformer (--preset bert-nano)")
        c = self.config
        generator = Generator(backbone, width_share=c.generator_width, depth=c.generator_depth)
        return {
            "generator": generator,
            "masked": GeneratorHead(backbone, generator),
            "replaced": ClassificationHead(backbone.width, 1, dense="gelu"),
        }

    def head_passes(self, head: str, length: Any) -> Any:
        return self.config.fraction if head == "masked" else 1

    def weight(self, head: str) -> float:
        return self.config.detection_weight if head == "replaced" else 1.0

    def examples(self, data: TokenStore, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        windows = self.windows(data, length, seed=seed, epoch=epoch)
        return ElectraExamples(self, windows, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        generator, head = model.heads["generator"], model.heads["masked"]
        vectors, labels = batch.gather_labelled("masked", generator(batch).hidden)  # (N, G), (N,)
        masked, masked_correct = token_loss(head, vectors, labels, smoothing=smoothing)
        tokens = self.sample_tokens(head, vectors.detach(), labels, batch)
        hidden = model(replace(batch, tokens=tokens)).hidden
        originals = batch.labels["replaced"]
        is_real, is_replaced = originals != IGNORE_INDEX, originals != tokens
        logits = model.heads["replaced"](hidden).squeeze(-1).float()  # (B, T)
        loss = F.binary_cross_entropy_with_logits(
            logits, is_replaced.to(logits), weight=is_real.to(logits), reduction="sum"
        )
        is_predicted = logits.detach() > 0
        return {
            "masked": masked,
            "replaced": loss,
            "masked_correct": masked_correct,
            "correct": (is_real & (is_predicted == is_replaced)).sum(),
            "detected": (is_real & is_predicted & is_replaced).sum(),
            "detectable": (is_real & is_replaced).sum(),
        }

    def sample_tokens(self, head: nn.Module, vectors: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """(B, T) the text with every masked token drawn from the generator's distribution."""
        assert batch.draws is not None
        tokens, positions = batch.tokens.flatten(), batch.label_positions["masked"]
        with torch.no_grad():
            cumulative = head(vectors).float().softmax(-1).cumsum(-1)  # (N, V)
            thresholds = batch.draws.flatten().index_select(0, positions)[:, None] * cumulative[:, -1:]
            sampled = (cumulative <= thresholds).sum(-1).clamp(max=cumulative.size(-1) - 1)
        sampled = torch.where(labels == IGNORE_INDEX, tokens.index_select(0, positions), sampled)
        return tokens.index_copy(0, positions, sampled).view_as(batch.tokens)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """`accuracy` is that of all tokens, `recall` the share of replaced tokens that are detected."""
        masked, replaced = (sums[head] / max(1, counts[head]) for head in ("masked", "replaced"))
        return {
            "loss": self.weight("masked") * masked + self.weight("replaced") * replaced,
            "detection_loss": replaced,
            "accuracy": sums["correct"] / max(1, counts["replaced"]),
            "recall": sums["detected"] / max(1, sums["detectable"]),
            "generator_perplexity": perplexity(masked),
            "generator_accuracy": sums["masked_correct"] / max(1, counts["masked"]),
        }


class ElectraExamples(PackedExamples):
    """Packed windows with masked tokens, and a random number for each token that may be sampled."""

    def __init__(self, task: ReplacedTokenDetection, windows: PackedWindows, *, seed: int | None, epoch: int):
        super().__init__(windows)
        self.bos, self.masker = task.bos, EpochMasker(task, seed=seed, epoch=epoch)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        maskable = ~rows.padding & (rows.tokens != self.bos)
        tokens, masked = self.masker.mask(rows.tokens, maskable, rows.document_ids, indices)
        labels = {"masked": masked, "replaced": np.where(maskable, rows.tokens, IGNORE_INDEX)}
        draws = uniforms(*self.masker.key, "sample", rows=indices, count=tokens.shape[1]).astype(np.float32)
        cu_seqlens = make_cu_seqlens(torch.from_numpy(rows.document_ids))
        batch = rows.batch(tokens, labels, cu_seqlens=cu_seqlens, draws=torch.from_numpy(draws))
        batch.label_positions["masked"] = find_label_positions(batch.labels["masked"])
        return batch
