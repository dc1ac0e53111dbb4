"""LSTM and GRU language models: parity with torch, packed documents, padding and state."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError
from headstock.kernels.bare_modules import strip_modules
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig, group_documents, similar_sizes
from headstock.model.batch import Batch, pad
from headstock.model.heads import LMHead
from headstock.model.layer_features import select_layers
from headstock.model.model import Model
from tests.model.small import some_tokens, stir

SIZES = {"vocabulary": 13, "depth": 2, "width": 6, "hidden": 6}
KINDS = [(cell, hidden) for cell in ("lstm", "gru", "rnn") for hidden in (6, 9)]


def small(cell="lstm", **options) -> Recurrent:
    torch.manual_seed(0)
    backbone = Recurrent(RecurrentConfig(**(SIZES | {"cell": cell} | options)))
    stir(backbone)
    return backbone.eval()


def model_of(backbone: Recurrent) -> Model:
    return Model(backbone, {"token": LMHead(backbone)}).eval()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


class TorchLanguageModel(nn.Module):
    """An embedding, nn.LSTM or nn.GRU with all layers, and an output layer."""

    def __init__(self, backbone: Recurrent):
        super().__init__()
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[backbone.config.cell]
        self.cells = kind(backbone.width, backbone.config.hidden, num_layers=backbone.depth, batch_first=True)
        for number, layer in enumerate(backbone.stack.layers):
            for name, weights in layer.cells.named_parameters():
                getattr(self.cells, name.replace("l0", f"l{number}")).data.copy_(weights)
        self.table = backbone.tokens.weight.detach().clone()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cells(self.table[tokens])[0] @ self.table.T


# Parity with torch


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_outputs_match_torch(cell):
    model = model_of(small(cell))
    tokens = some_tokens(3, 11)
    close(model.heads["token"](model(Batch(tokens)).hidden), TorchLanguageModel(model.backbone)(tokens))


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_packed_documents_match_torch_on_each(cell):
    model, sizes = model_of(small(cell)), [[4, 1, 6], [11], [2, 9]]
    plain, tokens = TorchLanguageModel(model.backbone), some_tokens(3, 11)
    documents = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in sizes])
    scores = model.heads["token"](model(Batch(tokens, document_ids=documents)).hidden)
    for row, parts in enumerate(sizes):
        ends = [0, *torch.tensor(parts).cumsum(0).tolist()]
        for begin, end in pairwise(ends):
            close(scores[row, begin:end], plain(tokens[row : row + 1, begin:end])[0])
    carried = plain(tokens)  # control: with the state carried over they differ
    assert (carried[0, 4:] - scores[0, 4:]).abs().amax(-1).min() > 1e-3
    close(carried[1], scores[1])


@pytest.mark.parametrize(("cell", "hidden"), KINDS)
def test_gradients_of_packed_documents_agree(cell, hidden):
    backbone, tokens = small(cell, hidden=hidden).train(), some_tokens(1, 9)
    documents = torch.tensor([[0] * 4 + [1] * 5])
    backbone(Batch(tokens, document_ids=documents)).hidden.square().sum().backward()
    packed = {name: p.grad.clone() for name, p in backbone.named_parameters()}
    backbone.zero_grad()
    for part in (tokens[:, :4], tokens[:, 4:]):
        backbone(Batch(part)).hidden.square().sum().backward()
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-5, rtol=1e-4)


# Documents


@given(
    rows=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=4), backward=st.booleans()
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_groups_contain_every_token_once(rows, backward):
    length = max(map(sum, rows))
    documents = torch.full((len(rows), length), -1)
    for row, sizes in enumerate(rows):
        documents[row, : sum(sizes)] = torch.repeat_interleave(torch.tensor(sizes))
    tokens = torch.arange(documents.numel()).view_as(documents)
    groups, location = group_documents(Batch(tokens, document_ids=documents), backward=backward)
    laid_out = torch.cat([*(part.index.flatten() for part in groups), torch.tensor([-1])])
    expected = torch.where(documents.flatten() < 0, -1, tokens.flatten())
    assert torch.equal(laid_out[location], expected)
    actual = {
        tuple(dict.fromkeys(positions.tolist())): bool(first)  # without the repeated last token
        for part in groups
        for positions, first in zip(part.index, part.begins_row, strict=True)
    }
    expected = {}
    for row, sizes in enumerate(rows):
        ends = [row * length + end for end in (0, *torch.tensor(sizes).cumsum(0).tolist())]
        for position, (begin, end) in enumerate(pairwise(ends)):
            span = tuple(range(begin, end))
            expected[span[::-1] if backward else span] = position == 0
    assert actual == expected


@given(sizes=st.lists(st.integers(1, 300), max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_groups_have_little_padding(sizes):
    sizes = sorted(sizes, reverse=True)
    groups = [sizes[part] for part in similar_sizes(sizes)]
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group) >= 0.5 * group[0] * len(group) for group in groups)


# Padding and state


@pytest.mark.parametrize(("cell", "hidden"), KINDS)
def test_padding_does_not_change_the_state(cell, hidden):
    backbone = small(cell, hidden=hidden)
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 1, 3)]
    output = backbone(Batch(*pad(texts, filler=0)), backbone.new_state(3, 0))
    without = backbone(Batch(*pad(texts, filler=0)), keep_layers=True)
    assert output.state.lengths.tolist() == [5, 1, 3]
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([text])), backbone.new_state(1, 0), keep_layers=True)
        close(output.hidden[row, : len(text)], alone.hidden[0])
        for together, single in zip(without.layers, alone.layers, strict=True):
            close(together[row, : len(text)], single[0])
        for together, single in zip(output.state.cells, alone.state.cells, strict=True):
            for part, other in zip(together, single, strict=True):
                close(part[:, row], other[:, 0])


@pytest.mark.parametrize(("cell", "hidden"), KINDS)
def test_decoding_matches_the_full_pass(cell, hidden):
    backbone, tokens = small(cell, hidden=hidden), some_tokens(3, 9)
    state, steps = backbone.new_state(3, 0), []
    for begin, end in [(0, 1), (1, 2), (2, 6), (6, 9)]:
        output = backbone(Batch(tokens[:, begin:end]), state)
        state = output.state
        steps.append(output.hidden)
    close(torch.cat(steps, 1), backbone(Batch(tokens)).hidden)
    assert state.lengths.tolist() == [9, 9, 9]


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 2, 0, 0], [1]])
def test_select_reorders_drops_and_repeats_rows(rows):
    backbone = small()
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 2, 4)]
    before = backbone(Batch(*pad(texts, filler=0)), backbone.new_state(3, 0)).state
    state = before.select(torch.tensor(rows))
    assert state.lengths.tolist() == [len(texts[row]) for row in rows]
    continuation = some_tokens(len(rows), 2, seed=9)
    hidden = backbone(Batch(continuation), state).hidden
    for position, row in enumerate(rows):
        alone = torch.tensor([texts[row] + continuation[position].tolist()])
        close(hidden[position], backbone(Batch(alone)).hidden[0, -2:])
    assert before.lengths.tolist() == [5, 2, 4]


def test_a_row_without_tokens_keeps_its_state():
    backbone, texts = small(), [[3, 4, 5], [6]]
    state = backbone(Batch(torch.tensor([[1], [2]])), backbone.new_state(2, 0)).state
    for padding in ([[False] * 3, [True] * 3], [[True] * 3, [True] * 3]):
        after = backbone(Batch(torch.tensor([texts[0], [0, 0, 0]]), torch.tensor(padding)), state).state
        close(after.cells[1][1][:, 1], state.cells[1][1][:, 1])
        assert after.lengths[1] == 1


# Prefixes


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_rows_continue_from_their_prefix(cell):
    backbone, tokens = small(cell), some_tokens(2, 12)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0] * 7])
    before = Batch(*pad([tokens[0, :5].tolist(), tokens[1, 3:5].tolist()], filler=0))
    hidden = backbone(Batch(tokens[:, 5:], document_ids=documents, prefix=before)).hidden
    close(hidden[0, :4], backbone(Batch(tokens[:1, :9])).hidden[0, 5:])
    close(hidden[0, 4:], backbone(Batch(tokens[:1, 9:])).hidden[0])  # the second document starts anew
    close(hidden[1], backbone(Batch(tokens[1:, 3:])).hidden[0, 2:])
    plain = backbone(Batch(tokens[:, 5:], prefix=before)).hidden  # the same without document ids
    close(plain[1], hidden[1])


def test_prefixes_get_no_gradient():
    backbone = small().train()
    before = Batch(torch.tensor([[11, 12]]))
    backbone(Batch(torch.tensor([[1, 2, 3]]), prefix=before)).hidden.sum().backward()
    has_gradient = backbone.tokens.weight.grad.abs().sum(1) > 0
    assert has_gradient.nonzero().squeeze(1).tolist() == [1, 2, 3]


# Interface


@pytest.mark.parametrize(("cell", "hidden"), KINDS)
def test_generation_with_and_without_state_agrees(cell, hidden):
    model = model_of(small(cell, hidden=hidden))
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    sampling = Sampling(temperature=5.0)
    results = [
        generate(model, prompts, max_tokens=30, sampling=sampling, seeds=[1, 2, 3], end=0, cache=cache)
        for cache in (True, False)
    ]
    assert results[0] == results[1]
    assert max(len(row.tokens) for row in results[0]) > 5
    alone = [
        generate(model, [prompt], max_tokens=30, sampling=sampling, seeds=[seed], end=0)[0]
        for seed, prompt in enumerate(prompts, 1)
    ]
    assert results[0] == alone
    assert not any(row.slid for row in results[0])


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_bare_copy_agrees(cell):
    backbone, tokens = small(cell, hidden=9), some_tokens(2, 5)
    twin = strip_modules(backbone)
    assert not isinstance(twin, nn.Module)
    close(twin(Batch(tokens)).hidden, backbone(Batch(tokens)).hidden)


def test_layers_can_be_selected():
    backbone = small(hidden=9, depth=4)
    output = backbone(Batch(some_tokens(2, 5), document_ids=torch.tensor([[0, 0, 1, 1, 1]] * 2)), keep_layers=True)
    assert len(output.layers) == 5
    assert torch.equal(select_layers(backbone, output, "4"), output.hidden)
    close(select_layers(backbone, output, "0"), backbone.tokens(some_tokens(2, 5)))
    close(select_layers(backbone, output, "sum4"), sum(output.layers[1:]))


def test_parameters_by_layer_cover_every_parameter_once():
    backbone = small(hidden=9)
    stages = [id(p) for stage in backbone.parameters_by_layer() for p in stage]
    assert sorted(stages) == sorted(id(p) for p in backbone.parameters())
    assert [len(stage) for stage in backbone.parameters_by_layer()] == [1, 6, 6]


# Dropout


def test_locked_dropout_uses_one_mask_per_row():
    torch.manual_seed(0)
    for kind, same in (("locked", True), ("plain", False)):
        dropout = small(dropout=0.5, dropout_kind=kind).train().dropout
        out = dropout(torch.ones(4, 30, 16)) == 0
        assert 0.2 < out.float().mean() < 0.8
        assert bool((out == out[:, :1]).all()) is same
        assert not bool((out[0] == out[1]).all())  # rows have different masks
        assert torch.equal(dropout.eval()(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))


def test_all_invalid_settings_are_reported():
    with pytest.raises(ConfigError, match=r"depth(?s:.)*hidden(?s:.)*dropout"):
        RecurrentConfig(vocabulary=5, depth=0, hidden=0, dropout=1.0)
