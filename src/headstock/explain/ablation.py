"""Models without their residual connections, made from the same weights: what the skip is good for is seen without it.

T tokens, D width.
"""

import copy
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from headstock.explain.hooks import connections_of, stacks_of
from headstock.model.layers import Block, Residual, select_positions
from headstock.model.model import Model

Ablation = Literal["skip", "skip-gradient"]


class Unskipped(Residual):
    """The sublayer alone, normed where it was: nothing goes around it, forward or backward."""

    def __init__(self, residual: Residual):
        nn.Module.__init__(self)
        self.norm, self.post, self.dropout = residual.norm, residual.post, residual.dropout

    def around(self, x: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], *, only: Tensor | None = None) -> Tensor:
        own = x if only is None else select_positions(x, only)
        added = self.around(own) + sublayer(x if self.post else self.norm(x))
        return self.norm(added) if self.post else added


class Held(Unskipped):
    """What goes around the sublayer still goes forward, but no gradient comes back that way."""

    def around(self, x: Tensor) -> Tensor:
        return x.detach()


KINDS: dict[Ablation, type[Unskipped]] = {"skip": Unskipped, "skip-gradient": Held}


def without_residuals(model: Model, what: Ablation = "skip") -> Model:
    """A copy of a model, of the same weights, in which no residual connection works.

    Without the `skip` it computes something else, and its norms bring whatever is left back to their scale. Without
    the `skip-gradient` it computes what it always did, and only the way back is closed: dL/dH = dL/dO . dSA(H)/dH.
    """
    other = copy.deepcopy(model)
    for transformer in stacks_of(other.backbone).values():
        for block in transformer.blocks:
            assert isinstance(block, Block)
            for sublayer, around in connections_of(block).items():
                setattr(block, f"around_{sublayer}", KINDS[what](around))
    return other
