"""Keys and values of the tokens read so far, so that a next token costs one token's work.

B rows, H heads, C capacity, K head width, T new tokens.
"""

import torch
from torch import Tensor

from headstock.model.batch import Batch
from headstock.model.masks import Mask, subsequent


class Cache:
    """A Transformer's memory. It is changed in place: go on with the state an Output carries.

    Rows may have different lengths. Prompts are padded on the right; a row's next token overwrites its
    first padding, and what lies beyond a row's length is never looked at.
    """

    def __init__(self, depth: int, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype):
        rows, _, self.capacity, _ = shape
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(depth)]  # each (B, H, C, K)
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(depth)]
        self.memory: list[tuple[Tensor, Tensor]] = []  # cross-attention's keys and values; these never change
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.even = True  # every row has the same length, so a plain slice replaces the scatter

    def positions(self, new: int) -> Tensor:
        """(T,) or (B, T): the places of the next `new` tokens."""
        if self.even:
            return torch.arange(self.longest, self.longest + new, device=self.lengths.device)
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def mask(self, new: int) -> Mask:
        """Who of the next `new` tokens may look at which of the kept and new ones."""
        if self.even and (new == 1 or self.longest == 0):
            return Mask(causal=new > 1)
        if self.even:
            return Mask(subsequent(new, self.longest + new, self.lengths.device))
        keys = torch.arange(self.longest + new, device=self.lengths.device)
        return Mask((keys <= self.positions(new)[..., None])[:, None])  # (B, 1, T, S)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values (B, H, T, K); give back all that are kept."""
        new = keys.size(2)
        stop = self.longest + new
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, {stop} came")
        kept_keys, kept_values = self.keys[layer], self.values[layer]
        if self.even:
            kept_keys.narrow(2, self.longest, new).copy_(keys)
            kept_values.narrow(2, self.longest, new).copy_(values)
        else:
            places = self.positions(new)[:, None, :, None].expand_as(keys)
            kept_keys.scatter_(2, places, keys)
            kept_values.scatter_(2, places, values)
        return kept_keys.narrow(2, 0, stop), kept_values.narrow(2, 0, stop)

    def advance(self, batch: Batch) -> None:
        """Count the batch as read, once every layer has kept its part."""
        new = batch.tokens.size(1)
        if batch.padding is None:
            self.lengths = self.lengths + new
            self.longest += new
        else:
            self.lengths = self.lengths + (~batch.padding).sum(1)
            self._measure()

    def select(self, rows: Tensor) -> "Cache":
        chosen = object.__new__(Cache)
        chosen.capacity, chosen.even = self.capacity, self.even
        chosen.keys = [keys[rows] for keys in self.keys]
        chosen.values = [values[rows] for values in self.values]
        chosen.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        chosen.lengths = self.lengths[rows]
        chosen.longest = self.longest
        if not self.even:
            chosen._measure()
        return chosen

    def _measure(self) -> None:
        """Look at the lengths again; rows whose shorter or longer neighbours left may be even now."""
        self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.even = shortest == self.longest
