"""The encoder-decoder against Hugging Face's BART with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headstock.config import to_dict
from headstock.interop.huggingface.architectures.bart import Bart
from headstock.interop.imported_run import imported_config
from headstock.interop.tensor_map import export_tensors
from headstock.model.backbones.encoder_decoder import EncoderDecoder
from tests.model.test_encoder_decoder import PADDING, SOURCE_PADDING, distance, small_seq2seq, some_batch

bart = pytest.importorskip("transformers.models.bart.modeling_bart")

BART = {"width": 16, "depth": 2, "encoder_depth": 3, "heads": 4, "hidden": 24, "context": 12, "vocabulary": 40}


def to_huggingface(ours: EncoderDecoder) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Our weights under BART's names, and its settings."""
    model = {"family": "seq2seq", **to_dict(ours.config)}
    config = imported_config(model, {"name": "translate"}, source="a test")
    export = Bart().export_spec(config)
    tensors = {f"backbone.{name}": tensor.detach() for name, tensor in ours.named_parameters()}
    converted = export_tensors(Bart().tensor_map(config, export), tensors)
    shared, bias = converted.pop("model.shared.weight"), converted.pop("final_logits_bias")
    assert not bias.any()  # our tied head has no bias
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    converted = {name.removeprefix("model."): tensor for name, tensor in converted.items()}
    return converted | {f"{name}.weight": shared for name in names}, export.config


@pytest.mark.parametrize("scale", [False, True])
@torch.no_grad()
def test_outputs_match_bart(scale):
    ours = small_seq2seq(**BART, norm="post", embed_norm=True, embed_scale=scale)
    tensors, settings = to_huggingface(ours)
    theirs = bart.BartModel(bart.BartConfig(**settings, use_cache=False)).eval()
    theirs.load_state_dict(tensors, strict=True)
    batch = some_batch(padding=PADDING)
    assert batch.source is not None

    def read(mask: Tensor) -> Any:
        inputs = {"input_ids": batch.source.tokens, "attention_mask": mask.long()}
        targets = {"decoder_input_ids": batch.tokens, "decoder_attention_mask": (~PADDING).long()}
        return theirs(**inputs, **targets)

    expected = read(~SOURCE_PADDING)
    assert distance(ours.encode(batch.source), expected.encoder_last_hidden_state, SOURCE_PADDING) < 1e-5
    assert distance(ours(batch).hidden, expected.last_hidden_state, PADDING) < 1e-5
    # controls: without the padding mask, or with shifted positions, the outputs differ
    assert distance(ours(batch).hidden, read(torch.ones_like(SOURCE_PADDING)).last_hidden_state, PADDING) > 1e-3
    theirs.decoder.embed_positions.weight.copy_(theirs.decoder.embed_positions.weight.roll(-1, 0))
    assert distance(ours(batch).hidden, read(~SOURCE_PADDING).last_hidden_state, PADDING) > 1e-3
