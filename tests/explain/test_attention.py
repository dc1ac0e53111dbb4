"""Attention weights against a textbook computation, and the interactive page in a browser."""

import base64
import json
import math
import zlib

import numpy as np
import pytest
import torch

import headstock
from headstock.errors import UserError
from headstock.explain.attention import (
    AttentionMeter,
    attention_patterns,
    explain_attention,
    explain_file_attention,
    select_heads,
)
from headstock.explain.attention_document import SCALE, attention_document, packed
from headstock.explain.inputs import EncodedInput, encode_file, encode_input
from headstock.explain.masks import explain_model_masks
from headstock.explain.render_document import page
from headstock.model.attention_mask import AttentionMask
from headstock.model.attention_weights import AttentionRecord, attention_modules, record_attention, record_hook
from headstock.model.backbones.bidirectional_transformer import BidirectionalTransformer, BidirectionalTransformerConfig
from headstock.model.batch import Batch
from headstock.model.model import Model
from headstock.train.finetune import finetune
from tests.conftest import TINY
from tests.model.small import SIZES, small_model, some_tokens, stir
from tests.report.browsing import open_tab, view_page
from tests.tasks.parallel import QUICK, sentences, write

MODERN = {"norm_kind": "rms", "positions": "rotary", "activation": "swiglu", "qk_norm": True, "bias": False}
CLASSIC = {"norm": "post", "positions": "sinusoidal", "activation": "relu", "embed_scale": True}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A briefly trained run per family."""
    folder = tmp_path_factory.mktemp("runs")
    settings = TINY | {"steps": 4}
    headstock.pretrain(corpus, out=folder / "gpt", settings=settings)
    headstock.pretrain(corpus, out=folder / "hybrid", settings=settings | {"task.name": "hybrid"})
    small = {name: value for name, value in settings.items() if name != "heads"}
    headstock.pretrain(corpus, out=folder / "lstm", preset="lstm-nano", settings=small | {"depth": 1, "length": 32})
    rows = write(folder / "train.tsv", sentences(60, "train"))
    short = QUICK | {"epochs": 1.0, "tensorboard": False}
    finetune(None, preset="seq2seq-nano", task="translate", train=rows, valid=rows, out=folder / "pair", settings=short)
    return folder


def textbook_weights(model, tokens):
    """(H, T, T) the weights of the first layer, computed one query and one head at a time."""
    backbone, length = model.backbone, tokens.size(1)
    block, heads, width = backbone.blocks[0], backbone.config.heads, backbone.width // backbone.config.heads
    x = backbone.embed(Batch(tokens), torch.arange(length), length)[0]
    h = x if block.around_attention.post else block.around_attention.norm(x)
    queries, keys, _ = block.attention.inputs(h).chunk(3, -1)
    weights = torch.zeros(heads, length, length)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(length):
            keys_allowed = range(i + 1) if backbone.causal else range(length)
            query = encode_position(backbone, block.attention.query_norm, queries[i, part], i)
            scores = [
                query @ encode_position(backbone, block.attention.key_norm, keys[j, part], j) for j in keys_allowed
            ]
            exponentials = [math.exp(float(score) / math.sqrt(width)) for score in scores]
            for j, value in zip(keys_allowed, exponentials, strict=True):
                weights[head, i, j] = value / sum(exponentials)
    return weights


def encode_position(backbone, norm, vector, position):
    """A query or key, normalized and rotated by complex numbers."""
    if norm is not None:
        vector = vector / (vector.pow(2).mean() + 1e-5).sqrt() * norm.weight
    if backbone.config.positions != "rotary":
        return vector
    half = len(vector) // 2
    pairs = torch.complex(vector[:half], vector[half:])
    pairs = pairs * torch.exp(1j * position * 10_000 ** (-torch.arange(half) / half))
    return torch.cat([pairs.real, pairs.imag])


@pytest.mark.parametrize("settings", [{}, {"causal": False}, MODERN, CLASSIC], ids=["gpt", "bert", "modern", "classic"])
@torch.no_grad()
def test_weights_match_a_textbook_computation(settings):
    model, tokens = small_model(**settings), some_tokens(1, 7)
    records = attention_patterns(model, Batch(tokens))
    kind = "encoder" if settings.get("causal") is False else "decoder"
    assert [(record.kind, record.layer) for record in records] == [(kind, 1), (kind, 2)]
    assert torch.allclose(records[0].weights[0], textbook_weights(model, tokens), atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": False}, MODERN, CLASSIC, {"positions": "relative"}],
    ids=["gpt", "bert", "modern", "classic", "relative"],
)
@torch.no_grad()
def test_recording_changes_nothing_and_weights_match_fused_attention(settings):
    model, records = small_model(**settings), []
    tokens, padding = some_tokens(3, 9), torch.arange(9)[None] >= torch.tensor([9, 4, 7])[:, None]
    batch = Batch(tokens, padding)
    before = model(batch).hidden
    with record_attention(model, records.append):
        during = model(batch).hidden
    assert torch.equal(before, during) and torch.equal(before, model(batch).hidden)
    assert len(records) == 2 and all(record.error < 1e-5 for record in records)
    assert all(attention.hook is None for _, _, attention in attention_modules(model))
    with (
        pytest.raises(ValueError, match="stop"),
        record_attention(model, lambda record: (_ for _ in ()).throw(ValueError("stop"))),
    ):
        model(batch)
    assert all(attention.hook is None for _, _, attention in attention_modules(model))


def test_attention_that_ignores_its_mask_is_detected():
    generator, records = torch.Generator().manual_seed(0), []
    query, key, value = (torch.randn(1, 2, 5, 4, generator=generator) for _ in range(3))
    unmasked = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    record_hook("decoder", 1, records.append)(query, key, value, AttentionMask(causal=True), unmasked)
    record_hook("encoder", 1, records.append)(query, key, value, AttentionMask(), unmasked)
    assert records[0].error > 0.1 and records[1].error < 1e-6
    real, ignored, future = torch.ones(1, 5, dtype=torch.bool), AttentionMeter(), AttentionMeter()
    ignored.update(records[0], real)
    assert ignored.future == ignored.masked == 0 and ignored.fused_error > 0.1
    full = torch.full((1, 2, 5, 5), 0.2)
    future.update(AttentionRecord("decoder", 1, full, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), 0.0), real)
    assert future.future == future.masked == pytest.approx(0.2)
    future.update(AttentionRecord("decoder", 2, full * 0.9, torch.ones(1, 1, 5, 5, dtype=torch.bool), 0.0), real)
    assert future.sum_error == pytest.approx(0.1, abs=1e-6)


@torch.no_grad()
def test_measures_are_means_over_queries_with_several_keys():
    model, tokens = small_model(), some_tokens(1, 6)
    facts = explain_attention(model, EncodedInput(Batch(tokens), [str(i) for i in range(6)]), "gpt")
    for record in attention_patterns(model, Batch(tokens)):
        for head, rows in enumerate(record.weights[0].tolist(), 1):
            (result,) = (item.measures for item in facts.heads if (item.layer, item.head) == (record.layer, head))
            counted = list(enumerate(rows))[1:]  # the first position has one key only
            mean = {
                "entropy": np.mean([-sum(w * math.log2(w) for w in row if w) for _, row in counted]),
                "distance": np.mean([sum(w * abs(i - j) for j, w in enumerate(row)) for i, row in counted]),
                "first": np.mean([row[0] for _, row in counted]),
                "itself": np.mean([row[i] for i, row in counted]),
                "previous": np.mean([row[i - 1] for i, row in counted]),
                "next": 0.0,
            }
            assert result == pytest.approx(mean, abs=1e-5)
    (uniform,) = facts.uniform
    assert uniform.measures["entropy"] == pytest.approx(np.mean([math.log2(i + 1) for i in range(1, 6)]), abs=1e-6)
    assert uniform.measures["distance"] == pytest.approx(np.mean([i / 2 for i in range(1, 6)]), abs=1e-6)
    assert facts.sums_to_one and facts.future == facts.masked == 0 and facts.fused_error < 1e-5
    assert all(check.holds for check in facts.checks())


@torch.no_grad()
def test_file_average_is_independent_of_padding():
    model = small_model(causal=False)
    lengths, rows = (9, 4, 6), some_tokens(3, 9)
    padding = torch.arange(9)[None] >= torch.tensor(lengths)[:, None]
    names = [str(i) for i in range(9)]
    alone = [
        explain_attention(model, EncodedInput(Batch(row[None, :n]), names[:n]), "x")
        for row, n in zip(rows, lengths, strict=True)
    ]
    for batches in ([Batch(rows, padding)], [Batch(row[None, :n]) for row, n in zip(rows, lengths, strict=True)]):
        facts = explain_file_attention(model, batches, "x")
        assert (facts.texts, facts.positions) == (3, 19) and facts.sums_to_one and facts.future is None
        for i, head in enumerate(facts.heads):
            measures_by_text = [(n, text_facts.heads[i].measures) for n, text_facts in zip(lengths, alone, strict=True)]
            expected = {
                name: sum(n * measures[name] for n, measures in measures_by_text) / 19 for name in head.measures
            }
            assert head.measures == pytest.approx(expected, abs=1e-5)
        texts = [text_facts.maps[0].weights[:, 5, 2] for n, text_facts in zip(lengths, alone, strict=True) if n > 5]
        assert facts.maps[0].weights[:, 5, 2] == pytest.approx(
            np.mean(texts, 0), abs=1e-5
        )  # of the texts that have a sixth position


@torch.no_grad()
def test_both_directions_are_named_and_in_the_order_of_the_text():
    torch.manual_seed(0)
    backbone = BidirectionalTransformer(BidirectionalTransformerConfig(**SIZES))
    stir(backbone)
    model, tokens = Model(backbone, {}).eval(), some_tokens(1, 6)
    records = attention_patterns(model, Batch(tokens))
    kinds = [(record.kind, record.layer) for record in records]
    assert kinds == [("forward", 1), ("forward", 2), ("backward", 1), ("backward", 2)]
    mirrored = attention_patterns(Model(backbone.backwards, {}), Batch(tokens.flip(1)))
    assert torch.equal(records[3].weights, mirrored[1].weights.flip(-2, -1))
    assert records[2].weights.tril(-1).max() == 0 < records[2].weights.triu(1).max()
    facts = explain_attention(model, EncodedInput(Batch(tokens), [str(i) for i in range(6)]), "both")
    assert all(check.holds for check in facts.checks()) and facts.future == facts.past == 0
    assert [(layer.where, layer.layer) for layer in facts.maps] == kinds
    html = page(attention_document(facts, "a text"))
    assert "Forward self-attention" in html and "Backward self-attention" in html and "Decoder" not in html
    masks = explain_model_masks(model, EncodedInput(Batch(tokens), [str(i) for i in range(6)]), "both")
    counts = [(mask.attention, mask.masked, mask.expected) for mask in masks]
    assert counts == [("forward", 15, 15), ("backward", 15, 15)]
    assert "later positions" in masks[1].reason and not masks[1].allowed[5][0] and masks[1].allowed[0][5]


# Runs


def test_input_is_encoded_with_the_special_tokens_of_the_task(runs):
    loaded = headstock.load(runs / "gpt")
    encoded = encode_input(loaded, ["Anne sees home."])
    assert encoded.tokens[0] == "<sos>" and "".join(encoded.tokens[1:]).replace("␣", "") == "Anneseeshome."
    facts = explain_attention(loaded.model, encoded, "gpt")
    assert {head.where for head in facts.heads} == {"decoder"} and len(facts.heads) == 4
    hybrid = headstock.load(runs / "hybrid")
    masked = encode_input(hybrid, ["Anne sees [MASK]."])
    assert masked.tokens[0] == "[CLS]" and "[MASK]" in masked.tokens
    bidirectional = explain_attention(hybrid.model, masked, "hybrid")
    assert bidirectional.future is None and np.triu(bidirectional.maps[0].weights[0], 1).max() > 0
    left_to_right = encode_input(hybrid, ["Anne sees home."], left_to_right=True)
    causal = explain_attention(hybrid.model, left_to_right, "hybrid")
    assert (
        left_to_right.tokens[0] == "<sos>"
        and causal.future == 0
        and {head.where for head in causal.heads} == {"decoder"}
    )


def test_encoder_decoder_has_three_kinds_of_attention(runs):
    loaded = headstock.load(runs / "pair")
    generated = encode_input(loaded, ["anne sees a dog ."])
    assert generated.notes == [f"its translation: {loaded.translate('anne sees a dog .')[0]}"]
    encoded = encode_input(loaded, ["anne sees a dog ."], target="hundo un vidas ana .")
    assert "".join(encoded.tokens).replace("␣", "") == "<sos>hundounvidasana." and encoded.source[-1] == "<eos>"
    facts = explain_attention(loaded.model, encoded, "pair")
    shapes = {layer.where: layer.weights.shape for layer in facts.maps}
    target, source = len(encoded.tokens), len(encoded.source)
    assert shapes == {"encoder": (2, source, source), "decoder": (2, target, target), "cross": (2, target, source)}
    assert facts.sums_to_one and facts.future == 0 and facts.fused_error < 1e-5
    (cross,) = (layer for layer in facts.maps if layer.where == "cross")
    aligned = loaded.align("anne sees a dog .").weights
    weights = explain_attention(loaded.model, generated, "pair", where="cross").maps[0].weights.mean(0)
    assert weights == pytest.approx(aligned, abs=1e-6)  # one layer: what `translate --alignment` draws
    assert all(head.measures["distance"] is None for head in facts.heads if head.where == "cross") and cross.layer == 1


def test_files_of_rows_or_lines_are_encoded(runs, corpus, tmp_path):
    loaded, pair = headstock.load(runs / "gpt"), headstock.load(runs / "pair")
    sizes = [batch.tokens.shape for batch in encode_file(loaded, str(corpus), rows=20)]
    assert [rows for rows, _ in sizes] == [16, 4] and max(length for _, length in sizes) <= 32
    forced = list(encode_file(pair, str(runs / "train.tsv"), rows=3))
    assert len(forced[0].tokens) == 3 and forced[0].tokens.size(1) > 2  # the translations of the file, not its own
    lines = tmp_path / "lines.txt"
    lines.write_text("anne sees a dog .\n\nben likes the cat .\n", encoding="utf-8")
    (batch,) = encode_file(pair, str(lines))
    assert len(batch.tokens) == 2 and batch.source is not None
    facts = explain_file_attention(pair.model, [batch], "pair")
    assert facts.texts == 2 and len(facts.source) == batch.source.tokens.size(1)


def test_attention_command(call, runs, corpus, tmp_path):
    out, _ = call("explain", "attention", runs / "gpt", "Anne sees home.")
    assert "yes: no weight on the future (largest weight 0)" in out and "yes: every row of weights sums to one" in out
    result = json.loads(call("explain", "attention", runs / "gpt", "--file", corpus, "--rows", 5, "--json")[0])
    assert result["texts"] == 5 and len(result["heads"]) == 4 and all(check["holds"] for check in result["checks"])
    arguments = [runs / "gpt", "Anne sees home.", "--layer", 2, "--head", 1]
    result = json.loads(call("explain", "attention", *arguments, "--out", tmp_path / "one.svg", "--json")[0])
    assert [(head["layer"], head["head"]) for head in result["heads"]] == [(2, 1)]
    svg = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert svg.count('class="cell"') == len(result["tokens"]) ** 2 and "layer 2, head 1" in svg
    call("explain", "attention", runs / "gpt", "Anne sees home.", "--out", tmp_path / "all.svg")
    assert (tmp_path / "all.svg").read_text(encoding="utf-8").count("<image") == 4
    out, _ = call("explain", "mask", runs / "hybrid", "Anne sees home.", "--left-to-right", "--json")
    assert json.loads(out)["masked"] == json.loads(out)["expected"] > 0


def test_invalid_input_is_one_error_line(call, runs, tmp_path):
    long = "Anne sees home. " * 20
    count = len(headstock.load(runs / "gpt").tokenizer.encode(long)) + 1
    for words, line in [
        ([runs / "gpt", long], f"{count} tokens with special tokens, and this run reads 32"),
        ([runs / "gpt", "Anne", "--where", "cross"], "has no cross-attention, only decoder self-attention"),
        ([runs / "gpt", "Anne", "--where", "corss"], "did you mean 'cross'"),
        ([runs / "lstm", "Anne"], "has no attention (families that have it: bitransformer, seq2seq, transformer)"),
        ([runs / "gpt", "Anne", "Ben"], "one text, found 2"),
        ([runs / "gpt", " "], "the text is empty"),
        ([runs / "gpt"], "no text: give one, or name a --file"),
        ([runs / "gpt", "Anne", "--file", "x.txt"], "not both"),
        ([runs / "gpt", "--file", tmp_path / "no.txt"], "no.txt"),
        ([runs / "gpt", "Anne", "--layer", 3], "--layer 3: must be from 1 to 2"),
        ([runs / "gpt", "Anne", "--target", "Ben"], "--target has no meaning"),
        ([runs / "gpt", "Anne", "--rows", 3], "--rows goes with --file"),
        ([runs / "pair", "anne sees a dog .", "--out", tmp_path / "x.svg"], "choose with --where"),
        ([runs / "pair", "anne", "--target", "a " * 99], "this run reads 32"),
        ([runs / "pair", "anne", "--left-to-right"], "was not trained to generate"),
        ([tmp_path / "none", "Anne"], "none"),
    ]:
        _, err = call("explain", "attention", *words, code=2)
        assert line in err and err.count("\n") == 1, (words, err)
    assert list(tmp_path.iterdir()) == []


# The page


def test_weights_are_packed_to_a_tenth_of_a_percent():
    weights = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).numpy()
    unpacked = np.frombuffer(zlib.decompress(base64.b64decode(packed(weights))), np.uint8).astype(int)
    low, high = unpacked.reshape(2, -1)
    assert (low + 256 * high) / SCALE == pytest.approx(weights.flatten(), abs=0.5 / SCALE + 1e-7)


def test_page_size_with_many_heads():
    model = small_model(depth=6, width=64, heads=8, context=128, vocabulary=SIZES["vocabulary"])
    encoded = EncodedInput(Batch(some_tokens(1, 128)), [f"w{i}" for i in range(128)])
    facts = explain_attention(model, encoded, "big")
    assert len(page(attention_document(facts, "x"))) < 1_500_000  # of 786,432 weights
    assert len(page(attention_document(select_heads(facts, layer=1, head=1), "x"))) < 100_000


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_enlarges_a_head_and_shows_the_weight_under_the_pointer(browser, tmp_path, width, scheme):
    words = ["<sos>", "<script>alert(1)</script>", "&amp;", "film", "."]
    model, path = small_model(), tmp_path / "attention.html"
    facts = explain_attention(model, EncodedInput(Batch(some_tokens(1, 5)), words), "<b>run</b>")
    path.write_text(page(attention_document(facts, "<i>text</i>")), encoding="utf-8")
    assert view_page(browser, path, width=width, scheme=scheme).is_sound()
    tab = open_tab(browser, width=width, scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})  # shows the whole enlarged head
    tab.wait_for_selector("html[data-ready=yes]")
    assert tab.locator(".zoom h3").inner_text() == "Layer 1, head 1"
    tab.get_by_label("layer 2, head 2").click()
    assert tab.locator(".zoom h3").inner_text() == "Layer 2, head 2"
    assert tab.locator(".grid button[aria-pressed=true]").count() == 1
    weights = facts.maps[1].weights[1]
    tab.locator(".read span").nth(3).hover()  # the word film
    output = tab.locator(".readout").inner_text()
    assert output.startswith("film (4) attends most to ") and f"{weights[3].max():.1%}" in output
    box = tab.locator(".zoom canvas").bounding_box()
    last = {"x": box["width"] - 8 - 5, "y": box["height"] - 8 - 5}
    tab.locator(".zoom canvas").hover(position=last)  # the last square
    assert tab.locator(".readout").inner_text() == f". (5) attends to . (5): {weights[4, 4]:.1%}"
    painted = (
        "e => { const d = e.getContext('2d').getImageData(0, 0, 5, 5).data; return [d[4 * 4 + 3], d[4 * 20 + 3]] }"
    )
    future, past = tab.locator(".grid canvas").first.evaluate(painted)  # (row 1, column 5) and (row 5, column 1)
    assert future == 0 and past == pytest.approx(255 * math.sqrt(facts.maps[0].weights[0, 4, 0]), abs=2)


def test_picture_holds_one_kind_of_attention(runs):
    loaded = headstock.load(runs / "pair")
    encoded = encode_input(loaded, ["anne sees a dog ."], target="hundo .")
    with pytest.raises(UserError, match="choose with --where"):
        attention_document(explain_attention(loaded.model, encoded, "pair"), "").picture()
    svg = attention_document(explain_attention(loaded.model, encoded, "pair", where="cross"), "").picture()
    assert "prefers-color-scheme: dark" in svg and svg.count("<image") == 2
