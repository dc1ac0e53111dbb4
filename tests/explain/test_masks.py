"""Masks against their definitions, their formulas, and the information flow of real models."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.errors import UserError
from headstock.explain.inputs import EncodedInput
from headstock.explain.masks import MASK_KINDS, explain_mask, explain_model_masks, mask_document
from headstock.explain.render_document import page, terminal
from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.backbones.transformer import Transformer, TransformerConfig
from headstock.model.batch import Batch
from headstock.model.model import Model
from tests.report.browsing import view_page

SIZES = {"vocabulary": 20, "context": 16, "depth": 2, "width": 8, "heads": 2, "hidden": 16}


def may_attend(kind, row, column, *, length, padding, documents, prefix, causal):
    """The definition of each mask for one query and one key."""
    if kind == "causal":
        return column <= row
    if kind == "padding":
        return column < length - padding
    if kind == "prefix":
        return column < prefix if row < prefix else column <= row
    if kind == "document":
        bounds = [sum(documents[:i]) for i in range(len(documents) + 1)]
        document = next(i for i in range(len(documents)) if bounds[i] <= row < bounds[i + 1])
        return bounds[document] <= column < bounds[document + 1] and (column <= row or not causal)
    return True


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_masks_match_their_definition_and_formula(data):
    kind = data.draw(st.sampled_from(MASK_KINDS))
    documents = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    length = sum(documents)
    options = {"padding": data.draw(st.integers(0, length - 1)), "prefix": data.draw(st.integers(1, length - 1))}
    options |= {"documents": documents, "causal": data.draw(st.booleans())}
    facts = explain_mask(kind, [str(position) for position in range(length)], **options)
    allowed = [
        [may_attend(kind, row, column, length=length, **options) for column in range(length)] for row in range(length)
    ]
    assert facts.allowed == allowed
    assert facts.masked == facts.expected == sum(not entry for row in allowed for entry in row)


def test_five_tokens_have_ten_masked_entries():
    facts = explain_mask("causal", ["the", "cat", "sat", "on", "mats"])
    assert (facts.masked, facts.expected, facts.formula) == (10, 10, "L(L−1)/2")
    added = torch.tensor(facts.matrix())
    assert torch.equal(added, torch.full((5, 5), -torch.inf).triu(1))
    even = (torch.zeros(5, 5) + added).softmax(-1)  # masked weights are exactly 0
    assert torch.equal(even, torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None])
    lines = [line for line in terminal(mask_document([facts])) if "-inf" in line]
    assert lines[0].split() == ["the", "0", "-inf", "-inf", "-inf", "-inf"]


def influence(read, tokens):
    """(L, L) True where changing the token of a column changes the vector of a row."""
    before = read(tokens)
    rows = []
    for position in range(tokens.size(1)):
        changed = tokens.clone()
        changed[0, position] = (tokens[0, position] + 1) % SIZES["vocabulary"]
        rows.append((read(changed) != before).any(-1))
    return torch.stack(rows, 1)


@torch.no_grad()
def test_information_flows_exactly_through_the_mask():
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (1, 6))
    stacks = {
        causal: Transformer(TransformerConfig(**SIZES, causal=causal)).double().eval() for causal in (True, False)
    }
    for kind in ("causal", "none", "document"):
        documents = torch.tensor([[0, 0, 1, 1, 1, 1]]) if kind == "document" else None
        stack = stacks[kind != "none"]
        actual = influence(lambda row, s=stack, d=documents: s(Batch(row, document_ids=d)).hidden[0], tokens)
        expected = explain_mask(kind, ["x"] * 6, documents=(2, 4))
        assert actual.tolist() == expected.allowed, kind


@torch.no_grad()
def test_prefix_mask_matches_an_encoder_decoder():
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(**SIZES)).double().eval()

    def read(row):
        source, target = Batch(row[:, :2]), row[:, 2:]
        return torch.cat([model.encode(source)[0], model(Batch(target, source=source)).hidden[0]])

    actual = influence(read, torch.randint(0, 20, (1, 6)))
    assert actual.tolist() == explain_mask("prefix", ["x"] * 6, prefix=2).allowed
    assert actual.tolist() != explain_mask("prefix", ["x"] * 6, prefix=3).allowed


def test_model_masks_are_those_applied():
    words = list("abcd")
    row = torch.zeros(1, 4, dtype=torch.long)
    gpt = Model(Transformer(TransformerConfig(**SIZES)), {})
    (mask,) = explain_model_masks(gpt, EncodedInput(Batch(row), words), "gpt")
    assert mask.attention == "decoder" and mask.masked == mask.expected == 6
    assert mask.allowed == explain_mask("causal", words).allowed
    bidirectional = Model(Transformer(TransformerConfig(**SIZES, causal=False)), {})
    (mask,) = explain_model_masks(bidirectional, EncodedInput(Batch(row), words), "hybrid")
    assert mask.attention == "encoder" and mask.masked == mask.expected == 0
    (mask,) = explain_model_masks(bidirectional, EncodedInput(Batch(row, causal=True), words), "hybrid")
    assert mask.attention == "decoder" and mask.masked == mask.expected == 6
    pair = Model(EncoderDecoder(EncoderDecoderConfig(**SIZES)), {})
    batch = Batch(row, source=Batch(torch.zeros(1, 3, dtype=torch.long)))
    masks = explain_model_masks(pair, EncodedInput(batch, words, list("xyz")), "pair")
    facts = {mask.attention: mask for mask in masks}
    assert {where: (mask.masked, mask.entries) for where, mask in facts.items()} == {
        "encoder": (0, 9),
        "decoder": (6, 16),
        "cross": (0, 12),
    }
    assert facts["cross"].tokens == words and facts["cross"].keys == list("xyz")
    lstm = Model(Recurrent(RecurrentConfig(vocabulary=20, width=8, hidden=8)), {})
    families = "bitransformer, seq2seq, transformer"
    with pytest.raises(UserError, match=rf"has no attention \(families that have it: {families}\)"):
        explain_model_masks(lstm, EncodedInput(Batch(row), words), "lstm")


def test_mask_command(call, tmp_path):
    out, _ = call("explain", "mask", "--tokens", "the cat sat on mats", "--out", tmp_path / "mask.svg")
    assert "10 of 25 entries are masked, L(L−1)/2 = 10" in out and out.count("-inf") == 10
    assert (tmp_path / "mask.svg").read_text(encoding="utf-8").count("−∞") == 10
    out, _ = call("explain", "mask", "--kind", "document", "--length", 5, "--documents", "2,3", "--json")
    result = json.loads(out)
    assert result["masked"] == result["expected"] == 16 and result["matrix"][2] == ["-inf", "-inf", 0, "-inf", "-inf"]
    out, _ = call("explain", "mask", "--preset", "gpt-nano", "--set", "vocabulary=300", "--length", 5, "--json")
    assert json.loads(out)["masked"] == 10


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--kind", "casual"], "must be causal, none, padding, document, prefix; did you mean 'causal'?"),
        (["--length", 0], "at least one token"),
        (["--kind", "document", "--length", 5, "--documents", "2,2"], "--documents 2,2"),
        (["--kind", "document", "--documents", "2,x"], "such as 2,3"),
        (["--kind", "prefix", "--prefix", 5], "between 1 and 4"),
        (["--kind", "padding", "--padding", 5], "between 0 and 4"),
        (["--tokens", "a b", "--length", 3], "--tokens has 2 words and --length is 3"),
        (["--out", "mask.png"], "must end in .html (a page) or .svg"),
        (["--where", "cross"], "need a run"),
        (["--preset", "gpt-nano", "--kind", "causal"], "its own mask"),
        (["--preset", "gpt-nano", "--length", 300], "300 tokens exceed its context of 256"),
        (["--preset", "gpt-nano", "--where", "cross"], "gpt-nano has no cross-attention"),
        (["--preset", "lstm-nano"], "has no attention"),
        (["--length", 65, "--out", "mask.html"], "65 tokens"),
    ],
)
def test_invalid_options_are_one_error_line(call, words, result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, err = call("explain", "mask", *words, code=2)
    assert result in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_page_is_self_contained(browser, tmp_path):
    path = tmp_path / "mask.html"
    path.write_text(page(mask_document([explain_mask("prefix", ["<b>", "&", "c", "d"], prefix=2)])), encoding="utf-8")
    for width, scheme in ((1280, "light"), (390, "dark")):
        assert view_page(browser, path, width=width, scheme=scheme).is_sound()


def test_picture_has_a_square_for_every_pair():
    facts = explain_mask("causal", ["<b>", "b", "c"])
    svg = mask_document([facts]).picture()
    assert svg.count('class="cell"') == 9 and svg.count("is masked from") == 3 and "<b>" not in svg
