"""Two causal Transformers, one for each direction.  B rows, T tokens, W width of each, D = 2 W.

The Transformer counterpart of ELMo: neither direction sees the other below the output, which is what masked language
modelling was proposed to improve on.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch, DecodingState, Output


@dataclass(frozen=True, kw_only=True)
class BidirectionalTransformerConfig(TransformerConfig):
    """Each direction has `depth` blocks of `width` features."""


@BACKBONES.add("bitransformer")
class BidirectionalTransformer(Backbone):
    """The first half of a token's vector depends on the tokens up to it, the second half on those from it on."""

    Config = BidirectionalTransformerConfig
    supports_onnx = False
    causal = False
    is_bilm = True

    def __init__(self, config: BidirectionalTransformerConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = 2 * c.width, c.depth, c.context
        stack = TransformerConfig(**(vars(c) | {"causal": True}))
        self.forwards, self.backwards = Transformer(stack), Transformer(stack)
        self.tokens = self.backwards.tokens = self.forwards.tokens

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        shared = {id(parameter) for parameter in self.tokens.parameters()}
        pairs = zip(self.forwards.parameters_by_layer(), self.backwards.parameters_by_layer(), strict=True)
        return [[*one, *(p for p in other if id(p) not in shared)] for one, other in pairs]

    def new_state(self, rows: int, capacity: int) -> DecodingState:
        raise ValueError("a model that also reads backward cannot continue a text")

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        assert state is None, "a model that also reads backward cannot continue a text"
        batch = replace(batch, causal=None)
        forwards = self.forwards(batch, keep_layers=keep_layers)
        backwards = self.backwards(reversed_rows(batch), keep_layers=keep_layers)

        def join(one: Tensor, other: Tensor) -> Tensor:
            return torch.cat([one, other.flip(1)], -1)  # (B, T, W) twice -> (B, T, D)

        layers = [join(one, other) for one, other in zip(forwards.layers, backwards.layers, strict=True)]
        return Output(join(forwards.hidden, backwards.hidden), layers)

    def output_norm(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([self.forwards.output_norm(one), self.backwards.output_norm(other)], -1)


def reversed_rows(batch: Batch) -> Batch:
    """Every row from right to left. Padding, then on the left, becomes a document of its own."""
    documents = torch.zeros_like(batch.tokens) if batch.document_ids is None else batch.document_ids
    if batch.padding is not None:
        documents = documents.masked_fill(batch.padding, -1)
    documents = documents.flip(1)
    index = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = index.masked_fill(~is_first, 0).cummax(1).values  # where the document of each token begins
    whole = batch.document_ids is None and batch.padding is None
    return Batch(
        batch.tokens.flip(1),
        document_ids=None if whole else documents,
        positions=index - begins,
        segments=None if batch.segments is None else batch.segments.flip(1),
    )
