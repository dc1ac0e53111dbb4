"""Whether a run is compiled, and how: what compiling costs must come back before the run is over."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.files import cache_folder
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.tasks.task import Task
from headstock.train.budget import Budget
from headstock.train.cost import flops_per_token, parts_of
from headstock.train.order import Order
from headstock.train.settings import TrainSettings
from headstock.train.world import World

WORTH = 180.0  # seconds that a run must take without it: compiling takes about one minute, and saves about a third
FLOPS = 0.7e12  # a second and multiprocessor, of a large model that is not compiled
CALLS = 2e-3  # seconds that a layer and batch take at least, however small: that long are its kernels called for


def compiles(
    model: Model,
    task: Task,
    settings: TrainSettings,
    budget: Budget,
    order: Order,
    world: World,
    say: Callable[[str], None],
) -> bool:
    """Whether the run is compiled: as it was asked, or by how long it will take. Always the same for the same run."""
    if settings.compile in ("graphs", "replay") and world.device.type != "cuda":
        raise UserError(f"train.compile: {settings.compile} needs CUDA graphs, and this run is not on a CUDA device")
    if settings.compile == "replay" and (world.size > 1 or settings.unfreeze):
        raise UserError("train.compile: replay is for one process that moves the same weights in every step")
    if settings.compile != "auto":
        return settings.compile in (True, "graphs")
    even = not hasattr(order.examples, "lengths")  # rows of many lengths would be compiled many times
    if world.device.type != "cuda" or not even or not model.backbone.compiles:
        return False
    seconds = budget.seconds or (budget.steps or 0) * step_seconds(model, task, settings, order.length, world)
    if seconds < WORTH and world.leads:
        say(f"not compiled: the run takes about {seconds:.0f} s, and compiling would cost more than it saves")
    return seconds >= WORTH


def step_seconds(model: Model, task: Task, settings: TrainSettings, length: int, world: World) -> float:
    """About how long a step takes a process that does not compile."""
    rows = settings.batch // world.size
    flops = flops_per_token(parts_of(model, task, model.dimensions(length=length)), training=True)
    power = FLOPS * torch.cuda.get_device_properties(world.device).multi_processor_count
    parts = -(-rows // (settings.micro_batch or rows))
    return max(float(flops) * rows * length / power, CALLS * model.backbone.depth * parts)


def compiled(objective: nn.Module, settings: TrainSettings) -> nn.Module:
    """The module, compiled when it is first called; what was compiled is kept for other runs of the same shapes."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    graphs = settings.compile == "graphs"
    more: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {}
    made = torch.compile(objective, **more)
    return made if graphs else Loose(made)  # type: ignore[return-value, arg-type]


class Loose(nn.Module):
    """Says which sizes differ from batch to batch, so that it need not be found out by compiling twice."""

    def __init__(self, compiled: nn.Module):
        super().__init__()
        self.compiled = compiled

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        for tensor in (*batch.places.values(), *([] if batch.bounds is None else [batch.bounds])):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.compiled(batch)
