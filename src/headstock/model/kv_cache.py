"""Keys and values of the tokens read so far, so that a next token costs one token's work.

B rows, H heads, C capacity, K head width, T new tokens.
"""

import torch
from torch import Tensor

from headstock.model.attention_mask import AttentionMask, causal_mask
from headstock.model.batch import Batch


class KVCache:
    """A Transformer's memory. It is changed in place: go on with the state an Output carries.

    Rows may have different lengths. Prompts are padded on the right; a row's next token overwrites its
    first padding, and what lies beyond a row's length is never looked at.
    """

    def __init__(self, depth: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype):
        rows, _, self.capacity, _ = shape
        # a layer's keys, then its values, for all layers in one tensor: cut once for all of them, not once for each
        self.kept = torch.zeros(2 * depth, *shape, device=device, dtype=dtype)  # (2 depth, B, H, C, K)
        self.memory: list[tuple[Tensor, Tensor]] = []  # cross-attention's keys and values; these never change
        self.memory_padding: Tensor | None = None  # (B, S) True where the memory has no token
        self.sources = torch.arange(rows, device=device)  # (B,) whose memory each row looks at
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.even = True  # every row has the same length, so a plain slice replaces the scatter
        self.fixed = False  # every step looks at all places and does the same things to the same tensors

    def positions(self, new: int) -> Tensor:
        """(T,) or (B, T): the places of the next `new` tokens."""
        if self.even:
            return torch.arange(self.longest, self.longest + new, device=self.lengths.device)
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> AttentionMask:
        """Who of the next `new` tokens may look at which of the kept and new ones."""
        if self.even and (new == 1 or self.longest == 0):
            return AttentionMask(causal=new > 1)
        if self.even:
            return AttentionMask(causal_mask(new, self.longest + new, self.lengths.device))
        keys = torch.arange(self.longest + new, device=self.lengths.device)
        return AttentionMask((keys <= self.positions(new)[..., None])[:, None])  # (B, 1, T, S)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values (B, H, T, K); give back all that are kept."""
        new = keys.size(2)
        if layer == 0:
            self._open(new)
        all_keys, all_values = self.all[2 * layer], self.all[2 * layer + 1]
        if self.even:
            self.next[2 * layer].copy_(keys)
            self.next[2 * layer + 1].copy_(values)
        else:
            places = self.positions(new)[:, None, :, None].expand_as(keys)
            all_keys.scatter_(2, places, keys.type_as(all_keys))
            all_values.scatter_(2, places, values.type_as(all_values))
        return all_keys, all_values

    def _open(self, new: int) -> None:
        """Cut out what each layer will be given back and, where rows are even, what it has to fill."""
        if torch.is_grad_enabled():
            raise ValueError("a cache is for reading, not for learning: use it under torch.inference_mode()")
        stop = self.longest + new
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, {stop} came")
        self.all = self.kept.narrow(3, 0, stop).unbind(0)
        ahead = self.kept.narrow(3, self.longest, new)
        if not self.even:
            ahead.zero_()  # shorter rows do not fill it, and even what is not looked at must be a number
        self.next = ahead.unbind(0)

    def make_static(self) -> bool:
        """From now on each step of one token does the same to the same memory, whatever the lengths: see recording.py.

        All places are looked at, and what no token has filled is hidden. Nothing here counts the tokens against the
        capacity any more: who replays steps has to.
        """
        self.kept[..., self.longest :, :] = 0  # even what is not looked at must be a number
        self.fixed, self.even, self.longest = True, False, self.capacity - 1
        return True

    def padding_of(self, given: Tensor | None) -> Tensor | None:
        """The memory's padding: as given with the memory, and from then on as it is kept beside its keys."""
        if not self.memory:
            self.memory_padding = given
        return self.memory_padding

    def advance(self, batch: Batch) -> None:
        """Count the batch as read, once every layer has kept its part."""
        new = batch.tokens.size(1)
        if self.fixed:
            self.lengths += new  # in place, because a recorded step reads it there
        elif batch.padding is None:
            self.lengths = self.lengths + new
            self.longest += new
        else:
            self.lengths = self.lengths + (~batch.padding).sum(1)
            self._measure()

    def select(self, rows: Tensor) -> "KVCache":
        chosen = object.__new__(KVCache)
        chosen.capacity, chosen.even, chosen.fixed = self.capacity, self.even, self.fixed
        depth, _, *shape = self.kept.shape
        filled = self.capacity if self.fixed else self.longest
        chosen.kept = self.kept.new_empty(depth, len(rows), *shape)
        chosen.kept[..., :filled, :] = self.kept[..., :filled, :][:, rows]
        chosen.memory, chosen.memory_padding, chosen.sources = list(self.memory), self.memory_padding, self.sources
        if self.memory:
            chosen._look_at(rows)
        chosen.lengths = self.lengths[rows]
        chosen.longest = self.longest
        if not self.even and not self.fixed:
            chosen._measure()
        return chosen

    def _look_at(self, rows: Tensor) -> None:
        """Go on with other rows' memory; beams of one source that swap places have it in common already."""
        before, self.sources = self.sources, self.sources[rows]
        if torch.equal(before, self.sources):
            return
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        if self.memory_padding is not None:
            self.memory_padding = self.memory_padding[rows]

    def _measure(self) -> None:
        """Look at the lengths again; rows whose shorter or longer neighbours left may be even now."""
        self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.even = shortest == self.longest
