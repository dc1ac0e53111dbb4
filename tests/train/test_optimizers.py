"""How weights move."""

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


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 8), (2, 8, 24)])
def test_newton_schulz_makes_singular_values_alike(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_is_orthogonalised_part_by_part():
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.zeros(24, 8))
    stacked.grad = torch.randn(24, 8)
    stacked.grad[:8] *= 1000  # a loud part must not drown the quiet ones
    Muon([{"params": [stacked], "parts": 3}], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    norms = [float(part.norm()) for part in stacked.data.chunk(3)]
    assert max(norms) / min(norms) < 1.3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_in_one_optimizer_and_only_matrices_decay(optimizer, tied):
    model = small(tied)
    made = make_optimizers(model, TrainSettings(optimizer=optimizer, weight_decay=0.3))
    seen = [p for one in made for group in one.param_groups for p in group["params"]]
    assert sorted(map(id, seen)) == sorted(map(id, model.parameters()))
    for one in made:
        for group in one.param_groups:
            for parameter in group["params"]:
                assert group["weight_decay"] == (0.3 if parameter.dim() == 2 else 0.0)
    if optimizer == "muon":
        moved = {id(p) for group in made[0].param_groups for p in group["params"]}
        assert id(model.backbone.tokens.weight) not in moved
        assert id(model.backbone.blocks[0].attention.inputs.weight) in moved


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_are_left_out(optimizer):
    model = small()
    settings = TrainSettings(optimizer=optimizer)
    model.backbone.requires_grad_(False)
    assert make_optimizers(model, settings) == []
    for chosen in (model.backbone.tokens.weight, model.backbone.blocks[0].feed.up.weight):
        chosen.requires_grad_(True)
        seen = [p for one in make_optimizers(model, settings) for g in one.param_groups for p in g["params"]]
        assert [id(p) for p in seen] == [id(chosen)]
        chosen.requires_grad_(False)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_each_layer_learns_at_its_share_of_the_rate_above_it(optimizer, norm):
    sizes = {"vocabulary": 20, "context": 8, "depth": 3, "width": 8, "heads": 2, "hidden": 16}
    backbone = Transformer(TransformerConfig(**sizes, norm=norm, qk_norm=True, embed_norm=True, segments=2))
    model = Model(backbone, {"label": ClassificationHead(8, 3), "token": LMHead(backbone)})
    made = make_optimizers(model, TrainSettings(optimizer=optimizer, layer_decay=0.5))
    scales = {id(p): group["scale"] for one in made for group in one.param_groups for p in group["params"]}
    seen = [p for one in made for group in one.param_groups for p in group["params"]]
    assert sorted(map(id, seen)) == sorted(map(id, model.parameters()))  # each exactly once
    got = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}

    def wanted(name):
        if name.startswith("heads."):  # that of the tokens is the embedding itself
            return 1.0
        if name.startswith("backbone.blocks."):
            return 0.5 ** (3 - int(name.split(".")[2]))
        return 0.5 if name.startswith("backbone.final_norm") else 0.5**4  # the norm above the last block is its own

    assert got == {name: wanted(name) for name in got}
    assert set(got.values()) == {1.0, 0.5, 0.25, 0.125, 0.0625}


def test_schedules():
    def at(schedule, done, **more):
        return lr_factor(done, TrainSettings(schedule=schedule, warmup=0.1, **more))

    for schedule in ("cosine", "linear", "trapezoid", "constant"):
        assert at(schedule, 0.05) == pytest.approx(0.5)
        assert at(schedule, 0.1) == pytest.approx(1.0)
    assert at("constant", 1.0) == 1.0
    assert at("cosine", 0.55) == pytest.approx(0.5)
    assert at("linear", 0.55) == pytest.approx(0.5)
    assert at("trapezoid", 0.6, cooldown=0.2) == 1.0
    assert at("trapezoid", 0.9, cooldown=0.2) == pytest.approx(0.5)
    for schedule in ("cosine", "linear", "trapezoid"):
        assert at(schedule, 1.0) == pytest.approx(0.0, abs=1e-9)
        assert at(schedule, 1.0, lr_floor=0.1) == pytest.approx(0.1)


def test_the_average_forgets_the_beginning():
    model = small()
    average = EMA(model, 0.9)
    with torch.no_grad():
        for _ in range(60):
            model.backbone.tokens.weight.fill_(1.0)
            average.update()
    kept = average.tensors["backbone.tokens.weight"]
    assert math.isclose(float(kept.mean()), 1.0, abs_tol=0.01)
    assert not torch.equal(kept, model.backbone.tokens.weight)
