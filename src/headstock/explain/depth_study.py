"""How far a gradient comes down through fresh models of many depths: pre-norm and post-norm, with the skip and without.

B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch.nn import functional as F

from headstock.explain.ablation import Ablation, without_residuals
from headstock.explain.hooks import stacks_of, watching
from headstock.explain.vectors import size
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model

DEPTHS = (2, 4, 8, 16, 32, 48)
VOCABULARY, ROWS, LENGTH = 256, 4, 24
SIZES = {"vocabulary": VOCABULARY, "context": LENGTH, "width": 48, "heads": 4, "hidden": 96, "dropout": 0.0}
KEPT = ("norm_kind", "positions", "activation", "bias", "embed_scale", "embed_norm", "qk_norm", "causal")


@dataclass(frozen=True)
class AtDepth:
    """One fresh model: how long the gradient is at the top of its stack and at the bottom."""

    norm: Literal["pre", "post"]
    without: Ablation | None  # what of the residual connections does not work
    depth: int
    top: float  # |dL/d resid_post| of the last layer
    bottom: float  # |dL/d resid_pre| of the first

    @property
    def share(self) -> float:
        """What is left at the bottom of what came in at the top."""
        return self.bottom / self.top if self.top else 0.0


def settings_like(config: Any) -> dict[str, Any]:
    """What a small fresh model takes over from a run's: all but its size, its depth and the place of its norms."""
    known = {one.name for one in fields(config)}
    return {name: getattr(config, name) for name in KEPT if name in known}


def depth_study(
    settings: dict[str, Any],
    *,
    depths: Sequence[int] = DEPTHS,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[AtDepth]:
    """Fresh models of each depth, in double precision, on the same random tokens: how their first gradient flows."""
    found = []
    for depth in depths:
        for norm in ("pre", "post"):
            model = fresh(settings | {"norm": norm, "depth": depth}, seed=seed)
            for without in (None, "skip", "skip-gradient"):
                other = model if without is None else without_residuals(model, without)
                found.append(AtDepth(norm, without, depth, *ends_of(other, seed)))
        say(f"depth {depth}: pre-norm and post-norm, with residual connections and without")
    return found


def fresh(settings: dict[str, Any], *, seed: int) -> Model:
    """A small model with the weights it is born with; the generator of others is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = Transformer(TransformerConfig(**(SIZES | settings)))
        return Model(backbone, {"token": LMHead(backbone)}).double().eval()


def ends_of(model: Model, seed: int) -> tuple[float, float]:
    """The length of the gradient of a next-token loss on random tokens, at the top of the stack and at the bottom."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    (stack,) = stacks_of(model.backbone)
    with torch.enable_grad(), watching(model) as seen:
        logits = model.heads["token"](model(Batch(tokens[:, :-1])).hidden)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    points = [point.value for point in seen.points(stack)]
    top, bottom = torch.autograd.grad(loss, [points[-1], points[0]])
    return size(top), size(bottom)
