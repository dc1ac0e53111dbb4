"""Attention inside the documents of packed rows (Triton); imported only where Triton is available.

B rows, H heads, T tokens in a row, K head width, N = B T tokens of all rows end to end, M boundaries of documents.

A tile of query tokens is compared only with the keys that at least one of them attends to. Tiles may span several
documents, so short ones share a tile. No two programs write to the same memory: equal inputs give equal bits.

torch's varlen attention spends a tile of 128 x 128 scores on each document. For texts of 45 tokens a BERT step of
32,768 tokens on an H200 spends 5.5 ms on attention with this kernel and 19.2 ms with torch's
(docs/evidence/performance.md).
"""

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor


class Tiles(NamedTuple):
    """Tile sizes: each program owns `block` tokens and compares them with `step` at a time."""

    block: int
    step: int
    warps: int
    stages: int


FORWARD = BACKWARD_QUERY = BACKWARD_KEY = Tiles(64, 32, 4, 2)


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """(B, H, T, K) attention within documents; inputs may have any strides, but that of K must be 1 to avoid a copy.

    `cu_seqlens` (M,) runs from 0 to N. Documents may be empty, and none continues in the next row. The result has the
    memory layout of (B, T, H, K).
    """
    assert query.dtype == key.dtype == value.dtype
    output: Tensor = varlen_attention(query, key, value, cu_seqlens, _seed(query, dropout), causal, dropout)[0]
    return output


def packed_attention(packed: Tensor, cu_seqlens: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
    """(B, T, H, K) the same from one projection (B, T, 3, H, K), whose gradient then is one tensor."""
    output: Tensor = _PackedAttention.apply(packed, cu_seqlens, _seed(packed, dropout), causal, dropout)
    return output


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cu_seqlens: Tensor, seed: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        output, logsumexp, spans = varlen_attention(*_unpack(packed), cu_seqlens, seed, causal, dropout)
        ctx.save_for_backward(packed, output, logsumexp, spans, seed)
        ctx.dropout = dropout
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, *saved = ctx.saved_tensors
        packed_grad = varlen_attention_backward(grad.transpose(1, 2), *_unpack(packed), *saved, ctx.dropout)
        return packed_grad, None, None, None, None


def _seed(x: Tensor, dropout: float) -> Tensor | None:
    assert 0 <= dropout < 1
    return torch.randint(1 << 31, (1,), device=x.device) if dropout else None


@torch.library.custom_op("headstock::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, seed: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for the backward pass (H, N) base-2 logsumexp of the scores and (4, N) spans: see `_spans`."""
    output, logsumexp, spans = _outputs(query)
    query, key, value = _dense(query), _dense(key), _dense(value)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _spans[(len(cu_seqlens) - 1,)](cu_seqlens, spans, spans.size(1), CAUSAL=causal, BLOCK=128, num_warps=1)
        settings = _settings(query, dropout, FORWARD)
        tensors = map(_with_strides, (query, key, value, output))
        _forward[_grid(query, FORWARD)](*tensors, logsumexp, spans, seed, **settings)
    return output, logsumexp, spans


@torch.library.custom_op("headstock::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    spans: Tensor,
    seed: Tensor | None,
    dropout: float,
) -> Tensor:
    """(B, T, 3, H, K) gradients of queries, keys and values, in the layout of one projection."""
    packed_grad = _packed_like(query)
    grad, query, key, value = (_dense(x) for x in (grad, query, key, value))
    query_grad, key_grad, value_grad = _unpack(packed_grad)
    dots = torch.empty_like(logsumexp)
    passes = (
        (_backward_query, BACKWARD_QUERY, (query, key, value, output, grad, query_grad)),
        (_backward_key, BACKWARD_KEY, (query, key, value, grad, key_grad, value_grad)),
    )
    with torch.cuda.device_of(query):
        for kernel, tiles, tensors in passes:
            settings = _settings(query, dropout, tiles)
            kernel[_grid(query, tiles)](*map(_with_strides, tensors), logsumexp, dots, spans, seed, **settings)
    return packed_grad


@varlen_attention.register_fake
def _outputs(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, length, width = query.shape
    return (
        query.new_empty(rows, length, heads, width).transpose(1, 2),
        query.new_empty(heads, rows * length, dtype=torch.float32),
        query.new_empty(4, rows * length, dtype=torch.int32),
    )


@varlen_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, *_: Any) -> Tensor:
    return _packed_like(query)


def _packed_like(query: Tensor) -> Tensor:
    rows, heads, length, width = query.shape
    return query.new_empty(rows, length, 3, heads, width)


def _unpack(x: Tensor) -> tuple[Tensor, ...]:
    return x.transpose(1, 3).unbind(2)  # (B, T, 3, H, K) -> (B, H, 3, T, K) -> each (B, H, T, K)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, seed, _, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output, seed)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zero gradients for these


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    packed_grad = varlen_attention_backward(grad, *ctx.saved_tensors, ctx.dropout)
    return *_unpack(packed_grad), None, None, None, None


varlen_attention.register_autograd(_backward, setup_context=_setup_context)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _with_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor (B, H, T, K) with the strides of its rows, heads and tokens."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def _grid(query: Tensor, tiles: Tiles) -> tuple[int]:
    """All heads of a tile of tokens are neighbours, as they are in memory."""
    rows, heads, length, _ = query.shape
    return (triton.cdiv(rows * length, tiles.block) * heads,)


def _settings(query: Tensor, dropout: float, tiles: Tiles) -> dict[str, Any]:
    rows, heads, length, width = query.shape
    return {
        "scale": width**-0.5,
        "keep_scale": 1 / (1 - dropout),
        "tokens": rows * length,
        "heads": heads,
        "DROP_BELOW": round(dropout * (1 << 32)),
        "LENGTH": length,  # a compile-time constant, so that divisions by it are cheap
        "WIDTH": width,
        "COLUMNS": max(16, triton.next_power_of_2(width)),
        "BLOCK": tiles.block,
        "STEP": tiles.step,
        "num_warps": tiles.warps if width <= 64 else 2 * tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def _spans(cu_seqlens, spans, tokens, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """(4, N): first and end of the keys each query attends to, then of the queries that attend to each key."""
    first = tl.load(cu_seqlens + tl.program_id(0))
    end = tl.load(cu_seqlens + tl.program_id(0) + 1)
    for begin in range(first, end, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        mask = index < end
        tl.store(spans + index, tl.zeros_like(index) + first, mask=mask)
        tl.store(spans + tokens + index, index + 1 if CAUSAL else tl.zeros_like(index) + end, mask=mask)
        tl.store(spans + 2 * tokens + index, index if CAUSAL else tl.zeros_like(index) + first, mask=mask)
        tl.store(spans + 3 * tokens + index, tl.zeros_like(index) + end, mask=mask)


@triton.jit
def _pointers(x, head, index, LENGTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(len(index), COLUMNS) addresses of the vectors of some tokens, in 64 bits."""
    start, row_stride, head_stride, token_stride = x
    token = (index // LENGTH).to(tl.int64) * row_stride + (index % LENGTH).to(tl.int64) * token_stride
    return start + head * head_stride + token[:, None] + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _load(x, head, index, tokens, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(len(index), COLUMNS) vectors of some tokens; zeros out of bounds."""
    mask = (index < tokens)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return tl.load(_pointers(x, head, index, LENGTH, COLUMNS), mask=mask, other=0.0)


@triton.jit
def _store(x, values, head, index, tokens, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (index < tokens)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(_pointers(x, head, index, LENGTH, COLUMNS), values.to(x[0].dtype.element_ty), mask=mask)


@triton.jit
def _tile(spans, tokens, heads, BLOCK: tl.constexpr):
    """A program's head and tokens, the span of each token, and the union of these spans."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    start = tl.program_id(0) // heads * BLOCK
    index = start + tl.arange(0, BLOCK)
    begins = tl.load(spans + index, mask=index < tokens, other=0)  # empty spans beyond the last token
    ends = tl.load(spans + tokens + index, mask=index < tokens, other=0)
    low = tl.load(spans + start)
    high = tl.load(spans + tokens + tl.minimum(start + BLOCK, tokens) - 1)
    return head, index, begins, ends, low, high


@triton.jit
def _salt(seed, head):
    """A hash (lowbias32) of seed and head, which makes the dropout of each call and head different."""
    x = tl.load(seed).to(tl.uint32) + head.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _keep(query, key, salt, DROP_BELOW: tl.constexpr):
    """Whether dropout keeps a pair of query and key: the same in every kernel and tile.

    Pairs of a head are numbered with a stride of the golden ratio of 2^32 per query, so that no two pairs collide among
    50 thousand tokens; a collision would only drop both together. The salted number is hashed as above without the last
    step, which changes low bits only. Neighbouring pairs are then independent, which is all that dropout needs. Philox
    takes five times as many multiplications.
    """
    x = query.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    x = (x ^ (x >> 16) ^ salt) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x >= DROP_BELOW


@triton.jit
def _forward(
    query, key, value, output, logsumexp, spans, seed, scale, keep_scale, tokens, heads,
    DROP_BELOW: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, queries, begins, ends, low, high = _tile(spans, tokens, heads, BLOCK)
    q = _load(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    maximum = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    if DROP_BELOW:
        salt = _salt(seed, head)
    for begin in range(low, high, STEP):
        keys = begin + tl.arange(0, STEP)
        k = _load(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        v = _load(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # exp2 instead of exp
        allowed = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        # not -inf, since -inf minus -inf is NaN: contributions of a tile without allowed keys are scaled to zero as
        # soon as one is allowed, and every query may attend to itself
        scores = tl.where(allowed, scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, 1)
        if DROP_BELOW:
            weights = tl.where(_keep(queries[:, None], keys[None, :], salt, DROP_BELOW), weights, 0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    _store(output, sums * (keep_scale / total)[:, None], head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    tl.store(logsumexp + head * tokens + queries, maximum + tl.log2(total), mask=queries < tokens)


@triton.jit
def _backward_query(
    query, key, value, output, grad, query_grad, logsumexp, dots, spans, seed, scale, keep_scale, tokens, heads,
    DROP_BELOW: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, and `dots` (output times its gradient), which the gradient of keys needs."""
    head, queries, begins, ends, low, high = _tile(spans, tokens, heads, BLOCK)
    q = _load(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    o = _load(output, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    g = _load(grad, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    log = tl.load(logsumexp + head * tokens + queries, mask=queries < tokens, other=0.0)
    dot = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(dots + head * tokens + queries, dot, mask=queries < tokens)
    sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    if DROP_BELOW:
        salt = _salt(seed, head)
    for begin in range(low, high, STEP):
        keys = begin + tl.arange(0, STEP)
        k = _load(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        v = _load(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        allowed = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        weights = tl.where(allowed, tl.exp2(scores - log[:, None]), 0.0)
        weights_grad = tl.dot(g, tl.trans(v), input_precision="ieee")
        if DROP_BELOW:
            keep = _keep(queries[:, None], keys[None, :], salt, DROP_BELOW)
            weights_grad = tl.where(keep, weights_grad * keep_scale, 0.0)
        scores_grad = weights * (weights_grad - dot[:, None])
        sums = tl.dot(scores_grad.to(k.dtype), k, sums, input_precision="ieee")
    _store(query_grad, sums * scale, head, queries, tokens, LENGTH, WIDTH, COLUMNS)


@triton.jit
def _backward_key(
    query, key, value, grad, key_grad, value_grad, logsumexp, dots, spans, seed, scale, keep_scale, tokens, heads,
    DROP_BELOW: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values. Scores have one row per key here, so that none is transposed."""
    head, keys, begins, ends, low, high = _tile(spans + 2 * tokens, tokens, heads, BLOCK)
    k = _load(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    v = _load(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    key_sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    value_sums = tl.zeros((BLOCK, COLUMNS), tl.float32)
    if DROP_BELOW:
        salt = _salt(seed, head)
    for begin in range(low, high, STEP):
        queries = begin + tl.arange(0, STEP)
        q = _load(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
        g = _load(grad, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
        log = tl.load(logsumexp + head * tokens + queries, mask=queries < tokens, other=0.0)
        dot = tl.load(dots + head * tokens + queries, mask=queries < tokens, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)
        allowed = (queries[None, :] >= begins[:, None]) & (queries[None, :] < ends[:, None])
        weights = tl.where(allowed, tl.exp2(scores - log[None, :]), 0.0)
        weights_grad = tl.dot(v, tl.trans(g), input_precision="ieee")
        dropped_weights = weights
        if DROP_BELOW:
            keep = _keep(queries[None, :], keys[:, None], salt, DROP_BELOW)
            dropped_weights = tl.where(keep, weights, 0.0)
            weights_grad = tl.where(keep, weights_grad * keep_scale, 0.0)
        value_sums = tl.dot(dropped_weights.to(g.dtype), g, value_sums, input_precision="ieee")
        scores_grad = weights * (weights_grad - dot[None, :])
        key_sums = tl.dot(scores_grad.to(q.dtype), q, key_sums, input_precision="ieee")
    _store(key_grad, key_sums * scale, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    _store(value_grad, value_sums * keep_scale, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
