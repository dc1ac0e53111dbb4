"""Denoising: corrupted sources, targets and the loss."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.base import padded_batch
from headstock.tasks.denoise import Denoise, DenoiseConfig
from tests.tasks.parallel import model_for

LENGTH = 24


def rows_of(examples):
    """The source and target tokens of every example, without special tokens."""
    task, rows = examples.task, []
    for start in range(0, len(examples), 64):
        batch = examples.batch(range(start, min(start + 64, len(examples))))
        for source, inputs, labels in zip(batch.source.tokens, batch.tokens, batch.labels["token"], strict=True):
            target = labels[labels != IGNORE_INDEX].tolist()
            source_tokens = source.tolist()[: source.tolist().index(task.eos)]
            assert inputs.tolist()[: len(target)] == [task.bos, *target[:-1]]  # teacher forcing
            assert target[-1] == task.eos
            rows.append((source_tokens, target[:-1]))
    return rows


def fills(source, target, mask):
    """Whether replacing every mask by one or more tokens can give the target."""

    def spell(tokens):
        return "".join(f"<{token}>" for token in tokens)

    pattern = "".join("(?:<[0-9]+>)+" if token == mask else re.escape(f"<{token}>") for token in source)
    return re.fullmatch(pattern, spell(target)) is not None


@pytest.mark.parametrize("seed", [None, 3])
def test_source_is_target_with_one_mask_per_span(stores, seed):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    rows = rows_of(task.examples(splits.train, length=LENGTH, seed=seed))
    for source, target in rows:
        assert fills(source, target, tokenizer.mask), (source, target)
        assert not any(a == b == tokenizer.mask for a, b in pairwise(source))
        assert tokenizer.mask not in target and tokenizer.eos not in target
    # all of the text, once
    assert sum(len(target) for _, target in rows) == splits.train.tokens - splits.train.documents


def test_masked_fraction_and_span_length(stores):
    tokenizer, splits = stores
    config = DenoiseConfig(fraction=0.3, span_mean=3.0)
    task = Denoise(config, tokenizer)
    total = unmasked = masks = 0
    for epoch in range(6):
        for source, target in rows_of(task.examples(splits.train, length=120, seed=1, epoch=epoch)):
            total += len(target)
            unmasked += sum(token != tokenizer.mask for token in source)
            masks += source.count(tokenizer.mask)
    assert (total - unmasked) / total == pytest.approx(0.3, abs=0.02)
    assert 3.0 < (total - unmasked) / masks < 4.5  # spans that touch leave one mask, so runs are a little longer
    shorter = Denoise(DenoiseConfig(fraction=0.3, unit="token"), tokenizer)
    rows = rows_of(shorter.examples(splits.train, length=120, seed=1))
    removed = sum(len(target) - sum(token != tokenizer.mask for token in source) for source, target in rows)
    assert removed / sum(source.count(tokenizer.mask) for source, _ in rows) < 1.8


def test_masks_are_a_pure_function_of_seed_epoch_and_index(stores):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    examples, same_examples = (task.examples(splits.train, length=LENGTH, seed=5, epoch=2) for _ in range(2))
    batch, single = examples.batch([7, 3, 11]), same_examples.batch([3])
    size = single.source.tokens.size(1)
    assert torch.equal(batch.source.tokens[1, :size], single.source.tokens[0])
    others = [task.examples(splits.train, length=LENGTH, **key) for key in ({"seed": 5, "epoch": 3}, {"seed": 6})]
    assert all(rows_of(other) != rows_of(examples) for other in others)
    validation = [rows_of(task.examples(splits.valid, length=LENGTH)) for _ in range(2)]
    assert validation[0] == validation[1]  # validation masks are always the same


def test_chunks_shift_between_epochs(stores):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    epochs = [rows_of(task.examples(splits.train, length=9, seed=1, epoch=epoch)) for epoch in (0, 1)]
    lengths = [[len(target) for _, target in rows] for rows in epochs]
    assert max(lengths[0]) == 8 and lengths[0] != lengths[1] and len(lengths[0]) == len(lengths[1])
    with pytest.raises(UserError, match="too short"):
        task.examples(splits.train, length=1)


def test_loss_is_that_of_the_target_given_the_source(stores):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    model = model_for(task)
    model.backbone.tokens.weight.data.mul_(20)  # else all tokens are about as likely
    examples = task.examples(splits.valid, length=LENGTH)
    batch = examples.batch(range(4))
    with torch.no_grad():
        sums = task.losses(model, batch)
        total = 0.0
        for index in range(4):
            single = examples.batch([index])
            scores = model.heads["token"](model(single).hidden)[0].log_softmax(-1)
            total -= float(scores.gather(1, single.labels["token"][0][:, None]).sum())
        smooth = task.losses(model, batch, smoothing=0.5)["token"]
    assert float(sums["token"]) == pytest.approx(total, rel=1e-5)
    assert abs(float(smooth) - float(sums["token"])) > 0.1
    labels = batch.labels["token"]
    flat = model.heads["token"](model(batch).hidden).flatten(0, 1).detach()
    expected = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=0.5)
    assert float(smooth) == pytest.approx(float(expected), rel=1e-6)
    metrics = task.score({name: float(value) for name, value in sums.items()}, task.counts(batch), size=100)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert 0 <= metrics["accuracy"] <= 1


def test_fraction_follows_training_progress(stores):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(fraction=0.5, fraction_start=0.1), tokenizer)

    def masked_share(progress):
        task.progress = progress
        rows = rows_of(task.examples(splits.train, length=60, seed=1))
        return np.mean([1 - sum(token != tokenizer.mask for token in source) / len(target) for source, target in rows])

    assert masked_share(0.0) < 0.2 < 0.4 < masked_share(1.0)


def test_invalid_settings_are_refused():
    for settings in ({"fraction": 0.0}, {"fraction": 1.0}, {"span_mean": 20.0}, {"span_most": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            DenoiseConfig(**settings)


def test_padding_examples_have_no_tokens(stores):
    tokenizer, splits = stores
    task = Denoise(DenoiseConfig(), tokenizer)
    examples = task.examples(splits.train, length=LENGTH, seed=1)
    batch = examples.batch([0, 1])
    assert task.tokens(padded_batch(examples, [0, 1], 5, filler=2)) == task.tokens(batch)
    assert task.tokens(batch) == (batch.labels["token"] != IGNORE_INDEX).sum() + (~batch.source.padding).sum()
