"""Replaced token detection: sampled tokens, labels, gradients, training and what follows it."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.errors import ConfigError, UserError
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks.electra import ElectraConfig, ReplacedTokenDetection
from headstock.train.optimizers import Muon, make_optimizers
from headstock.train.settings import TrainSettings
from tests.tasks.small import MEALS, model_for, write_meals


@pytest.fixture(scope="module")
def task(stores):
    return ReplacedTokenDetection(ElectraConfig(fraction=0.3, generator_width=0.5, generator_depth=1), stores[0])


@pytest.fixture(scope="module")
def model(task):
    return model_for(task)


@pytest.fixture(scope="module")
def batch(task, stores):
    examples = task.examples(stores[1].train, length=64, seed=1)
    return examples.batch(range(len(examples)))


def sample(task, model, batch):
    """The corrupted text (B, T), and the probabilities (N, V) of the masked positions (N,)."""
    vectors, labels = batch.gather_labelled("masked", model.heads["generator"](batch).hidden)
    head = model.heads["masked"]
    return task.sample_tokens(head, vectors, labels, batch), head(vectors).softmax(-1).detach(), labels


def test_only_masked_tokens_are_sampled_and_none_is_the_mask(task, model, batch):
    tokens, _, _ = sample(task, model, batch)
    is_masked = batch.labels["masked"] != IGNORE_INDEX
    assert (batch.tokens[is_masked] == task.tokenizer.mask).all()
    assert torch.equal(tokens[~is_masked], batch.tokens[~is_masked])
    assert (tokens[is_masked] != batch.labels["masked"][is_masked]).float().mean() > 0.9  # the generator is untrained
    assert torch.equal(sample(task, model, batch)[0], tokens)


def test_tokens_are_drawn_from_the_distribution_of_the_generator(task, model, stores):
    examples = task.examples(stores[1].train, length=64, seed=1)
    count = min(8, len(examples))
    drawn, expected = np.zeros(task.tokenizer.vocabulary), np.zeros(task.tokenizer.vocabulary)
    with torch.no_grad():
        model.heads["masked"].bias[:5] = torch.tensor([6.0, 5.0, 4.0, 6.5, 5.5])  # a few likely tokens
    for epoch in range(20):
        batch = task.examples(stores[1].train, length=64, seed=1, epoch=epoch).batch(range(count))
        tokens, probabilities, labels = sample(task, model, batch)
        drawn += np.bincount(tokens[batch.labels["masked"] != IGNORE_INDEX], minlength=len(drawn))
        expected += probabilities[labels != IGNORE_INDEX].sum(0).numpy()
    with torch.no_grad():
        model.heads["masked"].bias.zero_()
    assert drawn.sum() == pytest.approx(expected.sum()) and drawn.sum() > 1000
    frequent = expected > 20
    deviations = (drawn - expected)[frequent] / np.sqrt(expected[frequent])
    assert frequent.sum() >= 5 and np.abs(deviations).max() < 4.5


def test_the_loss_is_that_of_a_reference(task, model, batch):
    tokens, _, _ = sample(task, model, batch)
    counts = task.counts(batch)
    with torch.no_grad():
        sums = task.losses(model, batch)
    originals = batch.labels["replaced"]
    real = originals != IGNORE_INDEX
    assert counts["replaced"] == real.sum() == (batch.document_ids >= 0).sum() - (batch.tokens == task.bos).sum()
    corrupted = type(batch)(tokens, document_ids=batch.document_ids, positions=batch.positions)
    logits = model.heads["replaced"](model(corrupted).hidden)[..., 0][real]
    is_replaced = (tokens != originals)[real].float()
    assert sums["replaced"].item() == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, is_replaced, reduction="sum").item(), rel=1e-5
    )
    assert sums["correct"] == ((logits > 0) == is_replaced.bool()).sum()
    assert sums["detectable"] == is_replaced.sum() > 0
    score = task.score({name: float(value) for name, value in sums.items()}, counts, size=0)
    assert score["generator_perplexity"] == pytest.approx(math.exp(sums["masked"].item() / counts["masked"]))
    assert score["loss"] == pytest.approx(
        sums["masked"].item() / counts["masked"] + 50 * sums["replaced"].item() / counts["replaced"]
    )


def test_the_generator_learns_from_its_own_loss_alone(task, batch):
    model = model_for(task)
    task.losses(model, batch)["replaced"].backward()
    own = [p for p in model.heads["generator"].parameters() if p is not model.backbone.tokens.weight]
    assert own and all(parameter.grad is None for parameter in own)
    assert model.backbone.tokens.weight.grad.abs().sum() > 0
    model.zero_grad()
    task.losses(model, batch)["masked"].backward()
    assert all(parameter.grad is not None for parameter in own)
    assert all(parameter.grad is None for block in model.backbone.blocks for parameter in block.parameters())


def test_validation_draws_the_same_tokens_every_time(task, model, stores):
    first, second = (
        task.examples(stores[1].train, length=64, epoch=epoch).batch([0, 1]).draws.numpy() for epoch in (0, 3)
    )
    assert np.array_equal(first, second)
    one = task.examples(stores[1].train, length=64).batch([1]).draws.numpy()
    assert np.array_equal(one[0], first[1])  # whatever else is in the batch


def test_muon_trains_the_matrices_of_the_generator(task):
    model = model_for(task)
    optimizers = make_optimizers(model, TrainSettings(steps=1, optimizer="muon"))
    inner = {id(p) for o in optimizers if isinstance(o, Muon) for group in o.param_groups for p in group["params"]}
    block = model.heads["generator"].network.blocks[0]
    assert {id(p) for p in block.parameters() if p.dim() == 2} <= inner
    assert id(model.backbone.tokens.weight) not in inner
    every = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())


def test_a_run_detects_replaced_tokens_and_is_fine_tuned(tmp_path, tiny):
    settings = tiny | {"steps": 80, "lr": 1e-2, "generator_width": 0.5, "generator_depth": 1, "fraction": 0.25}
    run = headstock.pretrain(
        write_meals(tmp_path), out=tmp_path / "run", preset="bert-nano", objective="electra", settings=settings
    )
    assert run.metrics["recall"] > 0.3 and run.metrics["accuracy"] > 0.85, run.metrics
    evaluated = headstock.load(run.run).evaluate()
    assert evaluated.metrics["recall"] == pytest.approx(run.metrics["recall"], abs=1e-6)
    rows = [(f"{name} eats {meal} now.", meal) for name, meal in MEALS.items()] * 8
    tuned = headstock.finetune(run.run, train=rows, out=tmp_path / "tuned", epochs=2)
    assert tuned.load().predict("Anne eats bread now.")[0].label in MEALS.values()
    counts = headstock.explain_parameters(run.run)
    assert counts["total"] == sum(p.numel() for p in headstock.load(run.run).model.parameters())
    with pytest.raises(UserError, match="fill"):
        headstock.load(run.run).fill("Anne eats [MASK].")


def test_wrong_settings_and_families_are_refused(stores):
    for name, value in (("generator_width", 0.0), ("generator_depth", 0), ("detection_weight", 0.0)):
        with pytest.raises(ConfigError, match=name):
            ElectraConfig(**{name: value})
    task = ReplacedTokenDetection(ElectraConfig(), stores[0])
    backbone = Recurrent(RecurrentConfig(vocabulary=stores[0].vocabulary, width=8, hidden=8, depth=1))
    with pytest.raises(UserError, match="Transformer"):
        task.heads(backbone)
