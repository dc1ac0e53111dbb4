"""Next-sentence prediction: which texts meet in a row, and that a model can learn to tell."""

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
    """Documents of six sentences, in which every word tells its document, sentence and place: `D3s2w0 ...`."""
    pick = random.Random(0)
    texts = []
    for document in range(DOCUMENTS):
        count = 1 if document == 7 else SENTENCES
        sentences = [
            " ".join(f"D{document}s{sentence}w{word}" for word in range(pick.randint(2, 6))) + "."
            for sentence in range(count)
        ]
        texts.append(" ".join(sentences))
    path = tmp_path_factory.mktemp("library") / "texts.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    corpus = read_corpus(path, documents="line")
    tokenizer = train_tokenizer(texts, TokenizerSettings(kind="word", vocabulary=2000, min_frequency=1))
    return path, tokenizer, build_store(corpus, tokenizer, sentences=True)


def parts(tokenizer, batch, row):
    """The words of A and B, with the marks taken off and checked."""
    tokens = batch.tokens[row][~batch.padding[row]].tolist()
    segments = batch.segments[row][~batch.padding[row]].tolist()
    assert tokens[0] == tokenizer.cls
    assert tokens[-1] == tokenizer.sep
    first = tokens.index(tokenizer.sep)
    assert segments == [0] * (first + 1) + [1] * (len(tokens) - first - 1)
    a, b = tokens[1:first], tokens[first + 1 : -1]
    assert tokenizer.sep not in b
    return [[tokenizer.id_to_token(number) for number in part] for part in (a, b)]


def place(word):
    document, _, rest = word[1:].partition("s")
    sentence, _, number = rest.partition("w")
    return int(document), int(sentence), int(number)


def shown_only(tokenizer, **settings):
    """The task, with nothing but a few tokens hidden, all of them shown as they are."""
    return MaskedLM(MaskedConfig(nsp=True, fraction=0.01, masked=0.0, random=0.0, **settings), tokenizer)


@pytest.mark.parametrize("length", [64, 24])
def test_half_of_the_pairs_follow_each_other_and_half_are_of_two_documents(library, length):
    _, tokenizer, store = library
    task = shown_only(tokenizer)
    seen = {0: 0, 1: 0, IGNORE_INDEX: 0}
    others = set()
    for epoch in range(20):
        examples = task.examples(store, length=length, seed=1, epoch=epoch)
        batch = examples.batch(range(len(examples)))
        assert batch.tokens.shape[1] <= length
        for row, follows in enumerate(batch.labels["next"].tolist()):
            a, b = parts(tokenizer, batch, row)
            seen[follows] += 1
            words_a, words_b = ([word for word in part if word != "."] for part in (a, b))
            if follows == IGNORE_INDEX:  # no second sentence, or none elsewhere that would fit
                assert len({place(word)[:2] for word in words_a}) == 1 or b
                assert len({place(word)[0] for word in words_a + words_b}) == 1
                continue
            assert a[-1] == "."
            begin = place(words_b[0])
            if not words_a:  # the piece began with a full stop
                continue
            end = place(words_a[-1])
            assert begin[2] == 0  # both kinds of B begin with a sentence, so that this cannot give them away
            if follows:
                assert begin[:2] == (end[0], end[1] + 1)
            else:
                assert begin[0] != end[0]
                others.add(begin[:2])
            for part in (words_a, words_b):
                assert len({place(word)[0] for word in part}) == 1
                assert part == sorted(part, key=place)
    pairs = seen[0] + seen[1]
    assert abs(seen[1] - pairs / 2) < 2 * pairs**0.5  # four times the spread of fair coins
    assert seen[IGNORE_INDEX] > 0
    assert len(others) > 0.7 * (DOCUMENTS * SENTENCES - SENTENCES)  # any sentence of any document may come second


def essays(path, *, documents=900):
    """Short and long documents; many end without a final mark, many sentences begin with a number."""
    pick = random.Random(5)
    texts = []
    for number in range(documents):
        sentences = []
        for _ in range(pick.choice([2, 3, 5, 8, 30])):
            words = [f"w{pick.randrange(80)}" for _ in range(pick.choice([3, 6, 10, 20]))]
            words[0] = f"{number % 7}0" if pick.random() < 0.3 else words[0].capitalize()
            sentences.append(" ".join(words) + pick.choice(".!?"))
        if pick.random() < 0.5:
            sentences[-1] = sentences[-1][:-1]
        texts.append(" ".join(sentences))
    path.write_text("\n".join(texts), encoding="utf-8")
    return texts


def best_rule(values, labels):
    """The accuracy of the best threshold on one feature, in either direction."""
    values = np.asarray(values, float)
    rules = [((values >= edge) == labels).mean() for edge in np.unique(np.quantile(values, np.linspace(0, 1, 21)))]
    return max(max(rule, 1 - rule) for rule in rules)


@pytest.mark.parametrize("length", [48, 128])
def test_no_simple_rule_tells_negatives_from_positives(tmp_path, length):
    texts = essays(tmp_path / "essays.txt")
    tokenizer = train_tokenizer(texts, TokenizerSettings(kind="word", vocabulary=300, min_frequency=1))
    store = build_store(read_corpus(tmp_path / "essays.txt", documents="line"), tokenizer, sentences=True)
    task = shown_only(tokenizer)
    labels, features = [], []
    for epoch in range(3):
        examples = task.examples(store, length=length, seed=1, epoch=epoch)
        batch = examples.batch(range(len(examples)))
        for row, follows in enumerate(batch.labels["next"].tolist()):
            if follows != IGNORE_INDEX:
                a, b = parts(tokenizer, batch, row)
                labels.append(follows)
                features.append((b[-1] in ".!?", len(b), len(a) + len(b), len(b) / len(a), b[0][0].isupper()))
    assert len(labels) > 3500
    names = ("final mark", "length of B", "length of both", "ratio of lengths", "capital")
    scores = {
        name: best_rule(of, np.array(labels) == 1) for name, of in zip(names, zip(*features, strict=True), strict=True)
    }
    assert {name: score for name, score in scores.items() if score > 0.53} == {}


def test_every_token_is_read_once_in_a_pass_before_half_of_it_is_replaced(library):
    _, tokenizer, store = library
    task = shown_only(tokenizer)
    for seed, epoch in ((None, 0), (3, 0), (3, 1)):
        pairs = task.examples(store, length=20, seed=seed, epoch=epoch).pairs
        for document in range(store.documents):
            mine = np.flatnonzero(pairs.chunks.documents == document)
            pieces = [pairs.read(document, pairs.chunks.starts[i], pairs.chunks.ends[i]) for i in mine]
            assert np.array_equal(np.concatenate(pieces), store.document(document))
            assert all(0 < len(piece) <= 17 for piece in pieces)
    cuts = [task.examples(store, length=20, seed=3, epoch=epoch).pairs.chunks.starts for epoch in range(2)]
    assert len(cuts[0]) == len(cuts[1])
    assert not np.array_equal(*cuts)


def test_a_pair_is_a_pure_function_of_seed_epoch_and_index(library):
    _, tokenizer, store = library
    task = MaskedLM(NSP, tokenizer)

    def read(seed, epoch, indices):
        return task.examples(store, length=32, seed=seed, epoch=epoch).batch(indices)

    together = read(1, 2, [5, 0, 9])
    for row, index in enumerate([5, 0, 9]):
        alone = read(1, 2, [index])
        width = alone.tokens.shape[1]
        assert torch.equal(alone.tokens[0], together.tokens[row, :width])
        assert torch.equal(alone.labels["token"][0], together.labels["token"][row, :width])
        assert together.padding[row, width:].all()
        assert alone.labels["next"][0] == together.labels["next"][row]
    every = list(range(30))
    assert not torch.equal(read(1, 2, every).labels["next"], read(1, 3, every).labels["next"])
    assert torch.equal(read(None, 0, every).tokens, read(None, 7, every).tokens)


def test_marks_are_never_hidden_and_tokens_are_counted_without_padding(library):
    _, tokenizer, store = library
    task = MaskedLM(MaskedConfig(nsp=True, fraction=0.9, unit="span"), tokenizer)
    batch = task.examples(store, length=32, seed=1).batch(range(40))
    wanted = batch.labels["token"]
    hidden = wanted[wanted != IGNORE_INDEX]
    assert len(hidden) > 300
    assert not np.isin(hidden.numpy(), sorted(tokenizer.all_special_ids)).any()
    assert (wanted[batch.padding] == IGNORE_INDEX).all()
    assert task.tokens(batch) == int((~batch.padding).sum())


def test_both_losses_are_sums_over_their_own_counts(library):
    _, tokenizer, store = library
    task = MaskedLM(NSP, tokenizer)
    model = model_for(task)
    examples = task.examples(store, length=32, seed=1)
    batch = examples.batch(range(12))
    whole, counts = task.losses(model, batch), task.counts(batch)
    assert set(counts) == {"token", "next"} == set(model.heads)
    halves = [examples.batch(range(6)), examples.batch(range(6, 12))]
    for head in ("token", "next", "correct", "next_correct"):
        assert whole[head].item() == pytest.approx(sum(task.losses(model, half)[head].item() for half in halves))
    assert counts == {head: sum(task.counts(half)[head] for half in halves) for head in counts}
    fuller = padded_batch(examples, list(range(6)), 9)
    assert task.counts(fuller) == task.counts(halves[0])
    assert task.tokens(fuller) == task.tokens(halves[0])
    again, alone = (task.losses(model, part)["next"].item() for part in (fuller, halves[0]))
    assert again == pytest.approx(alone)
    score = task.score({"token": 8.0, "correct": 1, "next": 3.0, "next_correct": 5}, {"token": 4, "next": 6}, size=9)
    assert score["loss"] == 2.5
    assert score["perplexity"] == pytest.approx(np.exp(2.0))
    assert score["next_accuracy"] == pytest.approx(5 / 6)
    assert "next_accuracy" not in task.score({"token": 8.0, "correct": 1, "next": 0.0}, {"token": 4, "next": 0}, size=9)


# The store


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_sentences_are_marked_apart_and_nothing_else_changes(tmp_path, kind):
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


# Through the front door


def topics(path, *, documents=240, words=6):
    """Stories on six subjects, each with words of its own: whether one text goes on with another can be told."""
    pick = random.Random(1)
    subjects = [[f"{letter}{'aeiou'[i % 5]}{'lmnrst'[i // 5]}o" for i in range(words)] for letter in "bdfgkp"]
    lines = []
    for number in range(documents):
        subject = subjects[number % len(subjects)]
        sentences = [" ".join(pick.choices(subject, k=5)).capitalize() + "." for _ in range(4)]
        lines.append(" ".join(sentences))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_model_learns_to_tell_what_follows_in_documents_it_never_read(tmp_path, tiny):
    given = tiny | {"depth": 1, "width": 32, "heads": 4, "hidden": 64, "steps": 200, "lr": 5e-3, "batch": 32}
    given |= {"vocabulary": 120, "tokenizer.kind": "word", "data.documents": "line", "valid_fraction": 0.3}
    given |= {"tokenizer.lowercase": True, "task.nsp": True}
    results = headstock.pretrain(
        topics(tmp_path / "text.txt"), out=tmp_path / "run", objective="masked", settings=given
    )
    # five sixths of the foreign texts are on another subject, so that eleven in twelve pairs can be told
    assert results["next_accuracy"] == results["metrics"]["next_accuracy"] > 0.7
    assert results["perplexity"] < 30
    assert headstock.load(tmp_path / "run").model.backbone.config.segments == 2


def test_another_run_can_begin_without_the_head_for_pairs(corpus, tmp_path, tiny):
    own = {key: tiny[key] for key in ("steps", "tensorboard")}
    headstock.pretrain(corpus, out=tmp_path / "pairs", objective="masked", settings=tiny | {"task.nsp": True})
    headstock.pretrain(
        corpus, out=tmp_path / "on", start=tmp_path / "pairs", settings=own | {"task.nsp": False, "lr": 1e-9}
    )
    before, after = (headstock.load(tmp_path / name) for name in ("pairs", "on"))
    assert set(before.model.heads) == {"token", "next"}
    assert set(after.model.heads) == {"token"}
    theirs = before.model.tensors()
    for name, tensor in after.model.tensors().items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


def test_what_cannot_be_done_is_said_before_anything_is_begun(corpus, library, tmp_path, tiny):
    def fails(text, match, **settings):
        with pytest.raises(UserError, match=match):
            headstock.pretrain(text, out=tmp_path / "run", objective="masked", settings=tiny | settings)
        assert not (tmp_path / "run").exists()

    one = tmp_path / "one.txt"
    one.write_text("Anne sees the sea. Ben sees it too.\n" * 60, encoding="utf-8")
    fails(one, "needs two documents", **{"task.nsp": True, "data.documents": "file"})
    single = tmp_path / "single.txt"
    single.write_text("\n".join(f"Sentence number {i}." for i in range(60)), encoding="utf-8")
    fails(single, "documents of two or more sentences", **{"task.nsp": True, "data.documents": "line"})
    fails(corpus, r"model.segments: must be 2 or more, not 1", **{"task.nsp": True, "model.segments": 1})
    fails(corpus, "train.length: 4 is too short", **{"task.nsp": True, "train.length": 4})
    with pytest.raises(UserError, match=r"--nsp: .*'masked', not 'causal'"):
        headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"task.nsp": True})


def test_a_tokenizer_without_a_separator_is_refused(tmp_path):
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
