"""The cost of a module without a closed form, counted on the module itself.

Parameters are counted tensor by tensor. FLOPs and saved activations are measured in one forward pass of a single row,
on the meta device where the module can run there: no values are computed and no memory is allocated.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headstock.cost.formulas import ModuleCost, SavedActivations
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch
from headstock.model.generator import Generator

Forward = Callable[[nn.Module, str], Any]  # runs a module on one row on a device
# FLOPs and saved values by the numbers of tokens: a summary asks for the same costs several times
_measurements: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], tuple[int, int]]] = WeakKeyDictionary()


def measured_note(names: Sequence[str]) -> str:
    """What to know about the cost of the modules `names`."""
    return (
        f"There is no closed form for {', '.join(names)}: its parameters are counted, and its FLOPs and activations "
        "are measured in a forward pass on the meta device (torch.utils.flop_counter)."
    )


def measured_backbone(backbone: Backbone, length: int, source_length: int) -> ModuleCost:
    """Parameters by module, FLOPs and saved activations per token of a row of `length` tokens."""

    def forward(module: nn.Module, device: str) -> Any:
        source = None
        if backbone.is_encoder_decoder:
            source = Batch(torch.zeros(1, source_length, dtype=torch.long, device=device))
        return module(Batch(torch.zeros(1, length, dtype=torch.long, device=device), source=source)).hidden

    return _measured("backbone", backbone, forward, tokens=(length, source_length), counted=set())


def measured_head(head: nn.Module, backbone: Backbone) -> ModuleCost:
    """The same for one token; parameters of the backbone, such as tied embeddings, are not counted again."""

    def forward(module: nn.Module, device: str) -> Any:
        return module(torch.zeros(1, backbone.width, device=device, requires_grad=True))

    return _measured("head", head, forward, tokens=(1,), counted={id(parameter) for parameter in backbone.parameters()})


def measured_generator(generator: Generator, backbone: Backbone, length: int) -> ModuleCost:
    """The same for the generator of ELECTRA, which reads the tokens of a row itself."""

    def forward(module: nn.Module, device: str) -> Any:
        return module(Batch(torch.zeros(1, length, dtype=torch.long, device=device))).hidden

    shared = {id(parameter) for parameter in backbone.parameters()}
    return _measured("generator", generator, forward, tokens=(length,), counted=shared)


def _measured(
    name: str, module: nn.Module, forward: Forward, *, tokens: tuple[int, ...], counted: set[int]
) -> ModuleCost:
    known = _measurements.setdefault(module, {})
    if tokens not in known:
        try:
            known[tokens] = _run(module, forward, "meta")
        except (RuntimeError, NotImplementedError):  # it looks at values, which meta tensors do not have
            known[tokens] = _run(module, forward, "cpu")
    flops, saved = known[tokens]
    tree = _parameters(name, module, counted)
    return replace(tree, flops=flops / tokens[0], saved=SavedActivations(saved / tokens[0]), measured=True)


def _run(module: nn.Module, forward: Forward, device: str) -> tuple[int, int]:
    """FLOPs and the number of saved values, without the parameters themselves.

    Attention runs unfused, since the counter does not know every fused kernel; so its weights count as saved.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module = _copy(module, device).train()
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}  # by storage: a view, such as a transposed weight, takes no memory of its own

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            saved[storage] = tensor
        return tensor

    counter, hooks = FlopCounterMode(display=False), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter, hooks:
        forward(module, device)
    sizes = (tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in saved.values())
    return counter.get_total_flops(), sum(sizes)


def _copy(module: nn.Module, device: str) -> nn.Module:
    """A copy on a device. Parameters without values, of a model that is only described, become zeros."""
    if device == "meta" or not any(parameter.is_meta for parameter in module.parameters()):
        return copy.deepcopy(module).to(device)
    empty = copy.deepcopy(module).to_empty(device=device)
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.zero_()
    return empty


def _parameters(name: str, module: nn.Module, counted: set[int]) -> ModuleCost:
    """A module's parameters and buffers as numbers, a shared one where it comes first."""
    shapes = {}
    for key, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in counted:
            counted.add(id(parameter))
            shapes[key] = tuple(parameter.shape)
    buffers = {key: tuple(buffer.shape) for key, buffer in module.named_buffers(recurse=False)}
    parts = tuple(_parameters(key, part, counted) for key, part in module.named_children())
    return ModuleCost(name, shapes, buffers, parts=parts, is_embedding=isinstance(module, nn.Embedding))
