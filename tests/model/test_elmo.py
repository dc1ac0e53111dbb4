"""Neither direction of ELMo depends on the tokens it predicts, and each is a language model."""

import pytest
import torch
from torch import Tensor

from headstock.model.backbones.elmo import Elmo, ElmoConfig
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.batch import Batch, pad
from headstock.model.layer_features import ScalarMix, select_layers
from tests.model.small import some_tokens, stir

SIZES = {"vocabulary": 13, "depth": 2, "width": 6, "hidden": 9}


def small(**settings) -> Elmo:
    torch.manual_seed(0)
    backbone = Elmo(ElmoConfig(**(SIZES | settings)))
    stir(backbone)
    return backbone.eval()


def one_direction(elmo: Elmo, way: str) -> Recurrent:
    """A recurrent model with the weights of one direction."""
    single = Recurrent(RecurrentConfig(**vars(elmo.config)))
    single.tokens.load_state_dict(elmo.tokens.state_dict())
    single.stack.load_state_dict(getattr(elmo, way).state_dict())
    return single.eval()


def close(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])])
@pytest.mark.parametrize("position", [0, 3, 4, 8])
def test_directions_depend_only_on_their_side(documents, position):
    backbone, tokens = small(), some_tokens(1, 9)
    other = tokens.clone()
    other[0, position] = (other[0, position] + 1) % 13
    one, two = (backbone(Batch(t, document_ids=documents), keep_layers=True).layers for t in (tokens, other))
    first, last = (0, 9) if documents is None else (0, 4) if position < 4 else (4, 9)
    for before, after in zip(one[1:], two[1:], strict=True):
        changed = (before - after)[0].abs().view(9, 2, -1).amax(-1) > 0  # (T, direction)
        expected = torch.zeros(9, 2, dtype=torch.bool)
        expected[position:last, 0] = True
        expected[first : position + 1, 1] = True
        assert torch.equal(changed, expected)


def test_each_direction_is_a_recurrent_model():
    backbone, tokens = small(), some_tokens(3, 7)
    layers = backbone(Batch(tokens), keep_layers=True).layers
    ahead = one_direction(backbone, "ahead")(Batch(tokens), keep_layers=True).layers
    back = one_direction(backbone, "back")(Batch(tokens.flip(1)), keep_layers=True).layers
    for both, one, other in zip(layers, ahead, back, strict=True):
        close(both, torch.cat([one, other.flip(1)], -1))


def test_padding_does_not_matter():
    backbone = small()
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 1, 3)]
    together = backbone(Batch(*pad(texts, filler=0)), keep_layers=True).layers
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([text])), keep_layers=True).layers
        for one, other in zip(together, alone, strict=True):
            close(one[row, : len(text)], other[0])


def test_layers_join_both_directions():
    backbone, tokens = small(), some_tokens(2, 5)
    output = backbone(Batch(tokens), keep_layers=True)
    assert backbone.width == 12
    assert not backbone.causal
    assert [layer.shape for layer in output.layers] == [(2, 5, 12)] * 3
    assert torch.equal(select_layers(backbone, output, "2"), output.hidden)
    mixed = ScalarMix(3)(select_layers(backbone, output, "mix"))
    close(mixed, sum(output.layers) / 3)


def test_decoding_is_not_supported():
    with pytest.raises(ValueError, match="reads backward"):
        small().new_state(1, 1)


def test_parameters_by_layer_cover_every_parameter_once():
    backbone = small()
    stages = [id(p) for stage in backbone.parameters_by_layer() for p in stage]
    assert sorted(stages) == sorted(id(p) for p in backbone.parameters())
    assert [len(stage) for stage in backbone.parameters_by_layer()] == [1, 12, 12]
