"""Masked language modelling: inputs and labels, attention and the loss."""

import math

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch.nn import functional as F

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_store
from headstock.data.tokenizer import TokenizerSettings, open_tokenizer, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.kernels.cuda_graphs import signature
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.masked import MaskedConfig, MaskedLM
from headstock.tasks.packing import PackedWindows
from tests.tasks.small import model_for


def unmasked_rows(task, store, length, *, seed, epoch):
    """The same windows without masks."""
    special = {"bos": task.bos, "eos": task.eos, "filler": task.pad_id}
    windows = PackedWindows(store, length, **special, seed=seed, epoch=epoch)
    return windows.rows(range(len(windows)))


def all_rows(examples):
    return examples.batch(range(len(examples)))


# Masks


@pytest.mark.parametrize("seed", [None, 4])
def test_labels_are_the_masked_tokens(stores, seed):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(fraction=0.3), tokenizer)
    assert task.bos == tokenizer.cls
    rows = unmasked_rows(task, splits.train, 64, seed=seed, epoch=2)
    batch = all_rows(task.examples(splits.train, length=64, seed=seed, epoch=2))
    tokens, labels = batch.tokens.numpy(), batch.labels["token"].numpy()
    is_masked = labels != IGNORE_INDEX
    assert np.array_equal(labels[is_masked], rows.tokens[is_masked])
    assert np.array_equal(tokens[~is_masked], rows.tokens[~is_masked])
    is_bos = rows.tokens == tokenizer.cls
    assert is_bos.sum() == splits.train.documents
    assert rows.padding.any()
    assert not (is_masked & (is_bos | rows.padding)).any()
    assert np.array_equal(batch.document_ids.numpy() < 0, rows.padding)
    assert task.tokens(batch) == (~rows.padding).sum() == splits.train.tokens


def test_replacement_shares(stores):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    masked_count = mask_count = random_count = same_count = maskable_count = 0
    replacements = []
    for epoch in range(40):
        rows = unmasked_rows(task, splits.train, 64, seed=1, epoch=epoch)
        batch = all_rows(task.examples(splits.train, length=64, seed=1, epoch=epoch))
        has_label = batch.labels["token"].numpy() != IGNORE_INDEX
        inputs, originals = batch.tokens.numpy()[has_label], rows.tokens[has_label]
        random_tokens = inputs[(inputs != tokenizer.mask) & (inputs != originals)]
        replacements.append(random_tokens)
        maskable_count += splits.train.tokens - splits.train.documents  # every document has one [CLS]
        masked_count, mask_count = masked_count + len(inputs), mask_count + int((inputs == tokenizer.mask).sum())
        random_count, same_count = random_count + len(random_tokens), same_count + int((inputs == originals).sum())

    def is_near(count, total, share):
        return abs(count - total * share) < 4 * math.sqrt(total * share * (1 - share))

    assert is_near(masked_count, maskable_count, 0.15)
    assert is_near(mask_count, masked_count, 0.8)
    by_chance = 0.1 / len(task.masker.ordinary_tokens)  # a random token may equal the original
    assert is_near(random_count, masked_count, 0.1 - by_chance)
    assert is_near(same_count, masked_count, 0.1 + by_chance)
    all_random = np.concatenate(replacements)
    assert not np.isin(all_random, sorted(tokenizer.all_special_ids)).any()
    assert set(task.masker.ordinary_tokens) == set(range(tokenizer.vocabulary)) - tokenizer.all_special_ids
    assert len(np.unique(all_random)) > 0.95 * len(task.masker.ordinary_tokens)


def test_unchanged_tokens_are_still_labels(stores):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(fraction=0.5, masked=0.0, random=0.0), tokenizer)
    rows = unmasked_rows(task, splits.train, 64, seed=1, epoch=0)
    batch = all_rows(task.examples(splits.train, length=64, seed=1, epoch=0))
    assert np.array_equal(batch.tokens.numpy(), rows.tokens)
    assert task.counts(batch)["token"] > 0.4 * splits.train.tokens
    with pytest.raises(ConfigError) as error:
        MaskedConfig(fraction=1.0, masked=0.8, random=0.3)
    assert [name for name, _ in error.value.problems] == ["fraction", "masked"]


def test_masks_are_a_pure_function_of_seed_epoch_and_index(stores):
    tokenizer, splits = stores
    # one window, so that only the masks differ between epochs
    length = splits.valid.tokens

    def labels(seed, epoch):
        task = MaskedLM(MaskedConfig(), tokenizer)
        return task.examples(splits.valid, length=length, seed=seed, epoch=epoch).batch([0]).labels["token"]

    assert torch.equal(labels(1, 3), labels(1, 3))
    assert not torch.equal(labels(1, 3), labels(1, 4))
    assert not torch.equal(labels(1, 3), labels(2, 3))
    assert torch.equal(labels(None, 0), labels(None, 5))  # validation masks never change
    examples = MaskedLM(MaskedConfig(), tokenizer).examples(splits.train, length=32, seed=1, epoch=3)
    batch = examples.batch([4, 0, 9, 4])
    for row, index in enumerate([4, 0, 9, 4]):
        single = examples.batch([index])
        assert torch.equal(single.tokens[0], batch.tokens[row])
        assert torch.equal(single.labels["token"][0], batch.labels["token"][row])
    first, second = batch.labels["token"][:2]
    assert not torch.equal(first != IGNORE_INDEX, second != IGNORE_INDEX)  # rows have different masks


def test_masked_tokens_do_not_leak(tmp_path):
    # with so many characters, a random one hardly ever equals the original
    characters = [chr(code) for code in range(ord("a"), ord("a") + 500) if chr(code).isalpha()]
    tokenizer = train_tokenizer(["".join(characters)] * 3, TokenizerSettings(kind="char", vocabulary=600))
    task = MaskedLM(MaskedConfig(fraction=0.5, masked=0.5, random=0.3), tokenizer)

    def read(text):
        path = tmp_path / f"{text}.txt"
        path.write_text(text, encoding="utf-8")
        store = build_store(read_corpus(path), tokenizer)
        assert store.tokens == len(text) + 1
        return task.examples(store, length=store.tokens, seed=3).batch([0])

    text = "abcdefghij" * 5
    reference = read(text)
    counts = {"mask": 0, "other": 0, "itself": 0, "open": 0}
    for position in range(1, len(text) + 1):  # position 0 is [CLS]
        replacement = "a" if text[position - 1] != "a" else "b"
        batch = read(text[: position - 1] + replacement + text[position:])
        changed_inputs = (batch.tokens != reference.tokens)[0].nonzero().flatten().tolist()
        changed_labels = (batch.labels["token"] != reference.labels["token"])[0].nonzero().flatten().tolist()
        label, token = reference.labels["token"][0, position], reference.tokens[0, position]
        kind = (
            "open"
            if label == IGNORE_INDEX
            else "mask"
            if token == task.masker.mask
            else "itself"
            if token == label
            else "other"
        )
        assert changed_labels == ([] if kind == "open" else [position])
        assert changed_inputs == ([position] if kind in ("open", "itself") else [])
        counts[kind] += 1
    assert min(counts.values()) >= 2, counts


# Model


def test_head_reads_only_labelled_positions(stores):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task)
    batch = task.examples(splits.train, length=64, seed=1).batch(range(6))
    labels = batch.labels["token"]
    shapes = []
    hook = model.heads["token"].register_forward_hook(lambda head, inputs, output: shapes.append(inputs[0].shape))
    for smoothing in (0.0, 0.2):
        sums = task.losses(model, batch, smoothing=smoothing)
        rows, width = shapes.pop()
        count = task.counts(batch)["token"]
        assert width == 16 and count <= rows < count + max(8, labels.numel() // 64)  # rounded up
        with torch.no_grad():
            logits = model.heads["token"](model(batch).hidden)
        shapes.clear()
        expected = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=smoothing,
        )
        assert sums["token"].item() == pytest.approx(expected.item(), rel=1e-5)
        assert int(sums["correct"]) == int(((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum())
    hook.remove()


def test_padding_examples_are_ignored(stores):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task)
    examples = task.examples(splits.train, length=64, seed=1)
    batch, padded = padded_batch(examples, [3, 5], 2), padded_batch(examples, [3, 5], 4)
    assert len(padded.tokens) == 4
    assert task.counts(padded) == task.counts(batch)
    assert task.tokens(padded) == task.tokens(batch) == 2 * 64
    assert signature(padded) == signature(padded_batch(examples, [3, 5, 0, 0], 4))
    assert task.losses(model, padded)["token"].item() == pytest.approx(task.losses(model, batch)["token"].item())
    empty = padded_batch(examples, [], 1)
    assert task.tokens(empty) == 0
    assert task.losses(model, empty)["token"].item() == 0
    assert task.score({"token": 0.0, "correct": 0.0}, task.counts(empty), size=0)["loss"] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_stays_inside_the_document(stores, causal):
    tokenizer, splits = stores
    task = MaskedLM(MaskedConfig(), tokenizer)
    model = model_for(task, causal=causal)
    batch = task.examples(splits.train, length=64, seed=1).batch(range(4))
    documents = batch.document_ids[1]
    assert documents.max() > 1
    position = int((documents == 1).nonzero()[-1])  # the last token of the row's first complete document
    own_document = documents == documents[position]
    assert own_document.sum() > 2
    before = model(batch).hidden
    batch.tokens[1, position] = (batch.tokens[1, position] + 1) % tokenizer.vocabulary
    after = model(batch).hidden
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(after[1, ~own_document], before[1, ~own_document])
    moved = (after[1, own_document] - before[1, own_document]).abs().amax(-1) > 1e-6
    assert moved.all() if not causal else moved.tolist() == [False] * (len(moved) - 1) + [True]


def test_metrics(stores):
    tokenizer, _ = stores
    score = MaskedLM(MaskedConfig(), tokenizer).score({"token": 20.0, "correct": 4.0}, {"token": 10}, size=40)
    # no bits per byte: only a part of the text is predicted
    assert score == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "accuracy": 0.4}


# Runs


def test_masked_run_learns_and_loads(corpus, stores, tmp_path, tiny):
    losses = []
    results = headstock.pretrain(
        corpus,
        out=tmp_path / "run",
        objective="masked",
        settings=tiny | {"steps": 150, "validate_every": 50, "lr": 1e-2, "fraction": 0.2},
        callbacks=[lambda event: losses.append(event.state.valid["loss"]) if event.kind == "valid" else None],
    )
    train = stores[1].train
    counts = np.bincount(np.concatenate([train.document(i) for i in range(train.documents)]))
    shares = counts / counts.sum()
    unigram_entropy = -sum(share * math.log(share) for share in shares if share)
    assert results["valid_loss"] < 0.9 * unigram_entropy < losses[0]
    assert "bits_per_byte" not in results
    assert "bits_per_byte" not in results["metrics"]
    loaded = headstock.load(tmp_path / "run")
    assert loaded.model.backbone.causal is False
    assert isinstance(loaded.task, MaskedLM)
    assert loaded.task.config.fraction == 0.2
    evaluated = loaded.evaluate()
    assert evaluated["loss"] == pytest.approx(results["valid_loss"], rel=1e-5)
    with pytest.raises(UserError, match="no left-to-right language model"):
        loaded.generate("Story")


def test_causal_backbone_is_refused(corpus, tmp_path, tiny):
    with pytest.raises(UserError, match=r"model.causal: must be false for the objective 'masked', not True"):
        headstock.pretrain(corpus, out=tmp_path / "run", objective="masked", settings=tiny | {"model.causal": True})
    assert not (tmp_path / "run").exists()


def test_tokenizer_without_mask_is_refused(corpus, tmp_path, tiny):
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
    assert not (tmp_path / "run").exists()
