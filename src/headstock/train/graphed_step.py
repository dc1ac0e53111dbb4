"""Training steps as CUDA graphs, for small models whose kernels take longer to launch than to run.

One graph per batch shape holds the forward and backward pass, another the weight update. They run the same kernels in
the same order as the plain step.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstock.kernels.cuda_graphs import CapturedGraph, SynchronizedError, no_synchronization, signature
from headstock.model.batch import Batch
from headstock.train.evaluate import precision
from headstock.train.oom import is_out_of_memory
from headstock.train.optimizers import update_weights
from headstock.train.step import TrainingStep

logger = logging.getLogger(__name__)

MAX_GRAPHS = 256
LENGTH_MULTIPLE = 32  # rows are padded to a multiple of this, so that shapes recur


class GraphedStep(TrainingStep):
    """A TrainingStep that captures a batch shape when it occurs for the second time, and replays it from then on.

    The first occurrence runs eagerly, which also initializes the device and compiles. Graphs write gradients to fixed
    memory, so gradients are set to zero and never freed. Learning rates and loss weights are read from the device.
    """

    zero_to_none = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        device = self.distributed.device
        self.seen: set[Any] = set()
        self.graphs: dict[Any, CapturedGraph] = {}
        self.pool: Any = None  # memory shared by all graphs: one is replayed at a time
        self.capturable: bool | None = None  # unknown until a shape recurs
        self.scale: dict[str, Tensor] = {}  # loss weight by head
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.rates = torch.zeros(len(self.groups), device=device)
        for group, rate in zip(self.groups, self.rates.unbind(), strict=True):
            group |= {"lr": rate, "capturable": True}
        self.update_graph: CapturedGraph | None = None
        self.updates = 0

    def forward_backward(self, batch: Batch, counts: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        for head, count in counts.items():
            if head not in self.scale:
                self.scale[head] = torch.zeros((), device=self.distributed.device)
            self.scale[head].fill_(self.task.weight(head) / max(1, count))
        key = signature(batch), tuple(counts)
        if key in self.graphs:
            return self.graphs[key](batch)
        batch = batch.to(self.distributed.device)
        if self.capturable is False or key not in self.seen or len(self.graphs) >= MAX_GRAPHS:
            self.seen.add(key)
            return self.eager(batch, key[1])
        if self.capturable is None:
            return self.try_capturable(batch, key[1])
        if self.capture(batch, key):
            return self.graphs[key](batch)
        logger.warning("out of memory for CUDA graphs: steps run without them from now on")
        self.graphs, self.pool, self.capturable = {}, None, False
        torch.cuda.empty_cache()
        return self.eager(batch, key[1])

    def capture(self, batch: Batch, key: Any) -> bool:
        """Whether memory sufficed. The caller acts on it, since a live exception keeps tensors of its frames alive."""
        try:
            graph = CapturedGraph(lambda inputs: self.eager(inputs, key[1]), batch, pool=self.pool)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        self.graphs[key], self.pool = graph, graph.graph.pool()
        return True

    def eager(self, batch: Batch, heads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        with precision(self.distributed.device, self.settings.dtype):
            sums = self.module(batch)
        loss = torch.stack([sums[head].float() * self.scale[head] for head in heads]).sum()
        loss.backward()
        return loss.detach(), {name: value.detach() for name, value in sums.items()}

    def try_capturable(self, batch: Batch, heads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run once more eagerly, to find out whether the model waits for the GPU within a step."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]  # of the step's earlier micro-batches
        try:
            with no_synchronization():
                result = self.eager(batch, heads)
        except SynchronizedError:
            self.capturable = False
        else:
            self.capturable = True
            return result
        logger.info("CUDA graphs are off: this model synchronizes with the GPU within a step")
        self.module.zero_grad(set_to_none=False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        return self.eager(batch, heads)

    def update(self, lr: float) -> Tensor:
        rates = torch.tensor([lr * group.get("scale", 1.0) for group in self.groups])
        self.rates.copy_(rates.pin_memory() if self.rates.is_cuda else rates, non_blocking=True)
        self.updates += 1
        if self.updates < 3:  # the first creates the optimizer state, and some optimizers initialize in the second
            return update_weights(self.optimizers, self.settings.clip, to_none=False)
        if self.update_graph is None:
            self.update_graph = CapturedGraph(
                lambda _: update_weights(self.optimizers, self.settings.clip, to_none=False), ()
            )
        return self.update_graph(())
