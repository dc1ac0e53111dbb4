"""The recorded points of the residual stream, and models without skip connections."""

import pytest
import torch
from torch import nn

from headstock.errors import UserError
from headstock.explain.hooks import need_block_stacks, record_activations, without_residuals
from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.model.small import SIZES, small_model, some_tokens, stir


def seq2seq() -> Model:
    torch.manual_seed(0)
    backbone = EncoderDecoder(EncoderDecoderConfig(**(SIZES | {"encoder_depth": 3})))
    stir(backbone)
    return Model(backbone, {"token": LMHead(backbone)}).eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_points_match_a_plain_forward_pass(norm):
    model = small_model(norm=norm).double()
    batch = Batch(some_tokens(2, 7))
    with record_activations(model) as activations:
        output = model(batch, keep_layers=True)
    assert [(p.layer, p.name) for p in activations.points("stack")] == [
        (1, "resid_pre"),
        *[(layer, name) for layer in (1, 2) for name in ("resid_mid", "resid_post")],
    ]
    for layer in (1, 2):
        assert torch.equal(activations.point("stack", layer, "resid_pre"), output.layers[layer - 1])
        assert torch.equal(activations.point("stack", layer, "resid_post"), output.layers[layer])
        block = model.backbone.blocks[layer - 1]
        before, attention, around = output.layers[layer - 1], block.attention, block.around_attention
        normed = before if norm == "post" else around.norm(before)
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in attention.inputs(normed).chunk(3, -1)
        )
        scores = query @ key.mT / key.size(-1) ** 0.5
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        mid = before + attention.output((scores @ value).transpose(1, 2).flatten(2))
        mid = around.norm(mid) if norm == "post" else mid
        torch.testing.assert_close(activations.point("stack", layer, "resid_mid"), mid)
    with pytest.raises(KeyError):
        activations.point("stack", 1, "resid_cross")


@torch.no_grad()
def test_encoder_decoder_has_two_streams_and_resid_cross():
    model = seq2seq()
    batch = Batch(some_tokens(1, 5), source=Batch(some_tokens(1, 6, seed=2)))
    plain = model(batch).hidden
    with record_activations(model) as activations:
        recorded = model(batch).hidden
    assert torch.equal(plain, recorded)
    assert len(activations.points("encoder")) == 1 + 2 * 3 and len(activations.points("decoder")) == 1 + 3 * 2
    assert activations.point("encoder", 3, "resid_post").shape == (1, 6, 8)
    cross, mid = activations.point("decoder", 2, "resid_cross"), activations.point("decoder", 2, "resid_mid")
    assert cross.shape == (1, 5, 8) and not torch.allclose(cross, mid)
    block = model.backbone.decoder.blocks[1]
    torch.testing.assert_close(
        cross + block.feed(block.around_feed.norm(cross)), activations.point("decoder", 2, "resid_post")
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_recording_changes_nothing_and_removes_its_hooks(norm):
    model, batch = small_model(norm=norm), Batch(some_tokens(2, 7))

    def gradients():
        model.zero_grad()
        loss = model.heads["token"](model(batch).hidden).logsumexp(-1).sum()
        loss.backward()
        return [
            loss.detach(),
            *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
        ]

    plain = gradients()
    with record_activations(model):
        recorded = gradients()
    with pytest.raises(RuntimeError), record_activations(model):
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_recurrent_backbone_has_no_residual_stream():
    backbone = Recurrent(RecurrentConfig(13, width=8, hidden=8))
    with pytest.raises(UserError, match=r"tiny: its recurrent backbone has no residual stream .*seq2seq, transformer"):
        need_block_stacks(backbone, "tiny")


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_residuals_keeps_the_weights_and_drops_the_skip(norm):
    model, batch = small_model(norm=norm).double(), Batch(some_tokens(2, 7))
    without_skip, without_gradient = without_residuals(model), without_residuals(model, "skip-gradient")
    with record_activations(without_skip) as activations, torch.no_grad():
        without_skip(batch)
    for connection in activations.connections:
        added = connection.added()
        torch.testing.assert_close(connection.output, connection.residual.norm(added) if norm == "post" else added)
    assert torch.equal(without_gradient(batch).hidden, model(batch).hidden)  # only the backward pass differs
    assert not torch.allclose(without_skip(batch).hidden, model(batch).hidden)
    for variant in (without_skip, without_gradient):  # also where only some positions are computed
        torch.testing.assert_close(
            variant(batch, query_positions=torch.tensor([3, 6])).hidden.squeeze(1),
            variant(batch).hidden[[0, 1], [3, 6]],
        )
    original, ablated = dict(model.named_parameters()), dict(without_skip.named_parameters())
    assert original.keys() == ablated.keys()
    assert all(torch.equal(original[name], ablated[name]) and original[name] is not ablated[name] for name in original)
    assert all(type(module).__name__ != "WithoutSkip" for module in model.modules() if isinstance(module, nn.Module))
