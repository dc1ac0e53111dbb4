"""How training steps run: eagerly, compiled, as CUDA graphs, or both; and the composition of the step."""

import copy
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headstock.cache_use import mark_used
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import flops_per_token
from headstock.errors import UserError
from headstock.io import cache_folder
from headstock.kernels.cuda_graphs import CapturedGraph, SynchronizedError, no_synchronization, signature
from headstock.kernels.fp8 import supports_fp8
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.activation_checkpointing import checkpoint_blocks
from headstock.train.budget import Budget
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import precision, uses_bfloat16
from headstock.train.optimizers import update_weights
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.sharding import shard_module
from headstock.train.step import LossModule, MicroBatching, Split, TrainingStep, is_out_of_memory

logger = logging.getLogger(__name__)

# Estimates on NVIDIA GPUs
MIN_COMPILED_SECONDS = 180.0  # of a run; compiling takes about one minute and saves about a third
FLOPS = 0.7e12  # per second and multiprocessor, for a large eager model
LAUNCH_SECONDS = 4e-3  # per layer and batch: the time to launch its kernels, however small they are

MAX_GRAPHS = 256

ExecutionMode = Literal["eager", "compiled", "graphed", "both"]
BY_SETTING: dict[Any, ExecutionMode] = {True: "compiled", False: "eager", "replay": "graphed", "both": "both"}


def uses_graphs(mode: ExecutionMode) -> bool:
    return mode in ("graphed", "both")


def choose_execution_mode(
    model: Model,
    task: Task,
    settings: TrainSettings,
    budget: Budget,
    sampler: BatchSampler,
    distributed: DistributedContext,
) -> ExecutionMode:
    """The mode that the settings name, or the fastest by estimate. The same run always gets the same mode."""
    graphs_allowed = distributed.size == 1 and not settings.unfreeze and not settings.activation_checkpointing
    if settings.compile in ("replay", "both") and distributed.device.type != "cuda":
        raise UserError(f"train.compile: {settings.compile} needs CUDA graphs, and this run is not on a CUDA device")
    if settings.compile in ("replay", "both") and not graphs_allowed:
        raise UserError(f"train.compile: {settings.compile} needs a single process and no `unfreeze`")
    if settings.compile != "auto":
        return BY_SETTING[settings.compile]
    if settings.parallel == "fsdp" and distributed.size > 1:
        return "eager"
    if distributed.device.type != "cuda" or not model.backbone.supports_compile:
        return "eager"
    compute, launch = step_seconds(model, task, settings, sampler, distributed)
    small = compute < 2 * launch and graphs_allowed  # the GPU is idle part of the time
    seconds = budget.seconds or (budget.steps or 0) * (compute if small else max(compute, launch))
    ragged = hasattr(sampler.examples, "lengths")  # each new length would compile again
    if small:
        return "graphed" if ragged or seconds < MIN_COMPILED_SECONDS else "both"
    if ragged:
        return "eager"
    if seconds < MIN_COMPILED_SECONDS:
        logger.info(f"not compiled: the run takes about {seconds:.0f} s, and compiling would cost more than it saves")
        return "eager"
    return "compiled"


def step_seconds(
    model: Model, task: Task, settings: TrainSettings, sampler: BatchSampler, distributed: DistributedContext
) -> tuple[float, float]:
    """Estimated seconds of a plain step's arithmetic and of its kernel launches; the longer one determines its time."""
    rows = settings.batch // distributed.size
    lengths = getattr(sampler.examples, "lengths", None)
    # the tokens of a row, in all its windows
    mean = sampler.length if lengths is None else max(1, round(float(np.mean(lengths))))
    length = min(sampler.length, mean)
    flops = flops_per_token(model_cost(model, task, model_dimensions(model, length=length)), training=True)
    peak = FLOPS * torch.cuda.get_device_properties(distributed.device).multi_processor_count
    micro_batches = -(-rows // (settings.micro_batch or rows))
    tokens = rows * mean if settings.batch_tokens is None else settings.batch_tokens
    return float(flops) * tokens / peak, LAUNCH_SECONDS * model.backbone.depth * micro_batches


def build_module(model: Model, task: Task, settings: TrainSettings, distributed: DistributedContext) -> LossModule:
    """Model and task as one module on the device.

    With `parallel=fsdp` it contains a sharded copy, so that the model itself stays whole in main memory. One process
    has nothing to shard, and trains the model itself.
    """
    device, shards = distributed.device, settings.parallel == "fsdp" and distributed.size > 1
    if shards and not model.backbone.supports_fsdp:
        raise UserError(f"train.parallel: fsdp cannot shard a {model.backbone.name} model; use ddp")
    trained = copy.deepcopy(model.cpu()) if shards else model
    if settings.activation_checkpointing:
        checkpoint_blocks(trained)
    module = LossModule(trained.to(device), task, smoothing=settings.label_smoothing)
    if shards:
        half = uses_bfloat16(device, settings.dtype)
        dtype, reduce_dtype = torch.bfloat16 if half else None, getattr(torch, settings.reduce_dtype)
        if not half and settings.reduce_dtype == "float32":
            reduce_dtype = None  # that of the weights
        offload = settings.cpu_offload
        shard_module(module, device, distributed.size, dtype=dtype, reduce_dtype=reduce_dtype, cpu_offload=offload)
    return module


def build_step(
    module: nn.Module,
    task: Task,
    optimizers: list[Optimizer],
    settings: TrainSettings,
    mode: ExecutionMode,
    distributed: DistributedContext,
    split: Split,
) -> MicroBatching:
    """The optimizer step of a run, as its execution mode, processes and memory require."""
    if mode in ("compiled", "both"):
        module = compile_module(module)
    unused = settings.unfreeze is not None or task.has_unused_parameters
    module = distributed.wrap(module, find_unused_parameters=unused).train()
    kind = GraphedStep if uses_graphs(mode) else TrainingStep
    return MicroBatching(kind(module, task, optimizers, settings, distributed), split, settings.micro_batch)


def check_settings(settings: TrainSettings, distributed: DistributedContext) -> None:
    """Reject settings that this device or number of processes cannot run."""
    if settings.batch_tokens is None and settings.batch % distributed.size:
        raise UserError(f"train.batch: {settings.batch} is not divisible by {distributed.size} processes")
    if settings.parallel == "fsdp" and settings.compile not in ("auto", False):
        raise UserError(f"train.parallel: fsdp runs without torch.compile and CUDA graphs, not with {settings.compile}")
    if settings.cpu_offload and distributed.size == 1:
        raise UserError("train.cpu_offload: needs several processes (torchrun), since one has nothing to shard")
    if settings.dtype == "float8" and not supports_fp8(distributed.device):
        raise UserError("train.dtype: float8 needs an NVIDIA GPU of the Ada or Hopper generation or newer")


_compiled_shapes: tuple[torch.Size, ...] = ()


def compile_module(module: nn.Module) -> nn.Module:
    """Compile a module at its first call, with a cache on disk for later runs of the same shapes.

    torch.compile recompiles a function at most eight times per process and then silently stops. So the compiler is
    reset when a model with other parameter shapes arrives.
    """
    global _compiled_shapes
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(mark_used(cache_folder() / "compiled")))
    shapes = tuple(parameter.shape for parameter in module.parameters())
    if shapes != _compiled_shapes:
        torch.compiler.reset()
        _compiled_shapes = shapes
    return DynamicShapes(torch.compile(module))  # type: ignore[arg-type]


class DynamicShapes(nn.Module):
    """Marks the sizes that vary between batches as dynamic, so that the second batch does not recompile."""

    def __init__(self, compiled: nn.Module):
        super().__init__()
        self.compiled = compiled

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        for tensor in (*batch.label_positions.values(), *([] if batch.cu_seqlens is None else [batch.cu_seqlens])):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.compiled(batch)


class GraphedStep(TrainingStep):
    """A training step as CUDA graphs, for small models whose kernels take longer to launch than to run.

    One graph per batch shape holds the forward and backward pass, another the weight update; they run the same kernels
    in the same order as the plain step. A shape is captured when it occurs for the second time: the first runs
    eagerly, which also initializes the device and compiles. Graphs write gradients to fixed memory, so gradients are
    set to zero and never freed. Learning rates and loss weights are read from the device.
    """

    zero_to_none = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        device = self.distributed.device
        self.shapes: set[Any] = set()  # that have occurred
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
        if self.capturable is False or key not in self.shapes or len(self.graphs) >= MAX_GRAPHS:
            self.shapes.add(key)
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
