"""Continuing from a KV cache gives the same as processing everything at once."""

from itertools import product

import pytest
import torch
from torch import Tensor

from headstock.model.backbones.transformer import Transformer
from headstock.model.batch import Batch, pad
from headstock.model.kv_cache import KVCache
from tests.model.small import small_backbone, some_tokens

ROWS, LENGTH = 3, 9


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def step_by_step(backbone: Transformer, tokens: Tensor) -> Tensor:
    state = backbone.new_state(tokens.size(0), tokens.size(1))
    steps = []
    for position in range(tokens.size(1)):
        output = backbone(Batch(tokens[:, position : position + 1]), state)
        state = output.state
        steps.append(output.hidden)
    assert state.lengths.tolist() == [tokens.size(1)] * tokens.size(0)
    return torch.cat(steps, 1)


@pytest.mark.parametrize(
    ("positions", "norm", "qk_norm"),
    list(product(["sinusoidal", "learned", "rotary", "relative"], ["pre", "post"], [False, True])),
)
def test_decoding_matches_the_full_pass(positions, norm, qk_norm):
    backbone = small_backbone(positions=positions, norm=norm, qk_norm=qk_norm)
    tokens = some_tokens(ROWS, LENGTH)
    close(step_by_step(backbone, tokens), backbone(Batch(tokens)).hidden)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "relative"])
def test_prompts_of_different_lengths_continue_as_if_alone(positions):
    backbone = small_backbone(positions=positions)
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 2, 4)]
    continuation = some_tokens(3, 6, seed=9)
    state = backbone.new_state(3, 11)
    output = backbone(Batch(*pad(texts, filler=0)), state)
    hidden = [[output.hidden[row, : len(text)]] for row, text in enumerate(texts)]
    assert output.state.lengths.tolist() == [5, 2, 4]
    for begin, end in [(0, 1), (1, 2), (2, 5), (5, 6)]:  # one by one, then three at once, then one
        output = backbone(Batch(continuation[:, begin:end]), output.state)
        for row in range(3):
            hidden[row].append(output.hidden[row])
    assert output.state.lengths.tolist() == [11, 8, 10]
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([text + continuation[row].tolist()]))).hidden[0]
        close(torch.cat(hidden[row]), alone)


def test_several_tokens_at_once():
    backbone, tokens = small_backbone(), some_tokens(ROWS, LENGTH)
    state, read = backbone.new_state(ROWS, LENGTH), []
    for begin, end in [(0, 2), (2, 6), (6, 7), (7, 9)]:
        output = backbone(Batch(tokens[:, begin:end]), state)
        state = output.state
        read.append(output.hidden)
    close(torch.cat(read, 1), backbone(Batch(tokens)).hidden)


def test_padded_pieces_extend_the_cache():
    """Rows grow by different lengths twice and end equal, which the cache detects."""
    backbone, tokens = small_backbone(), some_tokens(ROWS, 6)
    first, second = [2, 1, 4], [4, 5, 2]
    state = backbone.new_state(ROWS, 9)
    output = backbone(Batch(*pad([tokens[row, : first[row]].tolist() for row in range(3)], filler=0)), state)
    output = backbone(Batch(*pad([tokens[row, first[row] :].tolist() for row in range(3)], filler=0)), output.state)
    expected = backbone(Batch(tokens)).hidden
    for row in range(3):
        close(output.hidden[row, : second[row]], expected[row, first[row] :])
    assert output.state.lengths.tolist() == [6, 6, 6]
    assert output.state.longest == 6
    assert output.state.equal_lengths
    next_token = some_tokens(ROWS, 1, seed=4)
    close(
        backbone(Batch(next_token), output.state).hidden[:, -1],
        backbone(Batch(torch.cat([tokens, next_token], 1))).hidden[:, -1],
    )


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 2, 0, 0], [1]])
@pytest.mark.parametrize("lengths", [[5, 2, 4], [4, 4, 4]])
def test_select_reorders_drops_and_repeats_rows(lengths, rows):
    backbone = small_backbone(positions="rotary")
    texts = [some_tokens(n, seed=10 + i).tolist() for i, n in enumerate(lengths)]
    before = backbone(Batch(*pad(texts, filler=0)), backbone.new_state(3, 8)).state
    state = before.select(torch.tensor(rows))
    assert state.lengths.tolist() == [lengths[row] for row in rows]
    continuation = some_tokens(len(rows), 3, seed=3)
    hidden = []
    for position in range(3):
        output = backbone(Batch(continuation[:, position : position + 1]), state)
        state = output.state
        hidden.append(output.hidden)
    for i, row in enumerate(rows):
        alone = backbone(Batch(torch.tensor([texts[row] + continuation[i].tolist()]))).hidden[0, -3:]
        close(torch.cat(hidden, 1)[i], alone)
    assert before.lengths.tolist() == lengths  # the original state is unchanged


def test_dropping_the_longest_row_makes_room():
    backbone = small_backbone()
    state = backbone(Batch(*pad([[1] * 6, [2, 3]], filler=0)), backbone.new_state(2, 6)).state
    state = state.select(torch.tensor([1]))
    output = backbone(Batch(torch.tensor([[4]])), state)
    close(output.hidden[0, -1], backbone(Batch(torch.tensor([[2, 3, 4]]))).hidden[0, -1])


@pytest.mark.parametrize("positions", ["learned", "rotary", "relative"])
@pytest.mark.parametrize("lengths", [[5, 2, 4], [4, 4, 4], [1, 6, 7]])
def test_rows_join_and_leave_others(positions, lengths):
    backbone = small_backbone(positions=positions)
    texts = [some_tokens(n, seed=10 + i).tolist() for i, n in enumerate(lengths)]

    def read(*rows: int, capacity: int) -> KVCache:
        state = backbone.new_state(len(rows), capacity)
        state.storage[:] = torch.nan  # like uninitialized memory
        return backbone(Batch(*pad([texts[row] for row in rows], filler=0)), state).state

    state = read(0, capacity=9)
    state = state.append(read(1, 2, capacity=12)).append(read(0, 1, capacity=8))  # texts 0, 1, 2, 0, 1
    assert state.lengths.tolist() == [lengths[row] for row in (0, 1, 2, 0, 1)]
    state = state.keep([0, 4, 2])
    continuation = some_tokens(3, 5, seed=3)
    hidden = []
    for position in range(5):
        output = backbone(Batch(continuation[:, position : position + 1]), state)
        state = output.state
        hidden.append(output.hidden)
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([text + continuation[row].tolist()]))).hidden[0, -5:]
        close(torch.cat(hidden, 1)[row], alone)


def test_rows_with_sources_do_not_join():
    backbone = small_backbone(cross=True)
    state = backbone(Batch(some_tokens(1, 2)), backbone.new_state(1, 4), memory=torch.randn(1, 3, 8)).state
    with pytest.raises(ValueError, match="sources"):
        state.append(backbone.new_state(1, 4))


def test_a_full_cache_raises():
    backbone = small_backbone()
    state = backbone(Batch(some_tokens(1, 4)), backbone.new_state(1, 4)).state
    with pytest.raises(ValueError, match="4 tokens per row, not 5"):
        backbone(Batch(some_tokens(1, 1)), state)


@pytest.mark.parametrize(("norm", "qk_norm"), list(product(["pre", "post"], [False, True])))
def test_the_memory_is_projected_once(norm, qk_norm):
    backbone = small_backbone(cross=True, norm=norm, qk_norm=qk_norm)
    draw = torch.Generator().manual_seed(0)
    memory = torch.randn(ROWS, 4, 8, generator=draw)
    padding = torch.arange(4)[None] >= torch.tensor([4, 2, 3])[:, None]
    tokens = some_tokens(ROWS, LENGTH)
    expected = backbone(Batch(tokens), memory=memory, memory_padding=padding).hidden
    state = backbone.new_state(ROWS, LENGTH)
    output = backbone(Batch(tokens[:, :2]), state, memory=memory, memory_padding=padding)
    order = torch.tensor([2, 0, 1])
    state, hidden = output.state.select(order), []
    for position in range(2, LENGTH):  # without the memory
        output = backbone(Batch(tokens[order, position : position + 1]), state, memory_padding=padding[order])
        state = output.state
        hidden.append(output.hidden)
    close(torch.cat(hidden, 1), expected[order, 2:])
    other = backbone(Batch(tokens), memory=memory + 0.1, memory_padding=padding).hidden
    assert (other - expected).abs().max() > 1e-3


@torch.inference_mode(False)
def test_gradients_are_not_supported():
    backbone = small_backbone()
    with pytest.raises(ValueError, match="inference_mode"):
        backbone(Batch(some_tokens(1, 2)), backbone.new_state(1, 4))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "relative"])
@pytest.mark.parametrize("lengths", [[5, 2, 4], [4, 4, 4]])
def test_a_static_cache_agrees_and_keeps_its_memory(positions, lengths):
    backbone = small_backbone(positions=positions, context=12)
    texts = [some_tokens(n, seed=n + i).tolist() for i, n in enumerate(lengths)]
    continuation = some_tokens(3, 7, seed=9)
    free, fixed = (backbone(Batch(*pad(texts, filler=0)), backbone.new_state(3, 12)).state for _ in range(2))
    fixed.storage[..., max(lengths) :, :] = torch.nan  # like uninitialized memory
    assert fixed.make_static()
    addresses = fixed.storage.data_ptr(), fixed.lengths.data_ptr()
    for position in range(4):
        batch = Batch(continuation[:, position : position + 1])
        assert fixed.mask(1).allowed.shape == (3, 1, 1, 12)
        close(backbone(batch, fixed).hidden, backbone(batch, free).hidden)
        assert (fixed.storage.data_ptr(), fixed.lengths.data_ptr()) == addresses  # as a captured graph needs
    order = torch.tensor([2, 0])
    free, fixed, continuation = free.select(order), fixed.select(order), continuation[order]
    for position in range(4, 7):
        batch = Batch(continuation[:, position : position + 1])
        close(backbone(batch, fixed).hidden, backbone(batch, free).hidden)
    assert fixed.lengths.tolist() == [lengths[2] + 7, lengths[0] + 7]
