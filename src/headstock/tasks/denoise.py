"""Denoising: spans of a text are taken out, one [MASK] is left in the place of each, and the whole text is written.

B rows, T tokens. Any number of languages may be read: each text is repaired in its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch
from headstock.model.heads import TokenHead
from headstock.model.model import Model
from headstock.tasks.cuts import Cuts
from headstock.tasks.forcing import both_sides, forced, token_losses, token_score
from headstock.tasks.hiding import Hiding, HidingConfig
from headstock.tasks.masked import drawn_from
from headstock.tasks.task import TASKS, Examples, Task, opening
from headstock.text.store import Store
from headstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DenoiseConfig:
    fraction: float = 0.3  # share of the tokens that are taken out;
    fraction_start: float | None = None  # in training it may begin here and go to `fraction` in a line over the run
    unit: Literal["token", "word", "span"] = "span"  # what is taken out together; neighbours leave one [MASK]
    span_mean: float = 3.0  # tokens in a span,
    span_most: int = 10  # and the most there may be

    def __post_init__(self) -> None:
        self.hiding()  # which refuses what makes no sense

    def hiding(self) -> HidingConfig:
        """The same draws as masked language modelling has, of which every one is shown as [MASK]."""
        return HidingConfig(**vars(self), masked=1.0, random=0.0)


@TASKS.add("denoise")
class Denoise(Task):
    """An encoder-decoder that learns from raw text to understand what is left of it and to write whole sentences."""

    Config = DenoiseConfig
    needs_source = True
    of_tokens = True

    def __init__(self, config: DenoiseConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.mask is None or tokenizer.end is None:
            raise UserError("this tokenizer has no [MASK] or no end mark, which denoising needs")
        self.hiding = Hiding(config.hiding(), tokenizer)
        self.mask, self.end, self.start = tokenizer.mask, tokenizer.end, opening(tokenizer, self.opening)
        self.filler = tokenizer.padding or 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": TokenHead(backbone)}

    def examples(self, data: Store, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if length < 2:
            raise UserError(f"train.length: {length} is too short for a text and its mark")
        return Broken(self, data, length, seed=seed, epoch=epoch)

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        return token_losses(model, batch, smoothing=smoothing)

    def tokens(self, batch: Batch) -> int:
        return both_sides(batch)

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        return token_score(sums, counts)


class Broken:
    """Pieces of documents, and the same with spans taken out, anew in every pass."""

    def __init__(self, task: Denoise, store: Store, length: int, *, seed: int | None, epoch: int):
        self.task, self.store, self.length = task, store, length
        self.key, self.training = drawn_from(seed, epoch), seed is not None
        self.cuts = Cuts(store.lengths - 1, length - 1, seed=seed, epoch=epoch)  # each side has a mark besides
        self.lengths = self.cuts.lengths + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def piece(self, index: int) -> np.ndarray:
        first = int(self.store.offsets[self.cuts.documents[index]])
        return self.store.stretch(first + int(self.cuts.begins[index]), first + int(self.cuts.stops[index]))

    def batch(self, indices: Sequence[int]) -> Batch:
        task = self.task
        pieces = [self.piece(index).astype(np.int64) for index in indices]
        broken = self.broken(pieces, indices)
        rows = [(source, piece.tolist()) for source, piece in zip(broken, pieces, strict=True)]
        marks = {"start": task.start, "end": task.end, "source_end": task.end, "filler": task.filler}
        return forced(rows, **marks, length=self.length)

    def broken(self, pieces: Sequence[np.ndarray], indices: Sequence[int]) -> list[list[int]]:
        """What is left of each piece."""
        task = self.task
        place = np.arange(max(len(piece) for piece in pieces))
        there = place < np.array([len(piece) for piece in pieces])[:, None]  # (B, T)
        shown = np.zeros(there.shape, np.int64)
        shown[there] = np.concatenate(pieces)
        fraction = task.hiding.fraction(task.done if self.training else 1.0)
        one = np.zeros(there.shape, np.int64)  # a piece is of one document
        _, was = task.hiding.hide(shown, there, one, key=self.key, rows=indices, fraction=fraction)
        gone = was != IGNORE
        again = np.zeros(there.shape, bool)  # not the first of its span
        again[:, 1:] = gone[:, 1:] & gone[:, :-1]
        left = np.where(gone, task.mask, shown)
        return [row[kept].tolist() for row, kept in zip(left, there & ~again, strict=True)]

    def name(self, index: int) -> str:
        return self.store.place(int(self.cuts.documents[index]))
