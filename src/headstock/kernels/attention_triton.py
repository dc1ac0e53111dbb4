"""Attention inside the short documents of packed rows, by Triton kernels: imported only where there is Triton.

B rows, H heads, T tokens in a row, K head width, N = B T tokens in all rows end to end, M bounds of documents.

A tile of tokens is compared only with the tokens that one of it sees: with its own documents and what they reach into
on both sides. Nothing is as long as a row, no tile is spent on each document, and nobody adds to what another writes:
the same inputs give the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor


class Tiles(NamedTuple):
    """How a kernel cuts its work, each program having `own` tokens, to which it compares `others` at a time."""

    own: int
    others: int
    warps: int
    stages: int


FORWARD = BY_QUERY = BY_KEY = Tiles(64, 32, 4, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
    """(B, H, T, K) what every query takes from the values of its document, of any strides but that of K, which is 1.

    `bounds` (M,) are where documents begin and end in all rows end to end, from 0 to N; some may have no length, and
    none goes on from one row to the next. What is given has the memory of (B, T, H, K).
    """
    assert query.dtype == key.dtype == value.dtype
    mixed: Tensor = attend_apart(query, key, value, bounds, _seed(query, dropout), causal, dropout)[0]
    return mixed


def attend_packed(packed: Tensor, bounds: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
    """(B, T, H, K) the same of (B, T, 3, H, K) as one product makes them, whose gradient then comes in one piece."""
    mixed: Tensor = _Packed.apply(packed, bounds, _seed(packed, dropout), causal, dropout)
    return mixed


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, bounds: Tensor, seed: Tensor | None, causal: bool, dropout: float) -> Tensor:
        mixed, logs, spans = attend_apart(*_unpacked(packed), bounds, seed, causal, dropout)
        ctx.save_for_backward(packed, mixed, logs, spans, seed)
        ctx.dropout = dropout
        return mixed.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, toward: Tensor) -> tuple[Tensor | None, ...]:
        packed, *others = ctx.saved_tensors
        slopes = attend_apart_backward(toward.transpose(1, 2), *_unpacked(packed), *others, ctx.dropout)
        return slopes, None, None, None, None


def _seed(x: Tensor, dropout: float) -> Tensor | None:
    assert 0 <= dropout < 1
    return torch.randint(1 << 31, (1,), device=x.device) if dropout else None


@torch.library.custom_op("headstock::attend_apart", mutates_args=())
def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, seed: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and for the way back (H, N) the logarithm of what weights were divided by, and (4, N) who sees whom."""
    mixed, logs, spans = _made(query)
    query, key, value = _dense(query), _dense(key), _dense(value)
    with torch.cuda.device_of(query):  # Triton starts kernels on the current device
        _span[(len(bounds) - 1,)](bounds, spans, spans.size(1), CAUSAL=causal, BLOCK=128, num_warps=1)
        settings = _settings(query, dropout, FORWARD)
        _forward[_grid(query, FORWARD)](*map(_steps, (query, key, value, mixed)), logs, spans, seed, **settings)
    return mixed, logs, spans


@torch.library.custom_op("headstock::attend_apart_backward", mutates_args=())
def attend_apart_backward(
    toward: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    logs: Tensor,
    spans: Tensor,
    seed: Tensor | None,
    dropout: float,
) -> Tensor:
    """(B, T, 3, H, K) the gradients of queries, keys and values, as one product makes these."""
    slopes = _slopes(query)
    toward, query, key, value = (_dense(x) for x in (toward, query, key, value))
    by_query, by_key, by_value = _unpacked(slopes)
    dots = torch.empty_like(logs)
    ways = (
        (_by_query, BY_QUERY, (query, key, value, mixed, toward, by_query)),
        (_by_key, BY_KEY, (query, key, value, toward, by_key, by_value)),
    )
    with torch.cuda.device_of(query):
        for kernel, tiles, given in ways:
            settings = _settings(query, dropout, tiles)
            kernel[_grid(query, tiles)](*map(_steps, given), logs, dots, spans, seed, **settings)
    return slopes


@attend_apart.register_fake
def _made(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, length, width = query.shape
    return (
        query.new_empty(rows, length, heads, width).transpose(1, 2),
        query.new_empty(heads, rows * length, dtype=torch.float32),
        query.new_empty(4, rows * length, dtype=torch.int32),
    )


@attend_apart_backward.register_fake
def _(toward: Tensor, query: Tensor, *_: Any) -> Tensor:
    return _slopes(query)


def _slopes(query: Tensor) -> Tensor:
    rows, heads, length, width = query.shape
    return query.new_empty(rows, length, 3, heads, width)


def _unpacked(x: Tensor) -> tuple[Tensor, ...]:
    return x.transpose(1, 3).unbind(2)  # (B, T, 3, H, K) -> (B, H, 3, T, K) -> each (B, H, T, K)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, seed, _, ctx.dropout = inputs
    ctx.save_for_backward(query, key, value, *output, seed)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # so that no zeros are made for these


def _back(ctx: Any, toward: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    slopes = attend_apart_backward(toward, *ctx.saved_tensors, ctx.dropout)
    return *_unpacked(slopes), None, None, None, None


attend_apart.register_autograd(_back, setup_context=_keep)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _steps(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor of (B, H, T, K), and how far apart its rows, heads and tokens are."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def _grid(query: Tensor, tiles: Tiles) -> tuple[int]:
    """All heads of a tile of tokens come together, since they lie together."""
    rows, heads, length, _ = query.shape
    return (triton.cdiv(rows * length, tiles.own) * heads,)


def _settings(query: Tensor, dropout: float, tiles: Tiles) -> dict[str, Any]:
    rows, heads, length, width = query.shape
    return {
        "scale": width**-0.5,
        "kept": 1 / (1 - dropout),
        "tokens": rows * length,
        "heads": heads,
        "DROPPED": round(dropout * (1 << 32)),
        "LENGTH": length,  # known to the compiler, so that it divides by it cheaply
        "WIDTH": width,
        "COLUMNS": max(16, triton.next_power_of_2(width)),
        "OWN": tiles.own,
        "OTHERS": tiles.others,
        "num_warps": tiles.warps if width <= 64 else 2 * tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def _span(bounds, spans, tokens, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """From where to where the keys are that a query sees, and the queries that see a key, for a document's tokens."""
    first = tl.load(bounds + tl.program_id(0))
    end = tl.load(bounds + tl.program_id(0) + 1)
    for begin in range(first, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < end
        tl.store(spans + at, tl.zeros_like(at) + first, mask=inside)
        tl.store(spans + tokens + at, at + 1 if CAUSAL else tl.zeros_like(at) + end, mask=inside)
        tl.store(spans + 2 * tokens + at, at if CAUSAL else tl.zeros_like(at) + first, mask=inside)
        tl.store(spans + 3 * tokens + at, tl.zeros_like(at) + end, mask=inside)


@triton.jit
def _places(x, head, at, LENGTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(len(at), COLUMNS) where the vectors of some tokens lie: in 64 bits, since there may be many."""
    begin, by_row, by_head, by_token = x
    token = (at // LENGTH).to(tl.int64) * by_row + (at % LENGTH).to(tl.int64) * by_token
    return begin + head * by_head + token[:, None] + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _read(x, head, at, tokens, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(len(at), COLUMNS) the vectors of some tokens; zeros where there is no such token or column."""
    there = (at < tokens)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return tl.load(_places(x, head, at, LENGTH, COLUMNS), mask=there, other=0.0)


@triton.jit
def _write(x, made, head, at, tokens, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    there = (at < tokens)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(_places(x, head, at, LENGTH, COLUMNS), made.to(x[0].dtype.element_ty), mask=there)


@triton.jit
def _tile(spans, tokens, heads, OWN: tl.constexpr):
    """A program's head and tokens, from where to where each of these sees others, and where all do."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    start = tl.program_id(0) // heads * OWN
    own = start + tl.arange(0, OWN)
    begins = tl.load(spans + own, mask=own < tokens, other=0)  # beyond the last token nothing is seen
    ends = tl.load(spans + tokens + own, mask=own < tokens, other=0)
    low = tl.load(spans + start)
    high = tl.load(spans + tokens + tl.minimum(start + OWN, tokens) - 1)
    return head, own, begins, ends, low, high


@triton.jit
def _salt(seed, head):
    """What makes the draws of each call and head others: lowbias32, a mixer of 32 bits, of both."""
    x = tl.load(seed).to(tl.uint32) + head.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stays(query, key, salt, DROPPED: tl.constexpr):
    """Whether dropout leaves a pair of tokens: the same answer to whoever asks, in whatever tile.

    The pairs of a head are counted, each query a golden ratio of 2^32 after the one before, so that among 50 thousand
    tokens no two pairs have the same number; if they had, they would only be dropped together. The salted number is
    mixed as above, less the last step, which moves low bits alone: each of its bits changes each of the result with
    nearly even chances, so that a pair tells nothing of its neighbours, which is all that dropout asks of its draws.
    Philox, which passes any test of randomness, needs five times as many products for each.
    """
    x = query.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    x = (x ^ (x >> 16) ^ salt) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x >= DROPPED


@triton.jit
def _forward(
    query, key, value, mixed, logs, spans, seed, scale, kept, tokens, heads,
    DROPPED: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    head, queries, begins, ends, low, high = _tile(spans, tokens, heads, OWN)
    q = _read(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    highest = tl.full((OWN,), -1e30, tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    made = tl.zeros((OWN, COLUMNS), tl.float32)
    if DROPPED:
        salt = _salt(seed, head)
    for begin in range(low, high, OTHERS):
        keys = begin + tl.arange(0, OTHERS)
        k = _read(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        v = _read(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # for powers of two
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        # not -inf, which less itself is no number: what comes of a tile where a query sees nothing is taken back as
        # soon as it sees something, and it sees itself
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if DROPPED:
            weights = tl.where(_stays(queries[:, None], keys[None, :], salt, DROPPED), weights, 0.0)
        made = tl.dot(weights.to(v.dtype), v, made * shrink[:, None], input_precision="ieee")
        highest = higher
    _write(mixed, made * (kept / total)[:, None], head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    tl.store(logs + head * tokens + queries, highest + tl.log2(total), mask=queries < tokens)


@triton.jit
def _by_query(
    query, key, value, mixed, toward, slope, logs, dots, spans, seed, scale, kept, tokens, heads,
    DROPPED: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The gradient of queries; and what that of keys needs: how far each mixed vector already is where it should go."""
    head, queries, begins, ends, low, high = _tile(spans, tokens, heads, OWN)
    q = _read(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    m = _read(mixed, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    t = _read(toward, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
    log = tl.load(logs + head * tokens + queries, mask=queries < tokens, other=0.0)
    dot = tl.sum(m.to(tl.float32) * t.to(tl.float32), 1)
    tl.store(dots + head * tokens + queries, dot, mask=queries < tokens)
    made = tl.zeros((OWN, COLUMNS), tl.float32)
    if DROPPED:
        salt = _salt(seed, head)
    for begin in range(low, high, OTHERS):
        keys = begin + tl.arange(0, OTHERS)
        k = _read(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        v = _read(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (keys[None, :] >= begins[:, None]) & (keys[None, :] < ends[:, None])
        weights = tl.where(seen, tl.exp2(scores - log[:, None]), 0.0)
        by_weight = tl.dot(t, tl.trans(v), input_precision="ieee")
        if DROPPED:
            by_weight = tl.where(_stays(queries[:, None], keys[None, :], salt, DROPPED), by_weight * kept, 0.0)
        by_score = weights * (by_weight - dot[:, None])
        made = tl.dot(by_score.to(k.dtype), k, made, input_precision="ieee")
    _write(slope, made * scale, head, queries, tokens, LENGTH, WIDTH, COLUMNS)


@triton.jit
def _by_key(
    query, key, value, toward, key_slope, value_slope, logs, dots, spans, seed, scale, kept, tokens, heads,
    DROPPED: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values. Scores have a row for each key here, so that none of them is ever turned."""
    head, keys, begins, ends, low, high = _tile(spans + 2 * tokens, tokens, heads, OWN)
    k = _read(key, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    v = _read(value, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    by_key = tl.zeros((OWN, COLUMNS), tl.float32)
    by_value = tl.zeros((OWN, COLUMNS), tl.float32)
    if DROPPED:
        salt = _salt(seed, head)
    for begin in range(low, high, OTHERS):
        queries = begin + tl.arange(0, OTHERS)
        q = _read(query, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
        t = _read(toward, head, queries, tokens, LENGTH, WIDTH, COLUMNS)
        log = tl.load(logs + head * tokens + queries, mask=queries < tokens, other=0.0)
        dot = tl.load(dots + head * tokens + queries, mask=queries < tokens, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = (queries[None, :] >= begins[:, None]) & (queries[None, :] < ends[:, None])
        weights = tl.where(seen, tl.exp2(scores - log[None, :]), 0.0)
        by_weight = tl.dot(v, tl.trans(t), input_precision="ieee")
        given = weights
        if DROPPED:
            stays = _stays(queries[None, :], keys[:, None], salt, DROPPED)
            given = tl.where(stays, weights, 0.0)
            by_weight = tl.where(stays, by_weight * kept, 0.0)
        by_value = tl.dot(given.to(t.dtype), t, by_value, input_precision="ieee")
        by_score = weights * (by_weight - dot[None, :])
        by_key = tl.dot(by_score.to(q.dtype), q, by_key, input_precision="ieee")
    _write(key_slope, by_key * scale, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
    _write(value_slope, by_value * kept, head, keys, tokens, LENGTH, WIDTH, COLUMNS)
