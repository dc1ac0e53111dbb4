"""The residual stream and the logit lens against plain tensor code."""

import json
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain.render_document import page
from headstock.explain.residual import explain_residual
from headstock.explain.residual_document import residual_document
from headstock.inference.translate import display_tokens
from headstock.model.batch import Batch
from tests.explain.pipelines import make_classifier, make_pipeline

TEXT = "Anne likes Paris. Ben finds the sea."


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_steps_match_plain_tensor_code(tokenizer, norm):
    run = make_pipeline(tokenizer, norm=norm)
    facts = explain_residual(run, [TEXT])
    batch = Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]]))
    layers = [layer[0] for layer in run.model(batch, keep_layers=True).layers]  # (T, D) each
    assert [step.point for step in facts.steps] == ["resid_mid", "resid_post"] * 2
    assert [step.norm for step in facts.steps[1::2]] == pytest.approx([float(x.norm(dim=1).mean()) for x in layers[1:]])
    assert facts.embedding["stack"] == pytest.approx(float(layers[0].norm(dim=1).mean()))
    paths = facts.tokens["stack"]
    assert [path.token for path in paths][1:] == display_tokens(tokenizer, batch.tokens[0, 1:].tolist())
    for position, path in enumerate(paths):
        assert path.norms == pytest.approx([float(layer[position].norm()) for layer in layers], rel=1e-5)
        moved = [float((b[position] - a[position]).norm() / a[position].norm()) for a, b in pairwise(layers)]
        assert path.moved == pytest.approx(moved, rel=1e-5)
        assert path.home == pytest.approx(
            [float(F.cosine_similarity(x[position], layers[0][position], 0)) for x in layers], abs=1e-5
        )
    # the last sublayer by hand
    block, before = run.model.backbone.blocks[1], None
    handle = block.around_feed.register_forward_pre_hook(lambda module, inputs: setattr(block, "input", inputs[0]))
    run.model(batch)
    handle.remove()
    before, last = block.input[0], facts.steps[-1]
    added = block.feed(before if norm == "post" else block.around_feed.norm(before))
    assert last.added == pytest.approx(float(added.norm(dim=1).mean()), rel=1e-5)
    assert last.share == pytest.approx(float((added.norm(dim=1) / before.norm(dim=1)).mean()), rel=1e-5)
    assert last.cosine == pytest.approx(float(F.cosine_similarity(added, before, 1).mean()), abs=1e-5)
    moved = float(((layers[2] - before).norm(dim=1) / before.norm(dim=1)).mean())
    assert last.moved == pytest.approx(moved, rel=1e-5)
    assert (last.moved == pytest.approx(last.share, rel=1e-4)) == (norm == "pre")  # post-norm also rescales


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_lens_ends_with_the_prediction_of_the_model(tokenizer, norm):
    run = make_pipeline(tokenizer, norm=norm)
    facts = explain_residual(run, [TEXT])
    batch = Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]]))
    output = run.model(batch, keep_layers=True)
    assert facts.predicts == "next token" and len(facts.lens) == batch.tokens.size(1)
    for depth, layer in enumerate(output.layers):
        # pre-norm models apply the final norm before the head
        out = run.model.backbone.final_norm(layer) if norm == "pre" else layer
        probabilities = F.linear(out, run.model.backbone.tokens.weight)[0].softmax(-1)
        for guess, row in zip(facts.lens, probabilities, strict=True):
            assert [p for _, p in guess.layers[depth]] == pytest.approx(
                row.sort(descending=True)[0][:5].tolist(), rel=1e-4
            )
    final = run.model.heads["token"](output.hidden)[0].argmax(-1).tolist()
    result = [guess.layers[-1][0][0] for guess in facts.lens]
    assert result == [
        name if name.isprintable() else name.encode("unicode_escape").decode()
        for name in display_tokens(tokenizer, final)
    ]
    assert all(guess.ranks[-1] == 1 for guess in facts.lens)
    assert [guess.expected for guess in facts.lens][-1] is None
    assert facts.lens[0].expected == tokenizer.decode(tokenizer.encode(TEXT)[:1]).strip()


@torch.no_grad()
def test_lens_at_masks(tokenizer):
    run = make_pipeline(tokenizer, "masked")
    facts = explain_residual(run, ["Anne [MASK] Paris. Ben [MASK] home."])
    assert [guess.token for guess in facts.lens] == ["[MASK]", "[MASK]"] and facts.predicts == "masked token"
    ids = [tokenizer.cls, *tokenizer.encode("Anne"), tokenizer.mask, *tokenizer.encode(" Paris. Ben")]
    first, second = 1 + len(tokenizer.encode("Anne")), len(ids)
    ids = torch.tensor([[*ids, tokenizer.mask, *tokenizer.encode(" home.")]])
    probabilities = run.model.heads["token"](run.model(Batch(ids)).hidden)[0, [first, second]].softmax(-1)
    for guess, row in zip(facts.lens, probabilities, strict=True):
        assert [p for _, p in guess.layers[-1]] == pytest.approx(row.sort(descending=True)[0][:5].tolist(), rel=1e-4)
    facts = explain_residual(run, [TEXT])
    assert len(facts.lens) == len(tokenizer.encode(TEXT)) and "no token is masked" in facts.notes[0]


@torch.no_grad()
def test_lens_of_a_classifier(tokenizer):
    run = make_classifier(tokenizer)
    (guess,) = explain_residual(run, [TEXT]).lens
    assert dict(guess.layers[-1]) == pytest.approx(run.predict(TEXT)[0]["probabilities"], abs=1e-5)
    batch = Batch(torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]]))
    layers = run.model(batch, keep_layers=True).layers
    first = run.model.heads["label"](run.model.backbone.final_norm(layers[0]).mean(1)).softmax(-1)[0]
    assert dict(guess.layers[0]) == pytest.approx(
        dict(zip(("bad", "fair", "good"), first.tolist(), strict=True)), abs=1e-5
    )
    middle = make_classifier(tokenizer, task_layers="1")
    (guess,) = explain_residual(middle, [TEXT]).lens
    assert dict(guess.layers[1]) == pytest.approx(middle.predict(TEXT)[0]["probabilities"], abs=1e-5)
    mixed = explain_residual(make_classifier(tokenizer, task_layers="mix"), [TEXT])
    assert mixed.lens == [] and "several layers (mix)" in mixed.notes[0]


def test_lens_of_an_encoder_decoder(tokenizer):
    facts = explain_residual(make_pipeline(tokenizer, "denoise", family="seq2seq"), [TEXT])
    assert list(facts.tokens) == ["encoder", "decoder"]
    assert [step.point for step in facts.steps if step.stack == "decoder"][:3] == [
        "resid_mid",
        "resid_cross",
        "resid_post",
    ]
    assert len(facts.lens) == len(facts.tokens["decoder"]) and facts.lens[-1].expected == tokenizer.id_to_token(
        tokenizer.eos
    )


def test_invalid_input_is_refused(tokenizer):
    run = make_pipeline(tokenizer, family="recurrent")
    with pytest.raises(UserError, match="its recurrent backbone has no residual stream"):
        explain_residual(run, [TEXT])
    long = " ".join(["Anne likes Paris."] * 20)
    with pytest.raises(
        UserError, match=f"{len(tokenizer.encode(long)) + 1} tokens with special tokens, and this run reads 24"
    ):
        explain_residual(make_pipeline(tokenizer), [long])
    with pytest.raises(UserError, match="the text is empty"):
        explain_residual(make_pipeline(tokenizer), [""])


def test_json_and_escaping(tokenizer):
    facts = explain_residual(make_pipeline(tokenizer), ["<b>x</b> & é"])
    assert json.loads(json.dumps(facts.to_dict()))["lens"][0]["layers"][0][0].keys() == {"answer", "probability"}
    html = page(residual_document(facts, "a <b> run", "<script>x</script>"))
    assert "<script" not in html and "&lt;script&gt;" in html
