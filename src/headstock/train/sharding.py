"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer states are split over the processes.

A block's weights are gathered when it runs and freed afterwards, so that each process holds 1/N of everything beside
the activations. Sharded tensors are DTensors; files always contain whole ones, so that any number of processes can
load them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstock.model.layers import Block

# torch.distributed.fsdp and .tensor are imported where they are used: that takes most of a second


def shard_module(
    module: nn.Module,
    device: torch.device,
    processes: int,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard a module in place: each Transformer block by itself, the rest (embeddings, heads) as one more group.

    Only calls of `module` itself, or of a module inside such a call, gather the weights. Shards keep their dtype; with
    `dtype`, they are gathered and used in it. Gradients are summed over the processes in `reduce_dtype` (None: that of
    the computation). With `cpu_offload`, shards lie in main memory while they are not in use, and so do gradients and
    optimizer states.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    # autocast decides in which dtype each operation runs: rotary angles, for example, stay in float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for part in module.modules():
        if isinstance(part, Block) and part.cross is None:  # a decoder reads weights of cross-attention from outside
            shard(part)
    shard(module)


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
    """A full tensor as a DTensor like `like`, with this process's rows of it. Nothing is communicated."""
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    sharded: Any = torch.empty_like(like, dtype=tensor.dtype)
    local, mesh = sharded.to_local(), sharded.device_mesh
    start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())  # as torch.chunk: the last shards may be smaller
    local.copy_(tensor[start : start + len(local)])
    return sharded


def shard_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors as DTensors like those of the same names; names that `like` lacks stay, for the caller to report."""
    with torch.no_grad():
        return {name: shard_like(t, like[name]) if name in like else t for name, t in tensors.items()}
