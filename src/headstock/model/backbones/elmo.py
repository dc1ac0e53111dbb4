"""ELMo: one language model that reads forward and one that reads backward, side by side over the same embedding.

B rows, T tokens, W width of each direction, D = 2 W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.recurrent import (
    RecurrentConfig,
    RecurrentStack,
    make_dropout,
    make_embedding,
    run_by_document,
)
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost, recurrent_layers, table


@dataclass(frozen=True)
class ElmoConfig(RecurrentConfig):
    """Each direction has `depth` layers of `hidden` cells; `width` is that of one direction."""


@BACKBONES.add("elmo")
class Elmo(Backbone):
    """The first half of a token's vector has read up to it, the second half has read from the end back to it."""

    Config = ElmoConfig
    causal = False
    bidirectional = True
    supports_compile = False  # as with the recurrent ones

    def __init__(self, config: ElmoConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = 2 * c.width, c.depth, c.context
        self.tokens = make_embedding(c)
        self.dropout = make_dropout(c)
        self.ahead, self.back = RecurrentStack(c), RecurrentStack(c)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        layers = zip(self.ahead.layers, self.back.layers, strict=True)
        return [list(self.tokens.parameters()), *([*one.parameters(), *other.parameters()] for one, other in layers)]

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        layers = recurrent_layers("layers", self.config, d, place)
        ways = (ModuleCost(name, parts=(layers,)) for name in ("ahead", "back"))
        return ModuleCost("backbone", parts=(table("tokens", d.vocabulary, d.width), *ways))

    def new_state(self, rows: int, capacity: int) -> DecodingState:
        raise ValueError("a model that also reads backward has no state from which a text could go on")

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None, "a text that is read backward cannot go on"
        x = self.dropout(self.tokens(batch.tokens))  # (B, T) -> (B, T, W)
        both = zip(self.read_ahead(x, batch), self.read_back(x, batch), strict=True)
        layers = [torch.cat(pair, -1) for pair in both]  # (B, T, D)
        return Output(layers[-1], [torch.cat([x, x], -1), *layers] if keep_layers else [])

    def read_ahead(self, x: Tensor, batch: Batch) -> list[Tensor]:
        return self.ahead(x)[0] if batch.document_ids is None else run_by_document(self.ahead, x, batch)

    def read_back(self, x: Tensor, batch: Batch) -> list[Tensor]:
        if batch.document_ids is None and batch.padding is None:
            return [layer.flip(1) for layer in self.back(x.flip(1))[0]]
        return run_by_document(self.back, x, batch, backward=True)
