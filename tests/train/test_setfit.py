"""SetFit: the pair loss, the logistic head, and runs that are used like any classifier."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.tasks.contrastive import ContrastivePairs
from headstock.train.evaluate import cache_features
from headstock.train.fit import EncodedSplits
from headstock.train.labelled_data import read_splits
from headstock.train.linear_probe import fit_logistic_head, pooled_vectors
from tests.experiments.small import make_pairs, make_rows, write_lines, write_rows

SETTINGS = {"method": "setfit", "lr": 0.01, "epochs": 10, "batch": 16}


@pytest.fixture(scope="module")
def run(stock, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("setfit") / "run"
    headstock.finetune(stock, **files, out=out, settings=SETTINGS)
    return headstock.load(out)


class FixedVectors:
    """Stands in for a classifier whose pooled features are given."""

    config = tokenizer = None
    has_unused_parameters = False

    def __init__(self, vectors):
        self.vectors = vectors

    def pooled_features(self, model, batch):
        return self.vectors


def test_the_loss_is_the_cosine_similarity_loss_of_all_pairs_with_equal_weight_for_both_kinds():
    vectors = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 0, 0, 1, 2, IGNORE_INDEX])
    task, batch = ContrastivePairs(FixedVectors(vectors)), Batch(torch.zeros(6, 1), labels={"label": labels})
    errors = {True: [], False: []}
    for i in range(5):
        for j in range(i):
            same = bool(labels[i] == labels[j])
            errors[same].append((F.cosine_similarity(vectors[i], vectors[j], dim=0) - float(same)) ** 2)
    sums, count = task.losses(None, batch), task.counts(batch)["label"]
    assert count == 10 == len(errors[True]) + len(errors[False])
    expected = (torch.stack(errors[True]).mean() + torch.stack(errors[False]).mean()) / 2
    assert float(sums["label"] / count) == pytest.approx(float(expected), rel=1e-5)
    unweighted = torch.stack(errors[True] + errors[False]).mean()
    assert float(unweighted) != pytest.approx(float(expected), rel=1e-2)  # which three classes would dominate
    assert 0 <= task.score({k: float(v) for k, v in sums.items()}, {"label": count}, size=0)["pair_accuracy"] <= 1


def test_the_head_is_scikit_learns_logistic_regression(run, files):
    from sklearn.linear_model import LogisticRegression

    rows = run.task.read_file(files["train"], config=run.task.config)
    data = run.task.prepare(rows)
    features = cache_features(run.model, run.task, data, length=run.length)
    vectors = torch.cat([vector for (vector,) in features.features]).double().numpy()
    expected = LogisticRegression(max_iter=2000).fit(vectors, data.labels).predict_proba(vectors)
    assert np.allclose(np.stack(run.outputs(data)), expected, atol=1e-3)
    other = LogisticRegression(max_iter=2000).fit(vectors, 1 - data.labels).predict_proba(vectors)
    assert not np.allclose(np.stack(run.outputs(data)), other, atol=1e-2)


def test_three_classes_one_of_which_has_no_rows(run):
    task = run.task.with_settings(classes=("a", "b", "c", "d"))
    model = run.model.with_heads(task.heads(run.model.backbone))
    labels, vectors = np.array([0, 0, 1, 1, 3, 3]), torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    fit_logistic_head(model, vectors.numpy(), labels, task.config)
    probabilities = model.eval().heads["label"](vectors).softmax(-1).detach()
    assert (probabilities.argmax(-1).numpy() == labels).all() and float(probabilities[:, 2].max()) < 1e-6


def test_training_separates_classes_and_wrong_labels_do_not(run, stock, files, tmp_path):
    rows = make_rows(60, name="train")
    swapped = [(text, ("good", "bad")[number % 2]) for number, (text, _) in enumerate(rows)]
    headstock.finetune(
        stock,
        train=write_rows(tmp_path / "wrong.csv", swapped),
        valid=files["valid"],
        out=tmp_path / "wrong",
        settings=SETTINGS,
    )

    def gap(pipeline):
        """How much more similar held-out rows of one class are than those of two."""
        records = run.task.read_file(files["test"], config=run.task.config)
        vectors = np.stack(pipeline.embed(records.display_texts, pool=run.task.config.pool))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        labels = np.array(records.labels)
        same, similar = labels[:, None] == labels, vectors @ vectors.T
        return similar[same].mean() - similar[~same].mean()

    trained, before, control = gap(run), gap(headstock.load(stock)), gap(headstock.load(tmp_path / "wrong"))
    assert trained > before + 0.2 and trained > control + 0.2


def test_a_run_predicts_evaluates_and_describes_itself(run, files):
    results = run.run.results()
    assert results["test"]["accuracy"] == run.evaluate(files["test"])["accuracy"] > 0.8
    assert [row["label"] for row in run.predict(["Anne likes likes home"])] == ["good"]
    assert "SetFit" in (run.run.path / "README.md").read_text()
    assert [set(row) for row in results["epochs"]] == [set(results["epochs"][0])]


def test_pairs_of_texts_are_read_as_pairs(stock, tmp_path):
    files = {name: write_lines(tmp_path / f"{name}.jsonl", make_pairs(24, name=name)) for name in ("train", "valid")}
    headstock.finetune(stock, **files, task="pair", out=tmp_path / "run", settings=SETTINGS | {"epochs": 1})
    assert headstock.load(tmp_path / "run").predict([("Anne sees home.", "Ben sees home.")])[0]["label"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": True}, "conflicts with freeze=True"),
        ({"settings": SETTINGS | {"layers": "mix"}}, "task.layers: mix"),
        ({"settings": SETTINGS | {"dense": "tanh"}}, "task.dense: tanh"),
        ({"settings": SETTINGS | {"separator": "|"}}, "needs one class per row"),
        ({"settings": SETTINGS | {"head_bias": False}}, "task.head_bias: false conflicts with method=.setfit."),
        ({"task": "tag"}, "needs one class per row"),
        ({"task": "regress"}, "needs one class per row"),
        ({"task": "ordinal"}, "does not apply to ordinal"),
        ({"settings": {"method": "setfitt"}}, "did you mean 'setfit'"),
    ],
)
def test_what_setfit_cannot_do_is_refused(stock, files, tmp_path, options, message):
    with pytest.raises(UserError, match=message) as raised:
        headstock.finetune(stock, **files, out=tmp_path / "run", **({"settings": SETTINGS} | options))
    assert "\n" not in str(raised.value)


def test_one_class_is_refused(stock, files, tmp_path, run):
    splits = read_splits(run.config.data, type(run.task), run.task.config, seed=0)
    data = EncodedSplits(run.task.prepare(splits.train), run.task.prepare(splits.valid))
    features = cache_features(run.model, run.task, data.train.select([0]), length=run.length)
    with pytest.raises(UserError, match="two classes or more, not 'bad'"):
        fit_logistic_head(run.model, pooled_vectors(features), np.array([0]), run.task.config)
