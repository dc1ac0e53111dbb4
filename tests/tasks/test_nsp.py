"""Next-sentence prediction: pairs, labels, sentence boundaries, and that a model can learn it."""

import random
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores, build_store
from headstock.data.tokenizer import TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.errors import UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.masked import MaskedConfig, MaskedLM
from tests.tasks.small import model_for

NSP = MaskedConfig(nsp=True)
DOCUMENTS, SENTENCES = 40, 6


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Documents of six sentences, in which every word names its document, sentence and position: `D3s2w0 ...`."""
    rng = random.Random(0)
    texts = []
    for document in range(DOCUMENTS):
        count = 1 if document == 7 else SENTENCES
        sentences = [
            " ".join(f"D{document}s{sentence}w{word}" for word in range(rng.randint(2, 6))) + "."
            for sentence in range(count)
        ]
        texts.append(" ".join(sentences))
    path = tmp_path_factory.mktemp("library") / "texts.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    corpus = read_corpus(path, documents="line")
    tokenizer = train_tokenizer(texts, TokenizerSettings(kind="word", vocabulary=2000, min_frequency=1))
    return path, tokenizer, build_store(corpus, tokenizer, sentences=True)


def split_pair(tokenizer, batch, row):
    """The words of A and B, after a check of the special tokens and segments."""
    tokens = batch.tokens[row][~batch.padding[row]].tolist()
    segments = batch.segments[row][~batch.padding[row]].tolist()
    assert tokens[0] == tokenizer.cls
    assert tokens[-1] == tokenizer.sep
    first = tokens.index(tokenizer.sep)
    assert segments == [0] * (first + 1) + [1] * (len(tokens) - first - 1)
    a, b = tokens[1:first], tokens[first + 1 : -1]
    assert tokenizer.sep not in b
    return [[tokenizer.id_to_token(number) for number in part] for part in (a, b)]


def locate(word):
    document, _, position = word[1:].partition("s")
    sentence, _, number = position.partition("w")
    return int(document), int(sentence), int(number)


def unmasked_task(tokenizer, **settings):
    """The task with few masked tokens, all of them unchanged."""
    return MaskedLM(MaskedConfig(nsp=True, fraction=0.01, masked=0.0, random=0.0, **settings), tokenizer)


@pytest.mark.parametrize("length", [64, 24])
def test_half_of_the_pairs_are_negatives(library, length):
    _, tokenizer, store = library
    task = unmasked_task(tokenizer)
    counts = {0: 0, 1: 0, IGNORE_INDEX: 0}
    sentences_of_negatives = set()
    for epoch in range(20):
        examples = task.examples(store, length=length, seed=1, epoch=epoch)
        batch = examples.batch(range(len(examples)))
        assert batch.tokens.shape[1] <= length
        for row, follows in enumerate(batch.labels["next"].tolist()):
            a, b = split_pair(tokenizer, batch, row)
            counts[follows] += 1
            words_a, words_b = ([word for word in words if word != "."] for words in (a, b))
            if follows == IGNORE_INDEX:  # no second sentence, or no fitting negative
                assert len({locate(word)[:2] for word in words_a}) == 1 or b
                assert len({locate(word)[0] for word in words_a + words_b}) == 1
                continue
            assert a[-1] == "."
            start = locate(words_b[0])
            if not words_a:  # the chunk started with a full stop
                continue
            end = locate(words_a[-1])
            assert start[2] == 0  # both kinds of B start with a sentence
            if follows:
                assert start[:2] == (end[0], end[1] + 1)
            else:
                assert start[0] != end[0]
                sentences_of_negatives.add(start[:2])
            for words in (words_a, words_b):
                assert len({locate(word)[0] for word in words}) == 1
                assert words == sorted(words, key=locate)
    pairs = counts[0] + counts[1]
    assert abs(counts[1] - pairs / 2) < 2 * pairs**0.5  # four standard deviations
    assert counts[IGNORE_INDEX] > 0
    assert len(sentences_of_negatives) > 0.7 * (DOCUMENTS * SENTENCES - SENTENCES)  # any sentence may come second


@pytest.fixture(scope="module")
def essays(tmp_path_factory):
    """Short and long documents; many end without punctuation, many sentences begin with a number."""
    rng = random.Random(5)
    texts = []
    for number in range(900):
        sentences = []
        for _ in range(rng.choice([2, 3, 5, 8, 30])):
            words = [f"w{rng.randrange(80)}" for _ in range(rng.choice([3, 6, 10, 20]))]
            words[0] = f"{number % 7}0" if rng.random() < 0.3 else words[0].capitalize()
            sentences.append(" ".join(words) + rng.choice(".!?"))
        if rng.random() < 0.5:
            sentences[-1] = sentences[-1][:-1]
        texts.append(" ".join(sentences))
    path = tmp_path_factory.mktemp("essays") / "essays.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    tokenizer = train_tokenizer(texts, TokenizerSettings(kind="word", vocabulary=300, min_frequency=1))
    return tokenizer, build_store(read_corpus(path, documents="line"), tokenizer, sentences=True)


def best_rule(values, labels):
    """The accuracy of the best threshold on one feature, in either direction."""
    values = np.asarray(values, float)
    rules = [((values >= edge) == labels).mean() for edge in np.unique(np.quantile(values, np.linspace(0, 1, 21)))]
    return max(max(rule, 1 - rule) for rule in rules)


@pytest.mark.parametrize("length", [48, 128])
def test_no_simple_rule_separates_negatives(essays, length):
    tokenizer, store = essays
    task = unmasked_task(tokenizer)
    labels, features = [], []
    for epoch in range(3):
        examples = task.examples(store, length=length, seed=1, epoch=epoch)
        batch = examples.batch(range(len(examples)))
        for row, follows in enumerate(batch.labels["next"].tolist()):
            if follows != IGNORE_INDEX:
                a, b = split_pair(tokenizer, batch, row)
                labels.append(follows)
                features.append((b[-1] in ".!?", len(b), len(a) + len(b), len(b) / len(a), b[0][0].isupper()))
    assert len(labels) > 3500
    names = ("punctuation", "length of B", "length of both", "ratio of lengths", "capital")
    scores = {
        name: best_rule(values, np.array(labels) == 1)
        for name, values in zip(names, zip(*features, strict=True), strict=True)
    }
    assert {name: score for name, score in scores.items() if score > 0.53} == {}


def test_chunks_cover_every_token_once(library):
    _, tokenizer, store = library
    task = unmasked_task(tokenizer)
    for seed, epoch in ((None, 0), (3, 0), (3, 1)):
        examples = task.examples(store, length=20, seed=seed, epoch=epoch)
        for document in range(store.documents):
            chunks = np.flatnonzero(examples.chunks.documents == document)
            tokens = [examples.read(document, examples.chunks.starts[i], examples.chunks.ends[i]) for i in chunks]
            assert np.array_equal(np.concatenate(tokens), store.document(document))
            assert all(0 < len(chunk) <= 17 for chunk in tokens)
    starts = [task.examples(store, length=20, seed=3, epoch=epoch).chunks.starts for epoch in range(2)]
    assert len(starts[0]) == len(starts[1])
    assert not np.array_equal(*starts)


def test_pairs_are_a_pure_function_of_seed_epoch_and_index(library):
    _, tokenizer, store = library
    task = MaskedLM(NSP, tokenizer)

    def read(seed, epoch, indices):
        return task.examples(store, length=32, seed=seed, epoch=epoch).batch(indices)

    batch = read(1, 2, [5, 0, 9])
    for row, index in enumerate([5, 0, 9]):
        single = read(1, 2, [index])
        width = single.tokens.shape[1]
        assert torch.equal(single.tokens[0], batch.tokens[row, :width])
        assert torch.equal(single.labels["token"][0], batch.labels["token"][row, :width])
        assert batch.padding[row, width:].all()
        assert single.labels["next"][0] == batch.labels["next"][row]
    indices = list(range(30))
    assert not torch.equal(read(1, 2, indices).labels["next"], read(1, 3, indices).labels["next"])
    assert torch.equal(read(None, 0, indices).tokens, read(None, 7, indices).tokens)


def test_special_tokens_are_never_masked(library):
    _, tokenizer, store = library
    task = MaskedLM(MaskedConfig(nsp=True, fraction=0.9, unit="span"), tokenizer)
    batch = task.examples(store, length=32, seed=1).batch(range(40))
    labels = batch.labels["token"]
    masked = labels[labels != IGNORE_INDEX]
    assert len(masked) > 300
    assert not np.isin(masked.numpy(), sorted(tokenizer.all_special_ids)).any()
    assert (labels[batch.padding] == IGNORE_INDEX).all()
    assert task.tokens(batch) == int((~batch.padding).sum())


def test_losses_are_sums_over_their_counts(library):
    _, tokenizer, store = library
    task = MaskedLM(NSP, tokenizer)
    model = model_for(task)
    examples = task.examples(store, length=32, seed=1)
    batch = examples.batch(range(12))
    sums, counts = task.losses(model, batch), task.counts(batch)
    assert set(counts) == {"token", "next"} == set(model.heads)
    halves = [examples.batch(range(6)), examples.batch(range(6, 12))]
    for head in ("token", "next", "correct", "next_correct"):
        assert sums[head].item() == pytest.approx(sum(task.losses(model, half)[head].item() for half in halves))
    assert counts == {head: sum(task.counts(half)[head] for half in halves) for head in counts}
    padded = padded_batch(examples, list(range(6)), 9)
    assert task.counts(padded) == task.counts(halves[0])
    assert task.tokens(padded) == task.tokens(halves[0])
    padded_loss, loss = (task.losses(model, part)["next"].item() for part in (padded, halves[0]))
    assert padded_loss == pytest.approx(loss)
    score = task.score({"token": 8.0, "correct": 1, "next": 3.0, "next_correct": 5}, {"token": 4, "next": 6}, size=9)
    assert score["loss"] == 2.5
    assert score["perplexity"] == pytest.approx(np.exp(2.0))
    assert score["next_accuracy"] == pytest.approx(5 / 6)
    assert "next_accuracy" not in task.score({"token": 8.0, "correct": 1, "next": 0.0}, {"token": 4, "next": 0}, size=9)


# The store


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_store_separates_sentences(tmp_path, kind):
    text = "Anne likes the sea. Ben does not! Zoë was at home... She said so.\nThen: nothing."
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    settings = TokenizerSettings(kind=kind, vocabulary=400, min_frequency=1)
    tokenizer = train_tokenizer([text] * 4, settings)
    corpus = read_corpus(path, documents="file")
    plain, marked = (build_store(corpus, tokenizer, sentences=sentences) for sentences in (False, True))
    assert plain.sep is None
    assert plain.folder != marked.folder
    ids = marked.document(0)
    assert ids[ids != tokenizer.sep].tolist() == plain.document(0).tolist() == tokenizer.encode(text)
    assert marked.sep == tokenizer.sep
    assert marked.sentences == 1 + (ids == tokenizer.sep).sum() == 5
    first = ids[: ids.tolist().index(tokenizer.sep)]
    assert tokenizer.decode(first).startswith("Anne likes the sea")


# Runs


def topics(path, *, documents=240, words=6):
    """Stories on six subjects, each with its own words, so that next-sentence prediction can be learned."""
    rng = random.Random(1)
    subjects = [[f"{letter}{'aeiou'[i % 5]}{'lmnrst'[i // 5]}o" for i in range(words)] for letter in "bdfgkp"]
    lines = []
    for number in range(documents):
        subject = subjects[number % len(subjects)]
        sentences = [" ".join(rng.choices(subject, k=5)).capitalize() + "." for _ in range(4)]
        lines.append(" ".join(sentences))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_model_learns_next_sentence_prediction(tmp_path, tiny):
    settings = tiny | {"depth": 1, "width": 32, "heads": 4, "hidden": 64, "steps": 150, "lr": 5e-3, "batch": 32}
    settings |= {"vocabulary": 120, "tokenizer.kind": "word", "data.documents": "line", "valid_fraction": 0.3}
    settings |= {"tokenizer.lowercase": True, "task.nsp": True, "validate_every": 50}
    results = headstock.pretrain(
        topics(tmp_path / "text.txt"), out=tmp_path / "run", objective="masked", settings=settings
    )
    # five sixths of the negatives are on another subject, so the best accuracy is 11/12
    assert results["next_accuracy"] == results["metrics"]["next_accuracy"] > 0.7
    assert results["perplexity"] < 30
    assert headstock.load(tmp_path / "run").model.backbone.config.segments == 2


def test_start_from_a_run_without_its_nsp_head(corpus, tmp_path, tiny):
    settings = {key: tiny[key] for key in ("steps", "tensorboard")}
    headstock.pretrain(corpus, out=tmp_path / "pairs", objective="masked", settings=tiny | {"task.nsp": True})
    headstock.pretrain(
        corpus, out=tmp_path / "on", start=tmp_path / "pairs", settings=settings | {"task.nsp": False, "lr": 1e-9}
    )
    before, after = (headstock.load(tmp_path / name) for name in ("pairs", "on"))
    assert set(before.model.heads) == {"token", "next"}
    assert set(after.model.heads) == {"token"}
    tensors_before = before.model.tensors()
    for name, tensor in after.model.tensors().items():
        torch.testing.assert_close(tensor, tensors_before[name], atol=1e-6, rtol=0)


def test_invalid_settings_are_refused_before_training(corpus, library, tmp_path, tiny):
    def check(text, match, **settings):
        with pytest.raises(UserError, match=match):
            headstock.pretrain(text, out=tmp_path / "run", objective="masked", settings=tiny | settings)
        assert not (tmp_path / "run").exists()

    single_document = tmp_path / "one.txt"
    single_document.write_text("Anne sees the sea. Ben sees it too.\n" * 60, encoding="utf-8")
    check(single_document, "needs two documents", **{"task.nsp": True, "data.documents": "file"})
    single_sentences = tmp_path / "single.txt"
    single_sentences.write_text("\n".join(f"Sentence number {i}." for i in range(60)), encoding="utf-8")
    check(single_sentences, "documents of two or more sentences", **{"task.nsp": True, "data.documents": "line"})
    check(corpus, r"model.segments: must be 2 or more, not 1", **{"task.nsp": True, "model.segments": 1})
    check(corpus, "train.length: 4 is too short", **{"task.nsp": True, "train.length": 4})
    with pytest.raises(UserError, match=r"nsp=True: .*'masked', not 'causal'"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"task.nsp": True})


def test_tokenizer_without_separator_is_refused(tmp_path):
    names = ["<pad>", "<eos>", "<unk>", "[CLS]", "[MASK]", "Anne", "likes", "Paris"]
    words = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(names[:5])
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    MaskedLM(replace(NSP, nsp=False), tokenizer)
    with pytest.raises(UserError, match=r"no \[SEP\]"):
        MaskedLM(NSP, tokenizer)
    path = tmp_path / "text.txt"
    path.write_text("Anne likes Paris. Paris likes Anne.\n" * 3, encoding="utf-8")
    with pytest.raises(UserError, match=r"no \[SEP\]"):
        build_split_stores(read_corpus(path, documents="file"), tokenizer, sentences=True, valid=read_corpus(path))
