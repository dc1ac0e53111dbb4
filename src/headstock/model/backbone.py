"""The interface of a backbone, and the registry of model families."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from headstock.model.batch import Batch, DecodingState, Output
from headstock.registry import Registry


class Backbone(nn.Module, ABC):
    """Computes one vector per token.

    A backbone accepts `query_positions` if `supports_query_positions` is set; others are called without it.
    """

    name: ClassVar[str]
    Config: ClassVar[type]  # a frozen dataclass with a field `vocabulary`
    config: Any
    width: int
    depth: int  # number of layers
    causal: bool  # a token's vector does not depend on later tokens; on the class unless a setting decides it
    context: int | None  # maximum row length; None: unlimited
    tokens: nn.Embedding
    carries_state: ClassVar[bool] = False  # uses what precedes a row: see `Batch.prefix`
    # a forward and a backward language model, as in ELMo: the halves of a vector predict the next and previous token
    is_bilm: ClassVar[bool] = False
    supports_compile: ClassVar[bool] = True  # runs the same operations for every batch, so torch.compile pays
    supports_fsdp: ClassVar[bool] = True  # its weights are used where its modules run, so that they can be sharded
    supports_onnx: ClassVar[bool] = True  # can be traced for any number of rows and tokens
    supports_query_positions: ClassVar[bool] = False
    is_encoder_decoder: ClassVar[bool] = False  # needs `Batch.source`
    starts_encoder_decoder: ClassVar[bool] = False  # its weights can initialize both stacks of an encoder-decoder

    @abstractmethod
    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        """Process a batch, continuing from `state` if there is one."""

    @abstractmethod
    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """All parameters from the embeddings up, for layer-wise learning rates and gradual unfreezing."""

    def output_norm(self, x: Tensor) -> Tensor:
        """What is applied to the last layer to give `Output.hidden`; other layers used as features need it too."""
        return x

    @abstractmethod
    def new_state(self, rows: int, capacity: int) -> DecodingState:
        """An empty state for `rows` rows of up to `capacity` tokens."""


class CachedBackbone(Backbone):
    """Replaces a frozen backbone whose features are precomputed and arrive in `Batch.features`."""

    supports_compile = False

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.width, self.depth = backbone.width, backbone.depth
        self.causal, self.context = backbone.causal, backbone.context

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        return []

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        raise AssertionError("the features of a frozen backbone are computed before training")

    def new_state(self, rows: int, capacity: int) -> DecodingState:
        raise AssertionError("the features of a frozen backbone have no state")


def non_positive(config: Any, *names: str) -> list[tuple[str, str]]:
    """The problems of settings that must be at least 1; None is allowed."""
    values = {name: getattr(config, name) for name in names}
    return [
        (name, f"must be at least 1, not {value}") for name, value in values.items() if value is not None and value < 1
    ]


BACKBONES: Registry[type[Backbone]] = Registry("model family", "headstock.model.backbones")
