"""Activation checkpointing: the same losses and weights from less memory."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import headstock
from headstock.errors import UserError
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.model import Model
from headstock.train.activation_checkpointing import checkpoint_blocks, restore_blocks
from headstock.train.run_folder import RunFolder
from headstock.train.settings import TrainSettings
from headstock.train.step import LossModule
from tests.model.small import small_model
from tests.train.test_graphed_step import NextToken, texts


def gradients_and_saved(model):
    """The gradients of a batch, and the bytes of activations that the forward pass keeps for the backward pass."""
    storages, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(0)
    module = LossModule(model.train(), NextToken(), smoothing=0.0)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(texts(5, 9))["token"]
    saved = sum(storages.values())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, saved


def test_gradients_are_the_same_from_less_memory():
    plain = small_model(width=32, depth=4, dropout=0.1)
    model = copy.deepcopy(plain)
    checkpoint_blocks(model)
    expected, kept = gradients_and_saved(plain)
    gradients, kept_less = gradients_and_saved(model)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)  # the same dropout masks, too
    assert kept_less < kept / 2
    restore_blocks(model)
    model.zero_grad()
    assert gradients_and_saved(model)[1] == kept


def test_a_run_is_the_same_with_it(corpus, tmp_path, tiny):
    runs = []
    for name, on in (("plain", False), ("checkpointed", True)):
        settings = tiny | {"dropout": 0.1, "activation_checkpointing": on}
        headstock.pretrain(corpus, out=tmp_path / name, settings=settings, device="cpu")
        runs.append(RunFolder(tmp_path / name))
    plain, checkpointed = (run.weights() for run in runs)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_what_cannot_be_recomputed_is_refused():
    for conflict in ({"compile": "replay"}, {"compile": "both"}, {"dtype": "float8"}):
        with pytest.raises(UserError, match="activation_checkpointing"):
            TrainSettings(activation_checkpointing=True, **conflict)
    lstm = Model(Recurrent(RecurrentConfig(vocabulary=13, depth=1, width=8, hidden=8)), {})
    with pytest.raises(UserError, match="no Transformer blocks"):
        checkpoint_blocks(lstm)
