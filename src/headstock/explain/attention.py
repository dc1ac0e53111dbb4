"""What each attention head attends to: its weights on a text, and how they are distributed over a text or a file.

B rows, H heads, T queries, S keys.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain.document import Check
from headstock.explain.hooks import transformer_families
from headstock.explain.inputs import EncodedInput
from headstock.model.attention_weights import AttentionRecord, attention_modules, record_attention
from headstock.model.backbones.bidirectional_transformer import BidirectionalTransformer
from headstock.model.batch import Batch
from headstock.model.model import Model

logger = logging.getLogger(__name__)

MAX_POSITIONS = 48  # positions of a row whose weights are averaged over a file
LOG_EVERY = 16  # batches between two progress messages
TOLERANCE = 1e-5  # for the sum of a row of single-precision weights

MEASURES = {
    "entropy": "of the weights in bits, 0 for a single position",
    "distance": "mean distance of the attended positions",
    "first": "share on the first position",
    "itself": "share on the position itself",
    "previous": "share on the previous position",
    "next": "share on the next position",
}


# Recording


def as_applied(record: AttentionRecord, batch: Batch) -> AttentionRecord:
    """A bidirectional stack acts as a decoder on rows that are read causally."""
    return replace(record, kind="decoder") if batch.causal is True and record.kind == "encoder" else record


@torch.no_grad()
def attention_patterns(model: Model, batch: Batch) -> list[AttentionRecord]:
    """The weights of every layer on a batch, in the order of computation. All are kept, so the batch must be small."""
    records: list[AttentionRecord] = []
    with record_attention(model, records.append):
        model(batch)
    return [as_applied(record, batch) for record in records]


def need_attention(model: Model, name: str, kind: str | None = None) -> None:
    """Refuse a model without attention, or without this kind of it."""
    kinds = sorted({kind for kind, _, _ in attention_modules(model)})
    if not kinds:
        lacking = f"its {model.backbone.name} backbone has no attention"
        families = f"{BidirectionalTransformer.name}, {transformer_families()}"
        raise UserError(f"{name}: {lacking} (families that have it: {families})")
    if kind is not None and kind not in kinds:
        missing = {"cross": "cross-attention"}.get(kind, kind)
        hint = " (an encoder-decoder has it: presets seq2seq-*)" if kind == "cross" else ""
        raise UserError(f"--where {kind}: {name} has no {missing}, only {' and '.join(kinds)} self-attention{hint}")


# Facts


@dataclass(frozen=True)
class HeadFacts:
    """One head: means over all positions that could attend to more than one."""

    where: str  # an AttentionKind
    layer: int  # from 1
    head: int  # from 1
    measures: dict[str, float | None]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer, averaged over texts."""

    where: str
    layer: int
    weights: np.ndarray  # (H, T, S)


@dataclass(frozen=True)
class AttentionFacts:
    """All heads of a model on a text or a file, and what must hold for their weights."""

    run: str
    heads: list[HeadFacts]
    uniform: list[HeadFacts]  # a head with uniform weights, for comparison, per kind of attention
    maps: list[LayerWeights]
    tokens: list[str]  # of the maps; numbers where texts are averaged
    source: list[str]
    texts: int
    positions: int  # queries in total
    sum_error: float  # the largest deviation of a row's sum from 1
    masked: float  # the largest weight on a masked position
    future: float | None  # the largest weight on a later position of a stack that reads causally
    past: float | None  # the largest weight on an earlier position of a stack that reads backward
    fused_error: float  # of these weights times the values, relative to the model's own fused attention
    notes: list[str] = field(default_factory=list)

    def axes(self, where: str) -> tuple[list[str], list[str]]:
        """The tokens of the queries and of the keys."""
        queries = self.source if where == "encoder" and self.source else self.tokens
        return queries, self.source if where == "cross" else queries

    @property
    def sums_to_one(self) -> bool:
        return self.sum_error <= TOLERANCE

    def checks(self) -> list[Check]:
        checks = [
            Check("every row of weights sums to one", self.sums_to_one, f"largest error {self.sum_error:.1e}"),
            Check("no weight on masked positions", self.masked == 0, f"largest weight {self.masked:g}"),
        ]
        if self.future is not None:
            checks.append(Check("no weight on the future", self.future == 0, f"largest weight {self.future:g}"))
        if self.past is not None:
            claim = "no weight of the backward direction on the past"
            checks.append(Check(claim, self.past == 0, f"largest weight {self.past:g}"))
        error = f"relative error {self.fused_error:.1e}"
        return [*checks, Check("these weights reproduce the model's attention output", self.fused_error < 1e-3, error)]

    def to_dict(self) -> dict[str, Any]:
        def row(head: HeadFacts) -> dict[str, Any]:
            return {"where": head.where, "layer": head.layer, "head": head.head, **head.measures}

        return {
            "run": self.run,
            "texts": self.texts,
            "places": self.positions,
            "tokens": self.tokens,
            "source": self.source,
            "heads": [row(head) for head in self.heads],
            "even": [row(head) | {"layer": None, "head": None} for head in self.uniform],
            "sum_error": self.sum_error,
            "masked": self.masked,
            "future": self.future,
            "past": self.past,
            "fused_error": self.fused_error,
            "checks": [vars(check) for check in self.checks()],
            "notes": self.notes,
        }


# Measuring


@dataclass
class LayerSums:
    """Sums over the positions of one layer."""

    measures: dict[str, Tensor]  # (H + 1,) by measure, the last for a head with uniform weights
    count: int  # positions
    weights: Tensor  # (H, T, S) summed over texts
    rows: Tensor  # (T,) texts that have each position

    def __add__(self, other: "LayerSums") -> "LayerSums":
        measures = {name: total + other.measures[name] for name, total in self.measures.items()}
        weights, rows = padded_sum(self.weights, other.weights), padded_sum(self.rows, other.rows)
        return LayerSums(measures, self.count + other.count, weights, rows)

    def means(self, head: int) -> dict[str, float | None]:
        sums = self.measures
        return {
            name: float(sums[name][head] / self.count) if name in sums and self.count else None for name in MEASURES
        }


def padded_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors of different sizes, the shorter one padded with zeros."""
    total = a.new_zeros([max(sizes) for sizes in zip(a.shape, b.shape, strict=True)])
    for part in (a, b):
        total[tuple(slice(size) for size in part.shape)] += part
    return total


def measure(weights: Tensor, counted: Tensor, *, self_attention: bool) -> dict[str, Tensor]:
    """(H,) per measure: the sum over the positions `counted` (B, T) for weights (B, H, T, S)."""
    values = {"entropy": -torch.xlogy(weights, weights).sum(-1) / np.log(2), "first": weights[..., 0]}  # (B, H, T)
    if self_attention:
        positions = torch.arange(weights.size(-1), device=weights.device)
        values["distance"] = (weights * (positions[:, None] - positions[None]).abs()).sum(-1)
        values["itself"] = weights.diagonal(dim1=-2, dim2=-1)
        values["previous"] = F.pad(weights.diagonal(-1, dim1=-2, dim2=-1), (1, 0))
        values["next"] = F.pad(weights.diagonal(1, dim1=-2, dim2=-1), (0, 1))
    included = counted[:, None].cpu()
    return {name: (value.cpu().double() * included).sum((0, 2)) for name, value in values.items()}


class AttentionMeter:
    """Accumulates the attention of a model over batches."""

    def __init__(self, *, max_positions: int | None = None):
        self.max_positions = max_positions  # of each row that go into the maps; None for all
        self.layers: dict[tuple[str, int], LayerSums] = {}
        self.sum_error = self.masked = self.fused_error = 0.0
        self.future: float | None = None
        self.past: float | None = None

    def update(self, record: AttentionRecord, real: Tensor) -> None:
        """Add a record; `real` (B, T) is True where a query is not padding."""
        allowed = record.allowed & real[:, None, :, None]
        weights = record.weights * real[:, None, :, None]
        self.sum_error = max(self.sum_error, float((weights.sum(-1) - real[:, None].float()).abs().max()))
        self.masked = max(self.masked, float((weights * ~record.allowed).max()))
        self.fused_error = max(self.fused_error, record.error)
        if record.kind in ("decoder", "forward"):
            self.future = max(self.future or 0.0, float(weights.triu(1).max()))
        if record.kind == "backward":
            self.past = max(self.past or 0.0, float(weights.tril(-1).max()))
        choices = allowed.sum(-1)[:, 0]  # (B, T)
        counted = choices > 1  # a query with one key has no choice
        uniform = (allowed / choices.clamp(min=1)[:, None, :, None])[:, :1]  # (B, 1, T, S)
        measures = measure(torch.cat([weights, uniform], 1), counted, self_attention=record.kind != "cross")
        limit = self.max_positions
        maps, rows = weights[:, :, :limit, :limit].sum(0).cpu(), real[:, :limit].sum(0).cpu()
        key, sums = (record.kind, record.layer), LayerSums(measures, int(counted.sum()), maps, rows)
        self.layers[key] = self.layers[key] + sums if key in self.layers else sums

    def read(self, model: Model, batch: Batch, kind: str | None = None) -> int:
        """Run the model on a batch and add its attention; returns the number of queries."""
        target = real_positions(batch)
        source = None if batch.source is None else real_positions(batch.source)

        def add(record: AttentionRecord) -> None:
            record = as_applied(record, batch)
            if kind in (None, record.kind):
                self.update(record, source if record.kind == "encoder" and source is not None else target)

        with torch.no_grad(), record_attention(model, add):
            model(batch)
        return int(target.sum())

    def maps(self) -> list[LayerWeights]:
        return [
            LayerWeights(where, layer, (sums.weights / sums.rows.clamp(min=1)[:, None]).numpy())
            for (where, layer), sums in self.layers.items()
        ]

    def facts(self, run: str, tokens: list[str], source: list[str], **counts: Any) -> AttentionFacts:
        """`counts` are the fields `texts`, `positions` and `notes`."""
        last = {where: sums for (where, _), sums in self.layers.items()}
        return AttentionFacts(
            run=run,
            heads=[
                HeadFacts(where, layer, head + 1, sums.means(head))
                for (where, layer), sums in self.layers.items()
                for head in range(len(sums.weights))
            ],
            uniform=[HeadFacts(where, 0, 0, sums.means(-1)) for where, sums in last.items()],
            maps=self.maps(),
            tokens=tokens,
            source=source,
            sum_error=self.sum_error,
            masked=self.masked,
            future=self.future,
            past=self.past,
            fused_error=self.fused_error,
            **counts,
        )


def real_positions(batch: Batch) -> Tensor:
    return torch.ones_like(batch.tokens, dtype=torch.bool) if batch.padding is None else ~batch.padding


def explain_attention(model: Model, text: EncodedInput, run: str, *, where: str | None = None) -> AttentionFacts:
    """Every head on one text."""
    need_attention(model, run, None if text.batch.causal is True and where == "decoder" else where)
    meter = AttentionMeter()
    positions = meter.read(model.eval(), text.batch, where)
    return meter.facts(run, text.tokens, text.source, texts=1, positions=positions, notes=text.notes)


def explain_file_attention(
    model: Model, batches: Iterable[Batch], run: str, *, where: str | None = None
) -> AttentionFacts:
    """Every head averaged over the texts of many batches; the maps cover their first positions."""
    need_attention(model, run, where)
    meter, positions, texts = AttentionMeter(max_positions=MAX_POSITIONS), 0, 0
    for number, batch in enumerate(batches, 1):
        positions += meter.read(model.eval(), batch, where)
        texts += len(batch.tokens)
        if number % LOG_EVERY == 0:
            logger.info("read %s texts", f"{texts:,}")
    if not texts:
        raise UserError(f"{run}: the file has no text")
    tokens, source = position_names(meter.maps(), is_encoder_decoder=model.backbone.is_encoder_decoder)
    size = max(len(tokens), len(source))
    notes = [f"the maps are the mean over all texts for the first {size} positions, labelled by number"]
    return meter.facts(run, tokens, source, texts=texts, positions=positions, notes=notes)


def position_names(maps: list[LayerWeights], *, is_encoder_decoder: bool) -> tuple[list[str], list[str]]:
    """Numbers from 1 for the positions of the rows and, where there is one, of the source."""
    tokens = source = 0
    for layer in maps:
        _, queries, keys = layer.weights.shape
        reads_source = layer.where == "encoder" and is_encoder_decoder
        if layer.where == "cross" or reads_source:
            source = max(source, keys)
        if not reads_source:
            tokens = max(tokens, queries)
    return [str(number + 1) for number in range(tokens)], [str(number + 1) for number in range(source)]


def select_heads(facts: AttentionFacts, *, layer: int | None, head: int | None) -> AttentionFacts:
    """Restrict the facts to one layer, or to one head of each layer; the checks remain those of all."""
    layers, numbers = sorted({item.layer for item in facts.heads}), sorted({item.head for item in facts.heads})
    for option, value, available in (("--layer", layer, layers), ("--head", head, numbers)):
        if value is not None and value not in available:
            raise UserError(f"{option} {value}: must be from {available[0]} to {available[-1]}")
    heads = slice(None) if head is None else slice(head - 1, head)
    return replace(
        facts,
        heads=[item for item in facts.heads if layer in (None, item.layer) and head in (None, item.head)],
        maps=[replace(item, weights=item.weights[heads]) for item in facts.maps if layer in (None, item.layer)],
    )
