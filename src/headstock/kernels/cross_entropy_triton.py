"""What rows of scores lose, and their gradient, by one Triton kernel: imported only where there is Triton.

N rows, V vocabulary.
"""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from headstock.model.batch import IGNORE_INDEX

BLOCK = 8192  # scores read at once: a row of usual length is a few blocks, whose second reading the cache serves


def lose(
    scores: Tensor, labels: Tensor, smoothing: float, slopes: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(N,) what each row of scores (N, V) loses, and whether the first of its best scores is that of its label.

    The gradient of the summed loss, scaled, goes into `slopes` (N, V) if there are any: perhaps the scores themselves.
    """
    rows, vocabulary = scores.shape
    assert scores.stride(1) == 1 and (slopes is None or slopes.stride(1) == 1)
    lost = torch.empty(rows, dtype=torch.float32, device=scores.device)
    right = torch.empty(rows, dtype=torch.bool, device=scores.device)
    made = scores if slopes is None else slopes
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    if rows:
        with torch.cuda.device_of(scores):  # Triton starts kernels on the current device
            _row[(rows,)](
                scores,
                labels.contiguous(),
                lost,
                right,
                made,
                scores.stride(0),
                made.stride(0),
                vocabulary,
                float(smoothing),
                float(scale),
                IGNORE=IGNORE_INDEX,
                SMOOTH=smoothing > 0,
                LEARNS=slopes is not None,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
            )
    return lost, right


@triton.jit
def _row(
    scores,
    labels,
    lost,
    right,
    slopes,
    stride,
    slopes_stride,
    vocabulary,
    smoothing,
    scale,
    IGNORE: tl.constexpr,
    SMOOTH: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634  # powers of two are what the hardware makes
    row = tl.program_id(0).to(tl.int64)  # there may be more scores than 32 bits can count
    scores += row * stride
    slopes += row * slopes_stride
    label = tl.load(labels + row).to(tl.int32)
    places = tl.arange(0, BLOCK)
    if label == IGNORE:
        tl.store(lost + row, 0.0)
        tl.store(right + row, False)
        if LEARNS:
            for begin in range(0, vocabulary, BLOCK):
                at = begin + places
                nothing = tl.zeros((BLOCK,), tl.float32)
                tl.store(slopes + at, nothing.to(slopes.dtype.element_ty), mask=at < vocabulary)
    else:
        # a label that is no token makes the loss NaN, instead of reading the memory of others
        own = tl.load(scores + label, mask=(label >= 0) & (label < vocabulary), other=float("nan")).to(tl.float32)
        # each lane reads for itself, and they are brought together once a reading: that is what they would wait for
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)  # the sum of the scores
        for begin in range(0, vocabulary, BLOCK):
            at = begin + places
            x = tl.load(scores + at, mask=at < vocabulary, other=float("-inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)
            highest = tl.maximum(highest, x)
            if SMOOTH:
                plain += tl.where(at < vocabulary, x, 0.0)
        best = tl.max(highest, 0)
        earlier = 0
        if own == best:  # of equal scores the first is the best: is there one before?
            equal = tl.zeros((BLOCK,), tl.int32)
            for begin in range(0, label, BLOCK):
                at = begin + places
                x = tl.load(scores + at, mask=at < label, other=float("-inf"), eviction_policy="evict_last")
                equal += tl.where(x.to(tl.float32) == best, 1, 0)
            earlier = tl.sum(equal, 0)
        base = tl.where(best == float("-inf"), 0.0, best) * LOG2E  # scores may forbid: -inf less itself is no number
        powers = tl.zeros((BLOCK,), tl.float32)  # the sum of exp(score - best)
        for begin in range(0, vocabulary, BLOCK):
            at = begin + places
            x = tl.load(scores + at, mask=at < vocabulary, other=float("-inf"), eviction_policy="evict_last")
            powers += tl.exp2(x.to(tl.float32) * LOG2E - base)
        norm = best + tl.log(tl.sum(powers, 0))
        loss = norm - own
        if SMOOTH:
            loss = (1 - smoothing) * loss + smoothing * (norm - tl.sum(plain, 0) / vocabulary)
        tl.store(lost + row, loss)
        tl.store(right + row, (own == best) & (earlier == 0))
        if LEARNS:
            base = norm * LOG2E
            for begin in range(0, vocabulary, BLOCK):
                at = begin + places
                x = tl.load(scores + at, mask=at < vocabulary, other=0.0, eviction_policy="evict_first")
                wrong = tl.exp2(x.to(tl.float32) * LOG2E - base)
                if SMOOTH:
                    wrong -= smoothing / vocabulary
                    wrong = tl.where(at == label, wrong - (1 - smoothing), wrong)
                else:
                    wrong = tl.where(at == label, wrong - 1.0, wrong)
                tl.store(slopes + at, (wrong * scale).to(slopes.dtype.element_ty), mask=at < vocabulary)
