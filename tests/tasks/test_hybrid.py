"""Hybrid language modelling: masked and causal rows, their labels and losses, and one checkpoint that does both."""

import math

import numpy as np
import pytest
import torch

import headstock
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.tasks.base import padded_batch
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.tasks.hybrid import HybridConfig, HybridLM
from tests.tasks.small import MEALS, model_for, write_meals


def task_of(tokenizer, **settings):
    return HybridLM(HybridConfig(**settings), tokenizer)


def test_causal_rows_are_drawn_in_every_epoch(stores):
    tokenizer, splits = stores
    task = task_of(tokenizer, causal_share=0.3)
    epochs = []
    for epoch in range(30):
        examples = task.examples(splits.train, length=16, seed=2, epoch=epoch)
        is_causal = examples.batch(range(len(examples))).causal
        epochs.append(is_causal)
        assert torch.equal(examples.batch([5, 2]).causal, is_causal[[5, 2]])
    all_rows = torch.cat(epochs)
    assert abs(all_rows.float().mean().item() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(all_rows))
    assert not torch.equal(epochs[0], epochs[1])


def test_causal_rows_equal_the_causal_objective(stores):
    tokenizer, splits = stores
    examples = task_of(tokenizer).examples(splits.train, length=32, seed=1, epoch=3)
    causal_examples = CausalLM(CausalConfig(), tokenizer).examples(splits.train, length=32, seed=1, epoch=3)
    mixed, causal = (part.batch(range(len(part))) for part in (examples, causal_examples))
    rows = mixed.causal
    assert rows.any()
    assert torch.equal(mixed.tokens[rows], causal.tokens[rows])
    assert torch.equal(mixed.labels["causal"][rows], causal.labels["token"][rows])
    assert torch.equal(mixed.document_ids, causal.document_ids)
    assert (mixed.labels["causal"][~rows] == IGNORE_INDEX).all()
    assert (mixed.labels["masked"][rows] == IGNORE_INDEX).all()
    assert (mixed.tokens[rows] != tokenizer.cls).all()
    assert not np.isin(mixed.tokens[rows].numpy(), [tokenizer.mask]).any()


def test_masked_tokens_are_predicted_one_position_earlier(stores):
    tokenizer, splits = stores
    task = task_of(tokenizer, fraction=0.3)
    examples = task.examples(splits.train, length=32, seed=1, epoch=3)
    batch = examples.batch(range(len(examples)))
    rows = examples.windows.rows(range(len(examples)))
    masked = ~batch.causal.numpy()
    originals = np.where(rows.tokens == tokenizer.bos, tokenizer.cls, rows.tokens)[masked]
    inputs, labels = batch.tokens.numpy()[masked], batch.labels["masked"].numpy()[masked]
    assert (originals == tokenizer.cls).any()
    has_label = labels != IGNORE_INDEX
    assert not has_label[:, -1].any()
    assert np.array_equal(labels[has_label], np.roll(originals, -1, 1)[has_label])  # the next token
    is_masked = np.roll(has_label, 1, 1)
    assert np.array_equal(inputs[~is_masked], originals[~is_masked])
    assert not is_masked[:, 0].any()
    assert not (is_masked & (rows.padding[masked] | (originals == tokenizer.cls))).any()
    maskable = (~rows.padding[masked] & (originals != tokenizer.cls))[:, 1:]
    assert abs(is_masked[:, 1:].sum() / maskable.sum() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / maskable.sum())


def test_future_tokens_influence_only_masked_rows(stores):
    tokenizer, splits = stores
    task = task_of(tokenizer)
    model = model_for(task)
    examples = task.examples(splits.train, length=48, seed=1)
    batch = examples.batch(range(12))
    assert batch.causal.any()
    assert not batch.causal.all()
    before = model(batch).hidden
    for row in range(12):
        documents = batch.document_ids[row]
        own_document = (documents == documents[24]).nonzero().flatten()
        last = int(own_document[-1])
        changed = batch.tokens.clone()
        changed[row, last] = (changed[row, last] + 1) % tokenizer.vocabulary
        after = model(
            Batch(changed, document_ids=batch.document_ids, positions=batch.positions, causal=batch.causal)
        ).hidden
        moved = (after[row] - before[row]).abs().amax(-1) > 1e-6
        others = documents != documents[24]
        assert not moved[others].any()
        assert moved[own_document].tolist() == [not batch.causal[row]] * (len(own_document) - 1) + [True]


def test_losses_and_their_weights(stores):
    tokenizer, splits = stores
    task = task_of(tokenizer, causal_share=0.25)
    model = model_for(task)
    assert list(model.heads) == ["token"]
    assert (task.weight("causal"), task.weight("masked")) == (0.25, 0.75)
    examples = task.examples(splits.train, length=32, seed=1)
    batch, padded = padded_batch(examples, range(8), 8), padded_batch(examples, range(8), 11)
    assert set(task.counts(batch)) == {"masked", "causal"}
    assert task.counts(padded) == task.counts(batch)
    assert task.tokens(padded) == task.tokens(batch)
    for head, sums in task.losses(model, batch).items():
        assert sums.item() == pytest.approx(task.losses(model, padded)[head].item(), rel=1e-5)
    score = task.score({"masked": 8.0, "causal": 30.0, "correct": 3.0}, {"masked": 4, "causal": 10}, size=20)
    assert score["loss"] == pytest.approx(0.75 * 2 + 0.25 * 3)
    assert score["perplexity"] == score["causal_perplexity"] == pytest.approx(math.exp(3))
    assert score["masked_perplexity"] == pytest.approx(math.exp(2))
    assert score["accuracy"] == 0.75
    assert score["bits_per_byte"] == pytest.approx(30 / math.log(2) / 20)


def test_validation_reads_text_both_ways(stores):
    tokenizer, splits = stores
    task = task_of(tokenizer, fraction=0.15, fraction_start=0.6)
    task.progress = 0.0  # the schedule does not apply to validation
    examples = task.examples(splits.valid, length=32)
    windows = len(examples.windows)
    assert len(examples) == 2 * windows
    batch = examples.batch(range(len(examples)))
    assert batch.causal.tolist() == [False] * windows + [True] * windows
    assert torch.equal(batch.document_ids[:windows], batch.document_ids[windows:])
    assert task.counts(batch)["causal"] == splits.valid.tokens  # every token is a label once
    assert task.counts(batch)["masked"] < 0.25 * splits.valid.tokens
    assert examples.name(0) == examples.name(windows)


def test_one_checkpoint_generates_and_fills(tmp_path, tiny):
    settings = {"steps": 130, "optimizer": "muon", "lr": 0.04, "fraction": 0.3, "width": 32, "batch": 16}
    settings |= {"causal_share": 0.5, "validate_every": 65}
    text = write_meals(tmp_path)
    results = headstock.pretrain(text, out=tmp_path / "run", objective="hybrid", settings=tiny | settings)
    metrics = results["metrics"]
    assert results["perplexity"] == metrics["causal_perplexity"] < 10
    assert results["masked_perplexity"] == metrics["masked_perplexity"] < 20
    assert results["bits_per_byte"] < 2
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "headstock generate run" in card
    assert "headstock fill run" in card
    loaded = headstock.load(tmp_path / "run")
    assert loaded.model.backbone.causal is False
    tokenizer = loaded.tokenizer
    for name, meal in MEALS.items():
        (filled,) = loaded.fill(f"{name} eats [MASK] now.")
        assert filled.filled == f"{name} eats {meal} now."
        prompt = [tokenizer.bos, *tokenizer.encode(f"{name} eats")]
        cached, uncached = (
            generate(loaded.model, [prompt], max_tokens=4, sampling=Sampling(temperature=0.0), cache=cache)[0].tokens
            for cache in (True, False)
        )
        assert cached == uncached  # both read the prompt with a causal mask, though the backbone is bidirectional
        assert meal in tokenizer.decode(cached)


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="causal_share: must be above 0 and below 1, not 1"):
        HybridConfig(causal_share=1.0)
    with pytest.raises(ConfigError) as error:
        HybridConfig(causal_share=0.0, fraction=2.0)
    assert [name for name, _ in error.value.problems] == ["fraction", "causal_share"]
