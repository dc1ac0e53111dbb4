"""Closed forms agree with the modules they describe; modules without one are measured."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headstock.cost.formulas import CPU, ModuleCost
from headstock.cost.measured import measured_backbone
from headstock.cost.model import backbone_cost, model_dimensions, module_costs
from headstock.cost.parameter_table import formula_table
from headstock.model.backbone import BACKBONES, Backbone, CachedBackbone
from headstock.model.batch import Output
from headstock.model.heads import ClassificationHead, LMHead, NextSentenceHead, SpanHead
from headstock.model.model import Model

SMALL = st.integers(1, 5)
TRANSFORMER = {
    "vocabulary": st.integers(1, 40),
    "context": st.integers(1, 20),
    "depth": st.integers(1, 3),
    "heads": st.sampled_from([1, 2, 3]),
    "hidden": st.integers(1, 30),
    "dropout": st.sampled_from([0.0, 0.1]),
    "norm": st.sampled_from(["pre", "post", "none"]),
    "norm_kind": st.sampled_from(["layer", "rms"]),
    "positions": st.sampled_from(["sinusoidal", "learned", "rotary", "relative", "none"]),
    "activation": st.sampled_from(["relu", "gelu", "swiglu", "geglu"]),
    "bias": st.booleans(),
    "tied": st.booleans(),
    "embed_scale": st.booleans(),
    "embed_norm": st.booleans(),
    "qk_norm": st.booleans(),
}
CELLS = {
    "vocabulary": st.integers(1, 40),
    "cell": st.sampled_from(["lstm", "gru", "rnn"]),
    "depth": st.integers(1, 3),
    "width": st.integers(1, 12),
    "hidden": st.integers(1, 12),
    "tied": st.booleans(),
}
FAMILIES = {
    "transformer": TRANSFORMER | {"segments": st.integers(0, 3), "causal": st.booleans()},
    "seq2seq": TRANSFORMER
    | {
        "source_vocabulary": st.none() | st.integers(1, 40),
        "encoder_depth": st.none() | st.integers(1, 3),
        "shared": st.booleans(),
    },
    "recurrent": CELLS,
    "elmo": CELLS,
}


@st.composite
def models(draw):
    family = draw(st.sampled_from(sorted(FAMILIES)))
    config = {name: draw(kind) for name, kind in FAMILIES[family].items()}
    if "heads" in config:
        config["width"] = 2 * config["heads"] * draw(st.integers(1, 4))
    backbone = BACKBONES.get(family)(BACKBONES.get(family).Config(**config))
    transforms = family in ("transformer", "seq2seq") and draw(st.booleans())
    mixed = backbone.depth + 1 if draw(st.booleans()) else None
    wide = backbone.width * draw(st.sampled_from([1, 3, 4, 12]))  # last, concat, concat4, both
    heads = {
        "token": lambda: LMHead(backbone, transform=transforms),
        "next": lambda: NextSentenceHead(backbone.width),
        "label": lambda: ClassificationHead(wide, draw(SMALL), mixed=mixed),
        "span": lambda: SpanHead(wide, mixed=mixed),
    }
    if family != "transformer":
        del heads["next"]  # next-sentence prediction belongs to masked language modelling
    names = draw(st.lists(st.sampled_from(sorted(heads)), unique=True))
    if "label" in names and "span" in names:
        names.remove("span")  # a model has the heads of one task
    return Model(backbone, {name: heads[name]() for name in names})


def expand_paths(cost: ModuleCost) -> dict[str, tuple]:
    """Every tensor's shape by its full name, with layer numbers instead of *."""
    shapes = {}
    for tensor in cost.weights():
        assert tensor.path.count("*") <= 1
        for number in range(tensor.times):
            shapes[tensor.path.replace("*", str(number))] = tensor.shape
    return shapes


def parameter_shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@settings(max_examples=150, deadline=None)
@given(models())
def test_formulas_name_every_tensor_with_its_shape(model):
    cost = module_costs(model, model_dimensions(model))
    assert expand_paths(cost) == parameter_shapes(model)
    assert cost.count == sum(p.numel() for p in model.parameters())
    counts = model.parameter_counts()
    assert cost.parts[0].count == counts["base"]
    assert {head.name: head.count for head in cost.parts[1].parts} == {name: counts[name] for name in model.heads}
    assert cost.buffer_count == sum(buffer.numel() for buffer in model.buffers())
    assert not cost.measured_parts()


def test_a_wrong_formula_is_detected():
    model = Model(small_transformer(), {})
    cost = module_costs(model, model_dimensions(model))
    model.backbone.extra = torch.nn.Linear(8, 8)
    assert expand_paths(cost) != parameter_shapes(model)


def small_transformer():
    family = BACKBONES.get("transformer")
    return family(family.Config(vocabulary=7, width=8, heads=2, context=16))


def test_a_cached_backbone_costs_nothing():
    backbone = small_transformer()
    assert backbone_cost(CachedBackbone(backbone), model_dimensions(Model(backbone, {})), CPU).count == 0


# Modules without a closed form


@dataclass(frozen=True)
class ConvolutionConfig:
    vocabulary: int
    channels: int = 8


class Convolution(Backbone):
    """A backbone that cost/ does not know."""

    Config = ConvolutionConfig
    causal = True
    context = 32

    def __init__(self, config):
        super().__init__()
        self.config, self.width, self.depth = config, config.channels, 1
        self.tokens = nn.Embedding(config.vocabulary, config.channels)
        self.mix = nn.Conv1d(config.channels, config.channels, 3)
        self.output = nn.Linear(config.channels, config.channels)

    def forward(self, batch, state=None, *, keep_layers=False):
        x = nn.functional.pad(self.tokens(batch.tokens).mT, (2, 0))
        return Output(self.output(self.mix(x).mT))

    def parameters_by_layer(self):
        return [list(self.parameters())]

    def new_state(self, rows, capacity):
        raise NotImplementedError


class DataDependent(Convolution):
    """Looks at values, so that it cannot run on the meta device."""

    def forward(self, batch, state=None, *, keep_layers=False):
        assert int(batch.tokens.sum()) == 0
        return super().forward(batch)


class ScaleHead(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.weight = backbone.tokens.weight  # tied
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        return self.scale * hidden @ self.weight.T


@pytest.mark.parametrize("kind", [Convolution, DataDependent])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_without_a_formula_are_measured(kind, device):
    with torch.device(device):
        backbone = kind(ConvolutionConfig(vocabulary=11))
    if device == "meta" and kind is DataDependent:
        pytest.skip("needs values")
    model = Model(backbone, {"scale": ScaleHead(backbone).to(device)})
    cost = module_costs(model, model_dimensions(model, length=10))
    assert cost.measured_parts() == ["backbone", "scale"]
    assert expand_paths(cost) == parameter_shapes(model)
    base, head = cost.parts[0], cost.parts[1].parts[0]
    assert base.total_flops() == 2 * 8 * 8 * 3 + 2 * 8 * 8 and head.total_flops() == 2 * 8 * 11
    assert base.total_saved().values >= 2 * 8  # the inputs of both layers
    assert next(base.weights()).is_embedding


def test_measured_flops_agree_with_the_formula():
    backbone = small_transformer()
    d = model_dimensions(Model(backbone, {}), length=16)
    formula, measured = backbone_cost(backbone, d, CPU), measured_backbone(backbone, 16, 16)
    assert measured.total_flops() == pytest.approx(formula.total_flops(), rel=1e-6)
    assert measured.count == formula.count


def test_the_parameter_table_of_an_unknown_backbone_says_so():
    model = Model(Convolution(ConvolutionConfig(vocabulary=11)), {})
    table = formula_table(model)
    assert "| `backbone.mix` | 200 | 200 |" in table and "no closed form for: backbone" in table
    assert "no closed form" not in formula_table(Model(small_transformer(), {}))
