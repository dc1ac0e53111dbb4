"""Tiny models with randomized weights, so that no bias or norm keeps its initial zero or one."""

from typing import Any

import torch

from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.heads import LMHead
from headstock.model.model import Model

SIZES = {"vocabulary": 13, "context": 16, "depth": 2, "width": 8, "heads": 2, "hidden": 12}


def stir(module: torch.nn.Module, *, seed: int = 0, spread: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=spread)


def small_backbone(seed: int = 0, **settings: Any) -> Transformer:
    torch.manual_seed(seed)
    backbone = Transformer(TransformerConfig(**(SIZES | settings)))
    stir(backbone, seed=seed)
    return backbone.eval()


def small_model(seed: int = 0, **settings: Any) -> Model:
    backbone = small_backbone(seed, **settings)
    return Model(backbone, {"token": LMHead(backbone)}).eval()


def some_tokens(*shape: int, seed: int = 1, vocabulary: int = SIZES["vocabulary"]) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
