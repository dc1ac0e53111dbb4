"""Distillation: combining teachers, choosing texts, and a student that learns from them what few labels do not say."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import headstock
from headstock.data.labelled_texts import read_records
from headstock.errors import UserError
from headstock.experiments.distil import closest_texts, distil
from headstock.experiments.ensemble_weights import combine, fit_weights
from headstock.train.labelled_data import LabelledSplits
from headstock.train.run_folder import RunFolder
from tests.commands import verb_result
from tests.conftest import TINY

WORDS = {"good": ["lovely", "bright", "kind", "sweet", "brave"], "bad": ["awful", "gloomy", "cruel", "bitter", "dull"]}


def sentences(count, seed, words=5):
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        label = ("good", "bad")[number % 2]
        text = f"The {pick.choice(['book', 'story', 'film'])} that I read in {pick.choice(['May', 'June'])} was"
        rows.append((f"{text} {pick.choice(WORDS[label][:words])} and {pick.choice(WORDS[label][:words])}.", label))
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A backbone, two teachers that know all words, and few labels that contain one word of each class."""
    folder = tmp_path_factory.mktemp("distil")
    pool = folder / "pool.txt"
    pool.write_text("\n".join(text for text, _ in sentences(300, seed=5)) + "\n")
    settings = TINY | {"vocabulary": 300, "steps": 20, "width": 32}
    headstock.pretrain(pool, out=folder / "backbone", objective="masked", settings=settings)
    rows = {
        "many": sentences(120, 1),
        "few": sentences(6, 2, words=1),
        "valid": sentences(40, 3),
        "test": sentences(60, 4),
    }
    paths = {name: write(folder / f"{name}.jsonl", part) for name, part in rows.items()}
    for seed in (0, 1):
        options = {"epochs": 6, "lr": 1e-2, "least_steps": 0, "seed": seed}
        out = folder / f"teacher-{seed}"
        headstock.finetune(folder / "backbone", train=paths["many"], valid=paths["valid"], out=out, settings=options)
    return folder, pool, paths


STUDENT = {"epochs": 4, "lr": 1e-2, "least_steps": 0}


def test_a_student_learns_what_its_labels_do_not_say(files, tmp_path):
    folder, pool, paths = files
    labels = {"train": paths["few"], "valid": paths["valid"], "test": paths["test"], "settings": STUDENT}
    alone = headstock.finetune(folder / "backbone", out=tmp_path / "alone", **labels)
    teachers = [folder / "teacher-0", folder / "teacher-1"]
    taught = distil(folder / "backbone", teachers=teachers, text=pool, rows=100, out=tmp_path / "taught", **labels)
    assert alone["test"]["accuracy"] < 0.85 < 0.95 < taught["test"]["accuracy"]
    facts = RunFolder(tmp_path / "taught").results()["distillation"]
    assert [row["name"] for row in facts["teachers"]] == [*map(str, teachers), "tfidf"]
    assert facts["rows"] == 100 and facts["ensemble_valid_accuracy"] > 0.95
    # TF-IDF knows only the few labels, so that its weight is small
    assert facts["teachers"][2]["valid_accuracy"] < facts["teachers"][0]["valid_accuracy"]


def test_the_command_distils_and_reports(files, tmp_path):
    folder, pool, _ = files
    renamed = tmp_path / "few.csv"
    renamed.write_text("review,stars\n" + "".join(f"{text},{label}\n" for text, label in sentences(6, 2, words=1)))
    teachers = [str(folder / name) for name in ("teacher-0", "teacher-1")]
    options = ["--teacher", teachers[0], "--teacher", teachers[1], "--equal-weights", "--no-tfidf"]
    options += ["--text", pool, "--rows", "50", "--epochs", "1"]
    options += ["--train", renamed, "--columns", "text=review,label=stars", "--set", "valid_fraction=0.4"]
    results = verb_result("distil", folder / "backbone", *options, "--out", tmp_path / "student")
    assert [(row["name"], row["weight"]) for row in results["distillation"]["teachers"]] == [
        (name, 0.5) for name in teachers
    ]
    assert RunFolder(tmp_path / "student").report.is_file()


def test_teachers_predict_a_text_once(files, tmp_path, monkeypatch):
    """Students after the first take the probabilities of the same teachers for the same texts from the cache."""
    folder, pool, paths = files
    common = {"teachers": [folder / "teacher-0"], "train": paths["few"], "valid": paths["valid"], "tfidf": False}
    first = distil(
        folder / "backbone", text=pool, rows=100, out=tmp_path / "0", settings=STUDENT | {"epochs": 1}, **common
    )

    def predict(*_):
        raise AssertionError("a teacher predicted again")

    monkeypatch.setattr("headstock.experiments.distil.class_probabilities", predict)
    settings = STUDENT | {"epochs": 1, "seed": 1, "data.valid_fraction": 0.2}
    second = distil(folder / "backbone", text=pool, rows=100, out=tmp_path / "1", settings=settings, **common)
    assert second["distillation"] == first["distillation"]
    other = common | {"teachers": [folder / "teacher-1"]}
    for changed in ({"text": pool, "rows": 99, **common}, {"text": pool, "rows": 100, **other}):
        with pytest.raises(AssertionError, match="predicted again"):
            distil(folder / "backbone", out=tmp_path / "2", settings=STUDENT, **changed)


def test_tfidf_predicts_a_text_once(files, tmp_path, monkeypatch):
    """Also for a student with other settings, but not where a labelled row or the seed is another."""
    folder, pool, paths = files
    common = {"teachers": [folder / "teacher-0"], "text": pool, "rows": 100, "valid": paths["valid"]}
    settings = STUDENT | {"epochs": 1}
    first = distil(folder / "backbone", train=paths["few"], out=tmp_path / "0", settings=settings, **common)

    def fit(*_, **__):
        raise AssertionError("TF-IDF was fitted again")

    monkeypatch.setattr("headstock.experiments.distil.fit_tfidf", fit)
    second = distil(
        folder / "backbone", train=paths["few"], out=tmp_path / "1", settings=settings | {"lr": 1e-3}, **common
    )
    assert second["distillation"] == first["distillation"]
    fewer = tmp_path / "fewer.jsonl"
    _, *others = Path(paths["few"]).read_text(encoding="utf-8").splitlines(keepends=True)
    fewer.write_text("".join(others), encoding="utf-8")
    for rows, changed in ((fewer, settings), (paths["few"], settings | {"seed": 1})):
        with pytest.raises(AssertionError, match="fitted again"):
            distil(folder / "backbone", train=rows, out=tmp_path / "2", settings=changed, **common)


def test_no_text_of_the_pool_is_a_labelled_one(tmp_path):
    long = " ".join(f"word{number}" for number in range(600))
    pool = write(tmp_path / "pool.jsonl", [(f"{long.upper()}!", ""), (f"{long} and another end", "")])
    rows = read_records(write(tmp_path / "test.jsonl", [(long, "good")]))
    texts = closest_texts(LabelledSplits(rows.select([]), rows.select([]), rows), pool, 5, seed=0)
    assert len(texts) == 1 and len(texts[0]) == 2000


def test_problems_are_named(files, tmp_path):
    folder, pool, paths = files
    other = write(tmp_path / "other.jsonl", [("a text of another class", "average")] * 4)
    labels = {"text": pool, "teachers": [folder / "teacher-0"], "out": tmp_path / "out"}
    with pytest.raises(UserError, match="label 'average' is new; training has 'bad', 'good'"):
        distil(folder / "backbone", train=other, valid=paths["valid"], **labels)
    with pytest.raises(UserError, match="--rows 0: must be 1 or more"):
        distil(folder / "backbone", train=paths["few"], valid=paths["valid"], rows=0, **labels)
    common = {"text": pool, "train": paths["few"], "valid": paths["valid"], "out": tmp_path / "out"}
    with pytest.raises(UserError, match="has no classification head"):
        distil(folder / "backbone", teachers=[folder / "backbone"], **common)
    with pytest.raises(UserError, match="--teacher"):
        distil(folder / "backbone", teachers=[], **common)
    with pytest.raises(UserError, match="missing: no such run"):
        distil(tmp_path / "missing", teachers=[folder / "teacher-0"], **common)
    other = write(tmp_path / "other.jsonl", [(text, label.upper()) for text, label in sentences(20, 6)])
    settings = {"epochs": 1, "least_steps": 0}
    headstock.finetune(folder / "backbone", train=other, out=tmp_path / "other", settings=settings)
    with pytest.raises(UserError, match="its classes are BAD, GOOD"):
        distil(folder / "backbone", teachers=[folder / "teacher-0", tmp_path / "other"], **common)


def test_equal_weights_are_a_geometric_mean():
    parts = [np.array([[0.9, 0.1]]), np.array([[0.5, 0.5]])]
    expected = np.sqrt(parts[0] * parts[1])
    assert combine(parts, np.array([0.5, 0.5])) == pytest.approx(expected / expected.sum())


def test_weights_prefer_the_teacher_that_is_right_and_soften_the_overconfident():
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 2, 4000)
    correct = generator.random(4000) < 0.8
    predicted = np.where(correct, truth, 1 - truth)
    informed = np.where(np.arange(2) == predicted[:, None], 0.99, 0.01)  # right in 80%, but 99% sure
    noise = generator.dirichlet([1, 1], 4000)
    weights = fit_weights([informed, noise], truth)
    assert weights[1] < 0.05
    assert combine([informed, noise], weights).max(1).mean() == pytest.approx(0.8, abs=0.02)


def test_the_closest_texts_are_chosen_and_labelled_ones_left_out(tmp_path):
    labelled = [(f"this novel by author {n} has a moving plot and fine prose", "good") for n in range(20)]
    alike = [f"a moving plot, and the prose of this novel number {n} is fine" for n in range(15)]
    others = [f"the striker scored goal {n} in the second half of the match" for n in range(60)]
    path = tmp_path / "pool.txt"
    path.write_text("\n".join([*others, *alike, labelled[3][0]]) + "\n")
    rows = read_records(write(tmp_path / "rows.jsonl", labelled))
    chosen = closest_texts(LabelledSplits(rows, rows.select([]), None), path, 15, seed=0)
    assert chosen == alike
