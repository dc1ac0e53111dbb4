"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer states are split over the processes.

A block's weights are gathered when it runs and freed afterwards, so that each process holds 1/N of everything beside
the activations. Sharded tensors are DTensors; files always contain whole ones, so that any number of processes can
load them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.layers import Block

# torch.distributed.fsdp and .tensor are imported where they are used: that takes most of a second


def shard_module(module: nn.Module, device: torch.device, processes: int) -> None:
    """Shard a module in place: each Transformer block by itself, the rest (embeddings, heads) as one more group.

    Only calls of `module` itself, or of a module inside such a call, gather the weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    for part in module.modules():
        if isinstance(part, Block) and part.cross is None:  # a decoder reads weights of cross-attention from outside
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def without_gradient_sync(module: Any) -> Iterator[None]:
    """Add up gradients locally: only the last micro-batch of a step reduces them."""
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def reshard(module: nn.Module) -> None:
    """Free the gathered weights that a forward pass without a backward pass leaves behind."""
    for part in module.modules():
        if is_sharded(part):
            part.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, gathered from all processes: every one of them must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: full_tensor(tensor) for name, tensor in tensors.items()}


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor as a DTensor with the placements of `like`. Nothing is communicated."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    replicated = DTensor.from_local(tensor.to(like.device), like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements)


def shard_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors as DTensors like those of the same names; names that `like` lacks stay, for the caller to report."""
    with torch.no_grad():
        return {name: shard_like(t, like[name]) if name in like else t for name, t in tensors.items()}
