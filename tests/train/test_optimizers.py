"""Muon, parameter groups, learning-rate schedules and the moving average of the weights."""

import math

import pytest
import torch

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.heads import ClassificationHead, LMHead
from headstock.model.model import Model
from headstock.train.optimizers import EMA, Muon, lr_factor, make_optimizers, orthogonal
from headstock.train.settings import TrainSettings


def small(tied=True):
    backbone = Transformer(TransformerConfig(vocabulary=20, context=8, depth=1, width=8, heads=2, hidden=16, tied=tied))
    return Model(backbone, {"token": LMHead(backbone)})


def parameters_of(optimizers):
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 8), (2, 8, 24)])
def test_newton_schulz_equalizes_singular_values(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_parts_of_a_stacked_matrix_are_orthogonalized_separately():
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.zeros(24, 8))
    stacked.grad = torch.randn(24, 8)
    stacked.grad[:8] *= 1000  # a large part must not dominate the others
    Muon([{"params": [stacked], "parts": 3}], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    norms = [float(part.norm()) for part in stacked.data.chunk(3)]
    assert max(norms) / min(norms) < 1.3


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_in_one_optimizer_and_only_matrices_have_weight_decay(name, tied):
    model = small(tied)
    optimizers = make_optimizers(model, TrainSettings(optimizer=name, weight_decay=0.3))
    assert sorted(map(id, parameters_of(optimizers))) == sorted(map(id, model.parameters()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert group["weight_decay"] == (0.3 if parameter.dim() == 2 else 0.0)
    if name == "muon":
        in_muon = {id(p) for p in parameters_of(optimizers[:1])}
        assert id(model.backbone.tokens.weight) not in in_muon
        assert id(model.backbone.blocks[0].attention.inputs.weight) in in_muon


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_weights_are_left_out(name):
    model = small()
    settings = TrainSettings(optimizer=name)
    model.backbone.requires_grad_(False)
    assert make_optimizers(model, settings) == []
    for weight in (model.backbone.tokens.weight, model.backbone.blocks[0].feed.up.weight):
        weight.requires_grad_(True)
        assert [id(p) for p in parameters_of(make_optimizers(model, settings))] == [id(weight)]
        weight.requires_grad_(False)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layer_decay_scales_the_learning_rate_of_each_layer(name, norm):
    sizes = {"vocabulary": 20, "context": 8, "depth": 3, "width": 8, "heads": 2, "hidden": 16}
    backbone = Transformer(TransformerConfig(**sizes, norm=norm, qk_norm=True, embed_norm=True, segments=2))
    model = Model(backbone, {"label": ClassificationHead(8, 3), "token": LMHead(backbone)})
    optimizers = make_optimizers(model, TrainSettings(optimizer=name, layer_decay=0.5))
    scales = {id(p): group["scale"] for o in optimizers for group in o.param_groups for p in group["params"]}
    assert sorted(map(id, parameters_of(optimizers))) == sorted(map(id, model.parameters()))  # each exactly once
    actual = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}

    def expected(name):
        if name.startswith("heads."):  # the LM head is the embedding itself
            return 1.0
        if name.startswith("backbone.blocks."):
            return 0.5 ** (3 - int(name.split(".")[2]))
        return 0.5 if name.startswith("backbone.final_norm") else 0.5**4  # the final norm belongs to the last block

    assert actual == {name: expected(name) for name in actual}
    assert set(actual.values()) == {1.0, 0.5, 0.25, 0.125, 0.0625}


def test_schedules():
    def factor(schedule, done, **settings):
        return lr_factor(done, TrainSettings(schedule=schedule, warmup=0.1, **settings))

    for schedule in ("cosine", "linear", "trapezoid", "constant", "inverse_sqrt"):
        assert factor(schedule, 0.05) == pytest.approx(0.5)
        assert factor(schedule, 0.1) == pytest.approx(1.0)
    assert factor("constant", 1.0) == 1.0
    assert factor("inverse_sqrt", 0.4) == pytest.approx(0.5)  # four times the warm-up
    assert factor("cosine", 0.55) == pytest.approx(0.5)
    assert factor("linear", 0.55) == pytest.approx(0.5)
    assert factor("trapezoid", 0.6, cooldown=0.2) == 1.0
    assert factor("trapezoid", 0.9, cooldown=0.2) == pytest.approx(0.5)
    for schedule in ("cosine", "linear", "trapezoid"):
        assert factor(schedule, 1.0) == pytest.approx(0.0, abs=1e-9)
        assert factor(schedule, 1.0, lr_floor=0.1) == pytest.approx(0.1)


def test_the_moving_average_converges_to_the_weights():
    model = small()
    average = EMA(model, 0.9)
    with torch.no_grad():
        for _ in range(60):
            model.backbone.tokens.weight.fill_(1.0)
            average.update()
    averaged = average.tensors["backbone.tokens.weight"]
    assert math.isclose(float(averaged.mean()), 1.0, abs_tol=0.01)
    assert not torch.equal(averaged, model.backbone.tokens.weight)
