"""CUDA graph capture of a decoding step.  B rows, V vocabulary.

A small model's decoding step is dominated by kernel launches; replaying a captured graph launches all of them at once.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MIN_STEPS = 16  # capturing takes as long as a few steps

DecodeStep = Callable[[Tensor], Tensor]  # (B, 1) latest tokens -> (B, V) logits of the next ones


class StaticState(Protocol):
    """The part of a decoding state that graph capture needs."""

    lengths: Tensor  # (B,) tokens read so far

    def make_static(self) -> bool:
        """Keep all shapes from now on; False if the state cannot."""
        ...


def can_capture(backbone: object, state: StaticState | None, steps: int) -> bool:
    """Whether steps on this state can be captured; if so, its shapes are static from now on.

    An nn.Module may have hooks, which a replay would not call.
    """
    if state is None or steps < MIN_STEPS or not state.lengths.is_cuda or isinstance(backbone, nn.Module):
        return False
    return state.make_static()


def capture_step(step: DecodeStep, tokens: Tensor) -> DecodeStep:
    """Capture `step`, which must have run before, must not synchronize, and must update its state in place.

    Capturing leaves the state unchanged. Each replay overwrites the result of the previous one.
    """
    static_tokens = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device meanwhile
        logits = step(static_tokens)

    def replay(tokens: Tensor) -> Tensor:
        static_tokens.copy_(tokens)
        graph.replay()
        return logits

    return replay


# Any function of a tree of tensors


class CapturedGraph:
    """A function captured as a CUDA graph over fixed input memory.

    `function` must have run before (to initialize libraries and compile) and must not synchronize with the GPU.
    Capturing does not execute it. A call copies new inputs into the captured memory; its outputs are overwritten by
    the next call.
    """

    def __init__(self, function: Callable[[Any], Any], inputs: Any, *, pool: Any = None):
        self.inputs = inputs
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):  # other threads go on
            self.outputs = function(inputs)

    def __call__(self, inputs: Any) -> Any:
        for captured, tensor in zip(tensors_in(self.inputs), tensors_in(inputs), strict=True):
            captured.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.outputs


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, dicts and dataclasses, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for value in _children(tree):
            yield from tensors_in(value)


def signature(tree: Any) -> Any:
    """What two inputs must share to use the same graph: tensor shapes, and other values that take part in equality."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape)
    if isinstance(tree, dict):
        return tuple((name, signature(value)) for name, value in tree.items())
    if dataclasses.is_dataclass(tree):
        return tuple(signature(getattr(tree, part.name)) for part in dataclasses.fields(tree) if part.compare)
    return tuple(map(signature, tree)) if isinstance(tree, tuple | list) else tree


def _children(tree: Any) -> Iterable[Any]:
    if isinstance(tree, dict):
        return tree.values()
    if dataclasses.is_dataclass(tree):
        return [getattr(tree, part.name) for part in dataclasses.fields(tree)]
    return tree if isinstance(tree, tuple | list) else ()


class SynchronizedError(RuntimeError):
    """A function that must not wait for the GPU did."""


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raises SynchronizedError where the enclosed code waits for the GPU, which a CUDA graph cannot capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype feature of PyTorch
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise SynchronizedError(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
