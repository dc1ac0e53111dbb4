"""One token of every row through a stack of blocks, told flat.  B rows, H heads, K head width, D width.

To read one token is mostly Python: calling modules and looking up their weights takes longer than the sums. So decoding
gathers each block's arithmetic once, and then runs it in one loop. It adds nothing to what `layers.Block` says, and a
test holds the two together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstock.model.cache import Cache
from headstock.model.layers import Attention, Block, Rotation, rotate
from headstock.model.masks import Mask

Function = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class FlatAttention:
    """What an `Attention` and the `Residual` around it do."""

    norm: Function
    inputs: Function  # queries, keys and values from a token; only queries where it looks across
    output: Function
    query_norm: Function | None
    key_norm: Function | None


@dataclass(slots=True)
class FlatBlock:
    post: bool
    shape: tuple[int, int, int]  # (3, H, K)
    attention: FlatAttention
    cross: FlatAttention | None
    feed_norm: Function
    gate: Function | None
    up: Function
    activation: Function
    down: Function


def flatten(blocks: Iterable[nn.Module]) -> list[FlatBlock] | None:
    """The blocks' arithmetic on the weights they have now; None where hooks want to see the modules called."""
    if any(part._forward_hooks or part._forward_pre_hooks for block in blocks for part in block.modules()):
        return None
    return [_flat_block(block) for block in blocks if isinstance(block, Block)]


def step(
    x: Tensor,
    blocks: list[FlatBlock],
    mask: Mask,
    *,
    cache: Cache,
    rotation: Rotation | None = None,
    memory_mask: Mask | None = None,
) -> Tensor:
    """(B, 1, D) -> (B, 1, D), as the blocks would have it; the cache keeps the new keys and values."""
    rows, _, width = x.shape
    x = x.view(rows, width)  # products of two dimensions are the cheapest to call
    for layer, block in enumerate(blocks):
        part = block.attention
        h = part.inputs(x if block.post else part.norm(x))
        query, key, value = h.view(rows, 1, *block.shape).transpose(1, 3).unbind(2)  # each (B, H, 1, K)
        if part.query_norm is not None and part.key_norm is not None:
            query, key = part.query_norm(query), part.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        key, value = cache.extend(layer, key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, mask.allowed)
        x = x + part.output(mixed.reshape(rows, width))
        if block.post:
            x = part.norm(x)

        if block.cross is not None and memory_mask is not None:
            part = block.cross
            h = part.inputs(x if block.post else part.norm(x))
            query = h.view(rows, 1, *block.shape[1:]).transpose(1, 2)  # (B, D) -> (B, H, 1, K)
            if part.query_norm is not None:
                query = part.query_norm(query)
            mixed = F.scaled_dot_product_attention(query, *cache.memory[layer], memory_mask.allowed)
            x = x + part.output(mixed.reshape(rows, width))
            if block.post:
                x = part.norm(x)

        h = x if block.post else block.feed_norm(x)
        hidden = block.activation(block.up(h)) if block.gate is None else block.activation(block.gate(h)) * block.up(h)
        x = x + block.down(hidden)
        if block.post:
            x = block.feed_norm(x)
    return x.view(rows, 1, width)


def _flat_block(block: Block) -> FlatBlock:
    attention, feed = block.attention, block.feed
    width = attention.output.in_features
    cross = None
    if block.cross is not None and block.around_cross is not None:
        cross = _flat_attention(block.cross, block.around_cross.norm, parts=1)
    return FlatBlock(
        post=block.around_attention.post,
        shape=(3, attention.heads, width // attention.heads),
        attention=_flat_attention(attention, block.around_attention.norm, parts=3),
        cross=cross,
        feed_norm=_bare(block.around_feed.norm),
        gate=None if feed.gate is None else _bare(feed.gate),
        up=_bare(feed.up),
        activation=feed.activation,
        down=_bare(feed.down),
    )


def _flat_attention(attention: Attention, norm: nn.Module, *, parts: int) -> FlatAttention:
    width = attention.output.in_features
    bias = None if attention.inputs.bias is None else attention.inputs.bias[: parts * width]
    return FlatAttention(
        norm=_bare(norm),
        inputs=_product(attention.inputs.weight[: parts * width], bias),
        output=_bare(attention.output),
        query_norm=None if attention.query_norm is None else _bare(attention.query_norm),
        key_norm=None if attention.key_norm is None else _bare(attention.key_norm),
    )


def _bare(module: nn.Module) -> Function:
    """What a module computes, without the module."""
    if isinstance(module, nn.Linear):
        return _product(module.weight, module.bias)
    if isinstance(module, nn.LayerNorm):
        shape = module.normalized_shape
        return partial(torch.layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=module.eps)
    assert isinstance(module, nn.RMSNorm)
    return partial(torch.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)


def _product(weight: Tensor, bias: Tensor | None) -> Function:
    return partial(torch.mm, mat2=weight.T) if bias is None else partial(torch.addmm, bias, mat2=weight.T)
