"""Position encodings: the vector of each position, the similarity of positions by distance, and whether two coincide.

T positions, D features per position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.explain import document as doc
from headstock.explain.render_document import picture_of
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.transformer import Transformer
from headstock.model.layers import apply_rotary
from headstock.model.model import Model
from headstock.model.positions import ROTARY_BASE, rotary_angles, sinusoids
from headstock.report.theme import GRID, INK, SMALL, SOFT

PositionKind = Literal["sinusoidal", "learned", "rotary"]
POSITION_KINDS: tuple[PositionKind, ...] = get_args(PositionKind)
TOLERANCE = 1e-4  # similarities at one distance that differ by less depend on the distance alone
MAX_DRAWN = 256  # positions that are drawn; more would be finer than pixels
POSITIVE, NEGATIVE = (0.85, 0.42, 0.10), (0.13, 0.52, 0.78)  # legible on light and dark pages
DISTANCES = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # that a table lists


@dataclass(frozen=True)
class PositionFacts:
    """Position vectors and how they relate to each other."""

    kind: str
    name: str
    where: str | None  # encoder or decoder, where the two differ
    table: Tensor  # (T, D) in double precision; for rotary positions the cosines, then the sines of the angles
    similarity: list[float]  # mean cosine of two positions at distance 0 .. T - 1
    low: list[float]  # the smallest and the largest cosine at each distance
    high: list[float]
    nearest: tuple[int, int]  # the two positions whose vectors are closest
    gap: float  # the distance between those two vectors
    trained: bool | None  # whether learned vectors have been trained; None where nothing is learned
    scores: list[float] | None = None  # rotary: by distance, the score of two equal vectors after rotation
    notes: list[str] = field(default_factory=list)

    @property
    def distinct(self) -> bool:
        return self.gap > 0

    @property
    def spread(self) -> float:
        """The largest difference between cosines at one distance."""
        return max(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def by_distance_alone(self) -> bool:
        """Whether the similarity of two positions depends on their distance only."""
        return self.spread < TOLERANCE

    @property
    def wavelengths(self) -> tuple[float, float] | None:
        """The shortest and the longest wavelength, in tokens."""
        if self.kind == "learned":
            return None
        pairs = (self.table.size(1) + 1) // 2
        step = 1 / pairs if self.kind == "rotary" else 2 / self.table.size(1)
        return 2 * torch.pi, 2 * torch.pi * ROTARY_BASE ** ((pairs - 1) * step)

    def to_dict(self) -> dict[str, Any]:
        length, width = self.table.shape
        return {
            "kind": self.kind,
            "of": self.name,
            "where": self.where,
            "length": length,
            "width": width,
            "trained": self.trained,
            "distinct": self.distinct,
            "nearest": list(self.nearest),
            "smallest_distance": self.gap,
            "by_distance_alone": self.by_distance_alone,
            "similarity": self.similarity,
            "similarity_low": self.low,
            "similarity_high": self.high,
            "wavelengths": self.wavelengths,
            "scores": self.scores,
            "notes": self.notes,
        }


def explain_positions(kind: PositionKind, length: int, width: int) -> PositionFacts:
    """Position encodings that follow from a formula, as the models compute them."""
    check_size(length, width)
    if kind == "learned":
        raise UserError("learned positions belong to a model: name a run, or a preset with --preset")
    if kind == "rotary":
        if width % 2:
            raise UserError(f"--width {width}: must be even, since rotary positions rotate pairs of features")
        angles = rotary_angles(length, width)
        return position_facts(kind, "rotary positions", torch.cat([angles.cos(), angles.sin()], 1))
    return position_facts(kind, "sinusoidal positions", sinusoids(length, width).double())


def check_size(length: int, width: int = 2) -> None:
    if length < 2 or width < 1:
        raise UserError(f"--length {length} --width {width}: needs at least 2 positions and 1 feature")


def explain_model_positions(
    model: Model, name: str, *, length: int | None = None, trained: bool = True, trained_length: int | None = None
) -> list[PositionFacts]:
    """The position encodings of a model; of both stacks where they learned different ones.

    `trained_length` is the length of the rows it was trained on, where that is known.
    """
    backbone = model.backbone
    if isinstance(backbone, EncoderDecoder):
        stacks: dict[str | None, Any] = {"encoder": backbone.encoder, "decoder": backbone.decoder}
        if backbone.config.positions != "learned":
            stacks = {None: backbone.decoder}  # a formula gives both stacks the same
    elif isinstance(backbone, Transformer):
        stacks = {None: backbone}
    else:
        lacking = "reads in order and has no position encodings (families that have them: seq2seq, transformer)"
        raise UserError(f"{name}: its {backbone.name} backbone {lacking}")
    return [stack_positions(stack, name, where, length, trained, trained_length) for where, stack in stacks.items()]


def stack_positions(
    stack: Transformer, name: str, where: str | None, length: int | None, trained: bool, trained_length: int | None
) -> PositionFacts:
    kind, context = stack.config.positions, stack.config.context
    if kind == "none":
        raise UserError(f"{name}: was built without position encodings (positions=none)")
    length = context if length is None else length
    check_size(length)
    if kind == "rotary":
        cosine, sine = stack.rotation(torch.arange(length), length)
        table = torch.cat([cosine, sine], 1).cpu().double()
        return position_facts(kind, name, table, where=where, scores=rotary_scores(stack, length))
    if kind == "sinusoidal":
        table = stack.waves[:length] if length <= context else sinusoids(length, stack.width)
        return position_facts(kind, name, table.cpu().double(), where=where)
    assert stack.positions is not None
    if length > context:
        raise UserError(f"--length {length}: {name} has learned positions, and they end at {context}")
    notes = [] if trained else ["random vectors: a preset is untrained; name a run to see learned positions"]
    if trained and trained_length is not None and trained_length < length:
        notes.append(f"trained on rows of {trained_length} tokens: later positions still have their initial values")
    table = stack.positions.weight.detach()[:length].cpu().double()
    return position_facts(kind, name, table, where=where, trained=trained, notes=notes)


def rotary_scores(stack: Transformer, length: int) -> list[float]:
    """By distance, the attention score of a query and a key of all ones after the model's own rotation, 1 at 0."""
    width = stack.width // stack.config.heads
    positions = torch.arange(length, device=stack.cosine.device)
    rotated = apply_rotary(
        torch.ones(length, width, device=positions.device), stack.rotation(positions, length)
    )  # (T, K)
    return (rotated @ rotated[0] / width).tolist()


def position_facts(kind: str, name: str, table: Tensor, **options: Any) -> PositionFacts:
    if kind == "rotary" and "scores" not in options:
        options["scores"] = (table @ table[0] / (table.size(1) // 2)).tolist()
    mean, low, high = similarity_by_distance(table)
    pair, gap = nearest_pair(table)
    options = {"where": None, "trained": None} | options
    return PositionFacts(kind, name, table=table, similarity=mean, low=low, high=high, nearest=pair, gap=gap, **options)


def similarity_by_distance(table: Tensor) -> tuple[list[float], list[float], list[float]]:
    """For every distance the mean, the smallest and the largest cosine of two positions that far apart."""
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=1e-30)
    mean, low, high = [], [], []
    for distance in range(len(table)):
        cosines = (unit[distance:] * unit[: len(table) - distance]).sum(1)
        mean.append(float(cosines.mean()))
        low.append(float(cosines.min()))
        high.append(float(cosines.max()))
    return mean, low, high


def nearest_pair(table: Tensor) -> tuple[tuple[int, int], float]:
    """The two positions whose vectors are closest, and their distance: 0 means that two positions coincide."""
    distances = torch.pdist(table)  # of 0 and 1, 0 and 2, ..., 1 and 2, ...
    nearest = int(distances.argmin())
    ends = torch.arange(len(table) - 1, 0, -1).cumsum(0)  # where the distances of each first position end
    first = int(torch.searchsorted(ends, nearest, right=True))
    second = len(table) - int(ends[first] - nearest)
    return (first, second), float(distances[nearest])


# Document


def position_document(tables: Sequence[PositionFacts]) -> doc.ExplainDocument:
    first, (length, width) = tables[0], tables[0].table.shape
    title = f"{first.kind} positions"
    title = title.capitalize() if first.name == title else f"{first.name}: {title}"
    return doc.ExplainDocument(
        subject="position encodings",
        title=title,
        summary=f"{length:,} positions of {width:,} features"
        + (f": the cosine and the sine of {width // 2:,} angles" if first.kind == "rotary" else ""),
        sections=[doc.Section((facts.where or "").capitalize(), position_blocks(facts)) for facts in tables],
        json={"positions": [facts.to_dict() for facts in tables]} | (first.to_dict() if len(tables) == 1 else {}),
        picture=lambda: position_picture(tables),
    )


def position_picture(tables: Sequence[PositionFacts]) -> str:
    if len(tables) > 1:
        raise UserError("--out: an .svg holds one table; choose with --where encoder or decoder")
    return picture_of(table_chart(tables[0]))()


def position_blocks(facts: PositionFacts) -> list[doc.DocumentBlock]:
    first, second = facts.nearest
    verdicts = [
        f"No two positions are the same: the nearest two, {first} and {second}, are {facts.gap:.4g} apart."
        if facts.distinct
        else f"Positions {first} and {second} are the same, so the model cannot tell them apart.",
        "The similarity of two positions depends on their distance alone."
        if facts.by_distance_alone
        else "The similarity of two positions also depends on where they are: cosines at the same distance differ by "
        f"up to {facts.spread:.3g}.",
    ]
    rows = [
        [str(distance), facts.similarity[distance], facts.low[distance], facts.high[distance]]
        for distance in DISTANCES
        if distance < len(facts.table)
    ]
    columns = {"distance": "text", "cosine": "cosine", "lowest": "cosine", "highest": "cosine"}
    blocks: list[doc.DocumentBlock] = [
        doc.Bullets(verdicts, "verdicts many"),
        *(doc.Text(doc.sentence(note), "callout") for note in facts.notes),
        table_chart(facts),
        doc.Grid([similarity_chart(facts), distance_chart(facts)], only="page"),
        doc.Table("Similarity by distance", columns, rows, "The mean cosine of two positions, and its range."),
    ]
    if facts.wavelengths:
        shortest, longest = facts.wavelengths
        blocks.append(doc.Text(f"Wavelengths range from {shortest:.2f} (2π) to {longest:,.0f} tokens.", "soft"))
    return blocks


def signed_colours(values: np.ndarray) -> np.ndarray:
    """Numbers from -1 to 1 as RGBA, transparent at 0, so that light and dark pages show through."""
    colours = np.where(values[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    return np.concatenate([colours, np.abs(values).clip(0, 1)[..., None]], -1)


def table_chart(facts: PositionFacts) -> doc.Chart:
    table = facts.table[:MAX_DRAWN].numpy()
    scale = float(np.quantile(np.abs(table), 0.995)) or 1.0  # a few outliers must not make all other values faint
    captions = {
        "rotary": "Each row is a position. Queries and keys are rotated by these angles, pair by pair: high "
        "frequencies on the left of each half, low ones on the right.",
        "sinusoidal": "Each row is a position: sines in even features, cosines in odd ones, wavelengths growing from "
        "left to right.",
        "learned": "Each row is a position: its learned vector.",
    }
    length, width = facts.table.shape
    limited = f" The first {MAX_DRAWN} of {length:,} are drawn." if length > MAX_DRAWN else ""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(signed_colours(table / scale), aspect="auto", interpolation="none")
        axes.set_xlabel("cosines, then sines, of each pair's angle" if facts.kind == "rotary" else "feature")
        axes.set_ylabel("position")
        axes.set_title(f"blue −{scale:.3g}, faint 0, orange +{scale:.3g}", fontsize=10, color=SOFT)
        if facts.kind == "rotary":
            axes.axvline(width // 2 - 0.5, color=INK, linewidth=0.8)

    label = f"{facts.kind} encodings of {length} positions, {width} features each"
    return doc.Chart("heat", label, paint, captions[facts.kind] + limited, narrow_height=1.0)


def similarity_chart(facts: PositionFacts) -> doc.Chart:
    table = facts.table[:MAX_DRAWN].numpy()
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-30)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(signed_colours(unit @ unit.T), interpolation="none")
        axes.set_xlabel("position")
        axes.set_ylabel("position")

    caption = "The cosine of every two positions: orange similar, faint unrelated, blue opposite."
    return doc.Chart("alike", "cosine of every two positions", paint, caption, height=1.0, width=SMALL)


def distance_chart(facts: PositionFacts) -> doc.Chart:
    distances = np.arange(len(facts.similarity))
    caption = (
        "The attention score of two equal vectors by distance, relative to distance 0."
        if facts.kind == "rotary"
        else "The mean cosine by distance, with its range."
    )

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.fill_between(distances, facts.low, facts.high, color="#0072b2", alpha=0.22, linewidth=0)
        axes.plot(distances, facts.similarity, color="#0072b2")
        axes.axhline(0, color=GRID, linewidth=0.8)
        axes.set_xlabel("distance of two positions")
        axes.set_ylabel("cosine of their vectors")
        axes.grid(axis="y")

    return doc.Chart("distance", "cosine by distance", paint, caption, height=0.8, width=SMALL)
