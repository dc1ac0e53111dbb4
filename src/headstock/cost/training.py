"""What training takes, in closed form: arithmetic for each token, and memory for each thing that must be held.

The same lines give numbers or, asked with symbols, formulas. B rows, L tokens in a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headstock.model.formulas import CPU, Dimensions, ExecutionContext, ModuleCost, Size, WeightTensor
from headstock.model.model import Model
from headstock.tasks.base import Task

SINGLE, HALF = 4, 2  # bytes of a number
BACKWARD = 2  # for every product on the way forward there are two on the way back: for what came in and for the weights


@dataclass(frozen=True)
class TrainingMemory:
    """In bytes."""

    weights: Size  # and the buffers beside them
    gradients: Size
    optimizer: Size
    average: Size  # averaged weights, where they are kept
    activations: Size  # what the way forward leaves for the way back
    working: Size  # the scores' gradient and, in half precision, copies of the weights

    @property
    def total(self) -> Size:
        """About what a step needs at its highest: all of them together, when the way back begins."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + self.working


def model_cost(model: Model, task: Task, d: Dimensions, place: ExecutionContext = CPU) -> ModuleCost:
    """The closed forms of a model as a task uses it."""
    return model.counted(d, place, uses={head: task.head_passes(head, d.length) for head in model.heads})


def flops_per_token(parts: ModuleCost, *, training: bool = False) -> Size:
    """Products and sums for each token of a row, forward, or in `training` forward and back.

    Only products of matrices count, as is usual: the rest is less than a few percent of them. Attention is counted
    whole, as kernels for packed rows do it, though a causal mask needs only half.
    """
    return (1 + BACKWARD if training else 1) * parts.total_flops()


def optimizer_state_bytes(weights: Iterable[WeightTensor], optimizer: str) -> Size:
    """AdamW holds two numbers a weight and a counter for each tensor; Muon one, for the matrices that it moves."""
    size: Size = 0
    for tensor in weights:
        if optimizer == "muon" and moved_by_muon(tensor):
            size += SINGLE * tensor.count * tensor.times
        else:
            size += (2 * SINGLE * tensor.count + SINGLE) * tensor.times
    return size


def moved_by_muon(tensor: WeightTensor) -> bool:
    return tensor.path.startswith("backbone.") and len(tensor.shape) == 2 and not tensor.table


def optimizer_flops(weights: Iterable[WeightTensor], optimizer: str) -> Size:
    """Of one move of the weights: five rounds of three products that make each of Muon's matrices orthogonal."""
    if optimizer != "muon":
        return 0
    total: Size = 0
    for tensor in weights:
        if moved_by_muon(tensor):
            rows, columns = tensor.shape
            # queries, keys and values are made orthogonal each by itself
            parts, rows = (3, rows // 3) if tensor.path.endswith("inputs.weight") else (1, rows)
            short, long = min(rows, columns), max(rows, columns)
            total += tensor.times * parts * 5 * (4 * short**2 * long + 2 * short**3)
    return total


def training_memory(
    model: Model,
    task: Task,
    d: Dimensions,
    *,
    rows: Size,
    optimizer: str = "adamw",
    place: ExecutionContext = CPU,
    averaged: bool = False,
    frozen: bool = False,
) -> TrainingMemory:
    """What a step on `rows` rows needs; `frozen`, the heads learn alone, from features that are there already."""
    parts = model_cost(model, task, d, place)
    _, heads = parts.parts
    moving = [tensor for tensor in parts.weights() if not frozen or tensor.path.startswith("heads.")]
    gradients = SINGLE * sum(tensor.count * tensor.times for tensor in moving)
    tokens = rows * d.length
    kept = (heads if frozen else parts).total_kept()
    scored = sum(head.used for head in heads.parts if head.name == "token") * tokens
    working = scored * d.vocabulary * (SINGLE + HALF if place.half else SINGLE)
    if place.half:
        working += HALF * sum(tensor.count * tensor.times for tensor in moving if len(tensor.shape) == 2)
    return TrainingMemory(
        weights=SINGLE * (parts.count + parts.fixed),
        gradients=gradients,
        optimizer=optimizer_state_bytes(moving, optimizer),
        average=SINGLE * parts.count if averaged else 0,
        activations=tokens * kept.size(place),
        working=working,
    )
