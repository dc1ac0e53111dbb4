"""Heads that turn a backbone's vectors into predictions.  B rows, T tokens, D width, V vocabulary, C classes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.layer_features import ScalarMix
from headstock.model.layers import ACTIVATIONS, make_norm


class LMHead(nn.Module):
    """Logits over the vocabulary, optionally with the weight tied to the token embedding.

    With `transform` it is BERT's: one more layer before the logits, and a bias even if tied.
    """

    def __init__(self, backbone: Backbone, *, transform: bool = False):
        super().__init__()
        config = backbone.config
        self.transform = LMHeadTransform(backbone) if transform else None
        self.tied = config.tied
        self.int8: Callable[[Tensor], Tensor] | None = None  # the same layer in int8: see kernels/int8.py
        if config.tied:
            self.weight = backbone.tokens.weight
            self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if transform else None
        else:
            bias = transform or getattr(config, "bias", True)  # not a setting of every family
            linear = nn.Linear(backbone.tokens.embedding_dim, config.vocabulary, bias=bias)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.transformed(hidden)
        return F.linear(hidden, self.weight, self.bias) if self.int8 is None else self.int8(hidden)  # (..., V)

    def transformed(self, hidden: Tensor) -> Tensor:
        return hidden if self.transform is None else self.transform(hidden)


class LMHeadTransform(nn.Module):
    """A linear layer with the backbone's activation and norm, as in BERT's prediction head.

    `inputs` is the width of its input, if it is not that of the backbone.
    """

    def __init__(self, backbone: Backbone, *, inputs: int | None = None):
        super().__init__()
        config = backbone.config
        self.dense = nn.Linear(inputs or backbone.width, backbone.width, bias=config.bias)
        self.norm = make_norm(config)
        self.activation = ACTIVATIONS[config.activation]
        if self.dense.bias is not None:
            nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))  # (..., D) -> (..., D)


class NextSentenceHead(nn.Module):
    """Whether the second text follows the first (class 1) or not (0), from the vector of the first token."""

    def __init__(self, width: int):
        super().__init__()
        self.pooler, self.linear = nn.Linear(width, width), nn.Linear(width, 2)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.pooler.bias)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.linear(self.pooler(vectors).tanh())  # (N, D) -> (N, 2)


Pooling = Literal["last", "cls", "mean", "max", "concat"]
HeadActivation = Literal["none", "tanh", "relu", "gelu"]
HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}


class ClassificationHead(nn.Module):
    """Logits over classes from one vector, or from one vector of every layer through a learned mix.

    Unless `dense` is none, a linear layer with this activation comes first: tanh in BERT's classifiers.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        dropout: float = 0.0,
        mixed: int | None = None,
        dense: HeadActivation = "none",
        bias: bool = True,
    ):
        super().__init__()
        self.mix = ScalarMix(mixed) if mixed else None  # of this many layers
        self.dense = None if dense == "none" else nn.Linear(width, width)
        self.activation = HEAD_ACTIVATIONS.get(dense)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes, bias=bias)
        nn.init.normal_(self.linear.weight, std=0.02)
        for layer in (self.dense, self.linear):
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        if self.mix is not None:
            vectors = self.mix(vectors)  # (..., L, D) -> (..., D)
        if self.dense is not None and self.activation is not None:
            vectors = self.activation(self.dense(vectors))
        return self.linear(self.dropout(vectors))  # (..., D) -> (..., C)


class RegressionHead(ClassificationHead):
    """One number in the units of the labels, (..., 1): the linear layer predicts it standardized."""

    def __init__(self, width: int, *, mean: float = 0.0, std: float = 1.0, **options: Any):
        super().__init__(width, 1, **options)
        self.mean, self.std = mean, std

    def forward(self, vectors: Tensor) -> Tensor:
        return super().forward(vectors).float() * self.std + self.mean


class OrdinalHead(nn.Module):
    """Log-probabilities of ordered classes by a cumulative link model (proportional odds, McCullagh 1980).

    One score f per row is compared with C - 1 increasing thresholds: P(class <= k) = sigmoid(threshold_k - f).
    `thresholds` are the initial ones.
    """

    def __init__(self, width: int, thresholds: Sequence[float], **options: Any):
        super().__init__()
        self.score = ClassificationHead(width, 1, **options | {"bias": False})
        initial = torch.tensor(thresholds)
        self.first = nn.Parameter(initial[:1].clone())
        self.log_gaps = nn.Parameter(initial.diff().log())

    @property
    def thresholds(self) -> Tensor:
        return torch.cat([self.first, self.first + self.log_gaps.exp().cumsum(0)])

    def forward(self, vectors: Tensor) -> Tensor:
        margins = self.thresholds - self.score(vectors).float()  # (..., C - 1), increasing
        below, above = F.logsigmoid(margins), F.logsigmoid(-margins)  # of the upper and of the lower threshold
        # log(sigmoid(b) - sigmoid(a)) = logsigmoid(b) + logsigmoid(-a) + log(1 - exp(a - b)), a < b
        between = below[..., 1:] + above[..., :-1] + torch.log(-torch.expm1(margins[..., :-1] - margins[..., 1:]))
        return torch.cat([below[..., :1], between, above[..., -1:]], -1)  # (..., C)


class SpanHead(ClassificationHead):
    """Two logits per token: start and end of a span."""

    def __init__(self, width: int, *, dropout: float = 0.0, mixed: int | None = None):
        super().__init__(width, 2, dropout=dropout, mixed=mixed)


def pool(hidden: Tensor, padding: Tensor | None, pooling: Pooling) -> Tensor:
    """One vector per row, without padding: (B, T, D) -> (B, D), or (B, 3 D) for concat.

    Further dimensions, such as that of layers, may lie between T and D.
    """
    if pooling == "concat":
        parts: tuple[Pooling, ...] = ("last", "mean", "max")
        return torch.cat([pool(hidden, padding, part) for part in parts], -1)
    if pooling == "cls":
        return hidden[:, 0]
    if padding is None:
        return hidden[:, -1] if pooling == "last" else hidden.mean(1) if pooling == "mean" else hidden.amax(1)
    lengths = (~padding).sum(1)
    if pooling == "last":
        return hidden[torch.arange(hidden.size(0), device=hidden.device), lengths - 1]
    mask = padding.view(*padding.shape, *[1] * (hidden.dim() - 2))
    if pooling == "max":
        return hidden.masked_fill(mask, -torch.inf).amax(1)
    return hidden.masked_fill(mask, 0).sum(1) / lengths.view(-1, *[1] * (hidden.dim() - 2))


def pooled_positions(batch: Batch, pooling: Pooling) -> Tensor | None:
    """(B,) the position that `pool` takes from each row; None if it combines several."""
    rows, length = batch.tokens.shape
    if pooling == "last" and batch.padding is not None:
        return (~batch.padding).sum(1) - 1
    position = {"cls": 0, "last": length - 1}.get(pooling)
    return None if position is None else torch.full((rows,), position, device=batch.tokens.device)


def pooled_width(width: int, pooling: Pooling) -> int:
    return 3 * width if pooling == "concat" else width
