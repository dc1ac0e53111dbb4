"""Parameter counts beside their formulas for every preset, and the params command."""

import json
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn

from headstock.explain.parameters import explain_parameters
from headstock.explain.parameters_document import module_rows, parameter_document
from headstock.explain.render_document import page as render_page
from headstock.explain.subject import open_subject
from headstock.explain.symbols import formula, in_html, in_text
from headstock.train.settings import preset_names
from tests.report.browsing import Outline, check_sound

V, D = 50_001, 200


def params(preset, *settings, **options):
    classes = options.get("classes")
    task = options.get("task")
    subject = open_subject(None, preset, list(settings), weights=False, task=task, classes=classes if task else None)
    return explain_parameters(subject, classes=classes)


@pytest.fixture(scope="module")
def classic():
    return params("classic", f"vocabulary={V}")


def test_lab_model_counts(classic):
    facts = classic.to_dict()
    assert (facts["base"], facts["total"], facts["trainable"]) == (10_968_200, 21_018_401, 21_018_401)
    assert facts["heads"] == {"token": 10_050_201, "label": 402}
    modules = {module["module"]: module["formula"] for module in facts["modules"]}
    assert modules["backbone.blocks.*.attention.inputs"] == "3*D**2 + 3*D"
    assert modules["backbone.blocks.*.attention.output"] == "D**2 + D"
    assert modules["backbone.blocks.*"] == "6*D**2 + 10*D"
    assert facts["derivative_by_heads"] == "0"
    trained = {tuple(total["heads"]): total["backbone_frozen"] for total in facts["totals"]}
    assert trained["label",] == {"trainable": 402, "frozen": 10_968_200}


def test_lab_model_tensors_match_pytorch():
    """The lab's model is an embedding, nn.TransformerEncoderLayer and a linear layer: the same tensors."""
    layer = nn.TransformerEncoderLayer(D, 2, D, device="meta")
    lab = {"embedding.weight": V * D, "decoder.weight": V * D, "decoder.bias": V}
    lab |= {f"layers.0.{name}": parameter.numel() for name, parameter in layer.named_parameters()}
    facts = params("classic", f"vocabulary={V}", "depth=1").to_dict()
    assert len(facts["rows"]) == len(lab) == 15
    assert {row["torch"]: row["count"] for row in facts["rows"]} == lab
    values = dict(zip(sympy.symbols("V D M A T"), (V, D, 1, 2, 256), strict=True))
    assert all(sympy.sympify(row["formula"]).subs(values) == row["value"] == row["count"] for row in facts["rows"])
    assert sum(row["count"] for row in facts["rows"]) == facts["total"]


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_matches_its_formula(preset):
    subject = open_subject(None, preset, ["vocabulary=900"], weights=False)
    result = explain_parameters(subject, length=16)  # what has no closed form is counted in a forward pass
    assert result.total == sum(parameter.numel() for parameter in subject.model.parameters())
    if subject.model.backbone.name not in ("transformer", "seq2seq", "recurrent", "elmo"):
        return  # counted on the module itself
    names = {symbol.name: symbol.value for symbol in result.symbols}
    for expression, value in ((result.totals[0].formula, result.total), (result.base_formula, result.base)):
        symbols = {symbol: names[str(symbol)] for symbol in expression.free_symbols}
        assert expression.subs(symbols) == value


@pytest.mark.parametrize(
    ("preset", "settings", "options"),
    [
        ("bert-nano", ["nsp=true", "transform=false"], {}),
        ("bert-nano", [], {"task": "hybrid"}),
        ("gpt-nano", ["pool=concat", "layers=concat4"], {"task": "classify", "classes": 7}),
        ("elmo-nano", ["layers=mix"], {"task": "classify", "classes": 3}),
        ("bert-nano", [], {"task": "pair", "classes": 3}),
        ("modern-nano", ["layers=mix"], {"task": "tag", "classes": 9}),
        ("gpt-nano", [], {"task": "answer"}),
        ("seq2seq-nano", [], {"task": "translate"}),
        ("seq2seq-nano", ["model.source_vocabulary=700", "tied=false"], {}),
        ("seq2seq-nano", ["shared=false", "positions=learned"], {}),
    ],
)
def test_every_head_matches_its_formula(preset, settings, options):
    result = params(preset, "vocabulary=900", *settings, **options)
    assert sum(module.value * module.times for module in result.modules if module.tensor) == result.total
    assert result.total == result.base + sum(result.heads[name] for name in result.totals[0].heads)


def test_number_of_heads_matters_only_with_qk_norm():
    plain, normed = params("gpt-nano"), params("modern-nano")
    heads = next(symbol for symbol in normed.derivative.free_symbols if str(symbol) == "A")
    assert plain.derivative == 0
    assert sympy.simplify(normed.derivative * heads**2).free_symbols == normed.derivative.free_symbols - {heads}
    assert params("lstm-nano").derivative is None
    twice = params("modern-nano", "heads=8").total - normed.total  # 4 layers, 2 norms, 16 weights less in each
    assert twice == -4 * 2 * 16
    assert params("gpt-nano", "heads=8").total == plain.total


def test_typesetting_of_formulas():
    width, hidden, depth, heads = sympy.symbols("D F M A")
    assert in_text(3 * width**2 + 3 * width) == "3D² + 3D"
    assert in_text(depth * (6 * width**2 + 10 * width) + 2, depth) == "2 + M(6D² + 10D)"
    assert in_text(-2 * depth * width / heads**2) == "−2MD/A²"
    assert in_html(width**2 + hidden) == '<span class="math"><i>D</i><sup>2</sup> + <i>F</i></span>'
    assert in_text(1.0 * width + 0.15 * hidden) == "D + 0.15F"
    assert formula(12) == "12"
    assert in_text(sympy.Symbol("V_src") * width) == "VₛD"


def test_module_tree_skips_single_children(classic):
    rows = module_rows(classic.modules)
    assert [row.level for row in rows[:4]] == [0, 1, 2, 1]
    assert "around_feed.norm" in {row.name for row in rows}
    assert "around_feed" not in {row.name for row in rows}


def test_params_command(call, tmp_path):
    out, err = call("explain", "params", "--preset", "classic", "--set", "vocabulary=50001")
    assert "21,018,401" in out and "6D² + 10D" in out and "derivative of the total by A is 0" in out and not err
    out, _ = call("explain", "params", "--preset", "gpt-nano", "--classes", 5, "--json")
    output = json.loads(out.splitlines()[-1])
    assert output["heads"]["label"] == 5 * 129
    assert {"total", "base", "heads", "trainable", "rows", "flops_per_token", "memory"} <= set(output)
    page = tmp_path / "new" / "params.html"
    call("explain", "params", "--preset", "modern-nano", "--out", page)
    outline = Outline(page)
    check_sound(outline)
    assert "1,365,376" in outline.text and "D/A" in outline.text
    assert str(Path.home()) not in page.read_text()
    call("explain", "params", "--preset", "modern-nano", "--out", tmp_path / "chart.svg")
    chart = (tmp_path / "chart.svg").read_text()
    assert chart.startswith("<svg xmlns") and "prefers-color-scheme: dark" in chart


def test_run_with_its_own_or_other_heads(call, corpus, tmp_path, tiny):
    import headstock

    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 2})
    result = json.loads(call("explain", "params", tmp_path / "run", "--json")[0].splitlines()[-1])
    weights = headstock.load(tmp_path / "run", device="cpu").model
    assert result["total"] == sum(p.numel() for p in weights.parameters())
    tagged = call("explain", "params", tmp_path / "run", "--task", "tag", "--classes", 4, "--json")[0]
    assert json.loads(tagged.splitlines()[-1])["heads"]["tag"] == 4 * 17
    _, err = call("explain", "params", tmp_path / "run", "--set", "depth=3", code=2)
    assert "--set" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--preset"),
        (["--preset", "clasic"], "did you mean 'classic'"),
        (["classic"], "--preset classic"),
        (["--preset", "classic", "--set", "depht=2"], "did you mean 'depth'"),
        (["--preset", "classic", "--task", "clasify"], "did you mean 'classify'"),
        (["--preset", "classic", "--task", "classify"], "--classes"),
        (["--preset", "seq2seq-nano", "--classes", "3"], "--classes"),
        (["--preset", "classic", "--length", "999"], "at most 256"),
        (["--preset", "classic", "--out", "x.pdf"], ".html"),
    ],
)
def test_invalid_options_are_one_error_line(call, words, expected):
    _, err = call("explain", "params", *words, code=2)
    assert expected in err and len(err.strip().splitlines()) <= 2


def test_costs_of_the_lab_model(classic):
    facts = classic.to_dict()
    length, depth = 256, 4
    assert facts["flops_per_token"]["forward"]["value"] == depth * (12 * D**2 + 4 * length * D) + 2 * V * D
    assert facts["flops_per_token"]["training"]["value"] == 3 * facts["flops_per_token"]["forward"]["value"]
    memory = facts["memory"]["cpu, float32"]
    assert memory["gradients"]["value"] == 4 * facts["total"]
    assert memory["weights"]["value"] == 4 * (facts["total"] + 256 * D)
    assert memory["optimizer (adamw)"]["value"] == 8 * facts["total"] + 4 * len(facts["rows"])


def test_presets_are_counted_on_the_meta_device():
    subject = open_subject(None, "bert-base", weights=False)
    assert subject.model.device == torch.device("meta")
    assert render_page(parameter_document(explain_parameters(subject))).count("<section") == 5


def test_ways_to_fine_tune():
    """Full fine-tuning trains everything, LoRA r (K + N) per matrix and the head, a frozen backbone the head."""
    facts = params("gpt-nano", "width=32", "heads=2", "depth=3", "hidden=64", "vocabulary=300")
    full, lora, head = facts.finetuning
    assert full.trainable.value == next(total.total for total in facts.totals if total.heads == ("label",))
    assert head.trainable.value == 2 * 32 + 2
    assert lora.trainable.value == 3 * 8 * (32 + 96 + 32 + 32) + head.trainable.value
    assert in_text(lora.trainable.formula) == "CD + C + 6MrD"
    assert lora.state.value < full.state.value / 4 and lora.flops.value < full.flops.value
    assert [way["name"] for way in facts.to_dict()["finetuning"]] == [way.name for way in facts.finetuning]
    assert facts.trainable == facts.total  # of the preset itself
