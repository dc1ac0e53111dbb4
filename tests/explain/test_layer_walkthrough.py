"""A token's numbers are those of plain tensor code, and what docs/transformer.md quotes of them is still true."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional as F

from headstock.errors import UserError
from headstock.explain import layer_walkthrough as walking
from headstock.explain.layer_walkthrough import explain_layer
from headstock.explain.layer_walkthrough_document import layer_document
from headstock.explain.render_document import page, terminal
from headstock.explain.targets import training_target
from tests.explain import retell
from tests.explain.opened import classifier, learned, opened
from tests.report.browsing import Outline, check_sound, look_at, screen

TEXT = "Anne likes Paris. Ben finds the sea."
OLD = {"norm": "post", "positions": "sinusoidal", "activation": "relu", "embed_scale": True, "tied": False}
NEW = {"positions": "rotary", "norm_kind": "rms", "activation": "swiglu", "bias": False, "qk_norm": True}


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return learned(corpus)


def steps_of(found):
    return {step.name: torch.tensor(step.forward, dtype=torch.float64) for step in found.steps}


def gradients_of(found):
    return {s.name: torch.tensor(s.backward, dtype=torch.float64) for s in found.steps if s.backward is not None}


def close(found, wanted):
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max()))


@torch.no_grad()
def test_every_step_is_the_textbooks(tokenizer):
    """The 2017 layer written out for one token, from the state dict alone."""
    run, place, head = opened(tokenizer, **OLD), 4, 1  # the fifth token, the second head; the width is 8, a head's is 4
    found = explain_layer(run, [TEXT], word=str(place + 1), head=head + 1)
    got, w = steps_of(found), {name: value.double() for name, value in run.model.state_dict().items()}
    ids = [tokenizer.bos, *tokenizer.encode(TEXT)]
    e = w["backbone.tokens.weight"][ids]
    p = torch.tensor([[wave(t, i) for i in range(8)] for t in range(len(ids))], dtype=torch.float64)
    h = math.sqrt(8) * e + p
    close(got["token"], e[place])
    close(got["position"], p[place])
    close(got["resid_pre"], h[place])
    block = "backbone.blocks.0."
    joined = h @ w[f"{block}attention.inputs.weight"].T + w[f"{block}attention.inputs.bias"]
    q, k, v = joined.split(8, -1)  # (T, D) each
    mine = slice(4 * head, 4 * head + 4)
    for name, vector in (("query", q), ("key", k), ("value", v)):
        close(got[name], vector[place, mine])
    close(got["products"], k[:, mine] @ q[place, mine])
    close(got["scores"], k[:, mine] @ q[place, mine] / 2)  # the root of a head's four, not of the width's eight
    assert got["mask"].tolist() == [0.0] * (place + 1) + [-math.inf] * (len(ids) - place - 1)
    each = []
    for part in (slice(0, 4), slice(4, 8)):
        a = (k[: place + 1, part] @ q[place, part] / 2).softmax(0)
        each.append(a @ v[: place + 1, part])
        if part == mine:
            close(got["weights"], torch.cat([a, torch.zeros(len(ids) - place - 1, dtype=torch.float64)]))
    close(got["head"], each[head])
    close(got["heads"], torch.cat(each))
    o = w[f"{block}attention.output.weight"] @ torch.cat(each) + w[f"{block}attention.output.bias"]
    close(got["output"], o)
    middle = normed(h[place] + o, w, f"{block}around_attention.norm")
    close(got["resid_mid"], middle)
    u = w[f"{block}feed.up.weight"] @ middle + w[f"{block}feed.up.bias"]
    close(got["hidden"], u)
    close(got["activation"], u.clamp(min=0))
    f = w[f"{block}feed.down.weight"] @ u.clamp(min=0) + w[f"{block}feed.down.bias"]
    close(got["feed-forward"], f)
    close(got["resid_post"], normed(middle + f, w, f"{block}around_feed.norm"))


def wave(t, i):
    angle = t / 10000 ** (2 * (i // 2) / 8)
    return math.cos(angle) if i % 2 else math.sin(angle)


def normed(x, w, name):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


CASES = {
    "old": ({}, OLD, {}),
    "new": ({}, NEW, {"layer": 2}),
    "learned": ({}, {"activation": "gelu_tanh"}, {"head": 2}),
    "bert": ({"task": "masked"}, {"norm": "post", "embed_norm": True, "segments": 2}, {}),
    "decoder": ({"task": "denoise", "family": "seq2seq"}, {"qk_norm": True, "positions": "rotary"}, {}),
    "encoder": ({"task": "denoise", "family": "seq2seq"}, {"norm": "post"}, {"where": "encoder", "layer": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_where_the_model_ends_both_ways(tokenizer, case):
    of, settings, asked = CASES[case]
    found = explain_layer(opened(tokenizer, **of, **settings), [TEXT], **{"word": "3"} | asked)
    assert found.forward_error < 1e-12 and found.backward_error < 1e-12
    assert found.steps[-1].name == "resid_post" and len({step.name for step in found.steps}) == len(found.steps)
    assert sum(next(step for step in found.steps if step.name == "weights").forward) == pytest.approx(1)
    assert ("cross weights" in steps_of(found)) == (case == "decoder")
    json.dumps(found.to_dict(), allow_nan=False)
    hidden = any(math.isinf(value) for step in found.steps for value in step.forward)
    assert hidden == (case not in ("bert", "encoder"))  # those look both ways


def test_a_wrong_step_is_noticed(tokenizer, monkeypatch):
    """With the products divided by something else the steps end elsewhere: what the check is for."""
    run = opened(tokenizer)
    monkeypatch.setattr(walking.math, "sqrt", lambda size: size**0.5 * 2**0.5)
    wrong = explain_layer(run, [TEXT])
    assert wrong.forward_error > 1e-4 and wrong.backward_error > 1e-4


@pytest.mark.parametrize("settings", [OLD, NEW], ids=["old", "new"])
def test_gradients_are_what_the_loss_does(tokenizer, settings, monkeypatch):
    """Each number moved a little inside the model, the loss told before and after: no autograd in it."""
    run, place = opened(tokenizer, **settings), 3
    found = explain_layer(run, [TEXT], word=str(place + 1), layer=2)
    back, asked = gradients_of(found), training_target(run, [TEXT])
    model, block = run.model.double(), run.model.backbone.blocks[1]
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # a task's loss is single, too coarse for a slope

    def slope(module, feature):
        def push(size):
            def hook(module, given, output):
                moved = output.clone()
                moved[0, place, feature] += size
                return moved

            handle = module.register_forward_hook(hook)
            with torch.no_grad():
                loss = float(asked.loss(model))
            handle.remove()
            return loss

        return (push(1e-4) - push(-1e-4)) / 2e-4

    for feature in (0, 3):  # the first head's, of queries, keys and values side by side
        for at, name in enumerate(("query", "key", "value")):
            wanted = slope(block.attention.inputs, 8 * at + feature)
            assert float(back[name][feature]) == pytest.approx(wanted, rel=1e-4, abs=1e-9), name
        for module, name in ((block.attention.output, "output"), (block.feed.up, "hidden"), (block, "resid_post")):
            assert float(back[name][feature]) == pytest.approx(slope(module, feature), rel=1e-4, abs=1e-9), name
    a, up = steps_of(found)["weights"], back["weights"]
    assert torch.allclose(back["scores"], a * (up - (a * up).sum()))  # softmax's own
    assert torch.allclose(back["products"] * 2, back["scores"])


def test_a_token_learns_what_its_row_of_the_table_learns(tokenizer):
    run = opened(tokenizer, **OLD)
    found = explain_layer(run, [TEXT], word="2")
    ids = [tokenizer.bos, *tokenizer.encode(TEXT)]
    assert ids.count(ids[1]) == 1
    model = run.model.double()
    training_target(run, [TEXT]).loss(model).backward()
    assert torch.allclose(gradients_of(found)["token"], model.backbone.tokens.weight.grad[ids[1]])
    assert "position" not in gradients_of(found)  # fixed; learned ones are asked
    assert "position" in gradients_of(explain_layer(opened(tokenizer), [TEXT]))


def test_words_and_places(tokenizer):
    run = opened(tokenizer)
    tokens = explain_layer(run, [TEXT]).tokens
    assert explain_layer(run, [TEXT]).position == len(tokens)
    assert explain_layer(run, [TEXT], word=tokens[3]).token == tokens[3]
    assert explain_layer(classifier(tokenizer), [TEXT], label="good").target.startswith("1 ")


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"layer": 3}, "--layer 3: runs/tiny has 2 layers"),
        ({"head": 0}, "--head 0: runs/tiny has 2 heads"),
        ({"word": "whale"}, "--word whale: is no token of the text.*reads: <sos>"),
        ({"word": "99"}, "--word 99: is no token"),
        ({"where": "encoder"}, "--where encoder: runs/tiny has no such part"),
    ],
)
def test_what_is_not_there_is_refused(tokenizer, asked, line):
    with pytest.raises(UserError, match=line):
        explain_layer(opened(tokenizer), [TEXT], **asked)


def test_cells_have_no_such_layer(tokenizer):
    with pytest.raises(UserError, match="no residual stream"):
        explain_layer(opened(tokenizer, family="recurrent"), [TEXT])


def test_the_page_and_the_picture(tokenizer, browser, tmp_path):
    found = explain_layer(opened(tokenizer, **OLD), [TEXT])
    file = tmp_path / "walk.html"
    file.write_text(page(layer_document(found, "a <run>", TEXT)), encoding="utf-8")
    check_sound(Outline(file))
    for width, scheme in ((390, "dark"), (1280, "light")):
        seen = look_at(browser, file, width=width, scheme=scheme)
        assert seen["wrong"] == [] and seen["asked"] == [file.as_uri()] and seen["overflow"] <= 0
        with screen(browser, width=width, scheme=scheme) as tab:
            tab.goto(file.as_uri())
            ends = tab.evaluate("[...document.querySelectorAll('.number')].map(e => e.getBoundingClientRect().right)")
        shown = sum(len(step.forward[:24]) * (1 + (step.backward is not None)) for step in found.steps)
        assert len(ends) == shown and max(ends) <= width  # every number can be seen without scrolling
    words = "".join(ElementTree.fromstring(layer_document(found, "run", TEXT).picture()).itertext())
    assert all(step.name in words for step in found.steps) and words.count("−∞") == 1  # the last token sees all
    assert any(
        line.startswith("resid_post: ") for line in terminal(layer_document(found, "", TEXT, direction="backward"))
    )


# docs/transformer.md


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the page's commands say of a run that was just made as the page says."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr("sys.argv", [])
        retell.make_run(folder)
        page = retell.PAGE.read_text(encoding="utf-8")
        more = {
            "params": "explain params runs/animals",
            "facts": f"{retell.blocks(page)[1][0].split(' --way')[0]} --json",
        }
        yield page, retell.retold(page, retell.said_by), {name: retell.said_by(words) for name, words in more.items()}


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def plain(lines):
    return "\n".join(lines).replace("−", "-").replace("+", "")


def test_the_page_quotes_what_is_true(told):
    page, again, _ = told
    before, after = retell.blocks(page), retell.blocks(again)
    assert len(before) == len(after) > 15
    for (command, quoted), (_, said) in zip(before, after, strict=True):
        assert len(quoted) > 3, command
        assert words(quoted) == words(said), command
        for row, other in zip(quoted, said, strict=True):
            was, now = numbers(row), numbers(other)
            room = 0.02 * max(1.0, *map(abs, was)) if was else 0  # another machine rounds otherwise, 450 steps long
            assert now == pytest.approx(was, abs=room), command


def words(lines):
    return re.sub(r"\s+", " ", NUMBER.sub("#", plain(lines)))


def numbers(line):
    return [float(found.replace(",", "")) for found in NUMBER.findall(plain([line]))]


def test_the_page_says_nothing_that_it_does_not_quote(told):
    """A number between the blocks stands in one of them, or is made from them here."""
    page, _, more = told
    inside = "\n".join(line for line in page.splitlines() if line.startswith("    "))
    between = "\n".join(line for line in page.splitlines() if not line.startswith("    "))
    facts = {step["name"]: step["forward"] for step in json.loads(more["facts"].splitlines()[-1])["steps"]}
    seen = torch.tensor(facts["products"][:7]) / math.sqrt(8)
    wrong = float(seen[2]), float(F.softmax(seen, 0)[2])
    made = [number for number in re.findall(r"\d+\.\d+", between) if number not in inside]
    assert [float(number) for number in made] == pytest.approx(wrong, rel=0.02)
    assert "1,059 parameters" in more["params"] and "128 fixed numbers" in more["params"]


def test_a_page_that_is_no_longer_true_is_noticed(told):
    page, again, _ = told
    changed = page.replace("0.921", "0.721")
    with pytest.raises(AssertionError):
        test_the_page_quotes_what_is_true((changed, again, None))


def test_steps_as_they_are_typed(call, tmp_path):
    typed = ["explain", "layer", "reviews-en", "I liked this film.", "-q", "--device", "cpu"]
    out, _ = call(*typed, "--step", "scores", "--out", tmp_path / "l.svg", "--layer", 2, "--head", 5, "--json")
    facts = json.loads(out.splitlines()[-1])
    assert facts["sizes"] == {"D": 160, "H": 5, "K": 32, "F": 480} and (facts["layer"], facts["head"]) == (2, 5)
    assert [step["name"] for step in facts["steps"]] == ["scores"] and facts["forward_error"] < 1e-12
    ElementTree.parse(tmp_path / "l.svg")
    _, err = call(*typed, "--step", "score", code=2)
    assert "--step score: no such step; did you mean 'scores'?" in err


def test_the_word_that_is_asked_about_is_not_masked(call):
    for text, word, place in (("I liked it", "it", 4), ("I liked it", "liked", 3), ("I liked it", "2", 2)):
        out, _ = call("explain", "layer", "reviews-en", text, "--word", word, "--json")
        found = json.loads(out)
        assert found["place"] == place and found["tokens"][place - 1] == ["", "I", "liked", "it"][place - 1]
        assert "[MASK]" in found["tokens"]
    assert "--word it" in call("explain", "layer", "reviews-en", "it", "--word", "it", code=2)[1]
