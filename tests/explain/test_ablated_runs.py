"""Every explanation holds for models without positions, norms, skip connections or an inner activation."""

import json

import pytest

import headstock
from tests.conftest import TINY

ABLATIONS = {
    "no-norm": {"norm": "none"},
    "no-residual": {"residual": False},
    "no-residual-post": {"residual": False, "norm": "post"},
    "no-positions": {"positions": "none"},
    "outer": {"feed_activation": "outer", "activation": "relu"},
}


@pytest.fixture(scope="module", params=ABLATIONS)
def run(request, tmp_path_factory, corpus):
    out = tmp_path_factory.mktemp("ablated") / request.param
    headstock.pretrain(corpus, out=out, settings=TINY | {"steps": 4} | ABLATIONS[request.param], device="cpu")
    return out


def result(call, *words):
    out, _ = call("explain", *words, "--json")
    return json.loads(out.splitlines()[-1])


def test_the_terms_of_every_gradient_add_up(run, call):
    copied = run.name == "no-positions"  # by the fresh models of the depth study, which have norms and skips
    depths = "--depths" if copied else "--no-depths"
    facts = result(call, "gradients", run, "Anne sees Paris.", depths)
    assert facts["error"] < 1e-6
    skips = {connection["skip"] == 0 for connection in facts["connections"]}
    assert skips == {"no-residual" in run.name}


def test_a_layer_is_recomputed_from_its_formulas(run, call):
    facts = result(call, "layer", run, "Anne sees Paris.")
    assert max(facts["forward_error"], facts["backward_error"]) < 1e-9
    names = [step["name"] for step in facts["steps"]]
    assert ("position" in names) is (run.name != "no-positions")
    assert ("attention norm" in names) is (run.name not in ("no-norm", "no-residual-post"))


def test_parameters_and_diagram_count_the_same(run, call, tmp_path):
    assert result(call, "params", run)["total"] == result(call, "model", run)["total"]


def test_it_generates_and_scores(run, call):
    out, _ = call("generate", run, "Anne", "--max-tokens", "5", "--json")
    assert json.loads(out.splitlines()[-1])


def test_positions_are_shown_where_there_are_any(run, call):
    _, err = call("explain", "positions", run, "--json", code=2 if run.name == "no-positions" else 0)
    assert ("without position encodings" in err) is (run.name == "no-positions")


def test_no_architecture_of_hugging_face_can_store_it(run, call, tmp_path):
    _, err = call("export", run, tmp_path / "export", "--to", "huggingface", code=2)
    changed = next(iter(ABLATIONS[run.name]))
    assert f"model.{changed} is" in err
