"""What is grafted onto a backbone.  B rows, T tokens, D width, V vocabulary, C classes."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost, SavedActivations, Size, linear, norm
from headstock.model.layer_features import ScalarMix
from headstock.model.layers import ACTIVATIONS, make_norm


class LMHead(nn.Module):
    """A score for every entry of the vocabulary; tied, it has no matrix of its own.

    With `transform` it is BERT's: one more layer before the scores, and a bias for every entry, tied or not.
    """

    def __init__(self, backbone: Backbone, *, transform: bool = False):
        super().__init__()
        config = backbone.config
        self.transform = LMHeadTransform(backbone) if transform else None
        self.tied = config.tied
        self.small: Callable[[Tensor], Tensor] | None = None  # the same scores in 8 bits: see int8.py
        if config.tied:
            self.weight = backbone.tokens.weight
            self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if transform else None
        else:
            bias = transform or getattr(config, "bias", True)  # not every family has it for a setting
            linear = nn.Linear(backbone.tokens.embedding_dim, config.vocabulary, bias=bias)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.transformed(hidden)
        return F.linear(hidden, self.weight, self.bias) if self.small is None else self.small(hidden)  # (..., V)

    def transformed(self, hidden: Tensor) -> Tensor:
        return hidden if self.transform is None else self.transform(hidden)

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        """Scores are kept in single precision by the loss."""
        whole = linear("", d.width, d.vocabulary, bias=self.bias is not None)
        shapes = {name: shape for name, shape in whole.shapes.items() if not (self.tied and name == "weight")}
        parts = () if self.transform is None else (self.transform.counted(d, place),)
        return ModuleCost(
            "", shapes, flops=whole.flops, kept=whole.kept + SavedActivations(single=d.vocabulary), parts=parts
        )


class LMHeadTransform(nn.Module):
    """A layer, bent and normed as the backbone's own are, that takes over what only guessing tokens needs."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        config = backbone.config
        self.dense = nn.Linear(backbone.width, backbone.width, bias=config.bias)
        self.norm = make_norm(backbone.width, config.norm_kind, bias=config.bias, epsilon=config.norm_epsilon)
        self.activation = ACTIVATIONS[config.activation]
        if self.dense.bias is not None:
            nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))  # (..., D) -> (..., D)

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        dense = linear("dense", d.width, d.width, bias=self.dense.bias is not None)
        kind = "layer" if isinstance(self.norm, nn.LayerNorm) else "rms"
        normed = norm("norm", d.width, kind, place, bias=self.dense.bias is not None)
        return ModuleCost("transform", kept=SavedActivations(d.width), parts=(dense, normed))


class NextSentenceHead(nn.Module):
    """Whether the second text follows the first, from the vector of the first mark: 0 it does not, 1 it does."""

    def __init__(self, width: int):
        super().__init__()
        self.pooler, self.linear = nn.Linear(width, width), nn.Linear(width, 2)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.pooler.bias)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.linear(self.pooler(vectors).tanh())  # (N, D) -> (N, 2)

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        return ModuleCost(
            "",
            parts=(linear("pooler", d.width, d.width), linear("linear", d.width, 2)),
            kept=SavedActivations(single=2),
        )


Pooling = Literal["last", "cls", "mean", "max", "concat"]
HeadActivation = Literal["none", "tanh", "relu", "gelu"]
BENDS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}


class ClassificationHead(nn.Module):
    """A score for every class, from one vector each; or from one of every layer, whose mix it learns too.

    Unless `dense` is none there is one more layer before the scores, bent so: BERT's classifiers have tanh.
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
        self.mix = ScalarMix(mixed) if mixed else None  # of so many layers
        self.dense = None if dense == "none" else nn.Linear(width, width)
        self.bend = BENDS.get(dense)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes, bias=bias)
        nn.init.normal_(self.linear.weight, std=0.02)
        for layer in (self.dense, self.linear):
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        if self.mix is not None:
            vectors = self.mix(vectors)  # (..., L, D) -> (..., D)
        if self.dense is not None and self.bend is not None:
            vectors = self.bend(self.dense(vectors))
        return self.linear(self.dropout(vectors))  # (..., D) -> (..., C)

    def counted(self, d: Dimensions, place: ExecutionContext, *, unit: int) -> ModuleCost:
        """`unit` is the width in numbers, of which its own input may be several side by side."""
        inputs = self.linear.in_features // unit * d.width
        outputs = self.outputs(d)
        mix: tuple[ModuleCost, ...] = ()
        if self.mix is not None:
            mix = (
                ModuleCost(
                    "mix",
                    {"weights": (d.depth + 1,), "gamma": ()},
                    kept=SavedActivations(single=(d.depth + 1) * inputs),
                ),
            )
        dropped = SavedActivations(dropped=inputs) if self.dropout.p else SavedActivations()
        dense = () if self.dense is None else (linear("dense", inputs, inputs),)
        last = linear("linear", inputs, outputs, bias=self.linear.bias is not None)
        bent = SavedActivations(inputs) if dense else SavedActivations()
        return ModuleCost("", parts=(*mix, *dense, last), kept=SavedActivations(single=outputs) + dropped + bent)

    def outputs(self, d: Dimensions) -> Size:
        return d.classes


class SpanHead(ClassificationHead):
    """Two scores for every token: as the first of a span, and as its last."""

    def __init__(self, width: int, *, dropout: float = 0.0, mixed: int | None = None):
        super().__init__(width, 2, dropout=dropout, mixed=mixed)

    def outputs(self, d: Dimensions) -> Size:
        return 2


def pool(hidden: Tensor, padding: Tensor | None, how: Pooling) -> Tensor:
    """One vector a row out of one a token, padding never among them: (B, T, D) -> (B, D), or (B, 3 D) for concat.

    Between T and D may stand other dimensions, such as that of layers.
    """
    if how == "concat":
        parts: tuple[Pooling, ...] = ("last", "mean", "max")
        return torch.cat([pool(hidden, padding, part) for part in parts], -1)
    if how == "cls":
        return hidden[:, 0]
    if padding is None:
        return hidden[:, -1] if how == "last" else hidden.mean(1) if how == "mean" else hidden.amax(1)
    real = (~padding).sum(1)
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), real - 1]  # the last real token
    nowhere = padding.view(*padding.shape, *[1] * (hidden.dim() - 2))
    if how == "max":
        return hidden.masked_fill(nowhere, -torch.inf).amax(1)
    return hidden.masked_fill(nowhere, 0).sum(1) / real.view(-1, *[1] * (hidden.dim() - 2))


def pooled_positions(batch: Batch, how: Pooling) -> Tensor | None:
    """(B,) the one place of each row that is taken by this pooling; None where it takes several."""
    rows, length = batch.tokens.shape
    if how == "last" and batch.padding is not None:
        return (~batch.padding).sum(1) - 1
    where = {"cls": 0, "last": length - 1}.get(how)
    return None if where is None else torch.full((rows,), where, device=batch.tokens.device)


def pooled_width(width: int, how: Pooling) -> int:
    return 3 * width if how == "concat" else width
