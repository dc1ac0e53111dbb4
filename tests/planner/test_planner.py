"""Plans follow the rules, respect time and memory, can be run as they are, and are corrected by measurements."""

import gzip
import json
import os
import tomllib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headstock
from headstock.config import flatten_tables
from headstock.cost.model import model_cost, model_dimensions
from headstock.cost.training_cost import optimizer_flops
from headstock.data.corpus import read_corpus
from headstock.errors import UserError
from headstock.experiments.recipe import to_toml
from headstock.planner import corpus_size, forecast, probe
from headstock.planner import planner as planner_module
from headstock.planner.corpus_size import compression_ratio, count_tokens, measure_corpus
from headstock.planner.forecast import (
    CostEstimate,
    affordable_steps,
    estimate_costs,
    fit_micro_batch,
    fits_in_memory,
    run_seconds,
)
from headstock.planner.machine import Machine, busy_warning, measure_machine
from headstock.planner.model_size import with_planned_size
from headstock.planner.planner import Planner, plan
from headstock.planner.probe import ProbeResult, corrected_estimate
from headstock.planner.summary import plan_notes, plan_reason
from headstock.train.execution import LAUNCH_SECONDS
from headstock.train.models import blueprint
from headstock.train.optimizers import make_optimizers
from headstock.train.settings import make_config

SPEEDS = {"launch_seconds": 5e-6, "baseline_bytes": 300 << 20}
LAPTOP = Machine("cpu", "a laptop", False, matmul_flops=1e11, memory_bandwidth=1e10, free_bytes=8 << 30, **SPEEDS)
GPU = Machine("cuda", "a GPU", True, matmul_flops=7e14, memory_bandwidth=4e12, free_bytes=80 << 30, **SPEEDS)
COSTS = CostEstimate(
    parameters=1000,
    non_embedding_parameters=800,
    flops_per_token=6000.0,
    step_tokens=2048,
    step_seconds=0.1,
    validation_seconds_per_token=1e-5,
    checkpoint_seconds=0.2,
    peak_bytes=1 << 20,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of a little over 100 kB."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("aeioulmnrst"), size=random.integers(2, 8))) for _ in range(800)]
    lines = [" ".join(random.choice(words, size=random.integers(5, 60))) for _ in range(700)]
    path = tmp_path_factory.mktemp("plan") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def size(text):
    return measure_corpus(read_corpus(text))


@pytest.fixture(scope="module", autouse=True)
def counted_once():
    """A tokenizer is trained once for each vocabulary, however much text the sample stands for."""

    count = cache(count_tokens)

    def count_once(corpus, vocabulary):
        return count(replace(corpus, bytes=0, documents=0), vocabulary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "count_tokens", count_once)
        yield


def make_planner(size, *, minutes=None, objective=None):
    return Planner(size, {"corpus": ["text.txt"]}, minutes, objective, None)


def make_plan(size, machine, **options):
    planner = make_planner(size, **options)
    return planner.plan(*planner.choose(machine), machine)


def enlarged(size, factor):
    """The corpus, as if there were `factor` times as much of it."""
    return replace(size, bytes=factor * size.bytes, documents=factor * size.documents, sample_is_complete=False)


def test_a_small_corpus_is_read_completely(text, size):
    assert size.exact and size.sample_is_complete
    assert size.bytes == sum(len(line.encode()) for line in text.read_text().splitlines())
    assert size.documents == 700


def test_a_large_corpus_is_sampled(text, size, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_size, "READ_ALL_BYTES", 10_000)
    monkeypatch.setattr(corpus_size, "SAMPLE_CHARACTERS", 20_000)
    for error, path in ((1.02, text), (1.3, tmp_path / "text.txt.gz")):
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.read_bytes()))
        estimate = measure_corpus(read_corpus(path))
        assert not estimate.exact and not estimate.sample_is_complete and len(estimate.sample) < 400
        assert size.bytes / error < estimate.bytes < error * size.bytes
    assert compression_ratio("", b"text") == 1.0


def test_token_counts_match_the_run(text, size, tmp_path):
    counts = count_tokens(size, 600)
    settings = {"depth": 1, "width": 8, "heads": 1, "hidden": 8, "context": 32, "steps": 1, "tensorboard": False}
    headstock.pretrain(text, out=tmp_path / "run", settings=settings | {"vocabulary": 600, "deduplicate": False})
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    tokens = data["train_tokens"] + data["valid_tokens"]
    assert size.bytes / counts.bytes_per_token == pytest.approx(tokens, rel=0.01)


def test_more_time_gives_a_larger_model_and_more_tokens(size):
    much = enlarged(size, 3000)
    plans = [make_plan(much, LAPTOP, minutes=minutes, objective="causal") for minutes in (1, 20, 400)]
    assert [p.costs.parameters for p in plans] == sorted({p.costs.parameters for p in plans})
    assert [p.tokens for p in plans] == sorted({p.tokens for p in plans})
    for proposal, minutes in zip(plans, (1, 20, 400), strict=True):
        assert proposal.seconds <= 60 * minutes * 1.001
        assert proposal.tokens >= 6 * proposal.costs.non_embedding_parameters or proposal.candidate.label == "2 x 64"


def test_a_faster_machine_trains_a_larger_model_in_the_same_time(size):
    much = enlarged(size, 3000)
    laptop, gpu = (make_plan(much, machine, minutes=5, objective="masked") for machine in (LAPTOP, GPU))
    assert gpu.costs.parameters > 4 * laptop.costs.parameters


def test_without_minutes_the_amount_of_text_decides(size):
    small, large = (make_plan(enlarged(size, times), LAPTOP) for times in (10, 1000))
    assert small.candidate.objective == large.candidate.objective == "hybrid"
    assert small.costs.parameters < large.costs.parameters
    assert small.epochs == pytest.approx(10, rel=0.05)


def test_large_text_is_planned_causal_and_small_text_hybrid(size):
    assert make_plan(enlarged(size, 3000), LAPTOP, minutes=2).candidate.objective == "causal"
    assert make_plan(size, LAPTOP, minutes=60).candidate.objective == "hybrid"


def test_epochs_are_limited(size):
    proposal = make_plan(size, GPU, minutes=60, objective="causal")
    assert proposal.epochs <= 4.5 and proposal.seconds < 60 * 60
    assert proposal.config["model"]["dropout"] > 0


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid", "both-ways", "denoise"])
def test_every_objective_can_be_planned(size, objective):
    proposal = make_plan(size, LAPTOP, minutes=1, objective=objective)
    facts = proposal.to_dict()
    assert facts["config"]["task"]["name"] == objective
    assert facts["parameters"] > 0 and facts["seconds"] > 0 and facts["peak_bytes"] > 0 and facts["flops"] > 0


def test_little_memory_gives_micro_batches_or_a_smaller_model(size):
    much = enlarged(size, 3000)
    roomy = make_plan(much, GPU, minutes=300, objective="causal")
    tight = make_plan(much, replace(GPU, free_bytes=2 << 30), minutes=300, objective="causal")
    assert tight.costs.peak_bytes < 2 << 30 < roomy.costs.peak_bytes
    assert tight.costs.parameters < roomy.costs.parameters or tight.config["train"].get("micro_batch")


def test_micro_batches_are_halved_until_they_fit(size):
    planner = make_planner(enlarged(size, 3000), minutes=60, objective="causal")
    candidate, counts = planner.choose(GPU)
    run_config = planner.build(candidate.sections | {"train": candidate.sections["train"] | {"batch": 512}}, counts)
    room = replace(GPU, free_bytes=int(estimate_costs(run_config, GPU).peak_bytes / 4))
    smaller = fit_micro_batch(run_config, room)
    assert fits_in_memory(smaller, room) and not fits_in_memory(run_config, room)
    assert smaller.train.micro_batch is not None and 512 % smaller.train.micro_batch == 0
    assert smaller.train.batch == 512


def test_optimizer_flops_match_the_flop_counter(size):
    run_config = make_planner(size).build(make_plan(size, LAPTOP, minutes=1).config, count_tokens(size, 500))
    model, task = blueprint(run_config, weights=True)
    muon = make_optimizers(model, run_config.train)[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    cost = model_cost(model, task, model_dimensions(model, length=64))
    assert optimizer_flops(cost.weights(), "muon") == counter.get_total_flops()
    assert optimizer_flops(cost.weights(), "adamw") == 0


def test_parameter_counts_match_the_model(size):
    proposal = make_plan(size, LAPTOP, minutes=1, objective="masked")
    vocabulary = proposal.config["tokenizer"]["vocabulary"]
    run_config = make_planner(size).build(proposal.config, count_tokens(size, vocabulary))
    model, _ = blueprint(run_config)
    assert proposal.costs.parameters == model.parameter_counts()["total"]
    assert proposal.costs.non_embedding_parameters < proposal.costs.parameters


def test_run_time_is_steps_validations_and_checkpoints():
    assert run_seconds(COSTS, 1000, 20_000) == pytest.approx(1000 * 0.1 + 10 * (20_000 * 1e-5 + 0.2))
    assert run_seconds(COSTS, 3, 20_000) == pytest.approx(3 * 0.1 + 3 * (0.2 + 0.2))  # no more validations than steps
    steps = affordable_steps(COSTS, 60, 20_000)
    assert run_seconds(COSTS, steps, 20_000) <= 60 < run_seconds(COSTS, steps + 1, 20_000)


def test_measurements_replace_the_forecast():
    result = ProbeResult(
        step_seconds=[1.0, *[0.2] * 4, *[0.4] * 5],
        tokens=20_000,
        validation_seconds=0.5,
        validation_tokens=10_000,
        checkpoint_seconds=0.1,
        peak_bytes=7,
    )
    costs = corrected_estimate(COSTS, result)
    assert costs.step_seconds == pytest.approx(0.4) and costs.step_tokens == 2000
    assert costs.tokens_per_second == pytest.approx(5000)
    assert costs.startup_seconds == pytest.approx(0.0)  # five warm-up steps took 1.8 s, five steady ones take 2 s
    assert costs.validation_seconds_per_token == pytest.approx(5e-5)
    assert costs.peak_bytes == 7 and costs.checkpoint_seconds == 0.1 and costs.probed
    slow = corrected_estimate(COSTS, replace(result, step_seconds=[9.0, *[0.4] * 9]))
    assert slow.startup_seconds == pytest.approx(8.6)


def test_small_steps_on_a_gpu_are_bound_by_launch_overhead(size):
    proposal = make_plan(size, GPU, minutes=1, objective="hybrid")
    vocabulary = proposal.config["tokenizer"]["vocabulary"]
    run_config = make_planner(size).build(proposal.config, count_tokens(size, vocabulary))
    graphed = estimate_costs(run_config, GPU)
    assert graphed.step_seconds >= forecast.GRAPHED_LAUNCH_SHARE * LAUNCH_SECONDS * run_config.model.depth
    assert graphed.startup_seconds >= 250 * LAUNCH_SECONDS * run_config.model.depth  # each new shape runs eagerly first
    eager = estimate_costs(replace(run_config, train=replace(run_config.train, compile=False)), GPU)
    assert eager.step_seconds >= LAUNCH_SECONDS * run_config.model.depth and eager.startup_seconds == 0
    assert estimate_costs(run_config, LAPTOP).startup_seconds == 0


def test_the_run_uses_the_execution_mode_of_the_probe(size):
    planner = make_planner(size, minutes=1, objective="causal")
    for machine, mode, setting in ((GPU, "graphed", "replay"), (GPU, "eager", False), (LAPTOP, "eager", None)):
        candidate, counts = planner.choose(machine)
        measured = replace(COSTS, mode=mode, probed=True)
        assert planner.plan(candidate, counts, machine, measured).config["train"].get("compile") is setting


def test_time_and_speed_are_defined_as_in_a_run(size):
    planner = make_planner(size, minutes=1, objective="causal")
    costs = replace(COSTS, step_seconds=0.01, startup_seconds=2.0, cold_start_seconds=30.0, probed=True)
    proposal = planner.plan(*planner.choose(GPU), GPU, costs)
    paused = 10 * (proposal.valid_tokens * costs.validation_seconds_per_token + costs.checkpoint_seconds)
    assert proposal.tokens_per_second == pytest.approx(proposal.tokens / (proposal.seconds - paused))
    assert proposal.tokens_per_second < costs.tokens_per_second
    assert any("new process" in line and "30 s" in line for line in plan_notes(proposal))
    late = planner.plan(*planner.choose(GPU), GPU, replace(costs, startup_seconds=70.0, cold_start_seconds=0.0))
    assert late.seconds > 70 and any("more than 1 minute:" in line for line in plan_notes(late))
    assert not any("new process" in line for line in plan_notes(late))


def test_a_run_in_minutes_is_announced_as_one_that_follows_the_clock(size):
    """The plan stops after the epochs that pay off; `pretrain --minutes` uses all of its time."""
    proposal = make_plan(size, LAPTOP, minutes=600, objective="causal")
    steps = affordable_steps(proposal.costs, 600 * 60, proposal.valid_tokens)
    assert steps > 2 * proposal.steps
    assert f"stops after 600 minutes, however many steps that gives: about {steps:,} steps" in plan_reason(proposal)
    assert f"{proposal.steps:,} steps" not in plan_reason(proposal)
    assert "for 1 minute:" in plan_reason(make_plan(size, LAPTOP, minutes=1))


def test_hybrid_validation_reads_held_out_text_twice(size):
    plans = {o: make_plan(size, LAPTOP, minutes=60, objective=o) for o in ("causal", "hybrid")}
    held_out = {o: p.candidate.text.tokens * 0.05 / 0.95 for o, p in plans.items()}
    assert plans["causal"].config["train"]["valid_tokens"] > held_out["causal"]  # all of it is read
    assert plans["causal"].valid_tokens == pytest.approx(held_out["causal"])
    assert plans["hybrid"].valid_tokens == pytest.approx(
        min(2 * held_out["hybrid"], plans["hybrid"].config["train"]["valid_tokens"])
    )
    assert plans["hybrid"].valid_tokens > held_out["hybrid"]


def test_a_machine_is_measured():
    machine = measure_machine(torch.device("cpu"))
    assert machine.matmul_flops > 1e8 and machine.memory_bandwidth > 1e7 and 0 < machine.launch_seconds < 0.1
    assert machine.free_bytes > 1 << 20 and machine.baseline_bytes > 1 << 20


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="there is no load average here")
def test_a_busy_machine_is_named(monkeypatch, text, caplog):
    cores = os.cpu_count()
    for load, is_busy in ((cores, False), (cores + 1.5, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        caplog.clear()
        plan(text, minutes=1, device="cpu", objective="causal")
        assert [f"load average {load:.1f}" in record.message for record in caplog.records] == [True] * is_busy
    assert busy_warning(torch.device("cuda"), effect="") is None


@pytest.mark.skipif(not hasattr(os, "getloadavg"), reason="there is no load average here")
@pytest.mark.parametrize(
    ("settings", "named", "is_warned"),
    [
        ({"train.minutes": 1}, True, True),
        ({"train.minutes": 1, "model.depth": 2}, False, True),
        ({"train.steps": 10}, True, False),
    ],
)
def test_a_busy_machine_is_named_where_the_size_is_not_planned(
    monkeypatch, text, tmp_path, caplog, settings, named, is_warned
):
    monkeypatch.setattr(os, "getloadavg", lambda: (os.cpu_count() + 1.5, 0.0, 0.0))
    planned = with_planned_size(settings, [str(text)], out=tmp_path / "run", named=named, device="cpu")
    assert planned == settings
    assert ["with fewer steps than when idle" in record.message for record in caplog.records] == [True] * is_warned


def test_a_recipe_round_trips():
    sections = {"data": {"corpus": ['a "b".txt', "é"]}, "model": {"bias": False, "lr": 4e-3, "depth": 2, "no": None}}
    assert tomllib.loads(to_toml(sections, "A heading\nof two lines")) == {
        "data": {"corpus": ['a "b".txt', "é"]},
        "model": {"bias": False, "lr": 4e-3, "depth": 2},
    }


def test_a_probed_plan_predicts_its_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(planner_module, "MAX_PROBES", 1)
    monkeypatch.setattr(probe, "STEPS", 12)
    monkeypatch.setattr(probe, "TARGET_SECONDS", 0.0)
    proposal = plan(text, device="cpu", minutes=0.02, probe=True)
    facts = proposal.to_dict()
    assert facts["probed"] and proposal.costs.probed and facts["tokens_per_second"] > 0
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(proposal.config))
    results = headstock.pretrain(out=tmp_path / "run", config_file=path, device="cpu", settings={"tensorboard": False})
    assert results["parameters"]["total"] == facts["parameters"]
    assert results["steps"] == facts["steps"]
    assert results["tokens"] == pytest.approx(facts["tokens"], rel=0.05)
    assert facts["peak_bytes"] == pytest.approx(results["peak_bytes"], rel=0.2)


def test_wrong_options_are_named(text):
    for options, words in (
        ({"minutes": -1}, "minutes"),
        ({"objective": "caused"}, "objective"),
        ({"device": "tpu"}, "device"),
    ):
        with pytest.raises(UserError, match=words):
            plan(text, **options)
    with pytest.raises(UserError, match="no text"):
        plan([])


def test_flattened_tables_are_option_names():
    assert flatten_tables({"model": {"depth": 4}, "train": {"lr": 0.1}}) == {"model.depth": 4, "train.lr": 0.1}


def test_costs_scale_with_the_slowdown():
    run_config = make_config({"model": {"vocabulary": 300, "depth": 2, "width": 32, "heads": 2}, "train": {"batch": 8}})
    costs = forecast.estimate_costs(run_config, LAPTOP)
    slower = forecast.estimate_costs(run_config, replace(LAPTOP, slowdown=3.0))
    assert costs.step_seconds > 0 and slower.step_seconds == pytest.approx(3 * costs.step_seconds)
