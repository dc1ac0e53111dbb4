"""A backbone with the heads grafted onto it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, Output, State


class Model(nn.Module):
    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)

    def forward(self, batch: Batch, state: State | None = None, *, keep_layers: bool = False) -> Output:
        return self.backbone(batch, state, keep_layers=keep_layers)

    def with_heads(self, heads: Mapping[str, nn.Module]) -> "Model":
        """The same backbone, the same weights, other heads."""
        return Model(self.backbone, heads)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def sizes(self) -> dict[str, int]:
        """Parameters by part; what is shared is counted once, where it comes first."""
        counted = {id(p): p.numel() for p in self.backbone.parameters()}
        sizes = {"base": sum(counted.values())}
        for name, head in self.heads.items():
            own = {id(p): p.numel() for p in head.parameters() if id(p) not in counted}
            sizes[name] = sum(own.values())
            counted |= own
        return sizes | {"total": sum(sizes.values())}

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer by name, a shared one once: what a weights file holds."""
        kept = {name: parameter.detach() for name, parameter in self.named_parameters()}
        saved = self.state_dict()
        return kept | {name: saved[name] for name, _ in self.named_buffers() if name in saved}

    def load_backbone(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Take over another model's backbone; the heads stay as they are."""
        mine = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("backbone.")}
        theirs = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
        self.load_tensors(mine | theirs, source=source)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Take over weights; every name and shape must agree, and all that do not are named together."""
        mine = self.tensors()
        problems = [f"{name} is missing" for name in mine if name not in tensors]
        problems += [f"{name} is unknown" for name in tensors if name not in mine]
        problems += [
            f"{name} has shape {tuple(tensors[name].shape)}, wanted {tuple(mine[name].shape)}"
            for name in mine
            if name in tensors and tensors[name].shape != mine[name].shape
        ]
        if problems:
            raise UserError(f"{source} does not fit this model: {'; '.join(problems)}")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(tensors[name])
