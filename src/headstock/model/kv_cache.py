"""The key-value cache of a Transformer.  B rows, H heads, C capacity, K head width, T new tokens, S source tokens."""

import torch
from torch import Tensor

from headstock.model.attention_mask import AttentionMask, causal_mask
from headstock.model.batch import Batch


class KVCache:
    """Keys and values of the tokens read so far, updated in place: continue with the state of the last Output.

    Rows may have different lengths. Prompts are padded on the right; the next token of a row overwrites its first
    padding, and positions beyond a row's length are masked. The storage may have spare rows, for `append`.
    """

    def __init__(self, depth: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype):
        rows, _, self.capacity, _ = shape
        # keys and values of all layers in one tensor, so that one slice serves all of them
        self.storage = torch.zeros(2 * depth, *shape, device=device, dtype=dtype)  # (2 depth, B or more, H, C, K)
        self.memory: list[tuple[Tensor, Tensor]] = []  # cross-attention's keys and values by layer; these never change
        self.memory_padding: Tensor | None = None  # (B, S) True at padding positions of the source
        self.sources = torch.arange(rows, device=device)  # (B,) the source of each row
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.equal_lengths = True  # a slice then replaces the scatter
        self.static = False  # every step runs the same operations on the same tensors

    def positions(self, new: int) -> Tensor:
        """(T,) or (B, T): the positions of the next `new` tokens."""
        if self.equal_lengths:
            return torch.arange(self.longest, self.longest + new, device=self.lengths.device)
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> AttentionMask:
        """The attention mask of the next `new` tokens over cached and new keys."""
        if self.equal_lengths and (new == 1 or self.longest == 0):
            return AttentionMask(causal=new > 1)
        if self.equal_lengths:
            return AttentionMask(causal_mask(new, self.longest + new, self.lengths.device))
        keys = torch.arange(self.longest + new, device=self.lengths.device)
        return AttentionMask((keys <= self.positions(new)[..., None])[:, None])  # (B, 1, T, S)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values (B, H, T, K); return all cached ones."""
        new = keys.size(2)
        if layer == 0:
            self._slice(new)
        all_keys, all_values = self.cached[2 * layer], self.cached[2 * layer + 1]
        if self.equal_lengths:
            self.next[2 * layer].copy_(keys)
            self.next[2 * layer + 1].copy_(values)
        else:
            index = self.positions(new)[:, None, :, None].expand_as(keys)
            all_keys.scatter_(2, index, keys.type_as(all_keys))
            all_values.scatter_(2, index, values.type_as(all_values))
        return all_keys, all_values

    def _slice(self, new: int) -> None:
        """Slice the storage once for all layers: what each returns and, for equal lengths, what it fills."""
        if torch.is_grad_enabled():
            raise ValueError("a KV cache does not support gradients: use it under torch.inference_mode()")
        stop = self.longest + new
        if stop > self.capacity:
            raise ValueError(f"the KV cache has room for {self.capacity} tokens per row, not {stop}")
        storage = self.storage.narrow(1, 0, len(self.lengths))
        self.cached = storage.narrow(3, 0, stop).unbind(0)
        ahead = storage.narrow(3, self.longest, new)
        if not self.equal_lengths:
            ahead.zero_()  # shorter rows do not fill it, and even masked values must be finite
        self.next = ahead.unbind(0)

    def make_static(self) -> bool:
        """Use all positions in every step and mask the empty ones, so that steps of one token can be captured.

        The caller must count tokens against the capacity from now on.
        """
        self.storage[..., self.longest :, :] = 0  # even masked values must be finite
        self.static, self.equal_lengths, self.longest = True, False, self.capacity - 1
        return True

    def source_padding(self, padding: Tensor | None) -> Tensor | None:
        """The padding of the source: the argument in the first call, then the stored one."""
        if not self.memory:
            self.memory_padding = padding
        return self.memory_padding

    def advance(self, batch: Batch) -> None:
        """Count the batch as read, once every layer has stored its keys and values."""
        new = batch.tokens.size(1)
        if self.static:
            self.lengths += new  # in place, since a captured step reads this tensor
        elif batch.padding is None:
            self.lengths = self.lengths + new
            self.longest += new
        else:
            self.lengths = self.lengths + (~batch.padding).sum(1)
            self._update_longest()

    def select(self, rows: Tensor) -> "KVCache":
        other = object.__new__(KVCache)
        other.capacity, other.equal_lengths, other.static = self.capacity, self.equal_lengths, self.static
        depth, _, *shape = self.storage.shape
        filled = self.capacity if self.static else self.longest
        other.storage = self.storage.new_empty(depth, len(rows), *shape)
        other.storage[..., :filled, :] = self.storage[..., :filled, :][:, rows]
        other.memory, other.memory_padding, other.sources = list(self.memory), self.memory_padding, self.sources
        if self.memory:
            other._select_memory(rows)
        other.lengths = self.lengths[rows]
        other.longest = self.longest
        if not self.equal_lengths and not self.static:
            other._update_longest()
        return other

    def append(self, other: "KVCache") -> "KVCache":
        """Copies `other` alone, into spare rows; without room the storage doubles its rows, so this is rare."""
        if self.memory or other.memory:
            raise ValueError("rows with sources of their own cannot be joined")
        assert not (self.static or other.static), "a static cache keeps its shape"
        rows, total = len(self.lengths), len(self.lengths) + len(other.lengths)
        longest = max(self.longest, other.longest)
        self._reserve(total, max(self.capacity, other.capacity))
        added = self.storage[:, rows:total]
        added[..., : other.longest, :] = other.storage[:, : total - rows, :, : other.longest]
        added[..., other.longest : longest, :] = 0  # even masked values must be finite
        self.storage[:, :rows, :, self.longest : longest] = 0
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.sources = torch.arange(total, device=self.lengths.device)
        self._update_longest()
        return self

    def _reserve(self, rows: int, capacity: int) -> None:
        """Make room for rows and tokens per row."""
        depth, available, heads, _, width = self.storage.shape
        if rows <= available and capacity == self.capacity:
            return
        before, filled = self.storage, slice(self.longest)
        rows = available if rows <= available else max(rows, 2 * available)
        self.storage = before.new_zeros(depth, rows, heads, capacity, width)
        self.storage[:, : len(self.lengths), :, filled] = before[:, : len(self.lengths), :, filled]
        self.capacity = capacity

    def keep(self, rows: list[int]) -> "KVCache":
        assert not (self.static or self.memory), "neither a static cache nor sources"
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new, old = torch.tensor(moved, device=self.lengths.device).T
            filled = self.storage[..., : self.longest, :]
            filled[:, new] = filled[:, old]
        self.lengths = self.lengths[torch.tensor(rows, device=self.lengths.device)]
        self.sources = self.sources[: len(rows)]
        self._update_longest()
        return self

    def _select_memory(self, rows: Tensor) -> None:
        """Select the memory of other rows; reordered beams of one source share it already."""
        before, self.sources = self.sources, self.sources[rows]
        if torch.equal(before, self.sources):
            return
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        if self.memory_padding is not None:
            self.memory_padding = self.memory_padding[rows]

    def _update_longest(self) -> None:
        self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.equal_lengths = shortest == self.longest
