"""Linear probes: the head that fine-tuning starts from with `linear_probe`."""

import copy
import shutil

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import headstock
from headstock.errors import HeadstockError
from headstock.model.batch import Batch
from headstock.train.evaluate import cache_features
from headstock.train.linear_probe import C_VALUES, choose_c, fit_linear_probe, fit_logistic_head, pooled_vectors
from headstock.train.run_folder import RunFolder

PROBE = {"linear_probe": True, "epochs": 1, "batch": 16}
UNCHANGED = PROBE | {"lr": 1e-30}  # changes no weight


@pytest.fixture(scope="module")
def probed(stock, files, tmp_path_factory):
    """A classifier that was not trained after its head was fitted."""
    out = tmp_path_factory.mktemp("probe") / "run"
    headstock.finetune(stock, **files, out=out, settings=UNCHANGED)
    return headstock.load(out)


def features_of(run, path):
    data = run.task.prepare(run.task.read_file(path, config=run.task.config))
    return pooled_vectors(cache_features(run.model, run.task, data, length=run.length)), data.labels


def test_the_head_is_a_logistic_regression_of_standardized_features(probed, files):
    vectors, labels = features_of(probed, files["train"])
    c, _ = choose_c(vectors, labels, seed=0)
    expected = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=2000)).fit(vectors, labels)
    rows = probed.task.read_file(files["test"], config=probed.task.config)
    outputs = np.stack(probed.outputs(probed.task.prepare(rows)))
    assert np.allclose(outputs, expected.predict_proba(features_of(probed, files["test"])[0]), atol=1e-3)
    other = make_pipeline(StandardScaler(), LogisticRegression(C=c)).fit(vectors, 1 - labels)
    assert not np.allclose(outputs, other.predict_proba(features_of(probed, files["test"])[0]), atol=1e-2)


def test_the_backbone_is_the_sources(probed, stock):
    source, tensors = RunFolder(stock).weights(), probed.run.weights()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in source.items() if name.startswith("backbone."))


def test_the_penalty_follows_the_noise_of_the_labels():
    """Noisy labels want a strong penalty, and labels that a line separates a weak one."""
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(200, 20))
    clean, noise = (vectors[:, 0] > 0).astype(int), generator.integers(2, size=200)
    (weak, accuracy), (strong, chance) = (choose_c(vectors, labels, seed=0) for labels in (clean, noise))
    assert weak > strong and accuracy > 0.9 and 0.3 < chance < 0.7
    assert choose_c(vectors, clean, seed=0) == (weak, accuracy)
    alone = np.array([0] * 199 + [1])
    assert choose_c(vectors, alone, seed=0) == (C_VALUES[2], None)  # cross-validation needs two rows of a class


def test_three_classes_keep_their_scale(probed):
    task = probed.task.with_settings(classes=("a", "b", "c"))
    model = probed.model.with_heads(task.heads(probed.model.backbone))
    width = model.heads["label"].linear.in_features
    vectors = np.random.default_rng(1).normal(loc=5.0, scale=np.linspace(0.1, 10, width), size=(90, width))
    labels = np.arange(90) % 3
    fit_logistic_head(model, vectors, labels, task.config, c=0.1, standardize=True)
    expected = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000)).fit(vectors, labels)
    outputs = model.eval().heads["label"](torch.tensor(vectors, dtype=torch.float32)).softmax(-1).detach().numpy()
    assert np.allclose(outputs, expected.predict_proba(vectors), atol=1e-3)


def test_a_class_without_rows_can_still_be_learnt(stock, files, tmp_path):
    settings = UNCHANGED | {"task.classes": ["bad", "good", "new"]}
    run = headstock.finetune(stock, **files, out=tmp_path / "run", settings=settings)
    bias = RunFolder(run.run).weights()["heads.label.linear.bias"]
    assert -10 < float(bias[2]) < -2
    assert run["test"]["loss"] < 2


def test_rows_of_one_class_leave_the_head_random(probed):
    data = probed.task.prepare(probed.task.read_file(probed.config.data.train, config=probed.task.config))
    before = probed.model.heads["label"].linear.weight.detach().clone()
    alone = data.select(np.flatnonzero(data.labels == 0).tolist())
    fit_linear_probe(probed.model, probed.task, alone, length=probed.length, dtype="auto", seed=0)
    assert torch.equal(probed.model.heads["label"].linear.weight, before)


def test_class_weights_count_in_the_search_as_well():
    vectors = np.random.default_rng(0).normal(size=(100, 5))
    labels = (vectors[:, 0] > 1).astype(int)
    assert choose_c(vectors, labels, class_weight={0: 1.0, 1: 1e3}, seed=0) != choose_c(vectors, labels, seed=0)


def test_only_some_of_many_rows_are_read(probed, files, monkeypatch):
    data = probed.task.prepare(probed.task.read_file(files["train"], config=probed.task.config))
    read, forward = [], type(probed.model).forward

    def record(model, batch: Batch, **options):
        read.append(len(batch.tokens))
        return forward(model, batch, **options)

    monkeypatch.setattr(type(probed.model), "forward", record)
    monkeypatch.setattr("headstock.train.linear_probe.MAX_ROWS", 12)
    head = copy.deepcopy(probed.model.heads["label"])
    fit_linear_probe(probed.model, probed.task, data, length=probed.length, dtype="auto", seed=0)
    assert sum(read) == 12 < len(data)
    assert not torch.equal(probed.model.heads["label"].linear.weight, head.linear.weight)
    probed.model.heads["label"].load_state_dict(head.state_dict())


@pytest.mark.parametrize("further", [{}, {"lora": 2, "lr": 1e-3}, {"lm_loss": 0.5, "token_dropout": 0.1}])
def test_a_run_resumes_to_the_same_bits(stock, files, tmp_path, further):
    settings = PROBE | {"epochs": 2, "lr": 5e-3, "keep_every": 1} | further
    out = tmp_path / "run"
    headstock.finetune(stock, **files, out=out, settings=settings)
    whole = shutil.copytree(out, tmp_path / "whole")
    *_, last = sorted((out / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    for path in (last, out / "results.json", out / "model.safetensors", out / "manifest.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    headstock.finetune(stock, **files, out=out, settings=settings, resume=True)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    headstock.finetune(stock, **files, out=tmp_path / "random", settings=settings | {"linear_probe": False})
    assert (out / "model.safetensors").read_bytes() != (tmp_path / "random" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "scratch"}, "linear_probe: fits the head to pretrained features"),
        ({"freeze": True}, "linear_probe: is where fine-tuning starts"),
        ({"method": "setfit"}, "linear_probe: conflicts with method setfit"),
        ({"separator": "|"}, "linear_probe: needs one class per row"),
        ({"reinit_layers": 1}, "linear_probe: fits the head to pretrained layers"),
        ({"dense": "tanh"}, "dense: tanh conflicts with transfer.linear_probe"),
        ({"layers": "mix"}, "layers: mix conflicts with transfer.linear_probe"),
        ({"head_bias": False}, "head_bias: false conflicts with transfer.linear_probe"),
    ],
)
def test_what_has_no_probe_is_refused(stock, files, tmp_path, settings, message):
    with pytest.raises(HeadstockError, match=message):
        headstock.finetune(stock, **files, out=tmp_path / "run", settings=PROBE | settings)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_task_without_classes_is_refused(stock, files, tmp_path):
    with pytest.raises(HeadstockError, match="linear_probe: needs one class per row, which tag rows do not have"):
        headstock.finetune(stock, **files, task="tag", out=tmp_path / "run", settings=PROBE)
