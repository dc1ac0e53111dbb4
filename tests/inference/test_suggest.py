"""Suggestions: gradient distances, diversity, and a simulation in which suggested labels beat random ones."""

import json

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import headstock
from headstock.errors import UserError
from headstock.experiments.trial_evaluation import t_interval
from headstock.inference.suggest import badge, farthest_first, normalized_entropy, rank_rows
from tests.experiments.small import make_rows, read_rows, write_rows

METHODS = ("badge", "entropy", "margin", "uncertainty", "diversity")


@pytest.fixture(scope="module")
def run(stock, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("suggest") / "run"
    headstock.finetune(stock, train=files["train"], valid=files["valid"], out=out, freeze=True, settings={"epochs": 2})
    return headstock.load(out)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    rows = make_rows(30, name="pool")
    return write_rows(tmp_path_factory.mktemp("pool") / "pool.csv", [(*row, f"n{i}") for i, row in enumerate(rows)],
                      ("text", "label", "id"))  # fmt: skip


# A pool as real ones are: seven classes, two of which are most of it, in clusters of near duplicates


def make_pool(seed: int, rows: int, *, balanced: bool):
    random = np.random.default_rng(seed)
    shares = np.full(7, 1 / 7) if balanced else np.array([0.45, 0.4, 0.03, 0.03, 0.03, 0.03, 0.03])
    labels = random.choice(7, size=rows, p=shares)
    centers = np.random.default_rng(1000 + seed // 2).normal(size=(7, 3, 12))  # three clusters of each class
    vectors = centers[labels, random.integers(3, size=rows)] + random.normal(scale=0.6, size=(rows, 12))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def simulate(method: str, seed: int, *, start: int = 21, step: int = 14, rounds: int = 4) -> float:
    """The accuracy of a classifier on balanced rows after some rounds of labelling."""
    (vectors, labels), (test, true) = (
        make_pool(2 * seed, 800, balanced=False),
        make_pool(2 * seed + 1, 400, balanced=True),
    )
    order = np.random.default_rng(seed).permutation(len(labels))
    labelled, model = order[:start], LogisticRegression(C=10, max_iter=200)
    for number in range(rounds):
        model.fit(vectors[labelled], labels[labelled])
        rest = np.setdiff1d(order, labelled)
        probabilities = model.predict_proba(vectors[rest])
        if method == "random":
            rows = np.random.default_rng((seed, number)).permutation(len(rest))[:step]
        elif method == "certain":
            rows = np.argsort(-probabilities.max(1))[:step]
        else:
            rows = rank_rows(vectors[rest], probabilities, step, method=method, labelled=vectors[labelled], seed=number)
        labelled = np.concatenate([labelled, rest[rows]])
    return float((model.fit(vectors[labelled], labels[labelled]).predict(test) == true).mean())


def test_suggested_labels_beat_random_ones_and_the_most_certain_rows_lose():
    seeds = range(8)
    scores = {method: [simulate(method, seed) for seed in seeds] for method in ("random", "certain", *METHODS)}

    def gain(method):
        return t_interval([a - b for a, b in zip(scores[method], scores["random"], strict=True)])

    assert gain("certain").high < 0
    for method in METHODS:
        assert gain(method).low > 0, method


def test_badge_distances_are_those_of_the_gradients():
    """With a seed, the choice is k-means++ on the outer products themselves."""
    random = np.random.default_rng(0)
    vectors, probabilities = random.normal(size=(40, 5)), random.dirichlet(np.ones(3), size=40)
    errors = probabilities - np.eye(3)[probabilities.argmax(1)]
    gradients = (errors[:, :, None] * vectors[:, None]).reshape(40, -1)
    chosen = badge(vectors, probabilities, 12, seed=3)
    assert chosen[0] == (gradients**2).sum(1).argmax() and len(set(chosen)) == 12
    from headstock.rng import generator

    draw, expected = generator(3, "badge"), chosen[:1]
    while len(expected) < 12:
        nearest = ((gradients[:, None] - gradients[expected]) ** 2).sum(-1).min(1)
        rest = np.setdiff1d(np.arange(40), expected)
        expected.append(int(draw.choice(rest, p=nearest[rest] / nearest[rest].sum())))
    assert chosen == expected != badge(vectors, probabilities, 12, seed=4)


def test_certain_rows_have_no_gradient_so_one_stands_for_all():
    vectors, probabilities = np.random.default_rng(1).normal(size=(20, 4)), np.tile([1.0, 0.0], (20, 1))
    probabilities[:5] = 0.6, 0.4
    assert len([row for row in badge(vectors, probabilities, 6, seed=0) if row >= 5]) == 1  # they are all the same
    assert len(set(badge(vectors, probabilities, 20, seed=0))) == 20


def test_diversity_covers_what_is_neither_labelled_nor_chosen():
    clusters = np.eye(4).repeat(10, 0)
    chosen = farthest_first(clusters, clusters[:1], 3)
    assert sorted(row // 10 for row in chosen) == [1, 2, 3]  # the first cluster has a labelled row
    assert sorted(row // 10 for row in farthest_first(clusters, clusters[:0], 4)) == [0, 1, 2, 3]


def test_scores_of_uncertainty_agree_on_two_classes_and_differ_on_three():
    probabilities = np.array([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05]])
    first = {m: rank_rows(np.eye(3), probabilities, 1, method=m)[0] for m in ("entropy", "margin", "uncertainty")}
    assert first == {"entropy": 1, "margin": 0, "uncertainty": 1}
    assert normalized_entropy(np.array([[0.25] * 4, [1.0, 0, 0, 0]])) == pytest.approx([1, 0])


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_ranked_and_distinct(run, files, method):
    train = run.task.read_file(files["train"], config=run.task.config).display_texts[:5]
    texts = [text for text, _ in make_rows(20, name="new")]
    rows = run.suggest([*train, *texts, *texts, " "], count=10, method=method)
    assert [row.rank for row in rows] == list(range(1, 11))
    assert len({row.text for row in rows}) == 10 and not {row.text for row in rows} & set(train)
    assert all(0 <= row.entropy <= 1 and 0 <= row.margin <= 1 and row.label in ("good", "bad") for row in rows)
    if method == "entropy":
        assert [row.entropy for row in rows] == sorted((row.entropy for row in rows), reverse=True)
    assert run.suggest(texts, count=10, method=method) == run.suggest(texts, count=10, method=method)
    assert len(run.suggest(texts, count=100, method=method)) == 20


def test_a_language_model_suggests_a_diverse_first_set(stock):
    rows = headstock.load(stock).suggest(["Anne sees home", "Anne sees home.", "Zoë finds Paris"], count=2)
    assert len(rows) == 2 and rows[0].label is None
    with pytest.raises(UserError, match=r"predicts no classes.*method=.diversity."):
        headstock.load(stock).suggest(["Anne"], method="entropy")


def test_the_command_line_writes_rows_with_reasons(call, run, pool, tmp_path):
    out, _ = call("suggest", run.run.path, "--pool", pool, "--count", 3)
    assert len(out.splitlines()) == 6 and " or " in out
    call("suggest", run.run.path, "--pool", pool, "--count", 4, "--with", "id", "--out", tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0] == "id,rank,row,text,label,confidence,margin,entropy,novelty,reason" and len(lines) == 5
    entries = {line.split(",")[0]: line.split(",")[2] for line in lines[1:]}
    assert all(int(line) == int(name[1:]) + 2 for name, line in entries.items())  # the id of the row itself
    out, _ = call("suggest", run.run.path, "--pool", pool, "--method", "margin", "--json")
    report = json.loads(out.splitlines()[-1])
    assert report["method"] == "margin" and len(report["suggestions"]) == 20


def test_every_run_writes_the_same_columns(call, run, stock, pool, tmp_path):
    """The true label of the pool is `input.label`, also where no prediction occupies `label`."""
    true = {row["text"]: row["label"] for row in read_rows(pool)}
    for source, name in ((run.run.path, "classifier"), (stock, "pretrained")):
        call("suggest", source, "--pool", pool, "--count", 4, "--with", "label", "--out", tmp_path / f"{name}.csv")
    classifier, pretrained = (read_rows(tmp_path / f"{name}.csv") for name in ("classifier", "pretrained"))
    assert [*classifier[0]] == [*pretrained[0]] and "input.label" in pretrained[0]
    assert all(row["input.label"] == true[row["text"]] for row in [*classifier, *pretrained])
    assert {row["label"] for row in classifier} <= {"good", "bad"} and {row["label"] for row in pretrained} == {""}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no rows to choose from"),
        (("--pool", "missing.csv"), "missing.csv"),
        (("--pool", "POOL", "--method", "entrpy"), "did you mean 'entropy'"),
        (("--pool", "POOL", "--count", "0"), "must be 1 or more"),
        (("--pool", "POOL", "--out", "rows.xls"), "must end in .jsonl, .csv or .tsv"),
        (("--pool", "POOL", "--with", "nr"), "--with nr"),
    ],
)
def test_bad_input_is_answered_in_one_line(call, run, pool, options, message):
    _, err = call("suggest", run.run.path, *(str(pool) if word == "POOL" else word for word in options), code=2)
    assert message in err and len(err.strip().splitlines()) == 1


def test_only_classifiers_of_texts_are_asked(stock, tmp_path):
    from tests.experiments.small import make_tagged, write_lines

    files = {name: write_lines(tmp_path / f"{name}.jsonl", make_tagged(16, name=name)) for name in ("train", "valid")}
    headstock.finetune(stock, **files, task="tag", out=tmp_path / "run", settings={"epochs": 1, "least_steps": 1})
    with pytest.raises(UserError, match="need one class for each text"):
        headstock.load(tmp_path / "run").suggest(["Anne"])
