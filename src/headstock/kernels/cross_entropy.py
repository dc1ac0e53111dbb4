"""Cross entropy of a linear layer over the vocabulary, without holding all logits.

N predictions, n of them in a chunk, D width, V vocabulary.

Logits are computed chunk by chunk, and their gradient together with the loss while they are there: the backward pass
needs neither logits nor softmax. `cross_entropy` is the plain reference for one chunk; on CUDA one Triton kernel
(cross_entropy_triton.py) overwrites the logits with their gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels import fp8
from headstock.kernels.backends import compute_dtype, triton_works

IGNORE_INDEX = -100  # the label of a position that is not predicted, as in torch.nn.functional.cross_entropy
MAX_LOGITS = 1 << 27  # logits in a chunk: 512 MiB in float32
MAX_LOGITS_CUDA = 1 << 29  # in a chunk whose gradient overwrites it: 1 GiB in bfloat16
MIN_LOGITS = 1 << 24  # with fewer, chunks save nothing


def worth_chunking(count: int, vocabulary: int) -> bool:
    """Whether so many predictions should go through `linear_cross_entropy`."""
    return count * vocabulary > MIN_LOGITS


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    max_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of `hidden @ weight.T + bias`, and the number of correct top-1 predictions.

    (N, D), (V, D), (V,), (N,). At most `max_logits` logits exist at a time.
    """
    max_logits = max_logits or (MAX_LOGITS_CUDA if updates_in_place(hidden) else MAX_LOGITS)
    rows = chunk_rows(max(1, max_logits // len(weight)))
    use_fp8 = fp8.applies(hidden, weight)
    hidden = hidden.to(compute_dtype(hidden))
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(
            hidden, weight, bias, labels, smoothing, rows, torch.is_grad_enabled(), use_fp8
        )


def chunk_rows(limit: int) -> int:
    """Rows of a chunk: whole matmul tiles where possible.

    It does not depend on the number of predictions, so that torch.compile does not recompile for each.
    """
    return limit - limit % 128 or limit


def updates_in_place(x: Tensor) -> bool:
    """Whether the gradient of logits overwrites them, as it does on CUDA to save memory traffic."""
    return x.is_cuda


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, with_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) losses, (n,) True where the top-1 prediction is correct, (n, V) gradient of the sum if `with_grad`."""
    correct = logits.argmax(-1) == labels
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    mask, index = (labels != IGNORE_INDEX).float(), labels.clamp(min=0)[:, None]
    losses = (smoothing - 1) * log_probs.gather(1, index).squeeze(1)
    if smoothing:
        losses = losses - smoothing * log_probs.mean(-1)
    if not with_grad:
        return losses * mask, correct, logits
    grad = log_probs.exp_().scatter_add_(1, index, log_probs.new_full(index.shape, smoothing - 1))
    if smoothing:
        grad -= smoothing / logits.size(1)
    return losses * mask, correct, grad.mul_(mask[:, None]).to(logits.dtype)


@torch.library.custom_op("headstock::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(logits: Tensor, labels: Tensor, smoothing: float, with_grad: bool) -> tuple[Tensor, Tensor]:
    """The same, with the gradient written over the logits; one opaque operation to torch.compile."""
    if triton_works(logits.device):
        from headstock.kernels import cross_entropy_triton

        return cross_entropy_triton.cross_entropy(logits, labels, smoothing, logits if with_grad else None)
    parts = max(1, -(-logits.numel() // MAX_LOGITS))  # the reference holds several tensors of this size
    results = []
    for chunk, chunk_labels in zip(logits.chunk(parts), labels.chunk(parts), strict=True):
        losses, correct, grad = cross_entropy(chunk, chunk_labels, smoothing, with_grad)
        results.append((losses, correct))
        if with_grad:
            chunk.copy_(grad)
    return torch.cat([losses for losses, _ in results]), torch.cat([correct for _, correct in results])


@cross_entropy_.register_fake
def _(logits: Tensor, labels: Tensor, smoothing: float, with_grad: bool) -> tuple[Tensor, Tensor]:
    rows = logits.size(0)  # len() would be specialized to a constant
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.bool)


@torch.library.custom_op("headstock::cross_entropy_fp8", mutates_args=())
def cross_entropy_fp8(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the gradient in fp8, scaled by fp8.CROSS_ENTROPY_SCALE; the logits are not changed."""
    if triton_works(logits.device):
        from headstock.kernels import cross_entropy_triton

        grad = torch.empty_like(logits, dtype=fp8.GRADIENT)
        return *cross_entropy_triton.cross_entropy(logits, labels, smoothing, grad, fp8.CROSS_ENTROPY_SCALE), grad
    losses, correct, grad = cross_entropy(logits, labels, smoothing, True)
    return losses, correct, fp8.quantize(grad, fp8.CROSS_ENTROPY_SCALE, fp8.GRADIENT)


@cross_entropy_fp8.register_fake
def _(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.size(0)
    losses, correct = logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.bool)
    return losses, correct, torch.empty_like(logits, dtype=fp8.GRADIENT)


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
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
        chunk: int,
        with_grad: bool,
        use_fp8: bool,
    ) -> tuple[Tensor, Tensor]:
        half_weight, half_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        fp8_layer = fp8.VocabularyLayer(weight, half_bias, hidden) if use_fp8 else None
        loss, correct_count = hidden.new_zeros((), dtype=torch.float32), labels.new_zeros(())
        hidden_grads: list[Tensor] = []
        weight_grad = bias_grad = None
        # one chunk even if empty; `range` would specialize torch.compile to the number of rows
        begin, unfinished = 0, True
        while unfinished:
            part = slice(begin, begin + chunk)
            begin += chunk
            unfinished = begin < len(hidden)
            rows, chunk_labels = hidden[part], labels[part]
            if fp8_layer is not None:
                losses, correct, grad = cross_entropy_fp8(fp8_layer.logits(part), chunk_labels, smoothing)
                chunk_hidden_grad, chunk_weight_grad, chunk_bias_grad = fp8_layer.backward(grad, part)
            else:
                logits = F.linear(rows, half_weight, half_bias)  # (n, V)
                if updates_in_place(logits):
                    losses, correct = cross_entropy_(logits, chunk_labels, smoothing, with_grad)
                    grad = logits
                else:
                    losses, correct, grad = cross_entropy(logits, chunk_labels, smoothing, with_grad)
                if with_grad:
                    chunk_hidden_grad, chunk_weight_grad = grad @ half_weight, grad.mT @ rows
                    chunk_bias_grad = None if bias is None else grad.sum(0, dtype=torch.float32)
            loss, correct_count = loss + losses.sum(), correct_count + correct.sum()
            if with_grad:
                hidden_grads.append(chunk_hidden_grad)
                weight_grad = _accumulate(weight_grad, chunk_weight_grad)
                bias_grad = None if chunk_bias_grad is None else _accumulate(bias_grad, chunk_bias_grad)
        hidden_grad = None
        if hidden_grads:
            hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(correct_count)
        return loss, correct_count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        scaled_bias = None if bias_grad is None else bias_grad * grad
        return hidden_grad * grad, weight_grad * grad, scaled_bias, None, None, None, None, None
