"""Activation checkpointing: recomputes a block's activations in the backward pass instead of keeping them."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from headstock.errors import UserError
from headstock.model.layers import Block
from headstock.model.model import Model


def checkpoint_blocks(model: Model) -> None:
    """Keep only the input of each Transformer block between the forward and the backward pass, in place.

    The recomputation has the dropout masks and the autocast precision of the forward pass, so gradients are the same.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise UserError(
            f"train.activation_checkpointing: a {model.backbone.name} model has no Transformer blocks to recompute"
        )
    for block in blocks:
        # an attribute of the instance: parameters keep their names, and FSDP's hooks stay outside
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def restore_blocks(model: Model) -> None:
    """Undo `checkpoint_blocks`."""
    for module in model.modules():
        if isinstance(module, Block):
            module.__dict__.pop("forward", None)
