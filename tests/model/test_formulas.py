"""Closed forms beside the model they are of: every tensor's name and shape, for any settings."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.model.backbone import BACKBONES
from headstock.model.cached_backbone import CachedBackbone
from headstock.model.formulas import ModuleCost
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
    "norm": st.sampled_from(["pre", "post"]),
    "norm_kind": st.sampled_from(["layer", "rms"]),
    "positions": st.sampled_from(["sinusoidal", "learned", "rotary"]),
    "activation": st.sampled_from(["relu", "gelu", "swiglu"]),
    "bias": st.booleans(),
    "tied": st.booleans(),
    "embed_scale": st.booleans(),
    "embed_norm": st.booleans(),
    "qk_norm": st.booleans(),
}
CELLS = {
    "vocabulary": st.integers(1, 40),
    "cell": st.sampled_from(["lstm", "gru"]),
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
    chosen = {name: draw(kind) for name, kind in FAMILIES[family].items()}
    if "heads" in chosen:
        chosen["width"] = 2 * chosen["heads"] * draw(st.integers(1, 4))
    backbone = BACKBONES.get(family)(BACKBONES.get(family).Config(**chosen))
    transforms = family in ("transformer", "seq2seq") and draw(st.booleans())
    mixed = backbone.depth + 1 if draw(st.booleans()) else None
    wide = backbone.width * draw(st.sampled_from([1, 3, 4, 12]))  # last, concat, concat4, both
    every = {
        "token": lambda: LMHead(backbone, transform=transforms),
        "next": lambda: NextSentenceHead(backbone.width),
        "label": lambda: ClassificationHead(wide, draw(SMALL), mixed=mixed),
        "span": lambda: SpanHead(wide, mixed=mixed),
    }
    if family != "transformer":
        del every["next"]  # next sentences go with the masked objective alone
    names = draw(st.lists(st.sampled_from(sorted(every)), unique=True))
    if "label" in names and "span" in names:
        names.remove("span")  # a model has the heads of one task
    return Model(backbone, {name: every[name]() for name in names})


def written_out(part: ModuleCost) -> dict[str, tuple]:
    """Every tensor by its own name, numbers in the place of stars."""
    found = {}
    for tensor in part.weights():
        assert tensor.path.count("*") <= 1
        for number in range(tensor.times):
            found[tensor.path.replace("*", str(number))] = tensor.shape
    return found


@settings(max_examples=150, deadline=None)
@given(models())
def test_every_tensor_is_where_and_as_large_as_its_form_says(model):
    part = model.counted(model.dimensions())
    assert written_out(part) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert part.count == sum(p.numel() for p in model.parameters())
    sizes = model.parameter_counts()
    assert part.parts[0].count == sizes["base"]
    assert {head.name: head.count for head in part.parts[1].parts} == {name: sizes[name] for name in model.heads}
    assert part.fixed == sum(buffer.numel() for buffer in model.buffers())


def test_a_wrong_form_would_be_noticed():
    backbone = BACKBONES.get("transformer")(BACKBONES.get("transformer").Config(vocabulary=7, width=8, heads=2))
    model = Model(backbone, {})
    right = model.counted(model.dimensions())
    backbone.extra = torch.nn.Linear(8, 8)
    assert written_out(right) != {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_what_stands_for_a_frozen_backbone_has_nothing():
    backbone = BACKBONES.get("transformer")(BACKBONES.get("transformer").Config(vocabulary=7, width=8, heads=2))
    assert CachedBackbone(backbone).counted(Model(backbone, {}).dimensions(), None).count == 0
