"""The encoder-decoder against Hugging Face's BART with the same weights."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstock.model.backbones.transformer import Transformer
from tests.model.test_seq2seq import PADDING, SOURCE_PADDING, distance, small_seq2seq, some_batch

bart = pytest.importorskip("transformers.models.bart.modeling_bart")

BART = {"width": 16, "depth": 2, "encoder_depth": 3, "heads": 4, "hidden": 24, "context": 12, "vocabulary": 40}
NAMES = {  # theirs: ours
    "embed_tokens": "tokens",
    "layernorm_embedding": "embed_norm",
    "layers.{}.self_attn.out_proj": "blocks.{}.attention.output",
    "layers.{}.self_attn_layer_norm": "blocks.{}.around_attention.norm",
    "layers.{}.encoder_attn.out_proj": "blocks.{}.cross.output",
    "layers.{}.encoder_attn_layer_norm": "blocks.{}.around_cross.norm",
    "layers.{}.fc1": "blocks.{}.feed.up",
    "layers.{}.fc2": "blocks.{}.feed.down",
    "layers.{}.final_layer_norm": "blocks.{}.around_feed.norm",
}
OFFSET = 2  # BART's positions begin there


def as_barts(side: Transformer) -> dict[str, Tensor]:
    """The weights of one side under BART's names."""
    mine = {name: parameter.detach() for name, parameter in side.named_parameters()}
    theirs = {"embed_positions.weight": nn.functional.pad(mine.pop("positions.weight"), (0, 0, OFFSET, 0))}
    for name, own in NAMES.items():
        for layer, part in product(range(side.depth if "{}" in name else 1), ("weight", "bias")):
            if (key := f"{own.format(layer)}.{part}") in mine:
                theirs[f"{name.format(layer)}.{part}"] = mine.pop(key)
    for layer, part in product(range(side.depth), ("weight", "bias")):
        for own, name in (("attention", "self_attn"), ("cross", "encoder_attn")):
            if (key := f"blocks.{layer}.{own}.inputs.{part}") in mine:
                for third, tensor in zip("qkv", mine.pop(key).chunk(3), strict=True):
                    theirs[f"layers.{layer}.{name}.{third}_proj.{part}"] = tensor
    assert not mine, f"no name for {list(mine)}"
    return theirs


@pytest.mark.parametrize("scale", [False, True])
@torch.no_grad()
def test_it_is_barts(scale):
    sizes = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "vocab_size": 40, "max_position_embeddings": 12}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")}
    theirs = bart.BartModel(bart.BartConfig(**sizes, scale_embedding=scale, use_cache=False)).eval()
    ours = small_seq2seq(**BART, norm="post", embed_norm=True, embed_scale=scale)
    tensors = {f"encoder.{name}": tensor for name, tensor in as_barts(ours.encoder).items()}
    tensors |= {f"decoder.{name}": tensor for name, tensor in as_barts(ours.decoder).items()}
    theirs.load_state_dict(tensors | {"shared.weight": ours.tokens.weight}, strict=True)
    batch = some_batch(padding=PADDING)
    assert batch.source is not None

    def read(mask: Tensor) -> Any:
        given = {"input_ids": batch.source.tokens, "attention_mask": mask.long()}
        targets = {"decoder_input_ids": batch.tokens, "decoder_attention_mask": (~PADDING).long()}
        return theirs(**given, **targets)

    expected = read(~SOURCE_PADDING)
    assert distance(ours.encode(batch.source), expected.encoder_last_hidden_state, SOURCE_PADDING) < 1e-5
    assert distance(ours(batch).hidden, expected.last_hidden_state, PADDING) < 1e-5
    # the controls: padding that is looked at, positions that begin elsewhere
    assert distance(ours(batch).hidden, read(torch.ones_like(SOURCE_PADDING)).last_hidden_state, PADDING) > 1e-3
    theirs.decoder.embed_positions.weight.copy_(theirs.decoder.embed_positions.weight.roll(-1, 0))
    assert distance(ours(batch).hidden, read(~SOURCE_PADDING).last_hidden_state, PADDING) > 1e-3
