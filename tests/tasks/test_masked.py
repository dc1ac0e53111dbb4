"""Masked language modelling: what is hidden, how, and who can see it."""

import math

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch.nn import functional as F

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores, build_store
from headstock.data.tokenizer import TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.kernels.cuda_graphs import signature
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.masked import MaskedConfig, MaskedLM
from headstock.tasks.packing import PackedWindows
from tests.tasks.small import model_for


@pytest.fixture(scope="module")
def stores(corpus):
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(text, tokenizer)


def plain_rows(task, store, length, *, seed, epoch):
    """The same windows with nothing hidden."""
    marks = {"bos": task.bos, "eos": task.eos, "filler": task.pad_id}
    windows = PackedWindows(store, length, **marks, seed=seed, epoch=epoch)
    return windows.rows(range(len(windows)))


def whole(examples):
    return examples.batch(range(len(examples)))


# What is hidden


@pytest.mark.parametrize("seed", [None, 4])
def test_what_is_not_hidden_is_shown_and_what_is_hidden_is_wanted(stores, seed):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(fraction=0.3), tokenizer)
    assert task.bos == tokenizer.cls
    rows = plain_rows(task, found.train, 64, seed=seed, epoch=2)
    batch = whole(task.examples(found.train, length=64, seed=seed, epoch=2))
    tokens, labels = batch.tokens.numpy(), batch.labels["token"].numpy()
    hidden = labels != IGNORE_INDEX
    assert np.array_equal(labels[hidden], rows.tokens[hidden])
    assert np.array_equal(tokens[~hidden], rows.tokens[~hidden])
    opening = rows.tokens == tokenizer.cls
    assert opening.sum() == found.train.documents
    assert rows.padding.any()
    assert not (hidden & (opening | rows.padding)).any()
    assert np.array_equal(batch.document_ids.numpy() < 0, rows.padding)
    assert task.tokens(batch) == (~rows.padding).sum() == found.train.tokens


def test_of_the_hidden_tokens_most_are_masks_some_noise_and_some_themselves(stores):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    hidden = masks = noise = same = allowed = 0
    replacements = []
    for epoch in range(40):
        rows = plain_rows(task, found.train, 64, seed=1, epoch=epoch)
        batch = whole(task.examples(found.train, length=64, seed=1, epoch=epoch))
        places = batch.labels["token"].numpy() != IGNORE_INDEX
        shown, were = batch.tokens.numpy()[places], rows.tokens[places]
        other = shown[(shown != tokenizer.mask) & (shown != were)]
        replacements.append(other)
        allowed += found.train.tokens - found.train.documents  # every document has one opening mark
        hidden, masks = hidden + len(shown), masks + int((shown == tokenizer.mask).sum())
        noise, same = noise + len(other), same + int((shown == were).sum())

    def near(got, of, share):
        return abs(got - of * share) < 4 * math.sqrt(of * share * (1 - share))

    assert near(hidden, allowed, 0.15)
    assert near(masks, hidden, 0.8)
    by_chance = 0.1 / len(task.masker.ordinary_tokens)  # a random token may be the hidden one itself
    assert near(noise, hidden, 0.1 - by_chance)
    assert near(same, hidden, 0.1 + by_chance)
    drawn = np.concatenate(replacements)
    assert not np.isin(drawn, sorted(tokenizer.all_special_ids)).any()
    assert set(task.masker.ordinary_tokens) == set(range(tokenizer.vocabulary)) - tokenizer.all_special_ids
    assert len(np.unique(drawn)) > 0.95 * len(task.masker.ordinary_tokens)  # any other, not a favourite


def test_shares_are_settings(stores):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(fraction=0.5, masked=0.0, random=0.0), tokenizer)
    rows = plain_rows(task, found.train, 64, seed=1, epoch=0)
    batch = whole(task.examples(found.train, length=64, seed=1, epoch=0))
    assert np.array_equal(batch.tokens.numpy(), rows.tokens)  # all kept as they were, and still asked for
    assert task.counts(batch)["token"] > 0.4 * found.train.tokens
    with pytest.raises(ConfigError) as caught:
        MaskedConfig(fraction=1.0, masked=0.8, random=0.3)
    assert [where for where, _ in caught.value.problems] == ["fraction", "masked"]


def test_masks_are_a_pure_function_of_seed_epoch_and_index(stores):
    tokenizer, found = stores
    # one window, so that the windows cannot move from pass to pass: only the masks may differ
    length = found.valid.tokens

    def labels(seed, epoch):
        task = MaskedLM(MaskedConfig(), tokenizer)
        return task.examples(found.valid, length=length, seed=seed, epoch=epoch).batch([0]).labels["token"]

    assert torch.equal(labels(1, 3), labels(1, 3))
    assert not torch.equal(labels(1, 3), labels(1, 4))
    assert not torch.equal(labels(1, 3), labels(2, 3))
    assert torch.equal(labels(None, 0), labels(None, 5))  # held-out text is always asked the same
    examples = MaskedLM(MaskedConfig(), tokenizer).examples(found.train, length=32, seed=1, epoch=3)
    together = examples.batch([4, 0, 9, 4])
    for row, index in enumerate([4, 0, 9, 4]):
        alone = examples.batch([index])
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.labels["token"][0], together.labels["token"][row])
    first, second = together.labels["token"][:2]
    assert not torch.equal(first != IGNORE_INDEX, second != IGNORE_INDEX)  # rows are not hidden at the same places


def test_what_is_hidden_does_not_show(tmp_path):
    # so many characters that a random one is hardly ever the one it stands for
    characters = [chr(code) for code in range(ord("a"), ord("a") + 500) if chr(code).isalpha()]
    tokenizer = train_tokenizer(["".join(characters)] * 3, TokenizerSettings(kind="char", vocabulary=600))
    task = MaskedLM(MaskedConfig(fraction=0.5, masked=0.5, random=0.3), tokenizer)

    def read(text):
        path = tmp_path / f"{text}.txt"
        path.write_text(text, encoding="utf-8")
        store = build_store(read_corpus(path), tokenizer)
        assert store.tokens == len(text) + 1
        return task.examples(store, length=store.tokens, seed=3).batch([0])

    text = "abcdefghij" * 8
    before = read(text)
    seen = {"mask": 0, "other": 0, "itself": 0, "open": 0}
    for place in range(1, len(text) + 1):  # the opening mark stands at 0
        changed = "a" if text[place - 1] != "a" else "b"
        after = read(text[: place - 1] + changed + text[place:])
        moved = (after.tokens != before.tokens)[0].nonzero().flatten().tolist()
        relabelled = (after.labels["token"] != before.labels["token"])[0].nonzero().flatten().tolist()
        was, shown = before.labels["token"][0, place], before.tokens[0, place]
        kind = (
            "open"
            if was == IGNORE_INDEX
            else "mask"
            if shown == task.masker.mask
            else "itself"
            if shown == was
            else "other"
        )
        assert relabelled == ([] if kind == "open" else [place])
        assert moved == ([place] if kind in ("open", "itself") else [])
        seen[kind] += 1
    assert min(seen.values()) >= 2, seen


# What the model sees


def test_the_head_reads_only_what_is_hidden_and_loses_the_same(stores):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task)
    batch = task.examples(found.train, length=64, seed=1).batch(range(6))
    wanted = batch.labels["token"]
    read = []
    watching = model.heads["token"].register_forward_hook(lambda head, given, made: read.append(given[0].shape))
    for smoothing in (0.0, 0.2):
        sums = task.losses(model, batch, smoothing=smoothing)
        rows, width = read.pop()
        asked = task.counts(batch)["token"]
        assert width == 16 and asked <= rows < asked + max(8, wanted.numel() // 64)  # a few more, for an even number
        with torch.no_grad():
            everywhere = model.heads["token"](model(batch).hidden)
        read.clear()
        full = F.cross_entropy(
            everywhere.flatten(0, 1),
            wanted.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=smoothing,
        )
        assert sums["token"].item() == pytest.approx(full.item(), rel=1e-5)
        assert int(sums["correct"]) == int(((everywhere.argmax(-1) == wanted) & (wanted != IGNORE_INDEX)).sum())
    watching.remove()


def test_rows_that_fill_a_batch_lose_nothing(stores):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task)
    examples = task.examples(found.train, length=64, seed=1)
    alone, more = padded_batch(examples, [3, 5], 2), padded_batch(examples, [3, 5], 4)
    assert len(more.tokens) == 4
    assert task.counts(more) == task.counts(alone)
    assert task.tokens(more) == task.tokens(alone) == 2 * 64
    assert signature(more) == signature(padded_batch(examples, [3, 5, 0, 0], 4)), "one recording is for both"
    assert task.losses(model, more)["token"].item() == pytest.approx(task.losses(model, alone)["token"].item())
    nothing = padded_batch(examples, [], 1)
    assert task.tokens(nothing) == 0
    assert task.losses(model, nothing)["token"].item() == 0
    assert task.score({"token": 0.0, "correct": 0.0}, task.counts(nothing), size=0)["loss"] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_sees_both_sides_of_its_own_document_and_no_other(stores, causal):
    tokenizer, found = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task, causal=causal)
    batch = task.examples(found.train, length=64, seed=1).batch(range(4))
    documents = batch.document_ids[1]
    assert documents.max() > 1
    place = int((documents == 1).nonzero()[-1])  # the last token of the row's first whole document
    mine = documents == documents[place]
    assert mine.sum() > 2
    before = model(batch).hidden
    batch.tokens[1, place] = (batch.tokens[1, place] + 1) % tokenizer.vocabulary
    after = model(batch).hidden
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(after[1, ~mine], before[1, ~mine])
    moved = (after[1, mine] - before[1, mine]).abs().amax(-1) > 1e-6
    assert moved.all() if not causal else moved.tolist() == [False] * (len(moved) - 1) + [True]


def test_scores_are_per_hidden_token(stores):
    tokenizer, _ = stores
    score = MaskedLM(MaskedConfig(), tokenizer).score({"token": 20.0, "correct": 4.0}, {"token": 10}, size=40)
    # no bits per byte: only some of the text was asked for, and with the rest of it in sight
    assert score == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "accuracy": 0.4}


# Through the front door


def test_a_masked_run_learns_and_opens(corpus, stores, tmp_path, tiny):
    heard = []
    results = headstock.pretrain(
        corpus,
        out=tmp_path / "run",
        objective="masked",
        settings=tiny | {"steps": 200, "lr": 1e-2, "fraction": 0.2},
        callbacks=[lambda event: heard.append(event.state.valid["loss"]) if event.kind == "valid" else None],
    )
    train = stores[1].train
    met = np.bincount(np.concatenate([train.document(i) for i in range(train.documents)]))
    shares = met / met.sum()
    knowing_no_neighbours = -sum(share * math.log(share) for share in shares if share)
    assert results["valid_loss"] < 0.9 * knowing_no_neighbours < heard[0]
    assert "bits_per_byte" not in results
    assert "bits_per_byte" not in results["metrics"]
    loaded = headstock.load(tmp_path / "run")
    assert loaded.model.backbone.causal is False
    assert isinstance(loaded.task, MaskedLM)
    assert loaded.task.config.fraction == 0.2
    again = loaded.evaluate()
    assert again["loss"] == pytest.approx(results["valid_loss"], rel=1e-5)
    with pytest.raises(UserError, match="no left-to-right language model"):
        loaded.generate("Story")


def test_a_causal_model_cannot_be_asked_for(corpus, tmp_path, tiny):
    with pytest.raises(UserError, match=r"model.causal: must be false for the objective 'masked', not True"):
        headstock.pretrain(corpus, out=tmp_path / "run", objective="masked", settings=tiny | {"model.causal": True})
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_a_mask_is_refused(corpus, tmp_path, tiny):
    names = ["<sos>", "<pad>", "<eos>", "<unk>", "Anne", "likes", "Paris"]
    words = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(names[:4])
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        MaskedLM(MaskedConfig(), open_tokenizer(tmp_path / "tokenizer.json"))
    del tiny["vocabulary"]
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        headstock.pretrain(
            corpus, out=tmp_path / "run", objective="masked", tokenizer=tmp_path / "tokenizer.json", settings=tiny
        )
    assert not (tmp_path / "run").exists()  # nothing was begun, so the same name can be used again
