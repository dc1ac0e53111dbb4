"""Transformers without positions, norms, skip connections or an inner activation: what each part is for."""

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import ConfigError
from headstock.model.backbones.transformer import TransformerConfig
from headstock.model.batch import Batch
from tests.model.small import SIZES, small_backbone, some_tokens

LENGTH = 6


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "notices"),
    [
        ({"positions": "none", "causal": False}, False),
        ({"positions": "none", "causal": True}, True),  # the mask tells first from last
        ({"positions": "learned", "causal": False}, True),
        ({"positions": "sinusoidal", "causal": False}, True),
        ({"positions": "rotary", "causal": False}, True),
        ({"positions": "relative", "causal": False}, True),
    ],
)
def test_only_an_encoder_without_positions_ignores_word_order(settings, notices):
    backbone, tokens = small_backbone(**settings), some_tokens(1, LENGTH)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    permuted = backbone(Batch(tokens[:, order])).hidden
    assert torch.allclose(permuted, backbone(Batch(tokens)).hidden[:, order], atol=1e-5) is not notices


def test_without_skip_connections_a_block_is_its_sublayers():
    backbone, x = small_backbone(residual=False, norm="none"), torch.randn(1, LENGTH, SIZES["width"])
    block, mask = backbone.blocks[0], backbone.attention_mask(Batch(some_tokens(1, LENGTH)), x, varlen=False)
    close(block(x, mask), block.feed(block.attention(x, mask)))
    with_skip = small_backbone(norm="none").blocks[0]
    assert not torch.allclose(with_skip(x, mask), with_skip.feed(with_skip.attention(x, mask)), atol=1e-3)


def test_norm_none_has_no_norm_at_all():
    backbone = small_backbone(norm="none")
    assert not [name for name, _ in backbone.named_parameters() if "norm" in name]
    x = torch.randn(1, LENGTH, SIZES["width"])
    block, mask = backbone.blocks[0], backbone.attention_mask(Batch(some_tokens(1, LENGTH)), x, varlen=False)
    middle = x + block.attention(x, mask)
    close(block(x, mask), middle + block.feed(middle))


def test_an_outer_activation_makes_two_linear_layers_one():
    """φ((x W1 + b1) W2 + b2) = φ(x W + b) with W = W1 W2 and b = b1 W2 + b2; not so with an activation between."""
    x = torch.randn(5, SIZES["width"])
    for place, collapses in (("outer", True), ("inner", False)):
        feed = small_backbone(activation="relu", feed_activation=place).blocks[0].feed
        weight = feed.down.weight @ feed.up.weight
        bias = feed.down.weight @ feed.up.bias + feed.down.bias
        assert torch.allclose(feed(x), F.relu(F.linear(x, weight, bias)), atol=1e-4) is collapses


@pytest.mark.parametrize(
    "settings",
    [{"positions": "none"}, {"norm": "none"}, {"residual": False}, {"feed_activation": "outer"}],
    ids=lambda settings: next(iter(settings)),
)
def test_decoding_matches_the_full_pass(settings):
    backbone, tokens = small_backbone(**settings), some_tokens(2, LENGTH)
    with torch.inference_mode():
        state, steps = backbone.new_state(2, LENGTH), []
        for i in range(LENGTH):
            output = backbone(Batch(tokens[:, i : i + 1]), state)
            state, _ = output.state, steps.append(output.hidden)
        close(torch.cat(steps, 1), backbone(Batch(tokens)).hidden)


def test_a_gate_has_no_outer_activation():
    with pytest.raises(ConfigError, match="feed_activation"):
        TransformerConfig(vocabulary=5, activation="swiglu", feed_activation="outer")
