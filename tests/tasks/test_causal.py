"""Causal language modelling: inputs and labels, packed or padded."""

import numpy as np
import pytest
import torch

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import IGNORE_INDEX
from headstock.model.model import Model
from headstock.tasks.causal import CausalConfig, CausalLM


def task(tokenizer, rows="packed"):
    return CausalLM(CausalConfig(rows=rows), tokenizer)


def labelled_positions(examples):
    """Input tokens, labels and positions of an epoch, where there is a label."""
    batch = examples.batch(range(len(examples)))
    labels = batch.labels["token"]
    positions = batch.positions if batch.positions is not None else torch.arange(labels.size(1)).expand_as(labels)
    has_label = labels != IGNORE_INDEX
    return batch.tokens[has_label], labels[has_label], positions[has_label]


def test_inputs_start_with_bos_and_labels_end_with_eos(stores):
    tokenizer, splits = stores
    causal = task(tokenizer, "padded")
    batch = causal.examples(splits.train, length=512).batch([0])
    ids = splits.train.document(0).tolist()
    assert batch.tokens[0].tolist() == [tokenizer.bos, *ids]
    assert batch.labels["token"][0].tolist() == [*ids, tokenizer.eos]


def test_packed_rows_equal_padded_rows(stores):
    tokenizer, splits = stores
    length = int(splits.train.lengths.max())
    packed = labelled_positions(task(tokenizer).examples(splits.train, length=splits.train.tokens))
    padded = labelled_positions(task(tokenizer, "padded").examples(splits.train, length=length))
    for packed_part, padded_part in zip(packed, padded, strict=True):
        assert torch.equal(packed_part, padded_part)


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_token_is_a_label_once(stores, rows, seed):
    tokenizer, splits = stores
    expected = np.concatenate([[*splits.train.document(i), tokenizer.eos] for i in range(splits.train.documents)])
    for epoch in (0, 1):
        examples = task(tokenizer, rows).examples(splits.train, length=24, seed=seed, epoch=epoch)
        _, labels, _ = labelled_positions(examples)
        assert labels.tolist() == expected.tolist()


def test_windows_shift_between_epochs(stores):
    tokenizer, splits = stores
    examples = task(tokenizer).examples

    def shift(epoch):
        return examples(splits.train, length=64, seed=1, epoch=epoch).windows.shift

    assert len({shift(epoch) for epoch in range(8)}) > 1
    assert shift(2) == shift(2)
    assert examples(splits.train, length=64).windows.shift == 0


def test_loss_is_the_same_packed_or_padded(stores):
    tokenizer, splits = stores
    torch.manual_seed(0)
    config = TransformerConfig(
        vocabulary=tokenizer.vocabulary, context=splits.valid.tokens, depth=2, width=16, heads=2, hidden=32
    )
    backbone = Transformer(config)
    sums = {}
    for rows in ("packed", "padded"):
        causal = task(tokenizer, rows)
        model = Model(backbone, causal.heads(backbone)).eval()
        examples = causal.examples(splits.valid, length=splits.valid.tokens)
        batch = examples.batch(range(len(examples)))
        sums[rows] = causal.losses(model, batch)["token"].item() / causal.counts(batch)["token"]
    assert sums["packed"] == pytest.approx(sums["padded"], rel=1e-5)


def test_no_token_attends_across_documents(stores):
    tokenizer, splits = stores
    causal = task(tokenizer)
    backbone = Transformer(TransformerConfig(vocabulary=300, context=64, depth=2, width=16, heads=2, hidden=32)).eval()
    batch = causal.examples(splits.train, length=64).batch([1])
    documents = batch.document_ids[0]
    second = int((documents == documents[0]).sum())  # where the second document begins
    assert 0 < second < 64
    before = backbone(batch).hidden[0, second:]
    batch.tokens[0, :second] = 7
    assert torch.equal(backbone(batch).hidden[0, second:], before)


def test_row_names_are_locations(stores, corpus):
    tokenizer, splits = stores
    name = task(tokenizer).examples(splits.train, length=64).name(0)
    assert name.startswith(f"{corpus}:")
    assert " to " in name


def test_metrics(stores):
    tokenizer, _ = stores
    score = task(tokenizer).score({"token": 20.0}, {"token": 10}, size=40)
    assert score["loss"] == 2.0
    assert score["perplexity"] == pytest.approx(np.exp(2.0))
    assert score["bits_per_byte"] == pytest.approx(20 / np.log(2) / 40)
