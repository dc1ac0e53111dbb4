"""Gradient norms and the two terms of residual connections against independent computations."""

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain.gradients import (
    backward,
    block_settings,
    depth_study,
    explain_gradients,
    gradient_terms,
    trainable_copy,
)
from headstock.explain.inputs import file_target, training_target
from headstock.explain.recurrence import explain_recurrence
from headstock.explain.residual_connections import cosine, vector_norm
from headstock.model.batch import IGNORE_INDEX
from tests.explain.pipelines import make_classifier, make_pipeline

TEXT = "Anne likes Paris. Ben finds the sea."


# The two terms


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_terms_are_vector_jacobian_products(tokenizer, norm):
    run = make_pipeline(tokenizer, norm=norm)
    model, target = trainable_copy(run.model), training_target(run, ["Anne likes"])
    result = backward(model, target.loss)
    for connection in result.activations.connections:

        def sublayer(h, connection=connection):
            return connection.function(h if norm == "post" else connection.residual.norm(h))

        jacobian = torch.autograd.functional.jacobian(sublayer, connection.input.detach())  # (1, T, D, 1, T, D)
        above = result.at(connection.output)
        if norm == "post":
            total = connection.input.detach() + sublayer(connection.input.detach())
            above = torch.einsum(
                "btd,btdcse->cse", above, torch.autograd.functional.jacobian(connection.residual.norm, total)
            )
        through = torch.einsum("btd,btdcse->cse", above, jacobian)
        terms = gradient_terms(connection, result.at(connection.output))
        torch.testing.assert_close(terms[0], above, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(terms[1], through, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(above + through, result.at(connection.input), rtol=1e-9, atol=1e-12)


def test_pre_norm_formula_is_wrong_for_post_norm(tokenizer):
    run = make_pipeline(tokenizer, norm="post")
    result = backward(trainable_copy(run.model), training_target(run, [TEXT]).loss)
    for connection in result.activations.connections:
        above, x = result.at(connection.output), connection.input.detach().requires_grad_()
        (through,) = torch.autograd.grad(connection.function(x), x, above)
        error = vector_norm(above + through - result.at(connection.input)) / vector_norm(result.at(connection.input))
        assert error > 1e-3  # the correct formula is exact to 1e-12


FAMILIES = [
    ("causal", {}),
    ("causal", {"norm": "post", "positions": "sinusoidal", "activation": "relu"}),
    ("masked", {"norm_kind": "rms", "activation": "swiglu", "positions": "rotary", "qk_norm": True, "bias": False}),
    ("masked", {"task_nsp": True, "segments": 2}),
    ("hybrid", {}),
    ("denoise", {"family": "seq2seq"}),
    ("denoise", {"family": "seq2seq", "norm": "post"}),
]


@pytest.mark.parametrize(("task", "settings"), FAMILIES)
def test_terms_add_up_in_every_family(tokenizer, task, settings):
    run = make_pipeline(tokenizer, task, **settings)
    target = training_target(run, [TEXT])
    facts = explain_gradients(run.model, target)
    stacks = 2 if run.model.backbone.is_encoder_decoder else 1
    assert len(facts.layers) == 2 * stacks and len(facts.connections) == (10 if stacks == 2 else 4)
    assert facts.error < 1e-12 and all(terms.through > 0 for terms in facts.connections)
    assert facts.loss == pytest.approx(float(target.loss(run.model).detach()), rel=1e-5)
    for terms in facts.connections:
        if facts.norm == "pre":
            assert terms.skip == terms.received
        together = terms.skip**2 + terms.through**2 + 2 * terms.cosine * terms.skip * terms.through
        assert together**0.5 == pytest.approx(terms.passed, rel=1e-9)


def test_norms_match_a_plain_backward_pass(tokenizer):
    run = make_pipeline(tokenizer, norm="post")
    target, facts = training_target(run, [TEXT]), explain_gradients(run.model, training_target(run, [TEXT]))
    model = trainable_copy(run.model)
    layers = []
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: (output.retain_grad(), layers.append(output))[0])
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]])
    expected = torch.tensor([*tokenizer.encode(TEXT), tokenizer.eos])
    loss = F.cross_entropy(model.heads["token"](model.backbone(target.batch).hidden)[0], expected)
    loss.backward()
    assert torch.equal(target.batch.tokens, ids)
    assert facts.loss == pytest.approx(loss.item(), rel=1e-6)
    assert [layer.received for layer in facts.layers] == pytest.approx([float(x.grad.norm()) for x in layers], rel=1e-6)
    assert facts.layers[1].passed == facts.layers[0].received
    for layer, block in zip(facts.layers, model.backbone.blocks, strict=True):
        norm = sum(float(parameter.grad.norm()) ** 2 for parameter in block.parameters()) ** 0.5
        assert sum(group_norm**2 for group_norm in layer.parameters.values()) ** 0.5 == pytest.approx(norm, rel=1e-6)
        inside = sum(float(p.grad.norm()) ** 2 for p in block.attention.inputs.parameters()) ** 0.5
        assert layer.parameters["attention in"] == pytest.approx(inside, rel=1e-6)
    outside = [p for name, p in model.named_parameters() if "blocks" not in name]
    norm = sum(float(parameter.grad.norm()) ** 2 for parameter in outside) ** 0.5
    assert sum(group_norm**2 for group_norm in facts.parameters.values()) ** 0.5 == pytest.approx(norm, rel=1e-6)


def test_terms_add_up_when_the_head_mixes_layers(tokenizer):
    run = make_classifier(tokenizer, task_layers="mix")
    assert explain_gradients(run.model, training_target(run, [TEXT], label="good")).error < 1e-12


def test_model_is_unchanged(tokenizer):
    run = make_pipeline(tokenizer)
    before = {name: tensor.clone() for name, tensor in run.model.tensors().items()}
    explain_gradients(run.model, training_target(run, [TEXT]))
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.tensors().items())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in run.model.parameters())


# Without residual connections


def test_ablated_gradients(tokenizer):
    run = make_pipeline(tokenizer, depth=3)
    facts = explain_gradients(run.model, training_target(run, [TEXT]))
    without_skip, without_gradient = facts.ablations
    assert (without_skip.what, without_gradient.what) == ("skip", "skip-gradient")
    assert without_gradient.loss == facts.loss != without_skip.loss
    assert len(without_gradient.received) == len(facts.stream) == 1 + 2 * 3
    assert without_gradient.received[-1] == pytest.approx(
        facts.stream[-1].gradient
    )  # only the head is above the last point
    above = without_gradient.received[-1]
    # below the last sublayer, only the term through it arrives
    assert (
        without_gradient.received[-2] == pytest.approx(facts.connections[-1].through)
        and above != without_gradient.received[-2]
    )


def test_gradient_of_deep_fresh_models_vanishes_without_the_skip():
    study = depth_study({}, depths=(2, 16))
    share = {(model.norm, model.without, model.depth): model.share for model in study}
    assert len(share) == 12
    for norm in ("pre", "post"):
        assert 0.5 < share[norm, None, 16] / share[norm, None, 2] < 5  # nearly independent of depth
        assert share[norm, "skip-gradient", 16] < 1e-8 * share[norm, "skip-gradient", 2]
    assert depth_study({}, depths=(2,)) == depth_study({}, depths=(2,))  # deterministic
    state = torch.get_rng_state()
    depth_study({}, depths=(2,))
    assert torch.equal(state, torch.get_rng_state())


def test_fresh_models_copy_the_kind_of_block(tokenizer):
    run = make_pipeline(tokenizer, "masked", norm="post", activation="swiglu", positions="rotary")
    settings = block_settings(run.model.backbone.config)
    assert settings["activation"] == "swiglu" and settings["positions"] == "rotary" and not settings["causal"]
    assert not {"norm", "depth", "width", "vocabulary"} & settings.keys()


def test_norm_and_cosine_of_very_small_vectors():
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    assert vector_norm(tiny) == pytest.approx(5e-200) and vector_norm(torch.zeros(3)) == 0.0
    assert cosine(tiny, torch.tensor([1.0, 0.0], dtype=torch.float64)) == pytest.approx(0.6)


# Targets


def test_label_defaults_to_the_prediction(tokenizer):
    run = make_classifier(tokenizer)
    label = run.predict(TEXT)[0]["label"]
    target = training_target(run, [TEXT])
    assert label in target.notes[0] and torch.equal(
        target.batch.labels["label"], training_target(run, [TEXT], label=label).batch.labels["label"]
    )
    losses = {
        label: explain_gradients(run.model, training_target(run, [TEXT], label=label)).loss
        for label in ("bad", "fair", "good")
    }
    probabilities = run.predict(TEXT)[0]["probabilities"]
    for label, loss in losses.items():
        assert loss == pytest.approx(-torch.tensor(probabilities[label]).log().item(), abs=1e-4)
    with pytest.raises(UserError, match=r"--label 'goood' is no class; this run knows 'bad', .*did you mean 'good'\?"):
        training_target(run, [TEXT], label="goood")
    with pytest.raises(UserError, match="language model, whose loss needs no --label"):
        training_target(make_pipeline(tokenizer), [TEXT], label="good")


def test_masking_is_redrawn_until_a_token_is_masked(tokenizer):
    run = make_pipeline(tokenizer, "masked")
    target = training_target(run, ["Anne"])
    labels = target.batch.labels["token"]
    assert (labels != IGNORE_INDEX).any() and labels[0, 0] == IGNORE_INDEX  # never a special token
    with pytest.raises(UserError, match=r"behind \[MASK\] is unknown"):
        training_target(run, ["Anne [MASK] Paris."])


@pytest.mark.parametrize("make", [make_pipeline, make_classifier])
def test_too_long_text_is_refused_with_both_counts(tokenizer, make):
    run, text = make(tokenizer), " ".join(["Anne likes Paris."] * 20)
    if make is make_classifier:
        run = make(tokenizer)
        object.__setattr__(run.config.train, "length", 24)
    count = len(tokenizer.encode(text)) + 1
    with pytest.raises(UserError, match=f"the text has {count} tokens with special tokens, and this run reads 24"):
        training_target(run, [text])
    for texts, line in ((["  "], "is empty"), (["a", "b"], "one text, found 2")):
        with pytest.raises(UserError, match=line):
            training_target(run, texts)


def test_target_of_a_file(tokenizer, corpus, tmp_path):
    run = make_pipeline(tokenizer)
    target = file_target(run, corpus)
    assert target.batch.tokens.shape == (16, 24) and "16 of" in target.notes[0]
    assert explain_gradients(run.model, target).error < 1e-12
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nAnne likes Paris.,good\nBen finds home.,bad\n")
    run = make_classifier(tokenizer)
    target = file_target(run, rows)
    assert target.batch.labels["label"].tolist() == [2, 0]
    assert explain_gradients(run.model, target).error < 1e-12
    rows.write_text("text,label\nAnne likes Paris.,goood\n")
    with pytest.raises(UserError, match="did you mean 'good'"):
        file_target(run, rows)


# Through time


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_steps_are_gradients_of_the_last_prediction(tokenizer, cell):
    run = make_pipeline(tokenizer, family="recurrent", cell=cell)
    target = training_target(run, [TEXT])
    facts = explain_recurrence(run.model, target)
    assert [layer.layer for layer in facts.layers] == [1, 2] and facts.cell == cell
    embedded = run.model.backbone.tokens(target.batch.tokens).detach().requires_grad_()
    layers, _ = run.model.backbone.stack(embedded)
    last = F.cross_entropy(run.model.heads["token"](layers[-1])[0, -1:], torch.tensor([tokenizer.eos]))
    (gradient,) = torch.autograd.grad(last, embedded)
    assert facts.layers[0].steps == pytest.approx(gradient[0].norm(dim=-1).tolist(), rel=1e-4)
    layers, _ = run.model.backbone.stack(embedded)
    loss = F.cross_entropy(run.model.heads["token"](layers[-1])[0], target.batch.labels["token"][0])
    assert facts.loss == pytest.approx(loss.item(), rel=1e-5)
    assert facts.layers[0].passed == pytest.approx(float(torch.autograd.grad(loss, embedded)[0].norm()), rel=1e-4)
    assert facts.layers[1].passed == facts.layers[0].received > 0


def test_elmo_has_a_forward_and_a_backward_stack(tokenizer):
    run = make_pipeline(tokenizer, "both-ways", family="elmo")
    facts = explain_recurrence(run.model, training_target(run, [TEXT]))
    assert [(layer.stack, layer.layer) for layer in facts.layers] == [
        (stack, layer) for stack in ("forward", "backward") for layer in (1, 2)
    ]
    assert all(any(layer.steps) == (layer.stack == "forward") for layer in facts.layers)
    assert all(layer.received > 0 for layer in facts.layers)
