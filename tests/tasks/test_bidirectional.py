"""Bidirectional language modelling (ELMo): labels, losses and metrics of both directions."""

import math

import pytest
import torch
from torch import nn

from headstock.model.backbones.elmo import Elmo, ElmoConfig
from headstock.model.batch import IGNORE_INDEX
from headstock.model.model import Model
from headstock.tasks.bidirectional import BidirectionalConfig, BidirectionalLM


def task_and_model(tokenizer, **settings):
    task = BidirectionalLM(BidirectionalConfig(), tokenizer)
    torch.manual_seed(0)
    sizes = {"vocabulary": tokenizer.vocabulary, "depth": 2, "width": 8, "hidden": 8}
    backbone = Elmo(ElmoConfig(**(sizes | settings)))
    return task, Model(backbone, task.heads(backbone)).eval()


def neighbours(batch):
    """Tokens, forward labels and backward labels of each document in a batch."""
    for row in range(len(batch.tokens)):
        for document in batch.document_ids[row].unique():
            if document >= 0:
                inside = batch.document_ids[row] == document
                yield tuple(x[row][inside].tolist() for x in (batch.tokens, *batch.labels.values()))


def test_labels_are_next_and_previous_tokens(stores):
    tokenizer, splits = stores
    task, _ = task_and_model(tokenizer)
    examples = task.examples(splits.train, length=48, seed=1)
    batch = examples.batch(range(len(examples)))
    assert list(batch.labels) == ["forward", "backward"]
    complete = 0
    for tokens, forward, backward in neighbours(batch):
        assert forward[:-1] == tokens[1:]
        assert backward == [IGNORE_INDEX, *tokens[:-1]]
        complete += tokens[0] == tokenizer.bos and forward[-1] == tokenizer.eos
    assert complete > 100
    for labels in batch.labels.values():  # no labels at padding
        assert bool((labels[batch.document_ids < 0] == IGNORE_INDEX).all())
    counts = task.counts(batch)
    assert counts["forward"] == splits.train.tokens
    documents = sum(1 for _ in neighbours(batch))
    assert counts["backward"] == counts["forward"] - documents  # the last token of each part has no backward label


@pytest.mark.parametrize("tied", [True, False])
def test_losses_match_two_lstms(stores, tied):
    """Two plain nn.LSTMs with the same weights, reading one document at a time, one of them from its end."""
    tokenizer, splits = stores
    task, model = task_and_model(tokenizer, tied=tied)
    backbone, head = model.backbone, model.heads["token"]
    lstms = {}
    for direction, layers in (("forward", backbone.ahead), ("backward", backbone.back)):
        lstms[direction] = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        for number, layer in enumerate(layers.layers):
            for name, weights in layer.cells.named_parameters():
                getattr(lstms[direction], name.replace("l0", f"l{number}")).data.copy_(weights)
    batch = task.examples(splits.valid, length=40).batch(range(4))
    losses = task.losses(model, batch)
    expected = {"forward": 0.0, "backward": 0.0}
    with torch.no_grad():
        for tokens, forward, backward in neighbours(batch):
            for direction, labels in (("forward", forward), ("backward", backward)):
                order = slice(None, None, 1 if direction == "forward" else -1)
                x = backbone.tokens.weight[torch.tensor(tokens[order])][None]
                scores = nn.functional.linear(lstms[direction](x)[0][0], head.weight, head.bias)
                loss = nn.functional.cross_entropy(scores, torch.tensor(labels[order]), reduction="sum")
                expected[direction] += loss.item()
    for direction, loss in losses.items():
        assert loss.item() == pytest.approx(expected[direction], rel=1e-6)
    assert losses["forward"].item() != pytest.approx(losses["backward"].item(), rel=1e-3)


def test_metrics_of_both_directions(stores):
    task, _ = task_and_model(stores[0])
    score = task.score({"forward": 20.0, "backward": 8.0}, {"forward": 10, "backward": 8}, size=40)
    assert score["loss"] == 3.0
    assert score["perplexity"] == score["forward_perplexity"] == pytest.approx(math.exp(2.0))
    assert score["backward_perplexity"] == pytest.approx(math.exp(1.0))
    assert score["bits_per_byte"] == pytest.approx(20 / math.log(2) / 40)
