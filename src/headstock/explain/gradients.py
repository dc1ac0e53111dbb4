"""Gradients of one backward pass: at every point of the residual stream, in every layer and in its parameters.

B rows, T tokens, D width. H is the input of a residual connection, F its sublayer, N its norm, O its output.

Pre-norm, O = H + F(N(H)):     dL/dH = dL/dO + dL/dO . d F(N(H))/dH
Post-norm, O = N(H + F(H)):    dL/dH = dL/dS + dL/dS . d F(H)/dH,  where S = H + F(H) and dL/dS = dL/dO . dN(S)/dS
No norm, O = H + F(H):         dL/dH = dL/dO + dL/dO . d F(H)/dH

The first term is the gradient through the skip connection. Post-norm places a norm in its way.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.explain.document import Check
from headstock.explain.hooks import block_stacks
from headstock.explain.inputs import ExplainTarget
from headstock.explain.residual_connections import (
    Ablation,
    Activations,
    Connection,
    ParameterGroups,
    cosine,
    group_norms,
    record_activations,
    vector_norm,
    without_residuals,
)
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.layers import Block, NormPlacement
from headstock.model.model import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionGradients:
    """The two terms of dL/dH at one residual connection; all norms are over all rows and tokens."""

    stack: str
    layer: int
    sublayer: str
    received: float  # |dL/dO|
    skip: float  # norm of the term through the skip
    through: float  # norm of the term through the sublayer
    cosine: float  # of the two terms
    passed: float  # |dL/dH|, from the whole backward pass
    error: float  # of the sum of both terms, relative to |dL/dH|


@dataclass(frozen=True)
class LayerGradients:
    stack: str
    layer: int
    received: float  # |dL/d resid_post|
    passed: float  # |dL/d resid_pre|
    parameters: dict[str, float]  # gradient norm of each group of parameters


@dataclass(frozen=True)
class StreamGradient:
    """The gradient norm at one point of the residual stream."""

    stack: str
    layer: int
    point: str
    gradient: float


@dataclass(frozen=True)
class AblatedGradients:
    """The same weights without residual connections."""

    what: Ablation
    loss: float
    received: list[float]  # gradient norms at the points of `GradientFacts.stream`


@dataclass(frozen=True)
class DepthGradients:
    """A freshly initialized model of some depth: its gradient norms at the top and at the bottom of the stack."""

    norm: Literal["pre", "post"]
    without: Ablation | None  # which ablation of the residual connections
    depth: int
    top: float  # |dL/d resid_post| of the last layer
    bottom: float  # |dL/d resid_pre| of the first

    @property
    def share(self) -> float:
        """The gradient at the bottom relative to the top."""
        return self.bottom / self.top if self.top else 0.0


@dataclass(frozen=True)
class GradientFacts:
    loss: float
    target: str  # what the loss is computed over
    norm: NormPlacement
    residual: bool  # whether the model has skip connections
    layers: list[LayerGradients]
    connections: list[ConnectionGradients]
    stream: list[StreamGradient]
    parameters: dict[str, float]  # outside the layers: embedding, final norm, heads
    ablations: list[AblatedGradients]
    depths: list[DepthGradients] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The largest error of any connection."""
        return max(connection.error for connection in self.connections)

    def check(self) -> Check:
        claim = "at every residual connection the two terms add up to dL/dH"
        return Check(claim, self.error < 1e-6, f"largest relative error {self.error:.1e}")

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {"wanted": values.pop("target")} | values | {"error": self.error}


def explain_gradients(model: Model, target: ExplainTarget) -> GradientFacts:
    """The gradients of a run's own loss in double precision, with and without residual connections."""
    model = trainable_copy(model)
    result = backward(model, target.loss)
    connections = result.activations.connections
    layers = []
    for stack, transformer in block_stacks(model.backbone).items():
        for number, block in enumerate(transformer.blocks, 1):
            assert isinstance(block, Block)
            inside = [
                connection for connection in connections if (connection.stack, connection.layer) == (stack, number)
            ]
            received, passed = (vector_norm(result.at(tensor)) for tensor in (inside[-1].output, inside[0].input))
            norms = group_norms(block_groups(block), result.gradients)
            layers.append(LayerGradients(stack, number, received, passed, norms))
    return GradientFacts(
        loss=float(result.loss),
        target=target.description,
        norm=model.backbone.config.norm,
        residual=model.backbone.config.residual,
        layers=layers,
        connections=[split_gradient(connection, result) for connection in connections],
        stream=[
            StreamGradient(point.stack, point.layer, point.name, vector_norm(result.at(point.value)))
            for point in result.activations.points()
        ],
        parameters=group_norms(outer_groups(model), result.gradients),
        ablations=[ablated_gradients(model, target, ablation) for ablation in ("skip", "skip-gradient")],
        notes=list(target.notes),
    )


def trainable_copy(model: Model) -> Model:
    """A copy in double precision with gradients for all parameters; the model itself is left unchanged."""
    return copy.deepcopy(model).double().eval().requires_grad_(True)


@dataclass(frozen=True)
class BackwardResult:
    loss: Tensor
    activations: Activations
    gradients: dict[int, Tensor]  # by the id of a parameter, or of a tensor in `activations`

    def at(self, tensor: Tensor) -> Tensor:
        return self.gradients[id(tensor)]


def backward(model: Model, loss_of: Any) -> BackwardResult:
    """The loss with its gradients at every point of the residual stream and in every parameter."""
    with torch.enable_grad(), record_activations(model) as activations:
        loss = loss_of(model)
    tensors = [tensor for item in activations.connections for tensor in (item.input, item.output)]
    tensors += list(model.parameters())
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
    by_id = {id(tensor): gradient for tensor, gradient in zip(tensors, gradients, strict=True)}
    return BackwardResult(loss.detach(), activations, by_id)


def split_gradient(connection: Connection, result: BackwardResult) -> ConnectionGradients:
    """The two terms of dL/dH, compared with dL/dH of the whole backward pass."""
    received, passed = result.at(connection.output), result.at(connection.input)
    skip, through = gradient_terms(connection, received)
    return ConnectionGradients(
        connection.stack,
        connection.layer,
        connection.sublayer,
        received=vector_norm(received),
        skip=vector_norm(skip),
        through=vector_norm(through),
        cosine=cosine(skip, through),
        passed=vector_norm(passed),
        error=vector_norm(skip + through - passed) / max(vector_norm(passed), 1e-300),
    )


def gradient_terms(connection: Connection, received: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, D) twice: the gradient through the skip and through the sublayer, by vector-Jacobian products."""
    with torch.enable_grad():
        x, residual = connection.input.detach().requires_grad_(), connection.residual
        added = connection.function(x if residual.post else residual.norm(x))
        if residual.post:
            total = (x + added if residual.skip else added).detach().requires_grad_()
            (received,) = torch.autograd.grad(residual.norm(total), total, received)
        (through,) = torch.autograd.grad(added, x, received)
    return (received if residual.skip else torch.zeros_like(received)), through


def ablated_gradients(model: Model, target: ExplainTarget, ablation: Ablation) -> AblatedGradients:
    result = backward(without_residuals(model, ablation), target.loss)
    norms = [vector_norm(result.at(point.value)) for point in result.activations.points()]
    return AblatedGradients(ablation, float(result.loss), norms)


# Groups of parameters


def block_groups(block: Block) -> ParameterGroups:
    """The parameters of a block by sublayer."""
    groups: ParameterGroups = {}
    for name, attention in (("attention", block.attention), ("cross-attention", block.cross)):
        if attention is not None:
            groups[f"{name} in"] = list(attention.inputs.parameters())
            groups[f"{name} out"] = list(attention.output.parameters())
    groups["feed-forward"] = list(block.feed.parameters())
    used = {id(parameter) for group in groups.values() for parameter in group}
    return groups | {"norms": [parameter for parameter in block.parameters() if id(parameter) not in used]}


def outer_groups(model: Model) -> ParameterGroups:
    """The parameters outside the blocks; weights that a head shares with the embedding count as the embedding's."""
    inside = {id(p) for stack in block_stacks(model.backbone).values() for b in stack.blocks for p in b.parameters()}
    groups: ParameterGroups = {}
    for name, transformer in block_stacks(model.backbone).items():
        prefix = "" if name == "stack" else f"{name} "
        final = [] if transformer.final_norm is None else list(transformer.final_norm.parameters())
        excluded = inside | {id(parameter) for parameter in final}
        groups[f"{prefix}embedding"] = [p for p in transformer.parameters() if id(p) not in excluded]
        if final:
            groups[f"{prefix}final norm"] = final
    used = inside | {id(parameter) for group in groups.values() for parameter in group}
    for name, head in model.heads.items():
        if own := [parameter for parameter in head.parameters() if id(parameter) not in used]:
            groups[f"{name} head"] = own
    return groups


# Fresh models of many depths

DEPTHS = (2, 4, 8, 16, 32, 48)
VOCABULARY, ROWS, LENGTH = 256, 4, 24
SMALL_SIZES = {"vocabulary": VOCABULARY, "context": LENGTH, "width": 48, "heads": 4, "hidden": 96, "dropout": 0.0}
COPIED_SETTINGS = ("norm_kind", "positions", "activation", "bias", "embed_scale", "embed_norm", "qk_norm", "causal")


def block_settings(config: Any) -> dict[str, Any]:
    """The settings that define a run's kind of block, apart from its size and the position of its norms."""
    return {name: getattr(config, name) for name in COPIED_SETTINGS if hasattr(config, name)}


def depth_study(settings: dict[str, Any], *, depths: Sequence[int] = DEPTHS, seed: int = 0) -> list[DepthGradients]:
    """How the gradient of fresh models in double precision reaches the bottom: by depth, norm and ablation."""
    study = []
    for depth in depths:
        for norm in ("pre", "post"):
            model = fresh_model(settings | {"norm": norm, "depth": depth}, seed=seed)
            for ablation in (None, "skip", "skip-gradient"):
                ablated = model if ablation is None else without_residuals(model, ablation)
                study.append(DepthGradients(norm, ablation, depth, *end_gradients(ablated, seed)))
        logger.info("depth %d: pre-norm and post-norm, with and without residual connections", depth)
    return study


def fresh_model(settings: dict[str, Any], *, seed: int) -> Model:
    """A small initialized model; the global random state is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Transformer(TransformerConfig(**(SMALL_SIZES | settings)))
        return Model(backbone, {"token": LMHead(backbone)}).double().eval()


def end_gradients(model: Model, seed: int) -> tuple[float, float]:
    """Gradient norms of a next-token loss on random tokens, at the top and at the bottom of the stack."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)

    def loss(model: Model) -> Tensor:
        logits = model.heads["token"](model(Batch(tokens[:, :-1])).hidden)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    result = backward(model, loss)
    points = result.activations.points()
    return vector_norm(result.at(points[-1].value)), vector_norm(result.at(points[0].value))
