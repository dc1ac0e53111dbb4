"""Soft labels: reading probabilities, the loss against torch, and training from them."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.classify import Classify, ClassifyConfig, read_class_records
from headstock.tasks.soft_labels import PROBABILITIES, probability_array, soft_losses
from headstock.train.run_folder import RunFolder
from tests.conftest import TINY

CONFIG = ClassifyConfig(soft_labels=True, classes=("bad", "good"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_probabilities_are_read_by_class_and_normalized(tmp_path):
    rows = [{"text": "a", PROBABILITIES: {"good": 0.75, "bad": 0.249}}, {"text": "b", PROBABILITIES: {"bad": 1}}]
    records = read_class_records(write(tmp_path / "rows.jsonl", rows), CONFIG)
    assert records.labels == ["good", "bad"]
    array = probability_array(records, CONFIG)
    assert array == pytest.approx(np.array([[0.249 / 0.999, 0.75 / 0.999], [1, 0]]))


def test_a_table_may_hold_them_as_json(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('text,label,probabilities\nx,good,"{""good"": 0.6, ""bad"": 0.4}"\n')
    assert probability_array(read_class_records(path, CONFIG), CONFIG) == pytest.approx(np.array([[0.4, 0.6]]))
    hard = read_class_records(path, ClassifyConfig())  # without the setting, the column is ignored
    assert PROBABILITIES not in hard.columns


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"good": 0.5, "bad": 0.4}, "sums to 0.9"),
        ({"good": 1.5, "bad": -0.5}, "expected the probability of each class"),
        ({"good": "much"}, "expected the probability of each class"),
        ({"good": True}, "expected the probability of each class"),
        ({}, "expected the probability of each class"),
        ("[" * 100_000, "expected the probability of each class"),
        (0.7, "expected the probability of each class"),
    ],
)
def test_unusable_probabilities_are_refused(tmp_path, value, problem):
    path = write(tmp_path / "rows.jsonl", [{"text": "a", PROBABILITIES: value}])
    with pytest.raises(UserError, match=problem):
        read_class_records(path, CONFIG)


def test_unknown_classes_are_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "a", PROBABILITIES: {"good": 0.5, "god": 0.5}}])
    with pytest.raises(UserError, match="'god' is new"):
        probability_array(read_class_records(path, CONFIG), CONFIG)


def test_several_classes_per_row_cannot_be_soft():
    with pytest.raises(ConfigError, match="soft_labels"):
        headstock.finetune("reviews-en", train="x", out="y", settings={"soft_labels": True, "separator": "|"})


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_torch(weights, smoothing):
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 3), torch.rand(6, 3).softmax(-1)
    labels = targets.argmax(-1)
    labels[4:] = IGNORE_INDEX  # padding examples
    weights = None if weights is None else torch.tensor(weights)
    expected = F.cross_entropy(logits[:4], targets[:4], weights, reduction="sum", label_smoothing=smoothing)
    losses = soft_losses(logits, labels, targets, weights, smoothing)
    assert losses["label"] == pytest.approx(expected.item(), rel=1e-5)
    assert losses["correct"] == (logits[:4].argmax(-1) == labels[:4]).sum()


def test_certain_probabilities_train_as_labels_do(tmp_path, corpus, tiny):
    """And uncertain ones do not: the model becomes as uncertain as they are."""
    source = tmp_path / "source"
    headstock.pretrain(corpus, out=source, settings=TINY | {"steps": 2})
    texts = [("Ben likes the sea.", "sea"), ("Ben likes Paris.", "town")] * 8
    outcomes = {}
    for name, confidence in (("hard", None), ("certain", 1.0), ("unsure", 0.7)):
        rows = [{"text": text, "label": label} for text, label in texts]
        if confidence is not None:
            other = {"sea": "town", "town": "sea"}
            for row in rows:
                label = row.pop("label")
                row[PROBABILITIES] = {label: confidence, other[label]: 1 - confidence}
        train = write(tmp_path / f"{name}.jsonl", rows)
        valid = write(tmp_path / "valid.jsonl", [{"text": text, "label": label} for text, label in texts[:4]])
        settings = {"soft_labels": confidence is not None, "epochs": 60, "lr": 1e-2, "least_steps": 0, "dropout": 0.0}
        settings |= {"validate_every": 10_000, "weights": "last"}
        headstock.finetune(source, train=train, valid=valid, out=tmp_path / name, settings=settings)
        predictions = headstock.load(tmp_path / name).predict([text for text, _ in texts[:2]])
        outcomes[name] = [prediction["probabilities"]["sea"] for prediction in predictions]
    weights = [RunFolder(tmp_path / name).weights() for name in ("hard", "certain")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])
    assert outcomes["hard"][0] > 0.95 and outcomes["hard"][1] < 0.05
    assert outcomes["unsure"] == pytest.approx([0.7, 0.3], abs=0.08)


def test_pairs_have_soft_labels_too(tmp_path):
    from headstock.tasks.pair import Pair, PairConfig

    row = {"text": "a", "text_b": "b", PROBABILITIES: {"yes": 0.2, "no": 0.8}}
    records = Pair.read_file(write(tmp_path / "pairs.jsonl", [row]), config=PairConfig(soft_labels=True))
    assert records.labels == ["no"] and records.columns[PROBABILITIES] == [{"yes": 0.2, "no": 0.8}]
    assert Classify.read_file(tmp_path / "pairs.jsonl", config=ClassifyConfig()).labels is None
