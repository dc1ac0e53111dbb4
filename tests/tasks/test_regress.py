"""Regression and ordinal tasks: numbers are predicted as numbers, from one text or two, and never become classes."""

import csv
import json
import random

import numpy as np
import pytest
import torch

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.tfidf import TfidfRegressor
from headstock.experiments.compare import compare
from headstock.experiments.trial_evaluation import LabelsOnly, add_error_analysis
from headstock.inference.evaluation import uncalibrated_metrics
from headstock.model.heads import OrdinalHead
from headstock.report.pages import write_report
from headstock.tasks.ordinal import Ordinal, OrdinalConfig, initial_cutpoints
from headstock.tasks.regress import Regress, RegressConfig
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.experiments.small import draw_two_arms

LIKES, FILLER = {"likes": 1.0, "finds": -1.0}, ["Anne", "Ben", "home", "Paris", "sees"]
SETTINGS = {"epochs": 5, "batch": 12, "lr": 2e-2, "tensorboard": False, "pool": "mean"}


def rated(count: int, name: str, *, shuffled: bool = False) -> list[tuple[str, float]]:
    """Texts whose rating is the number of words that like minus those that do not."""
    pick, rows = random.Random(name), []
    for number in range(count):
        words = pick.choices(list(LIKES), k=4)
        text = [*words, *pick.choices(FILLER, k=3), f"{name}{number}"]
        pick.shuffle(text)
        rows.append((" ".join(text), 20 + sum(LIKES[word] for word in words) / 2))
    labels = [label for _, label in rows]
    if shuffled:
        pick.shuffle(labels)
    return [(text, label) for (text, _), label in zip(rows, labels, strict=True)]


def write_rows(path, rows, header=("text", "label")):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rated")
    return {
        name: write_rows(folder / f"{name}.csv", rated(count, name)) for name, count in (("train", 96), ("test", 60))
    }


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stock") / "run"
    headstock.pretrain(corpus, out=out, settings=TINY)
    return out


@pytest.fixture(scope="module")
def regressor(stock, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("regressor") / "run"
    return out, headstock.finetune(stock, **files, task="regress", out=out, settings=SETTINGS)


@pytest.fixture(scope="module")
def rater(stock, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("rater") / "run"
    return out, headstock.finetune(stock, **files, task="ordinal", out=out, settings=SETTINGS)


def records(labels, **columns):
    columns = columns or {"text": [f"text {i}" for i in range(len(labels))]}
    return Records("f.csv", list(range(2, len(labels) + 2)), columns | {"label": list(labels)})


# Regression


def test_it_learns_what_shuffled_labels_do_not_teach(regressor, stock, files, tmp_path):
    out, results = regressor
    test = results["test"]
    assert results["headline"] == "pearson" and test["pearson"] > 0.6 and test["r2"] > 0.2
    assert test["intervals"]["pearson"][0] <= test["pearson"] <= test["intervals"]["pearson"][1]
    config = json.loads((out / "config.json").read_text())["task"]
    assert config["mean"] == pytest.approx(20, abs=0.5) and config["std"] == pytest.approx(1, abs=0.3)
    wrong = {**files, "train": write_rows(tmp_path / "wrong.csv", rated(96, "train", shuffled=True))}
    control = headstock.finetune(stock, **wrong, task="regress", out=tmp_path / "run", settings=SETTINGS)
    assert control["test"]["r2"] < 0.1


def test_its_loss_is_the_squared_error_of_standardized_labels(regressor):
    pipeline = headstock.load(regressor[0], device="cpu")
    task, rows = pipeline.task, records(["18", "-100", "22.5"])  # -100 marks padding elsewhere
    data = task.prepare(rows)
    batch = task.examples(data, length=pipeline.length).batch([0, 1, 2])
    values = np.array([row["label"] for row in pipeline.predict(rows.texts)])
    expected = (((values - [18, -100, 22.5]) / task.config.std) ** 2).sum()
    with torch.no_grad():
        losses = task.losses(pipeline.model.eval(), batch)
    assert float(losses["label"]) == pytest.approx(expected, rel=1e-3) and task.counts(batch) == {"label": 3}


def test_it_predicts_and_is_evaluated(regressor, files, call, tmp_path):
    out, _ = call("evaluate", regressor[0], files["test"], "--json")
    metrics = json.loads(out.splitlines()[-1])["metrics"]
    assert metrics["pearson"] == pytest.approx(regressor[1]["test"]["pearson"], abs=1e-6)
    call("predict", regressor[0], "--file", files["test"], "--out", tmp_path / "p.csv", "--with", "text")
    with (tmp_path / "p.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    true = [label for _, label in rated(60, "test")]
    assert np.corrcoef([float(row["label"]) for row in rows], true)[0, 1] == pytest.approx(metrics["pearson"], abs=1e-4)


def test_its_report_and_card_show_numbers(regressor):
    add_error_analysis(RunFolder(regressor[0]), device="cpu")
    mistakes = RunFolder(regressor[0]).results()["details"]["mistakes"]
    errors = [abs(float(row["predicted"]) - float(row["label"])) for row in mistakes]
    assert errors == sorted(errors, reverse=True) and mistakes[0]["tokens"]
    page = write_report(regressor[0]).read_text(encoding="utf-8")
    assert "Pearson r" in page and "Predictions against labels" in page
    card = (regressor[0] / "README.md").read_text(encoding="utf-8")
    assert "MAE" in card and "labels 18 to 22" in card


def test_two_texts_are_read_as_a_pair(stock, tmp_path):
    pick = random.Random(0)
    rows = [(f"{a} {i}", f"{b} {i}", 5.0 * (a == b)) for i in range(24) for a, b in [pick.choices(FILLER, k=2)]]
    file = write_rows(tmp_path / "pairs.csv", rows, ("text", "text_b", "label"))
    results = headstock.finetune(
        stock, train=file, task="regress", out=tmp_path / "run", settings=SETTINGS | {"epochs": 1}
    )
    assert results["valid"]["rows"] == 2  # stratified by quantiles: no label need occur twice
    pipeline = headstock.load(tmp_path / "run", device="cpu")
    assert pipeline.task.is_pair and len(pipeline.predict([("Anne", "Ben")])) == 1
    with pytest.raises(UserError, match="text_b"):
        pipeline.evaluate(write_rows(tmp_path / "single.csv", rated(4, "one")))
    single = headstock.finetune(
        stock, train=file, task="regress", out=tmp_path / "one", settings=SETTINGS | {"epochs": 1, "pair": False}
    )
    assert single["classes"] == [] and not headstock.load(tmp_path / "one", device="cpu").task.is_pair


@pytest.mark.parametrize(
    ("labels", "fact"),
    [(["1", "good"], "f.csv:3: label 'good' is not a number"), (["1,5", "2"], "point"), (["nan", "2"], "not a number")],
)
def test_labels_that_are_no_numbers_are_refused(labels, fact):
    with pytest.raises(UserError, match=fact):
        Regress.infer_settings(RegressConfig(), records(labels))


def test_settings_come_from_the_labels():
    config = Regress.infer_settings(RegressConfig(), records(["1", "2", "3.5"]))
    assert (config.lowest, config.highest, config.integers, config.pair) == (1.0, 3.5, False, False)
    assert Regress.infer_settings(RegressConfig(), records(["1", "2.0"])).integers
    with pytest.raises(UserError, match="nothing to learn"):
        Regress.infer_settings(RegressConfig(), records(["3", "3.0"]))


def test_kappa_is_that_of_rounded_predictions_in_range():
    task = Regress(Regress.infer_settings(RegressConfig(), records(["1", "3", "5"])), None)
    data = task_data(np.array([1.0, 3.0, 5.0, 4.0]))
    metrics = task.row_metrics(data, [np.array([value]) for value in (0.2, 3.4, 9.0, 4.4)])
    assert metrics["quadratic_kappa"].total() == pytest.approx(1.0)
    assert metrics["mae"].total() == pytest.approx((0.8 + 0.4 + 4 + 0.4) / 4)


def task_data(labels):
    from headstock.experiments.trial_evaluation import LabelsOnly

    return LabelsOnly(labels)


# Ordinal


def test_ordinal_probabilities_are_those_of_the_cumulative_link():
    head = OrdinalHead(3, (-1.0, 0.5, 2.0)).eval()
    vectors = torch.randn(5, 3) * 10
    score = head.score(vectors)
    cumulative = torch.cat([torch.zeros(5, 1), torch.sigmoid(head.thresholds - score), torch.ones(5, 1)], 1)
    assert torch.allclose(head(vectors).exp(), cumulative.diff(dim=1), atol=1e-6)
    assert torch.allclose(head(vectors * 100).logsumexp(1), torch.zeros(5), atol=1e-4)  # also far out
    with torch.no_grad():
        head.log_gaps -= 3.0
    assert (head.thresholds.diff() > 0).all()


def test_initial_thresholds_give_the_frequencies_of_the_classes():
    counts = np.array([10, 0, 70, 20])
    head = OrdinalHead(2, initial_cutpoints(counts))
    shares = head(torch.zeros(1, 2)).exp()[0].detach().numpy()
    assert np.abs(shares - counts / 100).max() < 0.02 and (shares > 0).all()
    with pytest.raises(UserError, match="must increase"):
        OrdinalConfig(cutpoints=(1.0, 0.0))


def test_ratings_are_valid_and_near_the_true_ones(rater):
    out, results = rater
    test = results["test"]
    assert results["headline"] == "quadratic_kappa" and test["quadratic_kappa"] > 0.5
    (prediction,) = headstock.load(out, device="cpu").predict(["likes likes likes likes"])
    classes = results["classes"]
    assert classes == ["18.0", "19.0", "20.0", "21.0", "22.0"] and prediction["label"] in classes
    assert 18 <= prediction["expected"] <= 22 and sum(prediction["probabilities"].values()) == pytest.approx(
        1, abs=1e-4
    )
    assert test["mae"] < 1 and "accuracy" in test


def test_all_metrics_follow_the_decision_thresholds():
    task = Ordinal(OrdinalConfig(classes=("1", "2", "3")), None)
    data, outputs = LabelsOnly(np.array([2, 2, 0])), [np.array([0.5, 0.1, 0.4])] * 2 + [np.array([0.8, 0.15, 0.05])]
    assert task.row_metrics(data, outputs)["mae"].total() == pytest.approx(4 / 3)
    task.thresholds = (0.7, 0.5, 0.3)
    metrics = task.row_metrics(data, outputs)
    assert metrics["mae"].total() == 0 and metrics["quadratic_kappa"].total() == pytest.approx(1)
    assert uncalibrated_metrics(task, data, outputs, outputs, fitted_here=True)["uncalibrated"]["mae"] > 1
    assert task.thresholds == (0.7, 0.5, 0.3)


def test_ordered_words_need_their_order():
    words = records(["low", "high", "mid", "low"])
    with pytest.raises(UserError, match="order="):
        Ordinal.check_training_labels(OrdinalConfig(), words)
    config = Ordinal.infer_settings(OrdinalConfig(order=("low", "mid", "high")), words)
    assert config.classes == ("low", "mid", "high") and Ordinal(config, None).levels.tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="--task regress"):
        Ordinal.check_training_labels(OrdinalConfig(), records([f"{i / 10}" for i in range(50)]))


# Comparisons


def test_tfidf_ridge_beats_the_mean_unless_labels_are_shuffled():
    errors = {}
    for shuffled in (False, True):
        train, test = rated(96, "train", shuffled=shuffled), rated(60, "test")
        texts, labels = ([row[i] for row in test] for i in (0, 1))
        model = TfidfRegressor().fit(*zip(*train, strict=True), texts, np.array(labels), seed=0)
        errors[shuffled] = np.mean((model.outputs(texts)[:, 0] - labels) ** 2) / np.var(labels)
    assert errors[False] < 0.6 and errors[True] > 0.8


def test_arms_are_compared_by_an_error(stock, files, tmp_path):
    settings = {"epochs": 1, "least_steps": 2, "batch": 8, "metric": "mae"}
    results = compare(
        [stock], **files, task="regress", labels=[24], seeds=2, settings=settings, out=tmp_path / "out", device="cpu"
    )
    scores = {row["arm"]: row["score"] for row in results["summary"]}
    assert results["metric"] == "mae" and results["better"] == "lower" and results["majority"] is None
    assert set(scores) == {"scratch", "pretrained", "frozen", "tfidf"} and all(score > 0 for score in scores.values())
    assert all(0 < cell["valid_score"] < 5 for cell in results["cells"])  # by the same metric in every arm
    units = [cell["loss"] / cell["rmse"] ** 2 for cell in results["cells"]]
    assert units == pytest.approx([units[0]] * len(units), rel=1e-4)  # those of all training rows
    assert "MAE" in results["verdicts"][0] and "points" not in results["verdicts"][0]
    assert results["data"]["train"]["labels"]["highest"] <= 22
    assert "lower is better" in write_report(draw_two_arms(tmp_path / "out")).read_text(encoding="utf-8")


def test_every_arm_is_validated_by_the_metric_of_the_task(stock, files, tmp_path):
    """Without a test file, the validation rows are the evaluation rows."""
    options = {"task": "ordinal", "arms": ["tfidf", "prompt"], "labels": [24], "seeds": 1, "device": "cpu"}
    results = compare([stock], train=files["train"], out=tmp_path / "out", **options)
    for cell in results["cells"]:
        assert cell["valid_score"] == pytest.approx(cell["quadratic_kappa"], abs=1e-4)
        assert cell["valid_score"] != pytest.approx(cell["accuracy"], abs=1e-4)


# Export


def test_transformers_predicts_the_same_value(tmp_path):
    transformers = pytest.importorskip("transformers")
    from headstock.interop import export_run
    from tests.interop.small import small_run, some_texts
    from tests.interop.test_export import BERT

    task = {
        "name": "regress",
        "pool": "cls",
        "opening": "cls",
        "closed": True,
        "dense": "tanh",
        "mean": 40.0,
        "std": 7.0,
    }
    run = small_run(tmp_path / "run", BERT, task)
    export_run(run, tmp_path / "exported")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert model.config.problem_type == "regression" and model.config.num_labels == 1
    text = some_texts(1, seed=3)[0][:12]
    (prediction,) = headstock.load(run.path, device="cpu").predict([text])
    with torch.no_grad():
        value = model(**tokenizer(text, return_tensors="pt")).logits.item()
    assert value == pytest.approx(prediction["label"], abs=1e-3) and abs(value) > 1


def test_an_exported_graph_outputs_the_value(regressor):
    pipeline = headstock.load(regressor[0], device="cpu")
    task, spec = pipeline.task, pipeline.task.graph_spec()
    batch = task.examples(task.prepare(records(["18"])), length=pipeline.length).batch([0])
    with torch.no_grad():
        value = task.graph_outputs(pipeline.model.eval(), batch)
    assert spec.kind == "regression" and spec.outputs == ("value",) and value.shape == (1, 1)
    assert value.item() == pytest.approx(pipeline.predict(["text 0"])[0]["label"], rel=1e-4)
