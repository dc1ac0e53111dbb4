"""FLOPs and memory of training, in closed form.  B rows, L tokens in a row."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headstock.cost.formulas import CPU, Dimensions, ExecutionContext, ModuleCost, Size, WeightTensor
from headstock.cost.model import model_cost
from headstock.model.lora import LoRAConfig, is_target
from headstock.model.model import Model
from headstock.tasks.base import Task

FLOAT32, FLOAT16 = 4, 2  # bytes
BACKWARD = 2  # matmuls of the backward pass per matmul of the forward pass: for the input and for the weights


@dataclass(frozen=True)
class TrainingMemory:
    """In bytes."""

    weights: Size  # with buffers
    gradients: Size
    optimizer: Size
    average: Size  # the moving average of the weights, if any
    activations: Size  # saved for the backward pass
    working: Size  # the gradient of the logits and, in half precision, copies of the weights

    @property
    def total(self) -> Size:
        """About the peak of a step, when the backward pass begins."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + self.working


def flops_per_token(cost: ModuleCost, *, training: bool = False) -> Size:
    """FLOPs per token of a row, forward, or in `training` forward and backward.

    As usual only matmuls count; the rest is a few percent. Attention counts all pairs, though a causal mask needs half.
    """
    return (1 + BACKWARD if training else 1) * cost.total_flops()


def optimizer_state_bytes(weights: Iterable[WeightTensor], optimizer: str) -> Size:
    """AdamW saves_input two values per weight and a counter per tensor; Muon one, for the matrices it updates."""
    size: Size = 0
    for tensor in weights:
        if optimizer == "muon" and uses_muon(tensor):
            size += FLOAT32 * tensor.count * tensor.times
        else:
            size += (2 * FLOAT32 * tensor.count + FLOAT32) * tensor.times
    return size


def uses_muon(tensor: WeightTensor) -> bool:
    return is_matrix(tensor)


def is_matrix(tensor: WeightTensor) -> bool:
    """Whether it is a matrix of the backbone that is multiplied."""
    return tensor.path.startswith("backbone.") and len(tensor.shape) == 2 and not tensor.is_embedding


def optimizer_flops(weights: Iterable[WeightTensor], optimizer: str) -> Size:
    """Of one optimizer step: Muon's five Newton-Schulz iterations of three matmuls for each matrix."""
    if optimizer != "muon":
        return 0
    total: Size = 0
    for tensor in weights:
        if uses_muon(tensor):
            rows, columns = tensor.shape
            # queries, keys and values are orthogonalized separately
            parts, rows = (3, rows // 3) if tensor.path.endswith("inputs.weight") else (1, rows)
            short, long = min(rows, columns), max(rows, columns)
            total += tensor.times * parts * 5 * (4 * short**2 * long + 2 * short**3)
    return total


def adapter_weights(
    weights: Iterable[WeightTensor], lora: LoRAConfig, *, rank: Size | None = None
) -> list[WeightTensor]:
    """A (r, K) and B (N, r) of each matrix (N, K) of the backbone that LoRA adapts; `rank` may be a symbol."""
    rank = lora.rank if rank is None else rank
    adapters = []
    for tensor in weights:
        if is_matrix(tensor) and is_target(tensor.path, lora.targets):
            outputs, inputs = tensor.shape
            for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                adapters.append(WeightTensor(f"{tensor.path}.{name}", shape, tensor.times, is_embedding=False))
    return adapters


def lora_flops_per_token(cost: ModuleCost, lora: LoRAConfig, *, rank: Size | None = None) -> Size:
    """FLOPs per token of training with LoRA, forward and backward.

    Frozen layers need no gradient of their weights. Recurrent cells and the keys and values of cross-attention form
    W + B A, so these do.
    """
    rank = lora.rank if rank is None else rank

    def difference(part: ModuleCost, path: str) -> Size:
        matrices = [shape for shape in part.shapes.values() if len(shape) == 2 and not part.is_embedding]
        forms_sum = part.name == "cells" or path.endswith("cross.inputs")
        own: Size = 0
        if matrices and not forms_sum:
            own -= part.flops or sum(2 * math.prod(shape) for shape in matrices)
            if is_target(path, lora.targets):
                own += (1 + BACKWARD) * sum(2 * rank * (outputs + inputs) for outputs, inputs in matrices)
        below = sum(difference(child, f"{path}.{child.name}") for child in part.parts)
        return (own + below) * part.passes * part.copies

    backbone, _ = cost.parts
    return flops_per_token(cost, training=True) + difference(backbone, backbone.name)


def training_memory(
    model: Model,
    task: Task,
    d: Dimensions,
    *,
    rows: Size,
    optimizer: str = "adamw",
    context: ExecutionContext = CPU,
    averaged: bool = False,
    frozen: bool = False,
) -> TrainingMemory:
    """Of a step on `rows` rows; with `frozen` only the heads train, on precomputed features."""
    cost = model_cost(model, task, d, context)
    _, heads = cost.parts
    trained = [tensor for tensor in cost.weights() if not frozen or tensor.path.startswith("heads.")]
    tokens = rows * d.length
    saved = (heads if frozen else cost).total_saved()
    predictions = sum(head.passes for head in heads.parts if head.name == "token") * tokens
    working = predictions * d.vocabulary * (FLOAT32 + FLOAT16 if context.half else FLOAT32)
    if context.half:
        working += FLOAT16 * sum(tensor.count * tensor.times for tensor in trained if len(tensor.shape) == 2)
    return TrainingMemory(
        weights=FLOAT32 * (cost.count + cost.buffer_count),
        gradients=FLOAT32 * sum(tensor.count * tensor.times for tensor in trained),
        optimizer=optimizer_state_bytes(trained, optimizer),
        average=FLOAT32 * cost.count if averaged else 0,
        activations=tokens * saved.size(context),
        working=working,
    )
