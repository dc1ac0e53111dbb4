"""Tags: where each word is read, that none is lost or read twice, and what it costs to be wrong."""

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
PLACES = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
SENTENCES = [["Anne", "voit", "l'", "eau", "."], ["Ben", "likes", "the", "sea"], ["Zoë", "voit"]]


def tokenizer_of(kind, **more):
    size = 320 if kind in ("bpe", "unigram") else 120
    return train_tokenizer(TEXTS, TokenizerSettings(kind=kind, vocabulary=size, min_frequency=1, **more))


def make(tokenizer=CHARS, **config):
    return Tag(TagConfig(**({"classes": CLASSES, "dropout": 0.0} | config)), tokenizer)


def records(sentences=SENTENCES, *, classes=CLASSES, seed=0, tags=None):
    pick = np.random.default_rng(seed)
    tags = tags or [[classes[i] for i in pick.integers(len(classes), size=len(words))] for words in sentences]
    return Records("valid.conll", [1 + 7 * i for i in range(len(sentences))], {"tokens": sentences, "tags": tags})


def model_for(task, *, seed=0, **backbone):
    stock = small_backbone(seed, vocabulary=task.tokenizer.vocabulary, **({"context": 64} | backbone))
    heads = task.heads(stock)
    stir(heads["tag"], seed=seed, spread=0.5)
    return Model(stock, heads).eval()


# Where a word is read


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_words_are_read_in_running_text_at_the_piece_that_holds_their_first_character(kind):
    tokenizer = tokenizer_of(kind)
    data = make(tokenizer).prepare(records())
    for words, pieces, starts in zip(SENTENCES, data.tokens, data.word_starts, strict=True):
        text, spans = join_words(words)
        assert pieces == tokenizer.encode(text)
        covered = [tokenizer.offsets(text)[start] for start in starts]
        assert all(a <= begin < b for (begin, _), (a, b) in zip(spans, covered, strict=True))


def test_two_words_in_one_piece_are_both_read_and_both_count():
    task = make(tokenizer_of("word"))
    data = task.prepare(records([["a", "-t-il", "dit"]], tags=[["V", "P", "N"]]))
    assert [starts.tolist() for starts in data.word_starts] == [[0, 0, 1]]
    batch = task.examples(data, length=8).batch([0])
    assert task.counts(batch) == {"tag": 3}
    assert [len(rows) for rows in task.outputs(model_for(task), batch)] == [3]


def test_a_word_of_which_the_tokenizer_leaves_nothing_is_unknown():
    tokenizer = tokenizer_of("bpe", strip_accents=True)
    nothing = "\u0301"
    assert tokenizer.encode(nothing) == []
    data = make(tokenizer).prepare(records([[nothing], ["Anne", nothing, nothing, "voit", nothing]]), labelled=False)
    unknown = tokenizer.unk
    assert data.tokens[0] == [unknown]
    assert [data.tokens[1][at] == unknown for at in data.word_starts[1]] == [False, True, True, False, True]
    assert len(set(data.word_starts[1])) == 5
    assert [piece for piece in data.tokens[1] if piece != unknown] == tokenizer.encode("Anne   voit ")  # spaces stay


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30), st.integers(2, 16))
def test_a_long_sentence_is_read_in_rows_each_word_once_where_most_is_around_it(sizes, length):
    task, room = make(), length - 1
    words = ["abcdef"[:size] for size in sizes]
    data = task.prepare(Records("x", [1], {"tokens": [words], "tags": [["N"] * len(words)]}))
    data.labels = [np.arange(len(words))]  # not the tags: which word a label is of
    data.tokens = [list(range(100, 100 + len(data.tokens[0])))]  # not the pieces: where one stands
    examples = task.examples(data, length=length)
    batch = examples.batch([0])
    assert examples.lengths[0] == task.tokens(batch)
    rows = [row[row >= 100].tolist() for row in batch.tokens]
    assert sorted({piece for row in rows for piece in row}) == data.tokens[0]
    assert all(len(row) <= room and row == list(range(row[0], row[0] + len(row))) for row in rows if row)

    seen = []
    count = len(data.tokens[0])
    for row, places, labels in zip(batch.tokens, batch.labels["word_positions"], batch.labels["tag"], strict=True):
        for place, word in zip(places.tolist(), labels.tolist(), strict=True):
            if word == IGNORE_INDEX:
                assert place == IGNORE_INDEX
                continue
            seen.append(word)
            assert int(row[place]) - 100 == data.word_starts[0][word]
            mine = row[1 : 1 + room].tolist()
            assert around(data.word_starts[0][word], [p for p in mine if p >= 100], count) == max(
                around(data.word_starts[0][word], other, count) for other in rows
            )
    assert seen == list(range(len(words)))  # each once, and in order


def around(start, row, count):
    """How many pieces a row has on the side of a word where there are fewer; all there are, at a sentence's ends."""
    if start + 100 not in row:
        return -1
    before = count if row[0] == 100 else start + 100 - row[0]
    after = count if row[-1] == 99 + count else row[-1] - start - 100
    return min(before, after)


# What comes out


@pytest.mark.parametrize("length", [64, 9])
def test_outputs_are_those_of_the_words_own_places(length):
    task = make()
    model = model_for(task, causal=False)
    data = task.prepare(records(), labelled=False)
    batch = task.examples(data, length=length).batch([2, 0, 1])
    assert (batch.example_ids is None) == (length == 64)
    found = task.outputs(model, batch)
    for index, likely in zip([2, 0, 1], found, strict=True):
        assert likely.shape == (len(SENTENCES[index]), len(CLASSES))
        assert torch.allclose(likely.sum(-1), torch.ones(len(likely)))
        if length == 64:
            row = torch.tensor([[task.bos, *data.tokens[index]]])
            hidden = model(Batch(row)).hidden[0, [1 + at for at in data.word_starts[index]]]
            assert torch.allclose(likely, model.heads["tag"](hidden).softmax(-1), atol=1e-5)
    whole = model_outputs(model, task, data, length=length)
    for index, likely in zip([2, 0, 1], found, strict=True):
        assert np.allclose(whole[index], likely.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_only_a_backbone_that_looks_both_ways_sees_what_follows(causal):
    task = make()
    model = model_for(task, causal=causal)
    one, other = (
        model_outputs(model, task, task.prepare(records([["Anne", "voit", last]]), labelled=False), length=32)[0]
        for last in ("eau", "sea")
    )
    assert np.allclose(one[:2], other[:2], atol=1e-6) == causal
    assert not np.allclose(one[2], other[2], atol=1e-6)


@torch.no_grad()
def test_losses_are_summed_over_words_and_hits_counted():
    task = make()
    model = model_for(task)
    data = task.prepare(records())
    for length in (64, 9):
        batch = task.examples(data, length=length).batch([0, 1, 2])
        found = [likely.detach().numpy() for likely in task.outputs(model, batch)]
        sums, counts = task.losses(model, batch), task.counts(batch)
        assert counts == {"tag": 11}
        likely, labels = np.concatenate(found), np.concatenate(data.labels)
        assert float(sums["tag"]) == pytest.approx(-np.log(likely[np.arange(11), labels]).sum(), rel=1e-4)
        scored = task.score({name: float(value) for name, value in sums.items()}, counts, size=0)
        hits, of = task.row_metrics(data, found)["accuracy"]
        assert of.tolist() == [5, 4, 2]
        assert (
            scored["accuracy"]
            == pytest.approx(hits.sum() / of.sum())
            == pytest.approx(np.mean(likely.argmax(1) == labels))
        )
        assert task.extra_metrics(data, found)["loss"] == pytest.approx(scored["loss"], rel=1e-4)


@torch.no_grad()
def test_what_a_frozen_backbone_saw_is_kept_in_single_precision_as_it_is_made():
    task = make()
    batch = task.examples(task.prepare(records()), length=64).batch([0, 1])
    kept = task.compute_features(model_for(task).bfloat16(), batch)
    assert [[part.dtype for part in parts] for parts in kept] == [[torch.float32]] * 2


@pytest.mark.parametrize("length", [64, 9])
@torch.no_grad()
def test_rows_that_fill_a_batch_count_for_nothing(length):
    task = make(classes=PLACES)
    model = model_for(task)
    examples = task.examples(task.prepare(records(classes=PLACES)), length=length)
    alone, more = padded_batch(examples, [1, 2], 2), padded_batch(examples, [1, 2], 4, filler=0)
    assert len(more.tokens) > len(alone.tokens)
    assert task.counts(more) == task.counts(alone) == {"tag": 6}
    assert task.tokens(more) == task.tokens(alone) == examples.lengths[[1, 2]].sum()
    sums, others = task.losses(model, alone), task.losses(model, more)
    assert sums.keys() == others.keys() == {"tag", "correct", "f1_numerator", "f1_denominator"}
    assert all(torch.allclose(sums[name].float(), others[name].float(), atol=1e-4) for name in sums)
    nobody = padded_batch(examples, [], 1)
    assert task.counts(nobody) == {"tag": 0}
    assert all(float(value) == 0 for value in task.losses(model, nobody).values())


@pytest.mark.parametrize(("layers", "length"), [("last", 64), ("mix", 64), ("1", 9), ("mix", 9)])
def test_what_a_frozen_backbone_saw_is_as_good_as_running_it(layers, length):
    task = make(layers=layers)
    model = model_for(task, causal=False)
    data = task.prepare(records())
    kept = cache_features(model, task, data, length=length)
    assert isinstance(kept, CachedFeatures)
    head = Model(CachedBackbone(model.backbone), dict(model.heads.items()))
    live, recalled = task.examples(data, length=length), task.examples(kept, length=length)
    assert len(live) == len(recalled) == 3
    assert live.lengths.tolist() == recalled.lengths.tolist()
    for indices in ([0, 1, 2], [2, 1], [0]):
        losses = [task.losses(m, e.batch(indices)) for m, e in ((model, live), (head, recalled))]
        gradients = [torch.autograd.grad(loss["tag"], list(model.heads.parameters())) for loss in losses]
        assert torch.allclose(losses[0]["tag"], losses[1]["tag"], rtol=1e-4)
        assert int(losses[0]["correct"]) == int(losses[1]["correct"])
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other, atol=1e-3)
        assert len(gradients[0]) == (4 if layers == "mix" else 2)  # a mix has weights and a scale of its own


# Entities


@torch.no_grad()
def test_entities_decide_where_tags_name_them():
    task, parts = make(classes=PLACES), make()
    assert (task.primary_metric, parts.primary_metric) == ("f1", "accuracy")
    model = model_for(task)
    gold = [["B-PER", "O", "B-LOC", "I-LOC", "O"], ["B-PER", "O", "O", "B-LOC"], ["I-PER", "O"]]
    data = task.prepare(records(tags=gold))
    examples = task.examples(data, length=9)
    said = [np.eye(5)[[PLACES.index(tag) for tag in tags]] for tags in gold]
    assert [part.tolist() for part in task.row_metrics(data, said)["f1"]] == [[4, 4, 2], [4, 4, 2]]
    said[1][3] = np.eye(5)[PLACES.index("O")]  # one of five is missed
    assert [part.tolist() for part in task.row_metrics(data, said)["f1"]] == [[4, 2, 2], [4, 3, 2]]

    batch = examples.batch([0, 1, 2])
    sums = {name: float(value) for name, value in task.losses(model, batch).items()}
    hits, either = task.row_metrics(data, model_outputs(model, task, data, length=9))["f1"]
    scored = task.score(sums, task.counts(batch), size=0)
    assert (sums["f1_numerator"], sums["f1_denominator"]) == (hits.sum(), either.sum())
    assert scored["f1"] == pytest.approx(hits.sum() / either.sum())
    model.train()
    assert set(task.losses(model, batch)) == {"tag", "correct"}


def test_merit_is_the_metric_that_counts_then_the_loss():
    entities, parts = make(classes=PLACES), make()
    one, other = {"accuracy": 0.9, "f1": 0.5, "loss": 0.1}, {"accuracy": 0.8, "f1": 0.6, "loss": 9.0}
    assert parts.selection_score(one) < parts.selection_score(other)
    assert entities.selection_score(other) < entities.selection_score(one)
    assert parts.selection_score(one) < parts.selection_score(one | {"loss": 0.2})


# What people hand in


def test_a_prediction_has_words_tags_and_how_likely_they_are():
    task = make()
    data = task.prepare(records([["Anne", "voit"]]), labelled=False)
    (row,) = task.predictions(data, [np.array([[0.1, 0.7, 0.1, 0.1], [0.0, 0.0, 0.25, 0.75]])])
    assert row == {"tokens": ["Anne", "voit"], "tags": ["N", "V"], "probabilities": [0.7, 0.75]}
    assert task.as_text(row) == "Anne\tN\nvoit\tV\n"


def test_a_text_is_split_and_a_list_of_words_taken_as_it_is():
    task = make()
    columns = task.columns_of(["Anne  voit l'eau.", ["Anne", "voit", "l'", "eau", "."], ["l'eau ."], ""])
    assert columns["tokens"] == [SENTENCES[0], SENTENCES[0], ["l'eau ."], []]
    data = task.prepare(Records("row", [1, 2, 3, 4], columns), labelled=False)
    found = model_outputs(model_for(task), task, data, length=32)
    assert [len(likely) for likely in found] == [5, 5, 1, 0]
    assert data.tokens[0] == CHARS.encode("Anne  voit l'eau.")  # as it was written, not as we would
    assert data.tokens[1] == CHARS.encode("Anne voit l'eau.")
    assert task.predictions(data, found)[3] == {"tokens": [], "tags": [], "probabilities": []}
    for row in ([1, 2], [["a"], ["b"]]):
        with pytest.raises(UserError, match=r"a row of this run is a text .*or a list of words"):
            task.columns_of([row])


def test_tags_come_from_training_and_a_new_one_is_named_with_its_place():
    rows = records(tags=[["N", "V", "D", "N", "P"], ["N", "V", "D", "N"], ["N", "V"]])
    config = Tag.infer_settings(TagConfig(), rows)
    assert config.classes == CLASSES
    assert Tag.infer_settings(TagConfig(classes=("V", "N")), rows).classes == ("V", "N")
    task = Tag(Tag.infer_settings(TagConfig(), records(tags=[["NOUN", "VERB", "DET", "NOUN", "PUNCT"]] * 3)), CHARS)
    with pytest.raises(UserError) as wrong:
        task.check(records(tags=[["NOUN"] * 5, ["NOUN", "VERV", "VERV", "X"], ["VERV", "NOUN"]]))
    first, second = str(wrong.value).split("; valid")
    assert first.startswith("valid.conll:8: tag 'VERV' of word 2, 'likes', is new; training has 'DET', 'NOUN', ")
    assert first.endswith("; did you mean 'VERB'?")
    assert second.startswith(".conll:8: tag 'X' of word 4, 'sea', is new")
    with pytest.raises(UserError, match=r"only one tag, 'N'; there must be at least two"):
        find_tags(records(classes=("N",)))
    with pytest.raises(ConfigError, match="dropout"):
        TagConfig(dropout=1.0)
