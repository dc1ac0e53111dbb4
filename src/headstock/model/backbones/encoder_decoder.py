"""The encoder-decoder: one Transformer reads the source, a second writes the target and looks across at the first.

B rows, T target tokens, S source tokens, D width.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from headstock.errors import ConfigError
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import Dimensions, ExecutionContext, ModuleCost, SavedActivations, table
from headstock.model.kv_cache import KVCache
from headstock.model.layers import NORM_EPSILON, Activation, NormKind
from headstock.model.positions import ROTARY_BASE


@dataclass(frozen=True)
class EncoderDecoderConfig:
    vocabulary: int  # of what it writes
    source_vocabulary: int | None = None  # of what it reads; None if that is the same
    context: int = 256  # the longest row it is made for, on either side
    depth: int = 4  # of the decoder
    encoder_depth: int | None = None  # None: as deep as the decoder
    width: int = 128
    heads: int = 4
    hidden: int = 512  # width inside the feed-forward part
    dropout: float = 0.0
    inner_dropout: bool = True  # also inside the feed-forward part, as torch's own layer does; BERT and GPT-2 do not
    norm: Literal["pre", "post"] = "pre"
    norm_kind: NormKind = "layer"
    norm_epsilon: float = NORM_EPSILON
    positions: Literal["sinusoidal", "learned", "rotary"] = "learned"
    rotary_base: float = ROTARY_BASE
    activation: Activation = "gelu"
    bias: bool = True  # in linear layers and layer norms
    tied: bool = True  # the language-model head shares the weights of the target's embedding
    shared: bool = True  # source and target share one embedding, where they have one vocabulary
    embed_scale: bool = False  # embeddings are multiplied by sqrt(width)
    embed_norm: bool = False  # embeddings are normed before the first block
    qk_norm: bool = False  # queries and keys are normed in each head

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be at least 1, not {value}")
            for name in ("source_vocabulary", "encoder_depth")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        try:
            self.decoder()
        except ConfigError as wrong:
            problems += wrong.problems
        if problems:
            raise ConfigError(problems)

    def encoder(self) -> TransformerConfig:
        vocabulary, depth = self.source_vocabulary or self.vocabulary, self.encoder_depth or self.depth
        return TransformerConfig(**self.stack(), vocabulary=vocabulary, depth=depth, causal=False)

    def decoder(self) -> TransformerConfig:
        return TransformerConfig(**self.stack(), vocabulary=self.vocabulary, depth=self.depth, cross=True)

    def stack(self) -> dict[str, Any]:
        """What both sides have in common."""
        own = {"vocabulary", "source_vocabulary", "depth", "encoder_depth", "shared"}
        return {name: value for name, value in vars(self).items() if name not in own}


@BACKBONES.add("seq2seq")
class EncoderDecoder(Backbone):
    """Gives one vector a target token; `width`, `depth` and `Output.layers` are the decoder's."""

    Config = EncoderDecoderConfig
    is_encoder_decoder: ClassVar[bool] = True

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.causal, self.context = c.width, c.depth, True, c.context
        encoder, decoder = Transformer(c.encoder()), Transformer(c.decoder())
        if c.shared and c.source_vocabulary is None:
            encoder.tokens = decoder.tokens
        self.tokens = decoder.tokens  # the embedding that a tied head shares
        self.encoder, self.decoder = encoder, decoder

    def encode(self, source: Batch) -> Tensor:
        """(B, S, D): what the target may look at."""
        return self.encoder(source).hidden

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        """Read targets beside their sources; a state that has met its sources needs them no more."""
        if isinstance(state, KVCache) and state.memory:
            return self.decoder(batch, state, keep_layers=keep_layers)
        if batch.source is None:
            raise ValueError("an encoder-decoder looks at a source, and this batch brings none")
        memory, padding = self.encode(batch.source), batch.source.padding
        return self.decoder(batch, state, keep_layers=keep_layers, memory=memory, memory_padding=padding)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        """Both sides' embeddings, then the encoder's blocks, then the decoder's, which look at the encoder's last."""
        (source, *below), (target, *above) = self.encoder.parameters_by_layer(), self.decoder.parameters_by_layer()
        known = {id(parameter) for parameter in source}
        return [[*source, *(parameter for parameter in target if id(parameter) not in known)], *below, *above]

    def counted(self, d: Dimensions, place: ExecutionContext) -> ModuleCost:
        """A token that is written pays for its share of the source too."""
        apart = self.encoder.tokens is not self.tokens
        reading = replace(
            d, vocabulary=d.source_vocabulary, depth=d.encoder_depth, length=d.source_length, source_length=0
        )
        share = d.source_length / d.length
        encoder = self.encoder.counted(reading, place, name="encoder", own_tokens=apart)
        return ModuleCost(
            "backbone",
            kept=SavedActivations(d.width).times(
                share
            ),  # what the encoder gives is looked at by every block, and kept once
            parts=(
                table("tokens", d.vocabulary, d.width),
                replace(encoder, used=share),
                self.decoder.counted(d, place, name="decoder", own_tokens=False),
            ),
        )

    def output_norm(self, x: Tensor) -> Tensor:
        return self.decoder.output_norm(x)

    def new_state(self, rows: int, capacity: int) -> KVCache:
        return self.decoder.new_state(rows, capacity)
