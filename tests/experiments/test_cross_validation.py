"""Cross-validated sweeps: the same stratified folds for all points, honest scores, corrected intervals."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments import sweep as sweep_module
from headstock.experiments import trial_evaluation
from headstock.experiments.cross_validation import assign_folds
from headstock.experiments.recipe import to_toml
from headstock.experiments.sweep import sweep
from headstock.experiments.trial_evaluation import t_interval
from tests.experiments.small import fail_if_trained, read_rows, without_timings

SETTINGS = {"epochs": 2, "least_steps": 0, "batch": 16}
GRID = {"lr": [1e-6, 2e-2]}


@pytest.fixture(scope="module")
def crossed(stock, files, tmp_path_factory):
    """A cross-validated sweep, its folder, and the rows that each trial trained and validated on."""
    out, seen, fit = tmp_path_factory.mktemp("folds") / "out", [], trial_evaluation.fit

    def record_fit(run_config, task, weights, data, **options):
        seen.append((set(data.train.locations), set(data.valid.locations)))
        return fit(run_config, task, weights, data, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_evaluation, "fit", record_fit)
        rows = {"run": stock, "train": files["train"], "valid": files["valid"]}
        results = sweep(**rows, grid=GRID, folds=3, repeats=2, settings=SETTINGS, out=out, out_of_fold="all")
    return results, out, seen


@given(st.integers(2, 6), st.lists(st.sampled_from("aabc"), min_size=12, max_size=60), st.integers(0, 3))
def test_folds_partition_the_rows_and_keep_the_classes(folds, labels, seed):
    records = Records("rows", list(range(len(labels))), {"text": labels, "label": labels})
    numbers = assign_folds(records, folds, seed=seed, strata=labels)
    sizes, total = np.bincount(numbers, minlength=folds), Counter(labels)
    assert sizes.sum() == len(labels) and np.ptp(sizes) <= 1
    for fold in range(folds):
        own = Counter(label for label, number in zip(labels, numbers, strict=True) if number == fold)
        assert all(abs(own[name] - count * sizes[fold] / len(labels)) <= 2 for name, count in total.items())
    assert (numbers == assign_folds(records, folds, seed=seed, strata=labels)).all()


def test_questions_on_one_text_share_a_fold():
    contexts = [f"text {number % 7}" for number in range(40)]
    records = Records("rows", list(range(40)), {"context": contexts, "question": contexts})
    numbers = assign_folds(records, 3, seed=0, strata=[""] * 40)
    assert len(set(zip(contexts, numbers.tolist(), strict=True))) == 7 and set(numbers.tolist()) == {0, 1, 2}
    with pytest.raises(UserError, match="questions on 7 texts only"):
        assign_folds(records, 8, seed=0, strata=[""] * 40)


def test_intervals_are_those_of_the_corrected_resampled_t_test():
    scores = [0.8, 0.82, 0.79, 0.85, 0.81]
    mean, low, high = t_interval(scores, overlap=1 / 4)
    radius = stats.t.ppf(0.975, 4) * math.sqrt((1 / 5 + 1 / 4) * np.var(scores, ddof=1))
    assert (low, high) == (pytest.approx(mean - radius), pytest.approx(mean + radius))
    plain = t_interval(scores)
    assert high - low == pytest.approx(1.5 * (plain.high - plain.low))  # sqrt((1/5 + 1/4) / (1/5))


def test_the_corrected_interval_covers_where_the_plain_one_does_not():
    """Scores of folds whose models share most of their rows have a correlation of about the share of a fold."""
    random, folds, trials = np.random.default_rng(0), 5, 2000
    shared = random.normal(size=(trials, 1)) * math.sqrt(1 / folds)
    scores = shared + random.normal(size=(trials, folds)) * math.sqrt(1 - 1 / folds)
    inside = {
        overlap: np.mean([t.low <= 0 <= t.high for t in (t_interval(row, overlap=overlap) for row in scores)])
        for overlap in (0.0, 1 / (folds - 1))
    }
    assert inside[0.0] < 0.88 and inside[1 / (folds - 1)] == pytest.approx(0.95, abs=0.02)


def test_no_model_is_scored_on_rows_it_has_seen(crossed):
    _, _, seen = crossed
    everything = set().union(*(train | valid for train, valid in seen))
    assert len(everything) == 80 and len(seen) == 2 * 6 + 1
    *trials, final = seen
    assert final[0] | final[1] == everything  # the best point, trained on all rows
    folds = [frozenset(everything - train - valid) for train, valid in trials]
    assert folds[:6] == folds[6:]  # the same for both points
    for repeat in (folds[:3], folds[3:6]):
        assert sum(map(len, repeat)) == 80 and frozenset().union(*repeat) == everything
    assert folds[:3] != folds[3:6]
    assert all(len(valid) == 5 and not train & valid for train, valid in trials)  # a tenth selects the epoch


def test_points_are_compared_by_fold(crossed):
    results, out, _ = crossed
    assert (results["unit"], results["seeds"], results["folds"], results["repeats"]) == ("fold", 6, 3, 2)
    scores = {
        cell["settings"]["lr"]: [c["score"] for c in results["cells"] if c["settings"] == cell["settings"]]
        for cell in results["cells"]
    }
    best, second = results["points"]
    assert best["settings"] == {"lr": 2e-2} and best["mean"] == pytest.approx(np.mean(scores[2e-2]))
    expected = t_interval([b - a for a, b in zip(scores[2e-2], scores[1e-6], strict=True)], overlap=1 / (2 * 0.9))
    assert second["from_best"] == pytest.approx(expected._asdict())
    assert "paired by fold" in results["verdict"]
    assert any("corrected resampled t-test" in note for note in results["notes"])
    assert results["best"]["run"] == str(next((out / "runs").iterdir()))
    assert headstock.load(results["best"]["run"]).predict(["Anne likes home"])


def test_out_of_fold_predictions_are_saved_in_the_order_of_the_files(crossed, files):
    results, _, _ = crossed
    labels = [row["label"] for name in ("train", "valid") for row in read_rows(files[name])]
    assert len(results["out_of_fold"]) == 2  # of all points, the best first
    for file, point in zip(results["out_of_fold"], results["points"], strict=True):
        with open(file, encoding="utf-8") as stream:
            lines = [json.loads(line) for line in stream]
        assert [line["true"] for line in lines] == labels
        assert lines[0]["row"] == f"{files['train']}:2" and lines[60]["row"] == f"{files['valid']}:2"
        right = np.mean([max(line["probabilities"], key=line["probabilities"].get) == line["true"] for line in lines])
        assert right == pytest.approx(point["mean"], abs=0.2)  # two repeats are averaged before the decision


def test_a_repeated_cross_validation_is_read_from_its_files(crossed, stock, files):
    results, out, _ = crossed
    rows = {"run": stock, "train": files["train"], "valid": files["valid"]}
    options = {"grid": GRID, "folds": 3, "repeats": 2, "settings": SETTINGS, "out": out, "out_of_fold": "all"}
    again = sweep(**rows, **options, callbacks=[fail_if_trained])
    assert without_timings(again) == without_timings(results)


def test_the_command_trains_on_all_folds_but_one_without_selecting_epochs(call, stock, files, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "LONG_SWEEP", 0)
    recipe = tmp_path / "folds.toml"
    tables = {
        "sweep": {"run": str(stock), "train": str(files["train"]), "folds": 3},
        "grid": {"lr": [1e-3, 2e-2]},
        "finetune": SETTINGS | {"weights": "last", "epochs": 1},
    }
    recipe.write_text(to_toml(tables))
    out, messages = call("sweep", "--config", recipe, "--folds", "2", "--out", tmp_path / "out", "--json")
    results = json.loads(out.splitlines()[-1])
    assert "60 rows in 2 folds" in messages and "for the other 3 trials, if they take as long" in messages
    _, messages = call("sweep", "--config", recipe, "--folds", "2", "--out", tmp_path / "out", "--json")
    assert "if they take as long" not in messages  # all trials are finished
    assert results["data"]["train"]["rows"] == 60 and len(results["cells"]) == 4
    page = (tmp_path / "out" / "report.html").read_text()
    assert "the best point, trained on all rows" in page and "2 folds each" in page and "fold 2" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 3, "seeds": 2}, "--seeds: conflicts with --folds"),
        ({"folds": 1}, "folds: must be 2 or more"),
        ({"folds": 50}, "--folds 50: needs 100 rows or more, not 60"),
        ({"repeats": 2}, "repeats: applies to cross-validation"),
        ({"out_of_fold": "all"}, "out_of_fold: applies to cross-validation"),
    ],
)
def test_folds_without_sense_are_refused(options, message, stock, files, tmp_path):
    with pytest.raises(UserError, match=message):
        sweep(run=stock, train=files["train"], grid=GRID, out=tmp_path / "out", **options)


def test_pretraining_has_no_folds(corpus, tmp_path):
    with pytest.raises(UserError, match="--folds: applies to fine-tuning"):
        sweep(corpus, grid=GRID, folds=3, out=tmp_path / "out")
