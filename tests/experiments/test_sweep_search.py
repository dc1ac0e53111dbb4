"""TPE and ASHA: better points, or fewer steps, than random search, and the same proposals after an interruption."""

import json
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from scipy import stats

from headstock.errors import ConfigError, UserError
from headstock.experiments.sweep import sweep
from headstock.experiments.sweep_search import rung_validations, setting_importances, successive_halving, tpe_search
from headstock.experiments.sweep_settings import Range, SweepSettings, draw_points
from headstock.report.pages import write_report
from headstock.report.sweep_points import canonical
from tests.commands import command, set_options
from tests.conftest import TINY
from tests.experiments.process_patches import stop_sweep
from tests.experiments.small import (
    SETTINGS,
    fail_if_trained,
    make_rows,
    modification_times,
    without_timings,
    write_rows,
)

BASE = TINY | {"steps": 6, "depth": 1, "checkpoint_every": 2, "validate_every": 1}
BOWL = {"lr": Range(1e-5, 1e-1), "dropout": Range(0.0, 0.5), "depth": Range(1, 8), "norm": ["pre", "post"]}


def bowl(point) -> float:
    """Lowest at lr=1e-3, dropout=0.1, depth=4, norm=pre."""
    lr, dropout = np.log10(point["lr"]) + 3, 10 * (point["dropout"] - 0.1)
    return lr**2 + 0.3 * dropout**2 + 0.1 * (point["depth"] - 4) ** 2 + (point["norm"] == "post")


# TPE

tpe = pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna")


@tpe
def test_tpe_finds_better_points_than_random_search():
    """The best of 24 points, paired over 12 seeds. Told the opposite of the truth, TPE must lose."""
    grid = {key: BOWL[key] for key in ("lr", "dropout", "norm")}

    def loss(point):
        return bowl(point | {"depth": 4})

    def best_by_tpe(seed, sign):
        points = tpe_search(grid, sample=24, seed=seed, evaluate=lambda new: [sign * loss(point) for point in new])
        assert len({canonical(point) for point in points}) == len(points) == 24
        return min(map(loss, points))

    random = [min(map(loss, draw_points(grid, sample=24, seed=seed))) for seed in range(12)]
    tpe = [best_by_tpe(seed, 1) for seed in range(12)]
    assert stats.wilcoxon(tpe, random, alternative="less").pvalue < 0.01
    assert np.median(tpe) < 0.5 * np.median(random)
    misled = [best_by_tpe(seed, -1) for seed in range(8)]
    assert np.median(misled) > np.median(random)


@tpe
def test_proposals_depend_on_the_seed_and_the_results_alone():
    evaluations = []

    def evaluate(points):
        evaluations.append(points)
        return [None if point["depth"] == 8 else bowl(point) for point in points]

    first, again, other = (tpe_search(BOWL, sample=12, seed=seed, evaluate=evaluate) for seed in (0, 0, 1))
    assert first == again != other
    assert [len(points) for points in evaluations[:9]] == [4, 1, 1, 1, 1, 1, 1, 1, 1]
    assert all(BOWL["lr"].low <= point["lr"] <= BOWL["lr"].high and type(point["depth"]) is int for point in first)


@tpe
def test_a_small_space_is_searched_without_repeats():
    few = tpe_search({"a": [1, 2], "b": [[3], [4]]}, sample=4, seed=0, evaluate=lambda points: [1.0] * len(points))
    assert len({canonical(point) for point in few}) == len(few) >= 3
    valid = tpe_search(
        BOWL, sample=8, seed=0, evaluate=lambda p: list(map(bowl, p)), is_valid=lambda p: p["norm"] == "pre"
    )
    assert len(valid) == 8 and all(point["norm"] == "pre" for point in valid)
    with pytest.raises(UserError, match="only 4 points"):
        tpe_search({"a": [1, 2], "b": [3, 4]}, sample=5, seed=0, evaluate=lambda points: [1.0] * len(points))


@tpe
def test_importance_finds_the_setting_that_matters():
    points = draw_points(BOWL, sample=40, seed=0)
    shares = setting_importances(BOWL, points, [np.log10(point["lr"]) for point in points])
    assert next(iter(shares)) == "lr" and shares["lr"] > 0.8
    assert setting_importances(BOWL, points[:3], [1.0, 2.0, 3.0]) is None


# ASHA


def halving_of(curves, reduction=3):
    """The points that reach the end, and the validations of each point."""
    used = [0] * len(curves)

    def evaluate(numbers, validations):
        for number in numbers:
            used[number] = max(used[number], validations)
        return [curves[number][validations - 1] for number in numbers]

    survivors = successive_halving(len(curves), reduction=reduction, evaluate=evaluate)
    return survivors, [len(curves[0]) if number in survivors else count for number, count in enumerate(used)]


def test_asha_finds_the_best_of_random_search_with_fewer_steps():
    random, shares, found, misled = np.random.default_rng(0), [], [], []
    for seed in range(20):
        final = np.array([bowl(point) for point in draw_points(BOWL, sample=27, seed=seed)])
        curves = final[:, None] + 3 / np.arange(1, 11) + random.normal(scale=0.05, size=(27, 10))
        survivors, used = halving_of(curves)
        assert len(survivors) == 3
        shares.append(sum(used) / (27 * 10))
        found.append(final.argmin() in survivors)
        misled.append(final.argmin() in halving_of(-curves)[0])
    assert np.mean(found) >= 0.9 and np.mean(shares) < 0.3
    assert np.mean(misled) < 0.1  # control: early losses that mislead


def test_rungs_and_survivors():
    assert [rung_validations(reduction) for reduction in (2, 3, 4, 6)] == [[1, 2, 4], [1, 3], [1, 4], [1]]
    seen = []
    for count, reduction, expected in ((12, 3, [12, 4]), (3, 3, [3, 2]), (16, 2, [16, 8, 4]), (1, 3, [1, 1])):
        seen.clear()

        def evaluate(numbers, validations):
            seen.append(len(numbers))
            return [-number for number in numbers]

        survivors = successive_halving(count, reduction=reduction, evaluate=evaluate)
        assert seen == expected and survivors[-1] == count - 1  # the last has the lowest loss
    assert successive_halving(3, reduction=3, evaluate=lambda some, _: [None] * len(some)) == []  # all failed


# Sweeps


@pytest.fixture(scope="module", params=[pytest.param("tpe", marks=tpe), "asha"])
def searched(request, corpus, tmp_path_factory):
    """A sweep with each method and its folder."""
    out = tmp_path_factory.mktemp("search") / request.param
    options = {"grid": {"lr": "1e-4..3e-1"}, "sample": 5, "seeds": 1, "method": request.param, "settings": BASE}
    return sweep(corpus, out=out, **options), out, options


def test_a_search_resumes_after_a_kill(searched, corpus, tmp_path):
    results, _, options = searched
    out, method = tmp_path / "out", options["method"]
    words = [*set_options(BASE), "--grid=lr=1e-4..3e-1", "--sample=5", "--seeds=1", f"--method={method}"]
    # with asha the seventh is the second of two that go on to the next rung
    patch = partial(stop_sweep, kill=True, **({"trial": 3} if method == "tpe" else {"trial": 7, "step": 3}))
    exit_code, _, err = command("sweep", corpus, *words, f"--out={out}", "--quiet", patch=patch)
    assert exit_code < 0, err
    before, steps = modification_times(out / "cells"), []
    again = sweep(corpus, out=out, **options, callbacks=[lambda event: steps.append(event.state.step)])
    after = modification_times(out / "cells")
    assert sum(after[name] == stamp for name, stamp in before.items()) == (2 if method == "tpe" else 3)
    assert steps[0] > 1  # the trial was resumed, not restarted
    assert without_timings(again)["points"] == without_timings(results)["points"]
    assert again["pruning"] == results["pruning"]
    once_more = sweep(corpus, out=out, **options, callbacks=[fail_if_trained])
    assert without_timings(once_more)["points"] == without_timings(again)["points"]


def test_pruned_points_save_steps_and_rank_last(searched, corpus):
    results, out, options = searched
    page = write_report(out).read_text(encoding="utf-8")
    assert results["points_are"] in page and results["method"] == options["method"]
    if options["method"] == "tpe":
        assert results["pruning"] is None and all(row["mean"] is not None for row in results["points"])
        return
    pruning, rows = results["pruning"], results["points"]
    assert pruning["points"] == 3 and len(rows) == 5
    assert pruning["steps"] == 3 * 1 + 2 * BASE["steps"] < pruning["full_steps"] == 5 * BASE["steps"]
    assert [row["pruned"] is not None for row in rows] == [False, False, True, True, True]
    assert all(row["pruned"]["step"] == 1 for row in rows[2:])
    assert len(list((out / "runs").iterdir())) == 1 and not any((out / "runs").glob("*/checkpoints"))
    assert "pruned at step 1" in page and any("ASHA pruned" in note for note in results["notes"])
    steps = []
    random = options | {"method": "random", "callbacks": [lambda event: steps.append(event.state.step)]}
    full = sweep(corpus, out=out, **random)  # completes what was pruned
    assert steps and all(row["pruned"] is None for row in full["points"])
    complete = {canonical(row["settings"]): row["mean"] for row in full["points"]}
    assert len(complete) == 5
    assert all(row["mean"] == complete[canonical(row["settings"])] for row in rows[:2])


def test_fine_tuning_is_pruned_by_validation_loss(stock, tmp_path):
    train, valid = (write_rows(tmp_path / f"{name}.csv", make_rows(16, name=name)) for name in ("train", "valid"))
    files = {"run": stock, "train": train, "valid": valid, "out": tmp_path / "out"}
    settings = SETTINGS | {"epochs": 2, "least_steps": 0, "length": 16}
    grid = {"lr": [1e-4, 0.3, 3e-4]}
    results = sweep(**files, grid=grid, sample=3, method="asha", seeds=2, settings=settings)
    first, second, last = results["points"]
    assert results["metric"] == "accuracy" and last["pruned"]["step"] == 2 and last["settings"] == {"lr": 0.3}
    assert (first["seeds"], second["seeds"], last["seeds"]) == (2, 2, 1)
    # two steps an epoch: one epoch of three points, then two epochs of two points with two seeds
    assert results["pruning"]["steps"] == 3 * 2 + 2 * 2 * 4


def test_the_method_and_its_options_are_checked(corpus, tmp_path, call):
    for wrong, message in (
        ({"method": "tpe"}, "--sample"),
        ({"method": "grid", "sample": 3}, "conflicts"),
        ({"reduction": 1}, "2 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            SweepSettings(**wrong)
    options = ["sweep", corpus, "--grid", "lr=1e-3..1e-2", "--sample", "3", "--out", tmp_path / "out"]
    assert "did you mean 'tpe'" in call(*options, "--method", "tpee", code=2)[1]
    assert not (tmp_path / "out").exists()


def test_the_command_shows_what_was_pruned(corpus, tmp_path, call):
    out = tmp_path / "out"
    words = [*set_options(BASE), "--grid=lr=1e-4..3e-1", "--sample=4", "--seeds=1", "--method=asha", f"--out={out}"]
    shown, log = call("sweep", corpus, *words)
    assert "at step 1" in log and "pruned at step 1" in shown and "random points, pruned by ASHA" in shown
    assert json.loads((out / "results.json").read_text())["settings"]["sweep"]["method"] == "asha"
