"""One backward pass, and what flows where: through every residual connection, into every layer and its parameters.

B rows, T tokens, D width. H is what a residual connection is given, F its sublayer, N its norm, O what leaves it.

Pre-norm, O = H + F(N(H)):     dL/dH = dL/dO + dL/dO . d F(N(H))/dH
Post-norm, O = N(H + F(H)):    dL/dH = dL/dS + dL/dS . d F(H)/dH,  where S = H + F(H) and dL/dS = dL/dO . dN(S)/dS

The first term is what the skip brings back whatever the sublayer does. Post-norm puts a norm in its way, so that there
it is not dL/dO itself that goes down but what the norm lets through.
"""

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headstock.explain.ablation import Ablation, without_residuals
from headstock.explain.depth_study import AtDepth
from headstock.explain.hooks import AFTER, Connection, stacks_of, watching
from headstock.explain.targets import Asked
from headstock.explain.vectors import cosine, size
from headstock.model.layers import Block
from headstock.model.model import Model


@dataclass(frozen=True)
class Terms:
    """What one residual connection hands down, told apart; all lengths are Euclidean, over all rows and tokens."""

    stack: str
    layer: int
    sublayer: str
    received: float  # |dL/dO|
    skip: float  # the length of the term that goes around the sublayer
    through: float  # the length of the term that goes through it
    cosine: float  # between the two
    passed: float  # |dL/dH|, from the whole backward pass
    error: float  # of the sum of both terms against dL/dH, as a share of its length


@dataclass(frozen=True)
class LayerFlow:
    """What one layer receives from above, hands down and learns from."""

    stack: str
    layer: int
    received: float  # |dL/d resid_post|
    passed: float  # |dL/d resid_pre|
    parameters: dict[str, float]  # the length of the gradient of each group of parameters


@dataclass(frozen=True)
class Ablated:
    """The same weights without residual connections: what then reaches the stream at each point."""

    what: Ablation
    loss: float
    received: list[float]  # as in `Gradients.stream`


@dataclass(frozen=True)
class Gradients:
    """Everything that one backward pass shows."""

    loss: float
    wanted: str  # what the loss is that of
    norm: Literal["pre", "post"]
    layers: list[LayerFlow]
    connections: list[Terms]
    stream: list[tuple[str, int, str, float]]  # stack, layer, point, and the length of the gradient there
    parameters: dict[str, float]  # outside the layers: embedding, final norm, heads
    ablations: list[Ablated]
    depths: list[AtDepth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The largest error of any connection."""
        return max(terms.error for terms in self.connections)

    def facts(self) -> dict[str, Any]:
        named = ("stack", "layer", "point", "gradient")
        return asdict(self) | {"error": self.error, "stream": [dict(zip(named, p, strict=True)) for p in self.stream]}


def gradients(model: Model, asked: Asked) -> Gradients:
    """The gradients of a run's own loss, in double precision, with residual connections and without them."""
    exact = doubled(model)
    loss, received, seen, parameters = backward(exact, asked)
    terms = [split(one, received[id(one.made)], received[id(one.given)]) for one in seen]
    points = [(one.stack, one.layer, name, size(received[id(value)])) for one, name, value in along(seen)]
    layers = []
    for stack, transformer in stacks_of(exact.backbone).items():
        for number, block in enumerate(transformer.blocks, 1):
            assert isinstance(block, Block)
            mine = [one for one in seen if (one.stack, one.layer) == (stack, number)]
            ends = size(received[id(mine[-1].made)]), size(received[id(mine[0].given)])
            layers.append(LayerFlow(stack, number, *ends, lengths(groups_of(block), parameters)))
    return Gradients(
        loss=float(loss),
        wanted=asked.wanted,
        norm=exact.backbone.config.norm,
        layers=layers,
        connections=terms,
        stream=points,
        parameters=lengths(outside(exact), parameters),
        ablations=[ablated(exact, asked, what) for what in ("skip", "skip-gradient")],
        notes=list(asked.notes),
    )


def doubled(model: Model) -> Model:
    """A copy in double precision that can learn all it has; the model itself is left alone."""
    return copy.deepcopy(model).double().eval().requires_grad_(True)


def backward(model: Model, asked: Asked) -> tuple[Tensor, dict[int, Tensor], list[Connection], dict[int, Tensor]]:
    """The loss; its gradient at every point of the stream by the point's id; what was seen; and by parameter's id."""
    with torch.enable_grad(), watching(model) as seen:
        loss = asked.loss(model)
    ends = [tensor for one in seen.connections for tensor in (one.given, one.made)]
    weights = list(model.parameters())
    found = torch.autograd.grad(loss, [*ends, *weights], retain_graph=True, allow_unused=True, materialize_grads=True)
    at = {id(tensor): gradient for tensor, gradient in zip(ends, found, strict=False)}
    of = {id(weight): gradient for weight, gradient in zip(weights, found[len(ends) :], strict=True)}
    return loss.detach(), at, seen.connections, of


def along(seen: list[Connection]) -> Iterable[tuple[Connection, str, Tensor]]:
    """The named points of the stream in the order in which it flows."""
    for one in seen:
        if one.layer == 1 and one.sublayer == "attention":
            yield one, "resid_pre", one.given
        yield one, AFTER[one.sublayer], one.made


def split(one: Connection, received: Tensor, passed: Tensor) -> Terms:
    """The two terms of dL/dH, each by a vector-Jacobian product of its own, beside dL/dH of the whole backward pass."""
    skip, through = terms_of(one, received)
    error = size(skip + through - passed) / max(size(passed), 1e-300)
    lengths = size(received), size(skip), size(through), cosine(skip, through), size(passed)
    return Terms(one.stack, one.layer, one.sublayer, *lengths, error)


def terms_of(one: Connection, received: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, D) twice: what comes back around the sublayer and what comes back through it."""
    with torch.enable_grad():
        given = one.given.detach().requires_grad_()
        if one.around.post:
            added = one.function(given)
            total = (given + added).detach().requires_grad_()
            (skip,) = torch.autograd.grad(one.around.norm(total), total, received)
        else:
            added = one.function(one.around.norm(given))
            skip = received
        (through,) = torch.autograd.grad(added, given, skip)
    return skip, through


def ablated(model: Model, asked: Asked, what: Ablation) -> Ablated:
    """What reaches each point of the stream when no residual connection works."""
    loss, received, seen, _ = backward(without_residuals(model, what), asked)
    return Ablated(what, float(loss), [size(received[id(value)]) for _, _, value in along(seen)])


# Parameters


Groups = dict[str, list[nn.Parameter]]


def groups_of(block: Block) -> Groups:
    """The parameters of a block by what they do."""
    groups: Groups = {}
    for name, attention in (("attention", block.attention), ("cross-attention", block.cross)):
        if attention is not None:
            groups[f"{name} in"] = list(attention.inputs.parameters())
            groups[f"{name} out"] = list(attention.output.parameters())
    groups["feed-forward"] = list(block.feed.parameters())
    used = {id(parameter) for group in groups.values() for parameter in group}
    return groups | {"norms": [parameter for parameter in block.parameters() if id(parameter) not in used]}


def outside(model: Model) -> Groups:
    """The parameters that are in no block; a head that shares the embedding has only its own."""
    inside = {id(p) for stack in stacks_of(model.backbone).values() for b in stack.blocks for p in b.parameters()}
    groups: Groups = {}
    for name, transformer in stacks_of(model.backbone).items():
        prefix = "" if name == "stack" else f"{name} "
        final = [] if transformer.final_norm is None else list(transformer.final_norm.parameters())
        known = inside | {id(parameter) for parameter in final}
        groups[f"{prefix}embedding"] = [p for p in transformer.parameters() if id(p) not in known]
        if final:
            groups[f"{prefix}final norm"] = final
    taken = inside | {id(parameter) for group in groups.values() for parameter in group}
    for name, head in model.heads.items():
        if own := [parameter for parameter in head.parameters() if id(parameter) not in taken]:
            groups[f"{name} head"] = own
    return groups


def lengths(groups: Groups, of: dict[int, Tensor]) -> dict[str, float]:
    """The length of the gradient of each group, all its parameters taken as one vector."""
    return {
        name: sum(size(of[id(parameter)]) ** 2 for parameter in group) ** 0.5 for name, group in groups.items() if group
    }
