"""Which tensor of theirs is which of ours: one table for both directions.

A row joins one tensor of ours to one or more of theirs, and knows how numbers get from the one to the others and back
without losing a bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstock.errors import UserError

Tensors = dict[str, Tensor]
Many = Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """`ours` is None where they have a tensor that for us is a constant, as a bias that is zero."""

    ours: str | None
    theirs: tuple[str, ...]
    out: Callable[[Tensor], Many]
    back: Callable[[Many], Tensor]


def same(ours: str, theirs: str) -> Row:
    return Row(ours, (theirs,), lambda tensor: [tensor], lambda parts: parts[0])


def turned(ours: str, theirs: str) -> Row:
    """A matrix that they multiply from the other side (GPT-2's Conv1D)."""
    return Row(ours, (theirs,), lambda tensor: [tensor.T], lambda parts: parts[0].T)


def flipped(ours: str, theirs: str) -> Row:
    """Two classes that have each other's number there."""
    return Row(ours, (theirs,), lambda tensor: [tensor.flip(0)], lambda parts: parts[0].flip(0))


def stacked(ours: str, *theirs: str) -> Row:
    """One matrix of ours that is several of theirs, one under another."""
    return Row(ours, theirs, lambda tensor: tensor.chunk(len(theirs)), lambda parts: torch.cat(list(parts)))


def lowered(ours: str, theirs: str, rows: int) -> Row:
    """A table that begins there with so many rows that nothing ever reads (BART's positions)."""

    def out(tensor: Tensor) -> Many:
        return [torch.nn.functional.pad(tensor, (0, 0, rows, 0))]

    return Row(ours, (theirs,), out, lambda parts: parts[0][rows:])


def constant(theirs: str, value: Tensor) -> Row:
    """What they need and for us is always the same; back in, it must be that."""
    return Row(None, (theirs,), lambda _: [value], lambda parts: parts[0])


def layer(ours: str, theirs: str, *, bias: bool | int = True, join: Callable[[str, str], Row] = same) -> Iterator[Row]:
    """A layer's weight and bias; where ours has no bias and theirs must, it is so many zeros."""
    yield join(f"{ours}.weight", f"{theirs}.weight")
    if bias is True:
        yield same(f"{ours}.bias", f"{theirs}.bias")
    elif bias is not False:
        yield constant(f"{theirs}.bias", torch.zeros(bias))


def thirds(ours: str, *theirs: str, bias: bool | int = True) -> Iterator[Row]:
    """Queries, keys and values: one layer of ours, three of theirs."""
    yield stacked(f"{ours}.weight", *(f"{name}.weight" for name in theirs))
    if bias is True:
        yield stacked(f"{ours}.bias", *(f"{name}.bias" for name in theirs))
    elif bias is not False:
        yield from (constant(f"{name}.bias", torch.zeros(bias)) for name in theirs)


def rearranged(row: Row, order: Tensor, axes: Iterable[int]) -> Row:
    """The same row where the features along some axes stand in another order there."""
    back = torch.argsort(order)

    def move(tensor: Tensor, where: Tensor) -> Tensor:
        for axis in axes:
            tensor = tensor.index_select(axis, where)
        return tensor

    axes = tuple(axes)
    if row.ours is None:
        return row  # zeros, however they stand
    return replace(
        row,
        out=lambda tensor: row.out(move(tensor, order)),
        back=lambda parts: move(row.back(parts), back),
    )


def to_theirs(rows: Iterable[Row], ours: Mapping[str, Tensor]) -> Tensors:
    """Our tensors under their names; a tensor without a row is our own fault."""
    left = dict(ours)
    made: Tensors = {}
    nothing = torch.zeros(0)
    for row in rows:
        parts = row.out(nothing if row.ours is None else left.pop(row.ours))
        made |= {name: part.contiguous() for name, part in zip(row.theirs, parts, strict=True)}
    assert not left, f"no row for {', '.join(left)}"
    return made


def to_ours(rows: Iterable[Row], theirs: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, source: str) -> Tensors:
    """Their tensors under our names; all that are missing, misshapen or not what we can say are named together.

    `wanted` are tensors of the model they go into, for their shapes. What has no row is left for the caller to judge.
    """
    made: Tensors = {}
    problems = []
    nothing = torch.zeros(0)
    for row in rows:
        needed = row.out(nothing if row.ours is None else wanted[row.ours])
        parts = [theirs.get(name) for name in row.theirs]
        wrong = [
            f"{name} is missing"
            if part is None
            else f"{name} has shape {tuple(part.shape)}, wanted {tuple(need.shape)}"
            for name, part, need in zip(row.theirs, parts, needed, strict=True)
            if part is None or part.shape != need.shape
        ]
        problems += wrong
        found = [part for part in parts if part is not None]
        if wrong:
            continue
        if row.ours is None:
            problems += [] if torch.equal(found[0].float(), needed[0]) else [f"{row.theirs[0]} is not what it must be"]
        else:
            made[row.ours] = row.back(found).to(wanted[row.ours].dtype).contiguous()
    if problems:
        raise UserError(f"{source} does not fit this model: {'; '.join(problems)}")
    return made
