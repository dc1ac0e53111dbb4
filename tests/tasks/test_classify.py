"""Classification: truncation and windows, pooling, losses, class labels and predictions."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch import nn

from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError
from headstock.model.batch import IGNORE_INDEX, Batch, pad
from headstock.model.heads import pool
from headstock.model.model import Model
from headstock.tasks.base import padded_batch
from headstock.tasks.classify import Classify, ClassifyConfig, class_predictions
from headstock.tasks.labelled import EncodedRows
from headstock.tasks.special_tokens import pad_with_special_tokens
from headstock.train.evaluate import cache_features
from tests.model.small import small_backbone, stir

POOLS = ("last", "cls", "mean", "max", "concat")
LETTERS = "abcdefghij"
TOKENIZER = train_tokenizer([LETTERS] * 3, TokenizerSettings(kind="char", vocabulary=40, min_frequency=1))


def make_task(**config):
    return Classify(ClassifyConfig(**({"classes": ("no", "so", "yes")} | config)), TOKENIZER)


def labelled(*texts, labels=None):
    tokens = [TOKENIZER.encode(text) for text in texts]
    return EncodedRows(tokens, None if labels is None else np.array(labels), [f"t:{i}" for i in range(len(tokens))])


def model_for(task, *, seed=0, **backbone):
    trunk = small_backbone(seed, vocabulary=TOKENIZER.vocabulary, **({"context": 32} | backbone))
    heads = task.heads(trunk)
    stir(heads["label"], seed=seed, spread=0.5)
    return Model(trunk, heads).eval()


# Sequences


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=9), min_size=1, max_size=6),
    st.lists(st.integers(50, 59), max_size=2),
    st.lists(st.integers(60, 69), max_size=2),
)
def test_pad_with_special_tokens_equals_pad(texts, prefix, suffix):
    tokens, padding = pad_with_special_tokens(texts, prefix, suffix, 99)
    expected, expected_padding = pad([[*prefix, *text, *suffix] for text in texts], 99)
    assert tokens.dtype == expected.dtype and torch.equal(tokens, expected)
    assert (padding is None) == (expected_padding is None)
    assert padding is None or torch.equal(padding, expected_padding)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("length", [4, 7, 8])
@pytest.mark.parametrize("long", ["head", "tail", "head+tail", "windows"])
def test_lengths_are_those_of_all_sequences(long, length, closed):
    task, data = make_task(long=long, closed=closed), labelled(*(LETTERS[:count] for count in range(11)))
    lengths = task.examples(data, length=length).lengths.tolist()
    assert lengths == [sum(map(len, task.sequences(tokens, length))) for tokens in data.tokens]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("long", ["head", "tail", "head+tail", "windows"])
def test_batch_contains_the_sequences_of_its_texts(long, closed):
    task, data = make_task(long=long, closed=closed), labelled("abc", "", "j", "abcdefgh", "ghijabcdefgh")
    examples = task.examples(data, length=8)
    for indices in ([0, 1, 2], [2, 0], [1], [3, 0], [4, 2]):
        rows = [row for i in indices for row in task.sequences(data.tokens[i], 8)]
        tokens, padding = pad(rows, task.pad_id)
        batch = examples.batch(indices)
        assert torch.equal(batch.tokens, tokens)
        assert (batch.padding is None) == (padding is None)
        assert padding is None or torch.equal(batch.padding, padding)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.integers(2, 20), st.sampled_from(["head", "tail", "head+tail", "windows"]))
@example(9, 10, "windows")
@example(10, 10, "windows")
def test_sequences_contain_as_much_as_fits(count, length, long):
    task, tokens, capacity = make_task(long=long), list(range(100, 100 + count)), length - 1
    rows = task.sequences(tokens, length)
    assert all(row[0] == task.bos and len(row) <= length for row in rows)
    parts = [row[1:] for row in rows]
    if count <= capacity:
        assert parts == [tokens]
    elif long == "head":
        assert parts == [tokens[:capacity]]
    elif long == "tail":
        assert parts == [tokens[count - capacity :]]
    elif long == "head+tail":
        head = capacity // 4
        assert parts == [tokens[:head] + tokens[count - (capacity - head) :]]
    else:
        assert set().union(*parts) == set(tokens)
        assert all(len(part) == capacity for part in parts[:-1])
        for first, second in pairwise(parts):
            assert second[0] - first[0] == max(1, capacity // 2)  # overlap by half
        assert not set(parts[-1]) <= set().union(*parts[:-1])  # no window is redundant
        for part in parts:
            assert part == list(range(part[0], part[0] + len(part)))


def test_the_mean_of_many_windows_is_exact_in_half_precision():
    task = make_task(long="windows")
    model = model_for(task, context=8).bfloat16()
    batch = task.examples(labelled(LETTERS * 120, "abc"), length=8).batch([0, 1])
    assert (batch.example_ids == 0).sum() > 256  # bfloat16 counts no further
    vectors = pool(task.token_features(model, batch), batch.padding, task.config.pool)
    mean = vectors[batch.example_ids == 0].float().mean(0)
    assert torch.equal(task.pooled_features(model, batch)[0].float(), mean.bfloat16().float())


@pytest.mark.parametrize("pooling", POOLS)
def test_windows_are_averaged(pooling):
    task = make_task(long="windows", pool=pooling)
    model = model_for(task)
    data = labelled("abc" * 9, "jihg", "fedcba" * 3)
    batch = task.examples(data, length=8).batch([0, 1, 2])
    rows = [task.sequences(tokens, 8) for tokens in data.tokens]
    assert len(batch.tokens) == sum(map(len, rows)) > 6
    features = task.pooled_features(model, batch)
    for text, windows in enumerate(rows):
        vectors = [pool(model(Batch(torch.tensor([row]))).hidden, None, pooling)[0] for row in windows]
        assert torch.allclose(features[text], torch.stack(vectors).mean(0), atol=1e-5)
    assert len(task.outputs(model, batch)) == 3


@torch.no_grad()
def test_features_are_float32():
    task = make_task()
    batch = task.examples(labelled("abc", "ji"), length=8).batch([0, 1])
    features = task.compute_features(model_for(task).bfloat16(), batch)
    assert [[sequence.dtype for sequence in sequences] for sequences in features] == [[torch.float32]] * 2


def test_padding_examples_are_ignored():
    for long in ("head", "windows"):
        task = make_task(long=long, dropout=0.0)
        model = model_for(task)
        examples = task.examples(labelled("abc" * 9, "jihg", "fe", labels=[2, 0, 1]), length=8)
        batch, padded = padded_batch(examples, [0, 1], 2), padded_batch(examples, [0, 1], 4, filler=2)
        assert task.counts(padded) == task.counts(batch) == {"label": 2}
        assert task.tokens(padded) == task.tokens(batch)
        padded_losses, losses = task.losses(model, padded), task.losses(model, batch)
        assert padded_losses["label"].item() == pytest.approx(losses["label"].item(), rel=1e-5)
        assert int(padded_losses["correct"]) == int(losses["correct"])


# Pooling


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pooling", POOLS)
def test_outputs_do_not_depend_on_the_batch(pooling, causal):
    task = make_task(pool=pooling)
    model = model_for(task, causal=causal)
    examples = task.examples(labelled("abc", "jihgfedcba" * 2, "fd", ""), length=32)
    outputs = task.outputs(model, examples.batch([0, 1, 2, 3]))
    assert torch.allclose(outputs.sum(1), torch.ones(4), atol=1e-6)
    for i in range(4):
        output = task.outputs(model, examples.batch([i]))[0]
        assert torch.allclose(outputs[i], output, atol=1e-5)
    blind = causal and pooling == "cls"  # only sees the first token
    assert blind or (outputs[0] - outputs[2]).abs().max() > 1e-3  # control: different texts differ


@pytest.mark.parametrize("pooling", POOLS)
def test_padding_tokens_do_not_matter(pooling):
    for causal in (True, False):
        task = make_task(pool=pooling)
        model = model_for(task, causal=causal)
        batch = task.examples(labelled("abc", "jihgfedcba"), length=32).batch([0, 1])
        before = task.pooled_features(model, batch)
        batch.tokens[batch.padding] = TOKENIZER.encode("e")[0]
        assert torch.allclose(task.pooled_features(model, batch), before, atol=1e-6)


@pytest.mark.parametrize("padded", [True, False])
def test_pooling_by_definition(padded):
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4)
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool() if padded else None
    for row, length in enumerate([3, 5, 1] if padded else [5, 5, 5]):
        real = hidden[row, :length]
        expected = {"last": real[-1], "cls": real[0], "mean": real.mean(0), "max": real.amax(0)}
        expected["concat"] = torch.cat([expected["last"], expected["mean"], expected["max"]])
        for pooling in POOLS:
            assert torch.allclose(pool(hidden, padding, pooling)[row], expected[pooling])


def test_last_pools_the_last_real_token():
    task = make_task(pool="last")
    model = model_for(task)
    batch = task.examples(labelled("abc", "jihgfedcba"), length=32).batch([0, 1])
    hidden = model(batch).hidden
    vectors = task.pooled_features(model, batch)
    assert torch.equal(vectors[0], hidden[0, 3])  # the first token and three letters
    assert torch.equal(vectors[1], hidden[1, 10])


@pytest.mark.parametrize("causal", [True, False])
def test_first_token_sees_the_text_only_in_bidirectional_models(causal):
    task = make_task(pool="cls")
    model = model_for(task, causal=causal)
    examples = task.examples(labelled("abcde", "abcdj", "jhgfi"), length=32)
    vectors = task.pooled_features(model, examples.batch([0, 1, 2]))
    assert torch.allclose(vectors[0], vectors[1], atol=1e-6) == causal
    assert torch.allclose(vectors[0], vectors[2], atol=1e-6) == causal


def test_cached_features_give_the_same_outputs():
    for long in ("head", "windows"):
        task = make_task(long=long, pool="mean")
        model = model_for(task)
        data = labelled("abc" * 9, "j", "fedcba", labels=[2, 0, 1])
        cached = cache_features(model, task, data, length=8)
        batch = task.examples(cached, length=8).batch([2, 0])
        token_batch = task.examples(data, length=8).batch([2, 0])
        assert torch.equal(batch.labels["label"], torch.tensor([1, 2]))
        assert torch.allclose(task.outputs(model, batch), task.outputs(model, token_batch), atol=1e-5)


# Losses


def scored(task, labels):
    """A model, a batch with these labels and the logits of its head."""
    model = model_for(task)
    texts = [LETTERS[i:] + LETTERS[:i] for i in range(len(labels))]
    batch = task.examples(labelled(*texts, labels=labels), length=32).batch(range(len(labels)))
    return model, batch, model.heads["label"](task.pooled_features(model, batch))


def head_gradient(model, loss):
    return torch.autograd.grad(loss, model.heads["label"].linear.weight, retain_graph=True)[0]


@pytest.mark.parametrize("weights", [(), (0.5, 3.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_matches_torch(weights, smoothing):
    task = make_task(class_weights=weights)
    labels = [2, 0, 1, IGNORE_INDEX, 0, 2, IGNORE_INDEX]
    model, batch, scores = scored(task, labels)
    sums = task.losses(model, batch, smoothing=smoothing)
    reference = nn.CrossEntropyLoss(
        torch.tensor(weights) if weights else None, reduction="sum", label_smoothing=smoothing
    )
    has_label = batch.labels["label"] != IGNORE_INDEX
    expected = reference(scores[has_label], batch.labels["label"][has_label])
    assert sums["label"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(head_gradient(model, sums["label"]), head_gradient(model, expected), atol=1e-6)
    if not smoothing:  # the same by hand
        terms = [-scores[i].log_softmax(-1)[y] * (weights[y] if weights else 1) for i, y in enumerate(labels) if y >= 0]
        assert sums["label"].item() == pytest.approx(sum(terms).item(), rel=1e-5)
    assert task.counts(batch) == {"label": 5}
    assert int(sums["correct"]) == int((scores[has_label].argmax(-1) == batch.labels["label"][has_label]).sum())


@pytest.mark.parametrize("weights", [(), (0.5, 3.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_multilabel_loss_matches_torch(weights, smoothing):
    task = make_task(separator=",", class_weights=weights)
    labels = [[1, 0, 1], [IGNORE_INDEX] * 3, [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]
    model, batch, scores = scored(task, labels)
    sums = task.losses(model, batch, smoothing=smoothing)
    rows = [0, 2, 3, 4, 5]
    targets = torch.tensor(labels)[rows].float()
    reference = nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(weights) if weights else None)
    soft = targets * (1 - smoothing) + smoothing / 2
    expected = reference(scores[rows], soft).mean(1).sum()
    assert sums["label"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(head_gradient(model, sums["label"]), head_gradient(model, expected), atol=1e-6)
    assert task.counts(batch) == {"label": 5}
    probabilities = task.outputs(model, batch)[rows]
    predicted = probabilities > 0.5
    metrics = task.score({name: value.item() for name, value in sums.items()}, task.counts(batch), size=0)
    assert metrics["accuracy"] == pytest.approx((predicted == targets.bool()).all(1).float().mean().item())
    assert metrics["micro_f1"] == pytest.approx(f1_score(targets.numpy(), predicted.numpy(), average="micro"))
    assert metrics["loss"] == pytest.approx(expected.item() / 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1_000_000), st.data(), st.floats(0, 50), st.floats(0, 50))
@example(100_000, None, 0.0, 50.0)
def test_selection_prefers_accuracy_then_loss(rows, data, loss, other_loss):
    correct = rows - 1 if data is None else data.draw(st.integers(0, rows - 1))
    for task, name in ((make_task(), "accuracy"), (make_task(separator=","), "micro_f1")):
        better, worse = {name: (correct + 1) / rows, "loss": other_loss}, {name: correct / rows, "loss": loss}
        # one more correct text wins, whatever the loss
        assert task.selection_score(better) < task.selection_score(worse)
        if abs(loss - other_loss) > 1e-3:
            low, high = sorted([loss, other_loss])
            assert task.selection_score({name: correct / rows, "loss": low}) < task.selection_score(
                {name: correct / rows, "loss": high}
            )


# Settings


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError) as caught:
        ClassifyConfig(classes=("a", "b"), class_weights=(1.0,), dropout=1.0, separator="")
    assert [name for name, _ in caught.value.problems] == ["dropout", "class_weights", "separator"]
    with pytest.raises(ConfigError, match="0 or more"):
        ClassifyConfig(classes=("a", "b"), class_weights=(1.0, -1.0))


# Predictions


@pytest.mark.parametrize("separator", [None, "|"])
def test_class_predictions_equal_single_predictions(separator):
    config = ClassifyConfig(classes=("no", "so", "yes"), separator=separator)
    ties = np.arange(129, dtype=np.float32) / 128  # includes ties in rounding to six digits
    outputs = np.random.default_rng(0).random((5000, 3), dtype=np.float32)
    outputs[: len(ties)] = ties[:, None]
    outputs[-2:] = [[0.25, 0.5, 0.5], [1.0, 0.0, 0.75]]
    predictions = class_predictions(config, list(outputs))
    assert predictions == [class_predictions(config, [row])[0] for row in outputs]
    for prediction, row in zip(predictions, outputs.tolist(), strict=True):
        assert prediction["probabilities"] == {name: round(p, 6) for name, p in zip(config.classes, row, strict=True)}
        if separator is None:
            assert list(prediction) == ["label", "probabilities"]
            assert prediction["label"] == config.classes[row.index(max(row))]  # the first of ties
        else:
            assert list(prediction) == ["label", "labels", "probabilities"]
            assert prediction["labels"] == [name for name, p in zip(config.classes, row, strict=True) if p > 0.5]
            assert prediction["label"] == "|".join(prediction["labels"])
    assert {type(p) for prediction in predictions for p in prediction["probabilities"].values()} == {float}
    assert class_predictions(config, []) == []


def test_class_weights_first_used_in_a_validation_serve_training():
    task = make_task(class_weights=(0.5, 1.25, 2.75))
    model, batch = model_for(task), task.examples(labelled("abc", "ji", labels=[0, 2]), length=8).batch([0, 1])
    with torch.inference_mode():
        task.losses(model, batch)
    sum(value for name, value in task.losses(model, batch).items() if name == "label").backward()
