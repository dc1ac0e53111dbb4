"""How a model tells places apart: the vectors it adds or turns by, how alike they are, and whether two are the same.

T positions, D width of what stands for a position.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.model.backbones.encoder_decoder import Seq2Seq
from headstock.model.backbones.transformer import Transformer
from headstock.model.layers import rotate
from headstock.model.model import Model
from headstock.model.positions import BASE, rotary_angles, sinusoids

Kind = Literal["sinusoidal", "learned", "rotary"]
KINDS: tuple[Kind, ...] = ("sinusoidal", "learned", "rotary")
AT_ONCE = 512  # positions whose distances to all others are computed together
FREE = 1e-4  # similarities of one distance that differ by less depend on the distance alone


@dataclass(frozen=True)
class PositionFacts:
    """What stands for each position, and what that makes of two of them."""

    kind: str
    name: str
    where: str | None  # which stack's, where there are two that differ
    table: Tensor  # (T, D) in double; of rotary positions the cosines and then the sines of the angles
    similarity: list[float]  # by distance 0 .. T - 1, the mean cosine of two positions so far apart
    low: list[float]  # the least and the most of it
    high: list[float]
    nearest: tuple[int, int]  # the two positions that are most alike
    gap: float  # the distance between their vectors
    trained: bool | None  # whether learned vectors were learned yet; None where there is nothing to learn
    scores: list[float] | None = None  # by distance, the score of a query and a key that are alike, turned by rotary
    notes: list[str] = field(default_factory=list)

    @property
    def distinct(self) -> bool:
        return self.gap > 0

    @property
    def spread(self) -> float:
        """How far the similarities of one distance are apart, at the most."""
        return max(high - low for low, high in zip(self.low, self.high, strict=True))

    @property
    def by_distance_alone(self) -> bool:
        """Whether two positions are as alike as any other two that are as far apart."""
        return self.spread < FREE

    @property
    def wavelengths(self) -> tuple[float, float] | None:
        """The shortest and the longest wave, in tokens."""
        if self.kind == "learned":
            return None
        pairs = (self.table.size(1) + 1) // 2
        step = 1 / pairs if self.kind == "rotary" else 2 / self.table.size(1)
        return 2 * torch.pi, 2 * torch.pi * BASE ** ((pairs - 1) * step)

    def facts(self) -> dict[str, Any]:
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


def explain_positions(kind: Kind, length: int, width: int) -> PositionFacts:
    """Positions that follow from a formula, as the models compute them."""
    check(length, width)
    if kind == "learned":
        raise UserError("learned positions are those of a model: name a run, or a preset with --preset")
    if kind == "rotary" and width % 2:
        raise UserError(f"--width {width}: rotary positions turn pairs of features, so a head's width must be even")
    table = turned(length, width) if kind == "rotary" else sinusoids(length, width).double()
    title = {"sinusoidal": "sinusoidal positions", "rotary": "rotary positions"}[kind]
    return facts_of(kind, title, table)


def check(length: int, width: int = 2) -> None:
    if length < 2 or width < 1:
        raise UserError(f"--length {length} --width {width}: wanted at least 2 positions and 1 feature")


def explain_model_positions(
    model: Model, name: str, *, length: int | None = None, trained: bool = True, read: int | None = None
) -> list[PositionFacts]:
    """The positions of a model: of both its stacks where they learned different ones.

    `read` is how long the rows were that it was trained on, where that is known.
    """
    backbone = model.backbone
    if isinstance(backbone, Seq2Seq):
        stacks: dict[str | None, Any] = {"encoder": backbone.encoder, "decoder": backbone.decoder}
        if backbone.config.positions != "learned":
            stacks = {None: backbone.decoder}  # a formula gives both the same
    elif isinstance(backbone, Transformer):
        stacks = {None: backbone}
    else:
        kind = "reads in order and has no position encodings (families that have them: seq2seq, transformer)"
        raise UserError(f"{name}: its {backbone.name} backbone {kind}")
    return [of_stack(stack, name, where, length, trained, read) for where, stack in stacks.items()]


def of_stack(
    stack: Transformer, name: str, where: str | None, length: int | None, trained: bool, read: int | None
) -> PositionFacts:
    kind, context = stack.config.positions, stack.config.context
    wanted = context if length is None else length
    check(wanted)
    if kind == "rotary":
        cosine, sine = stack.rotation(torch.arange(wanted), wanted)
        table = torch.cat([cosine, sine], 1).cpu().double()
        return facts_of(kind, name, table, where=where, scores=rotated_scores(stack, wanted))
    if kind == "sinusoidal":
        table = stack.waves[:wanted] if wanted <= context else sinusoids(wanted, stack.width)
        return facts_of(kind, name, table.cpu().double(), where=where)
    assert stack.positions is not None
    if wanted > context:
        raise UserError(f"--length {wanted}: {name} has learned positions, and they end at {context}")
    notes = [] if trained else ["random numbers: a preset has learned nothing yet; name a run to see what one learns"]
    if trained and read is not None and read < wanted:
        notes.append(f"it was trained on rows of {read} tokens: positions beyond that are as they were at the start")
    table = stack.positions.weight.detach()[:wanted].cpu().double()
    return facts_of(kind, name, table, where=where, trained=trained, notes=notes)


def turned(length: int, width: int) -> Tensor:
    """(T, D) the cosines and then the sines of the rotary angles of a head of this width."""
    angles = rotary_angles(length, width)
    return torch.cat([angles.cos(), angles.sin()], 1)


def rotated_scores(stack: Transformer, length: int) -> list[float]:
    """By distance the score of a query and a key with all features one, turned by the model's own rotation.

    It is what is left of the score of two vectors that agree once they stand so far apart, 1 where they meet.
    """
    width = stack.width // stack.config.heads
    places = torch.arange(length, device=stack.cosine.device)
    alike = rotate(torch.ones(length, width, device=places.device), stack.rotation(places, length))  # (T, K)
    return (alike @ alike[0] / width).tolist()


def facts_of(kind: str, name: str, table: Tensor, **more: Any) -> PositionFacts:
    if kind == "rotary" and "scores" not in more:
        more["scores"] = (table @ table[0] / (table.size(1) // 2)).tolist()  # a sum of cos(angle) cos(0) + sin sin
    mean, low, high = by_distance(table)
    pair, gap = nearest(table)
    more = {"where": None, "trained": None} | more
    return PositionFacts(kind, name, table=table, similarity=mean, low=low, high=high, nearest=pair, gap=gap, **more)


def by_distance(table: Tensor) -> tuple[list[float], list[float], list[float]]:
    """For every distance the mean, the least and the largest cosine of two positions that far apart."""
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=1e-30)
    mean, low, high = [], [], []
    for distance in range(len(table)):
        alike = (unit[distance:] * unit[: len(table) - distance]).sum(1)
        mean.append(float(alike.mean()))
        low.append(float(alike.min()))
        high.append(float(alike.max()))
    return mean, low, high


def nearest(table: Tensor) -> tuple[tuple[int, int], float]:
    """The two positions whose vectors are closest, and how close: no two positions are alike unless that is 0."""
    best, pair = float("inf"), (0, 1)
    for begin in range(0, len(table), AT_ONCE):
        apart = torch.cdist(table[begin : begin + AT_ONCE], table, compute_mode="donot_use_mm_for_euclid_dist")
        rows = torch.arange(len(apart))
        apart[rows, rows + begin] = torch.inf
        least = int(apart.argmin())
        if float(apart.flatten()[least]) < best:
            best, row, other = float(apart.flatten()[least]), begin + least // len(table), least % len(table)
            pair = (min(row, other), max(row, other))
    return pair, best
