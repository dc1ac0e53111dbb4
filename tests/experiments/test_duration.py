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


def grid(stock, files, folder, *, labels=(8, 24), seeds=2, **settings):
    given = {"train": str(files["train"]), "valid": str(files["valid"]), "test": str(files["test"])}
    plan = make_plan(None, given | {"labels": labels, "seeds": seeds}, SETTINGS | settings)
    ground = make_context(plan, folder, DistributedContext(torch.device("cpu")))
    arms = make_arms([stock], plan.compare.arms, plan.arms)
    return ground, arms, grid_points(plan.compare, ground, arms)


def test_the_estimate_counts_steps_and_rows(stock, files, tmp_path):
    """Batches of 8 rows; validation rows after each epoch; test rows once."""
    ground, arms, _ = grid(stock, files, tmp_path)
    run = str(next(arm.run for arm in arms if arm.run))

    def seconds(pace, wanted, labels, **settings):
        there, _, places = grid(stock, files, tmp_path, labels=(labels,), seeds=1, epochs=2, least_steps=0, **settings)
        return grid_seconds(there, [p for p in places if p.arm.name == wanted], {run: pace, "None": pace})

    assert seconds(Throughput(step=1.0), "scratch", 24) == 2 * 3
    assert seconds(Throughput(step=1.0), "pretrained", 48) == 2 * 6
    assert seconds(Throughput(step=1.0), "frozen", 24) == pytest.approx(0.0, abs=0.1)
    explained = 100  # rows: the cost of error analysis
    assert seconds(Throughput(row=1.0), "scratch", 24) == 2 * 20 + explained
    assert seconds(Throughput(row=1.0), "frozen", 24) == pytest.approx(24 + 20 + explained, abs=0.1)
    assert seconds(Throughput(output=1.0), "pretrained", 24) == 40
    assert seconds(Throughput(text=1.0), "tfidf", 8) == 8 + 8 + 40
    half = replace(ground, eval_records=ground.eval_records.select(range(20)))
    _, _, places = grid(stock, files, tmp_path)
    paces = {run: Throughput(output=1.0), "None": Throughput(text=1.0)}
    assert grid_seconds(half, places, paces) == pytest.approx(grid_seconds(ground, places, paces) - 16 * 20)


def test_more_labels_seeds_and_slower_steps_take_longer(stock, files, tmp_path):
    def seconds(pace=1.0, **size):
        ground, arms, places = grid(stock, files, tmp_path, **size)
        return grid_seconds(ground, places, {str(arm.run): Throughput(pace, pace, pace, pace, pace) for arm in arms})

    assert seconds(seeds=4) == pytest.approx(2 * seconds(seeds=2), rel=0.5)
    assert seconds(labels=(8, 48)) > seconds(labels=(8, 24)) > seconds(labels=(8,))
    assert seconds(pace=3.0) == pytest.approx(3 * seconds(), rel=0.1)


def test_the_estimate_is_logged_before_the_first_trial_and_not_for_cached_trials(stock, files, tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    given = {"train": files["train"], "valid": files["valid"], "test": files["test"], "out": tmp_path / "out"}
    given |= SMALL | {"arms": ["frozen", "tfidf"]}
    compare(stock, **given)
    said = caplog.messages
    told = [place for place, line in enumerate(said) if "of this machine" in line]
    cells = [place for place, line in enumerate(said) if re.match(r" *\d+/4 ", line)]
    assert len(told) == 1 and told[0] < cells[0] and said[told[0]].startswith("4 trials")
    caplog.clear()
    compare(stock, **given)
    assert not [line for line in caplog.messages if "of this machine" in line]


def test_timing_leaves_no_files(stock, files, tmp_path):
    ground, arms, _ = grid(stock, files, tmp_path)
    for arm in arms:
        pace = measure_throughput(ground, arm)
        assert (pace.text > 0 and pace.fitting > 0) if arm.run is None else (pace.step > 0 and pace.row > 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("seconds", "unit"), [(20, "seconds"), (300, "minutes"), (20_000, "hours")])
def test_durations_are_formatted_as_ranges(seconds, unit):
    low, high = map(float, re.fullmatch(rf"about (\S+) to (\S+) {unit}", format_duration_range(seconds)).groups())
    scale = {"seconds": 1, "minutes": 60, "hours": 3600}[unit]
    assert low * scale == pytest.approx(LOW * seconds, rel=0.1)
    assert high * scale == pytest.approx(HIGH * seconds, rel=0.1)
