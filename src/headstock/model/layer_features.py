"""Which layers' vectors stand for a token where they are used as features.  B rows, T tokens, D width, L layers."""

import torch
from torch import Tensor, nn

from headstock.errors import UserError, did_you_mean
from headstock.model.backbone import Backbone
from headstock.model.batch import Output

CHOICES = ("last", "sum4", "concat4", "mix")
FOUR = 4  # layers from the top that are added or put side by side


def check_layers(layers: str, depth: int) -> None:
    """Refuse what a model of so many layers cannot give."""
    if layers.isdecimal():
        if int(layers) > depth:
            raise UserError(f"layers: {layers} is more than the model's {depth} (0 is the embedding)")
    elif layers not in CHOICES:
        wanted = f"must be one of {', '.join(CHOICES)} or a layer's number"
        raise UserError(f"layers: {wanted}, not {layers!r}{did_you_mean(layers, CHOICES)}")
    elif layers in ("sum4", "concat4") and depth < FOUR:
        raise UserError(f"layers: {layers} needs {FOUR} layers, this model has {depth}")


def feature_width(width: int, layers: str) -> int:
    return FOUR * width if layers == "concat4" else width


def select_layers(backbone: Backbone, output: Output, layers: str) -> Tensor:
    """(B, T, D) of the layers asked for, (B, T, 4 D) for concat4, or all of them as (B, T, L + 1, D) for mix.

    Every layer leaves the backbone as the last one does (through the final norm, where there is one): all are then on
    one scale, and the last layer by its number is the same as `last`.
    """
    if layers == "last":
        return output.hidden
    if layers.isdecimal():
        return backbone.output_norm(output.layers[int(layers)])
    if layers == "mix":
        return torch.stack([backbone.output_norm(layer) for layer in output.layers], -2)
    top = [backbone.output_norm(layer) for layer in output.layers[-FOUR:]]
    return torch.stack(top).sum(0) if layers == "sum4" else torch.cat(top, -1)


class ScalarMix(nn.Module):
    """A weighted mean of all layers, whose weights and scale are learned (ELMo's scalar mix); at first a plain mean."""

    def __init__(self, layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        shares = self.weights.softmax(0)[:, None]
        return self.gamma * (shares * vectors).sum(-2)  # (..., L, D) -> (..., D)
