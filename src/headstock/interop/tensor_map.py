"""Maps tensors of a run to those of another library and back, bit for bit.

A `TensorMap` joins one tensor of the run ("ours") to one or more of the other library ("theirs").
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstock.errors import UserError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TensorMap:
    """`ours` is None for a tensor that is constant in this library, such as a zero bias."""

    ours: str | None
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]  # ours -> theirs
    join: Callable[[Sequence[Tensor]], Tensor]  # theirs -> ours


def rename(ours: str, *theirs: str) -> TensorMap:
    """A tensor under another name, or as several equal parts along the first axis."""
    return TensorMap(ours, theirs, lambda tensor: tensor.chunk(len(theirs)), lambda parts: torch.cat(list(parts)))


def transpose(ours: str, theirs: str) -> TensorMap:
    """A weight that is stored transposed, as in GPT-2's Conv1D."""
    return TensorMap(ours, (theirs,), lambda tensor: [tensor.T], lambda parts: parts[0].T)


def reverse_rows(ours: str, theirs: str) -> TensorMap:
    """A classifier whose classes are numbered in reverse."""
    return TensorMap(ours, (theirs,), lambda tensor: [tensor.flip(0)], lambda parts: parts[0].flip(0))


def repeat(ours: str, *theirs: str) -> TensorMap:
    """One tensor that is stored under several names."""
    return TensorMap(ours, theirs, lambda tensor: [tensor.clone() for _ in theirs], lambda parts: parts[0])


def unsqueeze(ours: str, theirs: str, axis: int) -> TensorMap:
    """A tensor that is stored with an additional axis of size 1."""
    return TensorMap(ours, (theirs,), lambda tensor: [tensor.unsqueeze(axis)], lambda parts: parts[0].squeeze(axis))


def offset_rows(ours: str, theirs: str, rows: int) -> TensorMap:
    """A table with `rows` unused rows in front, as in BART's position embeddings."""

    def split(tensor: Tensor) -> list[Tensor]:
        return [torch.nn.functional.pad(tensor, (0, 0, rows, 0))]

    return TensorMap(ours, (theirs,), split, lambda parts: parts[0][rows:])


def constant(theirs: str, value: Tensor) -> TensorMap:
    """A tensor that must have this value."""
    return TensorMap(None, (theirs,), lambda _: [value], lambda parts: parts[0])


def affine(
    ours: str, *theirs: str, bias: bool | int = True, weight: Callable[..., TensorMap] = rename
) -> Iterator[TensorMap]:
    """Weight and bias of a linear layer or norm. An integer `bias`: ours has none, theirs is that many zeros."""
    yield weight(f"{ours}.weight", *(f"{name}.weight" for name in theirs))
    if bias is True:
        yield rename(f"{ours}.bias", *(f"{name}.bias" for name in theirs))
    elif bias is not False:
        yield from (constant(f"{name}.bias", torch.zeros(bias)) for name in theirs)


def permute_features(entry: TensorMap, order: Tensor, axis: int) -> TensorMap:
    """The same entry with the features along `axis` in another order."""
    inverse = torch.argsort(order)
    return replace(
        entry,
        split=lambda tensor: entry.split(tensor.index_select(axis, order)),
        join=lambda parts: entry.join(parts).index_select(axis, inverse),
    )


def rescale(entry: TensorMap, factor: float, offset: float = 0.0) -> TensorMap:
    """The same entry of a tensor that the other library stores times a factor, plus an offset."""
    return replace(
        entry,
        split=lambda tensor: entry.split(tensor * factor + offset),
        join=lambda parts: (entry.join(parts) - offset) / factor,
    )


def export_tensors(entries: Iterable[TensorMap], ours: Mapping[str, Tensor]) -> Tensors:
    """Our tensors under their names; every tensor must have an entry."""
    remaining = dict(ours)
    result: Tensors = {}
    for entry in entries:
        parts = entry.split(torch.zeros(0) if entry.ours is None else remaining.pop(entry.ours))
        result |= {name: part.contiguous() for name, part in zip(entry.theirs, parts, strict=True)}
    assert not remaining, f"no entry for {', '.join(remaining)}"
    return result


def import_tensors(
    entries: Iterable[TensorMap],
    theirs: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    source: str,
    problems: Iterable[str] = (),
) -> Tensors:
    """Their tensors under our names, with the shapes of `expected`; raises for all problems, also those given."""
    result: Tensors = {}
    problems = list(problems)
    for entry in entries:
        references = entry.split(torch.zeros(0) if entry.ours is None else expected[entry.ours])
        parts = []
        for name, reference in zip(entry.theirs, references, strict=True):
            part = theirs.get(name)
            if part is None:
                problems.append(f"{name} is missing")
            elif part.shape != reference.shape:
                problems.append(f"{name} has shape {tuple(part.shape)}, expected {tuple(reference.shape)}")
            elif entry.ours is None and not torch.equal(part.float(), reference):
                problems.append(f"{name} has unsupported values")
            else:
                parts.append(part)
        if len(parts) == len(entry.theirs) and entry.ours is not None:
            result[entry.ours] = entry.join(parts).to(expected[entry.ours].dtype).contiguous()
    if problems:
        raise UserError(f"{source} does not fit this model: {'; '.join(problems)}")
    return result
