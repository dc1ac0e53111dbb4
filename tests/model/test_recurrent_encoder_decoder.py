"""The recurrent encoder-decoder: attention over the source, causality, padding and decoding."""

from dataclasses import replace

import pytest
import torch

from headstock.decoding.beam_search import beam_search
from headstock.errors import ConfigError
from headstock.model.backbones.recurrent_encoder_decoder import (
    GlobalAttention,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
)
from headstock.model.batch import Batch, pad
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.model.small import some_tokens, stir


def small(**settings) -> RecurrentEncoderDecoder:
    torch.manual_seed(0)
    sizes = {"vocabulary": 13, "depth": 2, "width": 6, "hidden": 8}
    backbone = RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(**(sizes | settings)))
    stir(backbone)
    return backbone.eval()


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_attention_is_the_formula():
    torch.manual_seed(0)
    attention, hidden, memory = GlobalAttention(4), torch.randn(1, 1, 4), torch.randn(1, 3, 4)
    scores = torch.stack([attention.query.weight @ hidden[0, 0] @ memory[0, i] / 2 for i in range(3)])
    weights = scores.exp() / scores.exp().sum()
    context = sum(weight * vector for weight, vector in zip(weights, memory[0], strict=True))
    expected = torch.tanh(attention.output(torch.cat([context, hidden[0, 0]])))
    close(attention(hidden, memory, None)[0, 0], expected)


def test_targets_are_causal_and_depend_on_the_whole_source():
    backbone = small()
    batch = Batch(some_tokens(1, 5), source=Batch(some_tokens(1, 6, seed=2)))
    before = backbone(batch).hidden
    later = batch.tokens.clone()
    later[0, 3] = (later[0, 3] + 1) % 13
    moved = (backbone(replace(batch, tokens=later)).hidden - before).abs().amax(-1)[0] > 1e-7
    assert moved.tolist() == [False, False, False, True, True]
    for i in range(6):
        source = batch.source.tokens.clone()
        source[0, i] = (source[0, i] + 1) % 13
        assert ((backbone(replace(batch, source=Batch(source))).hidden - before).abs().amax(-1) > 1e-7).all()


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_padding_and_step_by_step_decoding_change_nothing(cell):
    backbone = small(cell=cell, source_vocabulary=9)
    sources = [some_tokens(n, seed=n, vocabulary=9).tolist() for n in (6, 2, 4)]
    targets = some_tokens(3, 5)
    batch = Batch(targets, source=Batch(*pad(sources, 0)))
    together = backbone(batch, keep_layers=True)
    state, steps = backbone.new_state(3, 5), []
    for i in range(5):
        source = batch.source if i == 0 else None
        output = backbone(Batch(targets[:, i : i + 1], source=source), state)
        state, _ = output.state, steps.append(output.hidden)
    close(torch.cat(steps, 1), together.hidden)
    for row, source in enumerate(sources):
        alone = backbone(Batch(targets[row : row + 1], source=Batch(torch.tensor([source])))).hidden
        close(together.hidden[row : row + 1], alone)
    assert len(together.layers) == backbone.depth + 1


def test_beam_search_reorders_the_state():
    backbone = small()
    model = Model(backbone, {"token": LMHead(backbone)}).eval()
    sources = [some_tokens(n, seed=n).tolist() for n in (5, 3)]
    options = {"beams": 3, "max_tokens": 6, "end": 1}
    together = beam_search(model, [[0], [0]], sources=sources, **options)
    for row, source in enumerate(sources):
        (alone,) = beam_search(model, [[0]], sources=[source], **options)
        assert [one.tokens for one in alone] == [one.tokens for one in together[row]]


def test_every_parameter_is_in_one_layer():
    for settings in ({}, {"source_vocabulary": 9}):
        backbone = small(**settings)
        parameters = [id(p) for layer in backbone.parameters_by_layer() for p in layer]
        assert sorted(parameters) == sorted(map(id, backbone.parameters()))


def test_bad_settings_are_reported_together():
    with pytest.raises(ConfigError, match=r"encoder_depth(.|\n)*width"):
        RecurrentEncoderDecoderConfig(vocabulary=5, encoder_depth=0, width=0)
