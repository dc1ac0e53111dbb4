"""Denoising: what is taken out of a text, what is left in its place, and what must be written."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.denoise import Denoise, DenoiseConfig
from tests.tasks.parallel import model_for

LENGTH = 24


@pytest.fixture(scope="module")
def stores(corpus):
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(text, tokenizer)


def rows_of(examples):
    """Every example as what is left and what is wanted, without marks of beginning, end and padding."""
    task, found = examples.task, []
    for at in range(0, len(examples), 64):
        batch = examples.batch(range(at, min(at + 64, len(examples))))
        for source, shown, labels in zip(batch.source.tokens, batch.tokens, batch.labels["token"], strict=True):
            wanted = labels[labels != IGNORE_INDEX].tolist()
            left = source.tolist()[: source.tolist().index(task.eos)]
            assert shown.tolist()[: len(wanted)] == [task.bos, *wanted[:-1]]  # teacher forcing
            assert wanted[-1] == task.eos
            found.append((left, wanted[:-1]))
    return found


def fills(left, whole, mask):
    """Whether the text can be had by putting at least one token in the place of every mask."""

    def spelled(tokens):
        return "".join(f"<{token}>" for token in tokens)

    pattern = "".join("(?:<[0-9]+>)+" if token == mask else re.escape(f"<{token}>") for token in left)
    return re.fullmatch(pattern, spelled(whole)) is not None


@pytest.mark.parametrize("seed", [None, 3])
def test_a_source_is_its_target_with_single_masks_for_spans(stores, seed):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    rows = rows_of(task.examples(found.train, length=LENGTH, seed=seed))
    for left, whole in rows:
        assert fills(left, whole, tokenizer.mask), (left, whole)
        assert not any(a == b == tokenizer.mask for a, b in pairwise(left))
        assert tokenizer.mask not in whole and tokenizer.eos not in whole
    assert sum(len(whole) for _, whole in rows) == found.train.tokens - found.train.documents  # all of the text, once


def test_the_wanted_share_is_taken_out_in_spans_of_the_wanted_length(stores):
    tokenizer, found = stores
    config = DenoiseConfig(fraction=0.3, span_mean=3.0)
    task = Denoise(config, tokenizer)
    whole = left = masks = 0
    for epoch in range(6):
        for source, target in rows_of(task.examples(found.train, length=120, seed=1, epoch=epoch)):
            whole += len(target)
            left += sum(token != tokenizer.mask for token in source)
            masks += source.count(tokenizer.mask)
    assert (whole - left) / whole == pytest.approx(0.3, abs=0.02)
    assert 3.0 < (whole - left) / masks < 4.5  # spans that touch leave one mask, so runs are a little longer
    shorter = Denoise(DenoiseConfig(fraction=0.3, unit="token"), tokenizer)
    rows = rows_of(shorter.examples(found.train, length=120, seed=1))
    gone = sum(len(target) - sum(token != tokenizer.mask for token in source) for source, target in rows)
    assert gone / sum(source.count(tokenizer.mask) for source, _ in rows) < 1.8


def test_what_is_taken_out_is_a_pure_function_of_seed_epoch_and_index(stores):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    one, again = (task.examples(found.train, length=LENGTH, seed=5, epoch=2) for _ in range(2))
    batch, alone = one.batch([7, 3, 11]), again.batch([3])
    size = alone.source.tokens.size(1)
    assert torch.equal(batch.source.tokens[1, :size], alone.source.tokens[0])
    others = [task.examples(found.train, length=LENGTH, **key) for key in ({"seed": 5, "epoch": 3}, {"seed": 6})]
    assert all(rows_of(other) != rows_of(one) for other in others)
    held = [rows_of(task.examples(found.valid, length=LENGTH)) for _ in range(2)]
    assert held[0] == held[1]  # held-out text is asked the same every time


def test_long_documents_are_cut_at_other_places_in_every_pass(stores):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    both = [rows_of(task.examples(found.train, length=9, seed=1, epoch=epoch)) for epoch in (0, 1)]
    passes = [[len(whole) for _, whole in rows] for rows in both]
    assert max(passes[0]) == 8 and passes[0] != passes[1] and len(passes[0]) == len(passes[1])
    with pytest.raises(UserError, match="too short"):
        task.examples(found.train, length=1)


def test_the_loss_is_that_of_the_whole_text_given_what_is_left(stores):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    model = model_for(task)
    model.backbone.tokens.weight.data.mul_(20)  # else all tokens are about as likely
    examples = task.examples(found.valid, length=LENGTH)
    batch = examples.batch(range(4))
    with torch.no_grad():
        sums = task.losses(model, batch)
        total = 0.0
        for index in range(4):
            one = examples.batch([index])
            scores = model.heads["token"](model(one).hidden)[0].log_softmax(-1)
            total -= float(scores.gather(1, one.labels["token"][0][:, None]).sum())
        smooth = task.losses(model, batch, smoothing=0.5)["token"]
    assert float(sums["token"]) == pytest.approx(total, rel=1e-5)
    assert abs(float(smooth) - float(sums["token"])) > 0.1
    labels = batch.labels["token"]
    flat = model.heads["token"](model(batch).hidden).flatten(0, 1).detach()
    wanted = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=0.5)
    assert float(smooth) == pytest.approx(float(wanted), rel=1e-6)
    metrics = task.score({name: float(value) for name, value in sums.items()}, task.counts(batch), size=100)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 0 <= metrics["accuracy"] <= 1


def test_the_share_may_grow_over_the_run(stores):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(fraction=0.5, fraction_start=0.1), tokenizer)

    def gone(done):
        task.progress = done
        rows = rows_of(task.examples(found.train, length=60, seed=1))
        return np.mean([1 - sum(token != tokenizer.mask for token in left) / len(whole) for left, whole in rows])

    assert gone(0.0) < 0.2 < 0.4 < gone(1.0)


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"fraction": 0.0}, {"fraction": 1.0}, {"span_mean": 20.0}, {"span_most": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DenoiseConfig(**wrong)


def test_rows_that_fill_a_batch_are_no_tokens(stores):
    tokenizer, found = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    examples = task.examples(found.train, length=LENGTH, seed=1)
    batch = examples.batch([0, 1])
    assert task.tokens(padded_batch(examples, [0, 1], 5, filler=2)) == task.tokens(batch)
    assert task.tokens(batch) == (batch.labels["token"] != IGNORE_INDEX).sum() + (~batch.source.padding).sum()
