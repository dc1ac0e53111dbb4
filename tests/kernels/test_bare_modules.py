"""Bare copies of modules compute what the modules compute."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headstock.kernels.bare_modules import strip_modules
from headstock.model.batch import Batch
from tests.model.small import small_backbone, small_model, some_tokens


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


SHAPES = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "norm_kind": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(["relu", "gelu", "swiglu"]),
        "positions": st.sampled_from(["sinusoidal", "learned", "rotary", "relative"]),
        "bias": st.booleans(),
        "qk_norm": st.booleans(),
        "embed_scale": st.booleans(),
        "embed_norm": st.booleans(),
        "segments": st.sampled_from([0, 2]),
    }
)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@given(shape=SHAPES)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_copy_agrees_with_its_module(shape):
    backbone, tokens = small_backbone(**shape), some_tokens(3, 9)
    copy = strip_modules(backbone)
    assert not isinstance(copy, nn.Module)
    assert_close(copy(Batch(tokens)).hidden, backbone(Batch(tokens)).hidden)
    states = [backbone.new_state(3, 9) for _ in range(2)]
    for position in range(9):
        batch = Batch(tokens[:, position : position + 1])
        assert_close(copy(batch, states[0]).hidden, backbone(batch, states[1]).hidden)


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_of_a_head_agrees(tied):
    model, hidden = small_model(tied=tied), torch.randn(4, 8)
    assert_close(strip_modules(model.heads["token"])(hidden), model.heads["token"](hidden))


def test_a_copy_with_cross_attention_agrees():
    backbone, tokens, memory = small_backbone(cross=True, qk_norm=True), some_tokens(2, 5), torch.randn(2, 4, 8)
    states = [backbone.new_state(2, 5) for _ in range(2)]
    for position in range(5):
        batch = Batch(tokens[:, position : position + 1])
        outputs = [
            part(batch, state, memory=memory).hidden
            for part, state in zip((strip_modules(backbone), backbone), states, strict=True)
        ]
        assert_close(*outputs)


def test_modules_with_hooks_are_not_copied():
    backbone, tokens, calls = small_backbone(), some_tokens(3, 9), []
    hook = backbone.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    strip_modules(backbone)(Batch(tokens))
    assert calls == [1]
    hook.remove()
    assert strip_modules(backbone) is not backbone
