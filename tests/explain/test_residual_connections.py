"""Recorded residual connections, and models without skip connections."""

import pytest
import torch
from torch import nn

from headstock.errors import UserError
from headstock.explain.hooks import need_block_stacks, run_with_cache
from headstock.explain.residual_connections import record_activations, without_residuals
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


@torch.no_grad()
def test_connections_are_recorded_with_what_they_add():
    model = seq2seq()
    with record_activations(model) as activations:
        _, cache = run_with_cache(model, Batch(some_tokens(1, 5), source=Batch(some_tokens(1, 6, seed=2))))
    assert len(activations.points("encoder")) == 1 + 2 * 3 and len(activations.points("decoder")) == 1 + 3 * 2
    for connection in activations.connections:
        name = f"{connection.stack}.blocks.{connection.layer - 1}.{connection.sublayer}.output"
        torch.testing.assert_close(connection.added(), cache[name])
        torch.testing.assert_close(connection.output, connection.input + cache[name])


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
