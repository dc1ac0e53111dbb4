"""Every head's attention on a batch, from the live model.  B rows, H heads, T queries, S keys."""

from dataclasses import replace

import torch
from torch import Tensor

from headstock.errors import UserError
from headstock.model.attention_weights import AttentionKind, AttentionRecord, attention_modules, record_attention
from headstock.model.backbone import BACKBONES
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch
from headstock.model.model import Model


def patterns(model: Model, batch: Batch) -> list[tuple[AttentionKind, int, Tensor]]:
    """Where it is, the layer from 1 up, and its weights (B, H, T, S), for each attention in the order of reading."""
    return [(look.kind, look.layer, look.weights) for look in looks(model, batch)]


@torch.no_grad()
def looks(model: Model, batch: Batch) -> list[AttentionRecord]:
    """The same with the masks. The weights of every layer are kept, so the batch must be small."""
    seen: list[AttentionRecord] = []
    with record_attention(model, seen.append):
        model(batch)
    return [named(look, batch) for look in seen]


def named(look: AttentionRecord, batch: Batch) -> AttentionRecord:
    """A stack that looks both ways does a decoder's work on rows that are read from left to right."""
    return replace(look, kind="decoder") if batch.causal is True and look.kind == "encoder" else look


def need_attention(model: Model, name: str) -> None:
    if not attention_modules(model):
        able = [
            family for family in BACKBONES.names() if issubclass(BACKBONES.get(family), Transformer | EncoderDecoder)
        ]
        lacking = f"its {model.backbone.name} backbone keeps what it has read in cells and has no attention"
        raise UserError(f"{name}: {lacking} (families that have it: {', '.join(able)})")


def need_place(model: Model, name: str, where: str | None) -> None:
    """Refuse to show a part that the family does not have."""
    need_attention(model, name)
    have = sorted({place for place, _, _ in attention_modules(model)})
    if where is not None and where not in have:
        lacks = {"cross": "cross-attention", "encoder": "encoder", "decoder": "decoder"}[where]
        own = " and ".join(have)
        why = " (an encoder-decoder has it: presets seq2seq-*)" if where == "cross" else ""
        raise UserError(f"--where {where}: {name} has no {lacks}, only {own} self-attention{why}")
