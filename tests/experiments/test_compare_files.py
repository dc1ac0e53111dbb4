"""Comparisons with leaked or unlabelled test rows, several labels per text, and recipes."""

import json

import numpy as np
import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.compare import compare
from headstock.experiments.comparison_summary import majority_notes
from headstock.experiments.terminal_tables import comparison_table
from headstock.train.run_folder import RunFolder
from tests.experiments.small import (
    SCHEMA,
    SETTINGS,
    SMALL,
    fail_if_trained,
    make_rows,
    modification_times,
    read_rows,
    schema_errors,
    with_corpus,
    without_timings,
    write_rows,
)

# Texts of the pretraining corpus


@pytest.fixture
def leaky(stock, corpus, files, tmp_path):
    """A run whose corpus contains three of the test texts, one in upper case."""
    texts = [row["text"] for row in read_rows(files["test"])]
    leaked = [f"Before. {texts[2]}! After.", texts[7].upper(), texts[39]]
    path = tmp_path / "leaky.txt"
    path.write_text(corpus.read_text(encoding="utf-8") + "\n\n" + "\n\n".join(leaked), encoding="utf-8")
    return with_corpus(stock, tmp_path / "leaky", path)


def test_test_texts_that_were_pretrained_on_are_excluded(leaky, files, tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    results = compare(leaky, **files, out=tmp_path / "out", arms=["pretrained", "tfidf"], **SMALL)
    (leakage,) = results["leakage"]
    assert (leakage["checked"], leakage["why"], leakage["excluded"]) == (True, None, True)
    assert (leakage["exact"], leakage["near"], leakage["documents"], leakage["tested"]) == (3, 0, 303, 40)
    assert sorted(example["place"] for example in leakage["examples"]) == sorted(
        f"{files['test']}:{line}" for line in (4, 9, 41)
    )
    assert all("leaky.txt:" in example["found"] for example in leakage["examples"])
    assert results["measured_rows"] == 37
    assert any(note.startswith("3 evaluation rows were excluded") for note in results["notes"])
    assert any("3 of 40 evaluation texts" in line and "excluded" in line for line in caplog.messages)
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").iterdir()]
    assert all(len(cell["probabilities"]) == 37 for cell in cells)
    assert schema_errors(json.loads(json.dumps(results)), SCHEMA) == []
    mistakes = {m["place"] for analysis in results["details"]["arms"].values() for m in analysis["mistakes"]}
    assert not mistakes & {example["place"] for example in leakage["examples"]}
    caplog.clear()
    again = compare(leaky, **files, out=tmp_path / "out", arms=["pretrained", "tfidf"], **SMALL)
    assert without_timings(again) == without_timings(results)
    assert not any("searching" in line for line in caplog.messages)  # the search is cached


def test_leaks_can_be_kept_or_the_search_skipped(leaky, files, tmp_path, caplog):
    options = {"arms": ["pretrained"], "out": tmp_path / "out", **SMALL}
    kept = compare(leaky, **files, **options, leakage="keep")
    assert (kept["leakage"][0]["exact"], kept["leakage"][0]["excluded"], kept["measured_rows"]) == (3, False, 40)
    caplog.set_level("INFO", logger="headstock")
    skipped = compare(leaky, **files, **options, leakage="skip")
    (leakage,) = skipped["leakage"]
    assert not leakage["checked"] and leakage["exact"] == 0 and skipped["measured_rows"] == 40
    assert leakage["why"] == "the search was skipped"
    assert not any("searching" in line for line in caplog.messages)
    assert schema_errors(json.loads(json.dumps(skipped)), SCHEMA) == []
    assert [c["accuracy"] for c in skipped["cells"]] == [c["accuracy"] for c in kept["cells"]]


def test_a_test_set_that_leaked_completely_is_refused(stock, files, tmp_path):
    path = tmp_path / "leaky.txt"
    path.write_text("\n\n".join(row["text"] for row in read_rows(files["test"])), encoding="utf-8")
    run = with_corpus(stock, tmp_path / "leaky", path)
    with pytest.raises(UserError, match="none is left to evaluate on"):
        compare(run, **files, out=tmp_path / "out", arms=["frozen"], **SMALL, callbacks=[fail_if_trained])


def test_missing_pretraining_text_is_reported(stock, files, tmp_path, caplog):
    caplog.set_level("INFO", logger="headstock")
    run = with_corpus(stock, tmp_path / "moved", tmp_path / "gone.txt")
    results = compare(run, **files, out=tmp_path / "out", arms=["frozen"], **SMALL)
    (leakage,) = results["leakage"]
    assert not leakage["checked"] and "gone.txt" in leakage["why"]
    assert results["measured_rows"] == 40
    assert any("cannot search" in line and "gone.txt" in line for line in caplog.messages)
    assert any("not searched" in note and str(run) in note for note in results["notes"])
    assert schema_errors(json.loads(json.dumps(results)), SCHEMA) == []


def test_training_texts_in_the_test_set_are_counted(stock, files, tmp_path):
    rows = [tuple(row.values()) for row in [*read_rows(files["test"]), *read_rows(files["train"])[:3]]]
    test = write_rows(tmp_path / "test.csv", rows)
    results = compare(train=files["train"], test=test, valid=files["valid"], out=tmp_path, arms=["tfidf"], **SMALL)
    assert (results["train_overlap"], results["measured_rows"]) == (3, 43)


# Files of other kinds


def test_rows_takes_a_stratified_sample(files, tmp_path):
    results = compare(**files, out=tmp_path, arms=["tfidf"], rows=10, **SMALL)
    assert results["measured_rows"] == 10
    assert any("10 rows" in note for note in results["notes"])
    confusion = np.array(results["details"]["arms"]["tfidf"]["confusion"])
    class_counts = np.array(list(results["data"]["test"]["classes"].values()))
    assert confusion.sum(1) == pytest.approx(class_counts / 4, abs=1)
    all_rows = compare(**files, out=tmp_path, arms=["tfidf"], rows=1000, **SMALL)
    assert all_rows["measured_rows"] == 40
    assert not any("sample" in note for note in all_rows["notes"])


def test_unlabelled_test_rows_are_predicted_in_order(stock, files, tmp_path):
    rows = read_rows(files["test"])
    test = write_rows(tmp_path / "test.csv", [(row["text"],) for row in rows], ("text",))
    arms, settings = ["pretrained", "tfidf"], SETTINGS | {"lr": 0.02, "epochs": 12}
    results = compare(stock, **files | {"test": test}, out=tmp_path, arms=arms, labels=[24], seeds=2, settings=settings)
    assert (results["measured_on"], results["measured_rows"]) == ("valid", 20)
    assert results["data"]["test"] == {"file": str(test), "rows": 40, "classes": None}
    assert any("optimistic" in note for note in results["notes"])
    for arm in arms:
        cells = [json.loads((tmp_path / "cells" / f"{arm}-24-{seed}.json").read_text()) for seed in (0, 1)]
        best = max(cells, key=lambda cell: cell["valid_score"])
        lines = (tmp_path / "predictions" / f"{arm}.jsonl").read_text().splitlines()
        predictions = [json.loads(line) for line in lines]
        assert predictions == best["predicted"]
        predicted, true = np.array([[row["label"] for row in table] for table in (predictions, rows)])
        assert np.mean(predicted == true) > 0.75 > np.mean(predicted[::-1] == true)
    first = json.loads((tmp_path / "cells" / "pretrained-24-0.json").read_text())["predicted"]
    again = headstock.load(tmp_path / "runs" / "pretrained-24").predict([row["text"] for row in rows])
    assert [row["probabilities"] for row in again] == [pytest.approx(row["probabilities"], abs=1e-4) for row in first]


@pytest.fixture(scope="module")
def multilabel_files(tmp_path_factory):
    """Rows with none, one or two of three classes."""
    folder = tmp_path_factory.mktemp("multilabel")
    labels = ["a", "b", "c", "a|b", "b|c"]
    rows = {
        name: [(text, labels[i % 5]) for i, (text, _) in enumerate(make_rows(count, name=name))]
        for name, count in {"train": 40, "valid": 20, "test": 30}.items()
    }
    return {name: write_rows(folder / f"{name}.csv", split) for name, split in rows.items()}


def test_several_labels_per_text(stock, multilabel_files, tmp_path):
    settings = SETTINGS | {"separator": "|"}
    results = compare(stock, **multilabel_files, out=tmp_path, labels=[16], seeds=2, settings=settings)
    assert [arm["name"] for arm in results["arms"]] == ["scratch", "pretrained", "frozen"]  # TF-IDF does not apply
    assert results["classes"] == ["a", "b", "c"]
    truth = np.array([[name in row["label"] for name in "abc"] for row in read_rows(multilabel_files["test"])])
    for cell in results["cells"]:
        stored = json.loads((tmp_path / "cells" / f"{cell['arm']}-16-{cell['seed']}.json").read_text())
        predicted = np.array(stored["probabilities"]) > 0.5
        assert cell["accuracy"] == np.mean((predicted == truth).all(1))
        assert cell["ece"] is None
    for row in results["summary"]:
        accuracies = [cell["accuracy"] for cell in results["cells"] if cell["arm"] == row["arm"]]
        assert row["accuracy"] == pytest.approx(np.mean(accuracies))
    assert results["details"] == {}
    prediction = headstock.load(tmp_path / "runs" / "pretrained-16").predict("Anne sees")[0]
    assert set(prediction["probabilities"]) == set("abc")


def test_tfidf_refuses_several_labels_per_text(stock, multilabel_files, tmp_path):
    options = {"arms": ["tfidf"], **SMALL, "settings": SETTINGS | {"separator": "|"}, "callbacks": [fail_if_trained]}
    with pytest.raises(UserError, match="remove tfidf from --arms"):
        compare(stock, **multilabel_files, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# Recipes

RECIPE = """
[compare]
train = "{train}"
valid = "{valid}"
test = "{test}"
arms = ["scratch", "eager", "pretrained"]
labels = [8]
seeds = 2

[finetune]
epochs = 1
least_steps = 2
batch = 8
pool = "mean"

[arms.eager]
kind = "pretrained"
lr = 0.05
"task.dropout" = 0.0

[pretrain]
preset = "classic"
steps = 4

[pretrain.data]
corpus = ["{corpus}"]

[pretrain.tokenizer]
vocabulary = 300

[pretrain.model]
depth = 1
width = 16
heads = 2
hidden = 16
context = 32

[pretrain.train]
batch = 4
tensorboard = false
"""


def test_a_recipe_pretrains_and_compares(corpus, files, tmp_path):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    recipe.write_text(RECIPE.format(corpus=corpus, **files))
    results = compare(out=out, config_file=recipe)
    assert [arm["name"] for arm in results["arms"]] == ["scratch", "eager", "pretrained"]
    assert results["arms"][1]["settings"] == {"lr": 0.05, "task.dropout": 0.0}
    assert {arm["run"] for arm in results["arms"]} == {str(out / "stock")}
    stock = RunFolder(out / "stock").config()
    assert (stock["model"]["depth"], stock["model"]["norm"], stock["train"]["steps"]) == (1, "post", 4)
    configs = [RunFolder(out / "runs" / f"{name}-8").config() for name in ("scratch", "eager", "pretrained")]
    assert [config["train"]["lr"] for config in configs] == [1e-3, 0.05, 3e-4]
    assert [config["task"]["dropout"] for config in configs] == [0.1, 0.0, 0.1]
    assert [config["transfer"]["init"] for config in configs] == ["scratch", "pretrained", "pretrained"]
    assert {config["task"]["pool"] for config in configs} == {"mean"}
    assert results["leakage"][0]["checked"]
    assert schema_errors(json.loads(json.dumps(results)), SCHEMA) == []
    assert results["settings"]["pretrain.model"]["depth"] == 1

    before = modification_times(out)
    again = compare(out=out, config_file=recipe, callbacks=[fail_if_trained])
    assert without_timings(again) == without_timings(results)
    assert modification_times(out) == before
    recipe.write_text(recipe.read_text().replace("depth = 1", "depth = 2"))
    with pytest.raises(UserError, match=r"stock: .*model.depth is 1, not 2"):
        compare(out=out, config_file=recipe, callbacks=[fail_if_trained])


# Warnings about rows


def test_an_arm_below_the_majority_class_is_reported(tmp_path, caplog):
    common = [(text, "good") for text, _ in make_rows(30, name="common")]
    rare = [(text, "bad") for text, _ in make_rows(10, name="rare")]
    rows = [*common, *rare, ("a text of nothing", "Goood"), (common[0][0], "bad"), (" ", "good")]
    file = write_rows(tmp_path / "rows.csv", rows, ("body", "stars"))
    caplog.set_level("INFO", logger="headstock")
    options = {"train": file, "valid": file, "test": file, "columns": {"text": "body", "label": "stars"}}
    with pytest.raises(UserError, match=r"rows.csv:44.*--skip-blank"):
        compare(**options, out=tmp_path / "out", arms=["tfidf"], seeds=2)
    results = compare(**options, out=tmp_path / "out", arms=["tfidf"], seeds=2, skip_blank=True)
    assert results["majority"] == {"class": "good", "accuracy": 30 / 42}
    for fact in ("1 blank row", "'Goood' (", "once", "more than one label"):
        assert any(fact in line for line in results["warnings"])
        assert any(line.startswith("warning: ") and fact in line for line in caplog.messages)
    summary = [{"arm": "tfidf", "labels": 9, "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}]
    summary += [{"arm": "frozen", "labels": 9, "accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.8}]
    summary += [{"arm": "pretrained", "labels": 9, "accuracy": 0.9, "accuracy_low": 0.8, "accuracy_high": 1.0}]
    below, unclear = majority_notes(results["majority"], summary)
    assert "TF-IDF" in below and "50.0%" in below and "71.4%" in below
    assert "frozen" in unclear and "not clearly" in unclear
    table = comparison_table(results)
    assert list(table.columns[0].cells)[-1] == "(majority class)"
    assert list(table.columns[1].cells)[-1] == "71.4"
