"""What is grafted onto a backbone.  B rows, T tokens, D width, V vocabulary, C classes."""

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


class LastTokenHead(nn.Module):
    """Class scores read from the last real token of each row."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        if padding is None:
            return self.linear(hidden[:, -1])
        last = (~padding).sum(1) - 1
        rows = torch.arange(hidden.size(0), device=hidden.device)
        return self.linear(hidden[rows, last])  # (B, T, D) -> (B, C)
