"""The one Transformer: GPT, BERT and the 2017 original are settings of it.  B rows, T tokens, D width."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headstock.errors import ConfigError
from headstock.kernels.ops import compute_dtype, reads_apart
from headstock.model.attention_mask import AttentionMask, make_attention_mask, padding_mask
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import (
    Dimensions,
    ExecutionContext,
    ModuleCost,
    SavedActivations,
    blocks,
    in_parts,
    norm,
    table,
)
from headstock.model.kv_cache import KVCache
from headstock.model.layers import NORM_EPSILON, Activation, Block, Dropout, NormKind, Rotation, make_norm
from headstock.model.positions import ROTARY_BASE, rotary_angles, sinusoids


@dataclass(frozen=True)
class TransformerConfig:
    vocabulary: int
    context: int = 256  # the longest row it is made for
    depth: int = 4
    width: int = 128
    heads: int = 4
    hidden: int = 512  # width inside the feed-forward part
    dropout: float = 0.0
    inner_dropout: bool = True  # also inside the feed-forward part, as torch's own layer does; BERT and GPT-2 do not
    norm: Literal["pre", "post"] = "pre"
    norm_kind: NormKind = "layer"
    norm_epsilon: float = NORM_EPSILON
    positions: Literal["sinusoidal", "learned", "rotary"] = "learned"
    rotary_base: float = ROTARY_BASE  # the larger, the slower rotary angles turn
    activation: Activation = "gelu"
    bias: bool = True  # in linear layers and layer norms
    tied: bool = True  # the language-model head shares the embedding's weights
    segments: int = 0  # how many kinds of text a row may join (BERT: 2)
    embed_scale: bool = False  # embeddings are multiplied by sqrt(width)
    embed_norm: bool = False  # embeddings are normed before the first block
    qk_norm: bool = False  # queries and keys are normed in each head
    causal: bool = True
    cross: bool = False  # each block also looks at a memory

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be at least 1, not {getattr(self, name)}")
            for name in ("vocabulary", "context", "depth", "width", "heads", "hidden")
            if getattr(self, name) < 1
        ]
        if self.segments < 0:
            problems.append(("segments", f"must be 0 or above, not {self.segments}"))
        if not 0 <= self.dropout < 1:
            problems.append(("dropout", f"must be from 0 to below 1, not {self.dropout}"))
        for name in ("norm_epsilon", "rotary_base"):
            if getattr(self, name) <= 0:
                problems.append((name, f"must be above 0, not {getattr(self, name)}"))
        if not problems and self.width % self.heads:
            problems.append(("width", f"{self.width} must be a multiple of heads {self.heads}"))
        elif not problems and self.positions == "rotary" and self.width // self.heads % 2:
            problems.append(("width", f"rotary positions need an even head width, not {self.width // self.heads}"))
        if problems:
            raise ConfigError(problems)


@BACKBONES.add("transformer")
class Transformer(Backbone):
    """Embeddings plus positions, a stack of blocks, and a last norm where the blocks norm first."""

    Config = TransformerConfig
    supports_query_positions = True
    waves: Tensor  # (context, D) sinusoids
    cosine: Tensor  # (context, K / 2) of the rotary angles, and their sine
    sine: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.causal, self.context = c.width, c.depth, c.causal, c.context
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.context, c.width) if c.positions == "learned" else None
        self.segments = nn.Embedding(c.segments, c.width) if c.segments else None
        self.embed_norm = make_norm(c.width, c.norm_kind, bias=c.bias, epsilon=c.norm_epsilon) if c.embed_norm else None
        self.dropout = Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            Block(
                c.width,
                c.heads,
                c.hidden,
                norm=c.norm,
                norm_kind=c.norm_kind,
                norm_epsilon=c.norm_epsilon,
                activation=c.activation,
                bias=c.bias,
                dropout=c.dropout,
                inner_dropout=c.inner_dropout,
                qk_norm=c.qk_norm,
                cross=c.cross,
            )
            for _ in range(c.depth)
        )
        self.final_norm = (
            make_norm(c.width, c.norm_kind, bias=c.bias, epsilon=c.norm_epsilon) if c.norm == "pre" else None
        )
        if c.positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(c.context, c.width))
        if c.positions == "rotary":
            angles = rotary_angles(c.context, c.width // c.heads, base=c.rotary_base)
            self.register_buffer("cosine", angles.cos().float(), persistent=False)
            self.register_buffer("sine", angles.sin().float(), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Linear layers as torch makes them; what writes into the residual stream is scaled down by the depth."""
        spread = self.width**-0.5 if self.config.embed_scale else 0.02
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=spread)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("output.weight", "down.weight")):
                parameter.data.mul_((2 * self.config.depth) ** -0.5)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        blocks = [list(block.parameters()) for block in self.blocks]
        if self.final_norm is not None:
            blocks[-1] += self.final_norm.parameters()
        above = {id(parameter) for block in blocks for parameter in block}
        return [[p for p in self.parameters() if id(p) not in above], *blocks]

    def counted(
        self, d: Dimensions, place: ExecutionContext, *, name: str = "backbone", own_tokens: bool = True
    ) -> ModuleCost:
        c = self.config
        parts = [table("tokens", d.vocabulary, d.width)] if own_tokens else []
        parts += [table("positions", d.context, d.width)] if c.positions == "learned" else []
        parts += [table("segments", d.segments, d.width)] if c.segments else []
        parts += [norm("embed_norm", d.width, c.norm_kind, place, bias=c.bias)] if c.embed_norm else []
        parts += [blocks("blocks", c, d, place)]
        parts += [norm("final_norm", d.width, c.norm_kind, place, bias=c.bias)] if c.norm == "pre" else []
        fixed: dict[str, Any] = {"waves": (d.context, d.width)} if c.positions == "sinusoidal" else {}
        kept = SavedActivations(dropped=d.width) if c.dropout else SavedActivations()
        if c.positions == "rotary":
            angles = (d.context, in_parts(d.head_width, 2))
            fixed = {"cosine": angles, "sine": angles}
            kept += SavedActivations(single=d.head_width)
        return ModuleCost(name, buffers=fixed, kept=kept, parts=tuple(parts))

    def new_state(self, rows: int, capacity: int) -> KVCache:
        weight = self.tokens.weight
        shape = (rows, self.config.heads, capacity, self.width // self.config.heads)
        return KVCache(self.config.depth, shape, weight.device, weight.dtype)

    def forward(
        self,
        batch: Batch,
        state: DecodingState | None = None,
        *,
        keep_layers: bool = False,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Output:
        assert state is None or isinstance(state, KVCache)
        assert batch.query_positions is None or (state is None and not keep_layers), "the other places are wanted too"
        length = batch.tokens.size(1)
        places = self.token_positions(batch, state)
        longest = length if state is None else state.longest + length
        x = self.embed(batch, places, longest)
        rotation = self.rotation(places, longest) if self.config.positions == "rotary" else None
        mask = self.mask(batch, x) if state is None else state.mask(length)
        if self.config.cross and state is not None:
            memory_padding = state.padding_of(memory_padding)
        memory_mask = AttentionMask(padding_mask(memory_padding)) if self.config.cross else None
        layers = [x]
        for i, block in enumerate(self.blocks):
            kept = self.cross_keys_values(block, i, memory, state) if self.config.cross else None
            only = batch.query_positions if i == self.depth - 1 else None  # below the last layer all look at all
            x = block(
                x, mask, rotation=rotation, cache=state, layer=i, memory=kept, memory_mask=memory_mask, only=only
            )  # (B, T, D)
            if keep_layers:
                layers.append(x)
        if state is not None:
            state.advance(batch)
        return Output(self.output_norm(x), layers if keep_layers else [], state)

    def output_norm(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.final_norm(x)

    def mask(self, batch: Batch, x: Tensor) -> AttentionMask:
        # whoever looks at attention wants a mask to see, and a query that is alone knows its document by nothing else
        watched = any(block.attention.hook is not None for block in self.blocks)  # type: ignore[union-attr]
        packed = batch.cu_seqlens is not None and batch.query_positions is None
        apart = packed and not watched and reads_apart(x, self.width // self.config.heads)
        return make_attention_mask(batch, causal=self.causal, apart=apart)

    def token_positions(self, batch: Batch, state: KVCache | None) -> Tensor:
        """(T,) or (B, T): where each token stands in its text."""
        if batch.positions is not None:
            return batch.positions
        if state is not None:
            return state.positions(batch.tokens.size(1))
        return torch.arange(batch.tokens.size(1), device=batch.tokens.device)

    def embed(self, batch: Batch, places: Tensor, longest: int) -> Tensor:
        x = self.tokens(batch.tokens)  # (B, T) -> (B, T, D)
        if self.config.embed_scale:
            x = x * math.sqrt(self.width)
        if self.positions is not None:
            if longest > self.config.context and batch.positions is None:
                raise ValueError(f"learned positions end at {self.config.context}, {longest} tokens came")
            x = x + self.positions(places)
        elif self.config.positions == "sinusoidal":
            fits = longest <= self.config.context
            waves = self.waves if fits else sinusoids(longest, self.width).to(x)
            x = x + waves[places]
        if self.segments is not None:
            kinds = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
            x = x + self.segments(kinds)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = x.to(compute_dtype(x))  # blocks add to a stream in the precision of products: it is read and written often
        return self.dropout(x) if self.training else x

    def rotation(self, places: Tensor, longest: int) -> Rotation:
        cosine, sine = self.cosine, self.sine
        if longest > self.config.context:
            angles = rotary_angles(longest, self.width // self.config.heads, base=self.config.rotary_base)
            cosine, sine = angles.cos().to(cosine), angles.sin().to(sine)
        if places.dim() == 2:
            places = places[:, None]  # (B, T) -> (B, 1, T), so that a row's angles serve all its heads
        return cosine[places], sine[places]

    def cross_keys_values(
        self, block: Any, layer: int, memory: Tensor | None, state: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """The memory's keys and values for one block; the memory does not change while decoding, so they are kept."""
        if state is not None and layer < len(state.memory):
            return state.memory[layer]
        assert memory is not None
        kept = block.cross.remember(memory)
        if state is not None:
            state.memory.append(kept)
        return kept
