"""How the heaviest things are computed: products, attention, and what a head over the vocabulary loses.

B rows, T tokens, H heads, K head width, N predictions, D width, V vocabulary. Everything here gives what the plain
formula gives, but for products in 8 bits, which a run must ask for and which are near it; which way is the fastest
depends on the device, and is known to nobody else.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels import fp8 as eight
from headstock.kernels.capability import is_ampere_or_newer, triton_works
from headstock.model.attention_mask import AttentionMask
from headstock.model.batch import IGNORE_INDEX

SCORES = 1 << 27  # so many scores of tokens are held at once: half a gigabyte in single precision
SCORES_CUDA = 1 << 29  # so many where nothing else is made of them: a gigabyte in half precision
FEW = 1 << 24  # so few are held all at once: there is nothing to gain, and any loss can be taken of them


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision that products of `x` are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., K), (N, K), (N,) -> (..., N): a layer's product."""
    return eight.linear(x, weight, bias) if eight.serves(x, weight) else F.linear(x, weight, bias)


def linear_apart(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, ...] | None:
    """A product in parts whose gradients come one by one; nothing where it is better made in one piece and split."""
    return eight.linear_apart(x, weight, bias, parts) if eight.serves(x, weight) else None


# Attention


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout: float = 0.0) -> Tensor:
    """(B, H, T, K) what every query takes from the values that the mask lets it look at."""
    if mask.cu_seqlens is not None:
        return attend_apart(query, key, value, mask.cu_seqlens, causal=mask.causal, dropout=dropout)
    return F.scaled_dot_product_attention(query, key, value, mask.allowed, dropout, mask.causal)


def reads_apart(x: Tensor, head_width: int) -> bool:
    """Whether there is a kernel that reads the documents of packed rows each by itself, with no mask to be built."""
    if head_width > 256 or compute_dtype(x) not in (torch.bfloat16, torch.float16):
        return False
    return is_ampere_or_newer(x.device)


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Attention inside each document of packed rows; `bounds` are where they begin and end in all rows end to end.

    Documents of no length are allowed, so that there may be as many bounds in every batch.
    """
    if _fits(query.size(-1), query.device):
        from headstock.kernels import attention_triton as fused_attention

        return fused_attention.attend(query, key, value, bounds, causal=causal, dropout=dropout)
    return attend_by_flash(query, key, value, bounds, causal=causal, dropout=dropout)


def takes_packed(x: Tensor, mask: AttentionMask, head_width: int) -> bool:
    """Whether attention under this mask is made best of queries, keys and values as one product leaves them."""
    return mask.cu_seqlens is not None and _fits(head_width, x.device)


def attend_packed(packed: Tensor, mask: AttentionMask, dropout: float = 0.0) -> Tensor:
    """(B, T, 3, H, K) -> (B, T, H, K): nothing is put together again on the way back."""
    from headstock.kernels import attention_triton as fused_attention

    assert mask.cu_seqlens is not None
    return fused_attention.attend_packed(packed, mask.cu_seqlens, causal=mask.causal, dropout=dropout)


def _fits(head_width: int, device: torch.device) -> bool:
    """Whether our own kernel is the faster one: it pads other widths, which takes longer."""
    return (head_width <= 64 or head_width == 128) and triton_works(device)


def attend_by_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """The same by torch's own kernel, which spends a tile of 128 x 128 scores on the shortest document."""
    rows, _, length, width = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B, H, T, K) -> (B T, H, K)
    if dropout or width % 8:  # what varlen_attn calls, which itself knows of no dropout and no other scale
        if width % 8:
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))  # zeros add nothing
        flash = torch.ops.aten._flash_attention_forward
        made = flash(q, k, v, bounds, bounds, length, length, dropout, causal, False, scale=width**-0.5)[0]
        made = made[..., :width]
    else:
        made = _varlen(q, k, v, bounds, length, causal)
    return made.unflatten(0, (rows, length)).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, length: int, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0 if causal else -1)  # how far to look back and ahead
    return varlen_attn(query, key, value, bounds, bounds, length, length, window_size=window)  # type: ignore[return-value]


# What a head over the vocabulary loses


def worth_fusing(count: int, vocabulary: int) -> bool:
    """Whether so many predictions are worth being made in parts: else all their scores are held at once."""
    return count * vocabulary > FEW


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of scores `hidden @ weight.T + bias`, and how many of the best are right.

    (N, D), (V, D), (V,), (N,). Never more than `most` scores are held, and none for the way back: the gradient is made
    together with the loss, when the scores are there anyway.
    """
    most = most or (SCORES_CUDA if in_place(hidden) else SCORES)
    rows = rows_at_once(max(1, most // len(weight)))
    small = eight.serves(hidden, weight)
    hidden = hidden.to(compute_dtype(hidden))
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, smoothing, rows, torch.is_grad_enabled(), small)


def rows_at_once(most: int) -> int:
    """Parts are in whole tiles of products. They do not depend on how many rows come: whoever compiles this would do so
    anew for every number of them."""
    return most - most % 128 or most


def in_place(x: Tensor) -> bool:
    """Whether scores on the device of `x` become their gradient in place, in as few passes over them as can be."""
    return x.is_cuda


def lose(scores: Tensor, labels: Tensor, smoothing: float, learns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) what each row of scores (n, V) loses and whether its best is right; (n, V) the gradient, if one `learns`."""
    right = scores.argmax(-1) == labels
    likely = scores.log_softmax(-1, dtype=torch.float32)
    kept, at = (labels != IGNORE_INDEX).float(), labels.clamp(min=0)[:, None]
    lost = (smoothing - 1) * likely.gather(1, at).squeeze(1)
    if smoothing:
        lost = lost - smoothing * likely.mean(-1)
    if not learns:
        return lost * kept, right, scores
    wrong = likely.exp_().scatter_add_(1, at, likely.new_full(at.shape, smoothing - 1))
    if smoothing:
        wrong -= smoothing / scores.size(1)
    return lost * kept, right, wrong.mul_(kept[:, None]).to(scores.dtype)


@torch.library.custom_op("headstock::lose_", mutates_args={"scores"})
def lose_(scores: Tensor, labels: Tensor, smoothing: float, learns: bool) -> tuple[Tensor, Tensor]:
    """The same, but that the gradient takes the place of the scores; to those who compile it is a single operation."""
    if triton_works(scores.device):
        from headstock.kernels import cross_entropy_triton as fused

        return fused.lose(scores, labels, smoothing, scores if learns else None)
    parts = max(1, -(-scores.numel() // SCORES))  # since much is made of them at once
    made = []
    for some, wanted in zip(scores.chunk(parts), labels.chunk(parts), strict=True):
        lost, right, wrong = lose(some, wanted, smoothing, learns)
        made.append((lost, right))
        if learns:
            some.copy_(wrong)
    return torch.cat([lost for lost, _ in made]), torch.cat([right for _, right in made])


@lose_.register_fake
def _(scores: Tensor, labels: Tensor, smoothing: float, learns: bool) -> tuple[Tensor, Tensor]:
    rows = scores.size(0)  # not len(), which would be compiled in
    return scores.new_empty(rows, dtype=torch.float32), scores.new_empty(rows, dtype=torch.bool)


@torch.library.custom_op("headstock::lose_small", mutates_args=())
def lose_small(scores: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same for who learns, with the gradient in 8 bits; the scores stay."""
    if triton_works(scores.device):
        from headstock.kernels import cross_entropy_triton as fused

        slopes = torch.empty_like(scores, dtype=eight.BACKWARD)
        return *fused.lose(scores, labels, smoothing, slopes, eight.WRONG), slopes
    lost, right, wrong = lose(scores, labels, smoothing, True)
    return lost, right, eight.shrink(wrong, eight.WRONG, eight.BACKWARD)


@lose_small.register_fake
def _(scores: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.size(0)
    lost, right = scores.new_empty(rows, dtype=torch.float32), scores.new_empty(rows, dtype=torch.bool)
    return lost, right, torch.empty_like(scores, dtype=eight.BACKWARD)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part.float() if total is None else total.add_(part)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        at_once: int,
        learns: bool,
        small: bool,
    ) -> tuple[Tensor, Tensor]:
        table, shift = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        head = eight.Head(weight, shift, hidden) if small else None
        loss, hits = hidden.new_zeros((), dtype=torch.float32), labels.new_zeros(())
        moves: list[Tensor] = []
        by_weight = by_bias = None
        begin, more = 0, True  # once even for nothing; not by `range`, which would be told the number of rows
        while more:
            part = slice(begin, begin + at_once)
            begin += at_once
            more = begin < len(hidden)
            rows, wanted = hidden[part], labels[part]
            if head is not None:
                lost, right, wrong = lose_small(head.scores(part), wanted, smoothing)
                move, pull, shove = head.back(wrong, part)
            else:
                scores = F.linear(rows, table, shift)  # (n, V)
                if in_place(scores):
                    lost, right = lose_(scores, wanted, smoothing, learns)
                    wrong = scores
                else:
                    lost, right, wrong = lose(scores, wanted, smoothing, learns)
                if learns:
                    move, pull = wrong @ table, wrong.mT @ rows
                    shove = None if bias is None else wrong.sum(0, dtype=torch.float32)
            loss, hits = loss + lost.sum(), hits + right.sum()
            if learns:
                moves.append(move)
                by_weight = _add(by_weight, pull)
                by_bias = None if shove is None else _add(by_bias, shove)
        by_hidden = None if not moves else moves[0] if len(moves) == 1 else torch.cat(moves)
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight, by_bias = ctx.saved_tensors
        to_bias = None if by_bias is None else by_bias * slope
        return by_hidden * slope, by_weight * slope, to_bias, None, None, None, None, None
