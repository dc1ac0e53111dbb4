"""How steps are run: plainly, compiled where a run is long enough, recorded where calling takes longest, or both."""

import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstock.cost.training import flops_per_token, model_cost
from headstock.errors import UserError
from headstock.io import cache_folder
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.base import Task
from headstock.train.budget import Budget
from headstock.train.distributed import DistributedContext
from headstock.train.sampler import BatchSampler
from headstock.train.settings import TrainSettings

WORTH = 180.0  # seconds that a run must take without it: compiling takes about one minute, and saves about a third
FLOPS = 0.7e12  # a second and multiprocessor, of a large model that is not compiled
CALLS = 4e-3  # seconds that a layer and batch take at least, however small: that long are its kernels called for


ExecutionMode = Literal["plain", "compiled", "recorded", "both"]
ASKED: dict[Any, ExecutionMode] = {True: "compiled", False: "plain", "replay": "recorded", "both": "both"}


def choose_execution_mode(
    model: Model,
    task: Task,
    settings: TrainSettings,
    budget: Budget,
    order: BatchSampler,
    distributed: DistributedContext,
    say: Callable[[str], None],
) -> ExecutionMode:
    """How the steps are run: as it was asked, or by what they and the run will take. The same for the same run."""
    alone = distributed.size == 1 and not settings.unfreeze
    if settings.compile in ("replay", "both") and distributed.device.type != "cuda":
        raise UserError(f"train.compile: {settings.compile} needs CUDA graphs, and this run is not on a CUDA device")
    if settings.compile in ("replay", "both") and not alone:
        raise UserError(
            f"train.compile: {settings.compile} is for one process that moves the same weights in every step"
        )
    if settings.compile != "auto":
        return ASKED[settings.compile]
    if distributed.device.type != "cuda" or not model.backbone.supports_compile:
        return "plain"
    work, calls = step_seconds(model, task, settings, order, distributed)
    small = work < 2 * calls and alone  # up to there the GPU waits now and then
    seconds = budget.seconds or (budget.steps or 0) * (work if small else max(work, calls))
    uneven = hasattr(order.examples, "lengths")  # rows of many lengths would be compiled many times
    if small:
        return "recorded" if uneven or seconds < WORTH else "both"
    if uneven:
        return "plain"
    if seconds < WORTH and distributed.is_main:
        say(f"not compiled: the run takes about {seconds:.0f} s, and compiling would cost more than it saves")
    return "compiled" if seconds >= WORTH else "plain"


def step_seconds(
    model: Model, task: Task, settings: TrainSettings, order: BatchSampler, distributed: DistributedContext
) -> tuple[float, float]:
    """About how long a plain step's arithmetic takes a process, and the calling of its kernels: it takes the longer."""
    rows = settings.batch // distributed.size
    lengths = getattr(order.examples, "lengths", None)
    length = order.length if lengths is None else min(order.length, max(1, round(float(np.mean(lengths)))))
    flops = flops_per_token(model_cost(model, task, model.dimensions(length=length)), training=True)
    power = FLOPS * torch.cuda.get_device_properties(distributed.device).multi_processor_count
    parts = -(-rows // (settings.micro_batch or rows))
    tokens = rows * length if settings.batch_tokens is None else settings.batch_tokens
    return float(flops) * tokens / power, CALLS * model.backbone.depth * parts


_latest: tuple[torch.Size, ...] = ()


def compiled(objective: nn.Module) -> nn.Module:
    """The module, compiled when it is first called; what was compiled is kept for other runs of the same shapes.

    A process compiles what comes here eight times, whosever it is, and then no more without a word. So where weights
    have other sizes than the last, which are compiled anew in any case, it is told to forget those before.
    """
    global _latest
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    sizes = tuple(parameter.shape for parameter in objective.parameters())
    if sizes != _latest:
        torch.compiler.reset()
        _latest = sizes
    return Loose(torch.compile(objective))  # type: ignore[arg-type]


class Loose(nn.Module):
    """Says which sizes differ from batch to batch, so that it need not be found out by compiling twice."""

    def __init__(self, compiled: nn.Module):
        super().__init__()
        self.compiled = compiled

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        for tensor in (*batch.label_positions.values(), *([] if batch.cu_seqlens is None else [batch.cu_seqlens])):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.compiled(batch)
