"""Steps as recordings: a GPU is told once what to do for batches of one shape, and then only to do it again.

A small model's step is hundreds of kernels, and to call them takes longer than to run them. A recording (a CUDA graph)
of the way forward and back is called as one, and another of what moves the weights. The same kernels run, in the same
order.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.batch import Batch
from headstock.train.evaluate import precision
from headstock.train.oom import out_of_memory
from headstock.train.optimizers import move

MOST = 256  # recordings; shapes that come so seldom are not worth one
LENGTHS = 32  # rows of texts are as long as a multiple of this, so that shapes come again


class GraphedStep:
    """What an objective loses on a batch, with the gradients left in the weights; and how these are moved then.

    The first batch of a shape is read as usual, which also prepares the device and compiles; when a shape comes again
    it is recorded. Gradients must stay where they are between steps, so they are set to zero and not to nothing.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        clip: float | None,
        dtype: str,
        device: torch.device,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.objective, self.dtype, self.device, self.say = objective, dtype, device, say
        self.met: set[Any] = set()
        self.recordings: dict[Any, Recording] = {}
        self.pool: Any = None  # of memory, which all recordings share: one is played at a time
        self.possible: bool | None = None  # not known before a shape comes again
        self.moving = Moving(optimizers, clip, device)

    def __call__(self, batch: Batch, factors: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses by head, each times its factor, and the losses themselves."""
        shape = shape_of(batch), tuple(factors)
        if shape in self.recordings:
            return self.recordings[shape].play(batch, factors)
        here = batch.to(self.device)
        scale = {head: torch.full((), factor, device=self.device) for head, factor in factors.items()}
        if self.possible is False or shape not in self.met or len(self.recordings) >= MOST:
            self.met.add(shape)
            return self.learn(here, scale)
        if self.possible is None:
            return self.try_out(here, scale)
        try:
            self.recordings[shape] = self.record(here, scale)
        except RuntimeError as wrong:
            if not out_of_memory(wrong):
                raise
            short = True  # acted on below: until then the error holds on to all that it passed through
        else:
            short = False
        return self.give_up(here, scale) if short else self.recordings[shape].play(batch, factors)

    def record(self, batch: Batch, scale: dict[str, Tensor]) -> "Recording":
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self.pool):
            loss, sums = self.learn(batch, scale)
        self.pool = graph.pool()
        return Recording(graph, batch, scale, loss, sums)

    def give_up(self, batch: Batch, scale: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What recordings keep is given back; nothing was moved while one was made."""
        self.say("memory ran out for recordings of steps: from now on they are called kernel by kernel")
        self.recordings, self.pool, self.possible = {}, None, False
        torch.cuda.empty_cache()
        return self.learn(batch, scale)

    def learn(self, batch: Batch, scale: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with precision(self.device, self.dtype):
            sums = self.objective(batch)
        loss = torch.stack([sums[head].float() * factor for head, factor in scale.items()]).sum()
        loss.backward()
        return loss.detach(), {name: value.detach() for name, value in sums.items()}

    def try_out(self, batch: Batch, scale: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Whoever waits for the GPU in the middle of a step cannot be recorded. A compiler does, but only once."""
        before = torch.cuda.get_sync_debug_mode()
        moved = [p for p in self.objective.parameters() if p.grad is not None]
        kept = [p.grad.clone() for p in moved if p.grad is not None]  # what the step's batches before this one left
        with warnings.catch_warnings(action="ignore"):  # of its being new
            torch.cuda.set_sync_debug_mode("error")
        try:
            found = self.learn(batch, scale)
        except RuntimeError as wrong:
            if "synchronizing" not in str(wrong):
                raise
            self.possible = False
        else:
            self.possible = True
            return found
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self.say("steps are not recorded: this model's wait for the GPU in between")
        self.objective.zero_grad(set_to_none=False)
        for parameter, gradient in zip(moved, kept, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        return self.learn(batch, scale)


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


class Moving:
    """What clips the gradients and moves the weights, as a recording. Learning rates are read from the device.

    What comes back is the gradients' length; they are zero then.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], clip: float | None, device: torch.device):
        self.optimizers, self.clip = optimizers, clip
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.rates = torch.zeros(len(self.groups), device=device)
        for group, rate in zip(self.groups, self.rates.unbind(), strict=True):
            group |= {"lr": rate, "capturable": True}
        self.graph: Any = None
        self.gradient: Tensor | None = None  # the length that a recording finds
        self.moves = 0

    def __call__(self, lr: float) -> Tensor:
        rates = torch.tensor([lr * group.get("scale", 1.0) for group in self.groups])
        self.rates.copy_(rates.pin_memory() if self.rates.is_cuda else rates, non_blocking=True)
        self.moves += 1
        if self.moves < 3:  # the first makes what optimizers remember; and some look around once more
            return move(self.optimizers, self.clip, to_none=False)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with recording(self.graph, None):
                self.gradient = move(self.optimizers, self.clip, to_none=False)
        self.graph.replay()
        assert self.gradient is not None
        return self.gradient


def recording(graph: Any, pool: Any) -> Any:
    """Other threads may go on with theirs: batches are made by one."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


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
