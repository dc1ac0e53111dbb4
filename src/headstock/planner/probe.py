"""Measures real steps of a planned run on this device and text, to predict the cost of the whole run.

Two short trainings are run. The first compiles and loads kernels, validates and writes a checkpoint: what a process
does once. The second is measured.

With CUDA graphs, a step costs more when its batch shape is new. The sampler is deterministic, so the number of new
shapes in the whole run is counted without a model.
"""

import gc
import json
import logging
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import SplitStores, build_split_stores
from headstock.data.tokenizer import Tokenizer
from headstock.io import write_text
from headstock.kernels.cuda_graphs import signature
from headstock.logs import muted
from headstock.planner.forecast import CostEstimate
from headstock.planner.machine import synchronize
from headstock.tasks.base import TASKS
from headstock.train.budget import Budget
from headstock.train.callbacks import Event, log_metrics
from headstock.train.checkpoint import TrainState
from headstock.train.distributed import DistributedContext
from headstock.train.execution import BY_SETTING, MAX_GRAPHS, ExecutionMode, choose_execution_mode, uses_graphs
from headstock.train.loop import sequence_length, train
from headstock.train.memory import PeakMemory
from headstock.train.models import build_model, build_task
from headstock.train.run_folder import RunFolder
from headstock.train.sampler import BatchSampler, StepLoader
from headstock.train.settings import RunConfig, TrainSettings

logger = logging.getLogger(__name__)

COLD_STEPS = 4  # of the first training; CUDA graphs are captured by the third
STEPS, MIN_STEPS = 50, 10  # of the second training
WARMUP_STEPS = 5  # of the second training, not part of the steady speed
TARGET_SECONDS = 3.0  # measure fast steps for this long
MAX_SECONDS = 90.0
TARGET_STEADY = 40  # replayed steps to measure, if that takes less than MAX_SECONDS
VALIDATIONS = 2  # in the second training
LOGS = 50  # log lines of a run; each synchronizes the GPU
MAX_PREDICTED_STEPS = 4000  # later steps hardly ever have a new shape
ROUNDS, TOLERANCE = 8, 0.03  # of the search for a consistent run length
NEW, CAPTURED, REPLAYED = range(3)  # a step with a new shape runs eagerly, the next is captured, later ones replayed
COMPILE_SETTING = {mode: setting for setting, mode in BY_SETTING.items()}


@dataclass(frozen=True)
class StepTimings:
    """What one short training took."""

    step_seconds: list[float]  # of each step, without validations and checkpoints
    tokens: int
    validation_seconds: float  # mean
    checkpoint_seconds: float  # mean
    cpu_seconds: float = 0.0  # median over steps, all cores together; hardly affected by other programs

    def first_seconds(self) -> float:
        """The first steps, a validation and a checkpoint."""
        return sum(self.step_seconds[:COLD_STEPS]) + self.validation_seconds + self.checkpoint_seconds


@dataclass(frozen=True, kw_only=True)
class ProbeResult(StepTimings):
    """The measured training, and what is known about the whole run."""

    validation_tokens: int
    peak_bytes: int
    kinds: Sequence[int] = ()  # NEW, CAPTURED or REPLAYED for each step, with CUDA graphs
    expected_kinds: dict[int, int] = field(default_factory=dict)  # number of NEW and CAPTURED steps in the whole run
    cold_start_seconds: float = 0.0  # extra time of the first training in this process
    mode: ExecutionMode = "eager"

    @property
    def steady_seconds(self) -> float:
        """Duration of a step after warm-up; with CUDA graphs, of a replayed step that follows another."""
        steps = list(range(WARMUP_STEPS, len(self.step_seconds))) or list(range(len(self.step_seconds)))
        if self.kinds:
            replayed = [step for step in steps if self.kinds[step] == REPLAYED]
            steps = [step for step in replayed if self.kinds[step - 1] == REPLAYED] or replayed or steps
        return statistics.mean(self.step_seconds[step] for step in steps)

    @property
    def startup_seconds(self) -> float:
        """Extra time of the warm-up steps, and of the steps with new shapes in the whole run."""
        steady, warmup = self.steady_seconds, self.step_seconds[:WARMUP_STEPS]
        total = max(0.0, sum(warmup) - len(warmup) * steady)
        for kind, count in self.expected_kinds.items():
            steps = range(WARMUP_STEPS, len(self.step_seconds))
            seconds = [self.step_seconds[step] for step in steps if self.kinds[step] == kind]
            total += count * max(0.0, statistics.mean(seconds) - steady) if seconds else 0.0
        return total


def probe(
    run_config: RunConfig,
    tokenizer: Tokenizer,
    sample: Sequence[str],
    forecast: CostEstimate,
    *,
    valid_tokens: float,
    steps_for: Callable[[CostEstimate], int],
    device: torch.device,
) -> CostEstimate:
    """The forecast, corrected by measurements.

    `valid_tokens` is the size of each validation of the run; `steps_for` gives the length of the run at some costs.
    """

    def run_steps(result: ProbeResult) -> int:
        return steps_for(corrected_estimate(forecast, result))

    result = measure(run_config, tokenizer, sample, valid_tokens=valid_tokens, steps_for=run_steps, device=device)
    return corrected_estimate(forecast, result)


def corrected_estimate(forecast: CostEstimate, result: ProbeResult) -> CostEstimate:
    return replace(
        forecast,
        step_tokens=round(result.tokens / len(result.step_seconds)),
        step_seconds=result.steady_seconds,
        validation_seconds_per_token=result.validation_seconds / max(1, result.validation_tokens),
        checkpoint_seconds=result.checkpoint_seconds,
        peak_bytes=result.peak_bytes,
        cpu_seconds=result.cpu_seconds,
        startup_seconds=result.startup_seconds,
        cold_start_seconds=result.cold_start_seconds,
        mode=result.mode,
        probed=True,
    )


def measure(
    run_config: RunConfig,
    tokenizer: Tokenizer,
    sample: Sequence[str],
    *,
    valid_tokens: float,
    steps_for: Callable[[ProbeResult], int],
    device: torch.device,
) -> ProbeResult:
    """Train briefly in a temporary folder, in the execution mode of the whole run."""
    settings = run_config.train
    assert settings.valid_tokens is not None  # set by the planner
    with tempfile.TemporaryDirectory() as folder:
        stores = sample_stores(sample, tokenizer, Path(folder), run_config, valid_tokens)
        task = build_task(run_config, tokenizer)
        model = build_model(run_config, task)
        length = sequence_length(model, settings)
        sizes: dict[str, Any] = {"batch": settings.batch, "batch_tokens": settings.batch_tokens}
        sampler = BatchSampler(task, stores.train, length=length, seed=settings.seed, **sizes)
        budget = Budget.of(settings, sampler.steps_per_epoch)
        # the budget of the whole run: a probe by itself is too short to be compiled
        distributed = DistributedContext(device)
        mode = choose_execution_mode(model, task, settings, budget, sampler, distributed)
        del model  # must not count towards the peak memory
        run = ProbeRun(run_config, tokenizer, stores, Path(folder), mode, budget.steps or STEPS, device)
        cold = run.train(COLD_STEPS)
        predict_kinds = partial(shape_kinds, sampler, settings, mode, device)
        seconds = cold.step_seconds[-1]
        count, kinds = probe_steps(seconds, run.run_steps), []
        if mode in ("graphed", "both"):
            kinds = predict_kinds(count)
            while steady_pairs(kinds) < TARGET_STEADY and 2 * count * seconds < MAX_SECONDS:
                count *= 2
                kinds = predict_kinds(count)
        logger.info("measuring %d steps of %d rows", count, settings.batch)
        peak = PeakMemory(device)
        timings = run.train(count)
        rows = min(max(1, settings.valid_tokens // length), len(task.examples(stores.valid, length=length)))
        result = ProbeResult(
            **vars(timings),
            validation_tokens=rows * length,
            peak_bytes=peak.bytes(),
            kinds=kinds,
            cold_start_seconds=max(0.0, cold.first_seconds() - timings.first_seconds()),
            mode=mode,
        )
        return with_expected_kinds(result, predict_kinds, steps_for) if kinds else result


def with_expected_kinds(
    result: ProbeResult, predict_kinds: Callable[[int], list[int]], steps_for: Callable[[ProbeResult], int]
) -> ProbeResult:
    """Add the number of new shapes in the whole run.

    It depends on the length of the run, which in turn depends on what new shapes cost: a fixed point, searched for
    between one step and the length without new shapes.
    """
    low, high = 1, steps_for(result)
    steps = high
    for _ in range(ROUNDS):
        kinds = Counter(predict_kinds(min(steps, MAX_PREDICTED_STEPS))[WARMUP_STEPS:])
        result = replace(result, expected_kinds={kind: kinds[kind] for kind in (NEW, CAPTURED)})
        affordable = steps_for(result)
        if abs(affordable - steps) <= TOLERANCE * steps:
            break
        low, high = (steps, high) if affordable > steps else (low, steps)
        steps = min(max(affordable, (3 * low + high) // 4), (low + 3 * high) // 4)
    return result


@dataclass(frozen=True)
class ProbeRun:
    """A planned run that can be trained for a few steps."""

    run_config: RunConfig
    tokenizer: Tokenizer
    stores: SplitStores
    folder: Path
    mode: ExecutionMode
    run_steps: int  # of the whole run
    device: torch.device

    def train(self, count: int) -> StepTimings:
        """Train a new model for `count` steps; validate at the end and, in a long probe, also half-way."""
        every = -(-count // VALIDATIONS) if count > COLD_STEPS else count
        settings = replace(
            self.run_config.train,
            steps=count,
            epochs=None,
            minutes=None,
            compile=COMPILE_SETTING[self.mode],
            validate_every=every,
            checkpoint_every=None,
            log_every=max(1, self.run_steps // LOGS),  # as often as in the whole run
            tensorboard=False,
        )
        times, cpu_times, validations = [0.0], [0.0], []

        def record(event: Event) -> None:
            step, paused = event.state.step, event.state.overhead_seconds
            if event.kind == "step":
                if step <= WARMUP_STEPS or step % every == 0 or step == count:
                    synchronize(self.device)
                times.append(time.perf_counter() - paused)
                cpu_times.append(time.process_time())
            if event.kind == "valid":
                validations.append(time.perf_counter() - paused - times[-1])

        run = RunFolder(self.folder / f"run-{count}")
        run.path.mkdir()
        task = build_task(self.run_config, self.tokenizer)
        model = build_model(self.run_config, task)
        times[0], cpu_times[0] = time.perf_counter(), time.process_time()
        callbacks = [record, log_metrics(run)]
        distributed = DistributedContext(self.device)
        state = train(model, task, self.stores, settings, run=run, distributed=distributed, callbacks=callbacks)
        del model  # free memory and compiled code, which the next training must not find
        if self.mode in ("compiled", "both"):
            torch.compiler.reset()
        gc.collect()
        validation = statistics.mean(validations)
        return StepTimings(
            step_seconds=[after - before for before, after in pairwise(times)],
            tokens=state.tokens,
            validation_seconds=validation,
            checkpoint_seconds=max(0.0, state.overhead_seconds / len(validations) - validation),
            cpu_seconds=statistics.median(after - before for before, after in pairwise(cpu_times)),
        )


def probe_steps(seconds: float, run_steps: int) -> int:
    """Steps to measure if one takes this long: no more than the run has, unless that is very few."""
    count = min(max(STEPS, round(TARGET_SECONDS / seconds)), max(STEPS, run_steps))
    return max(MIN_STEPS, min(count, round(MAX_SECONDS / seconds)))


def shape_kinds(
    sampler: BatchSampler, settings: TrainSettings, mode: ExecutionMode, device: torch.device, steps: int
) -> list[int]:
    """NEW, CAPTURED or REPLAYED for each of so many steps, which the sampler alone determines."""
    counts: Counter[Any] = Counter()
    kinds = []
    budget, distributed = Budget(steps, None), DistributedContext(device)
    full, graphs = mode != "eager", uses_graphs(mode)
    loader = StepLoader(sampler, budget, TrainState(), distributed, full=full, graphs=graphs)
    for step in range(steps):
        batches = loader(step, settings.micro_batch)
        kinds.append(min(shape_kind(counts, signature(batch)) for batch in batches))
    return kinds


def shape_kind(counts: Counter[Any], shape: Any) -> int:
    counts[shape] += 1
    if counts[shape] == 2 and sum(count > 1 for count in counts.values()) > MAX_GRAPHS:  # the graph cache is full
        counts[shape] = 1
    return min(counts[shape] - 1, REPLAYED)


def steady_pairs(kinds: Sequence[int]) -> int:
    """Replayed steps after warm-up that follow another replayed step."""
    return sum(first == second == REPLAYED for first, second in pairwise(kinds[WARMUP_STEPS - 1 :]))


def sample_stores(
    sample: Sequence[str], tokenizer: Tokenizer, folder: Path, run_config: RunConfig, valid_tokens: float
) -> SplitStores:
    """Token stores of the sample, with enough held-out text for validations as long as the run's."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in sample]
    write_text(folder / "sample.jsonl", "\n".join(lines))
    task = TASKS.get(run_config.objective)(run_config.task, tokenizer)
    tokens = sum(map(len, tokenizer.encode_batch(list(sample))))
    with muted():
        return build_split_stores(
            read_corpus(folder / "sample.jsonl"),
            tokenizer,
            valid_fraction=max(run_config.data.valid_fraction, min(0.5, 1.2 * valid_tokens / max(1, tokens))),
            sentences=task.needs_sentences,
            cache=folder / "cache",
        )
