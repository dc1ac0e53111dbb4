"""AdamW, Muon, the learning-rate schedule, and the exponential moving average of the weights."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from headstock.model.backbone import Backbone
from headstock.model.layers import Attention
from headstock.model.model import Model
from headstock.train.settings import TrainSettings
from headstock.train.sharding import full_tensor, shard_like


class Muon(Optimizer):
    """Momentum SGD whose updates are orthogonalized (Jordan et al. 2024).

    torch.optim.Muon orthogonalizes in bfloat16 on every device, which is hundreds of times slower on CPUs without
    bfloat16 units; here the precision follows the device. Updates are scaled to those of AdamW, so that both share
    one learning rate.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Orthogonalize matrices of one shape together, and the `parts` of a stacked matrix separately.

        Sharded matrices are gathered for it: every process computes all updates and applies its own rows.
        """
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        by_shape: dict[torch.Size, dict[nn.Parameter, Tensor]] = {}
        for group, matrices in groups:
            for matrix, update in zip(matrices, self.momentum_updates(matrices, group["momentum"]), strict=True):
                stack = full_tensor(update).unflatten(0, (group["parts"], -1))  # (parts, rows, columns)
                by_shape.setdefault(stack.shape[1:], {})[matrix] = stack
        updates: dict[nn.Parameter, Tensor] = {}
        for (rows, columns), stacks in by_shape.items():
            size = 0.2 * math.sqrt(max(rows, columns))  # the typical root mean square of an AdamW update
            orthogonalized = (
                orthogonal(torch.cat([*stacks.values()])).to(next(iter(stacks)).dtype) * size
            ).contiguous()
            for matrix, update in zip(
                stacks, orthogonalized.split([len(stack) for stack in stacks.values()]), strict=True
            ):
                updates[matrix] = shard_like(update.flatten(0, 1), matrix)
        for group, matrices in groups:
            if matrices:
                apply([*matrices], [updates[matrix] for matrix in matrices], group["lr"], group["weight_decay"])

    def momentum_updates(self, matrices: list[nn.Parameter], momentum: float) -> Sequence[Tensor]:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        if not matrices:
            return []
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        gradients: list[Tensor] = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        return torch._foreach_lerp(gradients, momenta, momentum)  # Nesterov momentum


def apply(matrices: list[Tensor], updates: list[Tensor], rate: float | Tensor, decay: float) -> None:
    torch._foreach_mul_(matrices, 1 - rate * decay)
    if isinstance(rate, Tensor):  # CUDA graphs read the learning rate from the device
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(matrices, updates)
    else:
        torch._foreach_add_(matrices, updates, alpha=-rate)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with singular values near one, by Newton-Schulz iteration. (N, rows, columns)."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        both = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, both, x, beta=3.4445)
    return x.mT if tall else x


def update_weights(optimizers: Sequence[Optimizer], clip: float | None, *, to_none: bool) -> Tensor:
    """Clip the gradients, update the weights, clear the gradients; returns the gradient norm before clipping.

    On a CPU, gradients that are not finite leave weights and optimizer states unchanged. On a GPU that would need a
    synchronization: there the loop notices one step later, before anything is saved.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradient = full_tensor(nn.utils.clip_grad_norm_(parameters, clip or math.inf))
    if gradient.device.type == "cpu" and not math.isfinite(gradient):
        return gradient
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(to_none)
    return gradient


def make_optimizers(model: Model, settings: TrainSettings) -> list[Optimizer]:
    """The optimizers of a model, with every trainable parameter in exactly one; only matrices have weight decay.

    The `scale` of a parameter group multiplies the learning rate; `layer_decay` makes it smaller for lower layers.
    """
    trainable = {id(p): p for p in model.parameters() if p.requires_grad}
    optimizers: list[Optimizer] = []
    if settings.optimizer == "muon":
        parts = parts_of(model)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        networks = [module for module in model.modules() if isinstance(module, Backbone)]
        two_dimensional = {id(p): p for network in networks for p in network.parameters() if p.dim() == 2}
        inner = [p for key, p in two_dimensional.items() if key in trainable and key not in tables]
        groups = [
            group
            for count in sorted({parts.get(id(p), 1) for p in inner})
            for group in by_depth([p for p in inner if parts.get(id(p), 1) == count], model, settings, parts=count)
        ]
        if groups:
            muon = Muon(groups, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)  # type: ignore[arg-type]
            optimizers.append(muon)
        for parameter in inner:
            del trainable[id(parameter)]
    matrices = [p for p in trainable.values() if p.dim() >= 2]
    vectors = [p for p in trainable.values() if p.dim() < 2]
    adam_groups = [
        *by_depth(matrices, model, settings, weight_decay=settings.weight_decay),
        *by_depth(vectors, model, settings, weight_decay=0.0),
    ]
    if adam_groups:
        optimizers.append(AdamW(adam_groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True))
    return optimizers


def parts_of(model: Model) -> dict[int, int]:
    """The number of matrices stacked in a parameter: query, key and value, or the gates of a recurrent cell."""
    parts = {id(m.inputs.weight): 3 for m in model.modules() if isinstance(m, Attention)}
    cells = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    return parts | {id(p): len(p) // m.hidden_size for m in cells for p in m.parameters() if p.dim() == 2}


def by_depth(
    parameters: list[nn.Parameter], model: Model, settings: TrainSettings, **options: float
) -> list[dict[str, Any]]:
    """Parameter groups by learning rate: that of the heads, times the decay for each layer below them."""
    stages = model.backbone.parameters_by_layer()
    depth = {id(p): len(stages) - index for index, stage in enumerate(stages) for p in stage}
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(settings.layer_decay ** depth.get(id(parameter), 0), []).append(parameter)
    return [{"params": group, "scale": scale, **options} for scale, group in groups.items()]


def lr_factor(done: float, settings: TrainSettings) -> float:
    """The factor on the learning rate when the fraction `done` of the run is complete."""
    if done < settings.warmup:
        return done / settings.warmup
    if settings.schedule == "range_test":  # rises exponentially from lr_floor to 1, for `headstock lr-find`
        return max(1e-12, settings.lr_floor) ** (1 - done)
    remaining = 1 - (done - settings.warmup) / max(1e-9, 1 - settings.warmup)
    fall = {
        "constant": 1.0,
        "linear": remaining,
        "cosine": 0.5 * (1 + math.cos(math.pi * (1 - remaining))),
        "trapezoid": min(1.0, (1 - done) / max(1e-9, settings.cooldown)),
        "inverse_sqrt": math.sqrt(settings.warmup / max(1e-9, done)),  # Vaswani et al. (2017)
    }[settings.schedule]
    return settings.lr_floor + (1 - settings.lr_floor) * max(0.0, fall)


class EMA:
    """Exponential moving average of the weights, with a smaller decay in early steps."""

    def __init__(self, model: Model, decay: float):
        self.decay, self.steps = decay, 0
        self.source = model.tensors()
        self.tensors = {name: tensor.clone() for name, tensor in self.source.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (10 + self.steps))
        names = [name for name, tensor in self.source.items() if tensor.is_floating_point()]
        averages, weights = ([tensors[name] for name in names] for tensors in (self.tensors, self.source))
        torch._foreach_lerp_(averages, weights, 1 - decay)
