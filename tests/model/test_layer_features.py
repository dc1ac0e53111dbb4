"""Selecting layers as features."""

import pytest
import torch

from headstock.errors import UserError
from headstock.model.batch import Batch
from headstock.model.layer_features import ScalarMix, check_layers, feature_width, select_layers
from tests.model.small import small_backbone, some_tokens


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_select_layers(norm):
    backbone = small_backbone(depth=5, norm=norm)
    with torch.inference_mode():
        output = backbone(Batch(some_tokens(2, 7)), keep_layers=True)
        by_number = [select_layers(backbone, output, str(number)) for number in range(6)]
        selected = {layers: select_layers(backbone, output, layers) for layers in ("last", "sum4", "concat4", "mix")}
    assert torch.equal(selected["last"], by_number[5])
    assert torch.equal(selected["last"], output.hidden)
    torch.testing.assert_close(selected["sum4"], by_number[2] + by_number[3] + by_number[4] + by_number[5])
    assert torch.equal(selected["concat4"], torch.cat(by_number[2:], -1))
    assert torch.equal(selected["mix"], torch.stack(by_number, -2))
    for layers, vectors in selected.items():
        assert vectors.size(-1) == feature_width(8, layers)
    assert len({float(vectors.sum()) for vectors in by_number}) == 6  # all layers differ


def test_scalar_mix_starts_as_the_mean_and_learns():
    mix, vectors = ScalarMix(3), torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix(vectors), vectors.mean(-2))
    with torch.no_grad():
        mix.weights[1], mix.gamma[()] = 50.0, 2.0
    torch.testing.assert_close(mix(vectors), 2 * vectors[:, :, 1])
    mix(vectors).sum().backward()
    assert mix.weights.grad is not None and mix.gamma.grad is not None


def test_missing_layers_are_rejected():
    for layers in ("last", "mix", "0", "2"):
        check_layers(layers, 2)
    for layers in ("sum4", "concat4"):
        check_layers(layers, 4)
        with pytest.raises(UserError, match=f"{layers} needs 4 layers, this model has 3"):
            check_layers(layers, 3)
    with pytest.raises(UserError, match="3 is more than the model's 2"):
        check_layers("3", 2)
    for error in ("-1", "lats", "", "1.5"):
        with pytest.raises(UserError, match="must be one of last, sum4, concat4, mix or a layer's number"):
            check_layers(error, 2)
