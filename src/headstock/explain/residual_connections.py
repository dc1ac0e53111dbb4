"""Records residual connections for their gradients, and builds ablated copies without skip connections.

B rows, T tokens, D width. `resid_pre` is the residual stream that enters a layer, `resid_mid` the stream after its
attention, `resid_cross` after its cross-attention (in decoders that have one), `resid_post` the stream that leaves it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from headstock.explain.hooks import POINT_AFTER, block_stacks
from headstock.model.layers import Residual
from headstock.model.model import Model


class StreamPoint(NamedTuple):
    """The residual stream at one named point."""

    stack: str
    layer: int  # from 1
    name: str
    value: Tensor  # (B, T, D)


@dataclass(frozen=True)
class Connection:
    """One residual connection during a forward pass."""

    stack: str  # "stack"; "encoder" or "decoder" where there are two
    layer: int  # from 1
    sublayer: str  # a key of POINT_AFTER
    residual: Residual
    input: Tensor  # (B, T, D) H; a view used nowhere else, so that its gradient came through this connection
    function: Callable[[Tensor], Tensor]  # the sublayer, with the masks and memories of this pass
    output: Tensor  # (B, T, D) O

    def added(self) -> Tensor:
        """(B, T, D) what the sublayer adds to its input, recomputed: post-norm does not expose it."""
        return self.function(self.input if self.residual.post else self.residual.norm(self.input))


@dataclass
class Activations:
    """The residual connections of a forward pass, in the order of computation."""

    connections: list[Connection] = field(default_factory=list)

    def points(self, stack: str | None = None) -> list[StreamPoint]:
        """The points in order; `resid_pre` once per stack, since a later one equals the `resid_post` before it."""
        points = []
        for connection in self.connections:
            if stack in (None, connection.stack):
                if connection.layer == 1 and connection.sublayer == "attention":
                    points.append(StreamPoint(connection.stack, 1, "resid_pre", connection.input))
                point = POINT_AFTER[connection.sublayer]
                points.append(StreamPoint(connection.stack, connection.layer, point, connection.output))
        return points


def model_residuals(model: Model) -> dict[tuple[str, int, str], Residual]:
    """The residual connections of a model by stack, layer (from 1) and sublayer, in the order of computation."""
    residuals = {}
    for stack, transformer in block_stacks(model.backbone).items():
        for layer, block in enumerate(transformer.blocks, 1):
            for sublayer in POINT_AFTER:
                if (residual := getattr(block, f"around_{sublayer}")) is not None:
                    residuals[stack, layer, sublayer] = residual
    return residuals


@contextmanager
def record_calls(modules: Mapping[Any, nn.Module], record: Callable[..., None]) -> Iterator[None]:
    """Call `record(key, inputs, options, output)` whenever a module returns; nothing the model computes changes.

    The first input is a view that is used nowhere else, so that its gradient came through the module.
    """

    def separate_input(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return (inputs[0].view_as(inputs[0]), *inputs[1:]), options

    def recorder(key: Any) -> Callable[..., None]:
        return lambda module, inputs, options, output: record(key, inputs, options, output)

    handles = []
    for key, module in modules.items():
        handles.append(module.register_forward_pre_hook(separate_input, with_kwargs=True))
        handles.append(module.register_forward_hook(recorder(key), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_activations(model: Model) -> Iterator[Activations]:
    """Record every residual connection while the context is open.

    >>> with record_activations(model) as activations:
    ...     model(batch)
    >>> activations.connections[0].output  # (B, T, D)
    """
    activations, residuals = Activations(), model_residuals(model)

    def record(key: tuple[str, int, str], inputs: tuple[Any, ...], options: Any, output: Tensor) -> None:
        x, function = inputs
        activations.connections.append(Connection(*key, residuals[key], x, function, output))

    with record_calls(residuals, record):
        yield activations


# Ablation

Ablation = Literal["skip", "skip-gradient"]


class WithoutSkip(Residual):
    """The sublayer and its norm without the skip connection."""

    def __init__(self, residual: Residual):
        nn.Module.__init__(self)
        self.norm, self.post, self.dropout, self.skip = residual.norm, residual.post, residual.dropout, False


class WithoutSkipGradient(WithoutSkip):
    """The skip connection works forward, but no gradient flows back through it."""

    def combine(self, x: Tensor, update: Tensor) -> Tensor:
        total = x.detach() + update
        return self.norm(total) if self.post else total


ABLATIONS: dict[Ablation, type[WithoutSkip]] = {"skip": WithoutSkip, "skip-gradient": WithoutSkipGradient}


def without_residuals(model: Model, ablation: Ablation = "skip") -> Model:
    """A copy of a model with the same weights and without its skip connections.

    Without "skip" it computes something else, rescaled by its norms. Without "skip-gradient" the forward pass is
    unchanged, and dL/dH = dL/dO . dF(H)/dH.
    """
    ablated = copy.deepcopy(model)
    stacks = block_stacks(ablated.backbone)
    for (stack, layer, sublayer), residual in model_residuals(ablated).items():
        setattr(stacks[stack].blocks[layer - 1], f"around_{sublayer}", ABLATIONS[ablation](residual))
    return ablated


# Norms


def vector_norm(tensor: Tensor) -> float:
    """The Euclidean norm of all elements, also where they are too small to be squared."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest * float((tensor / largest).norm()) if largest else 0.0


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of two tensors as vectors; 0 where one of them is zero."""
    largest = float(a.abs().max()), float(b.abs().max())
    if not all(largest):
        return 0.0
    a, b = a / largest[0], b / largest[1]
    return float((a * b).sum() / (a.norm() * b.norm()))


ParameterGroups = dict[str, list[nn.Parameter]]


def group_norms(groups: ParameterGroups, gradients: dict[int, Tensor]) -> dict[str, float]:
    """The gradient norm of each group of parameters; `gradients` by the id of the parameter."""
    return {
        name: sum(vector_norm(gradients[id(parameter)]) ** 2 for parameter in group) ** 0.5
        for name, group in groups.items()
        if group
    }
