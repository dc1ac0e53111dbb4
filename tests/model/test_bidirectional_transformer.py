"""Two causal Transformers: each half of a vector sees one direction, in padded and packed rows."""

import pytest
import torch

from headstock.model.backbones.bidirectional_transformer import (
    BidirectionalTransformer,
    BidirectionalTransformerConfig,
)
from headstock.model.batch import Batch, pad
from tests.model.small import SIZES, some_tokens, stir

WIDTH = SIZES["width"]


def small(**settings) -> BidirectionalTransformer:
    torch.manual_seed(0)
    backbone = BidirectionalTransformer(BidirectionalTransformerConfig(**(SIZES | settings)))
    stir(backbone)
    return backbone.eval()


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("changed", [0, 3, 6])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "relative"])
def test_each_half_sees_one_direction(changed, positions):
    backbone, tokens = small(positions=positions), some_tokens(1, 7)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % SIZES["vocabulary"]
    moved = (backbone(Batch(tokens)).hidden - backbone(Batch(other)).hidden).abs()[0] > 1e-6  # (T, 2 W)
    assert moved[:, :WIDTH].any(1).nonzero().flatten().tolist() == list(range(changed, 7))
    assert moved[:, WIDTH:].any(1).nonzero().flatten().tolist() == list(range(changed + 1))


def test_the_halves_meet_nowhere_below_the_output():
    """Unlike a masked language model: with one direction's weights at zero, the other half is unchanged."""
    backbone, tokens = small(), some_tokens(2, 6)
    before = backbone(Batch(tokens)).hidden
    for block in backbone.backwards.blocks:
        for parameter in block.parameters():
            parameter.data.zero_()
    after = backbone(Batch(tokens)).hidden
    close(after[..., :WIDTH], before[..., :WIDTH])
    assert not torch.allclose(after[..., WIDTH:], before[..., WIDTH:])


def test_padded_and_packed_rows_equal_single_ones():
    backbone = small()
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 2, 4)]
    padded = backbone(Batch(*pad(texts, 0)), keep_layers=True)
    packed = Batch(
        torch.tensor([[*texts[0], *texts[1], *texts[2]]]),
        document_ids=torch.tensor([[0] * 5 + [1] * 2 + [2] * 4]),
        positions=torch.tensor([[*range(5), *range(2), *range(4)]]),
    )
    hidden, begin = backbone(packed).hidden, 0
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([text])), keep_layers=True)
        close(padded.hidden[row, : len(text)], alone.hidden[0])
        close(hidden[0, begin : begin + len(text)], alone.hidden[0])
        for layer, expected in zip(padded.layers, alone.layers, strict=True):
            close(layer[row, : len(text)], expected[0])
        begin += len(text)


def test_every_parameter_is_in_one_layer():
    backbone = small()
    parameters = [id(p) for layer in backbone.parameters_by_layer() for p in layer]
    assert sorted(parameters) == sorted(map(id, backbone.parameters()))


def test_it_continues_no_text():
    with pytest.raises(ValueError, match="backward"):
        small().new_state(1, 8)
