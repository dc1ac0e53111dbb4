"""What every backbone promises, and where backbones are found."""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost
from headstock.registry import Registry


class Backbone(nn.Module):
    """Turns tokens into one vector a token."""

    name: ClassVar[str]
    Config: ClassVar[type]  # a frozen dataclass; `vocabulary` is among its fields
    config: Any
    width: int
    depth: int  # how many layers it has
    causal: bool  # a token's vector never depends on what follows it; of the class, where no setting decides it
    context: int | None  # the longest row it was made for; None if it has no limit
    tokens: nn.Embedding
    carries_state: ClassVar[bool] = False  # what it read before a row is worth bringing along: see `Batch.before`
    bidirectional: ClassVar[bool] = (
        False  # it reads forward and backward apart: the halves of its vectors predict each way
    )
    supports_compile: ClassVar[bool] = True  # torch.compile pays: what it does is the same for every batch
    supports_query_positions: ClassVar[bool] = (
        False  # what nobody wants it need not compute: it takes notice of `Batch.only`
    )
    is_encoder_decoder: ClassVar[bool] = (
        False  # it is an encoder-decoder: batches bring the source that a target goes with
    )

    @abstractmethod
    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        """Read a batch, going on from `state` if there is one."""

    @abstractmethod
    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """All its parameters from the bottom up, the embeddings first: for learning rates and freezing by depth."""

    @abstractmethod
    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        """The closed forms of its parts, named as they are: their weights, and what a token costs there."""

    def output_norm(self, x: Tensor) -> Tensor:
        """How a layer's vectors leave the backbone: the last layer's become `Output.hidden` this way."""
        return x

    @abstractmethod
    def new_state(self, rows: int, capacity: int) -> DecodingState:
        """An empty memory for `rows` rows of up to `capacity` tokens."""


BACKBONES: Registry[type[Backbone]] = Registry("model family", "headstock.model.backbones")
