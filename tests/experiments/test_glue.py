"""GLUE tasks are read from the official layout, scored by the official metrics and averaged as GLUE does."""

import json
import random

import numpy as np
import pytest
from sklearn.metrics import f1_score

import headstock
from headstock.data.glue import GLUE_TASKS, find_tasks, glue_tasks, read_rows
from headstock.errors import UserError
from headstock.experiments.glue import average, glue
from tests.conftest import TINY

PEOPLE, VERBS = ["Anne", "Ben", "Zoë"], ["sees", "likes", "finds"]
SETTINGS = {"epochs": 1.0, "least_steps": 2, "batch": 8, "tensorboard": False}


def write_glue(folder):
    """Small files in the layout of four tasks, with what is special about each."""
    pick = random.Random(0)

    def sentence():
        return f"{pick.choice(PEOPLE)} {pick.choice(VERBS)} Paris"

    def save(name, header, rows):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join("\t".join(map(str, row)) for row in [*header, *rows]) + "\n", encoding="utf-8")

    for split, count in (("train", 40), ("dev", 12)):
        cola = [("gj04", i % 2, "*" if i % 2 else "", f'"{sentence()} {i}') for i in range(count)]
        save(f"CoLA/{split}.tsv", [], cola)
        pairs = [(i % 2, i, i, f"{sentence()} {i}", sentence()) for i in range(count)]
        save(f"MRPC/{split}.tsv", [("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")], pairs)
        columns = [
            "index",
            "genre",
            "filename",
            "year",
            "old_index",
            "source1",
            "source2",
            "sentence1",
            "sentence2",
            "score",
        ]
        scored = [(i, *"gfyoss", f"{sentence()} {i}", sentence(), i % 26 / 5) for i in range(count)]
        save(f"STS-B/{split}.tsv", [columns], scored)
    columns = ["index", "pairID", "sentence1", "sentence2", "gold_label"]
    labels = ["neutral", "entailment", "contradiction", "-"]
    for split, count in (("train", 40), ("dev_matched", 8), ("dev_mismatched", 8)):
        rows = [(i, i, f"{sentence()} {i}", sentence(), labels[i % 4]) for i in range(count)]
        save(f"MNLI/{split}.tsv", [columns], rows)
    (folder / "RTE").mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("stock") / "run"
    headstock.pretrain(corpus, out=out, settings=TINY)
    return out


def test_each_layout_is_read(folder):
    tasks = {task.name: task for task in GLUE_TASKS}
    cola = read_rows(folder / "CoLA/dev.tsv", tasks["cola"])
    assert cola[1]["label"] == "1" and cola[1]["text"].startswith('"')  # no header, and quotation marks are text
    assert set(read_rows(folder / "MRPC/dev.tsv", tasks["mrpc"])[0]) == {"text", "text_b", "label"}
    assert read_rows(folder / "STS-B/dev.tsv", tasks["sts-b"])[1]["label"] == "0.2"
    labels = {row["label"] for row in read_rows(folder / "MNLI/train.tsv", tasks["mnli"])}
    assert labels == {"neutral", "entailment", "contradiction"}  # rows without agreement are left out
    with pytest.raises(UserError, match="no column 'sentence1'"):
        read_rows(folder / "MRPC/dev.tsv", tasks["rte"])


def test_an_empty_file_has_no_columns(tmp_path):
    (tmp_path / "train.tsv").touch()
    with pytest.raises(UserError, match="no column"):
        read_rows(tmp_path / "train.tsv", glue_tasks(["SST-2"])[0])


def test_missing_tasks_are_named(folder):
    found, missing = find_tasks(folder, glue_tasks())
    assert set(found) == {"cola", "mrpc", "sts-b", "mnli"}
    assert "no folder QQP" in missing["qqp"] and "no train.tsv" in missing["rte"]
    assert [task.name for task in glue_tasks(["STSB", "SST-2"])] == ["sts-b", "sst-2"]
    with pytest.raises(UserError, match="did you mean 'cola'"):
        glue_tasks(["colla"])


def test_every_task_is_fine_tuned_once_and_averaged(stock, folder, tmp_path, call, monkeypatch):
    options = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={str(value).lower()}")]
    words = ("glue", stock, folder, "--tasks", "cola,mrpc,sts-b,mnli,rte", "--rows", "24", "--out", tmp_path / "out")
    out, _ = call(*words, *options)
    assert "average of 4" in out and "rte (RTE has no train.tsv" in " ".join(out.split())
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    scores = results["tasks"]
    assert set(scores["mnli"]["metrics"]) == {"accuracy_matched", "accuracy_mismatched"}
    assert list(scores["cola"]["metrics"]) == ["mcc"] and list(scores["mrpc"]["metrics"]) == ["f1", "accuracy"]
    means = [np.mean(list(task["metrics"].values())) for task in scores.values()]
    assert results["average"] == pytest.approx(np.mean(means))
    assert scores["sts-b"]["train_rows"] == 24 and list(results["missing"]) == ["rte"]
    f1 = dev_f1(tmp_path / "out")
    assert scores["mrpc"]["metrics"]["f1"] == pytest.approx(f1)

    trained = []
    monkeypatch.setattr(headstock.train.fit, "train", lambda *_, **__: trained.append(1))
    again = glue(stock, folder, tasks=["cola", "mrpc"], rows=24, settings=SETTINGS, out=tmp_path / "out", device="cpu")
    assert not trained and again["tasks"]["cola"]["metrics"] == scores["cola"]["metrics"]


def test_results_of_another_run_or_other_options_are_not_returned(stock, corpus, folder, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    headstock.pretrain(corpus, out=other, settings=TINY | {"seed": 5})
    options = {"tasks": ["cola"], "rows": 24, "settings": SETTINGS, "out": out, "device": "cpu"}
    glue(stock, folder, **options)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"has results of the run {stock} for cola; name another --out"):
        glue(other, folder, **options)
    for change in ({"rows": 30}, {"seed": 1}, {"settings": SETTINGS | {"lr": 0.1}}):
        with pytest.raises(UserError, match=f"has results of {next(iter(change))} .* for cola"):
            glue(stock, folder, **options | change)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "data/cola/key.json").unlink()
    with pytest.raises(UserError, match="keeps its own source"):
        glue(other, folder, **options)


def dev_f1(out):
    """F1 of the positive class, from the run's own predictions."""
    rows = [json.loads(line) for line in (out / "data/mrpc/dev.jsonl").read_text(encoding="utf-8").splitlines()]
    predictions = headstock.load(out / "runs/mrpc", device="cpu").predict(
        [(row["text"], row["text_b"]) for row in rows]
    )
    true, predicted = ([row["label"] == "1" for row in table] for table in (rows, predictions))
    return f1_score(true, predicted, zero_division=0)


def test_the_average_weighs_tasks_not_metrics():
    tasks = {
        "a": {"score": 0.8, "intervals": {"x": [0.7, 0.9]}},
        "b": {"score": 0.4, "intervals": {"x": [0.3, 0.5], "y": [0.3, 0.5]}},
    }
    result = average(tasks)
    assert result["average"] == pytest.approx(0.6)
    assert result["average_high"] - result["average"] == pytest.approx(0.1 * 2**0.5 / 2)
