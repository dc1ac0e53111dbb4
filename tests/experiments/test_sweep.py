"""A sweep ranks points like single runs would, trains each once and resumes after an interruption."""

import json
import math
import shutil
import signal
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import headstock
from headstock.errors import ConfigError, UserError
from headstock.experiments import sweep_trials
from headstock.experiments.sweep import sweep
from headstock.experiments.sweep_settings import Range, draw_points, make_plan, parse_grid, read_grid
from headstock.experiments.sweep_summary import ranking, summarize_sweep
from headstock.experiments.trial_evaluation import t_interval
from headstock.report.sweep_points import canonical, point_file_name
from headstock.train.run_folder import RunFolder
from tests.commands import command, set_options
from tests.conftest import TINY
from tests.experiments.process_patches import stop_sweep
from tests.experiments.small import SETTINGS, fail_if_trained, modification_times, without_timings

BASE = TINY | {"steps": 6, "validate_every": 3, "checkpoint_every": 2}
GRID = {"depth": [1, 2], "lr": [1e-3, 3e-2]}
OPTIONS = {"grid": GRID, "seeds": 2, "settings": BASE}


@pytest.fixture(scope="module")
def swept(corpus, tmp_path_factory):
    """A sweep of pretraining and its folder."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    return sweep(corpus, out=out, **OPTIONS), out


# The points


@given(st.integers(1, 24), st.integers(0, 5))
def test_samples_are_distinct_and_nested(count, seed):
    grid = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [0.1, 0.2]}
    sample = draw_points(grid, sample=count, seed=seed)
    full = draw_points(grid, sample=None, seed=0)
    assert len({canonical(point) for point in sample}) == count <= len(full) == 24
    assert all(point in full for point in sample)
    assert draw_points(grid, sample=max(1, count - 1), seed=seed) == sample[: max(1, count - 1)]


def test_ranges_are_sampled_log_uniformly():
    sample = draw_points({"lr": Range(1e-4, 1e-2), "depth": Range(1, 4)}, sample=400, seed=0)
    rates, depths = np.log10([point["lr"] for point in sample]), [point["depth"] for point in sample]
    assert rates.min() >= -4 and rates.max() <= -2
    assert abs(np.mean(rates < -3) - 0.5) < 0.08
    assert set(depths) == {1, 2, 3, 4} and all(type(depth) is int for depth in depths)
    first, second = (draw_points({"dropout": Range(0.0, 0.5)}, sample=5, seed=seed) for seed in (1, 2))
    assert first != second


def test_grid_values_are_parsed_like_settings():
    grid = dict(parse_grid(text) for text in ("lr=1e-3,3e-3", "norm=pre, post", "freeze=true,false", "x=1..8"))
    assert read_grid(grid, sampled=True) == {
        "lr": [0.001, 0.003],
        "norm": ["pre", "post"],
        "freeze": [True, False],
        "x": Range(1, 8),
    }
    for invalid, message in (
        ({"lr": "1e-3..1"}, "--sample"),
        ({"lr": [1, 1.0]}, "twice"),
        ({"lr": []}, "no values"),
        ({}, "--grid"),
    ):
        with pytest.raises(UserError, match=message):
            read_grid(invalid, sampled=False)
    with pytest.raises(UserError, match="only 2 points"):
        draw_points({"a": [1, 2]}, sample=3, seed=0)


def test_different_points_have_different_names():
    points = [{"a": "x/y"}, {"a": "x y"}, {"a": 1}, {"a": "b" * 200}, {"a": "b" * 201}, {"a": ["1"]}]
    names = [point_file_name(point) for point in points]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) <= 80 for name in names)


# Pretraining


def test_ranking_agrees_with_single_runs(swept, corpus, tmp_path):
    results, _ = swept
    assert (results["kind"], results["metric"], results["better"]) == ("sweep", "loss", "lower")
    means = [row["mean"] for row in results["points"]]
    assert means == sorted(means) and len(means) == 4
    for row in results["points"]:
        scores = [cell["score"] for cell in results["cells"] if cell["settings"] == row["settings"]]
        low, high = stats.t.interval(0.95, 1, np.mean(scores), stats.sem(scores))
        assert np.allclose([row["mean"], row["low"], row["high"]], [np.mean(scores), low, high])
    assert all(row["settings"]["lr"] == 3e-2 for row in results["points"][:2])  # six steps need a high learning rate
    cell = next(cell for cell in results["cells"] if cell["seed"] == 1 and cell["settings"]["depth"] == 1)
    single = headstock.pretrain(corpus, out=tmp_path / "run", settings=BASE | cell["settings"] | {"seed": 1})
    assert cell["score"] == single["valid_loss"]
    assert cell["parameters"] == single["parameters"]["total"]
    assert [step for step, _ in cell["curve"]] == [3, 6]


def test_marginals_are_means_over_points(swept):
    results, _ = swept
    for key, values in GRID.items():
        assert [row["value"] for row in results["marginals"][key]] == values
        for row in results["marginals"][key]:
            means = [point["mean"] for point in results["points"] if point["settings"][key] == row["value"]]
            assert math.isclose(row["mean"], np.mean(means))
    assert "The most important setting is lr" in results["verdict"]


def test_only_the_best_run_is_kept(swept):
    results, out = swept
    best = results["best"]
    assert [path.name for path in (out / "runs").iterdir()] == [best["run"].rpartition("/")[2]]
    scores = {cell["seed"]: cell["score"] for cell in results["cells"] if cell["settings"] == best["settings"]}
    assert best["settings"] == results["points"][0]["settings"]
    assert best["seed"] == min(scores, key=scores.get)
    assert not RunFolder(out / "runs" / best["run"].rpartition("/")[2]).checkpoints.exists()
    assert math.isclose(headstock.load(best["run"]).evaluate()["loss"], scores[best["seed"]], rel_tol=1e-5)


def test_finished_trials_of_a_sweep_are_not_repeated(swept, corpus, tmp_path):
    results, finished = swept
    before = modification_times(finished)
    again = sweep(corpus, out=finished, **OPTIONS, callbacks=[fail_if_trained])
    assert modification_times(finished) == before
    assert without_timings(again) == without_timings(results)
    # ranking by another metric needs no training
    by_bits = sweep(corpus, out=finished, **OPTIONS, by="bits_per_byte", callbacks=[fail_if_trained])
    assert by_bits["metric"] == "bits_per_byte"
    assert by_bits["points"][0]["mean"] != results["points"][0]["mean"]
    out, depth = tmp_path / "out", results["best"]["settings"]["depth"]
    shutil.copytree(finished, out)
    wider = sweep(corpus, out=out, **OPTIONS | {"grid": {"depth": [depth], "lr": [3e-2, 1e-4]}})
    new = {name for name, stamp in modification_times(out / "cells").items() if before.get(f"cells/{name}") != stamp}
    assert new == {f"depth={depth},lr=0.0001-{seed}.json" for seed in (0, 1)}
    assert wider["best"]["seed"] == results["best"]["seed"]


def test_a_new_best_point_is_trained_again_if_its_weights_were_removed(swept, corpus, tmp_path):
    results, finished = swept
    out, other = tmp_path / "out", results["points"][1]["settings"]
    shutil.copytree(finished, out)
    grid = {key: [value] for key, value in other.items()}
    again = sweep(corpus, out=out, **OPTIONS | {"grid": grid})
    assert again["best"]["settings"] == other
    scores = {cell["seed"]: cell["score"] for cell in results["cells"] if cell["settings"] == other}
    assert headstock.load(again["best"]["run"]).run.results()["valid_loss"] == scores[again["best"]["seed"]]


def test_changed_text_invalidates_trials(swept, corpus, tmp_path):
    _, finished = swept
    out, other = tmp_path / "out", tmp_path / "other.txt"
    shutil.copytree(finished, out)
    other.write_text(corpus.read_text(encoding="utf-8").replace("Anne", "Anna"), encoding="utf-8")
    before = modification_times(out)
    sweep(other, out=out, **OPTIONS | {"grid": {"depth": [1], "lr": [3e-2]}, "seeds": 1})
    assert modification_times(out)["cells/depth=1,lr=0.03-0.json"] != before["cells/depth=1,lr=0.03-0.json"]


@pytest.mark.parametrize(("kill", "code"), [(False, 130), (True, -signal.SIGKILL)])
def test_an_interrupted_sweep_resumes_to_the_same_results(swept, corpus, tmp_path, kill, code):
    results, _ = swept
    out = tmp_path / "out"
    options = [*set_options(BASE), "--grid=depth=1,2", "--grid=lr=1e-3,3e-2", "--seeds=2", f"--out={out}"]
    exit_code, _, err = command("sweep", corpus, *options, "--quiet", patch=partial(stop_sweep, kill=kill))
    assert exit_code == code, err
    if not kill:
        assert f"3 of 8 trials are saved in {out}" in err.splitlines()[-1]
    before, steps = modification_times(out / "cells"), []
    again = sweep(corpus, out=out, **OPTIONS, callbacks=[lambda event: steps.append(event.state.step)])
    after = modification_times(out / "cells")
    assert sum(after[name] == stamp for name, stamp in before.items()) == 3
    assert steps[0] > 2  # the fourth trial was resumed, not restarted
    assert without_timings(again)["points"] == without_timings(results)["points"]
    assert again["verdict"] == results["verdict"]


def test_all_invalid_settings_are_reported_before_training(corpus, tmp_path):
    grid = {"depht": [1, 2], "depth": [0, 2], "width": [16, 30], "heads": [4], "norm": ["pre", "pots"]}
    with pytest.raises(ConfigError) as error:
        sweep(corpus, grid=grid, out=tmp_path / "out")
    assert [location for location, _ in error.value.problems] == [
        "depht",
        "depth=0: model.depth",
        "norm=pots: model.norm",
        "width=30 heads=4: model.width",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"seed": [1, 2]}}, "each trial has its own"),
        ({"grid": {"valid_fraction": [0.1, 0.2]}}, "different text"),
        ({"grid": {"task.name": ["causal", "masked"]}}, "different objectives"),
        ({"grid": {"preset": ["gpt-nano", "bert-nano"]}}, "different objectives"),
        ({"grid": {"lr": [1, 2], "train.lr": [3, 4]}}, "two names"),
        ({"grid": {"lr": [1, 2]}, "train": "rows.csv"}, "--run"),
        ({"grid": {"lr": [1, 2]}, "run": "reviews-en"}, "either pretrains or fine-tunes"),
        ({"grid": {"vocabulary": [300, 320]}, "by": "loss", "settings": TINY}, "different tokenizers"),
        ({"grid": {"vocabulary": [300, 320]}, "objective": "masked", "settings": TINY}, "no bits per byte"),
    ],
)
def test_incomparable_points_are_refused(corpus, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        sweep(corpus, out=tmp_path / "out", callbacks=[fail_if_trained], **options)


def test_a_point_overrides_the_same_setting_by_another_name(corpus, tmp_path):
    plan = make_plan(None, {"corpus": [str(corpus)]}, {"lr": [0.5]}, TINY | {"train.lr": 0.1})
    assert sweep_trials.Pretraining(plan, tmp_path, "cpu").configure({"lr": 0.5}, 0).train.lr == 0.5


def test_diverging_points_rank_last(corpus, tmp_path):
    settings = BASE | {"clip": 0, "warmup": 0.0, "steps": 8}
    options = {"grid": {"lr": [1e30, 1e-2]}, "seeds": 1, "settings": settings, "out": tmp_path / "out"}
    results = sweep(corpus, **options)
    first, last = results["points"]
    assert first["settings"] == {"lr": 1e-2} and first["mean"] is not None
    assert (last["mean"], last["failed"]) == (None, 1)
    assert any("lr=1e+30" in note for note in results["notes"])
    json.loads(json.dumps(results, allow_nan=False))
    again = sweep(corpus, **options, callbacks=[fail_if_trained], keep=False)
    assert without_timings(again) == without_timings(results)


def test_the_command_and_a_recipe(call, swept, corpus, tmp_path, monkeypatch):
    results, finished = swept
    out, recipe = tmp_path / "out", tmp_path / "recipe.toml"
    shutil.copytree(finished, out)
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in BASE.items())
    recipe.write_text(
        f"[sweep]\ncorpus = {json.dumps(str(corpus))}\nseeds = 2\n"
        f"[grid]\ndepth = [1, 2]\nlr = '1e-3,3e-2'\n[pretrain]\n{settings}"
    )
    before = modification_times(out / "cells")
    stdout, err = call("sweep", "--config", recipe, "--out", out)
    assert modification_times(out / "cells") == before and (out / "report.html").is_file()
    assert "gap to the best" in stdout and results["verdict"] in stdout.replace("\n", " ")
    assert err.count("(cached)") == 8
    monkeypatch.setattr("headstock.report.pages.write_report", lambda folder: folder / "report.html")
    stdout, _ = call("sweep", "--config", recipe, "--out", out, "--json")
    output = json.loads(stdout.splitlines()[-1])
    assert output["verdict"] == results["verdict"] and output["points"] == results["points"]
    _, err = call("sweep", corpus, "--grid", "lr=1", "--grid", "lr=2", "--out", out, code=2)
    assert "given twice" in err


# Fine-tuning


def test_fine_tuning_is_ranked_by_the_validation_rows(stock, files, tmp_path):
    rows = {"run": stock, "train": files["train"], "valid": files["valid"]}
    grid = {"lr": [1e-5, 2e-2], "freeze": [False, True]}
    out, settings = tmp_path / "out", SETTINGS | {"epochs": 3}
    results = sweep(**rows, grid=grid, seeds=2, settings=settings, out=out, keep=True)
    assert (results["of"], results["metric"], results["better"]) == ("finetune", "accuracy", "higher")
    means = [row["mean"] for row in results["points"]]
    assert means == sorted(means, reverse=True)
    assert len(list((out / "runs").iterdir())) == 8  # keep=True
    model = headstock.load(results["best"]["run"])
    best_trial = {key: results["best"][key] for key in ("seed", "settings")}
    best = next(cell for cell in results["cells"] if best_trial.items() <= cell.items())
    assert math.isclose(model.evaluate(files["valid"])["accuracy"], best["score"])
    assert any("no test row" in note for note in results["notes"])
    again = sweep(**rows, grid=grid, seeds=2, settings=settings, out=out, callbacks=[fail_if_trained])
    assert without_timings(again)["points"] == without_timings(results)["points"]
    assert len(list((out / "runs").iterdir())) == 8  # a later call does not remove kept runs
    for invalid in ({"settings": {"data.test": str(files["test"])}}, {"settings": {"ensemble": 2}}, {"by": "loss"}):
        with pytest.raises(UserError, match=r"cannot be set|applies to pretraining"):
            sweep(**rows, grid=grid, out=out, callbacks=[fail_if_trained], **invalid)


# The summary


def trials_with(scores, **values):
    return [{"score": score, "failed": None, "seconds": 1.0, "parameters": 9, **values} for score in scores]


def test_points_with_a_failed_seed_rank_last():
    failed = [*trials_with([1.0]), {"score": None, "failed": "no number"}]
    results = [trials_with([2.0, 2.0]), failed, trials_with([1.5, 1.7])]
    assert ranking(results, lower=True) == [2, 0, 1]
    assert ranking(results, lower=False) == [0, 2, 1]


class RankedByLoss:
    """The part of a SweepKind that the summary needs."""

    metric, lower, curve_metric, task, overlap = "loss", True, "loss", None, None

    def __init__(self, folder):
        self.folder = folder

    def run_folder(self, trial):
        return self.folder / "runs" / trial.name

    def describe_data(self):
        return {}


@pytest.mark.parametrize(
    ("best_scores", "other_scores", "words"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.21], "clearly better than the second best"),
        ([1.0, 1.1, 1.2], [1.2, 1.0, 1.15], "not clearly better than the second best"),
        ([1.0], [2.0], "one seed cannot show"),
        ([1.0], [1.0], "has the same score"),
    ],
)
def test_the_sweep_verdict_follows_the_paired_interval(tmp_path, best_scores, other_scores, words):
    from headstock.experiments.sweep_settings import SweepPlan, SweepSettings
    from headstock.experiments.sweep_trials import SweepTrial

    points = [{"lr": 0.1}, {"lr": 0.2}]
    plan = SweepPlan(SweepSettings(corpus=("a.txt",), seeds=len(best_scores)), {"lr": [0.1, 0.2]}, {})
    trials = [trials_with(best_scores, settings=points[0]), trials_with(other_scores, settings=points[1])]
    results = summarize_sweep(plan, RankedByLoss(tmp_path), points, trials, SweepTrial(points[0], 0), seconds=1.0)
    assert words in results["verdict"] and "lr=0.1" in results["verdict"]
    assert ("clearly" in results["verdict"]) == (len(best_scores) > 1)
    gap = t_interval([b - a for a, b in zip(best_scores, other_scores, strict=True)])
    assert results["best"]["second"]["mean"] == gap.mean
    assert results["best"]["second"]["clear"] == (gap.low is not None and gap.low > 0)


def test_one_process_only(corpus, tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one process"):
        sweep(corpus, grid=GRID, out=tmp_path / "out")
