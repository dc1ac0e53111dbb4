"""Classification: what is read of a text, into which vector, and what it costs to be wrong."""

import csv
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from headstock.data.labelled_texts import read_records
from headstock.data.records import Records
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import pool
from headstock.model.model import Model
from headstock.tasks.base import padded_batch
from headstock.tasks.class_labels import balanced_weights, find_classes, label_numbers
from headstock.tasks.classify import Classify, ClassifyConfig, class_predictions
from headstock.tasks.labelled import EncodedRows
from headstock.tasks.special_tokens import pad_with_special_tokens
from headstock.train.evaluate import cache_features
from tests.model.small import small_backbone, stir

POOLS = ("last", "cls", "mean", "max", "concat")
LETTERS = "abcdefghij"
TOKENIZER = train_tokenizer([LETTERS] * 3, TokenizerSettings(kind="char", vocabulary=40, min_frequency=1))


def make(**config):
    return Classify(ClassifyConfig(**({"classes": ("no", "so", "yes")} | config)), TOKENIZER)


def labelled(*texts, labels=None):
    tokens = [TOKENIZER.encode(text) for text in texts]
    return EncodedRows(tokens, None if labels is None else np.array(labels), [f"t:{i}" for i in range(len(tokens))])


def model_for(task, *, seed=0, **backbone):
    stock = small_backbone(seed, vocabulary=TOKENIZER.vocabulary, **({"context": 32} | backbone))
    heads = task.heads(stock)
    stir(heads["label"], seed=seed, spread=0.5)
    return Model(stock, heads).eval()


def records(*labels, source="train.csv"):
    return Records(source, list(range(2, len(labels) + 2)), {"text": ["x"] * len(labels), "label": list(labels)})


# What is read of a text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=9), min_size=1, max_size=6),
    st.lists(st.integers(50, 59), max_size=2),
    st.lists(st.integers(60, 69), max_size=2),
)
def test_texts_are_framed_as_if_each_was_a_row_by_itself(texts, before, after):
    tokens, padding = pad_with_special_tokens(texts, before, after, 99)
    wanted, nowhere = pad([[*before, *text, *after] for text in texts], 99)
    assert tokens.dtype == wanted.dtype and torch.equal(tokens, wanted)
    assert (padding is None) == (nowhere is None)
    assert padding is None or torch.equal(padding, nowhere)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("long", ["head", "tail", "head+tail", "windows"])
def test_a_batch_is_the_rows_of_its_texts_whether_they_are_long_or_not(long, closed):
    task, data = make(long=long, closed=closed), labelled("abc", "", "j", "abcdefgh", "ghijabcdefgh")
    examples = task.examples(data, length=8)
    for chosen in ([0, 1, 2], [2, 0], [1], [3, 0], [4, 2]):
        rows = [row for i in chosen for row in task.sequences(data.tokens[i], 8)]
        tokens, padding = pad(rows, task.pad_id)
        batch = examples.batch(chosen)
        assert torch.equal(batch.tokens, tokens)
        assert (batch.padding is None) == (padding is None)
        assert padding is None or torch.equal(batch.padding, padding)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(2, 20), st.sampled_from(["head", "tail", "head+tail", "windows"]))
@example(9, 10, "windows")
@example(10, 10, "windows")
def test_a_row_holds_as_much_as_fits(count, length, long):
    task, tokens, room = make(long=long), list(range(100, 100 + count)), length - 1
    rows = task.sequences(tokens, length)
    assert all(row[0] == task.bos and len(row) <= length for row in rows)
    parts = [row[1:] for row in rows]
    if count <= room:
        assert parts == [tokens]
    elif long == "head":
        assert parts == [tokens[:room]]
    elif long == "tail":
        assert parts == [tokens[count - room :]]
    elif long == "head+tail":
        head = room // 4
        assert parts == [tokens[:head] + tokens[count - (room - head) :]]
    else:
        assert set().union(*parts) == set(tokens)
        assert all(len(part) == room for part in parts[:-1])
        for before, after in pairwise(parts):
            assert after[0] - before[0] == max(1, room // 2)  # so the next begins in the middle of this one
        assert not set(parts[-1]) <= set().union(*parts[:-1])  # no window says only what others have said
        for part in parts:
            assert part == list(range(part[0], part[0] + len(part)))


@pytest.mark.parametrize("how", POOLS)
def test_a_text_in_windows_is_the_mean_of_its_windows(how):
    task = make(long="windows", pool=how)
    model = model_for(task)
    data = labelled("abc" * 9, "jihg", "fedcba" * 3)
    batch = task.examples(data, length=8).batch([0, 1, 2])
    rows = [task.sequences(tokens, 8) for tokens in data.tokens]
    assert len(batch.tokens) == sum(map(len, rows)) > 6
    together = task.pooled_features(model, batch)
    for text, windows in enumerate(rows):
        alone = [pool(model(Batch(torch.tensor([row]))).hidden, None, how)[0] for row in windows]
        assert torch.allclose(together[text], torch.stack(alone).mean(0), atol=1e-5)
    assert len(task.outputs(model, batch)) == 3


@torch.no_grad()
def test_what_a_frozen_backbone_saw_is_kept_in_single_precision_as_it_is_made():
    task = make()
    batch = task.examples(labelled("abc", "ji"), length=8).batch([0, 1])
    kept = task.compute_features(model_for(task).bfloat16(), batch)
    assert [[part.dtype for part in parts] for parts in kept] == [[torch.float32]] * 2


def test_rows_that_fill_a_batch_lose_nothing():
    for long in ("head", "windows"):
        task = make(long=long, dropout=0.0)
        model = model_for(task)
        examples = task.examples(labelled("abc" * 9, "jihg", "fe", labels=[2, 0, 1]), length=8)
        alone, more = padded_batch(examples, [0, 1], 2), padded_batch(examples, [0, 1], 4, filler=2)
        assert task.counts(more) == task.counts(alone) == {"label": 2}
        assert task.tokens(more) == task.tokens(alone)
        mine, theirs = task.losses(model, more), task.losses(model, alone)
        assert mine["label"].item() == pytest.approx(theirs["label"].item(), rel=1e-5)
        assert int(mine["correct"]) == int(theirs["correct"])


# Into which vector


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", POOLS)
def test_longer_neighbours_change_nothing(how, causal):
    task = make(pool=how)
    model = model_for(task, causal=causal)
    examples = task.examples(labelled("abc", "jihgfedcba" * 2, "fd", ""), length=32)
    together = task.outputs(model, examples.batch([0, 1, 2, 3]))
    assert torch.allclose(together.sum(1), torch.ones(4), atol=1e-6)
    for i in range(4):
        alone = task.outputs(model, examples.batch([i]))[0]
        assert torch.allclose(together[i], alone, atol=1e-5)
    blind = causal and how == "cls"  # only ever sees the opening mark
    assert blind or (together[0] - together[2]).abs().max() > 1e-3  # the control: texts that differ are told apart


@pytest.mark.parametrize("how", POOLS)
def test_the_padding_could_hold_anything(how):
    for causal in (True, False):
        task = make(pool=how)
        model = model_for(task, causal=causal)
        batch = task.examples(labelled("abc", "jihgfedcba"), length=32).batch([0, 1])
        before = task.pooled_features(model, batch)
        batch.tokens[batch.padding] = TOKENIZER.encode("e")[0]
        assert torch.allclose(task.pooled_features(model, batch), before, atol=1e-6)


@pytest.mark.parametrize("padded", [True, False])
def test_each_pooling_is_what_its_name_says(padded):
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4)
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool() if padded else None
    for row, length in enumerate([3, 5, 1] if padded else [5, 5, 5]):
        real = hidden[row, :length]
        named = {"last": real[-1], "cls": real[0], "mean": real.mean(0), "max": real.amax(0)}
        named["concat"] = torch.cat([named["last"], named["mean"], named["max"]])
        for how in POOLS:
            assert torch.allclose(pool(hidden, padding, how)[row], named[how])


def test_last_is_the_last_real_token():
    task = make(pool="last")
    model = model_for(task)
    batch = task.examples(labelled("abc", "jihgfedcba"), length=32).batch([0, 1])
    hidden = model(batch).hidden
    vectors = task.pooled_features(model, batch)
    assert torch.equal(vectors[0], hidden[0, 3])  # the opening mark and three letters
    assert torch.equal(vectors[1], hidden[1, 10])


@pytest.mark.parametrize("causal", [True, False])
def test_only_a_model_that_looks_ahead_can_read_a_text_at_its_beginning(causal):
    task = make(pool="cls")
    model = model_for(task, causal=causal)
    examples = task.examples(labelled("abcde", "abcdj", "jhgfi"), length=32)
    vectors = task.pooled_features(model, examples.batch([0, 1, 2]))
    assert torch.allclose(vectors[0], vectors[1], atol=1e-6) == causal
    assert torch.allclose(vectors[0], vectors[2], atol=1e-6) == causal


def test_features_of_a_frozen_backbone_stand_for_the_texts():
    for long in ("head", "windows"):
        task = make(long=long, pool="mean")
        model = model_for(task)
        data = labelled("abc" * 9, "j", "fedcba", labels=[2, 0, 1])
        fixed = cache_features(model, task, data, length=8)
        batch = task.examples(fixed, length=8).batch([2, 0])
        whole = task.examples(data, length=8).batch([2, 0])
        assert torch.equal(batch.labels["label"], torch.tensor([1, 2]))
        assert torch.allclose(task.outputs(model, batch), task.outputs(model, whole), atol=1e-5)


# What it costs to be wrong


def scored(task, labels):
    """A model, a batch with these labels (IGNORE_INDEX rows among them) and the scores its head gives."""
    model = model_for(task)
    texts = [LETTERS[i:] + LETTERS[:i] for i in range(len(labels))]
    batch = task.examples(labelled(*texts, labels=labels), length=32).batch(range(len(labels)))
    return model, batch, model.heads["label"](task.pooled_features(model, batch))


def head_gradient(model, loss):
    return torch.autograd.grad(loss, model.heads["label"].linear.weight, retain_graph=True)[0]


@pytest.mark.parametrize("weights", [(), (0.5, 3.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_torchs_weighted_sum(weights, smoothing):
    task = make(class_weights=weights)
    labels = [2, 0, 1, IGNORE_INDEX, 0, 2, IGNORE_INDEX]
    model, batch, scores = scored(task, labels)
    sums = task.losses(model, batch, smoothing=smoothing)
    reference = nn.CrossEntropyLoss(
        torch.tensor(weights) if weights else None, reduction="sum", label_smoothing=smoothing
    )
    kept = batch.labels["label"] != IGNORE_INDEX
    wanted = reference(scores[kept], batch.labels["label"][kept])
    assert sums["label"].item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.allclose(head_gradient(model, sums["label"]), head_gradient(model, wanted), atol=1e-6)
    if not smoothing:  # the same by hand
        each = [-scores[i].log_softmax(-1)[y] * (weights[y] if weights else 1) for i, y in enumerate(labels) if y >= 0]
        assert sums["label"].item() == pytest.approx(sum(each).item(), rel=1e-5)
    assert task.counts(batch) == {"label": 5}
    assert int(sums["correct"]) == int((scores[kept].argmax(-1) == batch.labels["label"][kept]).sum())


@pytest.mark.parametrize("weights", [(), (0.5, 3.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_of_their_own_lose_the_mean_over_them(weights, smoothing):
    task = make(separator=",", class_weights=weights)
    labels = [[1, 0, 1], [IGNORE_INDEX] * 3, [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]
    model, batch, scores = scored(task, labels)
    sums = task.losses(model, batch, smoothing=smoothing)
    kept = [0, 2, 3, 4, 5]
    wanted = torch.tensor(labels)[kept].float()
    reference = nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(weights) if weights else None)
    soft = wanted * (1 - smoothing) + smoothing / 2
    full = reference(scores[kept], soft).mean(1).sum()
    assert sums["label"].item() == pytest.approx(full.item(), rel=1e-6)
    assert torch.allclose(head_gradient(model, sums["label"]), head_gradient(model, full), atol=1e-6)
    assert task.counts(batch) == {"label": 5}
    probabilities = task.outputs(model, batch)[kept]
    chosen = probabilities > 0.5
    metrics = task.score({name: value.item() for name, value in sums.items()}, task.counts(batch), size=0)
    assert metrics["accuracy"] == pytest.approx((chosen == wanted.bool()).all(1).float().mean().item())
    assert metrics["micro_f1"] == pytest.approx(f1_score(wanted.numpy(), chosen.numpy(), average="micro"))
    assert metrics["loss"] == pytest.approx(full.item() / 5)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1_000_000), st.data(), st.floats(0, 50), st.floats(0, 50))
@example(100_000, None, 0.0, 50.0)
def test_the_best_is_the_most_accurate_then_the_one_with_the_least_loss(rows, data, loss, other):
    hits = rows - 1 if data is None else data.draw(st.integers(0, rows - 1))
    for task, name in ((make(), "accuracy"), (make(separator=","), "micro_f1")):
        more, less = {name: (hits + 1) / rows, "loss": other}, {name: hits / rows, "loss": loss}
        assert task.selection_score(more) < task.selection_score(less)  # one text more is better, whatever the loss
        if abs(loss - other) > 1e-3:
            better, worse = sorted([loss, other])
            assert task.selection_score({name: hits / rows, "loss": better}) < task.selection_score(
                {name: hits / rows, "loss": worse}
            )


# Classes and their names


def test_classes_come_in_their_natural_order():
    assert find_classes(records("10", "9", "-1", "9"), None) == ("-1", "9", "10")
    assert find_classes(records("4.5", "10", "0.5", "3"), None) == ("0.5", "3", "4.5", "10")
    assert find_classes(records("1", "01", "2"), None) == ("01", "1", "2")  # equal numbers, still always this way
    assert find_classes(records("pos", "neg", "neutral"), None) == ("neg", "neutral", "pos")
    assert find_classes(records("10", "9", "none"), None) == ("10", "9", "none")  # not all are numbers
    assert find_classes(records("²", "1"), None) == ("1", "²")
    assert find_classes(records("a, b", "c", "b"), ",") == ("a", "b", "c")
    assert find_classes(records("a", "a"), ",") == ("a",)  # a yes or no needs no second class


def test_one_class_is_none():
    with pytest.raises(UserError, match=r"^train.csv: only one class, 'pos'; there must be at least two"):
        find_classes(records("pos", "pos"), None)


def test_new_labels_are_named_with_their_places(tmp_path):
    path = tmp_path / "valid.csv"
    with path.open("w", newline="") as file:
        rows = [("text", "label"), ("good", "positive"), ("two\nlines", "negative"), ("fine", "positif"), ("so", "x")]
        csv.writer(file).writerows(rows)
    config = ClassifyConfig(classes=("negative", "positive"))
    with pytest.raises(UserError) as caught:
        label_numbers(read_records(path), config)
    known = "training has 'negative', 'positive'"
    assert str(caught.value).split("; ") == [
        f"{path}:5: label 'positif' is new",  # line 5, since one text has two lines
        known,
        "did you mean 'positive'?",
        f"{path}:6: label 'x' is new",
        known,
    ]
    with pytest.raises(UserError, match=r"^train.csv:2: .*train.csv:6: .*; and 4 more$"):
        label_numbers(records(*"qrstuvwxy"), config)


def test_labels_become_numbers():
    config = ClassifyConfig(classes=("a", "b", "c"))
    assert label_numbers(records("c", "a", "b"), config).tolist() == [2, 0, 1]
    several = ClassifyConfig(classes=("a", "b", "c"), separator="|")
    assert label_numbers(records("c|a", "b", "b | c"), several).tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 1]]


def test_balanced_weights_make_all_classes_count_alike():
    labels = np.array([0] * 6 + [1] * 3 + [2])
    weights = balanced_weights(labels, 3)
    assert weights == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=labels))
    assert np.bincount(labels) * weights == pytest.approx([10 / 3] * 3)
    yes = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert balanced_weights(yes, 2) == pytest.approx((1 / 3, 3.0))  # how many noes there are for a yes
    assert all(np.isfinite(balanced_weights(np.array([0, 1]), 3)))  # a class that no row has


def test_wrong_settings_cannot_be_built():
    with pytest.raises(ConfigError) as caught:
        ClassifyConfig(classes=("a", "b"), class_weights=(1.0,), dropout=1.0, separator="")
    assert [where for where, _ in caught.value.problems] == ["dropout", "class_weights", "separator"]
    with pytest.raises(ConfigError, match="0 or more"):
        ClassifyConfig(classes=("a", "b"), class_weights=(1.0, -1.0))


# What is said of a text


@pytest.mark.parametrize("separator", [None, "|"])
def test_many_texts_are_told_as_each_by_itself_and_as_plain_numbers_would(separator):
    config = ClassifyConfig(classes=("no", "so", "yes"), separator=separator)
    ties = np.arange(129, dtype=np.float32) / 128  # all of its numbers that lie between two of six digits are here
    found = np.random.default_rng(0).random((5000, 3), dtype=np.float32)
    found[: len(ties)] = ties[:, None]
    found[-2:] = [[0.25, 0.5, 0.5], [1.0, 0.0, 0.75]]
    told = class_predictions(config, list(found))
    assert told == [class_predictions(config, [row])[0] for row in found]
    for said, row in zip(told, found.tolist(), strict=True):
        assert said["probabilities"] == {name: round(p, 6) for name, p in zip(config.classes, row, strict=True)}
        if separator is None:
            assert list(said) == ["label", "probabilities"]
            assert said["label"] == config.classes[row.index(max(row))]  # the first of equals
        else:
            assert list(said) == ["label", "labels", "probabilities"]
            assert said["labels"] == [name for name, p in zip(config.classes, row, strict=True) if p > 0.5]
            assert said["label"] == "|".join(said["labels"])
    assert {type(p) for said in told for p in said["probabilities"].values()} == {float}
    assert class_predictions(config, []) == []
