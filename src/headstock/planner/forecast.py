"""What a run will take, before it is begun: parameters, arithmetic, memory and time, from the closed forms."""

import math
from dataclasses import dataclass, replace
from functools import partial

from headstock.cost.training import TrainingMemory, flops_per_token, model_cost, optimizer_flops, training_memory
from headstock.kernels.backends import onednn_is_slow
from headstock.kernels.ops import SCORES, SCORES_CUDA, worth_fusing
from headstock.model.formulas import Dimensions, ExecutionContext
from headstock.model.model import Model
from headstock.planner.machine import Machine
from headstock.tasks.base import Task
from headstock.train.blueprint import blueprint
from headstock.train.budget import VALIDATIONS
from headstock.train.compile import CALLS, ExecutionMode
from headstock.train.settings import RunConfig

# The share of its speed at large products that a device reaches in a model's, and how often the numbers that a step
# keeps are read or written in it; fitted to measured steps. A probe replaces both by what it measures.
REACHED = {"cpu": 0.5, "mps": 0.5, "cuda": 0.8}
TOUCHED = {"cpu": 15, "mps": 10, "cuda": 10}
TOUCHED_COMPILED = 4
OPERATIONS = 100  # of a layer, forward and back
RECORDED = 0.15  # the share of the calls' time that is left where a small model's steps are recorded
# shapes that batches have in 2,500 steps, of objectives whose batches differ: each is read as usual, then recorded
SHAPES = {"masked": 20, "hybrid": 250, "denoise": 250}
WRITTEN = 2.5e8  # bytes a second into a checkpoint, its checksum included
ROOM = 0.8  # of what is free may be taken


@dataclass(frozen=True)
class Costs:
    """What one step takes on a machine."""

    parameters: int
    inner: int  # of them, those outside the embedding and the heads: what a rule for sizes counts
    flops: float  # for a token, forward and back
    tokens: int  # in a step
    step: float  # seconds
    reading: float  # seconds to read a token in a validation
    saving: float  # seconds of a checkpoint
    peak: int  # bytes
    starting: float = 0.0  # seconds more that the first steps take, and those of new shapes where steps are recorded
    cold: float = 0.0  # seconds more that a process takes which has to load its kernels first; in no forecast
    processor: float = 0.0  # seconds of a step on all cores together, where it was measured
    way: ExecutionMode | None = None  # how steps were run, where they were
    measured: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step


def costs(chosen: RunConfig, machine: Machine) -> Costs:
    model, task = blueprint(chosen)
    length = chosen.train.length or model.backbone.context or 256
    d = model.dimensions(length=length, source_length=length)
    # on a GPU packed rows are read document by document, without a table of who may look at whom
    own = ExecutionContext("cpu", packed=True, workspace=not onednn_is_slow())
    place = ExecutionContext("cuda", half=machine.half) if machine.device == "cuda" else own
    parts = model_cost(model, task, d, place)
    at_once = chosen.train.micro_batch or chosen.train.batch
    held = held_in(model, task, d, place, at_once, chosen)
    tokens, flops = chosen.train.batch * length, flops_per_token(parts, training=True)
    times = math.ceil(chosen.train.batch / at_once)
    moving = optimizer_flops(parts.weights(), chosen.train.optimizer) / machine.products
    computing = flops * tokens / machine.products / REACHED[machine.device] + moving
    touched = TOUCHED_COMPILED if chosen.train.compile is True else TOUCHED[machine.device]
    carrying = touched * times * (held.activations + held.working) / machine.traffic
    carrying += 4 * (held.weights + held.optimizer) / machine.traffic
    launching = machine.launch * OPERATIONS * (model.backbone.depth + 1) * times
    starting = 0.0
    if machine.device == "cuda":  # calls take longer than small operations do: autograd and optimizers are called too
        launching = max(launching, CALLS * model.backbone.depth * times)
        if model.backbone.supports_compile and chosen.train.compile in ("auto", "replay"):
            small = computing + carrying < 2 * launching  # as train.compiling has it
            starting = 2 * launching * SHAPES.get(chosen.objective, 1) if small else 0.0
            launching *= RECORDED
    # a GPU is told what to do while it is still at work; a CPU does one after the other
    step = max(computing + carrying, launching) if machine.device == "cuda" else computing + carrying + launching
    return Costs(
        parameters=int(parts.count),
        inner=int(sum(w.count * w.times for w in parts.weights() if is_inner(w.path, w.table))),
        flops=float(flops),
        tokens=tokens,
        step=float(step) * machine.slower,
        reading=float(step) * machine.slower / tokens / 3,
        saving=float(held.weights + held.optimizer + held.average) / WRITTEN,
        peak=int(held.total) + (machine.held if machine.device != "cuda" else 0),
        starting=starting * machine.slower,
    )


def held_in(
    model: Model, task: Task, d: Dimensions, place: ExecutionContext, rows: int, chosen: RunConfig
) -> TrainingMemory:
    """The closed form of memory; where scores of tokens are made in parts, only a part of them counts."""
    ask = partial(training_memory, model, task, rows=rows, optimizer=chosen.train.optimizer, place=place)
    held = ask(d, averaged=chosen.train.ema > 0)
    scored = round(rows * d.length * task.head_passes("token", d.length))
    if not worth_fusing(scored, d.vocabulary):
        return held
    without = ask(replace(d, vocabulary=0))
    if place.device == "cuda":  # scores that become their gradient
        parts = min(scored * d.vocabulary, SCORES_CUDA) * (2 if place.half else 4)
    else:  # scores, their softmax and its gradient
        parts = min(scored * d.vocabulary, SCORES) * (10 if place.half else 12)
    return replace(held, activations=without.activations, working=without.working + parts)


def is_inner(path: str, table: bool) -> bool:
    return path.startswith("backbone.") and not table


def fitted(chosen: RunConfig, machine: Machine) -> RunConfig:
    """The same run with as many rows at once as there is memory for, and as pay."""
    most = {"cuda": 131_072, "mps": 16_384}.get(machine.device, 8192)  # tokens; more at once gain nothing
    length = chosen.train.length or getattr(chosen.model, "context", None) or 256
    rows = chosen.train.batch
    while rows > 1 and (rows * length > most or not fits(with_rows(chosen, rows), machine)):
        rows //= 2
    return with_rows(chosen, rows)


def with_rows(chosen: RunConfig, rows: int) -> RunConfig:
    asked = None if rows == chosen.train.batch else rows
    return replace(chosen, train=replace(chosen.train, micro_batch=asked))


def fits(chosen: RunConfig, machine: Machine) -> bool:
    held = machine.held if machine.device != "cuda" else 0
    return costs(chosen, machine).peak - held <= ROOM * machine.free


def seconds_of(each: Costs, steps: int, valid_tokens: float) -> float:
    """A whole run: its steps, its validations, and a checkpoint with each."""
    times = min(VALIDATIONS, steps)
    return each.starting + steps * each.step + times * (valid_tokens * each.reading + each.saving)


def steps_in(each: Costs, seconds: float, valid_tokens: float) -> int:
    """How many steps there is time for."""
    beside = each.starting + VALIDATIONS * (valid_tokens * each.reading + each.saving)
    return max(1, math.floor(max(seconds - beside, 0.1 * seconds) / each.step))
