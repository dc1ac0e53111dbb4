"""What a classifier says of texts: the same whatever their company, in the order they came, in little memory."""

import itertools
import json
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch.overrides import TorchFunctionMode

import headstock
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.inference import embed, inputs, pipeline
from headstock.model.batch import Batch
from headstock.train import evaluate
from headstock.train.evaluate import as_arrays, ensemble_mean
from headstock.train.finetune import finetune
from tests.conftest import TINY

QUICK = {"least_steps": 0, "epochs": 4, "lr": 0.01}


def texts(count: int, seed: int = 0) -> list[str]:
    """From one word to several times the context of 32 tokens."""
    pick = random.Random(seed)
    words = ["Anne", "Ben", "Zoë", "sees", "likes", "the sea", "Paris", "home", "café"]
    return [" ".join(pick.choices(words, k=pick.choice([1, 2, 5, 12, 40, 90]))) for _ in range(count)]


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
    headstock.pretrain(corpus, out=folder / "stock", settings=TINY | {"steps": 10})
    for name, count in (("train", 48), ("valid", 40), ("test", 40)):
        write(folder / f"{name}.jsonl", labelled(count, count + len(name)))
    return folder


def learned(folder, name, **settings):
    files = {name: folder / f"{name}.jsonl" for name in ("train", "valid", "test")}
    finetune(folder / "stock", out=folder / name, settings=QUICK | settings, **files)
    return folder / name


@pytest.fixture(scope="module")
def run(folder):
    return learned(folder, "run")


@pytest.mark.parametrize(
    ("long", "pool"), [("head", "last"), ("tail", "max"), ("head+tail", "mean"), ("windows", "concat")]
)
def test_a_text_is_told_alike_alone_and_among_others(folder, long, pool):
    model = headstock.load(learned(folder, f"{long}-{pool}", long=long, pool=pool))
    given = ["", *texts(60), "", "Anne"]
    together = model.probabilities(given)
    alone = np.concatenate([model.probabilities([text]) for text in given])
    assert together == pytest.approx(alone, abs=1e-5)
    assert np.ptp(together[:, 0]) > 1e-3  # they do differ, so an order that was lost would be seen


@pytest.mark.parametrize(
    ("long", "pool", "both"), [("head", "last", False), ("windows", "last", True), ("windows", "cls", True)]
)
def test_what_nobody_reads_is_not_computed_and_changes_nothing(folder, long, pool, both):
    settings = {"long": long, "pool": pool, "bidirectional": both, "epochs": 1}
    model = headstock.load(learned(folder, f"only-{long}-{pool}-{both}", **settings))
    given, last = ["", *texts(30, seed=2)], model.model.backbone.blocks[-1]
    less = model.probabilities(given)
    hook = last.register_forward_hook(lambda *_: None)  # who listens is told of all places
    whole = model.probabilities(given)
    hook.remove()
    assert less == pytest.approx(whole, rel=2e-6, abs=0)
    assert np.ptp(less[:, 0]) > 1e-3
    weight = last.feed.up.weight
    places = []

    def note(function, args):
        if function is torch.nn.functional.linear and args[1] is weight:
            places.append(args[0].size(1))

    with noting(note):
        model.probabilities(given[:3])
    assert set(places) == {1}


@contextmanager
def noting(note):
    """Tells of all that is done to tensors, without a hook."""

    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            note(function, args)
            return function(*args, **(kwargs or {}))

    with Noting():
        yield


def test_many_texts_are_read_in_parts_and_told_in_order(run, monkeypatch):
    model = headstock.load(run)
    given = texts(50, seed=1)
    whole = model.predict(given)
    monkeypatch.setattr(inputs, "MAX_CHUNK", 7)
    parts = model.predict(iter(given))
    assert [row["label"] for row in parts] == [row["label"] for row in whole]
    for one, other in zip(parts, whole, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
    endless = model.iter_predictions(itertools.cycle(given))  # answers do not wait for the last text
    assert [row["label"] for row in itertools.islice(endless, 60)] == [row["label"] for row in [*whole, *whole[:10]]]
    assert model.predict([]) == []


def test_many_threads_cut_what_one_cuts(run, monkeypatch):
    model, given = headstock.load(run, device="cpu"), texts(50, seed=1)
    one = model.predict(given), model.embed(given)
    monkeypatch.setattr(inputs, "MAX_CHUNK", 7)
    monkeypatch.setattr(inputs, "tokenizer_threads", lambda device: 3)
    monkeypatch.setattr(pipeline, "MAX_CHUNK", 7)
    monkeypatch.setattr(pipeline, "tokenizer_threads", lambda device: 3)
    for row, other in zip(model.predict(given), one[0], strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
    assert model.embed(given) == pytest.approx(one[1], abs=1e-5)


def test_texts_are_read_by_kernels_that_take_any_shape(run, monkeypatch):
    """On a GPU; here that they would be."""
    inside, seen = [], []

    @contextmanager
    def noted(device):
        inside.append(device)
        yield
        inside.pop()

    model = headstock.load(run, device="cpu")
    monkeypatch.setattr(evaluate, "without_cudnn_attention", noted)
    monkeypatch.setattr(embed, "without_cudnn_attention", noted)
    model.model.backbone.register_forward_pre_hook(lambda *_: seen.append(len(inside)))
    model.predict(texts(5))
    model.embed(texts(5), pool="mean")
    model.embed(texts(5), pool="last")
    assert seen == [1, 1, 1]


def test_an_empty_text_is_told_from_the_opening_mark_alone(run):
    model = headstock.load(run)
    opening = Batch(torch.tensor([[model.task.bos]]))
    with torch.no_grad():
        wanted = model.task.outputs(model.model, opening)[0].tolist()
    row = model.predict(["Anne sees", "", "Paris"])[1]
    assert list(row["probabilities"].values()) == pytest.approx(wanted, abs=1e-5)
    assert model.predict("")[0] == row


def test_rows_of_any_shape_come_over_in_one_piece():
    rows = [torch.arange(3.0), torch.ones(2, 2), torch.zeros(0, 2), torch.tensor(7), torch.arange(4).bfloat16()]
    alike = torch.arange(6).bfloat16().view(2, 3)  # a batch whose rows are one tensor
    found = as_arrays([rows[:2], alike, rows[2:], alike[:1], []])
    assert [one.shape for one in found] == [(3,), (2, 2), (3,), (3,), (0, 2), (), (4,), (3,)]
    for one, row in zip(found, [*rows[:2], *alike, *rows[2:], alike[0]], strict=True):
        np.testing.assert_array_equal(one, row.float().numpy())
    assert as_arrays([]) == as_arrays([[]]) == []


def test_what_is_done_to_tensors_does_not_grow_with_the_texts_of_a_batch(run):
    model = headstock.load(run)

    def calls(given):
        called = []
        with noting(lambda function, args: called.append(function)):
            assert len(model.outputs(model.labelled_task().prepare(given, labelled=False))) == len(given)
        return len(called)

    many = Records("row", list(range(60)), {"text": ["Anne", "Ben"] * 30})
    assert calls(many) == calls(many.select(range(4)))


@pytest.mark.parametrize("models", [2, 3, 9])
def test_an_ensemble_is_the_mean_of_its_models_to_the_last_bit(models):
    draw = np.random.default_rng(0)
    rows = [[draw.random((1 + i % 3, 4), dtype=np.float32) for i in range(40)] for _ in range(models)]
    found = ensemble_mean(rows)
    assert {one.dtype for one in found} == {np.dtype(np.float32)}
    for one, row in zip(found, zip(*rows, strict=True), strict=True):
        np.testing.assert_array_equal(one, np.mean(row, axis=0))
    assert ensemble_mean(rows[:1]) is rows[0]


MEMORY = """
import json, resource, sys, torch
torch.set_num_threads(1)
import headstock

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

model = headstock.load(sys.argv[1])
text = "Anne sees the sea. " * 50
ids = model.tokenizer.encode(text)[:50]
model.predict(text)
before, count = peak(), 0
for row in model.iter_predictions(model.tokenizer.decode(ids) for _ in range(10_000)):
    count += row["label"] in ("long", "short")
print(json.dumps({"grown": peak() - before, "count": count, "tokens": len(ids)}))
"""


def test_ten_thousand_texts_need_little_memory(run):
    pytest.importorskip("resource")  # Windows has none
    done = subprocess.run([sys.executable, "-c", MEMORY, run], capture_output=True, text=True)
    told = json.loads(done.stdout or done.stderr)
    assert (told["count"], told["tokens"]) == (10_000, 50)
    assert told["grown"] < 400e6


# Measuring


def test_metrics_are_those_of_the_predictions(folder, run):
    model = headstock.load(run)
    rows = labelled(40, 40 + len("test"))
    told = model.predict([text for text, _ in rows])
    wanted, said = [label for _, label in rows], [row["label"] for row in told]
    metrics = model.evaluate(folder / "test.jsonl")
    assert metrics["rows"] == 40
    assert metrics["accuracy"] == pytest.approx(np.mean([a == b for a, b in zip(wanted, said, strict=True)]))
    assert 0.5 < metrics["accuracy"] < 1  # neither guessed nor perfect, so the comparison says something
    assert metrics["macro_f1"] == pytest.approx(f1_score(wanted, said, average="macro"))
    likely = [row["probabilities"][label] for row, label in zip(told, wanted, strict=True)]
    assert metrics["loss"] == pytest.approx(-np.log(likely).mean(), abs=1e-4)
    low, high = metrics["intervals"]["accuracy"]
    assert low < metrics["accuracy"] < high
    recorded = model.run.results()
    assert metrics == recorded["test"] | {"file": str(folder / "test.jsonl")}
    assert model.evaluate() == metrics  # without a file: the run's own test rows


def test_without_test_rows_the_validation_rows_are_measured(folder, tmp_path):
    files = {name: folder / f"{name}.jsonl" for name in ("train", "valid")}
    done = finetune(folder / "stock", out=tmp_path / "run", settings=QUICK, **files)
    assert headstock.load(tmp_path / "run").evaluate() == done["valid"] | {"file": str(files["valid"])}


def test_what_cannot_be_measured_is_refused(folder, run, tmp_path):
    model = headstock.load(run)
    (tmp_path / "bare.txt").write_text("Anne sees Paris.\n")
    with pytest.raises(UserError, match=r"bare.txt: .*without labels"):
        model.evaluate(tmp_path / "bare.txt")
    other = write(tmp_path / "other.jsonl", [("Anne", "long"), ("Ben", "shrot")])
    with pytest.raises(UserError, match=r"other.jsonl:2: label 'shrot' is new; .*did you mean 'short'"):
        model.evaluate(other)
    with pytest.raises(UserError, match="not on 2"):
        model.evaluate([other, other])


def test_a_run_is_not_measured_on_rows_that_have_changed(folder, tmp_path):
    for name in ("train", "valid"):
        shutil.copy(folder / f"{name}.jsonl", tmp_path)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "valid")}
    finetune(folder / "stock", out=tmp_path / "run", settings=QUICK | {"epochs": 1}, **files)
    shutil.copy(folder / "train.jsonl", tmp_path / "valid.jsonl")
    model = headstock.load(tmp_path / "run")
    with pytest.raises(UserError, match="labelled files have changed"):
        model.evaluate()
    assert model.evaluate(tmp_path / "valid.jsonl")["rows"] == 48


def test_a_language_model_has_no_head_to_classify_with(folder, run):
    stock = headstock.load(folder / "stock")
    with pytest.raises(UserError, match=r"stock: .*headstock finetune"):
        stock.predict("Anne")
    with pytest.raises(UserError, match="is no left-to-right language model"):
        headstock.load(run).generate("Anne")


# What programs hand over


class Column:
    """A data frame's column, as pandas and polars have it: no list, but it is iterated over by its values."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Frame:
    """A data frame: iterated over by the names of its columns."""

    def __init__(self, **columns):
        self.data = columns
        self.columns = list(columns)
        self.shape = (2, len(columns))

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return Column(self.data[name])


def test_texts_may_come_in_anything_that_holds_texts(run):
    model, two = headstock.load(run), ["Anne sees Paris.", "Ben likes the sea."]
    frame = Frame(id=[1, 2], text=two)
    wanted = model.predict(two)
    for given_as in (tuple(two), iter(two), (text for text in two), np.array(two), frame["text"]):
        assert model.predict(given_as) == wanted
    assert np.array_equal(model.embed(np.array(two)), model.embed(two))


def test_a_data_frame_is_refused_with_the_column_to_pass(run, folder):
    frame = Frame(id=[1, 2], text=["Anne", "Ben"])
    model, stock = headstock.load(run), headstock.load(folder / "stock")
    for use in (model.predict, model.probabilities, model.embed, stock.score, stock.generate):
        with pytest.raises(UserError, match=r"df\['text'\].*'id', 'text'"):
            use(frame)
    with pytest.raises(UserError, match="dict"):
        model.predict({"text": ["Anne"]})


@pytest.mark.parametrize("wrong", [None, float("nan"), 3, ["Anne"], b"Anne"])
def test_what_is_no_text_is_named_with_its_position_and_type(run, folder, wrong):
    model, stock = headstock.load(run), headstock.load(folder / "stock")
    for use in (model.predict, model.probabilities, model.embed, stock.score, stock.generate):
        with pytest.raises(UserError, match=rf"\[2\] is .*{type(wrong).__name__.removesuffix('Type')}.*expected"):
            use(["Anne", "Ben", wrong])
        with pytest.raises(UserError, match="expected"):
            use(7)


def test_a_real_data_frame_is_refused_and_its_column_read(run):
    pandas = pytest.importorskip("pandas")
    model = headstock.load(run)
    frame = pandas.DataFrame({"text": ["Anne", "Ben"]})
    with pytest.raises(UserError, match=r"df\['text'\]"):
        model.predict(frame)
    assert model.predict(frame["text"]) == model.predict(["Anne", "Ben"])
    with pytest.raises(UserError, match=r"rows\[1\]"):
        model.predict(pandas.Series(["Anne", None]))
