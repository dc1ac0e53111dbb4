"""What every backbone promises, and where backbones are found."""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from headstock.model.batch import Batch, Output, State
from headstock.model.formulas import Dimensions, Part, Place
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
    carries: ClassVar[bool] = False  # what it read before a row is worth bringing along: see `Batch.before`
    both_ways: ClassVar[bool] = False  # it reads forward and backward apart: the halves of its vectors predict each way
    compiles: ClassVar[bool] = True  # torch.compile pays: what it does is the same for every batch
    reads_one: ClassVar[bool] = False  # what nobody wants it need not compute: it takes notice of `Batch.only`
    reads_source: ClassVar[bool] = False  # it is an encoder-decoder: batches bring the source that a target goes with

    @abstractmethod
    def forward(self, batch: Batch, state: State | None = None, *, keep_layers: bool = False) -> Output:
        """Read a batch, going on from `state` if there is one."""

    @abstractmethod
    def stages(self) -> list[list[nn.Parameter]]:
        """All its parameters from the bottom up, the embeddings first: for learning rates and freezing by depth."""

    @abstractmethod
    def counted(self, d: Dimensions, place: Place) -> Part:
        """The closed forms of its parts, named as they are: their weights, and what a token costs there."""

    def outlet(self, x: Tensor) -> Tensor:
        """How a layer's vectors leave the backbone: the last layer's become `Output.hidden` this way."""
        return x

    @abstractmethod
    def new_state(self, rows: int, capacity: int) -> State:
        """An empty memory for `rows` rows of up to `capacity` tokens."""


BACKBONES: Registry[type[Backbone]] = Registry("model family", "headstock.model.backbones")
