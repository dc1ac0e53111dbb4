"""Token classification: word positions, windows, losses, entities and rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.records import Records
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.data.words import join_words
from headstock.errors import ConfigError, UserError
from headstock.model.backbone import CachedBackbone
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.model.model import Model
from headstock.tasks.base import padded_batch
from headstock.tasks.labelled import CachedFeatures
from headstock.tasks.tag import Tag, TagConfig, find_tags
from headstock.train.evaluate import cache_features, model_outputs
from tests.model.small import small_backbone, stir

TEXTS = ["Anne voit l'eau, a-t-il dit.", "Ben likes the sea (he said), it's true.", "Zoë voit le café."] * 3
CHARS = train_tokenizer(TEXTS, TokenizerSettings(kind="char", vocabulary=60, min_frequency=1))
CLASSES = ("D", "N", "P", "V")
ENTITY_TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
SENTENCES = [["Anne", "voit", "l'", "eau", "."], ["Ben", "likes", "the", "sea"], ["Zoë", "voit"]]


def tokenizer_of(kind, **options):
    size = 320 if kind in ("bpe", "unigram") else 120
    return train_tokenizer(TEXTS, TokenizerSettings(kind=kind, vocabulary=size, min_frequency=1, **options))


def make_task(tokenizer=CHARS, **config):
    return Tag(TagConfig(**({"classes": CLASSES, "dropout": 0.0} | config)), tokenizer)


def records(sentences=SENTENCES, *, classes=CLASSES, seed=0, tags=None):
    rng = np.random.default_rng(seed)
    tags = tags or [[classes[i] for i in rng.integers(len(classes), size=len(words))] for words in sentences]
    return Records("valid.conll", [1 + 7 * i for i in range(len(sentences))], {"tokens": sentences, "tags": tags})


def model_for(task, *, seed=0, **backbone):
    trunk = small_backbone(seed, vocabulary=task.tokenizer.vocabulary, **({"context": 64} | backbone))
    heads = task.heads(trunk)
    stir(heads["tag"], seed=seed, spread=0.5)
    return Model(trunk, heads).eval()


# Word positions


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_word_starts_are_the_tokens_of_first_characters(kind):
    tokenizer = tokenizer_of(kind)
    data = make_task(tokenizer).prepare(records())
    for words, tokens, starts in zip(SENTENCES, data.tokens, data.word_starts, strict=True):
        text, spans = join_words(words)
        assert tokens == tokenizer.encode(text)
        covered = [tokenizer.offsets(text)[start] for start in starts]
        assert all(a <= start < b for (start, _), (a, b) in zip(spans, covered, strict=True))


def test_two_words_in_one_token():
    task = make_task(tokenizer_of("word"))
    data = task.prepare(records([["a", "-t-il", "dit"]], tags=[["V", "P", "N"]]))
    assert [starts.tolist() for starts in data.word_starts] == [[0, 0, 1]]
    batch = task.examples(data, length=8).batch([0])
    assert task.counts(batch) == {"tag": 3}
    assert [len(rows) for rows in task.outputs(model_for(task), batch)] == [3]


def test_word_dropped_by_the_tokenizer_is_unknown():
    tokenizer = tokenizer_of("bpe", strip_accents=True)
    accent = "\u0301"
    assert tokenizer.encode(accent) == []
    data = make_task(tokenizer).prepare(records([[accent], ["Anne", accent, accent, "voit", accent]]), labelled=False)
    unknown = tokenizer.unk
    assert data.tokens[0] == [unknown]
    assert [data.tokens[1][start] == unknown for start in data.word_starts[1]] == [False, True, True, False, True]
    assert len(set(data.word_starts[1])) == 5
    # with the spaces between
    assert [token for token in data.tokens[1] if token != unknown] == tokenizer.encode("Anne   voit ")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30), st.integers(2, 16))
def test_long_sentence_is_tagged_once_per_word_with_most_context(sizes, length):
    task, capacity = make_task(), length - 1
    words = ["abcdef"[:size] for size in sizes]
    data = task.prepare(Records("x", [1], {"tokens": [words], "tags": [["N"] * len(words)]}))
    data.labels = [np.arange(len(words))]  # the index of each word
    data.tokens = [list(range(100, 100 + len(data.tokens[0])))]  # the position of each token
    examples = task.examples(data, length=length)
    batch = examples.batch([0])
    assert examples.lengths[0] == task.tokens(batch)
    rows = [row[row >= 100].tolist() for row in batch.tokens]
    assert sorted({token for row in rows for token in row}) == data.tokens[0]
    assert all(len(row) <= capacity and row == list(range(row[0], row[0] + len(row))) for row in rows if row)

    tagged = []
    count = len(data.tokens[0])
    for row, positions, labels in zip(batch.tokens, batch.labels["word_positions"], batch.labels["tag"], strict=True):
        for position, word in zip(positions.tolist(), labels.tolist(), strict=True):
            if word == IGNORE_INDEX:
                assert position == IGNORE_INDEX
                continue
            tagged.append(word)
            assert int(row[position]) - 100 == data.word_starts[0][word]
            window = row[1 : 1 + capacity].tolist()
            assert around(data.word_starts[0][word], [p for p in window if p >= 100], count) == max(
                around(data.word_starts[0][word], row, count) for row in rows
            )
    assert tagged == list(range(len(words)))


def around(start, row, count):
    """The number of tokens on the shorter side of a word in a row; all of them at the ends of the sentence."""
    if start + 100 not in row:
        return -1
    before = count if row[0] == 100 else start + 100 - row[0]
    after = count if row[-1] == 99 + count else row[-1] - start - 100
    return min(before, after)


# Outputs and losses


@pytest.mark.parametrize("length", [64, 9])
def test_outputs_are_at_the_word_positions(length):
    task = make_task()
    model = model_for(task, causal=False)
    data = task.prepare(records(), labelled=False)
    batch = task.examples(data, length=length).batch([2, 0, 1])
    assert (batch.example_ids is None) == (length == 64)
    outputs = task.outputs(model, batch)
    for index, probabilities in zip([2, 0, 1], outputs, strict=True):
        assert probabilities.shape == (len(SENTENCES[index]), len(CLASSES))
        assert torch.allclose(probabilities.sum(-1), torch.ones(len(probabilities)))
        if length == 64:
            row = torch.tensor([[task.bos, *data.tokens[index]]])
            hidden = model(Batch(row)).hidden[0, [1 + start for start in data.word_starts[index]]]
            assert torch.allclose(probabilities, model.heads["tag"](hidden).softmax(-1), atol=1e-5)
    expected = model_outputs(model, task, data, length=length)
    for index, probabilities in zip([2, 0, 1], outputs, strict=True):
        assert np.allclose(expected[index], probabilities.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_following_words_matter_only_in_bidirectional_models(causal):
    task = make_task()
    model = model_for(task, causal=causal)
    first, second = (
        model_outputs(model, task, task.prepare(records([["Anne", "voit", last]]), labelled=False), length=32)[0]
        for last in ("eau", "sea")
    )
    assert np.allclose(first[:2], second[:2], atol=1e-6) == causal
    assert not np.allclose(first[2], second[2], atol=1e-6)


@torch.no_grad()
def test_losses_and_accuracy_are_over_words():
    task = make_task()
    model = model_for(task)
    data = task.prepare(records())
    for length in (64, 9):
        batch = task.examples(data, length=length).batch([0, 1, 2])
        outputs = [probabilities.detach().numpy() for probabilities in task.outputs(model, batch)]
        sums, counts = task.losses(model, batch), task.counts(batch)
        assert counts == {"tag": 11}
        probabilities, labels = np.concatenate(outputs), np.concatenate(data.labels)
        assert float(sums["tag"]) == pytest.approx(-np.log(probabilities[np.arange(11), labels]).sum(), rel=1e-4)
        scored = task.score({name: float(value) for name, value in sums.items()}, counts, size=0)
        correct, words = task.row_metrics(data, outputs)["accuracy"]
        assert words.tolist() == [5, 4, 2]
        assert (
            scored["accuracy"]
            == pytest.approx(correct.sum() / words.sum())
            == pytest.approx(np.mean(probabilities.argmax(1) == labels))
        )
        assert task.extra_metrics(data, outputs)["loss"] == pytest.approx(scored["loss"], rel=1e-4)


@torch.no_grad()
def test_features_are_float32():
    task = make_task()
    batch = task.examples(task.prepare(records()), length=64).batch([0, 1])
    features = task.compute_features(model_for(task).bfloat16(), batch)
    assert [[sequence.dtype for sequence in sequences] for sequences in features] == [[torch.float32]] * 2


@pytest.mark.parametrize("length", [64, 9])
@torch.no_grad()
def test_padding_examples_are_ignored(length):
    task = make_task(classes=ENTITY_TAGS)
    model = model_for(task)
    examples = task.examples(task.prepare(records(classes=ENTITY_TAGS)), length=length)
    batch, padded = padded_batch(examples, [1, 2], 2), padded_batch(examples, [1, 2], 4, filler=0)
    assert len(padded.tokens) > len(batch.tokens)
    assert task.counts(padded) == task.counts(batch) == {"tag": 6}
    assert task.tokens(padded) == task.tokens(batch) == examples.lengths[[1, 2]].sum()
    sums, padded_sums = task.losses(model, batch), task.losses(model, padded)
    assert sums.keys() == padded_sums.keys() == {"tag", "correct", "f1_numerator", "f1_denominator"}
    assert all(torch.allclose(sums[name].float(), padded_sums[name].float(), atol=1e-4) for name in sums)
    empty = padded_batch(examples, [], 1)
    assert task.counts(empty) == {"tag": 0}
    assert all(float(value) == 0 for value in task.losses(model, empty).values())


@pytest.mark.parametrize(("layers", "length"), [("last", 64), ("mix", 64), ("1", 9), ("mix", 9)])
def test_cached_features_give_the_same_losses_and_gradients(layers, length):
    task = make_task(layers=layers)
    model = model_for(task, causal=False)
    data = task.prepare(records())
    cached = cache_features(model, task, data, length=length)
    assert isinstance(cached, CachedFeatures)
    head = Model(CachedBackbone(model.backbone), dict(model.heads.items()))
    token_examples, cached_examples = task.examples(data, length=length), task.examples(cached, length=length)
    assert len(token_examples) == len(cached_examples) == 3
    assert token_examples.lengths.tolist() == cached_examples.lengths.tolist()
    for indices in ([0, 1, 2], [2, 1], [0]):
        losses = [
            task.losses(model_, examples.batch(indices))
            for model_, examples in ((model, token_examples), (head, cached_examples))
        ]
        gradients = [torch.autograd.grad(loss["tag"], list(model.heads.parameters())) for loss in losses]
        assert torch.allclose(losses[0]["tag"], losses[1]["tag"], rtol=1e-4)
        assert int(losses[0]["correct"]) == int(losses[1]["correct"])
        for gradient, cached_gradient in zip(*gradients, strict=True):
            assert torch.allclose(gradient, cached_gradient, atol=1e-3)
        assert len(gradients[0]) == (4 if layers == "mix" else 2)  # a mix has weights and a scale


# Entities


@torch.no_grad()
def test_entity_f1_is_the_primary_metric_of_entity_tags():
    task, pos_task = make_task(classes=ENTITY_TAGS), make_task()
    assert (task.primary_metric, pos_task.primary_metric) == ("f1", "accuracy")
    model = model_for(task)
    gold = [["B-PER", "O", "B-LOC", "I-LOC", "O"], ["B-PER", "O", "O", "B-LOC"], ["I-PER", "O"]]
    data = task.prepare(records(tags=gold))
    examples = task.examples(data, length=9)
    outputs = [np.eye(5)[[ENTITY_TAGS.index(tag) for tag in tags]] for tags in gold]
    assert [counts.tolist() for counts in task.row_metrics(data, outputs)["f1"]] == [[4, 4, 2], [4, 4, 2]]
    outputs[1][3] = np.eye(5)[ENTITY_TAGS.index("O")]  # one of five entities is missed
    assert [counts.tolist() for counts in task.row_metrics(data, outputs)["f1"]] == [[4, 2, 2], [4, 3, 2]]

    batch = examples.batch([0, 1, 2])
    sums = {name: float(value) for name, value in task.losses(model, batch).items()}
    numerators, denominators = task.row_metrics(data, model_outputs(model, task, data, length=9))["f1"]
    scored = task.score(sums, task.counts(batch), size=0)
    assert (sums["f1_numerator"], sums["f1_denominator"]) == (numerators.sum(), denominators.sum())
    assert scored["f1"] == pytest.approx(numerators.sum() / denominators.sum())
    model.train()
    assert set(task.losses(model, batch)) == {"tag", "correct"}


def test_selection_prefers_the_primary_metric_then_loss():
    entities, pos_task = make_task(classes=ENTITY_TAGS), make_task()
    accurate, high_f1 = {"accuracy": 0.9, "f1": 0.5, "loss": 0.1}, {"accuracy": 0.8, "f1": 0.6, "loss": 9.0}
    assert pos_task.selection_score(accurate) < pos_task.selection_score(high_f1)
    assert entities.selection_score(high_f1) < entities.selection_score(accurate)
    assert pos_task.selection_score(accurate) < pos_task.selection_score(accurate | {"loss": 0.2})


# Rows and predictions


def test_prediction():
    task = make_task()
    data = task.prepare(records([["Anne", "voit"]]), labelled=False)
    (row,) = task.predictions(data, [np.array([[0.1, 0.7, 0.1, 0.1], [0.0, 0.0, 0.25, 0.75]])])
    assert row == {"tokens": ["Anne", "voit"], "tags": ["N", "V"], "probabilities": [0.7, 0.75]}
    assert task.as_text(row) == "Anne\tN\nvoit\tV\n"


def test_rows_are_texts_or_lists_of_words():
    task = make_task()
    columns = task.columns_of(["Anne  voit l'eau.", ["Anne", "voit", "l'", "eau", "."], ["l'eau ."], ""])
    assert columns["tokens"] == [SENTENCES[0], SENTENCES[0], ["l'eau ."], []]
    data = task.prepare(Records("row", [1, 2, 3, 4], columns), labelled=False)
    outputs = model_outputs(model_for(task), task, data, length=32)
    assert [len(output) for output in outputs] == [5, 5, 1, 0]
    assert data.tokens[0] == CHARS.encode("Anne  voit l'eau.")  # with its own spaces
    assert data.tokens[1] == CHARS.encode("Anne voit l'eau.")
    assert task.predictions(data, outputs)[3] == {"tokens": [], "tags": [], "probabilities": []}
    for row in ([1, 2], [["a"], ["b"]]):
        with pytest.raises(UserError, match=r"a row of this run is a text .*or a list of words"):
            task.columns_of([row])


def test_unknown_tags_are_refused_with_their_locations():
    rows = records(tags=[["N", "V", "D", "N", "P"], ["N", "V", "D", "N"], ["N", "V"]])
    config = Tag.infer_settings(TagConfig(), rows)
    assert config.classes == CLASSES
    assert Tag.infer_settings(TagConfig(classes=("V", "N")), rows).classes == ("V", "N")
    task = Tag(Tag.infer_settings(TagConfig(), records(tags=[["NOUN", "VERB", "DET", "NOUN", "PUNCT"]] * 3)), CHARS)
    with pytest.raises(UserError) as error:
        task.check(records(tags=[["NOUN"] * 5, ["NOUN", "VERV", "VERV", "X"], ["VERV", "NOUN"]]))
    first, second = str(error.value).split("; valid")
    assert first.startswith("valid.conll:8: tag 'VERV' of word 2, 'likes', is new; training has 'DET', 'NOUN', ")
    assert first.endswith("; did you mean 'VERB'?")
    assert second.startswith(".conll:8: tag 'X' of word 4, 'sea', is new")
    with pytest.raises(UserError, match=r"only one tag, 'N'; there must be at least two"):
        find_tags(records(classes=("N",)))
    with pytest.raises(ConfigError, match="dropout"):
        TagConfig(dropout=1.0)
