"""The duration of a comparison is estimated from a few timed steps."""

import re
from dataclasses import replace

import pytest
import torch

from headstock.experiments.compare import compare, grid_points, make_context
from headstock.experiments.compare_settings import make_arms, make_plan
from headstock.experiments.duration import (
    HIGH,
    LOW,
    Throughput,
    format_duration_range,
    grid_seconds,
    measure_throughput,
)
from headstock.train.distributed import DistributedContext
from tests.experiments.small import SETTINGS, SMALL


def grid(stock, files, folder, *, labels=(8, 24), seeds=2, arms=(), **settings):
    options = {name: str(path) for name, path in files.items()} | {"labels": labels, "seeds": seeds, "arms": arms}
    plan = make_plan(None, options, SETTINGS | settings)
    context = make_context(plan, folder, DistributedContext(torch.device("cpu")))
    arms = make_arms([stock], plan.compare.arms, plan.arms)
    return context, arms, grid_points(plan.compare, context, arms)


def test_the_estimate_counts_steps_and_rows(stock, files, tmp_path):
    """Batches of 8 rows; validation rows after each epoch; test rows once."""
    full, arms, points = grid(stock, files, tmp_path)
    run = str(next(arm.run for arm in arms if arm.run))

    def seconds(speed, arm, labels, **options):
        context, _, points = grid(stock, files, tmp_path, labels=(labels,), seeds=1, epochs=2, least_steps=0, **options)
        return grid_seconds(context, [p for p in points if p.arm.name == arm], {run: speed, "None": speed})

    assert seconds(Throughput(step=1.0), "scratch", 24) == 2 * 3
    assert seconds(Throughput(step=1.0), "pretrained", 48) == 2 * 6
    assert seconds(Throughput(step=1.0), "pretrained", 48, arms=("pretrained",), soup=3) == 3 * 2 * 6
    assert seconds(Throughput(output=1.0), "pretrained", 48, arms=("pretrained",), soup=3) == 40
    assert seconds(Throughput(step=1.0), "frozen", 24) == pytest.approx(0.0, abs=0.1)
    analysis = 100  # rows: the cost of error analysis
    assert seconds(Throughput(row=1.0), "scratch", 24) == 2 * 20 + analysis
    assert seconds(Throughput(row=1.0), "frozen", 24) == pytest.approx(24 + 20 + analysis, abs=0.1)
    assert seconds(Throughput(output=1.0), "pretrained", 24) == 40
    assert seconds(Throughput(text=1.0), "tfidf", 8) == 8 + 8 + 40
    half = replace(full, eval_records=full.eval_records.select(range(20)))
    speeds = {run: Throughput(output=1.0), "None": Throughput(text=1.0)}
    assert grid_seconds(half, points, speeds) == pytest.approx(grid_seconds(full, points, speeds) - 16 * 20)


def test_more_labels_seeds_and_slower_steps_take_longer(stock, files, tmp_path):
    def seconds(each=1.0, **size):
        context, arms, points = grid(stock, files, tmp_path, **size)
        return grid_seconds(context, points, {str(arm.run): Throughput(*[each] * 5) for arm in arms})

    assert seconds(seeds=4) == pytest.approx(2 * seconds(seeds=2), rel=0.5)
    assert seconds(labels=(8, 48)) > seconds(labels=(8, 24)) > seconds(labels=(8,))
    assert seconds(each=3.0) == pytest.approx(3 * seconds(), rel=0.1)


def test_the_estimate_is_logged_before_the_first_trial_and_not_for_cached_trials(stock, files, tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    options = {**files, "out": tmp_path / "out", **SMALL, "arms": ["frozen", "tfidf"]}
    compare(stock, **options)
    messages = caplog.messages
    (estimate,) = [index for index, line in enumerate(messages) if "of this machine" in line]
    trials = [index for index, line in enumerate(messages) if re.match(r" *\d+/4 ", line)]
    assert estimate < trials[0] and messages[estimate].startswith("4 trials")
    caplog.clear()
    compare(stock, **options)
    assert not [line for line in caplog.messages if "of this machine" in line]


def test_timing_leaves_no_files(stock, files, tmp_path):
    context, arms, _ = grid(stock, files, tmp_path)
    for arm in arms:
        speed = measure_throughput(context, arm)
        assert (speed.text > 0 and speed.fitting > 0) if arm.run is None else (speed.step > 0 and speed.row > 0)
    assert not list(tmp_path.iterdir())


def test_an_arm_with_its_own_rank_is_timed(stock, files, tmp_path):
    context, _, _ = grid(stock, files, tmp_path)
    for name in ("lora", "transfer.lora"):
        (arm,) = make_arms([stock], ["small"], {"small": {"kind": "lora", name: 4, "lr": 0.01}})
        assert measure_throughput(context, arm).step > 0


@pytest.mark.parametrize(("seconds", "unit"), [(20, "seconds"), (300, "minutes"), (20_000, "hours")])
def test_durations_are_formatted_as_ranges(seconds, unit):
    low, high = map(float, re.fullmatch(rf"about (\S+) to (\S+) {unit}", format_duration_range(seconds)).groups())
    scale = {"seconds": 1, "minutes": 60, "hours": 3600}[unit]
    assert low * scale == pytest.approx(LOW * seconds, rel=0.1)
    assert high * scale == pytest.approx(HIGH * seconds, rel=0.1)
