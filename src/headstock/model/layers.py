"""The layers of a Transformer.  B rows, T queries, S keys, H heads, D width, K = D / H head width, F hidden."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.config import added
from headstock.kernels import fp8, pointwise
from headstock.kernels.attention import attention, project_qkv
from headstock.kernels.backends import compute_dtype
from headstock.model.attention_mask import AttentionMask
from headstock.model.kv_cache import KVCache

NormKind = Literal["layer", "rms"]
NormPlacement = Literal["pre", "post", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
Rotation = tuple[Tensor, Tensor]  # cosine and sine of the rotary angles, each (T, K/2) or (B, 1, T, K/2)
# query, key, value, mask and output of attention; returns a replacement of the output (B, H, T, K), or None
AttentionHook = Callable[[Tensor, Tensor, Tensor, AttentionMask, Tensor], Tensor | None]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": pointwise.gelu,
    "gelu_tanh": pointwise.gelu_tanh,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": pointwise.gelu_tanh,
}
GATED = ("swiglu", "geglu")  # activations with a third linear layer, whose activated output is a factor
NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The settings of a Transformer block."""

    width: int = 128  # of the residual stream
    heads: int = 4  # attention heads
    hidden: int = 512  # width of the feed-forward layer
    dropout: float = 0.0  # of embeddings, attention weights and the output of each sublayer
    inner_dropout: bool = True  # dropout also inside the feed-forward layer, as in torch; not in BERT or GPT-2
    norm: NormPlacement = "pre"  # before or after each sublayer; none: an ablation
    norm_kind: NormKind = "layer"  # LayerNorm or RMSNorm
    norm_epsilon: float = NORM_EPSILON  # added to the variance
    activation: Activation = "gelu"  # of the feed-forward layer; swiglu and geglu are gated
    feed_activation: Literal["inner", "outer"] = added("inner")  # outer: after both linear layers, an ablation
    residual: bool = added(True)  # skip connections; false: an ablation
    bias: bool = True  # in linear layers and layer norms
    qk_norm: bool = False  # RMSNorm on the queries and keys of each head


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm with weight and output in the dtype of the input, which mixed precision needs to be fast."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)
        with torch.autocast("cuda", enabled=False):  # which widens to float32 from torch 2.12 on; the kernel sums in it
            return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose output has the dtype of matmuls, so that the residual stream stays in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(compute_dtype(x))


class Linear(nn.Linear):
    """nn.Linear, in fp8 where a run enables it."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8.linear(x, self.weight, self.bias)


class Dropout(nn.Dropout):
    """nn.Dropout with a cheaper random number generator under torch.compile."""

    def forward(self, x: Tensor) -> Tensor:
        return pointwise.dropout(x, self.p) if self.training and self.p else x


def make_norm(config: BlockConfig) -> nn.Module:
    if config.norm_kind == "layer":
        return LayerNorm(config.width, eps=config.norm_epsilon, bias=config.bias)
    return RMSNorm(config.width, eps=config.norm_epsilon)


class Attention(nn.Module):
    """Multi-head self-attention, or cross-attention where `key_value` comes from another sequence."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        width, head_width = config.width, config.width // config.heads
        self.heads, self.dropout = config.heads, config.dropout
        self.hook: AttentionHook | None = None  # receives what fused attention does not return: see attention_weights
        self.inputs = Linear(width, 3 * width, bias=config.bias)  # query, key and value projections in one
        self.output = Linear(width, width, bias=config.bias)
        self.query_norm = RMSNorm(head_width, eps=config.norm_epsilon) if config.qk_norm else None
        self.key_norm = RMSNorm(head_width, eps=config.norm_epsilon) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        *,
        key_value: tuple[Tensor, Tensor] | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); with `query_positions` (B,) queries come from one position per row: (B, 1, D).

        `key_value` are projected already (see `project_key_value`). The cache keeps keys and values of this `layer`.
        """
        query_rotation, packed = rotation, None
        if key_value is not None:
            query, (key, value) = self.project_query(x), key_value
        elif query_positions is not None:
            key, value = self.project_key_value(x)
            query = self.project_query(select_positions(x, query_positions))
            mask = mask.select_queries(query_positions, x.size(1))
            query_rotation = None if rotation is None else select_rotation(rotation, query_positions)
        else:
            # attention follows directly: neither norm nor rotation nor cache comes between
            direct = self.query_norm is None and rotation is None and cache is None
            cu_seqlens = mask.cu_seqlens if direct else None
            query, key, value, packed = project_qkv(x, self.inputs, self.heads, cu_seqlens=cu_seqlens)
            if self.query_norm is not None and self.key_norm is not None:
                query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None and query_rotation is not None:
            query, key = apply_rotary(query, query_rotation), apply_rotary(key, rotation)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        output = attention(  # (B, H, T, K)
            query,
            key,
            value,
            allowed=mask.allowed,
            causal=mask.causal,
            cu_seqlens=mask.cu_seqlens,
            dropout=self.dropout if self.training else 0.0,
            packed=packed,
            bias=mask.bias,
        )
        if self.hook is not None and (replaced := self.hook(query, key, value, mask, output)) is not None:
            output = replaced
        return self.output(output.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)

    def project_query(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, K) the queries alone."""
        width = x.size(-1)
        bias = None if self.inputs.bias is None else self.inputs.bias[:width]
        (query,) = self.split_heads(F.linear(x, self.inputs.weight[:width], bias), 1)
        return query if self.query_norm is None else self.query_norm(query)

    def project_key_value(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> each (B, H, S, K) the keys and values alone."""
        width = memory.size(-1)
        bias = None if self.inputs.bias is None else self.inputs.bias[width:]
        key, value = self.split_heads(F.linear(memory, self.inputs.weight[width:], bias), 2)
        return (key if self.key_norm is None else self.key_norm(key)), value

    def split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts D) -> `parts` tensors (B, H, T, K)."""
        return x.unflatten(-1, (parts, self.heads, -1)).transpose(1, 3).unbind(2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, or three with a gate (SwiGLU, GEGLU).

    With `feed_activation="outer"` the activation follows both: φ((x W1 + b1) W2 + b2). As nothing lies between them,
    the two layers then are one linear map, which is what this ablation demonstrates.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.outer = config.feed_activation == "outer"
        width, hidden, bias = config.width, config.hidden, config.bias
        self.gate = Linear(width, hidden, bias=bias) if config.activation in GATED else None
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout if config.inner_dropout else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.outer:
            return self.activation(self.down(self.dropout(self.up(x))))
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (B, T, D) -> (B, T, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden) if self.training else hidden)


class Residual(nn.Module):
    """x + sublayer(norm(x)) (pre-norm), or norm(x + sublayer(x)) (post-norm), with dropout on the sublayer's output.

    For ablations, the norm may be left out (`norm="none"`), or the skip connection (`residual=False`).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.norm = nn.Identity() if config.norm == "none" else make_norm(config)
        self.post, self.skip = config.norm == "post", config.residual
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], *, query_positions: Tensor | None = None
    ) -> Tensor:
        """With `query_positions` the sublayer returns (B, 1, D), which is added to x at these positions."""
        update = sublayer(x if self.post else self.norm(x))
        if self.training:  # skips the call when decoding, which is bound by call overhead
            update = self.dropout(update)
        return self.combine(x if query_positions is None else select_positions(x, query_positions), update)

    def combine(self, x: Tensor, update: Tensor) -> Tensor:
        total = x + update if self.skip else update
        return self.norm(total) if self.post else total


class Block(nn.Module):
    """Self-attention, cross-attention in a decoder with an encoder, and feed-forward, each inside a Residual."""

    def __init__(self, config: BlockConfig, *, cross: bool = False):
        super().__init__()
        self.attention, self.around_attention = Attention(config), Residual(config)
        self.cross = Attention(config) if cross else None
        self.around_cross = Residual(config) if cross else None
        self.feed, self.around_feed = FeedForward(config), Residual(config)

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        memory: tuple[Tensor, Tensor] | None = None,
        memory_mask: AttentionMask | None = None,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D), or (B, 1, D) at `query_positions` (B,). `memory` are cross-attention's key, value."""

        def attend(h: Tensor) -> Tensor:
            return self.attention(h, mask, rotation=rotation, cache=cache, layer=layer, query_positions=query_positions)

        x = self.around_attention(x, attend, query_positions=query_positions)
        if self.cross is not None and self.around_cross is not None:
            assert memory is not None and memory_mask is not None
            cross = self.cross
            x = self.around_cross(x, lambda h: cross(h, memory_mask, key_value=memory))
        return self.around_feed(x, self.feed)


def select_positions(x: Tensor, positions: Tensor) -> Tensor:
    """The vector at one position (B,) of each row: (B, T, D) -> (B, 1, D)."""
    return x[torch.arange(len(x), device=x.device), positions].unsqueeze(1)


def select_rotation(rotation: Rotation, positions: Tensor) -> Rotation:
    """The rotary angles at one position of each row: (B, 1, 1, K/2)."""
    cosine, sine = (part.expand(len(positions), 1, *part.shape[-2:]).squeeze(1) for part in rotation)  # (B, T, K/2)
    return select_positions(cosine, positions).unsqueeze(1), select_positions(sine, positions).unsqueeze(1)


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (x_i, x_{i + K/2}) of every head by its position's angle."""
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).type_as(x)
