"""The probe on a simulated GPU, whose clock advances by measured durations."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headstock.planner import probe
from headstock.planner.corpus_size import CorpusSize, count_tokens
from headstock.planner.forecast import CostEstimate, run_seconds
from headstock.planner.probe import (
    CAPTURED,
    NEW,
    REPLAYED,
    ProbeResult,
    corrected_estimate,
    measure,
    probe_steps,
    shape_kind,
    shape_kinds,
    with_expected_kinds,
)
from headstock.train.budget import Budget, Milestones
from headstock.train.callbacks import Event
from headstock.train.checkpoint import TrainState
from headstock.train.execution import BY_SETTING
from headstock.train.models import build_model, build_task
from headstock.train.sampler import BatchSampler
from headstock.train.settings import make_config

CPU = torch.device("cpu")
COSTS = CostEstimate(
    parameters=1000,
    non_embedding_parameters=800,
    flops_per_token=6000.0,
    step_tokens=512,
    step_seconds=0.005,
    validation_seconds_per_token=1e-5,
    checkpoint_seconds=0.2,
    peak_bytes=1 << 20,
)
STEP_SECONDS = {NEW: 0.031, CAPTURED: 0.045, REPLAYED: 0.005}
ROW_SECONDS = 4e-4  # per row of a validation
CHECKPOINT_SECONDS = 0.05
COLD_SECONDS = 9.0  # to compile kernels
STEPS = 900
MEASURED, SIZES = (11, 0.5, 0.1), {"validation_tokens": 100, "peak_bytes": 7}
OPTIONS = {"valid_tokens": 2000, "steps_for": lambda result: STEPS, "device": CPU}


@pytest.fixture(scope="module")
def sample():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("aeioulmnrst"), size=random.integers(2, 8))) for _ in range(400)]
    return tuple(" ".join(random.choice(words, size=random.integers(5, 40))) for _ in range(600))


@pytest.fixture(scope="module")
def tokenizer(sample):
    size = sum(map(len, sample))
    return count_tokens(CorpusSize(size, len(sample), sample, exact=True, sample_is_complete=True), 500).tokenizer


def make_run_config(objective, tokenizer):
    shape = {"vocabulary": tokenizer.vocabulary, "context": 32, "depth": 1, "width": 8, "heads": 1, "hidden": 8}
    masking = {} if objective == "causal" else {"fraction_start": 0.5, "fraction": 0.2}
    return make_config(
        {
            "model": shape | ({} if objective == "causal" else {"causal": False}),
            "task": {"name": objective, **masking},
            "train": {"batch": 16, "steps": STEPS, "valid_tokens": 2000},
        }
    )


def make_sampler(run_config, tokenizer, sample, folder):
    stores = probe.sample_stores(sample, tokenizer, folder, run_config, 2000)
    return BatchSampler(build_task(run_config, tokenizer), stores.train, length=32, batch=16, seed=0)


class SimulatedGPU:
    """Replaces the training loop and the clock: CUDA graphs, and the cold start of a process."""

    def __init__(self):
        self.now, self.is_warm, self.settings = 0.0, False, []

    def train(self, model, task, stores, settings, *, run, distributed, callbacks=()):
        self.settings.append(settings)
        sampler = BatchSampler(task, stores.train, length=32, batch=settings.batch, seed=settings.seed)
        kinds = shape_kinds(sampler, settings, "graphed", CPU, settings.steps)
        state, rows = TrainState(), min(settings.valid_tokens // 32, len(task.examples(stores.valid, length=32)))
        start, self.now = self.now, self.now + (0.0 if self.is_warm else COLD_SECONDS)
        milestones = Milestones(Budget(settings.steps, None), state)
        for step, kind in enumerate(kinds):
            self.now += STEP_SECONDS[kind] + (0.3 if step == 2 else 0.0)  # the optimizer is captured in the third step
            state.step, state.tokens = step + 1, state.tokens + 512
            emit(callbacks, "step", state)
            milestones.advance(state)
            if milestones.due(settings.validate_every, 10):
                paused = self.now
                self.now += ROW_SECONDS * rows + (0.0 if self.is_warm else 0.8)
                self.is_warm = True
                emit(callbacks, "valid", state)
                self.now += CHECKPOINT_SECONDS
                state.overhead_seconds += self.now - paused
        state.seconds = self.now - start
        return state


def emit(callbacks, kind, state):
    for callback in callbacks:
        callback(Event(kind, state, Budget(state.step, None), steps_per_epoch=1))


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedGPU()
    monkeypatch.setattr(probe, "train", gpu.train)
    monkeypatch.setattr(probe, "choose_execution_mode", lambda *_: "graphed")
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: gpu.now, process_time=lambda: gpu.now))
    return gpu


def whole_run(gpu, run_config, tokenizer, sample, folder):
    """The whole run on the simulated GPU."""
    stores = probe.sample_stores(sample, tokenizer, folder, run_config, 2000)
    task = build_task(run_config, tokenizer)
    model = build_model(run_config, task)
    return gpu.train(model, task, stores, run_config.train, run=None, distributed=None)


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_a_probe_predicts_the_whole_run(objective, gpu, tokenizer, sample, tmp_path):
    run_config = make_run_config(objective, tokenizer)
    costs = corrected_estimate(COSTS, measure(run_config, tokenizer, sample, **OPTIONS))
    run = whole_run(gpu, run_config, tokenizer, sample, tmp_path)
    assert costs.step_seconds == pytest.approx(STEP_SECONDS[REPLAYED])
    assert run_seconds(costs, STEPS, 2000) == pytest.approx(run.seconds, rel=0.03)
    assert STEPS * costs.step_tokens / (costs.startup_seconds + STEPS * costs.step_seconds) == pytest.approx(
        run.tokens / (run.seconds - run.overhead_seconds), rel=0.03
    )
    assert costs.cold_start_seconds == pytest.approx(COLD_SECONDS + 0.8, rel=0.01)
    if objective == "hybrid":  # control: the mean of 50 steps, nearly all with new shapes, is far off
        sampler = make_sampler(run_config, tokenizer, sample, tmp_path)
        kinds = shape_kinds(sampler, run_config.train, "graphed", CPU, 50)
        naive = np.mean([STEP_SECONDS[kind] for kind in kinds[probe.WARMUP_STEPS :]])
        assert naive > 2 * (run.seconds - run.overhead_seconds) / STEPS


def test_a_probe_uses_the_execution_mode_of_the_whole_run(gpu, monkeypatch, tokenizer, sample):
    run_config, budgets = make_run_config("causal", tokenizer), []

    def choose(model, task, settings, budget, *rest):
        budgets.append(budget.steps)
        return "both"

    monkeypatch.setattr(probe, "choose_execution_mode", choose)
    result = measure(run_config, tokenizer, sample, **OPTIONS)
    assert budgets == [STEPS]
    assert result.mode == "both" and {settings.compile for settings in gpu.settings} == {"both"}
    assert all(BY_SETTING[setting] == mode for mode, setting in probe.COMPILE_SETTING.items())
    assert {settings.log_every for settings in gpu.settings} == {STEPS // 50}  # each log line synchronizes the GPU


def test_held_out_text_is_long_enough_for_a_validation(tokenizer, sample, tmp_path):
    run_config = make_run_config("causal", tokenizer)
    small, large = (
        probe.sample_stores(sample, tokenizer, tmp_path, run_config, tokens).valid.tokens for tokens in (10, 8000)
    )
    assert small < 8000 <= large


def test_fast_steps_are_measured_more_often_than_slow_ones():
    assert probe_steps(0.005, 2500) == 600
    assert probe_steps(0.005, 80) == 80 and probe_steps(0.005, 8) == 50
    assert probe_steps(0.1, 2500) == 50 and probe_steps(4.0, 2500) == 22 and probe_steps(60.0, 2500) == 10


def test_shapes_beyond_the_graph_cache_stay_new(monkeypatch):
    monkeypatch.setattr(probe, "MAX_GRAPHS", 1)
    counts = Counter()
    assert [shape_kind(counts, shape) for shape in "abaabb"] == [NEW, NEW, CAPTURED, REPLAYED, NEW, NEW]


def test_new_shapes_count_as_often_as_in_the_whole_run():
    kinds = [NEW, CAPTURED, *[REPLAYED] * 3, NEW, REPLAYED, REPLAYED, CAPTURED, REPLAYED, REPLAYED]
    seconds = [1.0, 0.5, 0.1, 0.1, 0.1, 0.4, 0.2, 0.1, 0.6, 0.3, 0.1]
    result = ProbeResult(seconds, *MEASURED, kinds=kinds, expected_kinds={NEW: 10, CAPTURED: 5}, **SIZES)
    assert result.steady_seconds == pytest.approx(0.1)  # 0.2 and 0.3 follow a step of another kind
    assert result.startup_seconds == pytest.approx(1.3 + 10 * 0.3 + 5 * 0.5)
    assert replace(result, kinds=(), expected_kinds={}).steady_seconds == pytest.approx(1.7 / 6)


def test_run_length_and_number_of_new_shapes_agree():
    kinds = [*[REPLAYED] * 5, NEW, CAPTURED, REPLAYED, REPLAYED]
    result = ProbeResult([0.1] * 5 + [1.1, 1.1, 0.1, 0.1], *MEASURED, kinds=kinds, **SIZES)

    def predict_kinds(steps):  # one step in ten is new, and one captured
        return ([NEW, CAPTURED] + [REPLAYED] * 8) * (steps // 10)

    def steps_for(result):  # in a hundred seconds
        return int((100 - result.startup_seconds) / result.steady_seconds)

    agreed = with_expected_kinds(result, predict_kinds, steps_for)
    steps = steps_for(agreed)
    assert agreed.expected_kinds[NEW] == pytest.approx(steps / 10, rel=0.06) and steps < 400 < steps_for(result)
    assert steps == pytest.approx(100 / (0.1 + 2 * 0.1), rel=0.05)
    assert agreed.startup_seconds + steps * agreed.steady_seconds <= 100
