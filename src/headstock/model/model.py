"""A backbone with its heads."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headstock.errors import UserError
from headstock.kernels.bare_modules import has_hooks
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.layers import select_positions


class Model(nn.Module):
    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)

    def forward(
        self,
        batch: Batch,
        state: DecodingState | None = None,
        *,
        keep_layers: bool = False,
        query_positions: Tensor | None = None,
    ) -> Output:
        """The output of the backbone; with `query_positions` (B,) only one position per row: hidden is (B, 1, D).

        The last layer then skips the other positions if the backbone supports it and has no hooks to observe them.
        """
        if query_positions is None:
            return self.backbone(batch, state, keep_layers=keep_layers)
        assert state is None and not keep_layers, "query_positions drop what states and layers need"
        if self.backbone.supports_query_positions and not has_hooks(self.backbone):
            return self.backbone(batch, query_positions=query_positions)
        return Output(select_positions(self.backbone(batch).hidden, query_positions))

    def with_heads(self, heads: Mapping[str, nn.Module]) -> "Model":
        """A model of the same backbone with other heads."""
        return Model(self.backbone, heads)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of `base`, each head, and in `total`; shared parameters count where they come first."""
        counted = {id(p): p.numel() for p in self.backbone.parameters()}
        counts = {"base": sum(counted.values())}
        for name, head in self.heads.items():
            own = {id(p): p.numel() for p in head.parameters() if id(p) not in counted}
            counts[name] = sum(own.values())
            counted |= own
        return counts | {"total": sum(counts.values())}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, shared ones once: the contents of a weights file."""
        parameters = {name: parameter.detach() for name, parameter in self.named_parameters()}
        persistent = self.state_dict()
        return parameters | {name: persistent[name] for name, _ in self.named_buffers() if name in persistent}

    def load_backbone(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Copy the backbone of another model; the heads keep their weights."""
        heads = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("backbone.")}
        backbone = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
        self.load_tensors(heads | backbone, source=source)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Copy weights into the model; all names and shapes must match."""
        own = self.tensors()
        self.check_shapes({name: tensor.shape for name, tensor in tensors.items()}, source=source)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def check_shapes(self, shapes: Mapping[str, torch.Size], *, source: str) -> None:
        """Raise a UserError that lists all tensors whose names or shapes do not match the model's."""
        own = {name: tensor.shape for name, tensor in self.tensors().items()}
        problems = [f"{name} is missing" for name in own if name not in shapes]
        problems += [f"{name} is unknown" for name in shapes if name not in own]
        problems += [
            f"{name} has shape {tuple(shapes[name])}, expected {tuple(own[name])}"
            for name in own
            if name in shapes and shapes[name] != own[name]
        ]
        if problems:
            raise UserError(f"{source} does not fit this model: {'; '.join(problems)}")
