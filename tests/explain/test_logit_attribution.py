"""Direct logit attribution: the terms add up to the logit, and one of them is computed by hand."""

import json
from dataclasses import replace

import pytest
import torch

from headstock.errors import UserError
from headstock.explain import logit_attribution
from headstock.explain.hooks import run_with_cache
from headstock.explain.logit_attribution import attribute_logit, explain_logits, logit_document
from headstock.explain.logit_target import double_copy, logit_target
from headstock.explain.render_document import page
from tests.explain.pipelines import make_classifier, make_pipeline

TEXT = "Anne likes Paris. Ben finds the sea."
MODERN = {"norm_kind": "rms", "positions": "rotary", "activation": "swiglu", "qk_norm": True, "bias": False}
CAUSAL = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "no-norm": {"norm": "none"},
    "no-skip": {"residual": False, "norm": "post"},
    "outer": {"feed_activation": "outer", "activation": "relu"},
    "modern": MODERN,
    "untied": {"tied": False, "embed_norm": True},
}
CLASSIFIERS = {
    "mean": {},
    "last": {"task_pool": "last"},
    "concat": {"task_pool": "concat"},  # with a maximum over positions
    "dense": {"task_pool": "cls", "task_dense": "tanh", "causal": False},
}


def check(facts, heads=4):
    assert facts.error < 1e-12 and facts.check().holds
    by_part = {part.part for part in facts.contributions}
    assert {"embedding", "attention", "feed"} <= by_part
    assert sum(part.part == "attention" for part in facts.contributions) == heads


@pytest.mark.parametrize("settings", CAUSAL.values(), ids=CAUSAL)
def test_contributions_add_up_to_the_logit_of_a_next_token(tokenizer, settings):
    run = make_pipeline(tokenizer, **settings)
    facts = explain_logits(run, [TEXT])
    check(facts)
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]])
    with torch.no_grad():
        logits = run.model.heads["token"](run.model(logit_target(run, [TEXT]).batch).hidden[:, -1])
    assert facts.kind == "next token" and logit_target(run, [TEXT]).batch.tokens.tolist() == ids.tolist()
    allowed = [i for i in range(logits.size(1)) if i not in set(run.suppressed_tokens())]
    assert facts.logit == pytest.approx(float(logits[0, allowed].max()), abs=1e-4)


@pytest.mark.parametrize("settings", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_contributions_add_up_to_the_logit_of_a_class(tokenizer, settings):
    run = make_classifier(tokenizer, **settings)
    facts = explain_logits(run, [TEXT], label="good", versus="bad")
    check(facts)
    probabilities = run.predict(TEXT)[0]["probabilities"]
    odds = probabilities["good"] / probabilities["bad"]
    assert facts.logit == pytest.approx(float(torch.tensor(odds).log()), abs=1e-4)


def test_contributions_add_up_in_masked_and_encoder_decoder_models(tokenizer):
    for settings in ({"task_transform": True}, {"norm": "post"}):
        facts = explain_logits(make_pipeline(tokenizer, "masked", **settings), ["Anne [MASK] Paris. [MASK]"], at=2)
        check(facts)
        assert facts.kind == "masked word" and facts.token == "[MASK]"
    run = make_pipeline(tokenizer, "translate", family="seq2seq")
    first, second = (explain_logits(run, [TEXT], label="Ben likes home.", at=at) for at in (1, 2))
    for facts in (first, second):
        check(facts)
        assert sum(part.part == "cross" for part in facts.contributions) == 4
        assert all(part.point.startswith(("decoder.", "heads.", "backbone.decoder.")) for part in facts.contributions)
    assert first.logit != second.logit


@torch.no_grad()
def test_a_head_and_the_embedding_by_hand(tokenizer):
    run = make_pipeline(tokenizer)
    target = logit_target(run, [TEXT])
    model = double_copy(run.model)
    _, cache = run_with_cache(model, target.batch)
    norm, last = model.backbone.final_norm, cache["blocks.1.resid_post"][0, -1]
    scale = (last.var(unbiased=False) + norm.eps).rsqrt()
    direction = model.backbone.tokens.weight[target.answer] * norm.weight * scale

    def read(vector):
        return float((vector - vector.mean()) @ direction)

    weight = model.backbone.blocks[1].attention.output.weight
    second_head = weight[:, 4:] @ cache["blocks.1.attention.head_output"][0, 1, -1]
    expected = {
        ("embedding", None, None): read(cache["embedding"][0, -1]),
        ("attention", 2, 2): read(second_head),
    }
    values = {(part.part, part.layer, part.head): part.value for part in attribute_logit(model, target)}
    for key, value in expected.items():
        assert values[key] == pytest.approx(value, abs=1e-10)


def test_a_norm_that_is_not_frozen_does_not_add_up(tokenizer, monkeypatch):
    monkeypatch.setattr(logit_attribution, "freeze", lambda model: model)
    facts = explain_logits(make_pipeline(tokenizer), [TEXT])
    assert facts.error > 0.1 and not facts.check().holds  # gradient x input of a norm is zero


def test_a_missing_contribution_is_noticed(tokenizer):
    facts = explain_logits(make_pipeline(tokenizer), [TEXT])
    assert not replace(facts, contributions=facts.contributions[1:]).check().holds


def test_invalid_input_is_refused(tokenizer):
    with pytest.raises(UserError, match="its recurrent backbone has no residual stream"):
        explain_logits(make_pipeline(tokenizer, family="recurrent"), [TEXT])
    with pytest.raises(UserError, match="its head reads other layers than the last"):
        explain_logits(make_classifier(tokenizer, task_layers="mix"), [TEXT])
    with pytest.raises(UserError, match="--versus good: is the answer that is explained"):
        explain_logits(make_classifier(tokenizer), [TEXT], label="good", versus="good")
    with pytest.raises(UserError, match="log-probabilities of ordered classes"):
        explain_logits(make_pipeline(tokenizer, "ordinal", task_classes=("1", "2", "3"), task_pool="mean"), [TEXT])
    with pytest.raises(UserError, match="--at 99"):
        explain_logits(make_pipeline(tokenizer, "translate", family="seq2seq"), [TEXT], label="Ben", at=99)


def test_json_and_page(tokenizer):
    facts = explain_logits(make_classifier(tokenizer), ["<b>x</b>"])
    values = json.loads(json.dumps(facts.to_dict()))
    assert values["sum"] == pytest.approx(values["logit"]) and values["contributions"][0]["part"] == "embedding"
    document = logit_document(facts, "a <b> run", "<script>")
    assert "<script" not in page(document) and document.picture().startswith("<svg")
