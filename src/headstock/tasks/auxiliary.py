"""Auxiliary losses and token dropout for fine-tuning: a language-model loss, R-Drop, masked input tokens.

B sequences, N examples (one sequence each unless a long one is split), T tokens, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headstock.data.tokenizer import Tokenizer
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE_INDEX, Batch, Output
from headstock.model.model import Model
from headstock.tasks.base import Examples, Task, token_losses
from headstock.tasks.labelled import LabelledTask

LM_HEAD, R_DROP = "token", "r_drop"  # names of losses; the first is also that of the head
MAX_SEQUENCES = 1 << 16  # of one example, each with its own random masks


class AuxiliaryLosses(Task):
    """A labelled task with further losses in training; validation has the task's own loss on whole texts alone.

    - `objective`, a pretraining objective, gives the rows labels for the language-model head (Radford et al. 2018).
    - With `r_drop`, each row is read twice, and the divergence of the two predictions is a loss (Liang et al. 2021).
    - With `token_dropout`, each reading sees [MASK] in place of some tokens, drawn like the units of dropout.
    """

    is_labelled = True

    def __init__(
        self,
        task: LabelledTask,
        *,
        objective: Task | None = None,
        lm_loss: float = 0.0,
        r_drop: float = 0.0,
        token_dropout: float = 0.0,
    ):
        super().__init__(task.config, task.tokenizer)
        self.token_dropout = TokenDropout(token_dropout, task.tokenizer) if token_dropout else None
        self.task, self.objective, self.r_drop = task, objective, r_drop
        self.weights = {R_DROP: r_drop} | ({} if objective is None else {LM_HEAD: lm_loss})
        self.has_unused_parameters = task.has_unused_parameters

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        heads = {} if self.objective is None else {LM_HEAD: self.objective.heads(backbone)[LM_HEAD]}
        return self.task.heads(backbone) | heads

    def head_passes(self, head: str, length: Any) -> Any:
        task = self.objective if head == LM_HEAD and self.objective is not None else self.task
        return task.head_passes(head, length)

    def weight(self, head: str) -> float:
        return self.weights.get(head, self.task.weight(head))

    def examples(self, data: Any, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        examples = self.task.examples(data, length=length, seed=seed, epoch=epoch)
        if self.objective is None or seed is None:
            return examples
        return ExamplesWithLMLabels(examples, self.objective, key=(seed, epoch, "lm"))

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        if not model.training:
            return self.task.losses(model, batch)
        drop_tokens, first = self.token_dropout or unchanged, RecordingModel(model)
        sums = self.task.losses(cast(Model, first), drop_tokens(batch), smoothing=smoothing)
        if self.objective is not None:
            masked = batch.masked
            # a causal objective reads the same tokens, unless some are dropped: the hidden states are there already
            is_read = masked is None and self.token_dropout is None
            hidden = first.hidden if is_read else model(masked or batch).hidden
            sums[LM_HEAD] = token_losses(model, hidden, masked or batch, smoothing=0.0)["token"]
        if self.r_drop:
            second = RecordingModel(model)
            again = self.task.losses(cast(Model, second), drop_tokens(batch), smoothing=smoothing)
            sums |= {name: (sums[name] + again[name]) / 2 for name in again}
            logits, labels = (first.outputs["label"], second.outputs["label"]), batch.labels["label"]
            sums[R_DROP] = symmetric_divergence(*logits, labels, multilabel=self.task.multilabel)
        return sums

    def counts(self, batch: Batch) -> dict[str, int]:
        counts = self.task.counts(batch)
        if self.objective is not None and (labels := (batch.masked or batch).labels.get(LM_HEAD)) is not None:
            counts[LM_HEAD] = int((labels != IGNORE_INDEX).sum())
        return counts | ({R_DROP: counts["label"]} if self.r_drop else {})

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        """The task's metrics, and the mean of each further loss where there is one."""
        names = {LM_HEAD: "lm_loss", R_DROP: R_DROP}
        further = {names[head]: sums[head] / max(1, counts[head]) for head in names if head in sums}
        return self.task.score(sums, counts, size=size) | further

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        return self.task.selection_score(metrics)

    def tokens(self, batch: Batch) -> int:
        return self.task.tokens(batch)


class TokenDropout:
    """Replaces a random share of the tokens that a model reads by [MASK], but no special tokens."""

    def __init__(self, share: float, tokenizer: Tokenizer):
        if tokenizer.mask is None:
            raise UserError("transfer.token_dropout: this tokenizer has no [MASK] to put in place of tokens")
        self.share, self.mask, self.special = share, tokenizer.mask, sorted(tokenizer.all_special_ids)

    def __call__(self, batch: Batch) -> Batch:
        dropped = torch.rand(batch.tokens.shape, device=batch.tokens.device) < self.share  # (B, T)
        for token in self.special:  # compared one by one, because a CUDA graph cannot copy a list to the device
            dropped &= batch.tokens != token
        return replace(batch, tokens=batch.tokens.masked_fill(dropped, self.mask))


def unchanged(batch: Batch) -> Batch:
    return batch


class ExamplesWithLMLabels:
    """Examples of a labelled task with the labels of a pretraining objective, drawn anew in every epoch."""

    def __init__(self, examples: Examples, objective: Task, *, key: tuple[int | str, ...]):
        self.examples, self.objective, self.key, self.name = examples, objective, key, examples.name
        if hasattr(examples, "lengths"):  # the same batches as without these labels
            self.lengths = examples.lengths

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = self.examples.batch(indices)
        examples = np.arange(len(indices)) if batch.example_ids is None else batch.example_ids.numpy()  # (B,)
        first = np.concatenate([[True], examples[1:] != examples[:-1]])
        number = np.arange(len(examples)) - np.flatnonzero(first)[first.cumsum() - 1]  # within its example
        rows = np.asarray(indices)[examples] * MAX_SEQUENCES + number
        return self.objective.add_lm_labels(batch, key=self.key, rows=rows)


class RecordingModel:
    """Passes calls on to a model, and keeps its hidden states (B, T, D) and what its heads return.

    Nothing in it refers back to it, so that the computation it keeps is freed with it and not by a later garbage
    collection. A CUDA graph could not be captured while the computation of an earlier step is alive.
    """

    def __init__(self, model: Model):
        self.model, self.backbone = model, model.backbone
        self.outputs: dict[str, Tensor] = {}
        self.heads = {name: RecordingHead(name, head, self.outputs) for name, head in model.heads.items()}

    def __call__(self, batch: Batch, **options: Any) -> Output:
        output = self.model(batch, **options)
        self.hidden = output.hidden
        return output


@dataclass
class RecordingHead:
    """Passes calls on to a head, and keeps what it returns under its name."""

    name: str
    head: nn.Module
    outputs: dict[str, Tensor]

    def __call__(self, vectors: Tensor) -> Tensor:
        self.outputs[self.name] = self.head(vectors)
        return self.outputs[self.name]


def symmetric_divergence(a: Tensor, b: Tensor, labels: Tensor, *, multilabel: bool) -> Tensor:
    """The mean of KL(p || q) and KL(q || p), summed over examples with a label, for logits (N, C) of p and q.

    It is half the sum of (p - q)(a - b), of a softmax as of sigmoids; for several labels per example, the mean over
    the classes, as in their cross-entropy.
    """
    a, b = a.float(), b.float()
    p, q = (a.sigmoid(), b.sigmoid()) if multilabel else (a.softmax(-1), b.softmax(-1))
    divergence = ((p - q) * (a - b)).sum(-1) / (2 * a.size(-1) if multilabel else 2)
    is_labelled = (labels if labels.dim() == 1 else labels[:, 0]) != IGNORE_INDEX
    return torch.where(is_labelled, divergence, 0.0).sum()
