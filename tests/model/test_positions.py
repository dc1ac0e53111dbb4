"""Position embeddings: the formula, positions beyond the context, and relative rotary scores."""

import math

import pytest
import torch

from headstock.model.batch import Batch
from headstock.model.layers import apply_rotary
from headstock.model.positions import rotary_angles, sinusoids
from tests.model.small import small_backbone, some_tokens


def textbook(position: int, column: int, width: int) -> float:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)); Vaswani et al., 2017."""
    angle = position / 10000 ** ((column - column % 2) / width)
    return math.cos(angle) if column % 2 else math.sin(angle)


@pytest.mark.parametrize("width", [1, 2, 7, 8, 15])
def test_sinusoids_match_the_formula(width):
    waves = sinusoids(5001, width)
    for position in (0, 1, 2, 17, 500, 5000):
        expected = [textbook(position, column, width) for column in range(width)]
        assert waves[position].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [7, 8])
def test_sinusoids_are_a_persistent_buffer(width):
    backbone = small_backbone(positions="sinusoidal", width=width, heads=1, embed_scale=True)
    assert "waves" in dict(backbone.named_buffers())
    assert "waves" in backbone.state_dict()
    assert "waves" not in dict(backbone.named_parameters())
    assert torch.equal(backbone.waves, sinusoids(16, width))
    tokens = some_tokens(1, 5)
    added = backbone.embed(Batch(tokens), torch.arange(5), 5) - math.sqrt(width) * backbone.tokens(tokens)
    expected = [[textbook(position, column, width) for column in range(width)] for position in range(5)]
    torch.testing.assert_close(added[0], torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative"])
def test_positions_beyond_the_context_keep_the_others(positions):
    short = small_backbone(positions=positions, context=6)
    long = small_backbone(positions=positions, context=40)
    tokens = Batch(some_tokens(2, 30))
    beyond = short(tokens).hidden
    torch.testing.assert_close(beyond, long(tokens).hidden)
    torch.testing.assert_close(beyond[:, :6], short(Batch(tokens.tokens[:, :6])).hidden)


@torch.inference_mode()
def test_learned_positions_are_limited_to_the_context():
    backbone = small_backbone(positions="learned", context=6)
    assert backbone(Batch(some_tokens(1, 6))).hidden.shape == (1, 6, 8)
    with pytest.raises(ValueError, match="6, but there are 7"):
        backbone(Batch(some_tokens(1, 7)))
    state = backbone.new_state(1, 10)
    backbone(Batch(some_tokens(1, 6)), state)
    with pytest.raises(ValueError, match="7 tokens"):
        backbone(Batch(some_tokens(1, 1)), state)


def scores_at(positions: torch.Tensor) -> torch.Tensor:
    """Rotary attention scores of eight queries and keys at these positions."""
    backbone = small_backbone(positions="rotary", width=16, context=32)
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 8, 8, generator=draw)
    rotation = backbone.rotation(positions, int(positions.max()) + 1)
    return apply_rotary(query, rotation) @ apply_rotary(key, rotation).transpose(-1, -2)


@pytest.mark.parametrize("shift", [1, 7, 500, 4000])
def test_rotary_scores_depend_on_distances_only(shift):
    positions = torch.arange(8)
    torch.testing.assert_close(scores_at(positions + shift), scores_at(positions), atol=1e-5, rtol=0)
    assert (scores_at(2 * positions) - scores_at(positions)).abs().max() > 0.1  # control: other distances


@pytest.mark.parametrize(
    ("positions", "same"), [("rotary", True), ("relative", True), ("learned", False), ("sinusoidal", False)]
)
def test_only_relative_encodings_are_shift_invariant(positions, same):
    backbone = small_backbone(positions=positions)
    tokens = some_tokens(2, 6)
    start = backbone(Batch(tokens, positions=torch.arange(6).expand(2, 6))).hidden
    shifted = backbone(Batch(tokens, positions=(torch.arange(6) + 9).expand(2, 6))).hidden
    assert torch.equal(start, backbone(Batch(tokens)).hidden)
    assert torch.allclose(start, shifted, atol=1e-5) == same


def test_rotation_keeps_norms_and_rotates_by_the_angle():
    angles = rotary_angles(10, 4)
    rotation = (angles.cos().float(), angles.sin().float())
    x = torch.randn(1, 1, 10, 4, generator=torch.Generator().manual_seed(0))
    rotated = apply_rotary(x, rotation)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    first, third = x[0, 0, 3, 0].item(), x[0, 0, 3, 2].item()  # the pair (0, K/2), rotated by 3 radians at position 3
    assert rotated[0, 0, 3, 0].item() == pytest.approx(first * math.cos(3) - third * math.sin(3), abs=1e-6)
    assert rotated[0, 0, 3, 2].item() == pytest.approx(first * math.sin(3) + third * math.cos(3), abs=1e-6)
