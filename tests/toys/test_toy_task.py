"""A new task is one file: a toy one goes through the whole product without touching another file.

Ordinal regression: the classes are ordered, and the head scores whether a text is above each of the thresholds between
them. N rows, T tokens, C classes.
"""

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.experiments.compare import compare
from headstock.experiments.trial_evaluation import add_error_analysis
from headstock.explain.prediction import explain_prediction
from headstock.model.batch import Batch, pad
from headstock.model.heads import ClassificationHead, pool
from headstock.report.pages import write_report
from headstock.tasks.base import TASKS
from headstock.tasks.labelled import EncodedRows, LabelledTask, Nouns, RowExamples, RowLocations
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.experiments.small import draw_two_arms

LEVELS = ("1", "2", "3")
WORDS = {"1": "finds", "2": "sees", "3": "likes"}


@dataclass(frozen=True)
class OrdinalConfig:
    classes: tuple[str, ...] = ()  # from the lowest to the highest


class RatedExamples(RowExamples):
    def __init__(self, task: "OrdinalRegression", data: EncodedRows, length: int):
        super().__init__(data)
        self.task, self.length = task, length
        self.lengths = np.array([min(length, len(tokens) + 1) for tokens in data.tokens])

    def batch(self, indices) -> Batch:
        tokens, padding = pad([[self.task.bos, *self.data.tokens[i]][: self.length] for i in indices], self.task.pad_id)
        labels = {} if self.data.labels is None else {"level": torch.from_numpy(self.data.labels[list(indices)])}
        return Batch(tokens, padding, labels=labels)


class OrdinalRegression(LabelledTask):
    Config = OrdinalConfig
    target = "label"
    title = "regression on ordered classes"
    nouns = Nouns("review", "review", "review", "wrongly rated reviews")
    primary_metric = "within_one"
    predicts_classes = True
    can_freeze_backbone = False

    def heads(self, backbone):
        return {"level": ClassificationHead(backbone.width, len(self.config.classes) - 1, dropout=0.0)}

    def columns_of(self, rows):
        return {"text": list(rows)}

    @classmethod
    def infer_settings(cls, config, records):
        return config if config.classes else replace(config, classes=tuple(sorted(set(records.labels))))

    def check(self, records):
        assert set(records.labels or ()) <= set(self.config.classes)

    def prepare(self, records, *, labelled=True):
        labels = None
        if labelled and records.labels is not None:
            labels = np.array([self.config.classes.index(label) for label in records.labels])
        return EncodedRows(self.tokenizer.encode_batch(records.display_texts), labels, RowLocations(records))

    def row_examples(self, data, length):
        return RatedExamples(self, data, length)

    def above(self, model, batch):
        """(N, C - 1) the scores of being above each threshold."""
        return model.heads["level"](pool(model(batch).hidden, batch.padding, "mean")).float()

    def class_scores(self, model, batch):
        """(N, C) log-probabilities: a class is above all lower thresholds and below the others."""
        above = self.above(model, batch)
        yes, no = F.logsigmoid(above), F.logsigmoid(-above)
        levels = range(len(self.config.classes))
        return torch.stack([yes[:, :k].sum(1) + no[:, k:].sum(1) for k in levels], 1).log_softmax(-1)

    def losses(self, model, batch, *, smoothing=0.0):
        scores, labels = self.class_scores(model, batch), batch.labels["level"]
        loss = F.nll_loss(scores, labels, ignore_index=-100, reduction="sum")
        return {"level": loss, "correct": (scores.argmax(-1) == labels).sum()}

    def score(self, sums, counts, *, size):
        rows = max(1, counts["level"])
        return {"loss": sums["level"] / rows, "accuracy": sums["correct"] / rows}

    def outputs(self, model, batch):
        return self.class_scores(model, batch).exp()

    def predictions(self, data, outputs) -> list[dict[str, Any]]:
        classes = self.config.classes
        return [
            {"label": classes[int(row.argmax())], "probabilities": dict(zip(classes, row.tolist(), strict=True))}
            for row in outputs
        ]

    def row_metrics(self, data, outputs):
        distance = np.abs(np.stack(outputs).argmax(1) - data.labels)
        ones = np.ones(len(distance))
        return {"within_one": ((distance <= 1).astype(float), ones), "accuracy": ((distance == 0).astype(float), ones)}

    def confidences(self, data, outputs):
        likely = np.stack(outputs)
        return likely.max(1), likely.argmax(1) == data.labels


@pytest.fixture(scope="module", autouse=True)
def registered():
    TASKS.names()
    TASKS.add("levels")(OrdinalRegression)
    yield
    del TASKS._classes["levels"]


def rows(count: int, name: str) -> list[str]:
    pick = random.Random(name)
    levels = [pick.choice(LEVELS) for _ in range(count)]
    return [
        json.dumps({"text": f"Ben {WORDS[level]} the sea {name} {i}", "label": level}) for i, level in enumerate(levels)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinal")
    for name, count in (("train", 60), ("valid", 24), ("test", 24)):
        (folder / f"{name}.jsonl").write_text("\n".join(rows(count, name)), encoding="utf-8")
    return {name: folder / f"{name}.jsonl" for name in ("train", "valid", "test")}


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stock") / "run"
    headstock.pretrain(corpus, out=out, settings=TINY)
    return out


@pytest.fixture(scope="module")
def learned(stock, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("learned") / "run"
    settings = {"epochs": 4, "batch": 8, "lr": 3e-3, "tensorboard": False}
    results = headstock.finetune(stock, **files, task="levels", out=out, settings=settings)
    return out, results


def test_it_is_fine_tuned_and_reported(learned):
    out, results = learned
    assert results["task"] == "levels" and results["headline"] == "within_one"
    assert 0 <= results["test"]["within_one"] <= 1
    add_error_analysis(RunFolder(out))
    details = RunFolder(out).results()["details"]
    assert details["calibration"]["bins"] and all(row["label"] in LEVELS for row in details["mistakes"])
    page = write_report(out).read_text(encoding="utf-8")
    assert "within one" in page and "reviews" in page


def test_it_predicts_and_is_evaluated(learned, files):
    loaded = headstock.load(learned[0], device="cpu")
    predictions = loaded.predict(["Ben likes the sea", "Ben finds the sea"])
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5) for row in predictions)
    metrics = loaded.evaluate(files["test"])
    assert metrics["within_one"] == pytest.approx(learned[1]["test"]["within_one"])
    assert metrics["intervals"]["within_one"][0] <= metrics["within_one"]


def test_the_command_line_prints_its_metrics(learned, files, call):
    out, _ = call("evaluate", learned[0], files["test"])
    assert "within one" in out and "accuracy" in out


def test_its_predictions_are_explained(learned):
    explanation = explain_prediction(headstock.load(learned[0], device="cpu"), ["Ben likes the sea"])
    assert explanation.kind == "class" and {name for name, _ in explanation.answers} == set(LEVELS)
    assert [token.token for token in explanation.tokens]


def test_it_is_exported(learned, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from headstock.interop.onnx import export_onnx

    result = export_onnx(RunFolder(learned[0]), tmp_path / "onnx")
    assert result["kind"] == "levels" and result["difference"] < 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    assert [one.name for one in session.get_outputs()] == ["logits"]
    assert json.loads((tmp_path / "onnx" / "model.json").read_text())["classes"] == list(LEVELS)


def test_it_is_compared(stock, files, tmp_path):
    settings = {"epochs": 1, "least_steps": 2, "batch": 8}
    results = compare(
        [stock], **files, task="levels", labels=[24], seeds=2, settings=settings, out=tmp_path / "out", device="cpu"
    )
    assert results["metric"] == "within_one"
    assert {row["arm"] for row in results["summary"]} >= {"scratch", "pretrained", "tfidf"}
    assert "within one" in write_report(draw_two_arms(tmp_path / "out")).read_text(encoding="utf-8")


def test_it_appears_in_the_web_page(learned):
    """With its own inputs and bars, though neither the page nor its API knows the task."""
    testclient = pytest.importorskip("fastapi.testclient", reason="needs headstock[serve]")
    from headstock.serve.app import create_app
    from headstock.serve.served_models import load_models
    from headstock.serve.settings import ServeSettings

    settings = ServeSettings()
    app = create_app(load_models([str(learned[0])], settings, device="cpu"), settings)
    with testclient.TestClient(app, base_url="http://127.0.0.1") as client:
        (run,) = client.get("/page/runs").json()["runs"]
        (widget,) = run["widgets"]
        assert widget["endpoint"] == "/v1/levels" and [field["name"] for field in widget["inputs"]] == ["text"]
        answer = client.post("/page/predict", json={"input": {"text": "Ben likes the sea"}}).json()
        (bars, *_) = answer["parts"]
        assert bars["kind"] == "bars" and [label for label, _ in bars["bars"]] == list(LEVELS)
        assert bars["selected"] == [answer["prediction"]["label"]]
