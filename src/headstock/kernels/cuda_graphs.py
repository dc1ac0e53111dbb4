"""A decoding step recorded once on a GPU and replayed: a small model's step is mostly the launching of small kernels.

B rows, V vocabulary.
"""

from collections.abc import Callable

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
