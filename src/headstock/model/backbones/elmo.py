"""ELMo: one language model that reads forward and one that reads backward, side by side over the same embedding.

B rows, T tokens, W width of each direction, D = 2 W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.recurrent import Layers, RecurrentConfig, apart, make_dropout, make_embedding
from headstock.model.batch import Batch, Output, State
from headstock.model.formulas import Dimensions, Part, Place, recurrent_layers, table


@dataclass(frozen=True)
class ElmoConfig(RecurrentConfig):
    """Each direction has `depth` layers of `hidden` cells; `width` is that of one direction."""


@BACKBONES.add("elmo")
class Elmo(Backbone):
    """The first half of a token's vector has read up to it, the second half has read from the end back to it."""

    Config = ElmoConfig
    causal = False
    both_ways = True
    compiles = False  # as with the recurrent ones

    def __init__(self, config: ElmoConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = 2 * c.width, c.depth, c.context
        self.tokens = make_embedding(c)
        self.dropout = make_dropout(c)
        self.ahead, self.back = Layers(c), Layers(c)

    def stages(self) -> list[list[nn.Parameter]]:
        layers = zip(self.ahead.layers, self.back.layers, strict=True)
        return [list(self.tokens.parameters()), *([*one.parameters(), *other.parameters()] for one, other in layers)]

    def counted(self, d: Dimensions, place: Place) -> Part:
        layers = recurrent_layers("layers", self.config, d, place)
        ways = (Part(name, parts=(layers,)) for name in ("ahead", "back"))
        return Part("backbone", parts=(table("tokens", d.vocabulary, d.width), *ways))

    def new_state(self, rows: int, capacity: int) -> State:
        raise ValueError("a model that also reads backward has no state from which a text could go on")

    def forward(self, batch: Batch, state: State | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None, "a text that is read backward cannot go on"
        x = self.dropout(self.tokens(batch.tokens))  # (B, T) -> (B, T, W)
        both = zip(self.read_ahead(x, batch), self.read_back(x, batch), strict=True)
        layers = [torch.cat(pair, -1) for pair in both]  # (B, T, D)
        return Output(layers[-1], [torch.cat([x, x], -1), *layers] if keep_layers else [])

    def read_ahead(self, x: Tensor, batch: Batch) -> list[Tensor]:
        return self.ahead(x)[0] if batch.documents is None else apart(self.ahead, x, batch)

    def read_back(self, x: Tensor, batch: Batch) -> list[Tensor]:
        if batch.documents is None and batch.padding is None:
            return [layer.flip(1) for layer in self.back(x.flip(1))[0]]
        return apart(self.back, x, batch, backward=True)
