"""A backbone with the heads grafted onto it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from headstock.decoding.fast_modules import listened
from headstock.errors import UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, DecodingState, Output
from headstock.model.formulas import CPU, Dimensions, ExecutionContext, ModuleCost, Size
from headstock.model.heads import ClassificationHead
from headstock.model.layers import select_positions


class Model(nn.Module):
    def __init__(self, backbone: Backbone, heads: Mapping[str, nn.Module]):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)

    def forward(self, batch: Batch, state: DecodingState | None = None, *, keep_layers: bool = False) -> Output:
        return self.backbone(batch, state, keep_layers=keep_layers)

    def hidden_at(self, batch: Batch, places: Tensor) -> Tensor:
        """(B, D) the last layer's vector at one place of each row; what only other places need is not computed.

        For models that are not learning just now. Whoever listens to their parts is told of all places nonetheless.
        """
        if self.backbone.supports_query_positions and not listened(self.backbone):
            return self(replace(batch, query_positions=places)).hidden.squeeze(1)
        return select_positions(self(batch).hidden, places).squeeze(1)

    def with_heads(self, heads: Mapping[str, nn.Module]) -> "Model":
        """The same backbone, the same weights, other heads."""
        return Model(self.backbone, heads)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part; what is shared is counted once, where it comes first."""
        counted = {id(p): p.numel() for p in self.backbone.parameters()}
        sizes = {"base": sum(counted.values())}
        for name, head in self.heads.items():
            own = {id(p): p.numel() for p in head.parameters() if id(p) not in counted}
            sizes[name] = sum(own.values())
            counted |= own
        return sizes | {"total": sum(sizes.values())}

    def dimensions(self, *, length: int = 0, source_length: int | None = None) -> Dimensions:
        """Its sizes in numbers, for rows of `length` tokens; a source is as long unless told otherwise."""
        own = {name: value for name, value in vars(self.backbone.config).items() if name in vars(Dimensions(0, 0, 0))}
        if self.backbone.is_encoder_decoder:
            own["source_vocabulary"] = own["source_vocabulary"] or own["vocabulary"]
            own["encoder_depth"] = own["encoder_depth"] or own["depth"]
        classes = [head.linear.out_features for head in self.heads.values() if isinstance(head, ClassificationHead)]
        length = length or self.backbone.context or 256
        own |= {"classes": classes[0] if classes else 0, "context": self.backbone.context or 0}
        return Dimensions(**own, length=length, source_length=source_length or length)

    def counted(
        self, d: Dimensions, place: ExecutionContext = CPU, *, uses: Mapping[str, Size] | None = None
    ) -> ModuleCost:
        """The closed forms of all its parts; `uses` says how often a token passes through each head."""
        heads = []
        for name, head in self.heads.items():
            own = {"unit": self.backbone.config.width} if isinstance(head, ClassificationHead) else {}
            part = head.counted(d, place, **own)  # type: ignore[operator]
            heads.append(replace(part, name=name, used=(uses or {}).get(name, 1)))
        return ModuleCost("", parts=(self.backbone.counted(d, place), ModuleCost("heads", parts=tuple(heads))))

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
        self.check_shapes({name: tensor.shape for name, tensor in tensors.items()}, source=source)
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(tensors[name])

    def check_shapes(self, shapes: Mapping[str, torch.Size], *, source: str) -> None:
        """Refuse tensors of other names or shapes than the model's own."""
        mine = {name: tensor.shape for name, tensor in self.tensors().items()}
        problems = [f"{name} is missing" for name in mine if name not in shapes]
        problems += [f"{name} is unknown" for name in shapes if name not in mine]
        problems += [
            f"{name} has shape {tuple(shapes[name])}, wanted {tuple(mine[name])}"
            for name in mine
            if name in shapes and shapes[name] != mine[name]
        ]
        if problems:
            raise UserError(f"{source} does not fit this model: {'; '.join(problems)}")
