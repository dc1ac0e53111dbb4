"""The encoder-decoder Transformer.  B rows, T target tokens, S source tokens, D width."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from headstock.config import added
from headstock.errors import ConfigError
from headstock.model.backbone import BACKBONES, Backbone, non_positive
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.kv_cache import KVCache
from headstock.model.layers import BlockConfig
from headstock.model.positions import ROTARY_BASE


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(BlockConfig):
    vocabulary: int  # of the target, from its tokenizer
    source_vocabulary: int | None = None  # of the source; that of the target unless given
    context: int = 256  # maximum length of source and target rows
    depth: int = 4  # of the decoder
    encoder_depth: int | None = None  # of the encoder; as the decoder's unless given
    positions: Literal["sinusoidal", "learned", "rotary", "relative", "none"] = "learned"  # none: an ablation
    rotary_base: float = ROTARY_BASE  # rotary frequencies are powers of 1 / base
    relative_buckets: int = added(32)  # relative: a learned bias per head for each bucket of distances, as in T5
    relative_distance: int = added(128)  # relative: distances from here on share one bucket
    tied: bool = True  # the language-model head shares the weight of the target embedding
    shared: bool = True  # source and target share one embedding if they have the same vocabulary
    embed_scale: bool = False  # multiply embeddings by sqrt(width)
    embed_norm: bool = False  # norm the embeddings before the first block

    def __post_init__(self) -> None:
        problems = non_positive(self, "source_vocabulary", "encoder_depth")
        try:
            self.decoder()
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def encoder(self) -> TransformerConfig:
        vocabulary, depth = self.source_vocabulary or self.vocabulary, self.encoder_depth or self.depth
        return TransformerConfig(**self.stack(), vocabulary=vocabulary, depth=depth, causal=False)

    def decoder(self) -> TransformerConfig:
        return TransformerConfig(**self.stack(), vocabulary=self.vocabulary, depth=self.depth, cross=True)

    def stack(self) -> dict[str, Any]:
        """The settings that encoder and decoder share."""
        own = {"vocabulary", "source_vocabulary", "depth", "encoder_depth", "shared"}
        return {name: value for name, value in vars(self).items() if name not in own}


@BACKBONES.add("seq2seq")
class EncoderDecoder(Backbone):
    """Computes one vector per target token; `width`, `depth` and `Output.layers` are the decoder's."""

    Config = EncoderDecoderConfig
    supports_onnx = False
    causal = True
    is_encoder_decoder: ClassVar[bool] = True

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.context = c.width, c.depth, c.context
        encoder, decoder = Transformer(c.encoder()), Transformer(c.decoder())
        if c.shared and c.source_vocabulary is None:
            encoder.tokens = decoder.tokens
        self.tokens = decoder.tokens  # shared by a tied head
        self.encoder, self.decoder = encoder, decoder

    def encode(self, source: Batch) -> Tensor:
        """(B, S, D): the memory for cross-attention."""
        return self.encoder(source).hidden

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        """Process targets with their sources; a state that already contains the encoded sources needs them no more."""
        if isinstance(state, KVCache) and state.memory:
            return self.decoder(batch, state, keep_layers=keep_layers)
        if batch.source is None:
            raise ValueError("an encoder-decoder needs Batch.source")
        memory, padding = self.encode(batch.source), batch.source.padding
        return self.decoder(batch, state, keep_layers=keep_layers, memory=memory, memory_padding=padding)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """The embeddings of both, then the encoder's blocks, then the decoder's."""
        (source, *encoder), (target, *decoder) = self.encoder.parameters_by_layer(), self.decoder.parameters_by_layer()
        shared = {id(parameter) for parameter in source}
        return [[*source, *(parameter for parameter in target if id(parameter) not in shared)], *encoder, *decoder]

    def output_norm(self, x: Tensor) -> Tensor:
        return self.decoder.output_norm(x)

    def new_state(self, rows: int, capacity: int) -> KVCache:
        return self.decoder.new_state(rows, capacity)


# Warm start: both stacks from one Transformer (Rothe et al., 2020)


def config_from_transformer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model settings of an encoder-decoder with the sizes of a Transformer."""
    names = {part.name for part in fields(EncoderDecoderConfig)}
    return {"family": EncoderDecoder.name} | {name: value for name, value in settings.items() if name in names}


def weights_from_transformer(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Transformer in both stacks; cross-attention, and a head of another form, keep their `own`.

    An encoder-decoder has no segments: the first one's vector, which a single text has, is added to the positions.
    """
    result = dict(own)
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        if part != "backbone":
            result |= {name: tensor} if name in own and tensor.shape == own[name].shape else {}
            continue
        if rest == "positions.weight" and "backbone.segments.weight" in weights:
            tensor = tensor + weights["backbone.segments.weight"][0]
        for target in (f"backbone.{rest}", f"backbone.encoder.{rest}", f"backbone.decoder.{rest}"):
            if target in own:
                result[target] = tensor
    return result
