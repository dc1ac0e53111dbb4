"""The Transformer: GPT, BERT and the 2017 original are configs of it.  B rows, T tokens, D width, K head width."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headstock.config import added
from headstock.errors import ConfigError
from headstock.kernels.attention import supports_varlen
from headstock.kernels.backends import compute_dtype
from headstock.model.attention_mask import AttentionMask, make_attention_mask, padding_mask
from headstock.model.backbone import BACKBONES, Backbone, non_positive
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.kv_cache import KVCache
from headstock.model.layers import GATED, Block, BlockConfig, Dropout, Rotation, make_norm
from headstock.model.positions import ROTARY_BASE, relative_position_buckets, rotary_angles, sinusoids


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    vocabulary: int  # from the tokenizer
    context: int = 256  # maximum row length
    depth: int = 4  # number of blocks
    positions: Literal["sinusoidal", "learned", "rotary", "relative", "none"] = "learned"  # none: an ablation
    rotary_base: float = ROTARY_BASE  # rotary frequencies are powers of 1 / base
    relative_buckets: int = added(32)  # relative: a learned bias per head for each bucket of distances, as in T5
    relative_distance: int = added(128)  # relative: distances from here on share one bucket
    tied: bool = True  # the language-model head shares the weight of the token embedding
    segments: int = 0  # number of segment ids (BERT: 2)
    embed_scale: bool = False  # multiply embeddings by sqrt(width)
    embed_norm: bool = False  # norm the embeddings before the first block
    causal: bool = True  # from the objective
    cross: bool = False  # cross-attention in each block

    def __post_init__(self) -> None:
        problems = non_positive(self, "vocabulary", "context", "depth", "width", "heads", "hidden")
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
        if self.feed_activation == "outer" and self.activation in GATED:
            problems.append(("feed_activation", f"outer needs an activation without a gate, not {self.activation}"))
        if self.relative_buckets < 4 or self.relative_buckets % 4:
            problems.append(("relative_buckets", f"must be a multiple of 4, not {self.relative_buckets}"))
        elif self.relative_distance <= self.relative_buckets // 2:
            minimum = self.relative_buckets // 2 + 1
            problems.append(("relative_distance", f"must be {minimum} or more, not {self.relative_distance}"))
        if problems:
            raise ConfigError(problems)


@BACKBONES.add("transformer")
class Transformer(Backbone):
    """Token and position embeddings, a stack of blocks, and a final norm if the blocks are pre-norm."""

    Config = TransformerConfig
    supports_query_positions = True
    starts_encoder_decoder = True
    waves: Tensor  # (context, D) sinusoidal positions
    cosine: Tensor  # (context, K / 2) of the rotary angles
    sine: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        c = self.config = config
        self.width, self.depth, self.causal, self.context = c.width, c.depth, c.causal, c.context
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.context, c.width) if c.positions == "learned" else None
        self.relative = nn.Embedding(c.relative_buckets, c.heads) if c.positions == "relative" else None
        self.segments = nn.Embedding(c.segments, c.width) if c.segments else None
        self.embed_norm = make_norm(c) if c.embed_norm else None
        self.dropout = Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, cross=c.cross) for _ in range(c.depth))
        self.final_norm = make_norm(c) if c.norm == "pre" else None
        if c.positions == "sinusoidal":
            self.register_buffer("waves", sinusoids(c.context, c.width))
        if c.positions == "rotary":
            angles = rotary_angles(c.context, c.width // c.heads, base=c.rotary_base)
            self.register_buffer("cosine", angles.cos().float(), persistent=False)
            self.register_buffer("sine", angles.sin().float(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's defaults for matrices, zero biases, embeddings from N(0, 0.02²), or 1 / width with `embed_scale`.

        Projections into the residual stream are scaled by 1 / sqrt(2 depth) as in GPT-2. Without skip
        connections nothing is summed, so nothing is scaled.
        """
        std = self.width**-0.5 if self.config.embed_scale else 0.02
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if self.config.residual and name.endswith(("output.weight", "down.weight")):
                parameter.data.mul_((2 * self.config.depth) ** -0.5)

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        blocks = [list(block.parameters()) for block in self.blocks]
        if self.final_norm is not None:
            blocks[-1] += self.final_norm.parameters()
        above = {id(parameter) for block in blocks for parameter in block}
        return [[p for p in self.parameters() if id(p) not in above], *blocks]

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
        query_positions: Tensor | None = None,
    ) -> Output:
        """`memory` (B, S, D) is the encoder's output, for cross-attention.

        With `query_positions` (B,) the last block computes one position per row and `hidden` is (B, 1, D).
        """
        assert state is None or isinstance(state, KVCache)
        assert query_positions is None or (state is None and not keep_layers), "these need all positions"
        length = batch.tokens.size(1)
        longest = length if state is None else state.longest + length
        positions = self.token_positions(batch, state)
        x = self.embed(batch, positions, longest)
        rotation = self.rotation(positions, longest) if self.config.positions == "rotary" else None
        if state is None:
            mask = self.attention_mask(batch, x, varlen=query_positions is None)
        else:
            mask, memory_padding = state.mask(length), state.source_padding(memory_padding)
        if self.relative is not None:
            # documents of a packed row are apart in the mask, so indices in the row have the same distances
            index = torch.arange(longest, device=x.device)
            mask = mask.with_bias(self.relative_bias(index if state is None else positions, index))
        memory_mask = AttentionMask(padding_mask(memory_padding)) if self.config.cross else None
        layers = [x]
        for i, block in enumerate(self.blocks):
            x = block(  # (B, T, D)
                x,
                mask,
                rotation=rotation,
                cache=state,
                layer=i,
                memory=self.cross_key_value(block, i, memory, state) if self.config.cross else None,
                memory_mask=memory_mask,
                query_positions=query_positions if i == self.depth - 1 else None,
            )
            if keep_layers:
                layers.append(x)
        if state is not None:
            state.advance(batch)
        return Output(self.output_norm(x), layers if keep_layers else [], state)

    def output_norm(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.final_norm(x)

    def attention_mask(self, batch: Batch, x: Tensor, *, varlen: bool) -> AttentionMask:
        """Boundaries of documents for a varlen kernel, if one applies and no attention hook needs a mask."""
        hooked = any(block.attention.hook is not None for block in self.blocks)  # type: ignore[union-attr]
        varlen = varlen and batch.cu_seqlens is not None and not hooked and self.relative is None
        varlen = varlen and supports_varlen(x, self.width // self.config.heads)
        return make_attention_mask(batch, causal=self.causal, varlen=varlen)

    def token_positions(self, batch: Batch, state: KVCache | None) -> Tensor:
        """(T,) or (B, T): the position of each token in its text."""
        if batch.positions is not None:
            return batch.positions
        if state is not None:
            return state.positions(batch.tokens.size(1))
        return torch.arange(batch.tokens.size(1), device=batch.tokens.device)

    def embed(self, batch: Batch, positions: Tensor, longest: int) -> Tensor:
        x = self.tokens(batch.tokens)  # (B, T) -> (B, T, D)
        if self.config.embed_scale:
            x = x * math.sqrt(self.width)
        if self.positions is not None:
            if longest > self.config.context and batch.positions is None:
                raise ValueError(f"learned positions end at {self.config.context}, but there are {longest} tokens")
            x = x + self.positions(positions)
        elif self.config.positions == "sinusoidal":
            fits = longest <= self.config.context
            waves = self.waves if fits else sinusoids(longest, self.width).to(x)
            x = x + waves[positions]
        if self.segments is not None:
            segments = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
            x = x + self.segments(segments)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = x.to(compute_dtype(x))  # the residual stream is read and written often: keep it in half precision
        return self.dropout(x) if self.training else x

    def rotation(self, positions: Tensor, longest: int) -> Rotation:
        cosine, sine = self.cosine, self.sine
        if longest > self.config.context:
            angles = rotary_angles(longest, self.width // self.config.heads, base=self.config.rotary_base)
            cosine, sine = angles.cos().to(cosine), angles.sin().to(sine)
        if positions.dim() == 2:
            positions = positions[:, None]  # (B, T) -> (B, 1, T), shared by all heads
        return cosine[positions], sine[positions]

    def relative_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(B or 1, H, T, S): the bias for positions of queries (T,) or (B, T) and of keys (S,)."""
        assert self.relative is not None
        c, distance = self.config, keys - queries[..., None]  # (T, S) or (B, T, S)
        sizes = {"buckets": c.relative_buckets, "longest": c.relative_distance}
        bias = self.relative(relative_position_buckets(distance, **sizes, bidirectional=not self.causal))
        return (bias if bias.dim() == 4 else bias[None]).permute(0, 3, 1, 2)  # (B or 1, T, S, H) -> (B or 1, H, T, S)

    def cross_key_value(
        self, block: Any, layer: int, memory: Tensor | None, state: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output for one block, kept in the cache while decoding."""
        if state is not None and layer < len(state.memory):
            return state.memory[layer]
        assert memory is not None
        key_value: tuple[Tensor, Tensor] = block.cross.project_key_value(memory)
        if state is not None:
            state.memory.append(key_value)
        return key_value
