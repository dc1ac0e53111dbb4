"""Estimates what a run costs before it starts: parameters, FLOPs, memory and time, from closed formulas."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from headstock.cost.formulas import Dimensions, ExecutionContext
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import TrainingMemory, flops_per_token, optimizer_flops, training_memory
from headstock.kernels.backends import onednn_is_slow
from headstock.kernels.cross_entropy import MAX_LOGITS, MAX_LOGITS_CUDA, worth_chunking
from headstock.model.model import Model
from headstock.planner.machine import Machine
from headstock.tasks.base import Task
from headstock.train.budget import VALIDATIONS
from headstock.train.execution import LAUNCH_SECONDS, ExecutionMode
from headstock.train.models import blueprint
from headstock.train.settings import RunConfig, TrainSettings

# Fitted to measured steps; a probe replaces them by measurements.
MATMUL_EFFICIENCY = {"cpu": 0.5, "mps": 0.5, "cuda": 0.8}  # of the speed of large matrix products
MEMORY_PASSES = {"cpu": 15, "mps": 10, "cuda": 10}  # how often a step reads or writes each activation
COMPILED_MEMORY_PASSES = 4
OPERATIONS_PER_LAYER = 100  # forward and backward
GRAPHED_LAUNCH_SHARE = 0.15  # share of the launch overhead that CUDA graphs leave
CHECKPOINT_BYTES_PER_SECOND = 2.5e8  # with its checksum
MEMORY_SHARE = 0.8  # of free memory that a run may use
MAX_MICRO_BATCH_TOKENS = {"cpu": 8192, "mps": 16_384, "cuda": 131_072}  # larger micro-batches gain nothing


@dataclass(frozen=True)
class CostEstimate:
    """What one step costs on a machine."""

    parameters: int
    non_embedding_parameters: int  # also without the heads
    flops_per_token: float  # forward and backward
    step_tokens: int
    step_seconds: float
    validation_seconds_per_token: float
    checkpoint_seconds: float
    peak_bytes: int
    startup_seconds: float = 0.0  # extra time of the first steps and of steps with new batch shapes
    measured_parts: tuple[str, ...] = ()  # modules without a closed formula, whose cost is counted
    probed: bool = False  # True if steps were measured, and not only forecast
    cold_start_seconds: float = 0.0  # extra time of a process that must first load its kernels; only if probed
    cpu_seconds: float = 0.0  # CPU time of a step over all cores; only if probed
    mode: ExecutionMode | None = None  # only if probed

    @property
    def tokens_per_second(self) -> float:
        return self.step_tokens / self.step_seconds


def estimate_costs(run_config: RunConfig, machine: Machine) -> CostEstimate:
    settings = run_config.train
    model, task = architecture(replace(run_config, train=TrainSettings()))
    length = settings.length or model.backbone.context or 256
    dimensions = model_dimensions(model, length=length, source_length=length)
    if machine.device == "cuda":  # packed rows use variable-length attention, without a mask
        execution = ExecutionContext("cuda", half=machine.bfloat16)
    else:
        execution = ExecutionContext("cpu", packed=True, workspace=not onednn_is_slow())
    cost = model_cost(model, task, dimensions, execution)
    micro_batch = settings.micro_batch or settings.batch
    micro_batches = math.ceil(settings.batch / micro_batch)
    memory = estimate_memory(model, task, dimensions, execution, micro_batch, run_config)
    tokens, flops = settings.batch * length, flops_per_token(cost, training=True)

    compute = flops * tokens / machine.matmul_flops / MATMUL_EFFICIENCY[machine.device]
    compute += optimizer_flops(cost.weights(), settings.optimizer) / machine.matmul_flops
    passes = COMPILED_MEMORY_PASSES if settings.compile is True else MEMORY_PASSES[machine.device]
    traffic = passes * micro_batches * (memory.activations + memory.working) + 4 * (memory.weights + memory.optimizer)
    compute += traffic / machine.memory_bandwidth
    launch = machine.launch_seconds * OPERATIONS_PER_LAYER * (model.backbone.depth + 1) * micro_batches
    startup = 0.0
    if machine.device == "cuda":
        launch = max(launch, LAUNCH_SECONDS * model.backbone.depth * micro_batches)  # with autograd and optimizer calls
        if model.backbone.supports_compile and settings.compile in ("auto", "replay"):
            is_small = compute < 2 * launch  # the criterion of train/execution.py
            batch_shapes = task.plan.batch_shapes if task.plan else 1
            startup = 2 * launch * batch_shapes if is_small else 0.0
            launch *= GRAPHED_LAUNCH_SHARE
        step = max(compute, launch)  # launches overlap with computation
    else:
        step = compute + launch
    step = float(step) * machine.slowdown
    backbone = (weight for weight in cost.weights() if weight.path.startswith("backbone."))
    non_embedding = sum(weight.count * weight.times for weight in backbone if not weight.is_embedding)
    return CostEstimate(
        parameters=int(cost.count),
        non_embedding_parameters=int(non_embedding),
        flops_per_token=float(flops),
        step_tokens=tokens,
        step_seconds=step,
        validation_seconds_per_token=step / tokens / 3,
        checkpoint_seconds=float(memory.weights + memory.optimizer + memory.average) / CHECKPOINT_BYTES_PER_SECOND,
        peak_bytes=int(memory.total) + (machine.baseline_bytes if machine.device != "cuda" else 0),
        startup_seconds=startup * machine.slowdown,
        measured_parts=tuple(cost.measured_parts()),
    )


@lru_cache(maxsize=32)
def architecture(run_config: RunConfig) -> tuple[Model, Task]:
    """The model without weights, built once for estimates with several batches and machines."""
    return blueprint(run_config)


def estimate_memory(
    model: Model, task: Task, dimensions: Dimensions, execution: ExecutionContext, rows: int, run_config: RunConfig
) -> TrainingMemory:
    """Memory by the closed formula, with the chunked logits of fused cross-entropy where it is used."""
    optimizer = run_config.train.optimizer
    memory_of = partial(training_memory, model, task, rows=rows, optimizer=optimizer, context=execution)
    memory = memory_of(dimensions, averaged=run_config.train.ema > 0)
    positions = round(rows * dimensions.length * task.head_passes("token", dimensions.length))
    logits = positions * dimensions.vocabulary
    if not worth_chunking(positions, dimensions.vocabulary):
        return memory
    without_logits = memory_of(replace(dimensions, vocabulary=0))
    if execution.device == "cuda":  # logits, overwritten by their gradient
        chunk = min(logits, MAX_LOGITS_CUDA) * (2 if execution.half else 4)
    else:  # logits, their softmax and its gradient
        chunk = min(logits, MAX_LOGITS) * (10 if execution.half else 12)
    return replace(memory, activations=without_logits.activations, working=without_logits.working + chunk)


def fit_micro_batch(run_config: RunConfig, machine: Machine) -> RunConfig:
    """The run with the largest micro-batch that fits in memory and is still faster than a smaller one."""
    max_tokens = MAX_MICRO_BATCH_TOKENS[machine.device]
    length = run_config.train.length or getattr(run_config.model, "context", None) or 256
    rows = run_config.train.batch
    while rows > 1 and (rows * length > max_tokens or not fits_in_memory(with_micro_batch(run_config, rows), machine)):
        rows //= 2
    return with_micro_batch(run_config, rows)


def with_micro_batch(run_config: RunConfig, rows: int) -> RunConfig:
    micro_batch = None if rows == run_config.train.batch else rows
    return replace(run_config, train=replace(run_config.train, micro_batch=micro_batch))


def fits_in_memory(run_config: RunConfig, machine: Machine) -> bool:
    baseline = machine.baseline_bytes if machine.device != "cuda" else 0
    return estimate_costs(run_config, machine).peak_bytes - baseline <= MEMORY_SHARE * machine.free_bytes


def run_seconds(costs: CostEstimate, steps: int, valid_tokens: float) -> float:
    """Duration of a run: start-up, steps, and validations with a checkpoint each."""
    validations = min(VALIDATIONS, steps)
    return costs.startup_seconds + steps * costs.step_seconds + validations * validation_seconds(costs, valid_tokens)


def affordable_steps(costs: CostEstimate, seconds: float, valid_tokens: float) -> int:
    """The number of steps in a run of this duration."""
    overhead = costs.startup_seconds + VALIDATIONS * validation_seconds(costs, valid_tokens)
    return max(1, math.floor(max(seconds - overhead, 0.1 * seconds) / costs.step_seconds))


def validation_seconds(costs: CostEstimate, valid_tokens: float) -> float:
    """Duration of one validation and its checkpoint."""
    return valid_tokens * costs.validation_seconds_per_token + costs.checkpoint_seconds
