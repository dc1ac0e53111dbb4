"""How far back in time the gradient of a recurrent model reaches.

T tokens, D width. Each step back in time multiplies the gradient by the cell's Jacobian, so that it vanishes or
explodes; gates keep that factor near one.
"""

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.explain.inputs import ExplainTarget
from headstock.explain.residual_connections import ParameterGroups, group_norms, record_calls, vector_norm
from headstock.model.backbone import Backbone
from headstock.model.backbones.elmo import Elmo
from headstock.model.backbones.recurrent import Recurrent, RecurrentLayer, RecurrentStack
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model


@dataclass(frozen=True)
class RecurrentLayerGradients:
    stack: str  # "stack", or for ELMo "forward" and "backward"
    layer: int  # from 1
    received: float  # gradient norm at the layer's output
    passed: float  # and at its input
    parameters: dict[str, float]
    steps: list[float]  # by token: the gradient norm of the last prediction at the layer's input


@dataclass(frozen=True)
class RecurrenceFacts:
    """One backward pass through time."""

    loss: float
    target: str  # what the loss is computed over
    cell: str
    layers: list[RecurrentLayerGradients]
    parameters: dict[str, float]  # outside the recurrent layers
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {"wanted": values.pop("target")} | values


def recurrent_stacks(backbone: Backbone) -> dict[str, RecurrentStack]:
    """The stacks of recurrent layers by name; empty for other families."""
    if isinstance(backbone, Recurrent):
        return {"stack": backbone.stack}
    return {"forward": backbone.ahead, "backward": backbone.back} if isinstance(backbone, Elmo) else {}


def explain_recurrence(model: Model, target: ExplainTarget) -> RecurrenceFacts:
    """The gradients of the run's own loss by layer, and of its last prediction by layer and token."""
    if len(target.batch.tokens) != 1:
        raise UserError("gradients through time need one text instead of --file")
    model = copy.deepcopy(model).eval().requires_grad_(True)
    loss, ends, gradients = backward_through_time(model, target)
    _, last, _ = backward_through_time(model, replace(target, batch=last_label_only(target.batch)))
    layers = []
    for (stack, number), (at_input, at_output) in ends.items():
        layer = recurrent_stacks(model.backbone)[stack].layers[number - 1]
        steps = last[stack, number][0][0].double().norm(dim=-1).tolist()  # (1, T, D) -> (T,)
        norms = group_norms(layer_groups(layer), gradients)
        received, passed = vector_norm(at_output), vector_norm(at_input)
        layers.append(RecurrentLayerGradients(stack, number, received, passed, norms, steps))
    outer: ParameterGroups = {"embedding": list(model.backbone.tokens.parameters())}
    inner = {id(parameter) for parameter in model.backbone.parameters()}
    for name, head in model.heads.items():
        outer[f"{name} head"] = [parameter for parameter in head.parameters() if id(parameter) not in inner]
    parameters = group_norms(outer, gradients)
    cell = model.backbone.config.cell
    return RecurrenceFacts(float(loss), target.description, cell, layers, parameters, list(target.notes))


LayerEnds = dict[tuple[str, int], tuple[Tensor, Tensor]]  # input and output by stack and layer


def backward_through_time(model: Model, target: ExplainTarget) -> tuple[Tensor, LayerEnds, dict[int, Tensor]]:
    """The loss, and its gradients at the input and output of every recurrent layer and in every parameter.

    The gradients of a backward stack are reversed, so that all are in the order of the text.
    """
    recorded: LayerEnds = {}

    def record(key: tuple[str, int], inputs: tuple[Any, ...], options: Any, output: Any) -> None:
        recorded[key] = inputs[0], output[0]

    stacks = recurrent_stacks(model.backbone)
    layers = {(name, number): layer for name, stack in stacks.items() for number, layer in enumerate(stack.layers, 1)}
    with record_calls(layers, record), torch.enable_grad():
        loss = target.loss(model)
    ends, weights = [tensor for pair in recorded.values() for tensor in pair], list(model.parameters())
    gradients = torch.autograd.grad(loss, [*ends, *weights], allow_unused=True, materialize_grads=True)
    at_ends: LayerEnds = {}
    for index, key in enumerate(recorded):
        at_input, at_output = gradients[2 * index], gradients[2 * index + 1]
        at_ends[key] = (at_input.flip(1), at_output.flip(1)) if key[0] == "backward" else (at_input, at_output)
    by_parameter = {id(weight): gradient for weight, gradient in zip(weights, gradients[len(ends) :], strict=True)}
    return loss.detach(), at_ends, by_parameter


def last_label_only(batch: Batch) -> Batch:
    """The same row with its last prediction only: the last token of a language model, the class of a classifier."""
    labels = dict(batch.labels)
    for head, values in batch.labels.items():
        if values.dim() == 2 and values.size(1) == batch.tokens.size(1):
            labels[head] = torch.full_like(values, IGNORE_INDEX)
            labelled = (values[0] != IGNORE_INDEX).nonzero()
            if head != "backward" and len(labelled):
                labels[head][0, labelled.max()] = values[0, labelled.max()]
    return replace(batch, labels=labels)


def layer_groups(layer: nn.Module) -> ParameterGroups:
    """The parameters of a recurrent layer by role."""
    assert isinstance(layer, RecurrentLayer)
    prefixes = {"input": "weight_ih", "recurrent": "weight_hh", "bias": "bias"}
    groups = {
        group: [parameter for name, parameter in layer.cells.named_parameters() if name.startswith(prefix)]
        for group, prefix in prefixes.items()
    }
    return groups | {"projection": [] if layer.project is None else list(layer.project.parameters())}
