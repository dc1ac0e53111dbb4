"""Steps as recordings: a GPU is told once what to do for batches of one shape, and then only to do it again.

A small model's step is hundreds of kernels, and to call them takes longer than to run them. A recording (a CUDA graph)
of the way forward and back is called as one. The same kernels run, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.batch import Batch
from headstock.train.evaluate import precision

MOST = 64  # recordings; each keeps what a step needs, and shapes that come so seldom are not worth one
LENGTHS = 32  # rows of texts are as long as a multiple of this, so that shapes come again

Learn = Callable[[Batch, Mapping[str, float]], tuple[Tensor, dict[str, Tensor]]]


class Recorded:
    """What an objective loses on a batch, with the gradients left in the weights.

    The first batch of a shape is read as usual, which also prepares the device; at the second it is recorded.
    Gradients must stay where they are between steps, so they are set to zero and not to nothing.
    """

    def __init__(self, objective: nn.Module, *, dtype: str, device: torch.device):
        self.objective, self.dtype, self.device = objective, dtype, device
        self.met: set[Any] = set()
        self.recordings: dict[Any, Recording] = {}
        self.pool: Any = None  # of memory, which all recordings share: one is played at a time

    def __call__(self, batch: Batch, factors: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses by head, each times its factor, and the losses themselves."""
        shape = shape_of(batch), tuple(factors)
        if shape in self.recordings:
            return self.recordings[shape].play(batch, factors)
        here = batch.to(self.device)
        scale = {head: torch.full((), factor, device=self.device) for head, factor in factors.items()}
        if shape not in self.met or len(self.recordings) >= MOST:
            self.met.add(shape)
            return self.learn(here, scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = self.learn(here, scale)
        self.pool = graph.pool()
        self.recordings[shape] = Recording(graph, here, scale, loss, sums)
        return self.recordings[shape].play(batch, factors)

    def learn(self, batch: Batch, scale: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with precision(self.device, self.dtype):
            sums = self.objective(batch)
        loss = torch.stack([sums[head].float() * factor for head, factor in scale.items()]).sum()
        loss.backward()
        return loss.detach(), {name: value.detach() for name, value in sums.items()}


class Recording:
    """One shape's step, with the places where it reads and writes."""

    def __init__(
        self, graph: Any, batch: Batch, scale: dict[str, Tensor], loss: Tensor, sums: dict[str, Tensor]
    ) -> None:
        self.graph, self.batch, self.scale, self.loss, self.sums = graph, batch, scale, loss, sums

    def play(self, batch: Batch, factors: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """What comes back is overwritten by the next play."""
        for mine, given in zip(tensors_of(self.batch), tensors_of(batch), strict=True):
            mine.copy_(given, non_blocking=True)
        for head, factor in factors.items():
            self.scale[head].fill_(factor)
        self.graph.replay()
        return self.loss, self.sums


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch in one order."""
    for part in fields(batch):
        value = getattr(batch, part.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, Batch):
            yield from tensors_of(value)


def shape_of(batch: Batch) -> tuple[Any, ...]:
    """What two batches must have in common to be read by the same kernels."""
    found: list[Any] = []
    for part in fields(batch):
        value = getattr(batch, part.name)
        if isinstance(value, dict):
            found.append(tuple((name, tuple(tensor.shape)) for name, tensor in value.items()))
        else:
            alike = tuple(value.shape) if isinstance(value, Tensor) else value
            found.append(shape_of(value) if isinstance(value, Batch) else alike)
    return tuple(found)
