"""Scaled dot-product attention, with kernels for documents packed into rows.

B rows, T tokens in a row, H heads, K head width, D = H K, N = B T, M boundaries of documents.

The reference is torch.nn.functional.scaled_dot_product_attention under a mask. Where a batch has `cu_seqlens`,
attention runs inside each document without a mask: by our Triton kernel (attention_triton.py), or by torch's varlen
attention for head widths that the Triton kernel would have to pad.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.kernels import fp8
from headstock.kernels.backends import compute_dtype, is_ampere_or_newer, triton_works


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor | None = None,
    causal: bool = False,
    cu_seqlens: Tensor | None = None,
    dropout: float = 0.0,
    packed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(B, H, T, K) softmax(Q K' / sqrt(K)) V, over the keys that each query may attend to.

    These are those where `allowed` (broadcast to (B, H, T, T)) is True, or those of the same document, whose boundaries
    are `cu_seqlens` (M,); with `causal`, only up to the query. `packed` is the projection that `project_qkv` returned.
    A `bias` (B or 1, H, T, T) on the scores replaces the mask: it is -inf where a query may not attend.
    """
    if bias is not None:
        return F.scaled_dot_product_attention(query, key, value, bias.type_as(query), dropout)
    if cu_seqlens is None:
        return F.scaled_dot_product_attention(query, key, value, allowed, dropout, causal)
    if not _triton_supports(query.size(-1), query.device):
        return flash_varlen_attention(query, key, value, cu_seqlens, causal=causal, dropout=dropout)
    from headstock.kernels import attention_triton

    if packed is not None:
        return attention_triton.packed_attention(packed, cu_seqlens, causal=causal, dropout=dropout).transpose(1, 2)
    return attention_triton.attention(query, key, value, cu_seqlens, causal=causal, dropout=dropout)


def project_qkv(
    x: Tensor, projection: Any, heads: int, *, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(B, T, D) -> query, key and value (B, H, T, K) by one linear layer (3 D, D), and the packed (B, T, 3, H, K).

    Pass `cu_seqlens` if attention follows directly. The packed projection is returned if attention should use it: its
    gradient then arrives as one tensor. Otherwise the three gradients arrive one by one, which fp8 treats specially.
    """
    keep_packed = cu_seqlens is not None and _triton_supports(x.size(-1) // heads, x.device)
    if not keep_packed and fp8.applies(x, projection.weight):
        parts = fp8.split_linear(x, projection.weight, projection.bias, 3)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        return query, key, value, None
    packed = projection(x).unflatten(-1, (3, heads, -1))  # (B, T, 3 D) -> (B, T, 3, H, K)
    query, key, value = packed.transpose(1, 3).unbind(2)  # views
    return query, key, value, packed if keep_packed else None


def supports_varlen(x: Tensor, head_width: int) -> bool:
    """Whether there is a kernel that needs `cu_seqlens` instead of a mask."""
    if head_width > 256 or compute_dtype(x) not in (torch.bfloat16, torch.float16):
        return False
    return is_ampere_or_newer(x.device)


def _triton_supports(head_width: int, device: torch.device) -> bool:
    """Whether the Triton kernel is the faster one: it pads other widths to powers of two."""
    return (head_width <= 64 or head_width == 128) and triton_works(device)


def flash_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, causal: bool, dropout: float = 0.0
) -> Tensor:
    """The same by torch's flash attention, which computes at least one tile of 128 x 128 scores per document."""
    rows, _, length, width = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B, H, T, K) -> (N, H, K)
    if dropout or width % 8:  # varlen_attn supports neither, but the operator that it calls does
        if width % 8:
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        flash = torch.ops.aten._flash_attention_forward
        output = flash(q, k, v, cu_seqlens, cu_seqlens, length, length, dropout, causal, False, scale=width**-0.5)[0]
        output = output[..., :width]
    else:
        output = _varlen(q, k, v, cu_seqlens, length, causal)
    return output.unflatten(0, (rows, length)).transpose(1, 2)


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, length: int, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0 if causal else -1)  # unlimited to the left; to the right nothing or unlimited
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, length, length, window_size=window)  # type: ignore[return-value]
