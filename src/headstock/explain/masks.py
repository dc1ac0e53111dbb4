"""Who may look at whom, as the table that is added to the scores: 0 where a place may look, minus infinity elsewhere.

L tokens, P of them a prefix or padding, n of them in one document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain.attention_patterns import named, need_attention
from headstock.model.attention_mask import mask_for
from headstock.model.attention_weights import Look, looking
from headstock.model.batch import Batch
from headstock.model.model import Model

Kind = Literal["causal", "none", "padding", "document", "prefix"]
KINDS: tuple[Kind, ...] = ("causal", "none", "padding", "document", "prefix")
TITLES = {
    "causal": "causal mask",
    "none": "no mask",
    "padding": "padding mask",
    "document": "document mask",
    "prefix": "prefix mask",
}
WHY = {
    "causal": "A place looks at itself and back: what follows must be predicted, so it may not be seen.",
    "none": "Every place looks at every other, as an encoder reads a text that is there whole.",
    "padding": "Rows of a batch are filled up to the longest; nobody looks where there is no token. Under the causal "
    "mask, padding on the right needs no mask of its own: no real token ever looks to its right.",
    "document": "Several documents share one row so that none of it is wasted; each place looks only inside its own.",
    "prefix": "The prefix is read both ways, what follows is written from left to right and looks at all of the "
    "prefix. In an encoder-decoder the source is that prefix: the encoder's own mask, the decoder's causal "
    "mask and the cross-attention between them are the blocks of this table, and the encoder never sees the target.",
}


@dataclass(frozen=True)
class MaskFacts:
    """One mask, and what the textbook's formula says of the number of its masked entries."""

    kind: str
    name: str  # of what it was made for: a run, a preset, or the mask itself
    tokens: list[str]  # of the places that look
    keys: list[str]  # of the places that are looked at
    allowed: list[list[bool]]  # True where a place may look
    formula: str | None  # None where the mask comes from a text whose parts no formula counts
    expected: int | None
    why: str

    @property
    def masked(self) -> int:
        return sum(not seen for row in self.allowed for seen in row)

    @property
    def entries(self) -> int:
        return len(self.tokens) * len(self.keys)

    def added(self) -> list[list[float]]:
        """What is added to the scores before the softmax."""
        return [[0.0 if seen else -torch.inf for seen in row] for row in self.allowed]

    def facts(self) -> dict[str, Any]:
        written = [[0 if seen else "-inf" for seen in row] for row in self.allowed]  # JSON has no infinity
        known = {"kind": self.kind, "of": self.name, "length": len(self.tokens), "masked": self.masked}
        known |= {"entries": self.entries, "formula": self.formula, "expected": self.expected}
        return known | {"tokens": self.tokens, "keys": self.keys, "matrix": written}


def explain_mask(
    kind: Kind,
    tokens: Sequence[str],
    *,
    padding: int = 1,
    documents: Sequence[int] = (),
    prefix: int = 1,
    causal: bool = True,
) -> MaskFacts:
    """A mask of a kind over some tokens, made by the code that every model calls.

    `padding` and `prefix` are how many tokens of the row are that; `documents` how many tokens each document has;
    `causal` whether documents are read from left to right.
    """
    words, length = list(tokens), len(tokens)
    check(kind, length, padding=padding, documents=documents, prefix=prefix)
    row, ways = torch.zeros(1, length, dtype=torch.long), causal if kind == "document" else kind == "causal"
    if kind == "prefix":
        table = joined(length, prefix)
    else:
        batch = Batch(row)
        if kind == "padding":
            batch = Batch(row, padding=torch.arange(length)[None] >= length - padding)
            words[length - padding :] = ["<pad>"] * padding
        if kind == "document":
            batch = Batch(row, documents=torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))[None])
        table = mask_for(batch, causal=ways).table(length, length)[0, 0]
    formula, expected = counted(kind, length, padding=padding, documents=documents, prefix=prefix, causal=ways)
    return MaskFacts(kind, TITLES[kind], words, words, table.tolist(), formula, expected, WHY[kind])


def joined(length: int, prefix: int) -> Tensor:
    """(L, L) what an encoder-decoder's masks come to when source and target are written as one row."""
    source, target = Batch(torch.zeros(1, prefix)), Batch(torch.zeros(1, length - prefix))
    table = torch.zeros(length, length, dtype=torch.bool)  # the encoder is done before there is a target to look at
    table[:prefix, :prefix] = mask_for(source, causal=False).table(prefix, prefix)[0, 0]
    table[prefix:, prefix:] = mask_for(target, causal=True).table(length - prefix, length - prefix)[0, 0]
    table[prefix:, :prefix] = mask_for(source, causal=False).table(length - prefix, prefix)[0, 0]
    return table


def check(kind: Kind, length: int, *, padding: int, documents: Sequence[int], prefix: int) -> None:
    if length < 1:
        raise UserError(f"--length {length}: a mask needs at least one token")
    if kind == "padding" and not 0 <= padding < length:
        raise UserError(f"--padding {padding}: must be 0 or more and leave a real token of the {length}")
    if kind == "prefix" and not 0 < prefix < length:
        raise UserError(f"--prefix {prefix}: must be 1 or more and leave something of the {length} tokens to write")
    if kind == "document" and (not documents or min(documents) < 1 or sum(documents) != length):
        sizes = ",".join(map(str, documents)) or "nothing"
        raise UserError(f"--documents {sizes}: must be sizes of documents that make up the {length} tokens")


def counted(
    kind: Kind, length: int, *, padding: int, documents: Sequence[int], prefix: int, causal: bool
) -> tuple[str, int]:
    """How many entries are masked, by formula."""
    whole = length * (length - 1) // 2
    if kind == "causal":
        return "L(L−1)/2", whole
    if kind == "padding":
        return "L·P", length * padding
    if kind == "prefix":
        return "L(L−1)/2 − P(P−1)/2", whole - prefix * (prefix - 1) // 2
    if kind == "document" and causal:
        return "L² − Σ n(n+1)/2", length**2 - sum(n * (n + 1) // 2 for n in documents)
    if kind == "document":
        return "L² − Σ n²", length**2 - sum(n * n for n in documents)
    return "0", 0


def seen_masks(model: Model, batch: Batch) -> dict[str, Tensor]:
    """By place (encoder, decoder, cross) the (T, S) table that the model's attention was really given for a row."""
    found: dict[str, Tensor] = {}

    def hear(look: Look) -> None:
        known = found.setdefault(named(look, batch).where, look.allowed[0, 0])
        assert torch.equal(known, look.allowed[0, 0]), "the layers of one stack share one mask"

    with torch.no_grad(), looking(model, hear):
        model(batch)
    return found


def explain_own_masks(
    model: Model, batch: Batch, name: str, *, tokens: Sequence[str], source: Sequence[str] = ()
) -> list[tuple[MaskFacts, str]]:
    """The masks that a model's own attention is given when it reads a row, each with its place (encoder, ...)."""
    need_attention(model, name)
    made = []
    for where, table in seen_masks(model, batch).items():
        down, across = (source, source) if where == "encoder" and source else (tokens, source or tokens)
        across = tokens if where == "decoder" else across
        length = len(down)
        back_only = bool(length > 1 and not table.triu(1).any())
        kind: Kind = "causal" if back_only or where == "decoder" else "none"
        formula, expected = counted(kind, length, padding=0, documents=(), prefix=0, causal=back_only)
        why = CROSS if where == "cross" else WHY[kind]
        title = f"{name}: {NAMES[where]}"
        facts = MaskFacts(kind, title, list(down), list(across), table.tolist(), formula, expected, why)
        made.append((facts, where))
    return made


NAMES = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}
CROSS = "Every place of the target looks at all of the source, which is there whole before a word is written."
