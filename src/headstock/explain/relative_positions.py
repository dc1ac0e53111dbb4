"""Relative position biases: what each head adds to its scores for each distance.

R buckets of distances, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstock.explain import document as doc
from headstock.explain.render_document import picture_of
from headstock.model.backbones.transformer import Transformer
from headstock.model.model import Model
from headstock.model.positions import relative_position_buckets
from headstock.report.theme import GRID

MAX_LISTED = 8  # heads that a table lists one by one


@dataclass(frozen=True)
class RelativePositionFacts:
    """The biases of one stack."""

    name: str
    where: str | None  # encoder or decoder
    causal: bool
    trained: bool
    distances: list[tuple[int, int]]  # the first and the last distance, key minus query, of each bucket in use
    bias: Tensor  # (R, H) of these buckets

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "relative",
            "of": self.name,
            "where": self.where,
            "trained": self.trained,
            "buckets": [
                {"from": first, "to": last, "bias": row}
                for (first, last), row in zip(self.distances, self.bias.tolist(), strict=True)
            ],
        }


def explain_relative_positions(
    model: Model, name: str, *, length: int | None = None, trained: bool = True
) -> list[RelativePositionFacts]:
    """The biases of a model with `positions=relative`, for distances below `length`, by default its context."""
    backbone = model.backbone
    stacks = [stack for stack in backbone.modules() if isinstance(stack, Transformer)]
    names = ["encoder", "decoder"] if backbone.is_encoder_decoder else [None] * len(stacks)
    return [
        stack_facts(stack, name, where, length or stack.config.context, trained)
        for stack, where in zip(stacks, names, strict=True)
    ]


def stack_facts(stack: Transformer, name: str, where: str | None, length: int, trained: bool) -> RelativePositionFacts:
    assert stack.relative is not None
    c = stack.config
    distance = torch.arange(1 - length, 1 if stack.causal else length)
    sizes = {"buckets": c.relative_buckets, "longest": c.relative_distance}
    buckets = relative_position_buckets(distance, **sizes, bidirectional=not stack.causal)
    used = list(dict.fromkeys(buckets.tolist()))  # from the farthest on the left to the right
    ranges = [(int(distance[buckets == bucket].min()), int(distance[buckets == bucket].max())) for bucket in used]
    return RelativePositionFacts(name, where, stack.causal, trained, ranges, stack.relative.weight.detach().cpu()[used])


def relative_position_document(tables: Sequence[RelativePositionFacts]) -> doc.ExplainDocument:
    heads = tables[0].bias.size(1)
    return doc.ExplainDocument(
        subject="position encodings",
        title=f"{tables[0].name}: relative positions",
        summary=f"a bias on the attention scores for each distance, {heads} heads; the layers share it",
        sections=[doc.Section((facts.where or "").capitalize(), relative_blocks(facts)) for facts in tables],
        json={"positions": [facts.to_dict() for facts in tables]} | (tables[0].to_dict() if len(tables) == 1 else {}),
        picture=picture_of(bias_chart(tables[0])),
    )


def relative_blocks(facts: RelativePositionFacts) -> list[doc.DocumentBlock]:
    heads = facts.bias.size(1)
    listed = heads <= MAX_LISTED
    names = [f"head {number}" for number in range(1, heads + 1)] if listed else ["lowest", "mean", "highest"]
    values = facts.bias if listed else torch.stack([facts.bias.amin(1), facts.bias.mean(1), facts.bias.amax(1)], 1)
    rows = [
        [f"{first}" if first == last else f"{first} to {last}", *row]
        for (first, last), row in zip(facts.distances, values.tolist(), strict=True)
    ]
    caption = "Distances from the token that attends: negative to its left. Nearby ones are told apart, others share."
    blocks: list[doc.DocumentBlock] = []
    if not facts.trained:
        blocks.append(doc.Text("Random biases: a preset is untrained; name a run to see learned ones.", "callout"))
    blocks.append(bias_chart(facts))
    blocks.append(doc.Table("Bias by distance", {"distance": "text", **dict.fromkeys(names, "cosine")}, rows, caption))
    return blocks


def bias_chart(facts: RelativePositionFacts) -> doc.Chart:
    edges = [(first + last) / 2 for first, last in facts.distances]

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(edges, facts.bias.numpy(), linewidth=1, marker="." if len(edges) < 80 else "")
        axes.axhline(0, color=GRID, linewidth=0.8)
        axes.set_xscale("symlog", linthresh=8)
        axes.set_xlabel("distance of the key from the query")
        axes.set_ylabel("bias on the score")
        axes.grid(axis="y")

    return doc.Chart("relative", "bias by distance, one line per head", paint, "One line per head.")
