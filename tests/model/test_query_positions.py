"""The last layer at one position per row gives the same vectors as at all positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.kernels.bare_modules import strip_modules
from headstock.model.attention_mask import AttentionMask, causal_mask
from headstock.model.attention_weights import record_attention
from headstock.model.batch import Batch
from headstock.model.heads import pool, pooled_positions
from headstock.model.model import Model
from tests.model.small import small_backbone, small_model, some_tokens

LENGTHS = (9, 4, 7, 1)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0, 1, 1, 1, 1, 1, 1, 2, 2], [0] * 9])


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


def padded(**fields) -> Batch:
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    return Batch(some_tokens(len(LENGTHS), max(LENGTHS)), padding, **fields)


def full_batch() -> Batch:
    return Batch(some_tokens(len(LENGTHS), max(LENGTHS)))


def vectors_at(model, batch, positions):
    return model(batch, query_positions=positions).hidden.squeeze(1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def least_distance(actual, expected):
    return float((actual - expected).abs().amax(-1).min())


SHAPES = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "norm_kind": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(["gelu", "swiglu"]),
        "bias": st.booleans(),
    }
)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary", "sinusoidal", "relative"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "last"])
@given(shape=SHAPES)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_one_position_agrees_with_all(pooling, causal, positions, qk_norm, shape):
    model = small_model(causal=causal, positions=positions, qk_norm=qk_norm, **shape)
    for batch in (padded(), full_batch()):
        actual = vectors_at(model, batch, pooled_positions(batch, pooling))
        close(actual, pool(model(batch).hidden, batch.padding, pooling))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_every_position_can_be_selected(causal, positions):
    model, batch = small_model(causal=causal, positions=positions), full_batch()
    all_hidden = model(batch).hidden
    for position in range(1, max(LENGTHS)):
        actual = vectors_at(model, batch, torch.full((len(LENGTHS),), position))
        close(actual, all_hidden[:, position])
        assert least_distance(actual, all_hidden[:, position - 1]) > 1e-3  # control: neighbours differ


def test_rows_may_have_different_positions():
    model, batch = small_model(positions="rotary", qk_norm=True), padded()
    query_positions = torch.tensor([3, 0, 6, 0])
    close(vectors_at(model, batch, query_positions), model(batch).hidden[torch.arange(4), query_positions])
    assert pooled_positions(batch, "last").tolist() == [length - 1 for length in LENGTHS]
    assert pooled_positions(batch, "cls").tolist() == [0, 0, 0, 0]
    assert (
        pooled_positions(batch, "mean") is pooled_positions(batch, "max") is pooled_positions(batch, "concat") is None
    )


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_masks_and_positions_of_the_batch_apply(positions):
    """Causal and bidirectional rows, packed documents, own positions and segments."""
    model, query_positions = small_model(positions=positions, segments=2), torch.tensor([2, 3, 6, 0])
    own = torch.arange(max(LENGTHS)).flip(0).expand(4, -1)
    kinds = (torch.arange(max(LENGTHS)) > 2).long().expand(4, -1)
    for fields in (
        {"causal": torch.tensor([True, False, False, True])},
        {"causal": False},
        {"document_ids": DOCUMENTS},
        {"document_ids": DOCUMENTS, "causal": False},
        {"positions": own},
        {"segments": kinds},
    ):
        batch = padded(**fields)
        close(vectors_at(model, batch, query_positions), model(batch).hidden[torch.arange(4), query_positions])


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(causal=True),
        AttentionMask(causal_mask(5, 5)),
        AttentionMask(~torch.eye(5).bool()[None, None]),
    ],
)
def test_the_mask_of_selected_queries(mask):
    query_positions = torch.tensor([0, 4, 2])
    table = mask.dense(5, 5).expand(3, 1, 5, 5)
    actual = mask.select_queries(query_positions, 5).dense(1, 5).expand(3, 1, 1, 5)
    assert torch.equal(actual[:, 0, 0], table[torch.arange(3), 0, query_positions])


def test_other_positions_are_not_computed():
    backbone, batch = small_backbone(causal=False), full_batch()
    assert backbone(batch, query_positions=torch.zeros(4, dtype=torch.long)).hidden.shape == (4, 1, 8)
    rows = []
    feed = backbone.blocks[-1].feed
    hook = feed.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[:2]))
    backbone(batch, query_positions=torch.zeros(4, dtype=torch.long))
    hook.remove()
    assert rows == [(4, 1)]


def test_hooks_observe_all_positions():
    model, batch, query_positions, shapes, records = small_model(), full_batch(), torch.tensor([3, 0, 6, 0]), [], []
    expected = vectors_at(model, batch, query_positions)
    hook = model.backbone.blocks[-1].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    close(vectors_at(model, batch, query_positions), expected)
    hook.remove()
    with record_attention(model, records.append):
        close(vectors_at(model, batch, query_positions), expected)
    assert shapes == [(4, 9, 8)]
    assert [record.weights.shape for record in records] == [(4, 2, 9, 9)] * 2


def test_states_and_layers_need_all_positions():
    backbone, positions = small_backbone(), torch.zeros(4, dtype=torch.long)
    with pytest.raises(AssertionError):
        backbone(full_batch(), keep_layers=True, query_positions=positions)
    with pytest.raises(AssertionError):
        backbone(full_batch(), backbone.new_state(4, 9), query_positions=positions)


def test_with_cross_attention():
    backbone, batch, memory = small_backbone(cross=True), padded(), torch.randn(4, 5, 8)
    query_positions = torch.tensor([3, 0, 6, 0])
    all_hidden = backbone(batch, memory=memory).hidden[torch.arange(4), query_positions]
    for module in (backbone, strip_modules(backbone)):
        close(module(batch, query_positions=query_positions, memory=memory).hidden[:, 0], all_hidden)


@pytest.mark.parametrize("family", ["recurrent", "elmo"])
def test_families_without_support_agree(family):
    from headstock.model.backbone import BACKBONES

    backbone_class = BACKBONES.get(family)
    backbone = backbone_class(backbone_class.Config(vocabulary=13, depth=1, width=8, hidden=8)).eval()
    model, batch = Model(backbone, {}), padded()
    assert not backbone.supports_query_positions
    for pooling in ("cls", "last"):
        actual = vectors_at(model, batch, pooled_positions(batch, pooling))
        close(actual, pool(model(batch).hidden, batch.padding, pooling))


def test_gradients_agree():
    with torch.inference_mode(False), torch.enable_grad():
        model, query_positions = small_model(positions="rotary"), torch.tensor([3, 0, 6, 0])
        gradients = []
        for make in (
            lambda: vectors_at(model, padded(), query_positions),
            lambda: model(padded()).hidden[torch.arange(4), query_positions],
        ):
            model.zero_grad()
            make().square().sum().backward()
            gradients.append(model.backbone.tokens.weight.grad.clone())
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
