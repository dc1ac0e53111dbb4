"""Next-token prediction: what is shown, what is wanted, packed or padded."""

import numpy as np
import pytest
import torch

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import IGNORE_INDEX
from headstock.model.model import Model
from headstock.tasks.causal import CausalConfig, CausalLM


@pytest.fixture(scope="module")
def stores(corpus):
    text = read_corpus(corpus)
    settings = TokenizerSettings(vocabulary=300)
    tokenizer = train_tokenizer((document.text for document in text), settings)
    return tokenizer, build_split_stores(text, tokenizer)


def task(tokenizer, rows="packed"):
    return CausalLM(CausalConfig(rows=rows), tokenizer)


def document_pairs(examples):
    """Every (document, position) that a pass asks for, as shown token, wanted token and place."""
    batch = examples.batch(range(len(examples)))
    labels = batch.labels["token"]
    positions = batch.positions if batch.positions is not None else torch.arange(labels.size(1)).expand_as(labels)
    keep = labels != IGNORE_INDEX
    return batch.tokens[keep], labels[keep], positions[keep]


def test_a_document_is_shown_after_start_and_wanted_up_to_end(stores):
    tokenizer, found = stores
    causal = task(tokenizer, "padded")
    batch = causal.examples(found.train, length=512).batch([0])
    ids = found.train.document(0).tolist()
    assert batch.tokens[0].tolist() == [tokenizer.bos, *ids]
    assert batch.labels["token"][0].tolist() == [*ids, tokenizer.eos]


def test_packed_rows_hold_the_same_as_padded_ones(stores):
    tokenizer, found = stores
    length = int(found.train.lengths.max())
    packed = document_pairs(task(tokenizer).examples(found.train, length=found.train.tokens))
    padded = document_pairs(task(tokenizer, "padded").examples(found.train, length=length))
    for one, other in zip(packed, padded, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_position_is_wanted_exactly_once(stores, rows, seed):
    tokenizer, found = stores
    wanted = np.concatenate([[*found.train.document(i), tokenizer.eos] for i in range(found.train.documents)])
    for epoch in (0, 1):
        examples = task(tokenizer, rows).examples(found.train, length=24, seed=seed, epoch=epoch)
        _, labels, _ = document_pairs(examples)
        assert labels.tolist() == wanted.tolist()


def test_windows_move_from_pass_to_pass(stores):
    tokenizer, found = stores
    make = task(tokenizer).examples

    def shift(epoch):
        return make(found.train, length=64, seed=1, epoch=epoch).windows.shift

    assert len({shift(epoch) for epoch in range(8)}) > 1
    assert shift(2) == shift(2)
    assert make(found.train, length=64).windows.shift == 0


def test_the_loss_is_the_same_packed_or_padded(stores):
    tokenizer, found = stores
    torch.manual_seed(0)
    config = TransformerConfig(
        vocabulary=tokenizer.vocabulary, context=found.valid.tokens, depth=2, width=16, heads=2, hidden=32
    )
    backbone = Transformer(config)
    sums = {}
    for rows in ("packed", "padded"):
        causal = task(tokenizer, rows)
        model = Model(backbone, causal.heads(backbone)).eval()
        examples = causal.examples(found.valid, length=found.valid.tokens)
        batch = examples.batch(range(len(examples)))
        sums[rows] = causal.losses(model, batch)["token"].item() / causal.counts(batch)["token"]
    assert sums["packed"] == pytest.approx(sums["padded"], rel=1e-5)


def test_no_token_attends_across_documents(stores):
    tokenizer, found = stores
    causal = task(tokenizer)
    backbone = Transformer(TransformerConfig(vocabulary=300, context=64, depth=2, width=16, heads=2, hidden=32)).eval()
    batch = causal.examples(found.train, length=64).batch([1])
    documents = batch.document_ids[0]
    second = int((documents == documents[0]).sum())  # where the second document begins
    assert 0 < second < 64
    before = backbone(batch).hidden[0, second:]
    batch.tokens[0, :second] = 7
    assert torch.equal(backbone(batch).hidden[0, second:], before)


def test_names_say_where_a_row_comes_from(stores, corpus):
    tokenizer, found = stores
    name = task(tokenizer).examples(found.train, length=64).name(0)
    assert name.startswith(f"{corpus}:")
    assert " to " in name


def test_scores_are_textbook(stores):
    tokenizer, _ = stores
    score = task(tokenizer).score({"token": 20.0}, {"token": 10}, size=40)
    assert score["loss"] == 2.0
    assert score["perplexity"] == pytest.approx(np.exp(2.0))
    assert score["bits_per_byte"] == pytest.approx(20 / np.log(2) / 40)
