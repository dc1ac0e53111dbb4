"""Masked language modelling: some tokens are hidden, and what they were is read from both sides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headstock.errors import ConfigError, UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch
from headstock.model.heads import TokenHead
from headstock.model.model import Model
from headstock.randomness import uniforms
from headstock.tasks.task import TASKS, Examples, Task, cross_entropy, opening
from headstock.tasks.windows import Windows
from headstock.text.store import Store
from headstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MaskedConfig:
    fraction: float = 0.15  # share of the tokens that must be guessed
    masked: float = 0.8  # of those, the share shown as [MASK],
    random: float = 0.1  # and the share shown as any other token; the rest is shown as it is

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.fraction < 1:
            problems.append(("fraction", f"must be above 0 and below 1, not {self.fraction}"))
        if min(self.masked, self.random) < 0 or self.masked + self.random > 1:
            problems.append(("masked", f"and random must be shares, not {self.masked} and {self.random}"))
        if problems:
            raise ConfigError(problems)


@TASKS.add("masked")
class Masked(Task):
    """A model that reads both sides of what it must guess."""

    Config = MaskedConfig
    opening = "cls"
    causal = False
    of_tokens = True

    def __init__(self, config: MaskedConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.end is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which masked language modelling needs")
        self.mask, self.end = tokenizer.mask, tokenizer.end
        self.start = opening(tokenizer, self.opening)
        self.filler = tokenizer.padding or 0
        self.words = np.setdiff1d(np.arange(tokenizer.vocabulary), sorted(tokenizer.engine.special))

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": TokenHead(backbone)}

    def examples(self, data: Store, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        windows = Windows(data, length, start=self.start, end=self.end, filler=self.filler, seed=seed, epoch=epoch)
        return Hidden(self, windows, key=("valid",) if seed is None else (seed, epoch))

    def hide(self, shown: np.ndarray, allowed: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) rows with some tokens hidden, and what they were (IGNORE at all others).

        `draws` are three numbers for each token: whether it is hidden, how, and behind which other.
        """
        chance, kind, other = np.split(draws, 3, axis=1)
        chosen = allowed & (chance < self.config.fraction)
        noise = self.words[(other * len(self.words)).astype(np.int64)]
        replaced = np.where(kind < self.config.masked, self.mask, shown)
        replaced = np.where(
            (kind >= self.config.masked) & (kind < self.config.masked + self.config.random), noise, replaced
        )
        return np.where(chosen, replaced, shown), np.where(chosen, shown, IGNORE)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        labels = batch.labels["token"]
        hidden = model(batch).hidden
        places = labels != IGNORE  # the head is by far the widest layer, so only what is guessed passes through it
        logits, wanted = model.heads["token"](hidden[places]), labels[places]  # (N, V), (N,)
        hits = (logits.detach().argmax(-1) == wanted).sum()
        return {"token": cross_entropy(logits, wanted, smoothing=smoothing), "hits": hits}

    def tokens(self, batch: Batch) -> int:
        assert batch.documents is not None
        return int((batch.documents >= 0).sum())

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "accuracy": sums["hits"] / max(1, counts["token"]),
        }


class Hidden:
    """Windows of the stream with some of their tokens hidden, anew in every pass."""

    def __init__(self, task: Masked, windows: Windows, *, key: tuple[int | str, ...]):
        self.task, self.windows, self.key, self.name = task, windows, key, windows.name

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.windows.rows(indices)
        allowed = ~rows.padding & (rows.shown != self.task.start)
        draws = uniforms(*self.key, "mask", rows=indices, count=3 * self.windows.length)
        tokens, labels = self.task.hide(rows.shown, allowed, draws)
        return Batch(
            torch.from_numpy(tokens),
            documents=torch.from_numpy(rows.documents),  # the padding is a document of its own
            positions=torch.from_numpy(rows.positions),
            labels={"token": torch.from_numpy(labels)},
        )
