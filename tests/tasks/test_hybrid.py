"""Masked and causal rows in one model: what each row sees, what it must give, and one checkpoint that does both."""

import math

import numpy as np
import pytest
import torch

import headstock
from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError
from headstock.model.batch import IGNORE_INDEX, Batch
from headstock.tasks.base import padded_batch
from headstock.tasks.causal import CausalConfig, CausalLM
from headstock.tasks.hybrid import HybridConfig, HybridLM
from tests.tasks.small import model_for


@pytest.fixture(scope="module")
def stores(corpus):
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(text, tokenizer)


def task_of(tokenizer, **settings):
    return HybridLM(HybridConfig(**settings), tokenizer)


def test_some_rows_are_read_left_to_right_drawn_anew_in_every_pass(stores):
    tokenizer, found = stores
    task = task_of(tokenizer, causal_share=0.3)
    ways = []
    for epoch in range(30):
        examples = task.examples(found.train, length=16, seed=2, epoch=epoch)
        every = examples.batch(range(len(examples))).causal
        ways.append(every)
        assert torch.equal(examples.batch([5, 2]).causal, every[[5, 2]])
    drawn = torch.cat(ways)
    assert abs(drawn.float().mean().item() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(drawn))
    assert not torch.equal(ways[0], ways[1])


def test_causal_rows_are_those_of_the_causal_objective(stores):
    tokenizer, found = stores
    examples = task_of(tokenizer).examples(found.train, length=32, seed=1, epoch=3)
    alone = CausalLM(CausalConfig(), tokenizer).examples(found.train, length=32, seed=1, epoch=3)
    mixed, causal = (part.batch(range(len(part))) for part in (examples, alone))
    rows = mixed.causal
    assert rows.any()
    assert torch.equal(mixed.tokens[rows], causal.tokens[rows])
    assert torch.equal(mixed.labels["causal"][rows], causal.labels["token"][rows])
    assert torch.equal(mixed.document_ids, causal.document_ids)
    assert (mixed.labels["causal"][~rows] == IGNORE_INDEX).all()
    assert (mixed.labels["masked"][rows] == IGNORE_INDEX).all()
    assert (mixed.tokens[rows] != tokenizer.cls).all()
    assert not np.isin(mixed.tokens[rows].numpy(), [tokenizer.mask]).any()


def test_in_masked_rows_the_state_before_a_hidden_token_must_give_it(stores):
    tokenizer, found = stores
    task = task_of(tokenizer, fraction=0.3)
    examples = task.examples(found.train, length=32, seed=1, epoch=3)
    batch = examples.batch(range(len(examples)))
    rows = examples.windows.rows(range(len(examples)))
    masked = ~batch.causal.numpy()
    plain = np.where(rows.tokens == tokenizer.bos, tokenizer.cls, rows.tokens)[masked]
    shown, wanted = batch.tokens.numpy()[masked], batch.labels["masked"].numpy()[masked]
    assert (plain == tokenizer.cls).any()
    places = wanted != IGNORE_INDEX
    assert not places[:, -1].any()
    assert np.array_equal(wanted[places], np.roll(plain, -1, 1)[places])  # the token one place on
    given_up = np.roll(places, 1, 1)  # where the hidden tokens themselves stand
    assert np.array_equal(shown[~given_up], plain[~given_up])
    assert not given_up[:, 0].any()
    assert not (given_up & (rows.padding[masked] | (plain == tokenizer.cls))).any()
    can_be = (~rows.padding[masked] & (plain != tokenizer.cls))[:, 1:]
    assert abs(given_up[:, 1:].sum() / can_be.sum() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / can_be.sum())


def test_the_past_of_a_causal_row_does_not_move_and_that_of_a_masked_row_does(stores):
    tokenizer, found = stores
    task = task_of(tokenizer)
    model = model_for(task)
    examples = task.examples(found.train, length=48, seed=1)
    batch = examples.batch(range(12))
    assert batch.causal.any()
    assert not batch.causal.all()
    before = model(batch).hidden
    for row in range(12):
        documents = batch.document_ids[row]
        mine = (documents == documents[24]).nonzero().flatten()
        last = int(mine[-1])
        changed = batch.tokens.clone()
        changed[row, last] = (changed[row, last] + 1) % tokenizer.vocabulary
        after = model(
            Batch(changed, document_ids=batch.document_ids, positions=batch.positions, causal=batch.causal)
        ).hidden
        moved = (after[row] - before[row]).abs().amax(-1) > 1e-6
        others = documents != documents[24]
        assert not moved[others].any()
        assert moved[mine].tolist() == [not batch.causal[row]] * (len(mine) - 1) + [True]


def test_each_way_has_a_loss_of_its_own_and_weighs_its_share(stores):
    tokenizer, found = stores
    task = task_of(tokenizer, causal_share=0.25)
    model = model_for(task)
    assert list(model.heads) == ["token"]
    assert (task.weight("causal"), task.weight("masked")) == (0.25, 0.75)
    examples = task.examples(found.train, length=32, seed=1)
    batch, fuller = padded_batch(examples, range(8), 8), padded_batch(examples, range(8), 11)
    assert set(task.counts(batch)) == {"masked", "causal"}
    assert task.counts(fuller) == task.counts(batch)
    assert task.tokens(fuller) == task.tokens(batch)
    for head, sums in task.losses(model, batch).items():
        assert sums.item() == pytest.approx(task.losses(model, fuller)[head].item(), rel=1e-5)
    score = task.score({"masked": 8.0, "causal": 30.0, "correct": 3.0}, {"masked": 4, "causal": 10}, size=20)
    assert score["loss"] == pytest.approx(0.75 * 2 + 0.25 * 3)
    assert score["perplexity"] == score["causal_perplexity"] == pytest.approx(math.exp(3))
    assert score["masked_perplexity"] == pytest.approx(math.exp(2))
    assert score["accuracy"] == 0.75
    assert score["bits_per_byte"] == pytest.approx(30 / math.log(2) / 20)


def test_held_out_text_is_read_both_ways(stores):
    tokenizer, found = stores
    task = task_of(tokenizer, fraction=0.15, fraction_start=0.6)
    task.progress = 0.0  # the schedule is for training; held-out text is always asked the same
    examples = task.examples(found.valid, length=32)
    windows = len(examples.windows)
    assert len(examples) == 2 * windows
    batch = examples.batch(range(len(examples)))
    assert batch.causal.tolist() == [False] * windows + [True] * windows
    assert torch.equal(batch.document_ids[:windows], batch.document_ids[windows:])
    assert task.counts(batch)["causal"] == found.valid.tokens  # every token is given once
    assert task.counts(batch)["masked"] < 0.25 * found.valid.tokens
    assert examples.name(0) == examples.name(windows)


def test_one_checkpoint_goes_on_and_fills(corpus, tmp_path, tiny):
    results = headstock.pretrain(
        corpus,
        out=tmp_path / "run",
        objective="hybrid",
        settings=tiny | {"steps": 250, "lr": 1e-2, "causal_share": 0.5, "fraction": 0.3},
    )
    metrics = results["metrics"]
    assert results["perplexity"] == metrics["causal_perplexity"] < 40  # of 300 entries
    assert results["masked_perplexity"] == metrics["masked_perplexity"] < 100
    assert results["bits_per_byte"] < 4
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "headstock generate run" in card
    assert "headstock fill run" in card
    loaded = headstock.load(tmp_path / "run")
    assert loaded.model.backbone.causal is False
    tokenizer = loaded.tokenizer
    prompt = [tokenizer.bos, *tokenizer.encode("Story 12\nAnne likes")]
    with_cache, without = (
        generate(loaded.model, [prompt], max_tokens=6, sampling=Sampling(temperature=0.0), cache=cache)[0].tokens
        for cache in (True, False)
    )
    assert with_cache == without  # the whole is read as the cache reads it, though the backbone could look ahead
    assert any(place in tokenizer.decode(with_cache) for place in ("home", "the sea", "Paris"))


def test_what_is_no_mixture_is_refused():
    with pytest.raises(ConfigError, match="causal_share: must be above 0 and below 1, not 1"):
        HybridConfig(causal_share=1.0)
    with pytest.raises(ConfigError) as caught:
        HybridConfig(causal_share=0.0, fraction=2.0)
    assert [where for where, _ in caught.value.problems] == ["fraction", "causal_share"]
