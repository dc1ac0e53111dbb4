"""A comparison uses the same rows and seeds for every arm, and its results follow from its trials."""

import json
import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import f1_score

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments import trial_evaluation
from headstock.experiments.compare import compare
from headstock.experiments.compare_settings import Arm, CompareSettings, ComparisonPlan
from headstock.experiments.compare_trials import ExperimentContext
from headstock.experiments.comparison_summary import summarize_comparison, title_of
from headstock.experiments.grid import versions
from headstock.experiments.leakage import LeakageReport
from headstock.intervals import difference
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.classify import Classify, ClassifyConfig
from headstock.train.distributed import DistributedContext
from headstock.train.labelled_data import LabelledSplits
from headstock.train.run_folder import RunFolder
from tests.experiments.small import ARMS, CELL, SCHEMA, SETTINGS, SMALL, fail_if_trained, read_rows, schema_errors

# Fairness


def test_all_arms_train_on_the_same_rows_and_smaller_sets_are_nested(done):
    _, _, rows_by_trial = done
    for seed in range(2):
        for labels in (8, 24):
            rows = [rows_by_trial[arm, labels, seed] for arm in ARMS]
            assert all(other == rows[0] for other in rows)
            assert len(rows[0][0]) == labels
        few, many = (rows_by_trial["scratch", labels, seed] for labels in (8, 24))
        assert few[0] < many[0]
        assert few[1] < many[1]
    assert len({frozenset(rows_by_trial["scratch", 8, seed][0]) for seed in range(2)}) == 2


def test_validation_rows_are_disjoint_and_no_more_than_training_rows(done, files):
    _, _, rows_by_trial = done
    for (_, labels, _), (train, valid) in rows_by_trial.items():
        assert len(valid) == min(labels, 20)
        assert all(location.startswith(str(files["train"])) for location in train)
        assert all(location.startswith(str(files["valid"])) for location in valid)


def test_rows_held_out_of_the_training_file_are_not_trained_on(stock, files, tmp_path, monkeypatch):
    prepared, fit = [], trial_evaluation.fit
    monkeypatch.setattr(
        trial_evaluation, "fit", lambda *args, **options: prepared.append(args[3]) or fit(*args, **options)
    )
    results = compare(stock, train=files["train"], out=tmp_path, arms=["scratch"], seeds=2, settings=SETTINGS)
    assert results["measured_on"] == "valid" and results["measured_rows"] == 6  # a tenth of 60
    for data in prepared:
        assert len(data.train.locations) == 54
        assert not set(data.train.locations) & set(data.valid.locations)
    evaluated = headstock.load(tmp_path / "runs" / "scratch-54").evaluate()
    assert evaluated["rows"] == 6
    assert evaluated["accuracy"] == results["cells"][0]["accuracy"]


# Results


@pytest.mark.parametrize("weights", ["best", "last"])
def test_notes_say_whether_epochs_were_selected(stock, files, tmp_path, weights):
    options = {"arms": ["frozen"], "labels": [8], "seeds": 1, "settings": SETTINGS | {"weights": weights}}
    notes = compare(stock, train=files["train"], valid=files["valid"], out=tmp_path, **options)["notes"]
    assert any("selected the epochs" in note for note in notes) == (weights == "best")
    assert any("selected its epoch" in note for note in notes) == (weights == "best")
    assert any("last epoch" in note for note in notes) == (weights == "last")


def test_results_follow_the_schema(done):
    results, out, _ = done
    assert schema_errors(json.loads(json.dumps(results)), SCHEMA) == []
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert schema_errors({**results, "verdicts": None}, SCHEMA)  # control: a wrong value is detected
    assert (results["kind"], results["task"], results["seed"], results["device"]) == ("compare", "classify", 0, "cpu")
    assert results["classes"] == ["bad", "good"]
    assert (results["measured_on"], results["measured_rows"]) == ("test", 40)
    assert [arm["kind"] for arm in results["arms"]] == ARMS
    assert results["settings"]["finetune"] == SETTINGS
    assert results["settings"]["compare"]["labels"] == [24, 8]


def test_the_grid_is_complete_and_ordered(done):
    results, _, _ = done
    assert (results["labels"], results["seeds"]) == ([8, 24], [0, 1])
    grid = [(cell["arm"], cell["labels"], cell["seed"]) for cell in results["cells"]]
    assert Counter(grid) == Counter((arm, labels, seed) for arm in ARMS for labels in (8, 24) for seed in (0, 1))
    assert [(row["labels"], row["arm"]) for row in results["summary"]] == [(n, arm) for n in (8, 24) for arm in ARMS]
    assert len(results["verdicts"]) == 2
    assert [verdict.split()[1] for verdict in results["verdicts"]] == ["8", "24"]


def test_metrics_of_a_trial_follow_from_its_probabilities(done, files):
    results, out, _ = done
    truth = np.array([["bad", "good"].index(row["label"]) for row in read_rows(files["test"])])
    for cell in results["cells"]:
        stored = json.loads((out / "cells" / f"{cell['arm']}-{cell['labels']}-{cell['seed']}.json").read_text())
        probabilities = np.array(stored["probabilities"])
        assert probabilities.shape == (40, 2)
        predicted = probabilities.argmax(1)
        assert cell["accuracy"] == np.mean(predicted == truth)
        assert cell["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"), abs=1e-6)
        assert cell["loss"] == pytest.approx(-np.log(probabilities[range(40), truth]).mean(), rel=1e-3)
        assert {key: stored[key] for key in cell} == cell


def test_near_ties_are_evaluated_as_stored():
    """Probabilities are stored rounded; metrics must agree with the stored values."""
    rows = Records("test.csv", [2, 3, 4], {"text": ["a", "b", "c"], "label": ["yes", "yes", "yes"]})
    task = Classify(ClassifyConfig(classes=("no", "yes")), None)
    data = trial_evaluation.LabelsOnly(label_numbers(rows, task.config))
    near = np.array([[0.4999999, 0.5000001], [0.4999999, 0.5000001], [1e-9, 1 - 1e-9]])
    result = trial_evaluation.evaluate_outputs(task, data, list(near))
    assert result["accuracy"] == np.mean(np.array(result["probabilities"]).argmax(1) == 1)
    assert result["accuracy"] == pytest.approx(1 / 3)
    assert result["loss"] == pytest.approx(2 * np.log(2) / 3, rel=1e-5)  # of the unrounded values


def test_summary_and_pairs_follow_from_the_trials(done):
    results, _, _ = done
    means = {}
    for row in results["summary"]:
        cells = [c for c in results["cells"] if (c["arm"], c["labels"]) == (row["arm"], row["labels"])]
        assert row["seeds"] == len(cells) == 2
        for name in ("accuracy", "macro_f1", "seconds"):
            assert row[name] == pytest.approx(np.mean([cell[name] for cell in cells]), abs=1e-6)
        assert row["low"] <= row["accuracy"] <= row["high"]
        assert row["macro_f1_low"] <= row["macro_f1"] <= row["macro_f1_high"]
        means[row["labels"], row["arm"]] = row["accuracy"]
    assert [(p["labels"], p["a"], p["b"]) for p in results["pairs"]] == [
        (n, a, b) for n in (8, 24) for a, b in combinations(ARMS, 2)
    ]
    for pair in results["pairs"]:
        gap = means[pair["labels"], pair["a"]] - means[pair["labels"], pair["b"]]
        assert pair["difference"] == pytest.approx(gap, abs=1e-9)
        assert pair["low"] <= pair["difference"] <= pair["high"]


def test_synthetic_trials_give_the_expected_summary(tmp_path):
    """Two scratch arms and a pretrained one, with specified correct rows for each seed."""
    copies = 25  # four rows would give no clear difference
    truth = ["no", "no", "no", "yes"] * copies
    rows = Records("rows.csv", list(range(2, 102)), {"text": ["a", "b", "c", "d"] * copies, "label": truth})
    task = Classify(ClassifyConfig(classes=("no", "yes")), None)
    data = trial_evaluation.LabelsOnly(label_numbers(rows, task.config))
    splits = LabelledSplits(rows, rows, rows)
    context = ExperimentContext(task, splits, rows, {}, tmp_path, DistributedContext("cpu"))
    correct = {
        "scratch large": [[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]],
        "scratch small": [[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]],
        "pretrained small": [[1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    }
    correct = {name: [seed * copies for seed in seeds] for name, seeds in correct.items()}
    arms = [Arm(name, name.split()[0], RunFolder(Path(name.split()[1]))) for name in correct]
    trials = []
    for seed in range(3):  # in the order of the grid
        for name, seeds in correct.items():
            predictions = [
                bool(is_correct) == (label == "yes") for is_correct, label in zip(seeds[seed], truth, strict=True)
            ]
            outputs = [np.array([0.2, 0.8] if is_yes else [0.8, 0.2]) for is_yes in predictions]
            cell = dict.fromkeys(CELL, 1.0) | {"arm": name, "labels": 4, "seed": seed, "epochs": [], "chosen": None}
            cell |= trial_evaluation.evaluate_outputs(task, data, outputs) | {"parameters": None}
            trials.append(cell | {"told": task.error_analysis(rows, data, outputs)})
    plan = ComparisonPlan(CompareSettings(seeds=3), {}, {}, {})
    results = summarize_comparison(plan, context, arms, trials, LeakageReport(), seconds=0.0)
    assert [row["accuracy"] for row in results["summary"]] == [10 / 12, 4 / 12, 7 / 12]
    assert [row["score"] for row in results["summary"]] == [10 / 12, 4 / 12, 7 / 12]
    assert results["metric"] == "accuracy"
    gaps = {(pair["a"], pair["b"]): pair["difference"] for pair in results["pairs"]}
    assert gaps == {
        ("scratch large", "scratch small"): pytest.approx(6 / 12),
        ("scratch large", "pretrained small"): pytest.approx(3 / 12),
        ("scratch small", "pretrained small"): pytest.approx(-3 / 12),
    }
    pair = next(pair for pair in results["pairs"] if pair["b"] == "pretrained small" and pair["a"] == "scratch small")
    # every seed differs by a quarter, which only pairing by seed shows
    paired = difference(np.array(correct["scratch small"]), np.array(correct["pretrained small"]))
    assert (pair["low"], pair["high"]) == (paired.low, paired.high)
    assert paired != difference(np.array(correct["scratch small"])[::-1], np.array(correct["pretrained small"]))
    # compared with the scratch arm of the same run, although another one is better
    (verdict,) = results["verdicts"]
    assert verdict.startswith("With 4 labels, pretraining improves accuracy by 25.0 points over scratch (95% CI ")
    assert results["details"]["arms"]["pretrained small"]["confusion"] == [[50, 25], [25, 0]]  # of the first seed
    assert results["train_overlap"] == 100


def test_details_are_of_the_first_seed_with_the_most_labels(done, files):
    results, _, _ = done
    details, locations = results["details"], {f"{files['test']}:{line}" for line in range(2, 42)}
    assert details["labels"] == 24 and list(details["arms"]) == ARMS
    for name, analysis in details["arms"].items():
        (cell,) = [c for c in results["cells"] if (c["arm"], c["labels"], c["seed"]) == (name, 24, 0)]
        confusion = np.array(analysis["confusion"])
        assert confusion.sum(1).tolist() == list(results["data"]["test"]["classes"].values())
        assert np.trace(confusion) / 40 == pytest.approx(cell["accuracy"])
        assert len(analysis["lengths"]["right"]) == np.trace(confusion)
        assert analysis["calibration"]["ece"] == pytest.approx(cell["ece"], abs=1e-4)
        assert {mistake["place"] for mistake in analysis["mistakes"]} <= locations
        attributed = [bool(mistake["tokens"]) for mistake in analysis["mistakes"]]
        assert attributed == [name != "tfidf" and i < 12 for i in range(len(attributed))]
    assert any(analysis["mistakes"] for analysis in details["arms"].values())


def test_trainable_and_frozen_parameters(done):
    results, _, _ = done
    counts = {arm["name"]: arm["parameters"] for arm in results["arms"]}
    assert counts["tfidf"] is None
    assert counts["scratch"] == counts["pretrained"]
    assert counts["frozen"]["trainable"] == 16 * 2 + 2  # width 16, two classes
    assert counts["frozen"]["total"] == counts["frozen"]["trainable"] + counts["frozen"]["frozen"]
    for row in results["summary"]:  # frozen features are computed once, so there is no training speed
        assert (row["tokens_per_second"] is None) == (row["arm"] in ("frozen", "tfidf"))


def test_title_and_versions(done, stock):
    results, _, _ = done
    assert results["title"] == "tiny on train.csv"
    assert results["versions"] == versions()
    assert set(versions()) >= {"python", "torch", "numpy", "scikit-learn"}
    assert versions()["torch"].startswith(headstock.load(stock).run.results()["versions"]["torch"].split("+")[0])


def test_the_title_names_each_run_once():
    context = SimpleNamespace(splits=SimpleNamespace(train=Records("some/where/train.csv", [], {})))
    arms = [Arm("x", "frozen", RunFolder(Path(path))) for path in ("runs/a", "runs/b", "runs/a")]
    assert title_of(context, [*arms, Arm("tfidf", "tfidf")]) == "a, b on train.csv"
    assert title_of(context, [Arm("tfidf", "tfidf")]) == "TF-IDF on train.csv"
    rows = Records(f"cache/memory/{'0a' * 32}.jsonl", [], {})
    memory = SimpleNamespace(splits=SimpleNamespace(train=rows))
    assert title_of(memory, [Arm("tfidf", "tfidf")]) == "TF-IDF on data in memory"


def test_saved_runs_give_the_same_predictions(done, files):
    _, out, _ = done
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["frozen-24", "pretrained-24", "scratch-24"]
    texts = [row["text"] for row in read_rows(files["test"])]
    for name in ("frozen", "pretrained", "scratch"):
        pipeline = headstock.load(out / "runs" / f"{name}-24")
        stored = json.loads((out / "cells" / f"{name}-24-0.json").read_text())
        predicted = pipeline.predict(texts)
        assert [list(row["probabilities"].values()) for row in predicted] == [
            pytest.approx(row, abs=1e-4) for row in stored["probabilities"]
        ]
        assert pipeline.evaluate(files["test"])["accuracy"] == pytest.approx(stored["accuracy"])
        with pytest.raises(UserError, match=r"trained on 24 rows .* trained it on a sample"):  # never on training rows
            pipeline.evaluate()
        assert pipeline.run.results()["valid"]["accuracy"] == pytest.approx(stored["valid_score"])


def test_an_arm_can_be_a_soup(stock, files, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[compare]\narms = ["pretrained", "soup"]\n[arms.soup]\nkind = "pretrained"\nsoup = 2\n')
    results = compare(stock, **files, out=tmp_path / "out", config_file=recipe, **(SMALL | {"seeds": 1}))
    cells = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "cells").iterdir())]
    assert cells[0]["probabilities"] != cells[1]["probabilities"]
    soup = next(cell for cell in results["cells"] if cell["arm"] == "soup")
    assert soup["best_epoch"] is None
    run = tmp_path / "out" / "runs" / "soup-8"
    assert len(headstock.load(run).models) == 1
    assert headstock.load(run).evaluate(files["test"])["accuracy"] == pytest.approx(soup["accuracy"])
    assert headstock.load(run).run.results()["valid"]["accuracy"] == pytest.approx(soup["valid_score"])


# Several runs, one seed


def test_several_runs_are_compared(stock, files, tmp_path):
    other = tmp_path / "second"
    shutil.copytree(stock, other)
    results = compare([stock, other], **files, out=tmp_path / "out", arms=["scratch", "pretrained", "tfidf"], **SMALL)
    names = ["scratch tiny", "scratch second", "pretrained tiny", "pretrained second", "tfidf"]
    assert [arm["name"] for arm in results["arms"]] == names
    assert [arm["run"] for arm in results["arms"]] == [str(stock), str(other)] * 2 + [None]
    assert len(results["pairs"]) == 10 and len(results["cells"]) == 10
    assert results["title"] == "tiny, second on train.csv"
    assert [leak["run"] for leak in results["leakage"]] == [str(stock), str(other)]
    assert {path.name for path in (tmp_path / "out" / "runs").iterdir()} == {
        f"{name.replace(' ', '-')}-8" for name in names if name != "tfidf"
    }


def test_one_seed_gives_no_interval_and_says_so(stock, files, tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    results = compare(stock, **files, out=tmp_path, labels=[8], seeds=1, seed=7, settings=SETTINGS)
    assert results["seeds"] == [7]
    rows = [*results["summary"], *results["pairs"]]
    assert all(row["low"] is None and row["high"] is None for row in rows)
    assert all(row["macro_f1_low"] is None for row in results["summary"])
    assert any("One seed" in note and "no intervals" in note for note in results["notes"])
    assert any("single seed" in line for line in caplog.messages)
    assert results["verdicts"][0].endswith("one seed only, so there are no intervals.")
    assert schema_errors(json.loads(json.dumps(results)), SCHEMA) == []


def test_few_seeds_are_named_and_more_advised(done):
    results, out, _ = done
    (note,) = [note for note in results["notes"] if "seeds only" in note]
    assert "rest on 2 seeds" in note and "--seeds 5" in note
    # terminal and report list the notes of this file
    assert note in json.loads((out / "results.json").read_text(encoding="utf-8"))["notes"]


def test_the_command_keeps_the_json_contract(call, files, tmp_path):
    options = [f"--{name}={path}" for name, path in files.items()]
    out, _ = call("compare", *options, "--arms=tfidf", "--labels=8", "--seeds=1", "--out", tmp_path, "--json")
    results = json.loads(out.splitlines()[-1])
    assert set(results["cells"][0]) >= {"arm", "labels", "seed", "accuracy", "macro_f1"}
    assert set(results["summary"][0]) >= {"arm", "labels", "accuracy", "low", "high"}
    assert len(results["verdicts"]) == 1
    assert (tmp_path / "report.html").is_file()
    assert results["leakage"] == [] and results["title"] == "TF-IDF on train.csv"


# Invalid options

WRONG = {
    "too many labels": ({"labels": [8, 99]}, r"--labels 99: .*train\.csv has only 60 rows"),
    "unknown arm": ({"arms": ["scratch", "pretraned"]}, r"--arms pretraned: no such arm; did you mean 'pretrained'\?"),
    "arm twice": ({"arms": ["tfidf", "scratch", "tfidf"]}, r"--arms: tfidf given twice"),
    "one label": ({"labels": [1]}, r"compare\.labels: must be 2 or more, not 1"),
    "labels twice": ({"labels": [8, 8]}, r"compare\.labels: contains a number twice"),
    "no seeds": ({"seeds": 0}, r"compare\.seeds: must be 1 or more, not 0"),
    "no rows": ({"rows": 0}, r"compare\.rows: must be 1 or more, not 0"),
    "no run": ({"runs": []}, r"no run to compare: give one"),
    "no such run": ({"runs": ["nowhere/tiny"]}, r"nowhere/tiny: no such run"),
    "run twice": ({"runs": 2}, r"tiny: given twice"),
    "no training file": ({"train": None}, r"name a file with --train"),
    "unknown policy": ({"leakage": "exlude"}, r"compare\.leakage: must be one of .* did you mean 'exclude'"),
    "unknown setting": ({"settings": {"epoch": 3}}, r"epoch: unknown setting; did you mean 'epochs'"),
    "ensemble": ({"settings": {"ensemble": 3}}, r"ensemble: .*"),
    "adapt": ({"settings": {"transfer.adapt_steps": 3}}, r"adapt_steps: .*"),
    "init": ({"settings": {"init": "scratch"}}, r"init: .*"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_options_are_refused_before_training(stock, files, tmp_path, wrong):
    options, message = WRONG[wrong]
    arguments = {**files, "out": tmp_path / "out", **SMALL, "runs": [stock], **options}
    runs = arguments.pop("runs")
    with pytest.raises(UserError, match=message) as raised:
        compare([stock, stock] if runs == 2 else runs, **arguments, callbacks=[fail_if_trained])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_in_one_line(call, stock, files, tmp_path):
    (tmp_path / "mine").write_text("precious")
    options = [f"--{name}={path}" for name, path in files.items()]
    wrong = {
        "is a file": [stock, "--out", tmp_path / "mine"],
        "expected numbers separated by commas": [stock, "--out", tmp_path / "out", "--labels", "8;24"],
        "did you mean 'frozen'": [stock, "--out", tmp_path / "out", "--arms", "frosen"],
        "must be 1 or more": [stock, "--out", tmp_path / "out", "--seeds", 0],
        "no run to compare": ["--out", tmp_path / "out"],
        "sum4 needs 4 layers": [stock, "--out", tmp_path / "out", "--features", "last, sum4"],
        "--task masked": [stock, "--out", tmp_path / "out", "--task", "masked"],
    }
    for message, words in wrong.items():
        out, err = call("compare", *words, *options, "--json", "--quiet", code=2)
        assert message in json.loads(out)["error"]
        assert len(err.splitlines()) == 1
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[comparing]\nseeds = 3", "comparing: unknown section"),
        ("compare = 3", "compare: must be a table"),
        ("arms = ['scratch']", "arms: must be a table"),
        ("[arms]\nfast = 3", "arms.fast: must be a table"),
        ("[arms.fast]\nkind = 'frosen'", "arms.fast.kind: must be one of .* did you mean 'frozen'"),
        ("[arms.pretraned]\nlr = 1", "arms.pretraned.kind: .* did you mean 'pretrained'"),
        ("[arms.tfidf]\nC = 1", "arms.tfidf: .*no settings"),
        ("[arms.scratch]\nlrr = 1", "lrr: unknown setting"),
        ("[compare]\nseed = 'x'", "compare.seed: must be int"),
    ],
)
def test_a_wrong_recipe_is_refused(stock, files, tmp_path, recipe, message):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe)
    with pytest.raises(UserError, match=message):
        compare(stock, **files, out=tmp_path / "out", config_file=path, callbacks=[fail_if_trained], **SMALL)
    assert not (tmp_path / "out").exists()
