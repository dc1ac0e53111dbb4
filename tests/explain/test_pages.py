"""The gradients, residual and prediction commands, and their pages in a browser."""

import json
from dataclasses import replace

import pytest

from headstock.explain.gradients import depth_study, explain_gradients
from headstock.explain.gradients_document import gradient_document, recurrence_document
from headstock.explain.inputs import training_target
from headstock.explain.prediction import explain_prediction, prediction_document
from headstock.explain.recurrence import explain_recurrence
from headstock.explain.render_document import page
from headstock.explain.residual import explain_residual
from headstock.explain.residual_document import residual_document
from tests.explain.pipelines import make_classifier, make_pipeline
from tests.report.browsing import Outline, check_sound, follows_colour_scheme, view_page

TEXT = "Anne likes Paris. Ben finds the sea."
STOCK, FILM = "reviews-en", "The film was [MASK], and I would see it again."


@pytest.fixture(scope="module")
def pages(tokenizer, tmp_path_factory):
    """A page of every kind for every family."""
    folder = tmp_path_factory.mktemp("pages")
    names = ("a tiny <run>", TEXT)
    causal, both = make_pipeline(tokenizer, norm="post"), make_pipeline(tokenizer, "denoise", family="seq2seq")
    cells, result = make_pipeline(tokenizer, family="recurrent"), make_classifier(tokenizer)
    deep = replace(
        explain_gradients(causal.model, training_target(causal, [TEXT])), depths=depth_study({}, depths=(2, 4))
    )
    documents = {
        "gradients": gradient_document(deep, *names),
        "both-stacks": gradient_document(explain_gradients(both.model, training_target(both, [TEXT])), *names),
        "time": recurrence_document(explain_recurrence(cells.model, training_target(cells, [TEXT])), *names),
        "residual-both": residual_document(explain_residual(both, [TEXT]), *names),
        "residual-class": residual_document(explain_residual(result, [TEXT]), *names),
        "prediction": prediction_document(explain_prediction(result, [TEXT]), names[0]),
    }
    for name, document in documents.items():
        (folder / f"{name}.html").write_text(page(document), encoding="utf-8")
    return folder


def test_pages_are_valid_and_have_no_scripts(pages):
    for file in sorted(pages.glob("*.html")):
        page = Outline(file)
        check_sound(page)
        assert "a tiny <run>" in page.text, file.name
    assert "dL/dS" in Outline(pages / "gradients.html").text  # the formula of post-norm
    assert "dL/dS" not in Outline(pages / "both-stacks.html").text
    assert "cross-attention" in Outline(pages / "both-stacks.html").text


def test_pages_are_self_contained_and_fit_any_screen(browser, pages):
    for file in sorted(pages.glob("*.html")):
        dark = view_page(browser, file, width=390, scheme="dark")
        light = view_page(browser, file, width=1280, scheme="light")
        for view in (light, dark):
            assert view.is_sound() and view.charts, file.name
        assert follows_colour_scheme(light, dark), file.name


# The command line


def test_gradients_command(call, tmp_path):
    out, err = call(
        "explain", "gradients", STOCK, "I liked this film.", "--no-depths", "--json", "--out", tmp_path / "g.svg"
    )
    output = json.loads(out.splitlines()[-1])
    assert output["norm"] == "pre" and len(output["connections"]) == 8 and output["error"] < 1e-6
    assert {"stack", "layer", "sublayer", "received", "skip", "through", "passed", "error"} <= output["connections"][
        0
    ].keys()
    assert (tmp_path / "g.svg").read_text().startswith("<svg xmlns") and "g.svg" in err
    (tmp_path / "t.txt").write_text("I liked this film.\n\nI did not like that one.\n")
    out, _ = call("explain", "gradients", STOCK, "--file", tmp_path / "t.txt", "--no-depths", "-q")
    assert "Residual connections, from the top" in out and "no gradient through the skip" in out


def test_residual_and_prediction_commands(call, tmp_path):
    out, _ = call("explain", "residual", STOCK, FILM, "--json", "-q", "--out", tmp_path / "r.html")
    output = json.loads(out.splitlines()[-1])
    assert [step["point"] for step in output["steps"]] == ["resid_mid", "resid_post"] * 4
    ends = [guess["layers"][-1][0]["answer"] for guess in output["lens"]]
    out, _ = call("explain", "prediction", STOCK, FILM, "--json", "-q", "--out", tmp_path / "p.svg")
    output = json.loads(out.splitlines()[-1])
    assert [output["answer"]] == ends and output["kind"] == "masked word"  # the lens ends with the explained answer
    assert {word["word"] for word in output["words"]} >= {"film", "was", "again"}
    out, _ = call("explain", "residual", STOCK, FILM, "-q")
    assert "The residual stream" in out and "resid_mid" in out
    out, _ = call("explain", "prediction", STOCK, FILM, "-q")
    assert "Why this masked word" in out


def test_interpretability_commands(call, tmp_path):
    """Hook points, direct logit attribution, head ablation and activation patching of the bundled model."""

    def result(*words):
        return json.loads(call("explain", *words, "--json", "-q")[0].splitlines()[-1])

    points = [point["name"] for point in result("hooks", STOCK)["points"]]
    assert "blocks.3.attention.weights" in points and points[0] == "embedding" and points[-1] == "final_norm"
    assert "blocks.*.attention.head_output" in call("explain", "hooks", "--preset", "gpt-nano", "-q")[0]
    output = result("logits", STOCK, FILM, "--label", "great", "--versus", "bad")
    assert output["error"] < 1e-5 and output["sum"] == pytest.approx(output["logit"])
    assert "great" in output["target"] and "bad" in output["target"]
    (tmp_path / "t.txt").write_text("I liked this film a lot, it was great.\n\nI did not like that one.\n")
    output = result("heads", STOCK, "--file", tmp_path / "t.txt", "--method", "zero", "--out", tmp_path / "h.svg")
    assert len(output["effects"]) == 20 and all(check["holds"] for check in output["checks"])
    other = FILM.replace("again", "twice")
    answers = ["--label", "great", "--versus", "bad", "--out", tmp_path / "p.html"]
    output = result("patch", STOCK, FILM, "--corrupted", other, *answers)
    assert all(check["holds"] for check in output["checks"]) and len(output["positions"]) == 3
    check_sound(Outline(tmp_path / "p.html"))
    assert (tmp_path / "h.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["heads", STOCK, "--file", "no-such-file.txt"], "no-such-file.txt"),
        (["patch", STOCK, FILM, "--corrupted", FILM], "both texts give"),
        (["patch", STOCK, FILM, "--corrupted", "a", "--corrupted", "b"], "--corrupted: found 2 texts"),
        (["logits", STOCK, FILM, "--versus", "great", "--label", "great"], "--versus great: is the answer"),
        (["induction", STOCK], "is no left-to-right language model"),
        (["hooks", STOCK, "--out", "hooks.svg"], "hook points have no picture"),
        (["gradients", STOCK], "no text: give one, or name a --file"),
        (["gradients", STOCK, "a text", "--file", "x.txt"], "give a text or --file, not both"),
        (["gradients", STOCK, "--file", "x.txt", "--label", "good"], "--label goes with a text"),
        (["gradients", STOCK, "a text", "--out", "x.png"], "--out x.png: must end in .html"),
        (["residual", STOCK, "word " * 400], "tokens with special tokens, and this run reads 256"),
        (["prediction", STOCK, "nothing is hidden"], "write [MASK] for one"),
        (["prediction", STOCK, "  "], "the text is empty"),
        (["prediction", "reviews-enn", "a text"], "reviews-enn"),
    ],
)
def test_invalid_input_is_one_error_line(call, words, line):
    _, err = call("explain", *words, code=2)
    assert line in err and err.count("\n") == 1
