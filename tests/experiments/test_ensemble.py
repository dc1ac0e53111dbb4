"""Ensembles of different runs: fitted weights, honest scores, predictions, and teachers of a student."""

import json
import shutil

import numpy as np
import pytest

import headstock
from headstock.data.labelled_texts import read_records
from headstock.errors import UserError
from headstock.experiments.distil import distil
from headstock.experiments.ensemble import ensemble, load_ensemble
from headstock.experiments.ensemble_weights import combine, cross_fitted
from headstock.experiments.sweep import sweep
from headstock.intervals import item_difference
from headstock.train.run_folder import RunFolder
from tests.experiments.small import make_rows, read_rows, write_rows

QUICK = {"epochs": 3, "least_steps": 0, "batch": 16, "lr": 1e-2}


@pytest.fixture(scope="module")
def lstm(corpus, tmp_path_factory):
    """A pretrained run of another family with another tokenizer."""
    out = tmp_path_factory.mktemp("lstm") / "run"
    sizes = {"depth": 1, "width": 16, "vocabulary": 280, "batch": 8, "steps": 4, "tensorboard": False, "length": 32}
    headstock.pretrain(corpus, out=out, preset="lstm-nano", settings=sizes)
    return out


@pytest.fixture(scope="module")
def members(stock, lstm, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    for name, source in {"transformer": stock, "lstm": lstm}.items():
        headstock.finetune(source, train=files["train"], valid=files["valid"], out=folder / name, settings=QUICK)
    return [folder / "transformer", folder / "lstm"]


@pytest.fixture(scope="module")
def mixed(members, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("ensemble") / "out"
    return ensemble(members, **files, tfidf=True, out=out), out


def test_members_of_different_families_and_tfidf_are_combined(mixed, members, files):
    results, out = mixed
    assert [member["kind"] for member in results["members"]][:2] == ["transformer", "recurrent"]
    assert results["members"][2]["name"] == "tfidf" and results["members"][2]["run"] is None
    rows, labels = read_records(files["test"]), [row["label"] for row in read_rows(files["test"])]
    parts = [headstock.load(run).probabilities(rows) for run in members]
    loaded = load_ensemble(out)
    tfidf = loaded.member_probabilities(rows)["tfidf"]
    weights = np.array([member["weight"] for member in results["members"]])
    expected = combine([*parts, tfidf], weights)
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    predicted = [[line["probabilities"][name] for name in results["classes"]] for line in lines]
    np.testing.assert_allclose(predicted, expected, atol=2e-5)
    np.testing.assert_allclose(loaded.probabilities(rows), expected, atol=1e-6)
    right = [line["label"] == label for line, label in zip(lines, labels, strict=True)]
    assert results["test"]["ensemble"]["mean"] == pytest.approx(np.mean(right))
    own = [np.array(results["classes"])[part.argmax(1)] == labels for part in (*parts, tfidf)]
    assert [member["test"]["mean"] for member in results["members"]] == pytest.approx([part.mean() for part in own])
    gain = results["test"]["gain"]
    assert gain["mean"] == pytest.approx(np.mean(right) - max(part.mean() for part in own))
    assert gain["low"] <= gain["mean"] <= gain["high"]
    assert results == json.loads((out / "results.json").read_text())


def test_weights_of_a_row_are_fitted_on_other_rows():
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, 40)
    parts = [(np.eye(2)[truth] + 2 * random.dirichlet([1, 1], 40)) / 3 for _ in range(2)]  # better than chance
    before = cross_fitted(parts, truth, seed=0)
    changed = truth.copy()
    changed[7] = 1 - truth[7]
    after = cross_fitted(parts, changed, seed=0)
    same = (before == after).all(1)
    assert same[7] and same.sum() == 8  # its own fold alone


def test_gains_are_paired_by_row():
    random = np.random.default_rng(0)
    first = (random.random(400) < 0.8).astype(float)
    second = first.copy()
    second[np.flatnonzero(first)[:12]] = 0  # wrong on 12 further rows
    gain = item_difference(first, second)
    assert gain.mean == pytest.approx(0.03) and 0.01 < gain.low < gain.high < 0.05
    shuffled = item_difference(first, random.permutation(second))
    assert shuffled.high - shuffled.low > 2 * (gain.high - gain.low)  # the control: pairs broken
    assert item_difference(first, first)[1:] == (-3 / 400, 3 / 400)  # the rule of three


def test_cross_validated_sweeps_are_combined_by_their_out_of_fold_predictions(call, stock, lstm, files, tmp_path):
    rows = {"train": files["train"], "valid": files["valid"]}
    for name, source in {"a": stock, "b": lstm}.items():
        sweep(run=source, **rows, grid={"lr": [1e-2]}, folds=2, settings=QUICK | {"epochs": 1}, out=tmp_path / name)
    options = ["--train", files["train"], "--valid", files["valid"], "--tfidf", "--out", tmp_path / "out"]
    unlabelled = tmp_path / "test.csv"
    unlabelled.write_text("text\nAnne likes home\nBen finds the sea\n")
    shutil.move(tmp_path / "b", tmp_path / "moved")
    folders = [tmp_path / "a", tmp_path / "moved"]
    out, _ = call("ensemble", *folders, *options, "--test", unlabelled, "--json")
    results = json.loads(out.splitlines()[-1])
    assert results["fitted_on"].startswith("out-of-fold") and results["valid"]["rows"] == 80
    lines = [json.loads(line) for line in next((tmp_path / "a" / "out_of_fold").iterdir()).read_text().splitlines()]
    right = np.mean([line["label"] == line["true"] for line in lines])
    assert results["members"][0]["valid"]["mean"] == pytest.approx(right)
    assert "test" not in results and len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) == 2
    page = (tmp_path / "out" / "report.html").read_text()
    assert "80 out-of-fold rows" in page and "gain over the best member" in page
    with pytest.raises(UserError, match="was cross-validated on other rows"):
        ensemble(folders, train=files["train"], out=tmp_path / "other")
    with pytest.raises(UserError, match="either all cross-validated sweeps or all runs"):
        ensemble([folders[0], stock], **rows, out=tmp_path / "other")


def test_a_student_learns_from_an_ensemble_with_its_weights(mixed, stock, files, corpus, tmp_path):
    results, out = mixed
    common = {"text": corpus, "rows": 20, "train": files["train"], "valid": files["valid"]}
    settings = {"epochs": 1, "least_steps": 0}
    student = distil(stock, teachers=[out], **common, out=tmp_path / "student", settings=settings)
    teachers = student["distillation"]["teachers"]
    assert [(t["name"], t["weight"]) for t in teachers] == [
        (m["name"], pytest.approx(m["weight"], abs=1e-4)) for m in results["members"]
    ]
    with pytest.raises(UserError, match="the only teacher"):
        distil(stock, teachers=[out, results["members"][0]["run"]], **common, out=tmp_path / "other")
    changed = shutil.copytree(out, tmp_path / "changed")
    text = json.loads((changed / "results.json").read_text())
    text["settings"]["train"] = str(write_rows(tmp_path / "train.csv", make_rows(20, name="other")))
    (changed / "results.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match="have changed since its weights were fitted"):
        load_ensemble(changed)
    (changed / "results.json").write_text(json.dumps(text | {"members": [{"name": "a"}]}))
    with pytest.raises(UserError, match="does not describe an ensemble"):
        load_ensemble(changed)


def test_members_that_do_not_fit_are_refused(members, stock, files, tmp_path):
    rows = {"train": files["train"], "valid": files["valid"], "out": tmp_path / "out"}
    for names, options, message in (
        ([members[0]], {}, "two members or more"),
        ([tmp_path / "missing"], {}, "missing: no such run"),
        ([members[0], tmp_path / "missing"], {}, "missing: no such run"),
        ([members[0], members[0]], {}, "given twice"),
        ([members[0], stock], {}, "has no classification head"),
        (members, {"valid": None}, "--valid: is missing"),
    ):
        with pytest.raises(UserError, match=message):
            ensemble(names, **rows | options)
    other = write_rows(tmp_path / "other.csv", [(text, label.upper()) for text, label in make_rows(20, name="other")])
    headstock.finetune(stock, train=other, out=tmp_path / "other", settings=QUICK | {"epochs": 1})
    with pytest.raises(UserError, match="its classes are BAD, GOOD"):
        ensemble([members[0], tmp_path / "other"], **rows)
    assert not RunFolder(tmp_path / "out").path.exists()
