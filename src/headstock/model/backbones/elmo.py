"""ELMo: a forward and a backward language model over one embedding.  B rows, T tokens, W width of each, D = 2 W."""

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


@dataclass(frozen=True)
class ElmoConfig(RecurrentConfig):
    """Each direction has `depth` layers of `hidden` cells and `width` outputs."""


@BACKBONES.add("elmo")
class Elmo(Backbone):
    """The first half of a token's vector depends on the tokens up to it, the second half on those from it on."""

    Config = ElmoConfig
    supports_onnx = False
    causal = False
    is_bilm = True
    supports_compile = False
    supports_fsdp = False  # torch's recurrent layers keep references to whole weights

    def __init__(self, config: ElmoConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = 2 * c.width, c.depth, c.context
        self.tokens = make_embedding(c)
        self.dropout = make_dropout(c)
        self.ahead, self.back = RecurrentStack(c), RecurrentStack(c)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        layers = zip(self.ahead.layers, self.back.layers, strict=True)
        return [list(self.tokens.parameters()), *([*ahead.parameters(), *back.parameters()] for ahead, back in layers)]

    def new_state(self, rows: int, capacity: int) -> DecodingState:
        raise ValueError("a model that also reads backward cannot continue a text")

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None, "a model that also reads backward cannot continue a text"
        x = self.dropout(self.tokens(batch.tokens))  # (B, T) -> (B, T, W)
        directions = zip(self.read_forward(x, batch), self.read_backward(x, batch), strict=True)
        layers = [torch.cat(pair, -1) for pair in directions]  # (B, T, D)
        return Output(layers[-1], [torch.cat([x, x], -1), *layers] if keep_layers else [])

    def read_forward(self, x: Tensor, batch: Batch) -> list[Tensor]:
        return self.ahead(x)[0] if batch.document_ids is None else run_by_document(self.ahead, x, batch)

    def read_backward(self, x: Tensor, batch: Batch) -> list[Tensor]:
        if batch.document_ids is None and batch.padding is None:
            return [layer.flip(1) for layer in self.back(x.flip(1))[0]]
        return run_by_document(self.back, x, batch, backward=True)
