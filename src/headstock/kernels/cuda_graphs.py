"""A decoding step recorded once on a GPU and replayed: a small model's step is mostly the launching of small kernels.

B rows, V vocabulary.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.batch import DecodingState

LEAST = 16  # steps to come for which recording pays: it takes about as long as a few of them

DecodeStep = Callable[[Tensor], Tensor]  # from the latest tokens (B, 1) to the scores of the next ones (B, V)


def can_capture(backbone: object, state: DecodingState | None, steps: int) -> bool:
    """Whether steps on this state may be recorded; if so, its shapes are fixed from now on.

    A module that is called as one may have hooks, and those would be heard once instead of at every step.
    """
    if state is None or steps < LEAST or not state.lengths.is_cuda or isinstance(backbone, nn.Module):
        return False
    return state.make_static()


def capture_step(step: DecodeStep, tokens: Tensor) -> DecodeStep:
    """The same step, replayed. It must have been done before, wait for nothing, and change its memory in place.

    Recording does not do it: the state is as it was. What a replay gives is overwritten by the next.
    """
    given = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # what other threads do meanwhile is their affair
        scores = step(given)

    def replay(tokens: Tensor) -> Tensor:
        given.copy_(tokens)
        graph.replay()
        return scores

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
    """What two inputs must share to use the same graph: tensor shapes, and the values of everything else."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape)
    if isinstance(tree, dict):
        return tuple((name, signature(value)) for name, value in tree.items())
    return tuple(map(signature, _children(tree))) if _is_node(tree) else tree


def _is_node(tree: Any) -> bool:
    return isinstance(tree, tuple | list | dict) or dataclasses.is_dataclass(tree)


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
