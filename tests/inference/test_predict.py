"""Predictions: independent of the batch, in order, in bounded memory; evaluation and invalid inputs."""

import itertools
import json
import random
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from torch.overrides import TorchFunctionMode

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.inference import embed, inputs, pipeline
from headstock.model.batch import Batch
from headstock.train import evaluate
from headstock.train.evaluate import as_arrays, ensemble_mean
from headstock.train.finetune import finetune
from headstock.train.memory import PeakMemory, process_bytes
from tests.conftest import TINY
from tests.train.processes import BackgroundProcess

QUICK = {"least_steps": 0, "epochs": 4, "lr": 0.01}


def texts(count: int, seed: int = 0) -> list[str]:
    """From one word to several times the context of 32 tokens."""
    generator = random.Random(seed)
    words = ["Anne", "Ben", "Zoë", "sees", "likes", "the sea", "Paris", "home", "café"]
    return [" ".join(generator.choices(words, k=generator.choice([1, 2, 5, 12, 40, 90]))) for _ in range(count)]


def write(path, rows):
    lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def labelled(count: int, seed: int):
    return [(text, "long" if len(text) > 60 else "short") for text in texts(count, seed)]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A pretraining run and labelled rows."""
    folder = tmp_path_factory.mktemp("predict")
    headstock.pretrain(corpus, out=folder / "pretrained", settings=TINY | {"steps": 10})
    for name, count in (("train", 48), ("valid", 40), ("test", 40)):
        write(folder / f"{name}.jsonl", labelled(count, count + len(name)))
    return folder


def train_classifier(folder, name, **settings):
    files = {name: folder / f"{name}.jsonl" for name in ("train", "valid", "test")}
    finetune(folder / "pretrained", out=folder / name, settings=QUICK | settings, **files)
    return folder / name


@pytest.fixture(scope="module")
def run(folder):
    return train_classifier(folder, "run")


@pytest.mark.parametrize(
    ("long", "pool"), [("head", "last"), ("tail", "max"), ("head+tail", "mean"), ("windows", "concat")]
)
def test_predictions_are_independent_of_the_batch(folder, long, pool):
    model = headstock.load(train_classifier(folder, f"{long}-{pool}", long=long, pool=pool))
    inputs = ["", *texts(60), "", "Anne"]
    together = model.probabilities(inputs)
    alone = np.concatenate([model.probabilities([text]) for text in inputs])
    assert together == pytest.approx(alone, abs=1e-5)
    assert np.ptp(together[:, 0]) > 1e-3  # they differ, so a wrong order would be noticed


@pytest.mark.parametrize(
    ("long", "pool", "bidirectional"), [("head", "last", False), ("windows", "last", True), ("windows", "cls", True)]
)
def test_only_the_pooled_position_of_the_last_block_is_computed(folder, long, pool, bidirectional):
    settings = {"long": long, "pool": pool, "bidirectional": bidirectional, "epochs": 1}
    model = headstock.load(train_classifier(folder, f"only-{long}-{pool}-{bidirectional}", **settings))
    inputs, last = ["", *texts(30, seed=2)], model.model.backbone.blocks[-1]
    pooled_only = model.probabilities(inputs)
    hook = last.register_forward_hook(lambda *_: None)  # a hook makes the block compute all positions
    all_positions = model.probabilities(inputs)
    hook.remove()
    assert pooled_only == pytest.approx(all_positions, rel=2e-6, abs=0)
    assert np.ptp(pooled_only[:, 0]) > 1e-3
    weight = last.feed.up.weight
    lengths = []

    def record(function, args):
        if function is torch.nn.functional.linear and args[1] is weight:
            lengths.append(args[0].size(1))

    with recorded_calls(record):
        model.probabilities(inputs[:3])
    assert set(lengths) == {1}


@contextmanager
def recorded_calls(record):
    """Records every torch function call, without a hook."""

    class Recording(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            record(function, args)
            return function(*args, **(kwargs or {}))

    with Recording():
        yield


def test_chunks_of_texts_are_predicted_in_order(run, monkeypatch):
    model = headstock.load(run)
    sample = texts(50, seed=1)
    expected = model.predict(sample)
    monkeypatch.setattr(inputs, "MAX_CHUNK", 7)
    chunked = model.predict(iter(sample))
    assert [row["label"] for row in chunked] == [row["label"] for row in expected]
    for row, other in zip(chunked, expected, strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
    endless = model.iter_predictions(itertools.cycle(sample))  # predictions are yielded before the last text is read
    assert [row["label"] for row in itertools.islice(endless, 60)] == [
        row["label"] for row in [*expected, *expected[:10]]
    ]
    assert model.predict([]) == []


def test_several_tokenizer_threads_give_the_same_predictions(run, monkeypatch):
    model, sample = headstock.load(run, device="cpu"), texts(50, seed=1)
    predictions, embeddings = model.predict(sample), model.embed(sample)
    monkeypatch.setattr(inputs, "MAX_CHUNK", 7)
    monkeypatch.setattr(inputs, "tokenizer_threads", lambda device: 3)
    monkeypatch.setattr(pipeline, "MAX_CHUNK", 7)
    monkeypatch.setattr(pipeline, "tokenizer_threads", lambda device: 3)
    for row, other in zip(model.predict(sample), predictions, strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
    assert model.embed(sample) == pytest.approx(embeddings, abs=1e-5)


def test_inference_disables_cudnn_attention(run, monkeypatch):
    """Which compiles a plan for every shape; on a CPU only the context manager is checked."""
    active, depths = [], []

    @contextmanager
    def recorded(device):
        active.append(device)
        yield
        active.pop()

    model = headstock.load(run, device="cpu")
    monkeypatch.setattr(evaluate, "without_cudnn_attention", recorded)
    monkeypatch.setattr(embed, "without_cudnn_attention", recorded)
    model.model.backbone.register_forward_pre_hook(lambda *_: depths.append(len(active)))
    model.predict(texts(5))
    model.embed(texts(5), pool="mean")
    model.embed(texts(5), pool="last")
    assert depths == [1, 1, 1]


def test_an_empty_text_is_predicted_from_the_first_special_token(run):
    model = headstock.load(run)
    batch = Batch(torch.tensor([[model.task.bos]]))
    with torch.no_grad():
        expected = model.task.outputs(model.model, batch)[0].tolist()
    row = model.predict(["Anne sees", "", "Paris"])[1]
    assert list(row["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
    assert model.predict("")[0] == row


def test_rows_of_any_shape_are_copied_to_arrays():
    rows = [torch.arange(3.0), torch.ones(2, 2), torch.zeros(0, 2), torch.tensor(7), torch.arange(4).bfloat16()]
    stacked = torch.arange(6).bfloat16().view(2, 3)  # a batch whose rows are one tensor
    arrays = as_arrays([rows[:2], stacked, rows[2:], stacked[:1], []])
    assert [array.shape for array in arrays] == [(3,), (2, 2), (3,), (3,), (0, 2), (), (4,), (3,)]
    for array, row in zip(arrays, [*rows[:2], *stacked, *rows[2:], stacked[0]], strict=True):
        np.testing.assert_array_equal(array, row.float().numpy())
    assert as_arrays([]) == as_arrays([[]]) == []


def test_the_number_of_torch_calls_is_independent_of_the_batch_size(run):
    model = headstock.load(run)

    def calls(records):
        functions = []
        with recorded_calls(lambda function, args: functions.append(function)):
            assert len(model.outputs(model.labelled_task().prepare(records, labelled=False))) == len(records)
        return len(functions)

    many = Records("row", list(range(60)), {"text": ["Anne", "Ben"] * 30})
    assert calls(many) == calls(many.select(range(4)))


@pytest.mark.parametrize("models", [2, 3, 9])
def test_ensembles_average_exactly(models):
    generator = np.random.default_rng(0)
    rows = [[generator.random((1 + i % 3, 4), dtype=np.float32) for i in range(40)] for _ in range(models)]
    means = ensemble_mean(rows)
    assert {mean.dtype for mean in means} == {np.dtype(np.float32)}
    for mean, row in zip(means, zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(mean, np.mean(row, axis=0))
    assert ensemble_mean(rows[:1]) is rows[0]


def print_memory_growth(run):
    """Predict 10,000 texts, and print by how much the peak memory of the process grew."""
    model, device = headstock.load(run, device="cpu"), torch.device("cpu")
    text = model.tokenizer.decode(model.tokenizer.encode("Anne sees the sea. " * 50)[:50])
    model.predict(text)
    before, peak, count = process_bytes(device), PeakMemory(device), 0
    for row in model.iter_predictions(text for _ in range(10_000)):
        count += row["label"] in ("long", "short")
    print(json.dumps({"growth": peak.bytes() - before, "count": count}))


def test_ten_thousand_texts_need_little_memory(run, tmp_path):
    pytest.importorskip("resource")  # Windows has none
    process = BackgroundProcess(tmp_path / "process", print_memory_growth, run)
    assert process.wait() == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["count"] == 10_000
    assert result["growth"] < 400e6


# Evaluation


def test_metrics_are_those_of_the_predictions(folder, run):
    model = headstock.load(run)
    rows = labelled(40, 40 + len("test"))
    predictions = model.predict([text for text, _ in rows])
    labels, predicted = [label for _, label in rows], [row["label"] for row in predictions]
    metrics = model.evaluate(folder / "test.jsonl")
    assert metrics["rows"] == 40
    assert metrics["accuracy"] == pytest.approx(np.mean([a == b for a, b in zip(labels, predicted, strict=True)]))
    assert 0.5 < metrics["accuracy"] < 1  # neither chance nor perfect
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    probabilities = [row["probabilities"][label] for row, label in zip(predictions, labels, strict=True)]
    assert metrics["loss"] == pytest.approx(-np.log(probabilities).mean(), abs=1e-4)
    is_long = [row["probabilities"]["long"] for row in predictions]
    assert metrics["mcc"] == pytest.approx(matthews_corrcoef(labels, predicted))
    assert metrics["auroc"] == pytest.approx(roc_auc_score([label == "long" for label in labels], is_long))
    for name in ("accuracy", "mcc", "auroc"):
        low, high = metrics["intervals"][name]
        assert low < metrics[name] < high
    recorded = model.run.results()
    assert metrics == recorded["test"] | {"file": str(folder / "test.jsonl")}
    assert model.evaluate() == metrics  # without a file: the run's own test rows


def test_without_test_rows_the_validation_rows_are_evaluated(folder, tmp_path):
    files = {name: folder / f"{name}.jsonl" for name in ("train", "valid")}
    done = finetune(folder / "pretrained", out=tmp_path / "run", settings=QUICK, **files)
    assert headstock.load(tmp_path / "run").evaluate() == done["valid"] | {"file": str(files["valid"])}


def test_invalid_evaluation_files_are_rejected(folder, run, tmp_path):
    model = headstock.load(run)
    (tmp_path / "unlabelled.txt").write_text("Anne sees Paris.\n")
    with pytest.raises(UserError, match=r"unlabelled.txt: .*without labels"):
        model.evaluate(tmp_path / "unlabelled.txt")
    other = write(tmp_path / "other.jsonl", [("Anne", "long"), ("Ben", "shrot")])
    with pytest.raises(UserError, match=r"other.jsonl:2: label 'shrot' is new; .*did you mean 'short'"):
        model.evaluate(other)
    with pytest.raises(UserError, match="not on 2"):
        model.evaluate([other, other])


def test_changed_held_out_rows_are_rejected(folder, tmp_path):
    for name in ("train", "valid"):
        shutil.copy(folder / f"{name}.jsonl", tmp_path)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "valid")}
    finetune(folder / "pretrained", out=tmp_path / "run", settings=QUICK | {"epochs": 1}, **files)
    shutil.copy(folder / "train.jsonl", tmp_path / "valid.jsonl")
    model = headstock.load(tmp_path / "run")
    with pytest.raises(UserError, match="or the files have changed; pass the file to evaluate on"):
        model.evaluate()
    assert model.evaluate(tmp_path / "valid.jsonl")["rows"] == 48
    shutil.copy(folder / "valid.jsonl", tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(UserError, match="its labelled files have changed since training"):
        model.evaluate()


def test_methods_of_another_task_are_rejected(folder, run):
    language_model = headstock.load(folder / "pretrained")
    with pytest.raises(UserError, match=r"pretrained: .*headstock finetune"):
        language_model.predict("Anne")
    with pytest.raises(UserError, match="is no left-to-right language model"):
        headstock.load(run).generate("Anne")


# Inputs from Python


class Column:
    """A column of a data frame, as in pandas and polars: not a list, but iterates over its values."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Frame:
    """A data frame, which iterates over the names of its columns."""

    def __init__(self, **columns):
        self.data = columns
        self.columns = list(columns)
        self.shape = (2, len(columns))

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return Column(self.data[name])


def test_any_iterable_of_texts_is_accepted(run):
    model, two = headstock.load(run), ["Anne sees Paris.", "Ben likes the sea."]
    frame = Frame(id=[1, 2], text=two)
    expected = model.predict(two)
    for rows in (tuple(two), iter(two), (text for text in two), np.array(two), frame["text"]):
        assert model.predict(rows) == expected
    assert np.array_equal(model.embed(np.array(two)), model.embed(two))


def test_data_frames_are_rejected_with_a_hint(run, folder):
    frame = Frame(id=[1, 2], text=["Anne", "Ben"])
    model, language_model = headstock.load(run), headstock.load(folder / "pretrained")
    for method in (model.probabilities, model.embed, language_model.score, language_model.generate):
        with pytest.raises(UserError, match=r"df\['text'\].*'id', 'text'"):
            method(frame)
    with pytest.raises(UserError, match="dict"):
        model.predict({"text": ["Anne"]})


@pytest.mark.parametrize("value", [None, float("nan"), 3, ["Anne"], b"Anne"])
def test_values_that_are_no_texts_are_named_with_position_and_type(run, folder, value):
    model, language_model = headstock.load(run), headstock.load(folder / "pretrained")
    for method in (model.predict, model.probabilities, model.embed, language_model.score, language_model.generate):
        with pytest.raises(UserError, match=rf"\[2\] is .*{type(value).__name__.removesuffix('Type')}.*expected"):
            method(["Anne", "Ben", value])
        with pytest.raises(UserError, match="expected"):
            method(7)


def test_pandas_frames_and_columns(run):
    pandas = pytest.importorskip("pandas")
    model = headstock.load(run)
    frame = pandas.DataFrame({"text": ["Anne", "Ben"]})
    assert model.predict(frame) == model.predict(["Anne", "Ben"])
    assert model.predict(frame["text"]) == model.predict(["Anne", "Ben"])
    with pytest.raises(UserError, match=r"rows\[1\]"):
        model.predict(pandas.Series(["Anne", None]))
