"""The pieces of a Transformer.  B rows, T queries, S keys, H heads, D width, K = D / H head width, F hidden."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.kernels.ops import attend, attend_packed, compute_dtype, linear, linear_apart, takes_packed
from headstock.kernels.pointwise import dropout, gelu, gelu_tanh
from headstock.model.attention_mask import AttentionMask
from headstock.model.kv_cache import KVCache

NormKind = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"]
Rotation = tuple[Tensor, Tensor]  # cosine and sine of each position's angles, each (T, K/2) or (B, 1, T, K/2)
AttentionHook = Callable[
    [Tensor, Tensor, Tensor, AttentionMask, Tensor], None
]  # told queries, keys, values, mask and what was mixed


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "swiglu": F.silu,
}
NORM_EPSILON = 1e-5  # what keeps a norm from dividing by zero


class RMSNorm(nn.RMSNorm):
    """torch's own, with its weight in the precision of what comes: else mixed precision misses the fast kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's own, whose output has the precision of products: what blocks add up is then read and written in half."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(compute_dtype(x))


class Linear(nn.Linear):
    """torch's own, its product made as it is fastest."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Dropout(nn.Dropout):
    """torch's own, its draws made as they are fastest."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and self.p else x


def make_norm(width: int, kind: NormKind, *, bias: bool = True, epsilon: float = NORM_EPSILON) -> nn.Module:
    return LayerNorm(width, eps=epsilon, bias=bias) if kind == "layer" else RMSNorm(width, eps=epsilon)


class Attention(nn.Module):
    """Multi-head attention from `x` onto itself, or across onto `memory`."""

    def __init__(
        self, width: int, heads: int, *, bias: bool, dropout: float, qk_norm: bool, epsilon: float = NORM_EPSILON
    ):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.hook: AttentionHook | None = None  # who wants to see what is mixed by: see looking.py
        self.inputs = Linear(width, 3 * width, bias=bias)  # queries, keys and values in one product
        self.output = Linear(width, width, bias=bias)
        self.query_norm = make_norm(width // heads, "rms", epsilon=epsilon) if qk_norm else None
        self.key_norm = make_norm(width // heads, "rms", epsilon=epsilon) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        only: Tensor | None = None,
    ) -> Tensor:
        if only is not None:
            return self.from_one(x, mask, rotation, only)
        bare = rotation is None and cache is None and self.query_norm is None and self.hook is None
        if bare and takes_packed(x, mask, x.size(-1) // self.heads):
            return self.mix_packed(x, mask)
        query, key, value = self.project(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        return self.mix(query, key, value, mask)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, not normed yet."""
        parts = linear_apart(x, self.inputs.weight, self.inputs.bias, 3)
        if parts is None:
            return self.split(self.inputs(x), 3)
        return tuple(self.split(part, 1)[0] for part in parts)

    def from_one(self, x: Tensor, mask: AttentionMask, rotation: Rotation | None, only: Tensor) -> Tensor:
        """(B, 1, D): from one place of each row onto all of it."""
        query, (key, value) = self.ask(select_positions(x, only)), self.remember(x)
        if rotation is not None:
            query, key = apply_rotary(query, rotation_at(rotation, only)), apply_rotary(key, rotation)
        return self.mix(query, key, value, mask.select_queries(only, x.size(1)))

    def across(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Queries from `x` onto the keys and values that `remember` made of the other sequence."""
        return self.mix(self.ask(x), *memory, mask)

    def ask(self, x: Tensor) -> Tensor:
        """The queries alone."""
        width = x.size(-1)
        bias = None if self.inputs.bias is None else self.inputs.bias[:width]
        (query,) = self.split(F.linear(x, self.inputs.weight[:width], bias), 1)
        return query if self.query_norm is None else self.query_norm(query)

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values alone, of a sequence that is looked at."""
        width = memory.size(-1)
        bias = None if self.inputs.bias is None else self.inputs.bias[width:]
        key, value = self.split(F.linear(memory, self.inputs.weight[width:], bias), 2)
        return (key if self.key_norm is None else self.key_norm(key)), value

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        rows, length, width = x.shape
        apart = x.view(rows, length, parts, self.heads, width // (parts * self.heads))
        return apart.transpose(1, 3).unbind(2)  # (B, T, parts D) -> (B, H, parts, T, K) -> each (B, H, T, K)

    def mix_packed(self, x: Tensor, mask: AttentionMask) -> Tensor:
        """Queries, keys and values as the product leaves them, to which nothing is done before they meet."""
        packed = self.inputs(x).unflatten(-1, (3, self.heads, -1))  # (B, T, 3 D) -> (B, T, 3, H, K)
        mixed = attend_packed(packed, mask, self.dropout if self.training else 0.0)
        return self.output(mixed.flatten(2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, mask, dropout)
        if self.hook is not None:
            self.hook(query, key, value, mask, mixed)
        return self.output(mixed.transpose(1, 2).flatten(2))  # (B, H, T, K) -> (B, T, D)


class FeedForward(nn.Module):
    """Each position by itself: up to `hidden`, bent, and down again."""

    def __init__(self, width: int, hidden: int, *, activation: Activation, bias: bool, dropout: float):
        super().__init__()
        self.gate = Linear(width, hidden, bias=bias) if activation == "swiglu" else None
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (B, T, D) -> (B, T, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden) if self.training else hidden)


class Residual(nn.Module):
    """x plus what a sublayer adds to it, normed before (pre) or after (post)."""

    def __init__(
        self,
        width: int,
        *,
        norm: Literal["pre", "post"],
        kind: NormKind,
        bias: bool,
        dropout: float,
        epsilon: float = NORM_EPSILON,
    ):
        super().__init__()
        self.norm = make_norm(width, kind, bias=bias, epsilon=epsilon)
        self.post = norm == "post"
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], *, only: Tensor | None = None) -> Tensor:
        """With `only`, the sublayer adds to one place of each row, and only that goes on: (B, T, D) -> (B, 1, D)."""
        added = sublayer(x if self.post else self.norm(x))
        if only is not None:
            x = select_positions(x, only)
        if self.training:  # asked here because generating a token is mostly calls, and this one would do nothing
            added = self.dropout(added)
        return self.norm(x + added) if self.post else x + added


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory to look at, feed-forward: each inside a Residual."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_kind: NormKind = "layer",
        norm_epsilon: float = NORM_EPSILON,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        inner_dropout: bool = True,
        qk_norm: bool = False,
        cross: bool = False,
    ):
        super().__init__()

        def attention() -> Attention:
            return Attention(width, heads, bias=bias, dropout=dropout, qk_norm=qk_norm, epsilon=norm_epsilon)

        def residual() -> Residual:
            return Residual(width, norm=norm, kind=norm_kind, bias=bias, dropout=dropout, epsilon=norm_epsilon)

        self.attention, self.around_attention = attention(), residual()
        self.cross = attention() if cross else None
        self.around_cross = residual() if cross else None
        inner = dropout if inner_dropout else 0.0
        self.feed = FeedForward(width, hidden, activation=activation, bias=bias, dropout=inner)
        self.around_feed = residual()

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
        only: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D), or where `only` (B,) says which one place of each row is wanted of it, (B, 1, D)."""
        x = self.around_attention(
            x, lambda h: self.attention(h, mask, rotation=rotation, cache=cache, layer=layer, only=only), only=only
        )
        if self.cross is not None and self.around_cross is not None:
            assert memory is not None and memory_mask is not None
            cross = self.cross
            x = self.around_cross(x, lambda h: cross.across(h, memory, memory_mask))
        return self.around_feed(x, self.feed)


def select_positions(x: Tensor, places: Tensor) -> Tensor:
    """The vector at one place of each row: (B, T, D) -> (B, 1, D)."""
    return x[torch.arange(len(x), device=x.device), places].unsqueeze(1)


def rotation_at(rotation: Rotation, places: Tensor) -> Rotation:
    """The angles of one place of each row, (B, 1, 1, K/2)."""
    cosine, sine = (part.expand(len(places), 1, *part.shape[-2:]).squeeze(1) for part in rotation)  # (B, T, K/2)
    return select_positions(cosine, places).unsqueeze(1), select_positions(sine, places).unsqueeze(1)


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x_i, x_{i + K/2}) of every head by its position's angle."""
    cosine, sine = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).type_as(x)
