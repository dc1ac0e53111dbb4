"""Comparisons of pairs, tags and answers, each by its own metric."""

import json

import numpy as np
import pytest

import headstock
from headstock.errors import UserError
from headstock.experiments.compare import compare
from headstock.experiments.evaluation import add_error_analysis
from headstock.experiments.tables import comparison_table
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
        mine = [made["score"] for made in results["cells"] if made["arm"] == row["arm"]]
        assert row["score"] == pytest.approx(np.mean(mine), abs=1e-4)
    assert ("F1 " in results["verdicts"][0]) == (METRICS[task] == "f1")
    assert comparison_table(results).title == f"{'F1' if METRICS[task] == 'f1' else 'accuracy'} on 30 test rows (%)"


def test_tags_are_scored_by_their_entities(compared, task_files):
    """The saved model gives the scores of its trial through the public API."""
    results, out = compared["tag"]
    rows = [json.loads(line) for line in task_files["tag"]["test"].read_text().splitlines()]
    said = headstock.load(out / "runs" / "pretrained-24").predict([row["tokens"] for row in rows])
    found = there = both = words = right = 0
    for row, told in zip(rows, said, strict=True):
        ours, theirs = set(entities(told["tags"])), set(entities(row["tags"]))
        found, there, both = found + len(ours), there + len(theirs), both + len(ours & theirs)
        right += sum(a == b for a, b in zip(told["tags"], row["tags"], strict=True))
        words += len(row["tags"])
    (made,) = [made for made in results["cells"] if (made["arm"], made["seed"]) == ("pretrained", 0)]
    assert made["f1"] == pytest.approx(2 * both / (found + there))
    assert made["accuracy"] == pytest.approx(right / words)
    told = results["details"]["arms"]["pretrained"]
    assert np.trace(told["confusion"]) == right and np.sum(told["confusion"]) == words
    assert sum(row["count"] for row in told["calibration"]["bins"]) == words
    assert len(told["lengths"]["right"]) + len(told["lengths"]["wrong"]) == 30
    assert told["mistakes"]
    for mistake in told["mistakes"]:
        ((begin, end, kind),) = mistake["marks"]
        assert (mistake["text"][begin:end], kind) == (mistake["subject"], "said")
        line, word = mistake["place"].removeprefix(str(task_files["tag"]["test"])).strip(":").split(", word ")
        assert rows[int(line) - 1]["tokens"][int(word) - 1] == mistake["subject"]
        assert rows[int(line) - 1]["tags"][int(word) - 1] == mistake["label"] != mistake["predicted"]


def test_answers_are_scored_as_squad_does(compared, task_files):
    results, out = compared["answer"]
    rows = [json.loads(line) for line in task_files["answer"]["test"].read_text().splitlines()]
    asked = [{"question": row["question"], "context": row["context"]} for row in rows]
    said = headstock.load(out / "runs" / "scratch-24").predict(asked)
    gold = [[answer["text"] for answer in row["answers"]] for row in rows]
    (made,) = [made for made in results["cells"] if (made["arm"], made["seed"]) == ("scratch", 0)]
    exact = [exact_match(told["answer"], texts) for told, texts in zip(said, gold, strict=True)]
    assert made["exact_match"] == made["accuracy"] == pytest.approx(np.mean(exact))
    overlaps = [answer_f1(told["answer"], texts) for told, texts in zip(said, gold, strict=True)]
    assert made["f1"] == pytest.approx(np.mean(overlaps), abs=1e-5)
    told = results["details"]["arms"]["scratch"]
    assert "confusion" not in told and "label_errors" not in results["details"]
    assert len(told["lengths"]["right"]) == sum(exact)
    assert len(told["mistakes"]) == min(20, 30 - sum(exact)) > 0
    sure = [mistake["confidence"] for mistake in told["mistakes"]]
    assert sure == sorted(sure, reverse=True)
    for mistake in told["mistakes"]:
        (row,) = [r for n, r in enumerate(rows, 1) if mistake["place"] == f"{task_files['answer']['test']}:{n}"]
        assert mistake["question"] == row["question"]
        assert mistake["label"] == ("; ".join(answer["text"] for answer in row["answers"]) or NO_ANSWER)
        marked = {kind: mistake["text"][begin:end] for begin, end, kind in mistake["marks"]}
        assert marked.get("said", NO_ANSWER) == mistake["predicted"]
        assert marked.get("true", NO_ANSWER) == mistake["label"]


def test_overlap_needs_the_same_question_and_context(compared, task_files):
    rows = {
        name: [json.loads(line) for line in task_files["answer"][name].read_text().splitlines()]
        for name in ("train", "test")
    }
    known = {(row["context"], row["question"]) for row in rows["train"]}
    shared = [row for row in rows["test"] if (row["context"], row["question"]) in known]
    assert compared["answer"][0]["train_overlap"] == len(shared) < 30
    assert {row["question"] for row in rows["test"]} <= {row["question"] for row in rows["train"]}


def test_marks_stay_aligned_in_an_excerpt():
    text = " ".join(f"word{number}" for number in range(300))
    begin = text.index("word150")
    said = {"start": begin, "end": begin + 7}
    near, far = ({"text": f"word{n}", "start": text.index(f"word{n}")} for n in (152, 290))
    shown, marks = excerpt(text, said, [near])
    assert [shown[a:b] for a, b, _ in marks] == ["word150", "word152"]
    assert [kind for _, _, kind in marks] == ["said", "true"]
    assert shown.startswith("… word") and shown.endswith(" …") and len(shown) < 520
    assert [mark[2] for mark in excerpt(text, said, [far])[1]] == ["said"]  # outside the excerpt
    shown, marks = excerpt(text, {"start": None, "end": None}, [far])
    assert [shown[a:b] for a, b, _ in marks] == ["word290"] and not shown.endswith("…")
    assert excerpt(text, {"start": None, "end": None}, [])[1] == []


def test_pairs_have_attributions_and_label_errors(compared):
    results, _ = compared["pair"]
    details = results["details"]
    assert isinstance(details["label_errors"], list)
    weighed = [bool(mistake["tokens"]) for mistake in details["arms"]["scratch"]["mistakes"]]
    assert weighed == [i < 12 for i in range(len(weighed))] and weighed
    assert results["settings"]["compare"]["arms"][-1] == "tfidf"
    assert next(made["chosen"] for made in results["cells"] if made["arm"] == "tfidf")


def test_finished_tasks_are_not_repeated(compared, stock, task_files):
    results, out = compared["answer"]
    before, settings = modification_times(out), SETTINGS | {"epochs": 4, "lr": 0.02}
    options = {**task_files["answer"], "out": out, "task": "answer", "labels": [24], "seeds": 2, "settings": settings}
    assert without_timings(compare(stock, **options, callbacks=[fail_if_trained])) == without_timings(results)
    assert modification_times(out) == before


@pytest.mark.parametrize("task", TASKS)
def test_predictions_of_unlabelled_rows_have_the_format_of_their_task(stock, task_files, tmp_path, task):
    rows = MAKERS[task](9, name="unlabelled")
    bare = [{key: value for key, value in row.items() if key != TARGETS[task]} for row in rows]
    files = task_files[task] | {"test": write_lines(tmp_path / "test.jsonl", bare)}
    options = {"task": task, "arms": ["frozen"], "labels": [8], "seeds": 1, "settings": SETTINGS}
    results = compare(stock, **files, out=tmp_path / "out", **options)
    assert (results["measured_on"], results["measured_rows"]) == ("valid", 16)
    lines = (tmp_path / "out" / "predictions" / "frozen.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    assert len(told) == 9
    for row, one in zip(rows, told, strict=True):
        if task == "pair":
            assert set(one["probabilities"]) == {"same", "other"} and one["label"] in one["probabilities"]
        elif task == "tag":
            assert one["tokens"] == row["tokens"]
            assert len(one["tags"]) == len(one["probabilities"]) == len(row["tokens"])
        else:
            assert one["id"] == row["id"]
            if one["answer"]:
                assert row["context"][one["start"] : one["end"]] == one["answer"]


def test_errors_of_a_fine_tuned_run_are_analysed(stock, task_files, tmp_path):
    for task in ("tag", "answer"):
        out = tmp_path / task
        headstock.finetune(stock, **task_files[task], out=out, task=task, settings=SETTINGS | {"epochs": 1})
        add_error_analysis(RunFolder(out))
        told = RunFolder(out).results()["details"]
        assert schema_errors(json.loads(json.dumps({"seed": 0, **told})), schema(task)["details"]["arms"]["*"]) == []


# Which layers are the best features


@pytest.fixture(scope="module")
def deep(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "deep"
    headstock.pretrain(corpus, out=out, settings=TINY | {"depth": 4, "steps": 4})
    return out


def test_features_are_compared_as_frozen_arms(deep, files, tmp_path):
    features = ["last", "sum4", "concat4", "mix"]
    settings = SETTINGS | {"epochs": 20, "lr": 0.02}
    results = compare(deep, **files, out=tmp_path, features=features, labels=[24], seeds=2, settings=settings)
    assert [arm["name"] for arm in results["arms"]] == [f"frozen {layers}" for layers in features]
    assert {arm["kind"] for arm in results["arms"]} == {"frozen"}
    trained = {arm["name"]: arm["parameters"]["trainable"] for arm in results["arms"]}
    plain = 2 * (16 + 1)
    assert trained == {
        "frozen last": plain, "frozen sum4": plain, "frozen concat4": 2 * (4 * 16 + 1), "frozen mix": plain + 5 + 1
    }  # fmt: skip
    assert all(row["low"] < row["high"] for row in results["summary"])
    (verdict,) = results["verdicts"]
    best = max(results["summary"], key=lambda row: row["score"])
    assert verdict.startswith(f"As features with 24 labels, {best['arm'].removeprefix('frozen ')} reaches ")
    assert f"{100 * best['score']:.1f}% ({100 * best['low']:.1f} to {100 * best['high']:.1f})" in verdict
    for layers in features:
        assert layers in verdict
    kept = RunFolder(tmp_path / "runs" / "frozen-concat4-24").config()
    assert (kept["task"]["layers"], kept["transfer"]["freeze"]) == ("concat4", True)


def test_features_have_a_separate_verdict(stock, files, tmp_path):
    results = compare(stock, **files, out=tmp_path, arms=["frozen", "tfidf"], features=["1", "last"], **SMALL)
    assert [arm["name"] for arm in results["arms"]] == ["frozen", "tfidf", "frozen 1", "frozen last"]
    first, second = results["verdicts"]
    assert first.startswith("With 8 labels") and "frozen 1" not in first
    assert second.startswith("As features with 8 labels, ") and "layer 1" in second
    same = {row["arm"]: row["score"] for row in results["summary"]}
    assert same["frozen"] == same["frozen last"]


# Invalid options

WRONG = {
    "tfidf cannot tag": ("tag", {"arms": ["scratch", "tfidf"]}, r"--arms: TF-IDF .* remove tfidf from --arms"),
    "tfidf cannot answer": ("answer", {"arms": ["tfidf"]}, r"--arms: TF-IDF .* remove tfidf from --arms"),
    "no such layers": ("pair", {"features": ["lats"]}, r"layers: must be one of last, sum4, concat4, mix or .*'lats'"),
    "too few layers": ("pair", {"features": ["last", "sum4"]}, r"layers: sum4 needs 4 layers, this model has 2"),
    "no such layer": ("tag", {"features": ["3"]}, r"layers: 3 is more than the model's 2"),
    "layers twice": ("tag", {"features": ["last", "last"]}, r"compare\.features: contains a choice twice"),
    "an objective": ("causal", {}, r"--task causal: .* answer, classify, pair, tag"),
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
