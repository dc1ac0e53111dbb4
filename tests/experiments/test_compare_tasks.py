"""Comparisons of pairs, tags and answers, each by its own metric."""

import json

import numpy as np
import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.compare import compare
from headstock.experiments.terminal_tables import comparison_table
from headstock.experiments.trial_evaluation import add_error_analysis
from headstock.report.sweep_points import format_interval
from headstock.tasks.answer import NO_ANSWER, excerpt
from headstock.tasks.text_metrics import answer_f1, entities, exact_match
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY
from tests.experiments.small import (
    MAKERS,
    SETTINGS,
    SMALL,
    TARGETS,
    fail_if_trained,
    modification_times,
    schema,
    schema_errors,
    without_timings,
    write_lines,
)

TASKS = ("pair", "tag", "answer")
METRICS = {"pair": "accuracy", "tag": "f1", "answer": "f1"}


@pytest.mark.parametrize("task", TASKS)
def test_results_follow_the_schema(compared, task):
    results, _ = compared[task]
    assert schema_errors(json.loads(json.dumps(results)), schema(task)) == []
    arms = ["scratch", "pretrained", "frozen", *(["tfidf"] if task == "pair" else [])]
    assert [arm["name"] for arm in results["arms"]] == arms  # TF-IDF where it applies
    assert (results["task"], results["metric"], results["measured_rows"]) == (task, METRICS[task], 30)
    for row in results["summary"]:
        assert row["score"] == row[METRICS[task]]
        assert row["low"] <= row["score"] <= row["high"]
        scores = [cell["score"] for cell in results["cells"] if cell["arm"] == row["arm"]]
        assert row["score"] == pytest.approx(np.mean(scores), abs=1e-4)
    assert ("F1 " in results["verdicts"][0]) == (METRICS[task] == "f1")
    assert comparison_table(results).title == f"{'F1' if METRICS[task] == 'f1' else 'accuracy'} on 30 test rows (%)"


def test_tags_are_scored_by_their_entities(compared, task_files):
    """The saved model gives the scores of its trial through the public API."""
    results, out = compared["tag"]
    rows = [json.loads(line) for line in task_files["tag"]["test"].read_text().splitlines()]
    predictions = headstock.load(out / "runs" / "pretrained-24").predict([row["tokens"] for row in rows])
    predicted = actual = shared = words = correct = 0  # entities, then tags
    for row, prediction in zip(rows, predictions, strict=True):
        own, true = set(entities(prediction["tags"])), set(entities(row["tags"]))
        predicted, actual, shared = predicted + len(own), actual + len(true), shared + len(own & true)
        correct += sum(a == b for a, b in zip(prediction["tags"], row["tags"], strict=True))
        words += len(row["tags"])
    (cell,) = [cell for cell in results["cells"] if (cell["arm"], cell["seed"]) == ("pretrained", 0)]
    assert cell["f1"] == pytest.approx(2 * shared / (predicted + actual))
    assert cell["accuracy"] == pytest.approx(correct / words)
    analysis = results["details"]["arms"]["pretrained"]
    assert np.trace(analysis["confusion"]) == correct and np.sum(analysis["confusion"]) == words
    assert sum(row["count"] for row in analysis["calibration"]["bins"]) == words
    assert len(analysis["lengths"]["right"]) + len(analysis["lengths"]["wrong"]) == 30
    assert analysis["mistakes"]
    for mistake in analysis["mistakes"]:
        ((begin, end, kind),) = mistake["marks"]
        assert (mistake["text"][begin:end], kind) == (mistake["subject"], "said")
        line, word = mistake["place"].removeprefix(str(task_files["tag"]["test"])).strip(":").split(", word ")
        assert rows[int(line) - 1]["tokens"][int(word) - 1] == mistake["subject"]
        assert rows[int(line) - 1]["tags"][int(word) - 1] == mistake["label"] != mistake["predicted"]


def test_answers_are_scored_as_squad_does(compared, task_files):
    results, out = compared["answer"]
    rows = [json.loads(line) for line in task_files["answer"]["test"].read_text().splitlines()]
    questions = [{"question": row["question"], "context": row["context"]} for row in rows]
    predictions = headstock.load(out / "runs" / "scratch-24").predict(questions)
    answers = [
        (prediction["answer"], [answer["text"] for answer in row["answers"]])
        for prediction, row in zip(predictions, rows, strict=True)
    ]
    (cell,) = [cell for cell in results["cells"] if (cell["arm"], cell["seed"]) == ("scratch", 0)]
    exact = [exact_match(answer, references) for answer, references in answers]
    assert cell["exact_match"] == cell["accuracy"] == pytest.approx(np.mean(exact))
    assert cell["f1"] == pytest.approx(
        np.mean([answer_f1(answer, references) for answer, references in answers]), abs=1e-5
    )
    analysis = results["details"]["arms"]["scratch"]
    assert "confusion" not in analysis and "label_errors" not in results["details"]
    assert len(analysis["lengths"]["right"]) == sum(exact)
    assert len(analysis["mistakes"]) == min(20, 30 - sum(exact)) > 0
    confidences = [mistake["confidence"] for mistake in analysis["mistakes"]]
    assert confidences == sorted(confidences, reverse=True)
    for mistake in analysis["mistakes"]:
        (row,) = [r for n, r in enumerate(rows, 1) if mistake["place"] == f"{task_files['answer']['test']}:{n}"]
        assert mistake["question"] == row["question"]
        assert mistake["label"] == ("; ".join(answer["text"] for answer in row["answers"]) or NO_ANSWER)
        spans = {kind: mistake["text"][begin:end] for begin, end, kind in mistake["marks"]}
        assert spans.get("said", NO_ANSWER) == mistake["predicted"]
        assert spans.get("true", NO_ANSWER) == mistake["label"]


def test_overlap_needs_the_same_question_and_context(compared, task_files):
    rows = {
        name: [json.loads(line) for line in task_files["answer"][name].read_text().splitlines()]
        for name in ("train", "test")
    }
    train_rows = {(row["context"], row["question"]) for row in rows["train"]}
    shared = [row for row in rows["test"] if (row["context"], row["question"]) in train_rows]
    assert compared["answer"][0]["train_overlap"] == len(shared) < 30
    assert {row["question"] for row in rows["test"]} <= {row["question"] for row in rows["train"]}


def test_spans_stay_aligned_in_an_excerpt():
    text = " ".join(f"word{number}" for number in range(300))
    begin = text.index("word150")
    predicted = {"start": begin, "end": begin + 7}
    near, far = ({"text": f"word{n}", "start": text.index(f"word{n}")} for n in (152, 290))
    part, spans = excerpt(text, predicted, [near])
    assert [part[a:b] for a, b, _ in spans] == ["word150", "word152"]
    assert [kind for _, _, kind in spans] == ["said", "true"]
    assert part.startswith("… word") and part.endswith(" …") and len(part) < 520
    assert [kind for _, _, kind in excerpt(text, predicted, [far])[1]] == ["said"]  # the other is outside
    part, spans = excerpt(text, {"start": None, "end": None}, [far])
    assert [part[a:b] for a, b, _ in spans] == ["word290"] and not part.endswith("…")
    assert excerpt(text, {"start": None, "end": None}, [])[1] == []


def test_pairs_have_attributions_and_label_errors(compared):
    results, _ = compared["pair"]
    details = results["details"]
    assert isinstance(details["label_errors"], list)
    attributed = [bool(mistake["tokens"]) for mistake in details["arms"]["scratch"]["mistakes"]]
    assert attributed == [i < 12 for i in range(len(attributed))] and attributed
    assert results["settings"]["compare"]["arms"][-1] == "tfidf"
    assert next(cell["chosen"] for cell in results["cells"] if cell["arm"] == "tfidf")


def test_finished_tasks_are_not_repeated(compared, stock, task_files):
    results, out = compared["answer"]
    before, settings = modification_times(out), SETTINGS | {"epochs": 4, "lr": 0.02}
    options = {**task_files["answer"], "out": out, "task": "answer", "labels": [24], "seeds": 2, "settings": settings}
    assert without_timings(compare(stock, **options, callbacks=[fail_if_trained])) == without_timings(results)
    assert modification_times(out) == before


@pytest.mark.parametrize("task", TASKS)
def test_predictions_of_unlabelled_rows_have_the_format_of_their_task(stock, task_files, tmp_path, task):
    rows = MAKERS[task](9, name="unlabelled")
    unlabelled = [{key: value for key, value in row.items() if key != TARGETS[task]} for row in rows]
    files = task_files[task] | {"test": write_lines(tmp_path / "test.jsonl", unlabelled)}
    options = {"task": task, "arms": ["frozen"], "labels": [8], "seeds": 1, "settings": SETTINGS}
    results = compare(stock, **files, out=tmp_path / "out", **options)
    assert (results["measured_on"], results["measured_rows"]) == ("valid", 16)
    lines = (tmp_path / "out" / "predictions" / "frozen.jsonl").read_text(encoding="utf-8").splitlines()
    for row, prediction in zip(rows, map(json.loads, lines), strict=True):
        if task == "pair":
            assert set(prediction["probabilities"]) == {"same", "other"}
            assert prediction["label"] in prediction["probabilities"]
        elif task == "tag":
            assert prediction["tokens"] == row["tokens"]
            assert len(prediction["tags"]) == len(prediction["probabilities"]) == len(row["tokens"])
        else:
            assert prediction["id"] == row["id"]
            if prediction["answer"]:
                assert row["context"][prediction["start"] : prediction["end"]] == prediction["answer"]


def test_errors_of_a_fine_tuned_run_are_analysed(stock, task_files, tmp_path):
    for task in ("tag", "answer"):
        out = tmp_path / task
        headstock.finetune(stock, **task_files[task], out=out, task=task, settings=SETTINGS | {"epochs": 1})
        add_error_analysis(RunFolder(out))
        analysis = {"seed": 0, **RunFolder(out).results()["details"]}
        assert schema_errors(json.loads(json.dumps(analysis)), schema(task)["details"]["arms"]["*"]) == []


# Which layers are the best features


@pytest.fixture(scope="module")
def deep(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "deep"
    headstock.pretrain(corpus, out=out, settings=TINY | {"depth": 4, "steps": 4})
    return out


def test_features_are_compared_as_frozen_arms(deep, files, tmp_path):
    features = ["last", "sum4", "concat4", "mix"]
    settings = SETTINGS | {"epochs": 5, "lr": 0.02}
    results = compare(deep, **files, out=tmp_path, features=features, labels=[24], seeds=2, settings=settings)
    assert [arm["name"] for arm in results["arms"]] == [f"frozen {layers}" for layers in features]
    assert {arm["kind"] for arm in results["arms"]} == {"frozen"}
    trainable = [arm["parameters"]["trainable"] for arm in results["arms"]]
    head = 2 * (16 + 1)
    assert trainable == [head, head, 2 * (4 * 16 + 1), head + 5 + 1]
    assert all(row["low"] < row["high"] for row in results["summary"])
    (verdict,) = results["verdicts"]
    best = max(results["summary"], key=lambda row: row["score"])
    assert verdict.startswith(f"As features with 24 labels, {best['arm'].removeprefix('frozen ')} reaches ")
    assert f"{100 * best['score']:.1f}%{format_interval('accuracy', best)}" in verdict
    for layers in features:
        assert layers in verdict
    config = RunFolder(tmp_path / "runs" / "frozen-concat4-24").config()
    assert (config["task"]["layers"], config["transfer"]["freeze"]) == ("concat4", True)


def test_features_have_a_separate_verdict(stock, files, tmp_path):
    results = compare(stock, **files, out=tmp_path, arms=["frozen", "tfidf"], features=["1", "last"], **SMALL)
    assert [arm["name"] for arm in results["arms"]] == ["frozen", "tfidf", "frozen 1", "frozen last"]
    first, second = results["verdicts"]
    assert first.startswith("With 8 labels") and "frozen 1" not in first
    assert second.startswith("As features with 8 labels, ") and "layer 1" in second
    scores = {row["arm"]: row["score"] for row in results["summary"]}
    assert scores["frozen"] == scores["frozen last"]


# Invalid options

WRONG = {
    "tfidf cannot tag": ("tag", {"arms": ["scratch", "tfidf"]}, r"--arms: TF-IDF .* remove tfidf from --arms"),
    "tfidf cannot answer": ("answer", {"arms": ["tfidf"]}, r"--arms: TF-IDF .* remove tfidf from --arms"),
    "no such layers": ("pair", {"features": ["lats"]}, r"layers: must be one of last, sum4, concat4, mix or .*'lats'"),
    "too few layers": ("pair", {"features": ["last", "sum4"]}, r"layers: sum4 needs 4 layers, this model has 2"),
    "no such layer": ("tag", {"features": ["3"]}, r"layers: 3 is more than the model's 2"),
    "layers twice": ("tag", {"features": ["last", "last"]}, r"compare\.features: contains a choice twice"),
    "an objective": ("causal", {}, r"--task causal: .* answer, classify, .*pair, .*tag"),
    "no such task": ("tagg", {}, r"tagg.* did you mean 'tag'"),
    "one label a pair": ("pair", {"settings": {"separator": "|"}}, r"separator: a row of pair has a single label"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_options_are_refused_before_training(stock, task_files, tmp_path, wrong):
    task, options, message = WRONG[wrong]
    files = task_files.get(task, task_files["pair"])
    with pytest.raises(UserError, match=message) as raised:
        compare(stock, **files, out=tmp_path / "out", task=task, **SMALL | options, callbacks=[fail_if_trained])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_tag_is_reported_with_its_location(stock, task_files, tmp_path):
    rows = MAKERS["tag"](4, name="new")
    rows[2]["tags"][0] = "B-PERS"
    files = task_files["tag"] | {"test": write_lines(tmp_path / "test.jsonl", rows)}
    with pytest.raises(UserError, match=r"test\.jsonl:3: tag 'B-PERS' .* did you mean 'B-PER'"):
        compare(stock, **files, out=tmp_path / "out", task="tag", **SMALL, callbacks=[fail_if_trained])
