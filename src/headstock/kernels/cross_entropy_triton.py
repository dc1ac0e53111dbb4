"""Fused cross-entropy loss and gradient (Triton); imported only where Triton is available.  N rows, V vocabulary."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from headstock.kernels.cross_entropy import IGNORE_INDEX

BLOCK = 8192  # logits per load: a row is a few blocks, and the cache serves its second pass


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, grad: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(N,) losses of logits (N, V), and (N,) whether the label is the first of the highest logits.

    The gradient of the summed loss times `scale` is written into `grad` (N, V), which may be the logits themselves.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and (grad is None or grad.stride(1) == 1)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
    target = logits if grad is None else grad
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            _cross_entropy_row[(rows,)](
                logits,
                labels.contiguous(),
                losses,
                correct,
                target,
                logits.stride(0),
                target.stride(0),
                vocabulary,
                float(smoothing),
                float(scale),
                IGNORE_INDEX=IGNORE_INDEX,
                SMOOTH=smoothing > 0,
                WITH_GRAD=grad is not None,
                BLOCK=block,
                num_warps=max(1, min(16, block // 512)),
            )
    return losses, correct


@triton.jit
def _cross_entropy_row(
    logits,
    labels,
    losses,
    correct,
    grad,
    stride,
    grad_stride,
    vocabulary,
    smoothing,
    scale,
    IGNORE_INDEX: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634  # the hardware computes powers of two
    row = tl.program_id(0).to(tl.int64)  # offsets may exceed 32 bits
    logits += row * stride
    grad += row * grad_stride
    label = tl.load(labels + row).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    if label == IGNORE_INDEX:
        tl.store(losses + row, 0.0)
        tl.store(correct + row, False)
        if WITH_GRAD:
            for begin in range(0, vocabulary, BLOCK):
                index = begin + lanes
                zeros = tl.zeros((BLOCK,), tl.float32)
                tl.store(grad + index, zeros.to(grad.dtype.element_ty), mask=index < vocabulary)
    else:
        # an invalid label gives a NaN loss instead of reading out of bounds
        valid = (label >= 0) & (label < vocabulary)
        label_logit = tl.load(logits + label, mask=valid, other=float("nan")).to(tl.float32)
        # lanes accumulate separately and are reduced once per pass, since reductions synchronize
        maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
        totals = tl.zeros((BLOCK,), tl.float32)  # of the logits
        for begin in range(0, vocabulary, BLOCK):
            index = begin + lanes
            x = tl.load(logits + index, mask=index < vocabulary, other=float("-inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)
            maxima = tl.maximum(maxima, x)
            if SMOOTH:
                totals += tl.where(index < vocabulary, x, 0.0)
        maximum = tl.max(maxima, 0)
        earlier = 0
        if label_logit == maximum:  # ties go to the first, as in argmax
            ties = tl.zeros((BLOCK,), tl.int32)
            for begin in range(0, label, BLOCK):
                index = begin + lanes
                x = tl.load(logits + index, mask=index < label, other=float("-inf"), eviction_policy="evict_last")
                ties += tl.where(x.to(tl.float32) == maximum, 1, 0)
            earlier = tl.sum(ties, 0)
        base = tl.where(maximum == float("-inf"), 0.0, maximum) * LOG2E  # -inf minus -inf would be NaN
        powers = tl.zeros((BLOCK,), tl.float32)  # sums of exp(logit - maximum)
        for begin in range(0, vocabulary, BLOCK):
            index = begin + lanes
            x = tl.load(logits + index, mask=index < vocabulary, other=float("-inf"), eviction_policy="evict_last")
            powers += tl.exp2(x.to(tl.float32) * LOG2E - base)
        logsumexp = maximum + tl.log(tl.sum(powers, 0))
        loss = logsumexp - label_logit
        if SMOOTH:
            loss = (1 - smoothing) * loss + smoothing * (logsumexp - tl.sum(totals, 0) / vocabulary)
        tl.store(losses + row, loss)
        tl.store(correct + row, (label_logit == maximum) & (earlier == 0))
        if WITH_GRAD:
            base = logsumexp * LOG2E
            for begin in range(0, vocabulary, BLOCK):
                index = begin + lanes
                x = tl.load(logits + index, mask=index < vocabulary, other=0.0, eviction_policy="evict_first")
                logit_grad = tl.exp2(x.to(tl.float32) * LOG2E - base)
                if SMOOTH:
                    logit_grad -= smoothing / vocabulary
                    logit_grad = tl.where(index == label, logit_grad - (1 - smoothing), logit_grad)
                else:
                    logit_grad = tl.where(index == label, logit_grad - 1.0, logit_grad)
                tl.store(grad + index, (logit_grad * scale).to(grad.dtype.element_ty), mask=index < vocabulary)
