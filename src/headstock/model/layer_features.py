"""Which layers' vectors are used as features.  B rows, T tokens, D width, L layers."""

import torch
from torch import Tensor, nn

from headstock.errors import UserError, did_you_mean
from headstock.model.backbone import Backbone
from headstock.model.batch import Output

CHOICES = ("last", "sum4", "concat4", "mix")
TOP_LAYERS = 4  # layers that sum4 adds and concat4 concatenates


def check_layers(layers: str, depth: int) -> None:
    """Raise a UserError if a model of this depth does not have these layers."""
    if layers.isdecimal():
        if int(layers) > depth:
            raise UserError(f"layers: {layers} is more than the model's {depth} (0 is the embedding)")
    elif layers not in CHOICES:
        expected = f"must be one of {', '.join(CHOICES)} or a layer's number"
        raise UserError(f"layers: {expected}, not {layers!r}{did_you_mean(layers, CHOICES)}")
    elif layers in ("sum4", "concat4") and depth < TOP_LAYERS:
        raise UserError(f"layers: {layers} needs {TOP_LAYERS} layers, this model has {depth}")


def feature_width(width: int, layers: str) -> int:
    return TOP_LAYERS * width if layers == "concat4" else width


def select_layers(backbone: Backbone, output: Output, layers: str) -> Tensor:
    """(B, T, D), for concat4 (B, T, 4 D), or for mix all layers (B, T, L + 1, D).

    Every layer passes through the final norm, if there is one, so that all are on one scale and the number of the last
    layer means the same as `last`.
    """
    if layers == "last":
        return output.hidden
    if layers.isdecimal():
        return backbone.output_norm(output.layers[int(layers)])
    if layers == "mix":
        return torch.stack([backbone.output_norm(layer) for layer in output.layers], -2)
    top = [backbone.output_norm(layer) for layer in output.layers[-TOP_LAYERS:]]
    return torch.stack(top).sum(0) if layers == "sum4" else torch.cat(top, -1)


class ScalarMix(nn.Module):
    """ELMo's scalar mix: a learned weighted mean of all layers times a learned scale; initially the plain mean."""

    def __init__(self, layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, vectors: Tensor) -> Tensor:
        weights = self.weights.softmax(0)[:, None]
        return self.gamma * (weights * vectors).sum(-2)  # (..., L, D) -> (..., D)
