"""Attention masks.  B rows, H heads, T queries, S keys."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstock.model.batch import Batch


@dataclass
class AttentionMask:
    """The keys each query may attend to: all, those up to it, those in `allowed`, or those of its document."""

    allowed: Tensor | None = None  # broadcasts to (B, H, T, S); True where a query may attend
    causal: bool = False  # the square causal mask, which attention kernels apply faster than a tensor
    cu_seqlens: Tensor | None = None  # (M,) document boundaries, for varlen kernels
    bias: Tensor | None = None  # (B or 1, H, T, S) added to the scores, -inf where a query may not attend

    def dense(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """(B or 1, H or 1, T, S) the mask as one boolean tensor, for display."""
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
        allowed = causal_mask(queries, keys, device) if self.causal else allowed
        return allowed[None, None] & (True if self.allowed is None else self.allowed)

    def with_bias(self, bias: Tensor) -> "AttentionMask":
        """The same mask with a bias (B or 1, H, T, S) on the scores."""
        assert self.cu_seqlens is None, "varlen attention has no bias"
        if self.causal or self.allowed is not None:
            bias = bias.masked_fill(~self.dense(bias.size(-2), bias.size(-1), bias.device), -torch.inf)
        return replace(self, bias=bias)

    def select_queries(self, positions: Tensor, keys: int) -> "AttentionMask":
        """The mask of one query per row, at `positions` (B,), over `keys` keys."""
        assert self.cu_seqlens is None, "varlen attention needs all queries"
        allowed = self.allowed
        if allowed is not None and allowed.size(-2) > 1:
            rows = torch.arange(len(positions), device=positions.device)
            full = allowed.view(*[1] * (4 - allowed.dim()), *allowed.shape).expand(len(positions), -1, -1, -1)
            allowed = full[rows, :, positions].unsqueeze(2)  # (B, H or 1, 1, S)
        if self.causal:
            past = torch.arange(keys, device=positions.device) <= positions[:, None, None, None]  # (B, 1, 1, S)
            allowed = past if allowed is None else allowed & past
        bias = self.bias
        if bias is not None:
            rows = torch.arange(len(positions), device=positions.device)
            bias = bias.expand(len(positions), -1, -1, -1)[rows, :, positions].unsqueeze(2)  # (B, H, 1, S)
        return AttentionMask(allowed, bias=bias)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(T, S) True where a query may attend: to itself and earlier keys. The last query is the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def make_attention_mask(batch: Batch, *, causal: bool, varlen: bool = False) -> AttentionMask:
    """The mask for a batch without a cache; `causal` applies where the batch does not set it.

    With `varlen` the kernel takes document boundaries instead of a mask. Under a causal mask, padding on the right
    needs no mask: no real token attends to its right.
    """
    direction = causal if batch.causal is None else batch.causal
    if varlen and batch.cu_seqlens is not None and not isinstance(direction, Tensor):
        return AttentionMask(causal=direction, cu_seqlens=batch.cu_seqlens)
    if batch.document_ids is None and not isinstance(direction, Tensor):
        return AttentionMask(causal=True) if direction else AttentionMask(padding_mask(batch.padding))
    allowed = padding_mask(batch.padding)
    if batch.document_ids is not None:
        documents = batch.document_ids
        if batch.padding is not None:
            documents = documents.masked_fill(batch.padding, -1)  # padding becomes a document of its own
        allowed = (documents[:, :, None] == documents[:, None, :])[:, None]  # (B, 1, T, T)
    if direction is False:
        return AttentionMask(allowed)
    length = batch.tokens.size(1)
    past = causal_mask(length, length, batch.tokens.device)  # (T, T)
    if isinstance(direction, Tensor):
        past = past | ~direction[:, None, None, None]  # (B, 1, T, T): bidirectional rows also attend to the right
    return AttentionMask(past if allowed is None else allowed & past)


def padding_mask(padding: Tensor | None) -> Tensor | None:
    """Padding (B, S) as (B, 1, 1, S), True at real tokens."""
    return None if padding is None else ~padding[:, None, None, :]
