"""ELMo's objective: two language models, each with its own tokens to give and its own count."""

import math

import pytest
import torch
from torch import nn

from headstock.data.corpus import read_corpus
from headstock.data.token_store import build_split_stores
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.model.backbones.elmo import Elmo, ElmoConfig
from headstock.model.batch import IGNORE_INDEX
from headstock.model.model import Model
from headstock.tasks.bidirectional import BidirectionalConfig, BidirectionalLM


@pytest.fixture(scope="module")
def stores(corpus):
    text = read_corpus(corpus)
    tokenizer = train_tokenizer((document.text for document in text), TokenizerSettings(vocabulary=300))
    return tokenizer, build_split_stores(text, tokenizer)


def made(tokenizer, **given):
    task = BidirectionalLM(BidirectionalConfig(), tokenizer)
    torch.manual_seed(0)
    sizes = {"vocabulary": tokenizer.vocabulary, "depth": 2, "width": 8, "hidden": 8}
    backbone = Elmo(ElmoConfig(**(sizes | given)))
    return task, Model(backbone, task.heads(backbone)).eval()


def neighbours(batch):
    """Every token of a batch with what it must give forward and backward, document by document."""
    for row in range(len(batch.tokens)):
        for document in batch.document_ids[row].unique():
            if document >= 0:
                here = batch.document_ids[row] == document
                yield tuple(x[row][here].tolist() for x in (batch.tokens, *batch.labels.values()))


def test_each_token_must_give_both_its_neighbours(stores):
    tokenizer, found = stores
    task, _ = made(tokenizer)
    examples = task.examples(found.train, length=48, seed=1)
    batch = examples.batch(range(len(examples)))
    assert list(batch.labels) == ["forward", "backward"]
    whole = 0
    for tokens, forward, backward in neighbours(batch):
        assert forward[:-1] == tokens[1:]
        assert backward == [IGNORE_INDEX, *tokens[:-1]]
        whole += tokens[0] == tokenizer.bos and forward[-1] == tokenizer.eos
    assert whole > 100
    for labels in batch.labels.values():  # nothing is asked for where there is no token
        assert bool((labels[batch.document_ids < 0] == IGNORE_INDEX).all())
    counts = task.counts(batch)
    assert counts["forward"] == found.train.tokens
    parts = sum(1 for _ in neighbours(batch))
    assert counts["backward"] == counts["forward"] - parts  # each part's own last token is given by nothing


@pytest.mark.parametrize("tied", [True, False])
def test_both_losses_are_those_of_two_lstms(stores, tied):
    """Two plain nn.LSTMs with the same weights, reading one document at a time, one of them from its end."""
    tokenizer, found = stores
    task, model = made(tokenizer, tied=tied)
    backbone, head = model.backbone, model.heads["token"]
    plain = {}
    for way, layers in (("forward", backbone.ahead), ("backward", backbone.back)):
        plain[way] = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        for number, layer in enumerate(layers.layers):
            for name, weights in layer.cells.named_parameters():
                getattr(plain[way], name.replace("l0", f"l{number}")).data.copy_(weights)
    batch = task.examples(found.valid, length=40).batch(range(4))
    losses = task.losses(model, batch)
    wanted = {"forward": 0.0, "backward": 0.0}
    with torch.no_grad():
        for tokens, forward, backward in neighbours(batch):
            for way, labels in (("forward", forward), ("backward", backward)):
                turn = slice(None, None, 1 if way == "forward" else -1)
                x = backbone.tokens.weight[torch.tensor(tokens[turn])][None]
                scores = nn.functional.linear(plain[way](x)[0][0], head.weight, head.bias)
                loss = nn.functional.cross_entropy(scores, torch.tensor(labels[turn]), reduction="sum")
                wanted[way] += loss.item()
    for way, loss in losses.items():
        assert loss.item() == pytest.approx(wanted[way], rel=1e-6)
    assert losses["forward"].item() != pytest.approx(losses["backward"].item(), rel=1e-3)


def test_scores_add_both_and_tell_each(stores):
    task, _ = made(stores[0])
    score = task.score({"forward": 20.0, "backward": 8.0}, {"forward": 10, "backward": 8}, size=40)
    assert score["loss"] == 3.0
    assert score["perplexity"] == score["forward_perplexity"] == pytest.approx(math.exp(2.0))
    assert score["backward_perplexity"] == pytest.approx(math.exp(1.0))
    assert score["bits_per_byte"] == pytest.approx(20 / math.log(2) / 40)
