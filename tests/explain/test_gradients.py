"""Every length is that of a gradient computed some other way, and the two terms are those of the textbook."""

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
from headstock.explain.hooks import cosine, vector_norm
from headstock.explain.recurrence import explain_recurrence
from headstock.explain.targets import file_target, training_target
from headstock.model.batch import IGNORE_INDEX
from tests.explain.opened import classifier, learned, opened

TEXT = "Anne likes Paris. Ben finds the sea."


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return learned(corpus)


# The two terms


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_terms_are_products_with_the_jacobian_of_the_sublayer(tokenizer, norm):
    run = opened(tokenizer, norm=norm)
    model, asked = trainable_copy(run.model), training_target(run, ["Anne likes"])
    result = backward(model, asked.loss)
    for one in result.activations.connections:

        def sublayer(h, one=one):
            return one.function(h if norm == "post" else one.residual.norm(h))

        jacobian = torch.autograd.functional.jacobian(sublayer, one.input.detach())  # (1, T, D, 1, T, D)
        above = result.at(one.output)
        if norm == "post":
            total = one.input.detach() + sublayer(one.input.detach())
            above = torch.einsum("btd,btdcse->cse", above, torch.autograd.functional.jacobian(one.residual.norm, total))
        through = torch.einsum("btd,btdcse->cse", above, jacobian)
        found = gradient_terms(one, result.at(one.output))
        torch.testing.assert_close(found[0], above, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[1], through, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(above + through, result.at(one.input), rtol=1e-9, atol=1e-12)


def test_post_norm_told_by_the_formula_of_pre_norm_is_wrong(tokenizer):
    run = opened(tokenizer, norm="post")
    result = backward(trainable_copy(run.model), training_target(run, [TEXT]).loss)
    for one in result.activations.connections:
        above, given = result.at(one.output), one.input.detach().requires_grad_()
        (through,) = torch.autograd.grad(one.function(given), given, above)
        wrong = vector_norm(above + through - result.at(one.input)) / vector_norm(result.at(one.input))
        assert wrong > 1e-3  # the error of the right formula is below 1e-12


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
def test_the_terms_add_up_in_every_family(tokenizer, task, settings):
    run = opened(tokenizer, task, **settings)
    asked = training_target(run, [TEXT])
    found = explain_gradients(run.model, asked)
    stacks = 2 if run.model.backbone.is_encoder_decoder else 1
    assert len(found.layers) == 2 * stacks and len(found.connections) == (10 if stacks == 2 else 4)
    assert found.error < 1e-12 and all(terms.through > 0 for terms in found.connections)
    assert found.loss == pytest.approx(float(asked.loss(run.model).detach()), rel=1e-5)
    for terms in found.connections:
        if found.norm == "pre":
            assert terms.skip == terms.received
        together = terms.skip**2 + terms.through**2 + 2 * terms.cosine * terms.skip * terms.through
        assert together**0.5 == pytest.approx(terms.passed, rel=1e-9)


def test_lengths_are_those_of_a_plain_backward_pass(tokenizer):
    run = opened(tokenizer, norm="post")
    asked, found = training_target(run, [TEXT]), explain_gradients(run.model, training_target(run, [TEXT]))
    model = trainable_copy(run.model)
    layers = []
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda module, given, output: (output.retain_grad(), layers.append(output))[0])
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(TEXT)]])
    wanted = torch.tensor([*tokenizer.encode(TEXT), tokenizer.eos])
    loss = F.cross_entropy(model.heads["token"](model.backbone(asked.batch).hidden)[0], wanted)
    loss.backward()
    assert torch.equal(asked.batch.tokens, ids)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert [layer.received for layer in found.layers] == pytest.approx([float(x.grad.norm()) for x in layers], rel=1e-6)
    assert found.layers[1].passed == found.layers[0].received
    for flow, block in zip(found.layers, model.backbone.blocks, strict=True):
        whole = sum(float(parameter.grad.norm()) ** 2 for parameter in block.parameters()) ** 0.5
        assert sum(length**2 for length in flow.parameters.values()) ** 0.5 == pytest.approx(whole, rel=1e-6)
        inside = sum(float(p.grad.norm()) ** 2 for p in block.attention.inputs.parameters()) ** 0.5
        assert flow.parameters["attention in"] == pytest.approx(inside, rel=1e-6)
    rest = [p for name, p in model.named_parameters() if "blocks" not in name]
    whole = sum(float(parameter.grad.norm()) ** 2 for parameter in rest) ** 0.5
    assert sum(length**2 for length in found.parameters.values()) ** 0.5 == pytest.approx(whole, rel=1e-6)


def test_a_head_that_reads_every_layer_does_not_disturb_the_sum(tokenizer):
    run = classifier(tokenizer, task_layers="mix")
    assert explain_gradients(run.model, training_target(run, [TEXT], label="good")).error < 1e-12


def test_the_model_is_left_as_it_was(tokenizer):
    run = opened(tokenizer)
    before = {name: tensor.clone() for name, tensor in run.model.tensors().items()}
    explain_gradients(run.model, training_target(run, [TEXT]))
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.tensors().items())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in run.model.parameters())


# Without residual connections


def test_without_the_skip_its_gradient_is_gone(tokenizer):
    run = opened(tokenizer, depth=3)
    found = explain_gradients(run.model, training_target(run, [TEXT]))
    gone, held = found.ablations
    assert (gone.what, held.what) == ("skip", "skip-gradient")
    assert held.loss == found.loss != gone.loss
    assert len(held.received) == len(found.stream) == 1 + 2 * 3
    assert held.received[-1] == pytest.approx(found.stream[-1].gradient)  # nothing stands above the last point
    above = held.received[-1]
    # through the last sublayer alone, what arrives is just the term through it
    assert held.received[-2] == pytest.approx(found.connections[-1].through) and above != held.received[-2]


def test_fresh_models_show_what_the_skip_is_for():
    study = depth_study({}, depths=(2, 16))
    share = {(one.norm, one.without, one.depth): one.share for one in study}
    assert len(share) == 12
    for norm in ("pre", "post"):
        assert 0.5 < share[norm, None, 16] / share[norm, None, 2] < 5  # hardly changes with depth
        assert share[norm, "skip-gradient", 16] < 1e-8 * share[norm, "skip-gradient", 2]
    assert depth_study({}, depths=(2,)) == depth_study({}, depths=(2,))  # the same every time
    draws = torch.get_rng_state()
    depth_study({}, depths=(2,))
    assert torch.equal(draws, torch.get_rng_state())


def test_fresh_models_are_of_the_runs_kind(tokenizer):
    run = opened(tokenizer, "masked", norm="post", activation="swiglu", positions="rotary")
    kept = block_settings(run.model.backbone.config)
    assert kept["activation"] == "swiglu" and kept["positions"] == "rotary" and not kept["causal"]
    assert not {"norm", "depth", "width", "vocabulary"} & kept.keys()


def test_very_small_vectors_have_a_length_and_an_angle():
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    assert vector_norm(tiny) == pytest.approx(5e-200) and vector_norm(torch.zeros(3)) == 0.0
    assert cosine(tiny, torch.tensor([1.0, 0.0], dtype=torch.float64)) == pytest.approx(0.6)


# What is asked


def test_a_label_is_taken_or_the_runs_own(tokenizer):
    run = classifier(tokenizer)
    said = run.predict(TEXT)[0]["label"]
    own = training_target(run, [TEXT])
    assert said in own.notes[0] and torch.equal(
        own.batch.labels["label"], training_target(run, [TEXT], label=said).batch.labels["label"]
    )
    losses = {
        label: explain_gradients(run.model, training_target(run, [TEXT], label=label)).loss
        for label in ("bad", "fair", "good")
    }
    chances = run.predict(TEXT)[0]["probabilities"]
    for label, loss in losses.items():
        assert loss == pytest.approx(-torch.tensor(chances[label]).log().item(), abs=1e-4)
    with pytest.raises(UserError, match=r"--label 'goood' is no class; this run knows 'bad', .*did you mean 'good'\?"):
        training_target(run, [TEXT], label="goood")
    with pytest.raises(UserError, match="language model, whose loss needs no --label"):
        training_target(opened(tokenizer), [TEXT], label="good")


def test_a_short_text_is_drawn_again_until_something_is_hidden(tokenizer):
    run = opened(tokenizer, "masked")
    asked = training_target(run, ["Anne"])
    labels = asked.batch.labels["token"]
    assert (labels != IGNORE_INDEX).any() and labels[0, 0] == IGNORE_INDEX  # never the opening mark
    with pytest.raises(UserError, match=r"what stands behind \[MASK\] is not known"):
        training_target(run, ["Anne [MASK] Paris."])


@pytest.mark.parametrize("make", [opened, classifier])
def test_a_text_that_does_not_fit_is_refused_with_both_counts(tokenizer, make):
    run, text = make(tokenizer), " ".join(["Anne likes Paris."] * 20)
    if make is classifier:
        run = make(tokenizer)
        object.__setattr__(run.config.train, "length", 24)
    count = len(tokenizer.encode(text)) + 1
    with pytest.raises(UserError, match=f"the text is {count} tokens with its marks, and this run reads 24"):
        training_target(run, [text])
    for texts, line in ((["  "], "is empty"), (["a", "b"], "wanted one text, 2 came")):
        with pytest.raises(UserError, match=line):
            training_target(run, texts)


def test_a_file_is_read_as_the_run_reads_it(tokenizer, corpus, tmp_path):
    run = opened(tokenizer)
    asked = file_target(run, corpus)
    assert asked.batch.tokens.shape == (16, 24) and "16 of" in asked.notes[0]
    assert explain_gradients(run.model, asked).error < 1e-12
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nAnne likes Paris.,good\nBen finds home.,bad\n")
    run = classifier(tokenizer)
    asked = file_target(run, rows)
    assert asked.batch.labels["label"].tolist() == [2, 0]
    assert explain_gradients(run.model, asked).error < 1e-12
    rows.write_text("text,label\nAnne likes Paris.,goood\n")
    with pytest.raises(UserError, match="did you mean 'good'"):
        file_target(run, rows)


# Through time


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_through_time_the_steps_are_those_of_the_last_prediction(tokenizer, cell):
    run = opened(tokenizer, family="recurrent", cell=cell)
    asked = training_target(run, [TEXT])
    found = explain_recurrence(run.model, asked)
    assert [layer.layer for layer in found.layers] == [1, 2] and found.cell == cell
    embedded = run.model.backbone.tokens(asked.batch.tokens).detach().requires_grad_()
    layers, _ = run.model.backbone.stack(embedded)
    last = F.cross_entropy(run.model.heads["token"](layers[-1])[0, -1:], torch.tensor([tokenizer.eos]))
    (gradient,) = torch.autograd.grad(last, embedded)
    assert found.layers[0].steps == pytest.approx(gradient[0].norm(dim=-1).tolist(), rel=1e-4)
    layers, _ = run.model.backbone.stack(embedded)
    whole = F.cross_entropy(run.model.heads["token"](layers[-1])[0], asked.batch.labels["token"][0])
    assert found.loss == pytest.approx(whole.item(), rel=1e-5)
    assert found.layers[0].passed == pytest.approx(float(torch.autograd.grad(whole, embedded)[0].norm()), rel=1e-4)
    assert found.layers[1].passed == found.layers[0].received > 0


def test_elmo_reads_both_ways(tokenizer):
    run = opened(tokenizer, "both-ways", family="elmo")
    found = explain_recurrence(run.model, training_target(run, [TEXT]))
    assert [(layer.stack, layer.layer) for layer in found.layers] == [
        (stack, layer) for stack in ("forward", "backward") for layer in (1, 2)
    ]
    assert all(any(layer.steps) == (layer.stack == "forward") for layer in found.layers)
    assert all(layer.received > 0 for layer in found.layers)
