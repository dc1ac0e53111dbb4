"""Who may look at whom.  B rows, T queries, S keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headstock.model.batch import Batch


@dataclass
class AttentionMask:
    """The pairs of positions that attention joins: all of them, all but the future, or those in `allowed`."""

    allowed: Tensor | None = None  # broadcasts to (B, H, T, S); True where a query may look
    causal: bool = False  # the square subsequent mask, left to the attention kernel because it is faster there
    cu_seqlens: Tensor | None = None  # (M,) where documents begin and end, for kernels that read each by itself

    def dense(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """(B or 1, H or 1, T, S) True where a query may look, written out: for those who show it, not for attention."""
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        seen = causal_mask(queries, keys, device) if self.causal else seen
        return seen[None, None] & (True if self.allowed is None else self.allowed)

    def select_queries(self, places: Tensor, keys: int) -> "AttentionMask":
        """The same for one query of each row, which stands at (B,) `places` among so many keys."""
        assert self.cu_seqlens is None, "packed documents are read whole"
        allowed = self.allowed
        if allowed is not None and allowed.size(-2) > 1:
            rows = torch.arange(len(places), device=places.device)
            table = allowed.view(*[1] * (4 - allowed.dim()), *allowed.shape).expand(len(places), -1, -1, -1)
            allowed = table[rows, :, places].unsqueeze(2)  # (B, H or 1, 1, S)
        if self.causal:
            past = torch.arange(keys, device=places.device) <= places[:, None, None, None]  # (B, 1, 1, S)
            allowed = past if allowed is None else allowed & past
        return AttentionMask(allowed)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(T, S) True where a query may look: at itself and before. The last query is the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def make_attention_mask(batch: Batch, *, causal: bool, apart: bool = False) -> AttentionMask:
    """Who may look at whom inside a batch that is read whole; `causal` where the batch does not say it itself.

    With `apart` there is a kernel that reads documents each by itself, which needs to know their bounds alone.
    Under the causal mask padding on the right needs no mask of its own: no real token ever looks to its right.
    """
    way = causal if batch.causal is None else batch.causal
    if apart and batch.cu_seqlens is not None and not isinstance(way, Tensor):
        return AttentionMask(causal=way, cu_seqlens=batch.cu_seqlens)
    if batch.document_ids is None and not isinstance(way, Tensor):
        return AttentionMask(causal=True) if way else AttentionMask(padding_mask(batch.padding))
    allowed = padding_mask(batch.padding)
    if batch.document_ids is not None:
        documents = batch.document_ids
        if batch.padding is not None:
            documents = documents.masked_fill(batch.padding, -1)  # the padding is a document of its own
        allowed = (documents[:, :, None] == documents[:, None, :])[:, None]  # (B, 1, T, T)
    if way is False:
        return AttentionMask(allowed)
    length = batch.tokens.size(1)
    past = causal_mask(length, length, batch.tokens.device)  # (T, T)
    if isinstance(way, Tensor):
        past = past | ~way[:, None, None, None]  # (B, 1, T, T): a row that is not causal also looks ahead
    return AttentionMask(past if allowed is None else allowed & past)


def padding_mask(padding: Tensor | None) -> Tensor | None:
    """(B, S) padding as (B, 1, 1, S): nobody looks where there is no token."""
    return None if padding is None else ~padding[:, None, None, :]
