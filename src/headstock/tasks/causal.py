"""Next-token prediction with teacher forcing: a document A B C is read as <sos> A B C and must give A B C <eos>.

B rows, T positions in a row, S the stream: all documents end to end, each closed by its end mark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import IGNORE, Batch
from headstock.model.heads import TokenHead
from headstock.model.model import Model
from headstock.randomness import generator
from headstock.tasks.task import TASKS, Examples, Task, cross_entropy
from headstock.text.store import Store
from headstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CausalConfig:
    rows: Literal["packed", "padded"] = "packed"  # documents end to end in full rows, or one document a row


@TASKS.add("causal")
class Causal(Task):
    """A language model that never sees what it must predict."""

    Config = CausalConfig

    def __init__(self, config: CausalConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        if tokenizer.end is None:
            raise UserError("this tokenizer has no end mark, which a language model must learn to give")
        self.end = tokenizer.end
        self.start = self.end if tokenizer.start is None else tokenizer.start  # GPT-2's way: one mark for both
        self.filler = tokenizer.padding or 0

    def heads(self, backbone: Backbone) -> dict[str, nn.Module]:
        return {"token": TokenHead(backbone)}

    def examples(self, data: Store, *, length: int, seed: int | None = None, epoch: int = 0) -> Examples:
        if self.config.rows == "padded":
            return Pieces(self, data, length)
        return Windows(self, data, length, seed=seed, epoch=epoch)

    def collate(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        """What is shown and what is wanted at each position, one text a row; wanted may be IGNORE."""
        longest = max(len(shown) for shown, _ in pairs)
        tokens = torch.full((len(pairs), longest), self.filler)
        labels = torch.full((len(pairs), longest), IGNORE)
        for row, (shown, wanted) in enumerate(pairs):
            tokens[row, : len(shown)] = torch.tensor(shown)
            labels[row, : len(wanted)] = torch.tensor(wanted)
        lengths = torch.tensor([len(shown) for shown, _ in pairs])
        padding = torch.arange(longest) >= lengths[:, None]
        return Batch(tokens, padding if bool(padding.any()) else None, labels={"token": labels})

    def losses(self, model: Model, batch: Batch, *, smoothing: float = 0.0) -> dict[str, Tensor]:
        hidden = model(batch).hidden
        return {"token": cross_entropy(model.heads["token"](hidden), batch.labels["token"], smoothing=smoothing)}

    def score(self, sums: Mapping[str, float], counts: Mapping[str, int], *, size: int) -> dict[str, float]:
        loss = sums["token"] / max(1, counts["token"])
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": sums["token"] / math.log(2) / max(1, size),
        }


class Windows:
    """Equal windows of the stream. Each position of it is predicted exactly once in a pass.

    Where the windows begin is drawn anew for every pass, so that documents are cut at other places.
    """

    def __init__(self, task: Causal, store: Store, length: int, *, seed: int | None, epoch: int):
        self.task, self.store, self.length = task, store, length
        self.count = max(1, -(-store.tokens // length))
        slack = self.count * length - store.tokens  # a shift within this keeps the number of windows
        self.shift = 0 if seed is None else int(generator(seed, epoch, "shift").integers(0, slack + 1))

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        at = np.asarray(indices, dtype=np.int64)
        begin = np.maximum(at * self.length - self.shift, 0)
        sizes = np.minimum((at + 1) * self.length - self.shift, self.store.tokens) - begin
        # position p must give S[p] and is shown S[p-1]; before the stream's first document there is an end mark too
        stream = self.store.gather(begin - 1, self.length + 1).astype(np.int64)  # (B, T + 1)
        stream[begin == 0, 0] = self.task.end
        shown, wanted = stream[:, :-1], stream[:, 1:]
        starts = shown == self.task.end
        tokens = np.where(starts, self.task.start, shown)
        documents = starts.cumsum(1)
        place = np.arange(self.length)
        newest = np.maximum.accumulate(np.where(starts, place, 0), 1)  # where the document at each position began
        padding = place >= sizes[:, None]
        documents[padding] = -1
        tokens[padding] = self.task.filler
        labels = torch.from_numpy(np.where(padding, IGNORE, wanted))
        # the causal mask keeps real tokens from the padding at their right, so nothing else need say where it is;
        # a stream of one document needs no document mask either, and every batch of a run has the same parts
        if self.store.documents == 1:
            return Batch(torch.from_numpy(tokens), labels={"token": labels})
        return Batch(
            torch.from_numpy(tokens),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(place - newest),
            labels={"token": labels},
        )

    def name(self, index: int) -> str:
        begin = max(index * self.length - self.shift, 0)
        last = min(begin + self.length, self.store.tokens) - 1
        first, final = self.store.document_at(begin), self.store.document_at(last)
        names = self.store.place(first)
        return names if first == final else f"{names} to {self.store.place(final)}"


class Pieces:
    """One document a row; a document longer than a row is cut into several."""

    def __init__(self, task: Causal, store: Store, length: int):
        self.task, self.store, self.length = task, store, length
        self.pieces = -(-store.lengths // length)  # rows that each document takes
        self.ends = self.pieces.cumsum()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """The document and which piece of it."""
        document = int(np.searchsorted(self.ends, index, side="right"))
        return document, index - int(self.ends[document] - self.pieces[document])

    def batch(self, indices: Sequence[int]) -> Batch:
        pairs = []
        for document, piece in map(self.locate, indices):
            text = self.store.document(document).tolist()
            here = slice(piece * self.length, (piece + 1) * self.length)
            pairs.append(([self.task.start, *text][here], [*text, self.task.end][here]))
        return self.task.collate(pairs)

    def name(self, index: int) -> str:
        return self.store.place(self.locate(index)[0])
