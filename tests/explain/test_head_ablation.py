"""Head ablation and activation patching against models with other weights and plain forward passes."""

import json
import math

import pytest
import torch

from headstock.errors import UserError
from headstock.explain.head_ablation import explain_heads, head_document
from headstock.explain.induction import copy_losses, explain_induction, induction_document, repetition_scores
from headstock.explain.inputs import file_target
from headstock.explain.logit_target import contrast_targets, double_copy
from headstock.explain.patching import Patcher, explain_patch, patch_document
from headstock.explain.render_document import page
from headstock.model.attention_mask import AttentionMask
from tests.explain.pipelines import make_classifier, make_pipeline

CLEAN, CORRUPTED = "Anne likes Paris.", "Anne finds Paris."


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Anne likes Paris. Ben finds the sea {n}." for n in range(6)), encoding="utf-8")
    return str(path)


def loss(pipeline, file):
    with torch.no_grad():
        return float(file_target(pipeline, file).loss(pipeline.model))


# Ablation


def test_ablation_equals_a_model_with_zeroed_weights(tokenizer, file):
    run = make_pipeline(tokenizer)
    facts = explain_heads(run, file)
    assert all(check.holds for check in facts.checks())
    assert facts.metrics["loss"] == pytest.approx(loss(run, file), abs=1e-5)
    assert len(facts.effects) == 2 * 2 * 2 and facts.identity == 0
    zeroed = {(effect.layer, effect.head): effect for effect in facts.effects if effect.method == "zero"}
    losses = {}
    for layer, head in zeroed:
        reference = make_pipeline(tokenizer)
        with torch.no_grad():
            reference.model.backbone.blocks[layer - 1].attention.output.weight[:, 4 * (head - 1) : 4 * head] = 0
        losses[layer, head] = loss(reference, file) - facts.metrics["loss"]
        assert zeroed[layer, head].loss == pytest.approx(losses[layer, head], abs=1e-5)
    assert zeroed[1, 1].loss != pytest.approx(losses[1, 2], abs=1e-5)  # another head's
    everything = make_pipeline(tokenizer)
    with torch.no_grad():
        for block in everything.model.backbone.blocks:
            block.attention.output.weight.zero_()
    assert facts.without["loss"] == pytest.approx(loss(everything, file), abs=1e-5)
    assert all(effect.low <= effect.loss + 1e-9 and effect.loss <= effect.high + 1e-9 for effect in facts.effects)


@torch.no_grad()
def test_mean_ablation_of_a_constant_head_changes_nothing(tokenizer, file):
    run = make_pipeline(tokenizer)
    inputs = run.model.backbone.blocks[0].attention.inputs
    inputs.weight[16:20] = 0  # the values of the first head are their bias alone
    effects = {(e.layer, e.head, e.method): e.loss for e in explain_heads(run, file).effects}
    assert abs(effects[1, 1, "mean"]) < 1e-6 < abs(effects[1, 1, "zero"])
    assert abs(effects[1, 2, "mean"]) > 1e-6


def test_every_kind_of_attention_is_ablated(tokenizer, file, tmp_path):
    both = explain_heads(make_pipeline(tokenizer, "denoise", family="seq2seq"), file, methods=["zero"])
    assert both.sites == ["encoder", "decoder", "cross"] and all(check.holds for check in both.checks())
    directions = explain_heads(make_pipeline(tokenizer, "both-ways", family="bitransformer"), file, rows=3)
    assert directions.sites == ["forward", "backward"] and directions.name(directions.effects[0]) == "forward 1.1"
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nAnne likes Paris.,good\nBen finds the sea.,bad\n", encoding="utf-8")
    facts = explain_heads(make_classifier(tokenizer), str(rows))
    assert facts.rows == 2 and facts.effects[0].accuracy is not None and "resample 2 rows" in facts.notes[0]
    assert "Heads by zero ablation" in page(head_document(facts, "tiny", "rows.csv"))
    with pytest.raises(UserError, match="has no attention"):
        explain_heads(make_pipeline(tokenizer, family="recurrent"), file)


# Patching


@torch.no_grad()
def test_patching_equals_a_plain_forward_pass(tokenizer):
    run = make_pipeline(tokenizer)
    facts = explain_patch(run, [CLEAN], [CORRUPTED], label="Paris", versus="home")
    assert all(check.holds for check in facts.checks())
    stream = next(patch for patch in facts.positions if patch.point == "resid_pre")
    clean, corrupted = contrast_targets(run, [CLEAN], [CORRUPTED], label="Paris", versus="home")
    model = double_copy(run.model)
    layers = [model(target.batch, keep_layers=True).layers for target in (clean, corrupted)]

    def difference(x):
        return float(clean.value(model, model.backbone.final_norm(x)))

    differences = [difference(streams[-1]) for streams in layers]
    assert [facts.clean, facts.corrupted] == pytest.approx(differences)
    for position in range(len(stream.tokens)):
        x = layers[1][1].clone()
        x[0, position] = layers[0][1][0, position]
        value = difference(model.backbone.blocks[1](x, AttentionMask(causal=True)))
        recovery = (value - facts.corrupted) / (facts.clean - facts.corrupted)
        assert stream.recovery[1][position] == pytest.approx(recovery, abs=1e-9)
    changed = [position for position, token in enumerate(stream.tokens) if "→" in token]
    rest = [value for position, value in enumerate(stream.recovery[0]) if position not in changed]
    assert len(changed) == 1 and stream.recovery[0][changed[0]] == pytest.approx(1)  # the embedding differs there alone
    assert rest == pytest.approx([0] * len(rest), abs=1e-9)
    assert len(facts.heads[0].recovery) == 2 and len(facts.heads[0].recovery[0]) == 2


@torch.no_grad()
def test_a_wrong_patch_fails_the_identities(tokenizer):
    run = make_pipeline(tokenizer)
    pair = contrast_targets(run, [CLEAN], [CORRUPTED], label="Paris", versus="home")
    model = double_copy(run.model)
    patcher = Patcher(model, *pair)
    assert all(abs(error) < 1e-9 for error in patcher.identities().values())
    patcher.cache = {name: value.roll(1, 1) for name, value in patcher.cache.items()}  # of another position or head
    wrong = patcher.identities()
    assert abs(wrong["everything"]) > 1e-3 and abs(wrong["identity"]) > 1e-3 and abs(wrong["nothing"]) < 1e-9


def test_patching_in_every_family(tokenizer):
    for run, options in (
        (make_pipeline(tokenizer, "masked"), {"label": "sea", "versus": "home"}),
        (make_classifier(tokenizer, norm="post"), {"label": "good", "versus": "bad"}),
        (
            make_pipeline(tokenizer, "translate", family="seq2seq"),
            {"label": "Ben likes home.", "versus": "Ben likes Paris."},
        ),
    ):
        texts = [text.replace("Paris", "[MASK]") if run.task.fills_masks else text for text in (CLEAN, CORRUPTED)]
        facts = explain_patch(run, texts[:1], texts[1:], **options)
        assert all(check.holds for check in facts.checks())
        assert json.loads(json.dumps(facts.to_dict()))["checks"][0]["holds"]
    assert {patch.stack for patch in facts.positions} == {"encoder", "decoder"}
    assert [patch.where for patch in facts.heads] == ["encoder", "decoder", "cross"]
    assert len(facts.positions[-1].tokens) == 1 + len(run.tokenizer.encode("Ben likes"))  # up to the first difference
    document = patch_document(facts, "a <run>", *texts)
    assert "Recovery, cross-attention" in page(document) and document.picture().startswith("<svg")


def test_invalid_pairs_are_refused(tokenizer):
    run = make_pipeline(tokenizer)
    for options, line in (
        ({}, "both texts give"),
        ({"label": "Paris", "versus": "Paris"}, "both texts give “Paris”|both texts give"),
    ):
        with pytest.raises(UserError, match=line):
            explain_patch(run, [CLEAN], [CLEAN], **options)
    with pytest.raises(UserError, match="nothing to recover"):
        explain_patch(run, [CLEAN], [CLEAN], label="Paris", versus="home")
    with pytest.raises(UserError, match=r"the texts have .* tokens; give texts with the same number"):
        explain_patch(run, [CLEAN], [f"{CLEAN} {CLEAN}"], label="Paris", versus="home")


# Induction


def test_induction_scores_of_known_patterns():
    start, length = 1, 4
    size = start + 2 * length
    weights = torch.zeros(1, 3, size, size)
    for query in range(size):
        weights[0, 0, query, max(0, query - length + 1)] = 1  # the token after the previous occurrence
        weights[0, 1, query, max(0, query - 1)] = 1
        weights[0, 2, query, : query + 1] = 1 / (query + 1)
    scores = repetition_scores(weights, start, length)
    assert scores["induction"][:2].tolist() == [1, 0] and scores["previous"][:2].tolist() == [0, 1]
    expected = sum(1 / (query + 1) for query in range(start + length, size)) / length
    assert scores["induction"][2] == scores["duplicate"][2] == pytest.approx(expected)
    tokens = torch.tensor([[9, 1, 2, 3, 1, 2, 3]])
    logits = torch.zeros(1, 7, 10)
    logits[0, 3:6, :] = torch.nn.functional.one_hot(tokens[0, 4:7], 10) * 50.0  # knows the second copy
    first, second = copy_losses(logits, tokens, 1, 3)
    assert first == pytest.approx(math.log(10)) and second < 1e-6


def test_induction_of_a_run(tokenizer):
    run = make_pipeline(tokenizer)
    facts = explain_induction(run, length=8, rows=4)
    assert len(facts.heads) == 4 and facts.length == 8 and 0 < facts.uniform < 1
    assert all(0 <= head.induction <= 1 for head in facts.heads)
    assert explain_induction(run, length=8, rows=4).heads == facts.heads
    assert explain_induction(run, length=8, rows=4, seed=1).heads != facts.heads
    assert "Induction score" in page(induction_document(facts, "tiny"))
    with pytest.raises(UserError, match="--length 99: must be from 2 to 11"):
        explain_induction(run, length=99)
    with pytest.raises(UserError):
        explain_induction(make_pipeline(tokenizer, "masked"))
