"""What each head of a model looks at: its weights on a text, and how they are spread, over a text or a whole file.

B rows, H heads, T queries, S keys.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain.attention_patterns import named, need_place
from headstock.explain.inputs import Shown
from headstock.model.attention_weights import AttentionRecord, record_attention
from headstock.model.batch import Batch
from headstock.model.model import Model

PLACES = 48  # places of a row whose weights are averaged over a file: what all rows have, and a page can show
OFTEN = 16  # batches after which it is told how far the work is
TOLERANCE = 1e-5  # of a row's sum, which is made of single-precision weights

MEASURES = {
    "entropy": "how spread its weights are, in bits: 0 looks at one place, each bit more doubles the places",
    "distance": "how many places away it looks in the mean",
    "first": "the share of its weights on the first place of the row",
    "itself": "the share on the place itself",
    "previous": "the share on the place before",
    "next": "the share on the place after",
}
OF_ROWS = ("entropy", "first")  # those that also make sense where two sequences meet


@dataclass(frozen=True)
class Head:
    """One head, in the mean over all places that had a choice where to look."""

    where: str
    layer: int  # from 1, as its number among the heads
    head: int
    measures: dict[str, float | None]


@dataclass(frozen=True)
class Map:
    """What the heads of one layer looked at; averaged where there are several texts."""

    where: str
    layer: int
    weights: np.ndarray  # (H, T, S)


@dataclass(frozen=True)
class AttentionFacts:
    """All heads of a model on a text or a file, and what must be true of their weights."""

    run: str
    heads: list[Head]
    even: list[Head]  # by place, a head that would look everywhere alike, to compare with
    maps: list[Map]
    tokens: list[str]  # of the maps' rows; numbers where several texts are averaged
    source: list[str]
    texts: int
    places: int  # queries in all
    sum_error: float  # how far a row's sum is from one, at the most
    masked: float  # the largest weight where a place may not look
    future: float | None  # the largest weight on what follows, of a decoder; None where there is none
    fused_error: float  # what these weights make of the values, beside what the model computed
    notes: list[str] = field(default_factory=list)

    def axes(self, where: str) -> tuple[list[str], list[str]]:
        """The words beside and above a map."""
        down = self.source if where == "encoder" and self.source else self.tokens
        return down, self.source if where == "cross" else down

    @property
    def sums_to_one(self) -> bool:
        return self.sum_error <= TOLERANCE

    def checks(self) -> list[tuple[str, bool, str]]:
        """What is claimed, whether it holds, and the number that says so."""
        found = [("every row of weights sums to one", self.sums_to_one, f"largest error {self.sum_error:.1e}")]
        found.append(("nothing is looked at that the mask hides", self.masked == 0, f"largest weight {self.masked:g}"))
        if self.future is not None:
            found.append(("nothing in the future", self.future == 0, f"largest weight {self.future:g}"))
        said = f"off by {self.fused_error:.1e} of the largest value"
        found.append(("with these weights the values give what the model computed", self.fused_error < 1e-3, said))
        return found

    def facts(self) -> dict[str, Any]:
        def row(head: Head) -> dict[str, Any]:
            return {"where": head.where, "layer": head.layer, "head": head.head, **head.measures}

        checks = [{"claim": claim, "holds": holds, "measured": said} for claim, holds, said in self.checks()]
        return {
            "run": self.run,
            "texts": self.texts,
            "places": self.places,
            "tokens": self.tokens,
            "source": self.source,
            "heads": [row(head) for head in self.heads],
            "even": [row(head) | {"layer": None, "head": None} for head in self.even],
            "sum_error": self.sum_error,
            "masked": self.masked,
            "future": self.future,
            "fused_error": self.fused_error,
            "checks": checks,
            "notes": self.notes,
        }


@dataclass
class Tally:
    """Sums of one layer's heads, and how many places they are over."""

    sums: dict[str, Tensor]  # by measure (H,)
    even: dict[str, Tensor]  # the same of a head that looks everywhere alike, (1,)
    count: int
    weights: Tensor  # (H, T, S) summed over texts
    rows: Tensor  # (T,) how many texts have each place

    def add(self, other: "Tally") -> None:
        for mine, theirs in ((self.sums, other.sums), (self.even, other.even)):
            for name in mine:
                mine[name] += theirs[name]
        self.count += other.count
        self.weights, self.rows = wider(self.weights, other.weights), wider(self.rows, other.rows)


def wider(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two tensors of which one may be longer: what one of them lacks is zero."""
    sizes = [max(pair) for pair in zip(one.shape, other.shape, strict=True)]
    total = one.new_zeros(sizes)
    for part in (one, other):
        total[tuple(slice(size) for size in part.shape)] += part
    return total


def measured(weights: Tensor, chosen: Tensor, *, onto_itself: bool) -> dict[str, Tensor]:
    """By measure the sum (H,) over the places that are `chosen` (B, T) of what weights (B, H, T, S) come to there."""
    found = {"entropy": -torch.xlogy(weights, weights).sum(-1) / np.log(2), "first": weights[..., 0]}  # (B, H, T)
    if onto_itself:
        at = torch.arange(weights.size(-1), device=weights.device)
        found["distance"] = (weights * (at[:, None] - at[None]).abs()).sum(-1)
        found["itself"] = weights.diagonal(dim1=-2, dim2=-1)
        found["previous"] = torch.nn.functional.pad(weights.diagonal(-1, dim1=-2, dim2=-1), (1, 0))
        found["next"] = torch.nn.functional.pad(weights.diagonal(1, dim1=-2, dim2=-1), (0, 1))
    counted = chosen[:, None].cpu()
    return {name: (value.cpu().double() * counted).sum((0, 2)) for name, value in found.items()}


class Heads:
    """Takes in what the attentions of a model did, batch after batch."""

    def __init__(self, *, places: int | None = None):
        self.places = places  # so many of each row go into the maps; None: all
        self.tallies: dict[tuple[str, int], Tally] = {}
        self.sum_error = self.masked = self.fused_error = 0.0
        self.future: float | None = None

    def take(self, look: AttentionRecord, real: Tensor) -> None:
        """`real` (B, T) is True where a place that looks is a token."""
        weights, allowed = look.weights, look.allowed & real[:, None, :, None]
        rows = weights * real[:, None, :, None]
        self.sum_error = max(self.sum_error, float((rows.sum(-1) - real[:, None].float()).abs().max()))
        self.masked = max(self.masked, float((rows * ~look.allowed).max()))
        self.fused_error = max(self.fused_error, look.error)
        if look.kind == "decoder":
            self.future = max(self.future or 0.0, float(rows.triu(1).max()))
        choices = allowed.sum(-1)[:, 0]  # (B, T)
        chosen = choices > 1  # where there is but one place to look, a head has nothing to say
        even = (allowed / choices.clamp(min=1)[:, None, :, None]).expand(len(rows), -1, -1, -1)
        onto_itself = look.kind != "cross"
        tally = Tally(
            measured(rows, chosen, onto_itself=onto_itself),
            measured(even, chosen, onto_itself=onto_itself),
            int(chosen.sum()),
            rows[:, :, : self.places, : self.places].sum(0).cpu(),
            real[:, : self.places].sum(0).cpu(),
        )
        key = (look.kind, look.layer)
        if key in self.tallies:
            self.tallies[key].add(tally)
        else:
            self.tallies[key] = tally

    def heads(self) -> list[Head]:
        return [
            Head(where, layer, head + 1, means(tally.sums, head, tally.count))
            for (where, layer), tally in self.tallies.items()
            for head in range(len(tally.weights))
        ]

    def even(self) -> list[Head]:
        places = {where: tally for (where, _), tally in self.tallies.items()}
        return [Head(where, 0, 0, means(tally.even, 0, tally.count)) for where, tally in places.items()]

    def maps(self) -> list[Map]:
        return [
            Map(where, layer, (tally.weights / tally.rows.clamp(min=1)[:, None]).numpy())
            for (where, layer), tally in self.tallies.items()
        ]


def means(sums: dict[str, Tensor], head: int, count: int) -> dict[str, float | None]:
    return {name: float(sums[name][head] / count) if name in sums and count else None for name in MEASURES}


def take_batch(model: Model, batch: Batch, heads: Heads, where: str | None = None) -> int:
    """Read a batch and take in what its attentions did; how many places looked."""
    target = real_places(batch)
    source = None if batch.source is None else real_places(batch.source)

    def hear(look: AttentionRecord) -> None:
        look = named(look, batch)
        if where in (None, look.kind):
            heads.take(look, source if look.kind == "encoder" and source is not None else target)

    with torch.no_grad(), record_attention(model, hear):
        model(batch)
    return int(target.sum())


def real_places(batch: Batch) -> Tensor:
    return torch.ones_like(batch.tokens, dtype=torch.bool) if batch.padding is None else ~batch.padding


def explain_attention(model: Model, shown: Shown, run: str, *, where: str | None = None) -> AttentionFacts:
    """Every head on one text."""
    need_place(model, run, None if shown.batch.causal is True and where == "decoder" else where)
    heads = Heads()
    places = take_batch(model.eval(), shown.batch, heads, where)
    return facts_of(heads, run, shown.tokens, shown.source, texts=1, places=places, notes=shown.notes)


def explain_file_attention(
    model: Model,
    batches: Iterable[Batch],
    run: str,
    *,
    where: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> AttentionFacts:
    """Every head in the mean over the texts of many batches; the maps are of their first places."""
    need_place(model, run, where)
    heads, places, texts = Heads(places=PLACES), 0, 0
    for number, batch in enumerate(batches, 1):
        places += take_batch(model.eval(), batch, heads, where)
        texts += len(batch.tokens)
        if number % OFTEN == 0:
            say(f"{texts:,} texts read")
    if not texts:
        raise UserError(f"{run}: the file has no text to read")
    tokens, source = numbered(heads.maps(), reads_source=model.backbone.is_encoder_decoder)
    most = max(len(tokens), len(source))
    notes = [f"the maps are the mean over all texts, of the first {most} places, which have numbers instead of words"]
    return facts_of(heads, run, tokens, source, texts=texts, places=places, notes=notes)


def numbered(maps: list[Map], *, reads_source: bool) -> tuple[list[str], list[str]]:
    """Numbers for the places of the rows that are read or written and, where there is one, of the source."""
    tokens = source = 0
    for one in maps:
        _, queries, keys = one.weights.shape
        if one.where == "cross" or (one.where == "encoder" and reads_source):
            source = max(source, keys)
        if one.where != "encoder" or not reads_source:
            tokens = max(tokens, queries)
    return [str(place + 1) for place in range(tokens)], [str(place + 1) for place in range(source)]


def only(found: AttentionFacts, *, layer: int | None, head: int | None) -> AttentionFacts:
    """The same of one layer or one head of each layer; the checks stay those of all."""
    layers, heads = sorted({one.layer for one in found.heads}), sorted({one.head for one in found.heads})
    for option, number, known in (("--layer", layer, layers), ("--head", head, heads)):
        if number is not None and number not in known:
            raise UserError(f"{option} {number}: must be from {known[0]} to {known[-1]}")
    kept = [one for one in found.heads if layer in (None, one.layer) and head in (None, one.head)]
    maps = [
        replace(one, weights=one.weights if head is None else one.weights[head - 1 : head])
        for one in found.maps
        if layer in (None, one.layer)
    ]
    return replace(found, heads=kept, maps=maps)


def facts_of(heads: Heads, run: str, tokens: list[str], source: list[str], **more: Any) -> AttentionFacts:
    return AttentionFacts(
        run=run,
        heads=heads.heads(),
        even=heads.even(),
        maps=heads.maps(),
        tokens=tokens,
        source=source,
        sum_error=heads.sum_error,
        masked=heads.masked,
        future=heads.future,
        fused_error=heads.fused_error,
        **more,
    )
