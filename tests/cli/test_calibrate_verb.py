"""`headstock calibrate`, and `predict` and `evaluate` with calibrated probabilities and abstention."""

import csv
import json
import shutil

import numpy as np
import pytest

import headstock
from headstock.experiments.trial_evaluation import add_error_analysis
from headstock.report.pages import write_report
from headstock.train.run_folder import RunFolder
from tests.commands import REVIEWS, write_rows


@pytest.fixture
def run(classifier, tmp_path):
    """A copy of the classifier, whose calibration may be changed."""
    shutil.copytree(classifier[0] / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def rows(tmp_path):
    """Labelled rows, some of them wrongly, so that the model is overconfident on them."""
    noisy = [(text, "sea" if number % 4 == 0 else label) for number, (text, label) in enumerate(REVIEWS)]
    return write_rows(tmp_path / "rows.csv", noisy, header="review,stars")


def test_finetune_calibrates_on_the_validation_rows(classifier, run, result):
    folder, _ = classifier
    stored = json.loads((run / "calibration.json").read_text())
    assert stored["rows"] == len(REVIEWS)
    assert stored["file"] == str(folder / "train.csv")
    assert stored["selected_epoch"] and stored["temperature"] > 0 and not stored["thresholds"]
    again = result("calibrate", run)["calibration"]
    assert again == stored | {"temperature": pytest.approx(stored["temperature"], rel=1e-3)} | {
        name: pytest.approx(stored[name], abs=1e-3) for name in ("confidence", "calibrated_confidence")
    }


def test_files_that_are_relative_to_another_folder_are_not_called_changed(run, rows, refused, result):
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"train": "data/train.csv", "valid": None}
    (run / "config.json").write_text(json.dumps(config))
    message = refused("calibrate", run)
    assert "data/train.csv" in message and "in the folder where it was trained" in message and "--data" in message
    assert "changed" not in message
    assert result("calibrate", run, "--data", rows)["calibration"]["file"] == str(rows)


def test_calibration_lowers_the_loss_and_keeps_every_class(run, rows, call, result):
    output = result("calibrate", run, "--data", rows)
    assert output["after"]["loss"] < output["before"]["loss"]
    assert output["calibration"]["temperature"] > 1
    assert not output["calibration"]["selected_epoch"]
    texts = sorted({text for text, _ in REVIEWS})
    raw, calibrated = headstock.load(run), headstock.load(run, calibrated=True)
    before, after = raw.predict(texts), calibrated.predict(texts)
    assert [row["label"] for row in before] == [row["label"] for row in after]
    confidence = [[max(row["probabilities"].values()) for row in predictions] for predictions in (before, after)]
    assert all(lower < higher for higher, lower in zip(*confidence, strict=True))
    assert result("predict", run, *texts, "--calibrated")["predictions"] == after
    plain = result("evaluate", run, rows)["metrics"]
    metrics = result("evaluate", run, rows, "--calibrated")["metrics"]
    assert metrics["accuracy"] == plain["accuracy"] and metrics["loss"] < plain["loss"]
    assert metrics["uncalibrated"]["loss"] == pytest.approx(plain["loss"])
    assert metrics["loss_change"] == pytest.approx(metrics["loss"] - plain["loss"], abs=1e-5)
    assert plain["risk_coverage"]["curve"][-1]["accuracy"] == pytest.approx(plain["accuracy"])
    assert plain["reliability"]["ece"] == pytest.approx(plain["ece"])
    out, _ = call("evaluate", run, rows, "--calibrated")
    assert "by coverage" in out and "before calibration" in out and "changes the loss" in out
    assert metrics["calibration_fitted_here"] and "loss_change_interval" not in metrics and "on these rows" in out


def test_only_other_rows_have_an_interval(run, rows, call, result):
    """A run without a test file is evaluated on the validation rows that its calibration was fitted on."""
    assert result("evaluate", run, "--calibrated")["metrics"]["calibration_fitted_here"]
    stored = json.loads((run / "calibration.json").read_text())
    (run / "calibration.json").write_text(json.dumps({key: stored[key] for key in stored if key != "fingerprint"}))
    assert "on these rows" in call("evaluate", run, "--calibrated")[0]  # also of an older run
    metrics = result("evaluate", run, rows, "--calibrated")["metrics"]
    assert not metrics["calibration_fitted_here"] and len(metrics["loss_change_interval"]) == 2
    add_error_analysis(RunFolder(run), device="cpu")
    assert "fitted on these same rows" in write_report(run).read_text(encoding="utf-8")
    result("calibrate", run, "--data", rows)
    add_error_analysis(RunFolder(run), device="cpu")
    assert f"rows of <bdi>{rows}</bdi>" in write_report(run).read_text(encoding="utf-8")


def test_slices_of_an_evaluation(run, rows, call, result, refused):
    metrics = result("evaluate", run, rows, "--slice", "stars", "--slice", "contains:paris")["metrics"]
    assert metrics["slice_metric"] == "accuracy"
    by_class, by_word = metrics["slices"]
    assert [group["value"] for group in by_class["groups"]] == ["sea", "town"]
    assert [group["value"] for group in by_word["groups"]] == ["with", "without"]
    for part in metrics["slices"]:
        correct = sum(group["rows"] * group["score"] for group in part["groups"])
        assert correct == pytest.approx(metrics["rows"] * metrics["accuracy"])
        assert all(group["low"] <= group["score"] <= group["high"] for group in part["groups"])
    assert "accuracy by contains:paris" in call("evaluate", run, rows, "--slice", "contains:paris")[0]
    assert "did you mean 'stars'" in refused("evaluate", run, rows, "--slice", "star")


def test_thresholds_change_decisions(run, rows, result):
    output = result("calibrate", run, "--data", rows, "--thresholds", "recall=1", "--positive", "sea")
    assert output["calibration"]["criterion"] == "recall=1"
    with rows.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    predicted = headstock.load(run, calibrated=True).predict([row["review"] for row in table])
    assert all(row["label"] == "sea" for row, true in zip(predicted, table, strict=True) if true["stars"] == "sea")
    plain = headstock.load(run).predict([row["review"] for row in table])
    assert any(row["label"] == "town" for row, true in zip(plain, table, strict=True) if true["stars"] == "sea")


def test_abstention(run, call, result):
    texts = [text for text, _ in REVIEWS[:3]]
    predictions = result("predict", run, *texts)["predictions"]
    confidence = [max(row["probabilities"].values()) for row in predictions]
    below = float(np.mean([min(confidence), max(confidence)]))
    abstaining = result("predict", run, *texts, "--abstain-below", below)["predictions"]
    assert [row["abstained"] for row in abstaining] == [value < below for value in confidence]
    assert all((row["label"] == "") == row["abstained"] for row in abstaining)
    assert {row["abstained"] for row in abstaining} == {True, False}
    out, _ = call("predict", run, *texts, "--abstain-below", below)
    assert out.count("(abstains)") == sum(row["abstained"] for row in abstaining)
    whole = result("predict", run, *texts, "--coverage", 1)["predictions"]
    assert not any(row["abstained"] for row in whole)


def test_wrong_calibrations_are_refused(run, rows, pretrained, refused):
    assert "classification" in refused("calibrate", pretrained[0])
    assert "town" in refused("calibrate", run, "--data", rows, "--thresholds", "f1", "--positive", "towns")
    assert "--thresholds" in refused("calibrate", run, "--data", rows, "--positive", "town")
    assert "balanced_accuracy" in refused("calibrate", run, "--data", rows, "--thresholds", "best")
    assert "not both" in refused("predict", run, "a", "--coverage", 0.9, "--abstain-below", 0.5)
    assert "coverage" in refused("predict", run, "a", "--coverage", 90)
    assert "abstain-below" in refused("predict", run, "a", "--abstain-below", 60)
    (run / "calibration.json").write_text('{"temperature": -1, "rows": 3, "file": "x"}')
    assert "temperature" in refused("predict", run, "a", "--calibrated")
    (run / "calibration.json").unlink()
    assert "headstock calibrate" in refused("predict", run, "a", "--calibrated")
