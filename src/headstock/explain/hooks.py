"""Names the points inside a Transformer and writes down what passes them, without changing it.

B rows, T tokens, D width. `resid_pre` is the residual stream as a layer finds it, `resid_mid` after its attention,
`resid_cross` after its cross-attention (in decoders that have one), `resid_post` as it leaves the layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from headstock.errors import UserError
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.transformer import Transformer
from headstock.model.layers import Block, Residual
from headstock.model.model import Model

AFTER = {"attention": "resid_mid", "cross": "resid_cross", "feed": "resid_post"}  # the point behind each sublayer
SUBLAYERS = {"attention": "attention", "cross": "cross-attention", "feed": "feed-forward"}  # as people call them


class Point(NamedTuple):
    """The residual stream at one place."""

    stack: str
    layer: int  # from 1; what stands before layer 1 is the embedding
    name: str
    value: Tensor  # (B, T, D)


@dataclass(frozen=True)
class Connection:
    """One residual connection at work: what came, what its sublayer is, what left."""

    stack: str  # "stack" where there is one; "encoder" or "decoder" where there are two
    layer: int  # from 1
    sublayer: str  # a key of AFTER
    around: Residual
    given: Tensor  # (B, T, D) H; a view that nothing else uses, so that its gradient came through this connection
    function: Callable[[Tensor], Tensor]  # the sublayer, with the masks and memories it was called with
    made: Tensor  # (B, T, D) O


@dataclass
class Seen:
    """What passed while a model was watched."""

    connections: list[Connection] = field(default_factory=list)

    def points(self, stack: str | None = None) -> list[Point]:
        """The stream in the order in which it flows; `resid_pre` is told once, before the first layer of each stack.

        What leaves one layer is what the next one finds, so that a later layer's `resid_pre` is there already.
        """
        found = []
        for one in self.connections:
            if stack in (None, one.stack):
                if one.layer == 1 and one.sublayer == "attention":
                    found.append(Point(one.stack, 1, "resid_pre", one.given))
                found.append(Point(one.stack, one.layer, AFTER[one.sublayer], one.made))
        return found

    def point(self, stack: str, layer: int, name: str) -> Tensor:
        """(B, T, D) the stream at one named place."""
        for one in self.connections:
            if (one.stack, one.layer) == (stack, layer):
                if name == "resid_pre" and one.sublayer == "attention":
                    return one.given
                if AFTER[one.sublayer] == name:
                    return one.made
        raise KeyError((stack, layer, name))


def stacks_of(backbone: Backbone) -> dict[str, Transformer]:
    """The stacks of blocks of a model by name; none where it is not made of blocks."""
    if isinstance(backbone, EncoderDecoder):
        return {"encoder": backbone.encoder, "decoder": backbone.decoder}
    return {"stack": backbone} if isinstance(backbone, Transformer) else {}


def need_stacks(backbone: Backbone, run: object) -> dict[str, Transformer]:
    """The same, or a line that says why there are none."""
    if stacks := stacks_of(backbone):
        return stacks
    able = [name for name in BACKBONES.names() if issubclass(BACKBONES.get(name), Transformer | EncoderDecoder)]
    lacking = f"its {backbone.name} backbone has no residual stream"
    raise UserError(f"{run}: {lacking} (families that have one: {', '.join(able)})")


def connections_of(block: Block) -> dict[str, Residual]:
    """The residual connections of a block by what they go around, in the order in which they are passed."""
    parts = {"attention": block.around_attention, "cross": block.around_cross, "feed": block.around_feed}
    return {name: part for name, part in parts.items() if part is not None}


@contextmanager
def watching(model: Model) -> Iterator[Seen]:
    """While this is open, whatever the model reads is written down; no number it computes changes.

    >>> with watching(model) as seen:
    ...     model(batch)
    >>> seen.point("stack", 1, "resid_mid")  # (B, T, D)
    """
    seen, hooks = Seen(), []

    def alone(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, function = given
        return x.view_as(x), function

    def keeper(stack: str, layer: int, sublayer: str) -> Callable[..., None]:
        def keep(module: Any, given: tuple[Any, ...], output: Tensor) -> None:
            x, function = given
            seen.connections.append(Connection(stack, layer, sublayer, module, x, function, output))

        return keep

    for stack, transformer in stacks_of(model.backbone).items():
        for layer, block in enumerate(transformer.blocks, 1):
            assert isinstance(block, Block)
            for sublayer, around in connections_of(block).items():
                hooks.append(around.register_forward_pre_hook(alone))
                hooks.append(around.register_forward_hook(keeper(stack, layer, sublayer)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
