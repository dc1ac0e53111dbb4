"""`headstock.explain_*` gives what the command line prints, as a result that a notebook shows as a page."""

import html
import json
import re

import pytest

import headstock
from headstock.api import explain
from headstock.errors import UserError


@pytest.fixture(scope="module")
def model(stock):
    return headstock.load(stock, device="cpu")


CALLS = {
    "params": (lambda model: explain.explain_parameters(model), []),
    "attention": (lambda model: explain.explain_attention(model, "Anne likes Paris."), ["Anne likes Paris."]),
    "residual": (lambda model: explain.explain_residual(model, "Anne likes Paris."), ["Anne likes Paris."]),
    "layer": (
        lambda model: explain.explain_layer(model, "Anne likes Paris.", word="likes", way="forward"),
        ["Anne likes Paris.", "--word", "likes", "--way", "forward"],
    ),
    "induction": (lambda model: explain.explain_induction(model, rows=2), ["--rows", "2"]),
}


@pytest.mark.parametrize("verb", CALLS)
def test_functions_return_what_the_command_line_prints(model, stock, call, verb):
    function, words = CALLS[verb]
    out, _ = call("explain", verb, stock, *words, "--json", "--device", "cpu")
    assert json.loads(json.dumps(function(model).to_dict())) == json.loads(out.splitlines()[-1])


def test_an_explanation_in_a_notebook_a_terminal_and_a_file(model, tmp_path):
    explanation = explain.explain_attention(model, "<b>Anne</b> likes")
    shown = explanation._repr_html_()
    page = html.unescape(re.search(r"srcdoc='([^']*)'", shown)[1])
    assert page.startswith("<!doctype html>") and "<b>Anne" not in page
    assert 'sandbox="allow-scripts"' in shown  # in an origin of its own, so that it cannot reach the notebook
    assert explanation.title in str(explanation) and explanation.title in repr(explanation)
    assert explanation.save(tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert explanation.save(tmp_path / "picture.svg").read_text(encoding="utf-8").startswith("<svg")
    with pytest.raises(UserError, match=r"page\.pdf"):
        explanation.save(tmp_path / "page.pdf")


def test_presets_with_settings():
    explanation = explain.explain_parameters(preset="classic", settings={"vocabulary": 50001, "tied": False})
    assert explanation["total"] == 10_968_200 + 10_050_201
    assert any("embedding" in str(row).lower() for row in explanation._rows())
    with pytest.raises(UserError, match="did you mean 'vocabulary'"):
        explain.explain_parameters(preset="classic", settings={"vocabular": 7})
