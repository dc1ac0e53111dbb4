"""Parameter counts, and loading weights."""

from pathlib import Path

import pytest
import torch

import headstock.model
from headstock.config import from_dict, read_settings
from headstock.errors import ConfigError, UserError
from headstock.model.backbone import BACKBONES
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch
from headstock.model.heads import ClassificationHead, LMHead, pool
from headstock.model.model import Model
from tests.model.small import SIZES, small_model, some_tokens

PRESETS = Path(headstock.model.__file__).parent / "presets"


def test_the_classic_preset_has_the_expected_parameters():
    settings = read_settings(PRESETS / "classic.toml")["model"]
    family = BACKBONES.get(settings.pop("family"))
    config = from_dict(family.Config, settings | {"vocabulary": 50_001})
    with torch.device("meta"):  # shapes only
        backbone = family(config)
        model = Model(backbone, {"token": LMHead(backbone)})
        classify = model.with_heads({"label": ClassificationHead(backbone.width, 2)})
    assert model.parameter_counts() == {"base": 10_968_200, "token": 10_050_201, "total": 21_018_401}
    assert classify.parameter_counts() == {"base": 10_968_200, "label": 402, "total": 10_968_602}
    assert sum(p.numel() for p in model.parameters()) == 21_018_401


def test_shared_weights_are_counted_and_saved_once():
    tied, loose = small_model(tied=True), small_model(tied=False)
    assert tied.parameter_counts()["token"] == 0
    assert loose.parameter_counts()["token"] == 13 * 8 + 13
    assert tied.heads["token"].weight is tied.backbone.tokens.weight
    assert set(tied.tensors()) | {"heads.token.weight", "heads.token.bias"} == set(loose.tensors())
    head = loose.heads["token"]
    twice = loose.with_heads({"token": head, "again": head})
    assert twice.parameter_counts()["again"] == 0
    assert (
        twice.parameter_counts()["total"]
        == loose.parameter_counts()["total"]
        == sum(p.numel() for p in twice.parameters())
    )


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_round_trip(positions, tied):
    model = small_model(seed=0, positions=positions, tied=tied)
    other = small_model(seed=5, positions=positions, tied=tied)
    batch = Batch(some_tokens(2, 5))
    assert not torch.equal(model(batch).hidden, other(batch).hidden)
    assert ("backbone.waves" in model.tensors()) == (positions == "sinusoidal")
    other.load_tensors({name: tensor.clone() for name, tensor in model.tensors().items()}, source="a test")
    assert torch.equal(model(batch).hidden, other(batch).hidden)
    hidden = model(batch).hidden
    assert torch.equal(model.heads["token"](hidden), other.heads["token"](hidden))
    assert not any(tensor.requires_grad for tensor in model.tensors().values())


def test_all_mismatches_are_reported():
    model = small_model()
    tensors = dict(model.tensors())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    del tensors["backbone.final_norm.weight"]
    tensors["backbone.extra"] = torch.zeros(2)
    tensors["backbone.tokens.weight"] = torch.zeros(14, 8)
    with pytest.raises(UserError) as error:
        model.load_tensors(tensors, source="old.safetensors")
    message = str(error.value)
    assert message.startswith("old.safetensors does not fit this model: ")
    assert "backbone.final_norm.weight is missing" in message
    assert "backbone.extra is unknown" in message
    assert "backbone.tokens.weight has shape (14, 8), expected (13, 8)" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in model.tensors().items())  # nothing was loaded


def test_with_heads_shares_the_backbone():
    model = small_model()
    grafted = model.with_heads({"label": ClassificationHead(8, 3)})
    assert grafted.backbone is model.backbone
    assert set(grafted.heads) == {"label"}


@pytest.mark.parametrize("pooling", ["last", "cls", "mean", "max", "concat"])
def test_pooling_ignores_padding(pooling):
    hidden = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    lengths = [5, 2, 1]
    padding = torch.arange(5)[None] >= torch.tensor(lengths)[:, None]
    alone = torch.cat([pool(hidden[i : i + 1, :n], None, pooling) for i, n in enumerate(lengths)])
    torch.testing.assert_close(pool(hidden, padding, pooling), alone)
    louder = torch.where(padding[..., None], torch.tensor(1e6), hidden)
    torch.testing.assert_close(pool(louder, padding, pooling), alone)
    if pooling != "cls":  # control: without the mask it differs
        assert not torch.allclose(pool(hidden, None, pooling), alone)


def test_last_pooling_takes_the_last_real_token():
    hidden = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(5)[None] >= torch.tensor([5, 2, 1])[:, None]
    assert torch.equal(pool(hidden, padding, "last"), torch.stack([hidden[0, 4], hidden[1, 1], hidden[2, 0]]))
    assert pool(hidden, padding, "concat").shape == (3, 24)


def test_invalid_settings_are_rejected():
    with pytest.raises(ConfigError) as error:
        TransformerConfig(vocabulary=0, depth=0, dropout=1.0)
    assert [where for where, _ in error.value.problems] == ["vocabulary", "depth", "dropout"]
    with pytest.raises(ConfigError, match="width: 10 must be a multiple of heads 4"):
        TransformerConfig(**(SIZES | {"width": 10, "heads": 4}))
    with pytest.raises(ConfigError, match="rotary positions need an even head width, not 3"):
        TransformerConfig(**(SIZES | {"width": 6, "positions": "rotary"}))


def test_residual_projections_shrink_with_depth():
    torch.manual_seed(0)
    spread = {}
    for depth in (1, 16):
        backbone = Transformer(TransformerConfig(vocabulary=50, depth=depth, width=64, heads=2, hidden=64))
        feed = backbone.blocks[0].feed
        spread[depth] = (feed.down.weight.std() / feed.up.weight.std()).item()
    assert spread[1] / spread[16] == pytest.approx(4, rel=0.1)
