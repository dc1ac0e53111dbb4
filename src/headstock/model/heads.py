"""What is grafted onto a backbone.  B rows, T tokens, D width, V vocabulary, C classes."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.model.backbone import Backbone


class TokenHead(nn.Module):
    """A score for every entry of the vocabulary; tied, it has no weights of its own."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        config = backbone.config
        if config.tied:
            self.weight = backbone.tokens.weight
            self.register_parameter("bias", None)
        else:
            linear = nn.Linear(backbone.width, config.vocabulary, bias=config.bias)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)  # (..., D) -> (..., V)


Pool = Literal["last", "cls", "mean", "max", "concat"]


class ClassHead(nn.Module):
    """A score for every class, from one vector a text."""

    def __init__(self, width: int, classes: int, *, dropout: float = 0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.linear(self.dropout(vectors))  # (N, D) -> (N, C)


def pool(hidden: Tensor, padding: Tensor | None, how: Pool) -> Tensor:
    """One vector a row out of one a token, padding never among them: (B, T, D) -> (B, D), or (B, 3 D) for concat."""
    if how == "concat":
        parts: tuple[Pool, ...] = ("last", "mean", "max")
        return torch.cat([pool(hidden, padding, part) for part in parts], -1)
    if how == "cls":
        return hidden[:, 0]
    if padding is None:
        return hidden[:, -1] if how == "last" else hidden.mean(1) if how == "mean" else hidden.amax(1)
    if how == "max":
        return hidden.masked_fill(padding[..., None], -torch.inf).amax(1)
    real = (~padding).sum(1)
    if how == "mean":
        return hidden.masked_fill(padding[..., None], 0).sum(1) / real[:, None]
    return hidden[torch.arange(len(hidden), device=hidden.device), real - 1]  # the last real token


def pooled_width(width: int, how: Pool) -> int:
    return 3 * width if how == "concat" else width
