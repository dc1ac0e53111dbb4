"""Causal models do not depend on the future, and packed documents do not attend to each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.model.attention_mask import causal_mask
from headstock.model.batch import Batch
from tests.model.small import small_backbone, some_tokens

ROWS, LENGTH = 3, 9
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], list(range(9)), [0, 0, 1, 2, 3, 4, 5, 6, 7]])

shapes = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "norm_kind": st.sampled_from(["layer", "rms"]),
        "positions": st.sampled_from(["sinusoidal", "learned", "rotary", "relative"]),
        "activation": st.sampled_from(["relu", "gelu", "swiglu"]),
        "qk_norm": st.booleans(),
        "embed_norm": st.booleans(),
        "bias": st.booleans(),
    }
)


def rows(tokens: torch.Tensor, *, padded: bool, packed: bool) -> Batch:
    batch = Batch(tokens)
    if padded:
        batch.padding = torch.arange(LENGTH)[None] >= torch.tensor([9, 7, 5])[:, None]
    if packed:
        batch.document_ids, batch.positions = DOCUMENTS, PLACES
    return batch


@given(shape=shapes, padded=st.booleans(), packed=st.booleans(), position=st.integers(1, LENGTH - 1))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_causal_model_does_not_depend_on_the_future(shape, padded, packed, position):
    backbone = small_backbone(causal=True, **shape)
    tokens = some_tokens(ROWS, LENGTH)
    other = torch.cat([tokens[:, :position], (tokens[:, position:] + 1) % 13], 1)
    before = backbone(rows(tokens, padded=padded, packed=packed)).hidden
    after = backbone(rows(other, padded=padded, packed=packed)).hidden
    torch.testing.assert_close(after[:, :position], before[:, :position], atol=1e-6, rtol=0)
    assert (after[:, position] - before[:, position]).abs().max() > 1e-4  # the changed position does


@pytest.mark.parametrize("packed", [False, True])
def test_without_the_causal_mask_it_does(packed):
    backbone = small_backbone(causal=False)
    tokens = some_tokens(ROWS, LENGTH)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 13
    before = backbone(rows(tokens, padded=False, packed=packed)).hidden
    after = backbone(rows(other, padded=False, packed=packed)).hidden
    changed = (after - before).abs().amax(-1) > 1e-4
    same_document = DOCUMENTS[:, -1:] == DOCUMENTS
    assert torch.equal(changed, same_document if packed else torch.ones_like(changed))


@given(shape=shapes, causal=st.booleans())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_packed_documents_are_processed_as_if_alone(shape, causal):
    backbone = small_backbone(causal=causal, **shape)
    tokens = some_tokens(ROWS, LENGTH)
    packed = backbone(rows(tokens, padded=False, packed=True)).hidden
    for row in range(ROWS):
        for document in DOCUMENTS[row].unique():
            inside = DOCUMENTS[row] == document
            alone = backbone(Batch(tokens[row : row + 1, inside])).hidden[0]
            torch.testing.assert_close(packed[row, inside], alone, atol=1e-5, rtol=0)


@given(shape=shapes, causal=st.booleans(), packed=st.booleans())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_padding_tokens_do_not_matter(shape, causal, packed):
    backbone = small_backbone(causal=causal, **shape)
    tokens = some_tokens(ROWS, LENGTH)
    batch = rows(tokens, padded=True, packed=packed)
    filled = rows(torch.where(batch.padding, 7, tokens), padded=True, packed=packed)
    hidden, other = backbone(batch).hidden, backbone(filled).hidden
    torch.testing.assert_close(hidden[~batch.padding], other[~batch.padding], atol=1e-6, rtol=0)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_row_is_processed_as_if_alone(causal):
    backbone = small_backbone(causal=causal)
    batch = rows(some_tokens(ROWS, LENGTH), padded=True, packed=False)
    hidden = backbone(batch).hidden
    for row, length in enumerate([9, 7, 5]):
        alone = backbone(Batch(batch.tokens[row : row + 1, :length])).hidden[0]
        torch.testing.assert_close(hidden[row, :length], alone, atol=1e-5, rtol=0)


def test_missing_segments_are_zeros():
    backbone = small_backbone(segments=2, causal=False)
    tokens = some_tokens(2, 4)
    zeros, ones = torch.zeros_like(tokens), torch.ones_like(tokens)
    assert torch.equal(backbone(Batch(tokens)).hidden, backbone(Batch(tokens, segments=zeros)).hidden)
    assert not torch.allclose(backbone(Batch(tokens)).hidden, backbone(Batch(tokens, segments=ones)).hidden)


def test_the_causal_mask_is_aligned_with_the_last_key():
    expected = [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(2, 4).tolist() == expected


@given(
    shape=shapes,
    padded=st.booleans(),
    packed=st.booleans(),
    backbone_causal=st.booleans(),
    causal_rows=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_causal_and_bidirectional_rows_can_be_mixed(shape, padded, packed, backbone_causal, causal_rows):
    backbone = small_backbone(causal=backbone_causal, **shape)
    tokens = some_tokens(ROWS, LENGTH)

    def read(causal):
        batch = rows(tokens, padded=padded, packed=packed)
        batch.causal = causal
        return backbone(batch).hidden

    mixed, uniform = read(torch.tensor(causal_rows)), {causal: read(causal) for causal in (True, False)}
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    if padded:
        real = ~rows(tokens, padded=True, packed=packed).padding
    for row, causal in enumerate(causal_rows):
        torch.testing.assert_close(mixed[row, real[row]], uniform[causal][row, real[row]], atol=1e-6, rtol=0)
    torch.testing.assert_close(read(None)[real], uniform[backbone_causal][real], atol=1e-6, rtol=0)
    assert not torch.allclose(uniform[True][real], uniform[False][real], atol=1e-4)
    assert mixed.isfinite().all()


def test_a_causal_row_in_a_bidirectional_backbone():
    backbone = small_backbone(causal=False)
    tokens = some_tokens(ROWS, LENGTH)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 13
    causal_rows = torch.tensor([True, False, True])
    before, after = (backbone(Batch(part, causal=causal_rows)).hidden for part in (tokens, other))
    changed = ((after - before).abs().amax(-1) > 1e-5)[:, :-1].any(1)
    assert torch.equal(changed, ~causal_rows)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_hidden_is_the_normed_last_layer(norm):
    backbone = small_backbone(norm=norm, depth=3)
    output = backbone(Batch(some_tokens(2, 5)), keep_layers=True)
    assert backbone.depth == 3
    assert len(output.layers) == 4
    assert torch.equal(backbone.output_norm(output.layers[-1]), output.hidden)
    assert torch.equal(output.layers[-1], output.hidden) == (norm == "post")
