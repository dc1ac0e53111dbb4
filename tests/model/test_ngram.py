"""The feed-forward n-gram language model: what a prediction depends on, packed documents and decoding."""

import pytest
import torch

from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError
from headstock.model.backbones.ngram import NGram, NGramConfig
from headstock.model.batch import Batch, pad
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.model.small import some_tokens, stir

ORDER = 3


def small(**settings) -> NGram:
    torch.manual_seed(0)
    sizes = {"vocabulary": 13, "order": ORDER, "width": 6, "hidden": 9, "depth": 2}
    backbone = NGram(NGramConfig(**(sizes | settings)))
    stir(backbone)
    return backbone.eval()


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_it_is_the_published_formula():
    backbone, tokens = small(depth=1), some_tokens(1, 5)
    layer = backbone.layers[0]
    joined = torch.cat([backbone.tokens(tokens[0, i]) for i in (2, 3, 4)])
    expected = layer.down.weight @ torch.tanh(layer.up.weight @ joined + layer.up.bias) + layer.down.bias
    close(backbone(Batch(tokens)).hidden[0, 4], expected)


@pytest.mark.parametrize("changed", range(7))
def test_a_vector_depends_on_exactly_the_last_n_tokens(changed):
    backbone, tokens = small(), some_tokens(1, 7)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 13
    moved = (backbone(Batch(tokens)).hidden - backbone(Batch(other)).hidden).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [i for i in range(7) if changed <= i < changed + ORDER]


def test_documents_in_one_row_are_independent():
    backbone = small()
    first, second = some_tokens(1, 4, seed=1), some_tokens(1, 3, seed=2)
    packed = Batch(torch.cat([first, second], 1), document_ids=torch.tensor([[0] * 4 + [1] * 3]))
    hidden = backbone(packed).hidden
    close(hidden[:, :4], backbone(Batch(first)).hidden)
    close(hidden[:, 4:], backbone(Batch(second)).hidden)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_padded_prompts_continue_as_if_alone(order):
    backbone = small(order=order)
    texts = [some_tokens(n, seed=n).tolist() for n in (5, 1, 3)]
    more = some_tokens(3, 4, seed=9)
    state = backbone(Batch(*pad(texts, 0)), backbone.new_state(3, 9)).state
    outputs = []
    for step in range(4):
        output = backbone(Batch(more[:, step : step + 1]), state)
        state, _ = output.state, outputs.append(output.hidden)
    assert state.lengths.tolist() == [9, 5, 7]
    for row, text in enumerate(texts):
        alone = backbone(Batch(torch.tensor([[*text, *more[row].tolist()]]))).hidden[0, len(text) :]
        close(torch.cat(outputs, 1)[row], alone)


def test_generation_is_the_same_with_and_without_a_state():
    backbone = small()
    model = Model(backbone, {"token": LMHead(backbone)}).eval()
    results = [
        generate(model, [[1, 2], [3]], max_tokens=8, sampling=Sampling(temperature=0.0), cache=cache)
        for cache in (True, False)
    ]
    assert [row.tokens for row in results[0]] == [row.tokens for row in results[1]]


def test_bad_settings_are_reported_together():
    with pytest.raises(ConfigError, match=r"order(.|\n)*dropout"):
        NGramConfig(vocabulary=5, order=0, dropout=1.5)
