"""A model's own arithmetic without the machinery of modules around it.

To read one token, calling modules and looking up their weights takes longer than the sums. A light twin has the same
methods, taken from the same classes, but its parts and weights are plain attributes and its layers plain functions. So
nothing is written twice, and a decoding step costs about half. It is made for one use: it does not notice when weights
are replaced, and nothing can hook into it.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def light(module: nn.Module) -> Any:
    """A twin that gives what calling the module gives; the module itself where somebody listens to its parts."""
    return module if listened(module) else _twin(module)


def listened(module: nn.Module) -> bool:
    """Whether somebody listens to its parts, or watches what attention does."""
    parts = module.modules()
    return any(part._forward_hooks or part._forward_pre_hooks or getattr(part, "hook", None) for part in parts)


def _twin(module: nn.Module) -> Any:
    if isinstance(module, nn.ModuleList):
        return [_twin(part) for part in module]
    if isinstance(module, nn.Linear):
        return _bare(module, F.linear, weight=module.weight, bias=module.bias)
    if isinstance(module, nn.LayerNorm):
        own: dict[str, Any] = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
        return _bare(module, torch.layer_norm, normalized_shape=module.normalized_shape, **own)
    if type(module).__module__.startswith("torch."):
        return module
    twin = _plain(type(module))()  # type: ignore[arg-type]
    vars(twin).update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    vars(twin).update(module._parameters | module._buffers)
    vars(twin).update({name: None if part is None else _twin(part) for name, part in module._modules.items()})
    return twin


def _bare(module: nn.Module, function: Any, **given: Any) -> Any:
    """A layer as the one function it calls; its weights can still be asked for."""
    bare = partial(function, **given)
    vars(bare).update({name: given[name] for name in module._parameters})
    return bare


@cache
def _plain(cls: type) -> type:
    """A class with the methods of a module class, its forward as its call, and nothing of nn.Module."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not nn.Module.__mro__.count(base):
            methods |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    return type(f"Light{cls.__name__}", (), methods | {"__call__": methods["forward"]})
