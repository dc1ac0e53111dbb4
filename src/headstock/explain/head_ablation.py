"""Head ablation: how the loss of a file changes when one attention head is set to zero, or to its mean output.

B rows, H heads, T tokens, K head width, N batches, R resamples.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.attention import need_attention, real_positions
from headstock.explain.attention_document import TITLES
from headstock.explain.gradients_document import BLUE, ORANGE
from headstock.explain.hooks import HookFunction, hook_points, hooked
from headstock.explain.inputs import file_examples
from headstock.explain.render_document import picture_of
from headstock.inference.pipeline import Pipeline
from headstock.intervals import TAILS, resampled_weights
from headstock.model.attention_weights import attention_modules
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.report.format import pluralize
from headstock.report.theme import GRID, WIDE
from headstock.tasks.base import Task

logger = logging.getLogger(__name__)

AblationMethod = Literal["zero", "mean"]
METHODS: dict[AblationMethod, str] = {"zero": "set to zero", "mean": "set to its mean output over the file"}
RESAMPLES = 500
BATCHES = 16  # that a file is divided into: the units that intervals are resampled from
MAX_PRINTED = 12  # heads that a terminal ranks
MAX_BARS = 16  # heads in the chart
TOLERANCE = 1e-5


@dataclass(frozen=True)
class HeadSite:
    """The attention of one layer, where its heads can be replaced."""

    where: str  # an AttentionKind
    layer: int  # from 1
    heads: int
    point: str  # the hook point of its heads
    output_point: str  # and of what they add together
    bias: Tensor  # (D,) what attention adds without any head


@dataclass(frozen=True)
class HeadEffect:
    """The change when one head is ablated; positive: the head helps."""

    where: str
    layer: int
    head: int  # from 1
    method: AblationMethod
    loss: float  # the increase of the loss
    low: float  # of its 95% interval
    high: float
    accuracy: float | None  # the change of the accuracy, where the task has one


@dataclass(frozen=True)
class AblationFacts:
    """All heads of a run, ablated one at a time."""

    metrics: dict[str, float]  # of the unchanged model
    without: dict[str, float]  # with every head set to zero
    rows: int
    effects: list[HeadEffect]
    identity: float  # the largest change when every head is replaced by itself
    reference: float  # of the loss without any head, from that of the model whose attention adds its bias alone
    notes: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[str]:
        """The kinds of attention."""
        return list(dict.fromkeys(effect.where for effect in self.effects))

    def name(self, effect: HeadEffect) -> str:
        """Layer and head, such as 2.3, with the kind of attention where there are several."""
        where = f"{effect.where} " if len(self.sites) > 1 else ""
        return f"{where}{effect.layer}.{effect.head}"

    def checks(self) -> list[doc.Check]:
        claims = {
            "replacing every head by itself changes nothing": self.identity,
            "without any head, the loss is that of the model without attention": self.reference,
        }
        return [doc.Check(claim, error < TOLERANCE, f"difference {error:.1e}") for claim, error in claims.items()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"checks": [vars(check) for check in self.checks()]}


@torch.no_grad()
def explain_heads(
    pipeline: Pipeline,
    file: str,
    *,
    columns: Mapping[str, str] | None = None,
    rows: int = 64,
    methods: Sequence[AblationMethod] = ("zero", "mean"),
) -> AblationFacts:
    """Ablate every head of a run in turn, over the first rows of a file."""
    model = pipeline.model.eval()
    need_attention(model, str(pipeline.run))
    task, examples = file_examples(pipeline, file, columns=columns, rows=rows)
    count = min(rows, len(examples))
    if not count:
        raise UserError(f"{file}: no rows to compute a loss over")
    size = -(-count // BATCHES)
    batches = [
        examples.batch(range(start, min(count, start + size))).to(model.device) for start in range(0, count, size)
    ]
    sites = head_sites(model)
    evaluate = Evaluator(model, task, batches)
    base = evaluate({})
    meter = AblationMeter(base)
    means = mean_outputs(model, batches, sites) if "mean" in methods else {}
    effects = []
    for site in sites:
        for head in range(site.heads):
            for method in methods:
                value = means[site.point][head] if method == "mean" else 0.0
                ablated = evaluate({site.point: replace_head(head, value)})
                effects.append(meter.effect(ablated, site, head + 1, method))
        logger.info("%s, layer %d: %s", TITLES[site.where], site.layer, pluralize(site.heads, "head"))
    same = evaluate({site.point: torch.clone for site in sites})
    without = evaluate({site.point: torch.zeros_like for site in sites}).metrics()
    reference = evaluate({site.output_point: only_bias(site.bias) for site in sites}).metrics()
    notes = [f"{count:,} of {len(examples):,} rows are read"] if len(examples) > count else []
    if count < BATCHES:
        notes.append(f"intervals are wide: they resample {pluralize(count, 'row')}")
    identity = abs(same.metrics()["loss"] - base.metrics()["loss"])
    missing = abs(without["loss"] - reference["loss"])
    return AblationFacts(base.metrics(), without, count, effects, identity, missing, notes)


def head_sites(model: Model) -> list[HeadSite]:
    """The attention layers of a model, from the bottom up."""
    points = {(id(point.module), point.site): name for name, point in hook_points(model).items()}
    sites = []
    for where, layer, attention in attention_modules(model):
        bias = attention.output(attention.output.weight.new_zeros(attention.output.in_features))
        names = points[id(attention), "head_output"], points[id(attention), "output"]
        sites.append(HeadSite(where, layer, attention.heads, *names, bias))
    return sites


def replace_head(head: int, value: Tensor | float) -> HookFunction:
    """Set one head (from 0) of (B, H, T, K) to a value, which may be (K,)."""

    def replace(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, head] = value
        return heads

    return replace


def only_bias(bias: Tensor) -> HookFunction:
    return lambda output: bias.expand_as(output)


def mean_outputs(model: Model, batches: Sequence[Batch], sites: Sequence[HeadSite]) -> dict[str, Tensor]:
    """(H, K) per site: the mean output of every head over all positions that are not padding."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def adder(site: HeadSite, batch: Batch) -> Callable[[Tensor], None]:
        real = real_positions(batch.source if site.where == "encoder" and batch.source is not None else batch)
        real = real.flip(1) if site.where == "backward" else real

        def add(heads: Tensor) -> None:
            total = torch.einsum("bhtk,bt->hk", heads.double(), real.double())
            sums[site.point] = sums.get(site.point, 0) + total
            counts[site.point] = counts.get(site.point, 0) + int(real.sum())

        return add

    for batch in batches:
        with hooked(model, {site.point: adder(site, batch) for site in sites}):
            model(batch)
    return {point: (total / counts[point]).to(next(model.parameters())) for point, total in sums.items()}


# Loss and intervals


@dataclass(frozen=True)
class Evaluation:
    """The summed losses and the counts of every batch."""

    task: Task
    sums: list[dict[str, float]]
    counts: list[dict[str, int]]

    def metrics(self, weights: np.ndarray | None = None) -> dict[str, float]:
        """The metrics of all batches, or of batches (N,) that count `weights` times."""
        weights = np.ones(len(self.sums), dtype=int) if weights is None else weights
        sums = {name: float(weights @ [batch[name] for batch in self.sums]) for name in self.sums[0]}
        counts = {name: int(weights @ [batch[name] for batch in self.counts]) for name in self.counts[0]}
        return self.task.score(sums, counts, size=0)

    def resampled_losses(self) -> np.ndarray:
        """(R,) the loss over batches drawn with replacement; two evaluations of the same batches share the draws."""
        draws = resampled_weights(len(self.sums), key=("head ablation",), resamples=RESAMPLES)  # (R, N)
        return np.array([self.metrics(weights)["loss"] for weights in draws])


class Evaluator:
    """Evaluates a model on the same batches again and again, each time with other hooks."""

    def __init__(self, model: Model, task: Task, batches: Sequence[Batch]):
        self.model, self.task, self.batches = model, task, batches
        self.counts = [task.counts(batch) for batch in batches]

    def __call__(self, functions: Mapping[str, HookFunction]) -> Evaluation:
        sums = []
        with hooked(self.model, functions):
            for batch in self.batches:
                sums.append({name: float(value) for name, value in self.task.losses(self.model, batch).items()})
        return Evaluation(self.task, sums, self.counts)


class AblationMeter:
    """Compares ablated models with the unchanged one."""

    def __init__(self, base: Evaluation):
        self.before, self.resampled = base.metrics(), base.resampled_losses()

    def effect(self, ablated: Evaluation, site: HeadSite, head: int, method: AblationMethod) -> HeadEffect:
        after = ablated.metrics()
        loss = after["loss"] - self.before["loss"]
        accuracy = after["accuracy"] - self.before["accuracy"] if "accuracy" in after else None
        low, high = np.quantile(ablated.resampled_losses() - self.resampled, TAILS).tolist()
        return HeadEffect(site.where, site.layer, head, method, loss, low, high, accuracy)


# Document


def head_document(facts: AblationFacts, name: str, file: str) -> doc.ExplainDocument:
    methods = list(dict.fromkeys(effect.method for effect in facts.effects))
    chart = head_chart(facts, methods[0])
    tables = [effect_table(facts, method, where) for method in methods for where in facts.sites]
    loss, without = facts.metrics["loss"], facts.without["loss"]
    return doc.ExplainDocument(
        subject="head ablation",
        title=f"{name}: head ablation",
        summary=f"{file}: {pluralize(facts.rows, 'row')}, loss {loss:.4f}, without any head {without:.4f}",
        page_title=f"The attention heads of {name}, left out one by one",
        sections=[
            doc.Section("", [doc.Checks(facts.checks()), *doc.notes(facts.notes)]),
            doc.Section("Increase of the loss", [chart, doc.Grid(tables)]),
            doc.Section("Ranked", [block for method in methods for block in ranked_tables(facts, method)]),
        ],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def ranked(facts: AblationFacts, method: AblationMethod) -> list[HeadEffect]:
    return sorted((effect for effect in facts.effects if effect.method == method), key=lambda effect: -effect.loss)


def effect_table(facts: AblationFacts, method: AblationMethod, where: str) -> doc.HeatTable:
    effects = [effect for effect in facts.effects if (effect.method, effect.where) == (method, where)]
    largest = max(abs(effect.loss) for effect in facts.effects if effect.method == method) or 1.0
    rows = []
    for layer in dict.fromkeys(effect.layer for effect in effects):
        cells = [
            doc.HeatCell(
                f"{effect.loss:+.3f}",
                abs(effect.loss) / largest,
                hint=f"head {facts.name(effect)}, 95% interval {effect.low:+.3f} to {effect.high:+.3f}",
            )
            for effect in effects
            if effect.layer == layer
        ]
        rows.append((f"layer {layer}", cells))
    columns = [str(head) for head in dict.fromkeys(effect.head for effect in effects)]
    caption = f"increase of the loss when a head is {METHODS[method]}"
    return doc.HeatTable(f"{TITLES[where]}, {method} ablation", columns, rows, caption)


def ranked_tables(facts: AblationFacts, method: AblationMethod) -> list[doc.DocumentBlock]:
    effects = ranked(facts, method)
    columns: dict[str, Any] = {
        "head": ("text", facts.name),
        "loss": ("text", lambda effect: f"{effect.loss:+.4f}"),
        "95% interval": ("text", lambda effect: f"{effect.low:+.4f} to {effect.high:+.4f}"),
    }
    if effects[0].accuracy is not None:
        columns["accuracy, points"] = ("text", lambda effect: f"{100 * effect.accuracy:+.2f}")
    caption = f"Layer and head, and what changes when the head is {METHODS[method]}. Intervals resample batches."
    title = f"Heads by {method} ablation"
    return [
        doc.Table.from_records(title, effects, columns, caption, fold_after=24, only="page"),
        doc.Table.from_records(title, effects[:MAX_PRINTED], columns, caption, only="terminal"),
    ]


def head_chart(facts: AblationFacts, method: AblationMethod) -> doc.Chart:
    shown = ranked(facts, method)[:MAX_BARS]

    def paint(figure: Any) -> None:
        axes, rows = figure.subplots(), list(range(len(shown), 0, -1))
        values = [effect.loss for effect in shown]
        spread = [
            [max(0.0, effect.loss - effect.low) for effect in shown],
            [max(0.0, effect.high - effect.loss) for effect in shown],
        ]
        colours = [ORANGE if value > 0 else BLUE for value in values]
        axes.barh(rows, values, 0.68, color=colours, xerr=spread, error_kw={"ecolor": GRID, "linewidth": 1.2})
        axes.axvline(0, color=GRID, linewidth=0.8)
        axes.set_yticks(rows, [facts.name(effect) for effect in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"increase of the loss, head {METHODS[method]}")
        axes.grid(axis="x")

    caption = "The heads (layer.head) whose ablation raises the loss most, with 95% intervals over batches of rows."
    return doc.Chart("heads", "increase of the loss per head", paint, caption, (80 + 22 * len(shown)) / WIDE)
