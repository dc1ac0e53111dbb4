"""How training steps run: eagerly, compiled, as CUDA graphs, or both; and the composition of the step."""

import logging
import os
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training import flops_per_token
from headstock.errors import UserError
from headstock.io import cache_folder
from headstock.kernels.fp8 import supports_fp8
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.budget import Budget
from headstock.train.distributed import DistributedContext
from headstock.train.graphed_step import GraphedStep
from headstock.train.oom import MicroBatching, Split
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule, TrainingStep

logger = logging.getLogger(__name__)

# Estimates on NVIDIA GPUs
MIN_COMPILED_SECONDS = 180.0  # of a run; compiling takes about one minute and saves about a third
FLOPS = 0.7e12  # per second and multiprocessor, for a large eager model
LAUNCH_SECONDS = 4e-3  # per layer and batch: the time to launch its kernels, however small they are

ExecutionMode = Literal["plain", "compiled", "recorded", "both"]
BY_SETTING: dict[Any, ExecutionMode] = {True: "compiled", False: "plain", "replay": "recorded", "both": "both"}


def uses_graphs(mode: ExecutionMode) -> bool:
    return mode in ("recorded", "both")


def choose_execution_mode(
    model: Model,
    task: Task,
    settings: TrainSettings,
    budget: Budget,
    sampler: BatchSampler,
    distributed: DistributedContext,
) -> ExecutionMode:
    """The mode that the settings name, or the fastest by estimate. The same run always gets the same mode."""
    graphs_allowed = distributed.size == 1 and not settings.unfreeze
    if settings.compile in ("replay", "both") and distributed.device.type != "cuda":
        raise UserError(f"train.compile: {settings.compile} needs CUDA graphs, and this run is not on a CUDA device")
    if settings.compile in ("replay", "both") and not graphs_allowed:
        raise UserError(f"train.compile: {settings.compile} needs a single process and no `unfreeze`")
    if settings.compile != "auto":
        return BY_SETTING[settings.compile]
    if distributed.device.type != "cuda" or not model.backbone.supports_compile:
        return "plain"
    compute, launch = step_seconds(model, task, settings, sampler, distributed)
    small = compute < 2 * launch and graphs_allowed  # the GPU is idle part of the time
    seconds = budget.seconds or (budget.steps or 0) * (compute if small else max(compute, launch))
    ragged = hasattr(sampler.examples, "lengths")  # each new length would compile again
    if small:
        return "recorded" if ragged or seconds < MIN_COMPILED_SECONDS else "both"
    if ragged:
        return "plain"
    if seconds < MIN_COMPILED_SECONDS:
        logger.info(f"not compiled: the run takes about {seconds:.0f} s, and compiling would cost more than it saves")
        return "plain"
    return "compiled"


def step_seconds(
    model: Model, task: Task, settings: TrainSettings, sampler: BatchSampler, distributed: DistributedContext
) -> tuple[float, float]:
    """Estimated seconds of a plain step's arithmetic and of its kernel launches; the longer one determines its time."""
    rows = settings.batch // distributed.size
    lengths = getattr(sampler.examples, "lengths", None)
    length = sampler.length if lengths is None else min(sampler.length, max(1, round(float(np.mean(lengths)))))
    flops = flops_per_token(model_cost(model, task, model_dimensions(model, length=length)), training=True)
    peak = FLOPS * torch.cuda.get_device_properties(distributed.device).multi_processor_count
    micro_batches = -(-rows // (settings.micro_batch or rows))
    tokens = rows * length if settings.batch_tokens is None else settings.batch_tokens
    return float(flops) * tokens / peak, LAUNCH_SECONDS * model.backbone.depth * micro_batches


def build_step(
    model: Model,
    task: Task,
    optimizers: list[Optimizer],
    settings: TrainSettings,
    mode: ExecutionMode,
    distributed: DistributedContext,
    split: Split,
) -> MicroBatching:
    """The optimizer step of a run, as its execution mode, processes and memory require."""
    module: nn.Module = LossModule(model, task, smoothing=settings.label_smoothing)
    if mode in ("compiled", "both"):
        module = compile_module(module)
    module = distributed.wrap(module, unfreezing=settings.unfreeze is not None).train()
    kind = GraphedStep if uses_graphs(mode) else TrainingStep
    return MicroBatching(kind(module, task, optimizers, settings, distributed), split, settings.micro_batch)


def check_settings(settings: TrainSettings, distributed: DistributedContext) -> None:
    """Reject settings that this device or number of processes cannot run."""
    if settings.batch % (distributed.size * (settings.micro_batch or 1)):
        parts = f"{distributed.size} processes" + (
            f" x micro_batch {settings.micro_batch}" if settings.micro_batch else ""
        )
        raise UserError(f"train.batch: {settings.batch} is not divisible by {parts}")
    if settings.dtype == "float8" and not supports_fp8(distributed.device):
        raise UserError("train.dtype: float8 needs an NVIDIA GPU of the Ada or Hopper generation or newer")


_compiled_shapes: tuple[torch.Size, ...] = ()


def compile_module(module: nn.Module) -> nn.Module:
    """Compile a module at its first call, with a cache on disk for later runs of the same shapes.

    torch.compile recompiles a function at most eight times per process and then silently stops. So the compiler is
    reset when a model with other parameter shapes arrives.
    """
    global _compiled_shapes
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
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
