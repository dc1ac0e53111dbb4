"""Stands where a frozen backbone was, once its features are known."""

from torch import nn

from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost


class CachedBackbone(Backbone):
    """Has nothing to learn and reads nothing: batches bring the features with them."""

    supports_compile = False  # there is nothing in it

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.width, self.depth = backbone.width, backbone.depth
        self.causal, self.context = backbone.causal, backbone.context

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        return []

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        return ModuleCost("backbone")

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        raise AssertionError("the features of a frozen backbone are computed before training")

    def new_state(self, rows: int, capacity: int) -> DecodingState:
        raise AssertionError("a frozen backbone's features have no state")
