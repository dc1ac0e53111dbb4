"""The steps of a layer against plain tensor code, and the output quoted in docs/explanation/transformer.md."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain import layer_walkthrough
from headstock.explain.inputs import training_target
from headstock.explain.layer_walkthrough import explain_layer
from headstock.explain.layer_walkthrough_document import layer_document
from headstock.explain.render_document import page, terminal
from tests.explain import docs_output
from tests.explain.pipelines import make_classifier, make_pipeline
from tests.report.browsing import Outline, check_sound, open_tab, view_page

TEXT = "Anne likes Paris. Ben finds the sea."
CLASSIC = {"norm": "post", "positions": "sinusoidal", "activation": "relu", "embed_scale": True, "tied": False}
MODERN = {"positions": "rotary", "norm_kind": "rms", "activation": "swiglu", "bias": False, "qk_norm": True}


def values_of(facts):
    return {step.name: torch.tensor(step.forward, dtype=torch.float64) for step in facts.steps}


def gradients_of(facts):
    return {s.name: torch.tensor(s.backward, dtype=torch.float64) for s in facts.steps if s.backward is not None}


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
def test_steps_match_a_textbook_computation(tokenizer):
    """The 2017 layer for one token, computed from the state dict."""
    run, position, head = (
        make_pipeline(tokenizer, **CLASSIC),
        4,
        1,
    )  # fifth token, second head; width 8, heads of width 4
    facts = explain_layer(run, [TEXT], word=str(position + 1), head=head + 1)
    values, w = values_of(facts), {name: value.double() for name, value in run.model.state_dict().items()}
    ids = [tokenizer.bos, *tokenizer.encode(TEXT)]
    e = w["backbone.tokens.weight"][ids]
    p = torch.tensor([[wave(t, i) for i in range(8)] for t in range(len(ids))], dtype=torch.float64)
    h = math.sqrt(8) * e + p
    assert_close(values["token"], e[position])
    assert_close(values["position"], p[position])
    assert_close(values["resid_pre"], h[position])
    block = "backbone.blocks.0."
    joined = h @ w[f"{block}attention.inputs.weight"].T + w[f"{block}attention.inputs.bias"]
    q, k, v = joined.split(8, -1)  # (T, D) each
    own = slice(4 * head, 4 * head + 4)
    for name, vector in (("query", q), ("key", k), ("value", v)):
        assert_close(values[name], vector[position, own])
    assert_close(values["products"], k[:, own] @ q[position, own])
    assert_close(values["scores"], k[:, own] @ q[position, own] / 2)  # √K with K = 4, not √D
    assert values["mask"].tolist() == [0.0] * (position + 1) + [-math.inf] * (len(ids) - position - 1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        a = (k[: position + 1, part] @ q[position, part] / 2).softmax(0)
        heads.append(a @ v[: position + 1, part])
        if part == own:
            assert_close(values["weights"], torch.cat([a, torch.zeros(len(ids) - position - 1, dtype=torch.float64)]))
    assert_close(values["head"], heads[head])
    assert_close(values["heads"], torch.cat(heads))
    o = w[f"{block}attention.output.weight"] @ torch.cat(heads) + w[f"{block}attention.output.bias"]
    assert_close(values["output"], o)
    middle = normed(h[position] + o, w, f"{block}around_attention.norm")
    assert_close(values["resid_mid"], middle)
    u = w[f"{block}feed.up.weight"] @ middle + w[f"{block}feed.up.bias"]
    assert_close(values["hidden"], u)
    assert_close(values["activation"], u.clamp(min=0))
    f = w[f"{block}feed.down.weight"] @ u.clamp(min=0) + w[f"{block}feed.down.bias"]
    assert_close(values["feed-forward"], f)
    assert_close(values["resid_post"], normed(middle + f, w, f"{block}around_feed.norm"))


def wave(t, i):
    angle = t / 10000 ** (2 * (i // 2) / 8)
    return math.cos(angle) if i % 2 else math.sin(angle)


def normed(x, w, name):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


CASES = {
    "old": ({}, CLASSIC, {}),
    "new": ({}, MODERN, {"layer": 2}),
    "learned": ({}, {"activation": "gelu_tanh"}, {"head": 2}),
    "bert": ({"task": "masked"}, {"norm": "post", "embed_norm": True, "segments": 2}, {}),
    "decoder": ({"task": "denoise", "family": "seq2seq"}, {"qk_norm": True, "positions": "rotary"}, {}),
    "relative": ({}, {"positions": "relative", "activation": "geglu"}, {}),
    "encoder": ({"task": "denoise", "family": "seq2seq"}, {"norm": "post"}, {"where": "encoder", "layer": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_reproduce_the_model_forward_and_backward(tokenizer, case):
    family, settings, options = CASES[case]
    facts = explain_layer(make_pipeline(tokenizer, **family, **settings), [TEXT], **{"word": "3"} | options)
    assert facts.forward_error < 1e-12 and facts.backward_error < 1e-12
    assert facts.steps[-1].name == "resid_post" and len({step.name for step in facts.steps}) == len(facts.steps)
    assert sum(next(step for step in facts.steps if step.name == "weights").forward) == pytest.approx(1)
    assert ("cross weights" in values_of(facts)) == (case == "decoder")
    json.dumps(facts.to_dict(), allow_nan=False)
    hidden = any(math.isinf(value) for step in facts.steps for value in step.forward)
    assert hidden == (case not in ("bert", "encoder"))  # which are bidirectional


def test_wrong_step_is_detected(tokenizer, monkeypatch):
    """With another scale of the scores, the checks must fail."""
    run = make_pipeline(tokenizer)
    monkeypatch.setattr(layer_walkthrough.math, "sqrt", lambda size: size**0.5 * 2**0.5)
    facts = explain_layer(run, [TEXT])
    assert facts.forward_error > 1e-4 and facts.backward_error > 1e-4


@pytest.mark.parametrize("settings", [CLASSIC, MODERN], ids=["old", "new"])
def test_gradients_match_finite_differences(tokenizer, settings, monkeypatch):
    """Finite differences inside the model, without autograd."""
    run, position = make_pipeline(tokenizer, **settings), 3
    facts = explain_layer(run, [TEXT], word=str(position + 1), layer=2)
    gradients, target = gradients_of(facts), training_target(run, [TEXT])
    model, block = run.model.double(), run.model.backbone.blocks[1]
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # single precision is too coarse

    def slope(module, feature):
        def loss_at(size):
            def hook(module, inputs, output):
                shifted = output.clone()
                shifted[0, position, feature] += size
                return shifted

            handle = module.register_forward_hook(hook)
            with torch.no_grad():
                loss = float(target.loss(model))
            handle.remove()
            return loss

        return (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4

    for feature in (0, 3):  # features of the first head
        for part, name in enumerate(("query", "key", "value")):
            expected = slope(block.attention.inputs, 8 * part + feature)
            assert float(gradients[name][feature]) == pytest.approx(expected, rel=1e-4, abs=1e-9), name
        for module, name in ((block.attention.output, "output"), (block.feed.up, "hidden"), (block, "resid_post")):
            assert float(gradients[name][feature]) == pytest.approx(slope(module, feature), rel=1e-4, abs=1e-9), name
    a, above = values_of(facts)["weights"], gradients["weights"]
    assert torch.allclose(gradients["scores"], a * (above - (a * above).sum()))  # the Jacobian of the softmax
    assert torch.allclose(gradients["products"] * 2, gradients["scores"])


def test_token_gradient_is_that_of_its_embedding_row(tokenizer):
    run = make_pipeline(tokenizer, **CLASSIC)
    facts = explain_layer(run, [TEXT], word="2")
    ids = [tokenizer.bos, *tokenizer.encode(TEXT)]
    assert ids.count(ids[1]) == 1
    model = run.model.double()
    training_target(run, [TEXT]).loss(model).backward()
    assert torch.allclose(gradients_of(facts)["token"], model.backbone.tokens.weight.grad[ids[1]])
    assert "position" not in gradients_of(facts)  # fixed positions have no gradient, learned ones do
    assert "position" in gradients_of(explain_layer(make_pipeline(tokenizer), [TEXT]))


def test_token_by_word_or_position(tokenizer):
    run = make_pipeline(tokenizer)
    tokens = explain_layer(run, [TEXT]).tokens
    assert explain_layer(run, [TEXT]).position == len(tokens)
    assert explain_layer(run, [TEXT], word=tokens[3]).token == tokens[3]
    assert explain_layer(make_classifier(tokenizer), [TEXT], label="good").target.startswith("1 ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"layer": 3}, "--layer 3: runs/tiny has 2 layers"),
        ({"head": 0}, "--head 0: runs/tiny has 2 heads"),
        ({"word": "whale"}, "--word whale: is no token of the text.*reads: <sos>"),
        ({"word": "99"}, "--word 99: is no token"),
        ({"where": "encoder"}, "--where encoder: runs/tiny has no such part"),
    ],
)
def test_unknown_layer_head_word_or_stack_is_refused(tokenizer, options, line):
    with pytest.raises(UserError, match=line):
        explain_layer(make_pipeline(tokenizer), [TEXT], **options)


def test_recurrent_models_are_refused(tokenizer):
    with pytest.raises(UserError, match="no residual stream"):
        explain_layer(make_pipeline(tokenizer, family="recurrent"), [TEXT])


def test_page_and_picture(tokenizer, browser, tmp_path):
    facts = explain_layer(make_pipeline(tokenizer, **CLASSIC), [TEXT])
    file = tmp_path / "walk.html"
    file.write_text(page(layer_document(facts, "a <run>", TEXT)), encoding="utf-8")
    check_sound(Outline(file))
    for width, scheme in ((390, "dark"), (1280, "light")):
        assert view_page(browser, file, width=width, scheme=scheme).is_sound()
        tab = open_tab(browser, width=width, scheme=scheme)
        ends = tab.evaluate("[...document.querySelectorAll('.number')].map(e => e.getBoundingClientRect().right)")
        count = sum(len(step.forward[:24]) * (1 + (step.backward is not None)) for step in facts.steps)
        assert len(ends) == count and max(ends) <= width  # every number is visible without scrolling
    words = "".join(ElementTree.fromstring(layer_document(facts, "run", TEXT).picture()).itertext())
    assert all(step.name in words for step in facts.steps) and words.count("−∞") == 1  # the title names no other
    assert any(
        line.startswith("resid_post: ") for line in terminal(layer_document(facts, "", TEXT, direction="backward"))
    )


# docs/explanation/transformer.md


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory):
    """The page with the current output of its commands, for a run trained from the recipe."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr("sys.argv", [])
        docs_output.make_run(folder)
        page = docs_output.PAGE.read_text(encoding="utf-8")
        commands = {
            "params": "explain params runs/animals",
            "facts": f"{docs_output.blocks(page)[1][0].split(' --way')[0]} --json",
        }
        yield (
            page,
            docs_output.regenerate(page, docs_output.output_of),
            {name: docs_output.output_of(words) for name, words in commands.items()},
        )


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def plain(lines):
    return "\n".join(lines).replace("−", "-").replace("+", "")


def test_docs_quote_the_current_output(regenerated):
    page, regenerated_page, _ = regenerated
    before, after = docs_output.blocks(page), docs_output.blocks(regenerated_page)
    assert len(before) == len(after) > 15
    for (command, quoted), (_, result) in zip(before, after, strict=True):
        assert len(quoted) > 3, command
        assert words(quoted) == words(result), command
        for row, new_row in zip(quoted, result, strict=True):
            expected, actual = numbers(row), numbers(new_row)
            tolerance = (
                0.02 * max(1.0, *map(abs, expected)) if expected else 0
            )  # rounding differs between machines over 450 steps
            assert actual == pytest.approx(expected, abs=tolerance), command


def words(lines):
    return re.sub(r"\s+", " ", NUMBER.sub("#", plain(lines)))


def numbers(line):
    return [float(number.replace(",", "")) for number in NUMBER.findall(plain([line]))]


def test_numbers_in_docs_prose_are_quoted_or_derived(regenerated):
    """Every number in the prose is quoted in a block or computed from one here."""
    page, _, outputs = regenerated
    quoted = "\n".join(line for line in page.splitlines() if line.startswith("    "))
    prose = "\n".join(line for line in page.splitlines() if not line.startswith("    "))
    steps = {step["name"]: step["forward"] for step in json.loads(outputs["facts"].splitlines()[-1])["steps"]}
    scores = torch.tensor(steps["products"][:7]) / math.sqrt(8)
    derived = float(scores[2]), float(F.softmax(scores, 0)[2])
    unquoted = [number for number in re.findall(r"\d+\.\d+", prose) if number not in quoted]
    assert [float(number) for number in unquoted] == pytest.approx(derived, rel=0.02)
    assert "1,059 parameters" in outputs["params"] and "128 fixed numbers" in outputs["params"]


def test_outdated_docs_are_detected(regenerated):
    page, regenerated_page, _ = regenerated
    changed = page.replace("0.921", "0.721")
    with pytest.raises(AssertionError):
        test_docs_quote_the_current_output((changed, regenerated_page, None))


def test_layer_command(call, tmp_path):
    arguments = ["explain", "layer", "reviews-en", "I liked this film.", "-q", "--device", "cpu"]
    out, _ = call(*arguments, "--step", "scores", "--out", tmp_path / "l.svg", "--layer", 2, "--head", 5, "--json")
    facts = json.loads(out.splitlines()[-1])
    assert facts["sizes"] == {"D": 160, "H": 5, "K": 32, "F": 480} and (facts["layer"], facts["head"]) == (2, 5)
    assert [step["name"] for step in facts["steps"]] == ["scores"] and facts["forward_error"] < 1e-12
    ElementTree.parse(tmp_path / "l.svg")
    _, err = call(*arguments, "--step", "score", code=2)
    assert "--step score: no such step; did you mean 'scores'?" in err


def test_selected_word_is_not_masked(call):
    for text, word, position in (("I liked it", "it", 4), ("I liked it", "liked", 3), ("I liked it", "2", 2)):
        out, _ = call("explain", "layer", "reviews-en", text, "--word", word, "--json")
        facts = json.loads(out)
        assert facts["place"] == position and facts["tokens"][position - 1] == ["", "I", "liked", "it"][position - 1]
        assert "[MASK]" in facts["tokens"]
    assert "--word it" in call("explain", "layer", "reviews-en", "it", "--word", "it", code=2)[1]
