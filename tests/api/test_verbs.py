"""The functions of the API: data in memory, typed results, settings as keywords, reports and progress."""

import json
import logging

import pytest

import headstock
from headstock.errors import UserError
from tests.conftest import TINY

TEXTS = [f"{who} {verb} {what}." for who in ("Anne", "Ben") for verb in ("sees", "likes") for what in ("it", "Paris")]
HELD_OUT = ["Zoë is at home.", "Zoë likes the sea."]
LABELS = {"warm": "<b>", "dull": "neg"}
ROWS = [(f"A {word} film, take {take}.", label) for word, label in LABELS.items() for take in range(20)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> headstock.RunResult:
    out = tmp_path_factory.mktemp("runs") / "p"
    return headstock.pretrain(TEXTS * 20, valid=HELD_OUT, out=out, settings=TINY, steps=6, seed=1, report=True)


@pytest.fixture(scope="module")
def classifier(run) -> headstock.RunResult:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, columns=["review", "stars"])
    out, columns = run.run.parent / "f", {"text": "review", "label": "stars"}
    return headstock.finetune(
        run.run, train=frame, test=frame, columns=columns, out=out, epochs=1, lr=1e-3, report=True
    )


def test_a_pretrained_run(run):
    saved = json.loads((run.run / "results.json").read_text())
    assert run.steps == 6 == run["steps"]
    assert dict(run) == saved and json.loads(json.dumps(run.to_dict())) == saved
    assert run.task == "causal" and run.metrics == {k: saved["metrics"][k] for k in run.metrics} and run.test is None
    config = json.loads((run.run / "config.json").read_text())
    assert config["train"]["seed"] == 1 and config["model"]["depth"] == 2
    assert "headstock" in run.report.read_text(encoding="utf-8").lower()
    assert set(run.to_frame()["metric"]) == set(run.metrics)
    assert "<svg" in run._repr_html_() and "loss" in repr(run)


def test_a_run_on_texts_in_memory_can_be_resumed_and_evaluated(run):
    again = headstock.pretrain(TEXTS * 20, valid=HELD_OUT, out=run.run, resume=True)
    assert again.metrics == run.metrics
    with pytest.raises(UserError, match="corpus has changed"):
        headstock.pretrain(TEXTS * 19, out=run.run, resume=True)
    pipeline = run.load(device="cpu")
    assert pipeline.evaluate().value == pytest.approx(run.metrics["loss"], rel=1e-4)
    assert pipeline.evaluate(HELD_OUT).value == pytest.approx(run.metrics["loss"], rel=1e-4)
    assert pipeline.evaluate([{"text": "other words"}])["loss"] != run.metrics["loss"]


def test_a_frame_is_trained_on_predicted_and_evaluated(classifier):
    polars = pytest.importorskip("polars")
    assert classifier.task == "classify" and classifier.test is not None
    assert classifier["kind"] == "finetune" and "details" in classifier  # the error analysis
    assert {"valid", "test"} == set(classifier.to_frame()["split"])
    pipeline = classifier.load(device="cpu")
    frame = polars.DataFrame({"review": [text for text, _ in ROWS], "stars": [label for _, label in ROWS], "id": 0})
    predictions = pipeline.predict(frame)  # in the columns that the run was trained on
    assert predictions == pipeline.predict([text for text, _ in ROWS])
    assert predictions == pipeline.predict([{"text": text} for text, _ in ROWS])
    renamed = frame.rename({"review": "body"})
    assert pipeline.predict(renamed, columns={"text": "body"}) == predictions
    assert all(isinstance(row, headstock.ClassPrediction) for row in predictions)
    accuracy = sum(row.label == label for row, (_, label) in zip(predictions, ROWS, strict=True)) / len(ROWS)  # type: ignore[attr-defined]
    assert pipeline.evaluate(frame).value == pipeline.evaluate(ROWS).value == classifier.test["accuracy"] == accuracy
    evaluation = pipeline.evaluate()
    assert evaluation.metric == "accuracy" and evaluation.value == classifier.test["accuracy"]
    low, high = evaluation.intervals["accuracy"]
    assert low <= accuracy <= high
    with pytest.raises(UserError, match=r"rows\[0\]: no column 'text' \(columns: 'body'"):
        pipeline.predict(renamed)
    with pytest.raises(UserError, match=r"data\[1\]: column 'text' has no value .*skip_blank=True"):
        pipeline.evaluate([ROWS[0], (None, "neg")])
    with pytest.raises(UserError, match=r"slices=stars: .*no column"):  # in Python the keyword, not --slice
        pipeline.evaluate(ROWS, slices=["stars"])


def test_a_frame_of_predictions_has_inputs_and_index(classifier, tmp_path):
    pandas = pytest.importorskip("pandas")
    pipeline, texts = classifier.load(device="cpu"), [text for text, _ in ROWS[:3]]
    frame = pandas.DataFrame({"body": texts, "id": [7, 8, 9]}, index=pandas.Index(["a", "b", "c"], name="key"))
    predictions = pipeline.predict(frame, columns={"text": "body"})
    table = predictions.to_frame()
    assert list(table["body"]) == texts and "id" not in table and table.index.equals(frame.index)
    assert list(table["label"]) == [row["label"] for row in pipeline.predict(texts)]
    assert list(predictions[1:].to_frame().index) == ["b", "c"] and texts[1] in predictions[1:]._repr_html_()
    assert list(pipeline.predict(texts).to_frame()["text"]) == texts
    file = tmp_path / "rows.csv"
    file.write_text("text\n" + "\n".join(f'"{text}"' for text in texts), encoding="utf-8")
    assert pipeline.predict(file).to_frame()["text"].tolist() == texts
    for name in (str(file), "missing.csv"):
        with pytest.raises(UserError, match=r"is the name of a file; pass Path\("):
            pipeline.predict(name)
    assert len(pipeline.predict([str(file)])) == len(pipeline.predict("see rows.csv")) == 1


def test_errors_name_keywords_in_python_and_options_in_a_command(run, tmp_path, call):
    with pytest.raises(UserError, match=r"name a file with train$"):
        headstock.finetune(run.run, out=tmp_path / "new")
    assert "name a file with --train" in call("finetune", run.run, "--out", tmp_path / "new", code=2)[1]
    with pytest.raises(UserError, match="use resume=True to continue it, overwrite=True to replace it"):
        headstock.pretrain(TEXTS, out=run.run, settings=TINY)
    with pytest.raises(UserError, match=r"^labels=50: .* has only"):
        headstock.compare(run.run, train=ROWS, out=tmp_path / "c", labels=50)
    with pytest.raises(UserError, match=r"^device=gpu: must be"):
        headstock.load(run.run, device="gpu")


def test_a_comparison(run, tmp_path):
    out = tmp_path / "c"
    result = headstock.compare(
        run.run, train=ROWS, test=ROWS, out=out, labels=20, seeds=2, arms=["pretrained", "tfidf"], epochs=1, report=True
    )
    assert result.labels == [20] and result.arms == ["pretrained", "tfidf"] and result.better == "higher"
    saved = json.loads((out / "results.json").read_text())
    assert dict(result) == saved and result.verdicts == saved["verdicts"] and result.report.is_file()
    score = result.score("tfidf")
    assert score.seeds == 2 and score.score == result.scores[1].score
    difference = result.differences[0]
    assert difference.difference == pytest.approx(result.score(difference.a).score - result.score(difference.b).score)
    with pytest.raises(UserError, match="no arm 'lora' with 20 labels"):
        result.score("lora")
    assert list(result.to_frame()["arm"]) == ["pretrained", "tfidf"]
    html = result._repr_html_()
    assert "<svg" in html and "TF-IDF" in html and "<script" not in html and "prefers-color-scheme: dark" in html
    assert result.verdicts[0][:20] in html and result._repr_html_() != html  # ids are unique in a notebook
    again = headstock.compare(
        run.run, train=ROWS, test=ROWS, out=out, labels=[20], seeds=2, arms=["pretrained", "tfidf"], epochs=1
    )
    assert again["cells"] == result["cells"]  # from the cache


def test_a_sweep_a_range_test_and_a_plan(tmp_path):
    found = headstock.sweep(TEXTS * 10, grid={"lr": [1e-3, 1e-2]}, out=tmp_path / "s", seeds=1, settings=TINY, steps=4)
    assert found.best == found.points[0].settings and found.best_run is not None and found.better == "lower"
    assert set(found.to_frame()["lr"]) == {1e-3, 1e-2} and "<table" in found._repr_html_()
    curve = headstock.lr_find(TEXTS * 10, steps=20, settings={k: v for k, v in TINY.items() if k != "steps"})
    assert len(curve.lrs) == len(curve.to_frame()) <= 20 and "<svg" in curve._repr_html_()
    plan = headstock.plan(TEXTS * 10, minutes=1)
    assert (
        plan.parameters == plan["parameters"] > 0 and plan.settings["model.depth"] == plan["config"]["model"]["depth"]
    )
    assert "model.depth" in plan._repr_html_()


def test_minutes_alone_plan_the_size(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="headstock"):
        headstock.pretrain(TEXTS * 20, out=tmp_path / "p", minutes=0.005, lr=1e-3, device="cpu", report=False)
    assert "no preset or size given" in caplog.text
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["model"]["positions"], config["train"]["lr"]) == ("rotary", 1e-3)
    with pytest.raises(UserError, match="exists"):  # reported before the size is planned
        headstock.pretrain(TEXTS, out=tmp_path / "p", minutes=1)


def test_progress_is_silent_where_nobody_looks(tmp_path, capfd, monkeypatch):
    headstock.pretrain(TEXTS * 10, out=tmp_path / "quiet", settings=TINY, steps=4)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own; without any, messages are shown, too
    headstock.pretrain(TEXTS * 10, out=tmp_path / "shown", settings=TINY, steps=4, log_every=2, progress=True)
    out, err = capfd.readouterr()
    assert not out and "steps | loss" in err and "tokenizer:" in err


def test_messages_go_to_logging_and_events_to_callbacks(tmp_path, caplog):
    seen: list[tuple[str, int, float, dict[str, float]]] = []

    def on_event(event: headstock.Event) -> None:
        seen.append((event.kind, event.step, event.loss, event.metrics))

    with caplog.at_level(logging.INFO, "headstock"):
        options = TINY | {"steps": 4, "log_every": 2}
        headstock.pretrain(TEXTS * 10, out=tmp_path / "run", settings=options, callbacks=[on_event])
    assert any("tokenizer" in record.message for record in caplog.records)
    assert [step for kind, step, _, _ in seen if kind == "log"] == [2, 4]
    assert all(loss > 0 for kind, _, loss, _ in seen if kind == "log")
    assert all(metrics["loss"] > 0 for kind, _, _, metrics in seen if kind == "valid")
