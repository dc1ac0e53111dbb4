"""Activation patching: which activations of a clean text, put into a corrupted one, bring its answer back.

B rows, T tokens, D width, H heads, K head width. The measure is a logit difference: recovery is 0 where patching
changes nothing and 1 where the corrupted text is answered like the clean one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.attention_document import TITLES
from headstock.explain.head_ablation import head_sites
from headstock.explain.hooks import HookFunction, block_stacks, run_with_cache, run_with_hooks, stack_prefix
from headstock.explain.logit_target import LogitTarget, contrast_targets, double_copy, tokens_of
from headstock.explain.render_document import picture_of
from headstock.inference.pipeline import Pipeline
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.report.format import shorten
from headstock.report.theme import WIDE

CHUNK = 64  # patched copies of a row per batch
TOLERANCE = 1e-9  # in double precision
MIN_DIFFERENCE = 1e-6  # of the two logit differences, which recovery is relative to
MAX_PRINTED = 24  # tokens up to which a terminal shows more than the residual stream
POINTS = {"resid_pre": "residual stream", "attention.output": "attention output", "feed.output": "feed-forward output"}


@dataclass(frozen=True)
class PositionPatch:
    """The recovery when one position of one layer is patched."""

    stack: str
    point: str  # a key of POINTS
    tokens: list[str]  # of the corrupted text; `clean → corrupted` where they differ
    recovery: list[list[float]]  # by layer and position


@dataclass(frozen=True)
class HeadPatch:
    """The recovery when one head is patched at all positions."""

    where: str  # an AttentionKind
    recovery: list[list[float]]  # by layer and head


@dataclass(frozen=True)
class PatchFacts:
    target: str
    clean: float  # logit difference of the clean text
    corrupted: float  # and of the corrupted one
    positions: list[PositionPatch]
    heads: list[HeadPatch]
    everything: float  # recovery when every position of the embedding is patched, minus 1
    nothing: float  # the change when every activation is replaced by itself
    identity: float  # the change of the clean text when all its activations are patched into itself
    notes: list[str] = field(default_factory=list)

    def checks(self) -> list[doc.Check]:
        claims = {
            "patching the whole embedding gives the clean logit difference": self.everything,
            "patching nothing changes nothing": self.nothing,
            "patching the clean text into itself changes nothing": self.identity,
        }
        return [doc.Check(claim, abs(error) < TOLERANCE, f"error {abs(error):.1e}") for claim, error in claims.items()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"checks": [vars(check) for check in self.checks()]}


@torch.no_grad()
def explain_patch(
    pipeline: Pipeline,
    clean: Sequence[str],
    corrupted: Sequence[str],
    *,
    label: str | None = None,
    versus: str | None = None,
) -> PatchFacts:
    """Patch the activations of a clean text into a corrupted one, at each position of each layer and in each head."""
    targets = contrast_targets(pipeline, clean, corrupted, label=label, versus=versus)
    model = double_copy(pipeline.model)
    pair = [replace(target, batch=target.batch.to(model.device)) for target in targets]
    patcher = Patcher(model, *pair)
    names = [token_pairs(*sides) for sides in zip(*(tokens_of(pipeline, target) for target in targets), strict=True)]
    positions = []
    for stack, transformer in block_stacks(model.backbone).items():
        tokens = names[1 if stack == "encoder" else 0]
        for point in POINTS:
            layers = [f"{stack_prefix(stack)}blocks.{layer}.{point}" for layer in range(transformer.depth)]
            recovery = [patcher.recoveries(name, size=len(tokens)) for name in layers]
            positions.append(PositionPatch(stack, point, tokens, recovery))
    heads: dict[str, list[list[float]]] = {}
    for site in head_sites(model):
        heads.setdefault(site.where, []).append(patcher.recoveries(site.point, size=site.heads))
    return PatchFacts(
        targets[0].name,
        patcher.clean,
        patcher.corrupted,
        positions,
        [HeadPatch(*item) for item in heads.items()],
        **patcher.identities(),
        notes=targets[0].notes,
    )


def token_pairs(clean: Sequence[str], corrupted: Sequence[str]) -> list[str]:
    return [b if a == b else f"{a} → {b}" for a, b in zip(clean, corrupted, strict=True)]


class Patcher:
    """Runs the corrupted text with activations of the clean one."""

    def __init__(self, model: Model, clean: LogitTarget, corrupted: LogitTarget):
        self.model, self.target, self.clean_batch, self.batch = model, clean, clean.batch, corrupted.batch
        output, self.cache = run_with_cache(model, self.clean_batch)
        self.clean = float(clean.value(model, output.hidden))
        self.corrupted = float(clean.value(model, model(self.batch).hidden))
        if abs(self.clean - self.corrupted) < MIN_DIFFERENCE:
            problem = f"both texts have the logit difference {self.clean:.6f}, so there is nothing to recover"
            raise UserError(f"{problem}; give texts that the model answers differently")

    def value(self, batch: Batch, functions: Mapping[str, HookFunction]) -> Tensor:
        """(B,) the logit difference with patched activations."""
        return self.target.value(self.model, run_with_hooks(self.model, batch, functions).hidden)

    def recovery(self, value: Tensor) -> list[float]:
        return ((value - self.corrupted) / (self.clean - self.corrupted)).tolist()

    def recoveries(self, name: str, *, size: int) -> list[float]:
        """The recovery for each position, or each head, when this one alone is patched."""
        clean, values = self.cache[name], []
        for start in range(0, size, CHUNK):
            indices = torch.arange(start, min(size, start + CHUNK), device=clean.device)

            def patch(activation: Tensor, indices: Tensor = indices) -> Tensor:
                patched = activation.clone()
                patched[torch.arange(len(indices)), indices] = clean[0, indices]
                return patched

            values += self.recovery(self.value(repeated(self.batch, len(indices)), {name: patch}))
        return values

    def identities(self) -> dict[str, float]:
        """What must hold whatever the model is: see `PatchFacts.checks`."""
        embeddings = {name: constant(value) for name, value in self.cache.items() if name.endswith("embedding")}
        itself = {name: constant(value) for name, value in self.cache.items()}
        nothing = dict.fromkeys(self.cache, torch.clone)
        return {
            "everything": self.recovery(self.value(self.batch, embeddings))[0] - 1,
            "nothing": float(self.value(self.batch, nothing)) - self.corrupted,
            "identity": float(self.value(self.clean_batch, itself)) - self.clean,
        }


def constant(value: Tensor) -> HookFunction:
    return lambda activation: value


def repeated(batch: Batch, rows: int) -> Batch:
    """One row several times, without labels."""
    plain = replace(batch, labels={}, label_positions={}, cu_seqlens=None)
    return plain.map_tensors(lambda tensor: tensor.repeat_interleave(rows, 0))


# Document


def patch_document(facts: PatchFacts, name: str, clean: str, corrupted: str) -> doc.ExplainDocument:
    chart = recovery_chart(facts)
    explanation = (
        "Each cell puts one activation of the clean text into the corrupted one. 0% changes nothing, 100% brings the "
        "answer of the clean text back; below 0% it moves away from it, above 100% beyond it."
    )
    stacks = {patch.stack for patch in facts.positions}
    tables = [position_table(patch, stacks) for patch in facts.positions]
    return doc.ExplainDocument(
        subject="activation patching",
        title=f"{name}: activation patching",
        summary=f"{facts.target}: {facts.clean:.3f} in the clean text, {facts.corrupted:.3f} in the corrupted one",
        page_title=f"Activation patching in {name}",
        sections=[
            doc.Section(
                "",
                [
                    doc.Checks(facts.checks()),
                    doc.Text(f"clean: {clean}", "quote", only="page"),
                    doc.Text(f"corrupted: {corrupted}", "quote", only="page"),
                    *doc.notes(facts.notes),
                    doc.Text(explanation, only="page"),
                ],
            ),
            doc.Section("By layer and position", [chart, doc.Grid(tables)]),
            doc.Section("By head", [doc.Grid([head_table(patch) for patch in facts.heads])]),
        ],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def recovery_cell(value: float) -> doc.HeatCell:
    return doc.HeatCell(f"{round(100 * value)}%", min(1.0, abs(value)))


def position_table(patch: PositionPatch, stacks: set[str]) -> doc.HeatTable:
    """A row per token, since a text may have more tokens than a terminal has columns."""
    columns = [f"layer {layer}" for layer in range(1, len(patch.recovery) + 1)]
    rows = [
        (token, [recovery_cell(layer[position]) for layer in patch.recovery])
        for position, token in enumerate(patch.tokens)
    ]
    of_stack = f" of the {patch.stack}" if len(stacks) > 1 else ""
    where = "before each layer" if patch.point == "resid_pre" else "of each layer"
    title = f"Recovery, {POINTS[patch.point]}{of_stack} {where}"
    only: Any = "page" if len(rows) > MAX_PRINTED and patch.point != "resid_pre" else None
    return doc.HeatTable(title, columns, rows, "one position patched at a time", only=only)


def head_table(patch: HeadPatch) -> doc.HeatTable:
    columns = [str(head) for head in range(1, len(patch.recovery[0]) + 1)]
    rows = [
        (f"layer {layer}", [recovery_cell(value) for value in values]) for layer, values in enumerate(patch.recovery, 1)
    ]
    return doc.HeatTable(f"Recovery, {TITLES[patch.where].lower()}", columns, rows, "one head patched at all positions")


def recovery_chart(facts: PatchFacts) -> doc.Chart:
    """The residual stream by layer and position, as a heat map."""
    patches = [patch for patch in facts.positions if patch.point == "resid_pre"]

    def paint(figure: Any) -> None:
        for axes, patch in zip(figure.subplots(len(patches), 1, squeeze=False)[:, 0], patches, strict=True):
            image = axes.imshow(patch.recovery, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
            axes.set_xticks(range(len(patch.tokens)), [shorten(token, 14) for token in patch.tokens], rotation=90)
            axes.set_yticks(range(len(patch.recovery)), [str(layer) for layer in range(1, len(patch.recovery) + 1)])
            axes.set_ylabel("layer" if len(patches) == 1 else f"{patch.stack} layer")
            figure.colorbar(image, ax=axes, label="recovery")

    caption = "Recovery of the logit difference when the residual stream before a layer is patched at one position."
    height = sum(150 + 26 * len(patch.recovery) for patch in patches) / WIDE
    return doc.Chart("recovery", "recovery by layer and position", paint, caption, height)
