"""The encoder-decoder: dependencies, parity with torch.nn.Transformer, and decoding.

B rows, T target tokens, S source tokens.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstock.config import from_dict
from headstock.decoding.beam_search import beam_search
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError
from headstock.kernels.bare_modules import strip_modules
from headstock.model.backbone import BACKBONES
from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch, pad
from headstock.model.heads import LMHead
from headstock.model.layers import Attention
from headstock.model.model import Model
from headstock.train.settings import read_preset
from tests.model.small import SIZES, some_tokens, stir
from tests.model.test_block import copy_weights

ROWS, LENGTH, SOURCE = 3, 6, 5
PADDING = torch.arange(LENGTH)[None] >= torch.tensor([6, 3, 1])[:, None]
SOURCE_PADDING = torch.arange(SOURCE)[None] >= torch.tensor([2, 5, 4])[:, None]
SHAPES = list(product(["sinusoidal", "learned", "rotary", "relative"], ["pre", "post"], [False, True]))
GREEDY = Sampling(temperature=0.0)
PROMPTS = [some_tokens(n, seed=n).tolist() for n in (3, 1, 2, 5)]
SOURCES = [some_tokens(n, seed=10 + n).tolist() for n in (2, 6, 1, 4)]


def small_seq2seq(seed: int = 0, **settings: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    backbone = EncoderDecoder(EncoderDecoderConfig(**(SIZES | {"encoder_depth": 3} | settings)))
    stir(backbone, seed=seed)
    return backbone.eval()


def small_translator(seed: int = 0, **settings: Any) -> Model:
    backbone = small_seq2seq(seed, **settings)
    return Model(backbone, {"token": LMHead(backbone)}).eval()


def some_batch(*, padding: Tensor | None = None, source_padding: Tensor | None = SOURCE_PADDING) -> Batch:
    source = Batch(some_tokens(ROWS, SOURCE, seed=2), source_padding)
    return Batch(some_tokens(ROWS, LENGTH), padding, source=source)


def distance(a: Tensor, b: Tensor, padding: Tensor | None = None) -> float:
    """The largest difference at real tokens."""
    return ((a - b) if padding is None else (a - b)[~padding]).abs().max().item()


# Dependencies


@pytest.mark.parametrize(("positions", "norm", "qk_norm"), SHAPES)
@torch.inference_mode()
def test_targets_depend_on_the_past_and_the_source(positions, norm, qk_norm):
    backbone, batch = small_seq2seq(positions=positions, norm=norm, qk_norm=qk_norm), some_batch()
    before = backbone(batch).hidden
    later = batch.tokens.clone()
    later[:, 3] = (later[:, 3] + 1) % 13
    after = backbone(replace(batch, tokens=later)).hidden
    assert distance(after[:, :3], before[:, :3]) < 1e-6  # the past is unchanged
    assert (after[:, 3:] - before[:, 3:]).abs().amax(-1).min() > 1e-4  # everything after is not
    assert batch.source is not None
    for position in range(SOURCE):
        other = batch.source.tokens.clone()
        other[:, position] = (other[:, position] + 1) % 13
        change = backbone(replace(batch, source=replace(batch.source, tokens=other))).hidden - before
        hidden = SOURCE_PADDING[:, position]
        assert change[hidden].abs().sum() < 1e-4  # padding gets no gradient
        assert change[~hidden].abs().amax(-1).min() > 1e-5  # every target position attends to every source token


@torch.inference_mode()
def test_padding_does_not_matter():
    """Rows padded on both sides give the same as alone."""
    backbone = small_seq2seq()
    hidden = backbone(Batch(*pad(PROMPTS, 0), source=Batch(*pad(SOURCES, 0)))).hidden
    for row, (prompt, source) in enumerate(zip(PROMPTS, SOURCES, strict=True)):
        alone = backbone(Batch(torch.tensor([prompt]), source=Batch(torch.tensor([source])))).hidden[0]
        assert distance(hidden[row, : len(prompt)], alone) < 1e-5


def test_the_encoder_is_bidirectional():
    backbone, source = small_seq2seq(), Batch(some_tokens(1, SOURCE))
    changed = source.tokens.clone()
    changed[0, -1] += 1
    assert (backbone.encode(source) - backbone.encode(Batch(changed))).abs().amax(-1).min() > 1e-4
    with pytest.raises(ValueError, match="source"):
        backbone(Batch(some_tokens(1, 2)))


# Parity with torch


class TorchTransformer:
    """nn.Transformer, and ours with its weights and an embedding before it."""

    def __init__(self, norm: str, activation: str):
        c = SIZES
        self.ours = small_seq2seq(norm=norm, activation=activation, encoder_depth=2)
        shape = (c["width"], c["heads"], c["depth"], c["depth"], c["hidden"], 0.0, activation)
        self.theirs = nn.Transformer(*shape, batch_first=True, norm_first=norm == "pre").eval()
        stir(self.theirs)
        sides = [(self.theirs.encoder, self.ours.encoder), (self.theirs.decoder, self.ours.decoder)]
        for their, our in sides:
            for layer, block in zip(their.layers, our.blocks, strict=True):
                copy_weights(layer, block)
            if our.final_norm is None:
                their.norm = None  # torch adds a norm after post-norm stacks; the paper does not
            else:
                our.final_norm.load_state_dict(their.norm.state_dict())

    @torch.no_grad()
    def expected(self, batch: Batch, *, source_padding: Tensor | None = SOURCE_PADDING) -> Tensor:
        assert batch.source is not None
        sides = [(self.ours.encoder, batch.source), (self.ours.decoder, batch)]
        embedded = [
            side.embed(batch, torch.arange(batch.tokens.size(1)), batch.tokens.size(1)) for side, batch in sides
        ]
        return self.theirs(
            *embedded,
            tgt_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=batch.padding,
            memory_key_padding_mask=source_padding,
        )


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_outputs_match_torchs_transformer(norm, activation, monkeypatch):
    pair, batch = TorchTransformer(norm, activation), some_batch(padding=PADDING)
    expected = pair.expected(batch)
    assert distance(pair.ours(batch).hidden, expected, PADDING) < 1e-5
    # controls that must differ
    unpadded = pair.expected(batch, source_padding=None)
    assert distance(pair.ours(batch).hidden, unpadded, PADDING) > 1e-3
    monkeypatch.setattr(EncoderDecoder, "encode", lambda self, source: self.tokens(batch.tokens)[:, :SOURCE])
    assert distance(pair.ours(batch).hidden, expected, PADDING) > 1e-3


# Decoding


@pytest.mark.parametrize(("positions", "norm", "qk_norm"), SHAPES)
@torch.inference_mode()
def test_decoding_matches_the_full_pass(positions, norm, qk_norm):
    """Sources and prompts of different lengths; rows are reordered and one is dropped on the way."""
    backbone = small_seq2seq(positions=positions, norm=norm, qk_norm=qk_norm)
    continuation = some_tokens(4, 5, seed=9)
    output = backbone(Batch(*pad(PROMPTS, 0), source=Batch(*pad(SOURCES, 0))), backbone.new_state(4, 10))
    state, rows, hidden = output.state, [0, 1, 2, 3], {row: [] for row in range(4)}
    for position, order in enumerate([[0, 1, 2, 3], [2, 0, 3, 1], [0, 1, 2, 3], [3, 1, 0], [1, 0, 2]]):
        state, rows = state.select(torch.tensor(order)), [rows[i] for i in order]
        output = backbone(Batch(continuation[rows, position : position + 1]), state)  # without the source
        state = output.state
        for i, row in enumerate(rows):
            hidden[row].append(output.hidden[i])
    assert sorted(map(len, hidden.values())) == [3, 5, 5, 5]
    for row, result in hidden.items():
        text = torch.tensor([PROMPTS[row] + continuation[row].tolist()])
        alone = backbone(Batch(text, source=Batch(torch.tensor([SOURCES[row]])))).hidden[0]
        assert distance(torch.cat(result), alone[len(PROMPTS[row]) :][: len(result)]) < 1e-5


@torch.inference_mode()
def test_rows_of_a_state_may_be_repeated():
    """As in beam search: several rows of one source, which are then reordered."""
    backbone = small_seq2seq()
    output = backbone(Batch(*pad(PROMPTS[:2], 0), source=Batch(*pad(SOURCES[:2], 0))), backbone.new_state(2, 8))
    state = output.state.select(torch.tensor([0, 0, 1, 1]))
    output = backbone(Batch(torch.tensor([[1], [2], [3], [4]])), state)
    memory_keys = output.state.memory[0][0]
    state = output.state.select(torch.tensor([1, 1, 2, 3]))
    assert state.memory[0][0] is memory_keys  # same sources, so nothing was copied
    output = backbone(Batch(torch.tensor([[5], [6], [7], [8]])), state)
    state = output.state.select(torch.tensor([3, 2, 1, 0]))
    assert state.memory[0][0] is not memory_keys
    hidden = backbone(Batch(torch.tensor([[9], [9], [9], [9]])), state).hidden[:, -1]
    texts = [(1, [4, 8]), (1, [3, 7]), (0, [2, 6]), (0, [2, 5])]
    for result, (row, tokens) in zip(hidden, texts, strict=True):
        batch = Batch(torch.tensor([PROMPTS[row] + tokens + [9]]), source=Batch(torch.tensor([SOURCES[row]])))
        assert distance(result, backbone(batch).hidden[0, -1]) < 1e-5


@torch.inference_mode()
def test_unused_cache_positions_are_never_read():
    backbone = small_seq2seq()
    output = backbone(Batch(*pad(PROMPTS, 0), source=Batch(*pad(SOURCES, 0))), backbone.new_state(4, 12))
    state = output.state.select(torch.tensor([3, 2, 1]))
    state.storage[..., state.longest :, :] = torch.nan
    for tokens in ([[1], [2], [3]], [[4, 5], [6, 7], [8, 9]]):
        output = backbone(Batch(torch.tensor(tokens)), state)
        assert output.hidden.isfinite().all()
        state = output.state


def test_the_source_is_encoded_once():
    calls = []

    class Counting(EncoderDecoder):
        def encode(self, source):
            calls.append("source")
            return EncoderDecoder.encode(self, source)

    class Noting(Attention):
        def project_key_value(self, memory):
            calls.append("keys")
            return Attention.project_key_value(self, memory)

    model = small_translator()
    model.backbone.__class__ = Counting
    for block in model.backbone.decoder.blocks:
        block.cross.__class__ = Noting
    generate(model, PROMPTS, max_tokens=8, sampling=GREEDY, sources=SOURCES)
    assert calls == ["source", "keys", "keys"]  # one for each block of the decoder
    calls.clear()
    beam_search(model, PROMPTS, beams=3, max_tokens=8, end=None, sources=SOURCES)
    assert calls == ["source", "keys", "keys"]
    calls.clear()
    generate(model, PROMPTS, max_tokens=8, sampling=GREEDY, sources=SOURCES, cache=False)
    assert len(calls) == 3 * 8


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=5)])
def test_cache_and_batching_do_not_change_a_translation(sampling):
    model, options = small_translator(), {"max_tokens": 9, "sampling": sampling, "end": 4}
    result = generate(model, PROMPTS, sources=SOURCES, **options)
    assert result == generate(model, PROMPTS, sources=SOURCES, cache=False, **options)
    alone = zip(PROMPTS, SOURCES, strict=True)
    assert result == [generate(model, [prompt], sources=[source], **options)[0] for prompt, source in alone]
    assert result != generate(model, PROMPTS, sources=SOURCES[::-1], **options)
    long = generate(model, PROMPTS, sources=SOURCES, max_tokens=30, sampling=sampling)  # beyond the context of 16
    assert long == generate(model, PROMPTS, sources=SOURCES, max_tokens=30, sampling=sampling, cache=False)
    assert all(row.slid for row in long)


def test_sources_must_match_prompts():
    for sources in (None, SOURCES[:3], [[], [1], [1], [1]]):
        with pytest.raises(ValueError, match="source"):
            generate(small_translator(), PROMPTS, max_tokens=3, sampling=GREEDY, sources=sources)
    one = Model(Transformer(TransformerConfig(**SIZES)), {})
    with pytest.raises(ValueError, match="no other model reads any"):
        generate(one, PROMPTS, max_tokens=3, sampling=GREEDY, sources=SOURCES)


# The backbone interface


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_shared_tied_or_separate(shared, tied):
    model = small_translator(shared=shared, tied=tied)
    assert (model.backbone.encoder.tokens is model.backbone.decoder.tokens) == shared
    assert (model.heads["token"].weight is model.backbone.decoder.tokens.weight) == tied
    least = small_translator(shared=True, tied=True).parameter_counts()
    assert model.parameter_counts()["base"] == least["base"] + (0 if shared else 13 * 8)
    assert model.parameter_counts()["token"] == (0 if tied else 13 * 8 + 13)
    assert sum(tensor.numel() for tensor in model.tensors().values()) == model.parameter_counts()["total"]
    again = small_translator(seed=7, shared=shared, tied=tied)
    assert not torch.equal(again(some_batch()).hidden, model(some_batch()).hidden)
    again.load_tensors({name: tensor.clone() for name, tensor in model.tensors().items()}, source="a test")
    assert torch.equal(again(some_batch()).hidden, model(some_batch()).hidden)


def test_two_vocabularies():
    model = small_translator(source_vocabulary=29)  # `shared` does not apply to them
    assert [side.tokens.num_embeddings for side in (model.backbone.encoder, model.backbone.decoder)] == [29, 13]
    output = model(Batch(torch.tensor([[1, 12]]), source=Batch(torch.tensor([[28, 3]]))))
    assert model.heads["token"](output.hidden).shape == (1, 2, 13)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("settings", [{}, {"shared": False}, {"source_vocabulary": 29}, {"positions": "sinusoidal"}])
def test_parameters_by_layer_cover_every_parameter_once(norm, settings):
    backbone = small_seq2seq(norm=norm, **settings)
    stages = [[id(parameter) for parameter in stage] for stage in backbone.parameters_by_layer()]
    assert len(stages) == 1 + 3 + 2
    everything = [parameter for stage in stages for parameter in stage]
    assert len(everything) == len(set(everything))
    assert set(everything) == {id(parameter) for parameter in backbone.parameters()}
    for side in (backbone.encoder, backbone.decoder):
        assert id(side.tokens.weight) in stages[0]
    assert id(backbone.encoder.blocks[0].feed.up.weight) in stages[1]
    assert id(backbone.decoder.blocks[0].feed.up.weight) in stages[4]
    assert (id(backbone.encoder.final_norm.weight) in stages[3]) if norm == "pre" else True


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_are_the_decoders(norm):
    backbone, batch = small_seq2seq(norm=norm), some_batch()
    output = backbone(batch, keep_layers=True)
    assert len(output.layers) == backbone.depth + 1 == 3
    assert torch.equal(backbone.output_norm(output.layers[-1]), output.hidden)
    assert backbone(batch).layers == []
    assert backbone.causal and backbone.is_encoder_decoder and not Transformer.is_encoder_decoder


@torch.inference_mode()
def test_a_bare_copy_agrees():
    backbone, batch = small_seq2seq(source_vocabulary=29, qk_norm=True), some_batch()
    assert distance(strip_modules(backbone)(batch).hidden, backbone(batch).hidden) < 1e-6


def test_all_invalid_settings_are_reported():
    with pytest.raises(ConfigError) as error:
        EncoderDecoderConfig(vocabulary=0, source_vocabulary=0, encoder_depth=-1, dropout=1.0)
    assert [name for name, _ in error.value.problems] == ["source_vocabulary", "encoder_depth", "vocabulary", "dropout"]
    with pytest.raises(ConfigError, match="width: 10 must be a multiple of heads 4"):
        EncoderDecoderConfig(vocabulary=9, width=10, heads=4)


@pytest.mark.parametrize("size", ["nano", "mini", "small", "base"])
def test_presets_have_the_expected_parameters(size):
    tree = read_preset(f"seq2seq-{size}")
    assert tree["task"]["name"] == "denoise"
    family = BACKBONES.get(tree["model"].pop("family"))
    c = from_dict(family.Config, tree["model"] | {"vocabulary": tree["tokenizer"]["vocabulary"]})
    with torch.device("meta"):  # shapes only
        backbone = family(c)
        model = Model(backbone, {"token": LMHead(backbone)})
    attention, feed, norm = 4 * (c.width + 1) * c.width, 2 * c.width * c.hidden + c.hidden + c.width, 2 * c.width
    reads, writes = attention + feed + 2 * norm, 2 * attention + feed + 3 * norm
    assert (
        model.parameter_counts()["total"]
        == c.vocabulary * c.width + c.encoder_depth * reads + c.depth * writes + 2 * norm
    )


def test_it_learns_to_reverse_the_source():
    """Impossible without cross-attention."""
    torch.manual_seed(0)
    backbone = EncoderDecoder(EncoderDecoderConfig(vocabulary=6, context=8, depth=1, width=32, heads=2, hidden=64))
    model = Model(backbone, {"token": LMHead(backbone)})
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=6e-3), torch.Generator().manual_seed(0)
    for _ in range(100):
        source = torch.randint(1, 6, (64, 4), generator=generator)
        target = source.flip(1)
        decoder_input = nn.functional.pad(target[:, :-1], (1, 0))
        logits = model.heads["token"](model(Batch(decoder_input, source=Batch(source))).hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = torch.randint(1, 6, (50, 4), generator=generator)
    result = generate(model, [[0]] * 50, max_tokens=4, sampling=GREEDY, sources=fresh.tolist())
    correct = sum(row.tokens == source[::-1] for row, source in zip(result, fresh.tolist(), strict=True))
    assert correct > 40
