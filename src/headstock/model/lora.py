"""LoRA: low-rank adapters of frozen matrices, W + (alpha / r) B A (Hu et al., 2021).

N outputs, K inputs, r rank: W is (N, K), A (r, K), B (N, r). Only A, B and the heads are trained. B starts at zero, so
that training starts from the pretrained model exactly. Afterwards the product is added to W, which costs nothing.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.layers import Linear
from headstock.model.model import Model
from headstock.rng import derive_seed

Targets = Literal["attention", "all-linear"]
TARGET_MODULES = {"attention", "cross", "cells"}  # of `attention`: projections, or the matrices of recurrent cells


@dataclass(frozen=True)
class LoRAConfig:
    rank: int
    alpha: float
    dropout: float
    targets: Targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LowRankUpdate(nn.Module):
    """A parametrization of a weight: W -> W + scale B A.

    Dropout drops input features of A, with one mask per forward pass, which also works for recurrent cells.
    """

    def __init__(self, weight: Tensor, config: LoRAConfig):
        super().__init__()
        outputs, inputs = weight.shape
        self.scale, self.dropout = config.scale, config.dropout
        self.lora_A = nn.Parameter(weight.new_empty(config.rank, inputs))
        self.lora_B = nn.Parameter(weight.new_zeros(outputs, config.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # the default of nn.Linear

    def down(self) -> Tensor:
        """A, with dropout while training."""
        if not self.training or not self.dropout:
            return self.lora_A
        return self.lora_A * F.dropout(self.lora_A.new_ones(self.lora_A.size(1)), self.dropout)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.lora_B @ (self.scale * self.down())

    def project(self, x: Tensor) -> Tensor:
        """scale B A x: (..., K) -> (..., N)."""
        return F.linear(self.scale * F.linear(x, self.down()), self.lora_B)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter beside it: x W' + scale x A' B'.

    Its `weight` is the sum, for code that reads it. The forward pass does not form it: that would need its gradient,
    a product as large as that of full fine-tuning.
    """

    parametrizations: Any

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.parametrizations.weight
        return F.linear(x, adapter.original, self.bias) + adapter[0].project(x)


@dataclass(frozen=True)
class Matrix:
    """A matrix of the backbone that can have an adapter."""

    module: nn.Module
    name: str  # of the tensor in the module
    path: str  # of the tensor in the model

    @property
    def shape(self) -> torch.Size:
        return getattr(self.module, self.name).shape


def is_target(path: str, targets: Targets) -> bool:
    """Whether a matrix gets an adapter, by its name in the model."""
    return targets == "all-linear" or not TARGET_MODULES.isdisjoint(path.split("."))


def target_matrices(backbone: Backbone, targets: Targets) -> list[Matrix]:
    """Weights of linear layers and recurrent cells."""

    def matrices() -> Iterator[Matrix]:
        for module_path, module in backbone.named_modules(prefix="backbone"):
            if isinstance(module, nn.Linear | nn.RNNBase):
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.dim() == 2:
                        yield Matrix(module, name, f"{module_path}.{name}")

    return [matrix for matrix in matrices() if is_target(matrix.path, targets)]


def check_lora(backbone: Backbone, config: LoRAConfig) -> None:
    """Reject a model without matrices to adapt, and a rank that is not low."""
    matrices = target_matrices(backbone, config.targets)
    if not matrices:
        hint = "use lora_targets=all-linear" if config.targets != "all-linear" else "train the head alone with --freeze"
        raise UserError(f"transfer.lora: this model has no {config.targets} layers to adapt; {hint}")
    smallest = min(matrices, key=lambda matrix: min(matrix.shape))
    if config.rank >= min(smallest.shape):
        rows, columns = smallest.shape
        raise UserError(
            f"transfer.lora: rank {config.rank} is not low for {smallest.path} ({rows} x {columns}); "
            f"choose at most {min(smallest.shape) - 1}, or leave out --lora to train all weights"
        )


class LoRAModel(Model):
    """A model of which adapters and heads are trained; its tensors, and so its checkpoints, are these alone.

    Modules of `model` are changed in place until `merge`. A head that shares the embedding stays as it is.
    """

    def __init__(self, model: Model, config: LoRAConfig, *, seed: int):
        super().__init__(model.backbone, dict(model.heads.items()))
        self.matrices = target_matrices(model.backbone, config.targets)
        self.classes = {id(matrix.module): type(matrix.module) for matrix in self.matrices}
        self.orders = {id(matrix.module): list(matrix.module._parameters) for matrix in self.matrices}
        shared = {id(parameter) for parameter in self.backbone.parameters()}
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) not in shared)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "lora"))
            for matrix in self.matrices:
                if type(matrix.module) in (nn.Linear, Linear):
                    matrix.module.__class__ = LoRALinear
                update = LowRankUpdate(getattr(matrix.module, matrix.name), config)
                parametrize.register_parametrization(matrix.module, matrix.name, update)

    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors: `PATH.lora_A` and `PATH.lora_B` for each adapted matrix, and the heads."""
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {adapter_name(name): parameter.detach() for name, parameter in trained.items()}

    def merge(self) -> None:
        """Add the adapters to the weights; the model's modules are then as they were before."""
        self.eval()  # without dropout
        for matrix in self.matrices:
            parametrize.remove_parametrizations(matrix.module, matrix.name, leave_parametrized=True)
        for module in {id(matrix.module): matrix.module for matrix in self.matrices}.values():
            module.__class__ = self.classes[id(module)]
            module._parameters = {name: module._parameters[name] for name in self.orders[id(module)]}
        self.requires_grad_(True)


def adapter_name(name: str) -> str:
    """`PATH.parametrizations.weight.0.lora_A` -> `PATH.weight.lora_A`."""
    module, parametrized, rest = name.partition(".parametrizations.")
    return f"{module}.{rest.replace('.0.', '.', 1)}" if parametrized else name


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def replace_adapter(
    weights: Mapping[str, Tensor], old: Mapping[str, Tensor], new: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Merged weights with the adapters and heads of `new` instead of those of `old`, such as of another checkpoint."""
    result = {**weights, **{name: tensor for name, tensor in new.items() if not is_adapter(name)}}
    for name in (name.removesuffix(".lora_A") for name in new if name.endswith(".lora_A")):
        before, after = ((tensors[f"{name}.lora_B"], tensors[f"{name}.lora_A"]) for tensors in (old, new))
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            result[name] = weights[name] + scale * (after[0] @ after[1] - before[0] @ before[1])
    return result
