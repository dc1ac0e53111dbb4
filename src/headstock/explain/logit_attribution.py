"""Direct logit attribution: a logit as the exact sum of what embedding, heads, feed-forward layers and biases add.

B = 1 row, T tokens, D width, H heads, K head width. The residual stream is a sum, and what follows it is linear once
the scale of each norm on its way is held fixed, so a logit is the sum of one term per summand. Norms between the
summands (post-norm) and a head's own activation a(x), as the factor a(x) / x, are held fixed in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.gradients_document import BLUE, ORANGE
from headstock.explain.hooks import POINT_AFTER, SUBLAYERS, block_stacks, run_with_cache, stack_prefix
from headstock.explain.logit_target import LogitTarget, double_copy, logit_target, tokens_of
from headstock.explain.render_document import picture_of
from headstock.inference.pipeline import Pipeline
from headstock.model.backbones.transformer import Transformer
from headstock.model.heads import OrdinalHead
from headstock.model.model import Model
from headstock.report.theme import GRID, WIDE

TOLERANCE = 1e-5  # of the sum, relative to the largest contribution
MAX_BARS = 16  # contributions in the chart
MAX_PRINTED = 20  # contributions that a terminal lists


@dataclass(frozen=True)
class Contribution:
    """What one part of the model adds to a logit."""

    part: str  # embedding, attention, cross, feed or bias
    layer: int | None  # from 1
    head: int | None  # from 1
    point: str  # the hook point or tensor that it is computed from
    value: float

    @property
    def name(self) -> str:
        if self.part in ("attention", "cross"):
            return f"layer {self.layer}, {'cross-attention ' * (self.part == 'cross')}head {self.head}"
        return f"layer {self.layer}, feed-forward" if self.part == "feed" else self.part


@dataclass(frozen=True)
class LogitFacts:
    """A logit and its exact decomposition."""

    kind: str
    target: str
    token: str  # at the position that predicts; empty for a class
    logit: float  # computed by the model
    contributions: list[Contribution]
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(part.value for part in self.contributions)

    @property
    def error(self) -> float:
        """Of the sum, relative to the largest contribution."""
        largest = max(abs(part.value) for part in self.contributions)
        return abs(self.total - self.logit) / max(largest, abs(self.logit), 1e-30)

    def check(self) -> doc.Check:
        measured = f"sum {self.total:.6f}, logit {self.logit:.6f}, relative error {self.error:.1e}"
        return doc.Check("the contributions add up to the logit", self.error < TOLERANCE, measured)

    def by_size(self) -> list[Contribution]:
        """Heads, feed-forward layers, the embedding and all biases together, the largest first."""
        biases = [part for part in self.contributions if part.part == "bias"]
        merged = [part for part in self.contributions if part.part != "bias"]
        if biases:
            merged.append(Contribution("all biases", None, None, "", sum(part.value for part in biases)))
        return sorted(merged, key=lambda part: -abs(part.value))

    def to_dict(self) -> dict[str, Any]:
        parts = [asdict(part) | {"name": part.name} for part in self.contributions]
        return asdict(self) | {"contributions": parts, "sum": self.total, "error": self.error}


def explain_logits(
    pipeline: Pipeline,
    texts: Sequence[str],
    *,
    label: str | None = None,
    versus: str | None = None,
    at: int | None = None,
) -> LogitFacts:
    """What each part of the model adds to the logit of an answer, or to the difference of two."""
    if any(isinstance(head, OrdinalHead) for head in pipeline.model.heads.values()):
        problem = "its head gives log-probabilities of ordered classes, which are no sum of contributions"
        raise UserError(f"{pipeline.run}: {problem}; use headstock explain patch")
    target = logit_target(pipeline, texts, label=label, versus=versus, at=at)
    model = double_copy(pipeline.model)
    target = replace(target, batch=target.batch.to(model.device))
    with torch.no_grad():
        logit = float(target.value(model, model(target.batch).hidden))
    position = target.position
    return LogitFacts(
        target.kind,
        target.name,
        "" if position is None else tokens_of(pipeline, target)[0][position],
        logit,
        attribute_logit(model, target),
        target.notes,
    )


# Decomposition


class FrozenNorm(nn.Module):
    """A norm whose scale is a constant, so that it is linear up to its bias."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm):
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.centred, self.epsilon = isinstance(norm, nn.LayerNorm), norm.eps or 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x * (x.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt().detach() * self.weight
        return x if self.bias is None else x + self.bias


def frozen(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An activation as a constant factor; it must be 0 at 0."""
    return lambda x: x * torch.where(x == 0, 0.0, activation(x) / x).detach()


def freeze(model: Model) -> Model:
    """Replace the norms, and the activations of the heads, by linear functions with the same values."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm | nn.RMSNorm):
                setattr(module, name, FrozenNorm(child))
    for head in model.heads.modules():
        if getattr(head, "activation", None) is not None:
            head.activation = frozen(head.activation)  # type: ignore[assignment, arg-type]
    return model


@dataclass(frozen=True)
class StreamPart:
    """A summand of the residual stream."""

    part: str
    layer: int | None  # from 1
    point: str
    value: Tensor  # (1, T, D); (H, 1, T, D) for the heads of a layer; (D,) for a bias

    def total(self) -> Tensor:
        return self.value.sum(0) if self.value.dim() == 4 else self.value

    def contributions(self, gradient: Tensor) -> Iterator[Contribution]:
        products = (gradient * self.value).detach()
        if self.value.dim() < 4:
            yield Contribution(self.part, self.layer, None, self.point, float(products.sum()))
            return
        for head, value in enumerate(products.flatten(1).sum(1).tolist(), 1):
            yield Contribution(self.part, self.layer, head, self.point, value)


def attribute_logit(model: Model, target: LogitTarget) -> list[Contribution]:
    """The contributions to a logit; this freezes the model."""
    freeze(model)
    parts, target = stream_parts(model, target)
    biases = {name: tensor for name, tensor in model.named_parameters() if name.endswith("bias")}
    leaves = [part.value.requires_grad_() for part in parts]
    with torch.enable_grad():
        value = target.value(model, summed_stream(model, parts)).sum()
    gradients = torch.autograd.grad(value, [*leaves, *biases.values()], allow_unused=True, materialize_grads=True)
    contributions = [
        contribution
        for part, gradient in zip(parts, gradients, strict=False)
        for contribution in part.contributions(gradient)
    ]
    for (name, bias), gradient in zip(biases.items(), gradients[len(parts) :], strict=True):
        if bool(gradient.any()):
            contributions.append(Contribution("bias", None, None, name, float((gradient * bias.detach()).sum())))
    return contributions


def top_stack(model: Model) -> tuple[str, Transformer]:
    """The stack that the heads read: the decoder of an encoder-decoder."""
    return list(block_stacks(model.backbone).items())[-1]


@torch.no_grad()
def stream_parts(model: Model, target: LogitTarget) -> tuple[list[StreamPart], LogitTarget]:
    """The summands at the position that predicts, or at all positions for a class; the target reads these alone."""
    name, stack = top_stack(model)
    prefix = stack_prefix(name)
    wanted = [f"{prefix}{end}" for end in ("embedding", "blocks.*.head_output", "blocks.*.feed.*")]
    _, cache = run_with_cache(model, target.batch, wanted)
    position = target.position
    span = slice(None) if position is None else slice(position, position + 1)
    parts = [StreamPart("embedding", None, f"{prefix}embedding", cache[f"{prefix}embedding"][:, span].clone())]
    for layer, block in enumerate(stack.blocks):
        for sublayer in POINT_AFTER:
            module: Any = getattr(block, sublayer)
            point = f"{prefix}blocks.{layer}.{sublayer}"
            if sublayer == "feed":
                parts += feed_parts(module, layer + 1, point, cache, span)
            elif module is not None:
                heads = cache[f"{point}.head_output"][:, :, span]  # (1, H, T, K)
                names = (f"{point}.head_output", f"{point}.output.bias")
                parts += linear_parts(module.output, sublayer, layer + 1, names, split_heads(heads))
    return parts, target if position is None else replace(target, position=0)


def split_heads(heads: Tensor) -> Tensor:
    """(1, H, T, K) -> (H, 1, T, H K): the input of the output projection with one head each, the others zero."""
    own = torch.eye(heads.size(1)).to(heads)
    return torch.einsum("bhtk,hg->hbtgk", heads, own).flatten(-2)


def feed_parts(feed: nn.Module, layer: int, point: str, cache: dict[str, Tensor], span: slice) -> Iterator[StreamPart]:
    if feed.outer:  # an activation follows the last linear layer, so there is no bias to split off
        yield StreamPart("feed", layer, f"{point}.output", cache[f"{point}.output"][:, span].clone())
    else:
        down: Any = feed.down
        names = (f"{point}.hidden", f"{point}.down.bias")
        yield from linear_parts(down, "feed", layer, names, cache[f"{point}.hidden"][:, span])


def linear_parts(linear: nn.Module, part: str, layer: int, names: tuple[str, str], x: Tensor) -> Iterator[StreamPart]:
    """What a linear layer makes of x, and its bias apart."""
    bias = linear(x.new_zeros(x.size(-1)))
    yield StreamPart(part, layer, names[0], linear(x) - bias)
    if bool(bias.any()):
        yield StreamPart("bias", layer, names[1], bias)


def summed_stream(model: Model, parts: Sequence[StreamPart]) -> Tensor:
    """(1, T, D) the vectors that the heads read, from the summands of the residual stream."""
    name, stack = top_stack(model)
    embedding, *rest = parts
    x = embedding.value
    for layer, block in enumerate(stack.blocks):
        for sublayer in POINT_AFTER:
            point = f"{stack_prefix(name)}blocks.{layer}.{sublayer}"
            own = [part.total() for part in rest if part.point.startswith(f"{point}.")]
            if own:
                x = getattr(block, f"around_{sublayer}").combine(x, torch.stack(torch.broadcast_tensors(*own)).sum(0))
    return stack.output_norm(x)


# Document


def logit_document(facts: LogitFacts, name: str, text: str) -> doc.ExplainDocument:
    ranked = facts.by_size()
    chart = contribution_chart(facts, ranked)
    where = f" at “{facts.token}”" if facts.token else ""
    explanation = (
        "Each part of the model adds a vector to the residual stream. With the scale of the final norm held fixed, the "
        "logit is the sum of one term per part: what each says about this answer directly, not through later layers."
    )
    sections = [
        doc.Section("", [doc.Checks([facts.check()]), *doc.notes(facts.notes, text=text)]),
        doc.Section("Contributions", [doc.Text(explanation, only="page"), chart, *contribution_tables(facts)]),
        doc.Section("Ranked", [ranked_table(ranked, None, "page"), ranked_table(ranked, MAX_PRINTED, "terminal")]),
    ]
    return doc.ExplainDocument(
        subject="direct logit attribution",
        title=f"{name}: {facts.target}",
        summary=f"{facts.logit:.4f}{where}, the sum of {len(facts.contributions)} contributions",
        page_title=f"What {name} computes a logit from",
        sections=sections,
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def contribution_tables(facts: LogitFacts) -> list[doc.DocumentBlock]:
    """Layers by heads, with the feed-forward layer beside them."""
    tables: list[doc.DocumentBlock] = []
    largest = max(abs(part.value) for part in facts.contributions) or 1.0

    def cell(part: Contribution) -> doc.HeatCell:
        return doc.HeatCell(f"{part.value:+.2f}", abs(part.value) / largest, hint=part.name)

    for sublayer in ("attention", "cross"):
        heads = [part for part in facts.contributions if part.part == sublayer]
        if not heads:
            continue
        feeds = {part.layer: part for part in facts.contributions if part.part == "feed"}
        rows = []
        for layer in dict.fromkeys(part.layer for part in heads):
            cells = [cell(part) for part in heads if part.layer == layer]
            rows.append((f"layer {layer}", cells + ([cell(feeds[layer])] if sublayer == "attention" else [])))
        columns = [str(head) for head in dict.fromkeys(part.head for part in heads)]
        columns += ["feed-forward"] if sublayer == "attention" else []
        title = f"Contributions of each head, {SUBLAYERS[sublayer]}"
        tables.append(doc.HeatTable(title, columns, rows, "what it adds to the logit directly"))
    return tables


def ranked_table(ranked: Sequence[Contribution], limit: int | None, only: Any) -> doc.Table:
    rest = ranked[limit:] if limit else []
    rows: list[Sequence[Any]] = [[part.name, part.value] for part in ranked[:limit]]
    if rest:
        rows.append([f"{len(rest)} others", sum(part.value for part in rest)])
    columns = {"part": "text", "contribution": "signed"}
    caption = "All contributions, the largest first. They add up to the logit."
    return doc.Table("Ranked contributions", columns, rows, caption, fold_after=24, only=only)


def contribution_chart(facts: LogitFacts, ranked: Sequence[Contribution]) -> doc.Chart:
    shown = ranked[:MAX_BARS]

    def paint(figure: Any) -> None:
        axes, rows = figure.subplots(), range(len(shown), 0, -1)
        values = [part.value for part in shown]
        axes.barh(list(rows), values, 0.68, color=[ORANGE if value > 0 else BLUE for value in values])
        axes.axvline(0, color=GRID, linewidth=0.8)
        axes.set_yticks(list(rows), [part.name for part in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"contribution to the {facts.target}")
        axes.grid(axis="x")

    caption = "The largest contributions. Orange ones raise the logit, blue ones lower it."
    return doc.Chart("contributions", "contributions to the logit", paint, caption, (80 + 22 * len(shown)) / WIDE)
