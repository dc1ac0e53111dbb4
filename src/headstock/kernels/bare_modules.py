"""Copies of modules without nn.Module's call overhead, for decoding one token at a time.

When a step processes one token, module calls and attribute lookups take longer than the arithmetic. A bare copy runs
the same methods on plain attributes, and its Linear and LayerNorm layers are plain functions. Generating 64 tokens with
the gpt-nano preset on one CPU thread takes 0.103 s instead of 0.172 s. A copy does not notice replaced weights and has
no hooks, so it serves a single decoding run.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def strip_modules(module: nn.Module) -> Any:
    """A copy that computes what the module computes; the module itself if any part of it has hooks."""
    return module if has_hooks(module) else _copy(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether any submodule has forward hooks, or an attention layer an attention hook."""
    parts = module.modules()
    return any(part._forward_hooks or part._forward_pre_hooks or getattr(part, "hook", None) for part in parts)


def _copy(module: nn.Module) -> Any:
    if isinstance(module, nn.ModuleList):
        return [_copy(part) for part in module]
    if isinstance(module, nn.Linear):
        return _function(F.linear, weight=module.weight, bias=module.bias)
    if isinstance(module, nn.LayerNorm):
        arguments: dict[str, Any] = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
        return _function(torch.layer_norm, normalized_shape=module.normalized_shape, **arguments)
    if type(module).__module__.startswith("torch."):
        return module
    copy = _plain_class(type(module))()  # type: ignore[arg-type]
    vars(copy).update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    vars(copy).update(module._parameters | module._buffers)
    vars(copy).update({name: None if part is None else _copy(part) for name, part in module._modules.items()})
    return copy


def _function(function: Any, **arguments: Any) -> Any:
    """A layer as the one function it calls, with its parameters as attributes."""
    layer = partial(function, **arguments)
    vars(layer).update({name: arguments[name] for name in ("weight", "bias")})
    return layer


@cache
def _plain_class(cls: type) -> type:
    """A class with the methods of a module class and nothing of nn.Module; calling it calls `forward`."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not nn.Module.__mro__.count(base):
            methods |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    return type(f"Bare{cls.__name__}", (), methods | {"__call__": methods["forward"]})
