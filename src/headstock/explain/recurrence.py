"""How far back in time a gradient reaches in cells that read a text token by token.

T tokens, D width. The textbook's story of why plain recurrence forgets: each step back multiplies by the cells' own
Jacobian, and what is multiplied often vanishes or explodes. Gates keep that factor near one.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.explain.targets import Asked
from headstock.explain.vectors import size
from headstock.model.backbone import Backbone
from headstock.model.backbones.elmo import Elmo
from headstock.model.backbones.recurrent import Recurrent, RecurrentLayer, RecurrentStack
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model


@dataclass(frozen=True)
class CellFlow:
    """What one layer of cells receives from above, hands down and learns from."""

    stack: str  # "stack", or for ELMo "forward" and "backward"
    layer: int  # from 1
    received: float  # the length of the gradient of what it gives
    passed: float  # and of what it is given
    parameters: dict[str, float]
    steps: list[float]  # by token: the length of the gradient of the last prediction at the layer's input there


@dataclass(frozen=True)
class Recurrence:
    """What one backward pass through time shows."""

    loss: float
    wanted: str
    cell: str
    layers: list[CellFlow]
    parameters: dict[str, float]  # outside the cells
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def stacks_of_cells(backbone: Backbone) -> dict[str, RecurrentStack]:
    if isinstance(backbone, Recurrent):
        return {"stack": backbone.stack}
    return {"forward": backbone.ahead, "backward": backbone.back} if isinstance(backbone, Elmo) else {}


def recurrence(model: Model, asked: Asked) -> Recurrence:
    """The gradients of the run's own loss by layer; and of its last prediction alone by layer and token."""
    if len(asked.batch.tokens) != 1:
        raise UserError("gradients through time are those of one text; give it instead of --file")
    other = copy.deepcopy(model).eval().requires_grad_(True)
    loss, ends, of = backward(other, asked)
    _, last, _ = backward(other, replace(asked, batch=last_only(asked.batch)))
    layers = []
    for key, (given, made) in ends.items():
        stack, number = key
        layer = stacks_of_cells(other.backbone)[stack].layers[number - 1]
        groups = {name: [of[id(p)] for p in group] for name, group in groups_of(layer).items()}
        steps = last[key][0][0].double().norm(dim=-1).tolist()  # (1, T, D) -> (T,)
        lengths = {name: sum(size(one) ** 2 for one in group) ** 0.5 for name, group in groups.items() if group}
        layers.append(CellFlow(stack, number, size(made), size(given), lengths, steps))
    rest = {"embedding": list(other.backbone.tokens.parameters())}
    known = {id(parameter) for parameter in other.backbone.parameters()}
    for name, head in other.heads.items():
        rest[f"{name} head"] = [parameter for parameter in head.parameters() if id(parameter) not in known]
    parameters = {name: sum(size(of[id(p)]) ** 2 for p in group) ** 0.5 for name, group in rest.items() if group}
    cell = other.backbone.config.cell
    return Recurrence(float(loss), asked.wanted, cell, layers, parameters, list(asked.notes))


Ends = dict[tuple[str, int], tuple[Tensor, Tensor]]


def backward(model: Model, asked: Asked) -> tuple[Tensor, Ends, dict[int, Tensor]]:
    """The loss, and its gradient at both ends of every layer of cells and in every parameter.

    A backward stack reads from the end; its gradients are turned round, so that all here are in the text's order.
    """
    seen: Ends = {}
    hooks = []

    def alone(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given[0].view_as(given[0]), *given[1:]

    def keeper(key: tuple[str, int]) -> Callable[..., None]:
        def keep(module: Any, given: tuple[Any, ...], output: Any) -> None:
            seen[key] = given[0], output[0]

        return keep

    for stack, layers in stacks_of_cells(model.backbone).items():
        for number, layer in enumerate(layers.layers, 1):
            hooks.append(layer.register_forward_pre_hook(alone))
            hooks.append(layer.register_forward_hook(keeper((stack, number))))
    try:
        with torch.enable_grad():
            loss = asked.loss(model)
    finally:
        for hook in hooks:
            hook.remove()
    ends, weights = [tensor for pair in seen.values() for tensor in pair], list(model.parameters())
    found = torch.autograd.grad(loss, [*ends, *weights], allow_unused=True, materialize_grads=True)
    gradients = {}
    for at, key in enumerate(seen):
        given, made = found[2 * at], found[2 * at + 1]
        gradients[key] = (given.flip(1), made.flip(1)) if key[0] == "backward" else (given, made)
    return loss.detach(), gradients, {id(w): g for w, g in zip(weights, found[len(ends) :], strict=True)}


def last_only(batch: Batch) -> Batch:
    """The same row with its last prediction alone: of a language model the last token, of a classifier its class."""
    labels = {}
    for head, wanted in batch.labels.items():
        if wanted.dim() == 2 and wanted.size(1) == batch.tokens.size(1):
            kept = torch.full_like(wanted, IGNORE_INDEX)
            if head != "backward" and bool((wanted[0] != IGNORE_INDEX).any()):
                last = int((wanted[0] != IGNORE_INDEX).nonzero().max())
                kept[0, last] = wanted[0, last]
            labels[head] = kept
        else:
            labels[head] = wanted
    return replace(batch, labels=labels)


def groups_of(layer: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of a layer of cells by what they do."""
    assert isinstance(layer, RecurrentLayer)
    named = list(layer.cells.named_parameters())
    return {
        "input": [p for name, p in named if name.startswith("weight_ih")],
        "recurrent": [p for name, p in named if name.startswith("weight_hh")],
        "bias": [p for name, p in named if name.startswith("bias")],
        "projection": [] if layer.project is None else list(layer.project.parameters()),
    }
