"""Architecture diagrams: order of modules, counts, layout, and rendering in a browser."""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from xml.etree import ElementTree

import pytest
from torch import nn

from headstock.explain.diagram import ModelDiagram, model_document, model_svg
from headstock.explain.parameters import explain_parameters
from headstock.explain.parameters_document import parameter_document
from headstock.explain.render_document import page, terminal
from headstock.explain.subject import open_subject
from headstock.model.backbone import Backbone
from headstock.model.batch import Output
from headstock.model.heads import LMHead
from headstock.model.model import Model
from tests.report.browsing import Outline, check_sound, open_tab, view_page

CASES = {
    "classic": ("classic", [], {}),
    "gpt": ("gpt-nano", [], {}),
    "modern": ("modern-nano", [], {}),
    "bert": ("bert-nano", ["nsp=true"], {}),
    "hybrid": ("bert-nano", [], {"task": "hybrid"}),
    "seq2seq": ("seq2seq-nano", [], {}),
    "two-vocabularies": ("seq2seq-nano", ["model.source_vocabulary=900", "encoder_depth=2", "tied=false"], {}),
    "lstm": ("lstm-nano", [], {}),
    "gru": ("gru-nano", ["hidden=128"], {}),
    "elmo": ("elmo-nano", [], {}),
    "plain-rnn": ("rnn-nano", [], {}),
    "bitransformer": ("bilm-nano", [], {}),
    "ngram": ("ngram-nano", ["depth=3"], {}),
    "gru-seq2seq": ("gru-s2s-nano", [], {}),
    "gru-two-vocabularies": ("gru-s2s-nano", ["model.source_vocabulary=900", "depth=1"], {}),
    "classes": ("gpt-nano", ["layers=mix"], {"task": "classify", "classes": 3}),
    "tags": ("elmo-nano", [], {"task": "tag", "classes": 3}),
    "answers": ("bert-nano", [], {"task": "answer"}),
}


@cache
def subject_and_parameters(case):
    preset, settings, options = CASES[case]
    subject = open_subject(None, preset, settings, weights=False, **options)
    return subject, explain_parameters(subject, length=16)  # counted in a forward pass where there is no closed form


def words_of(svg: str) -> list[tuple[float, float, str]]:
    """Every text of a picture with its coordinates."""
    root = ElementTree.fromstring(svg)
    texts = [node for node in root.iter() if node.tag.endswith("}text")]
    return [(float(node.get("x")), float(node.get("y")), node.text) for node in texts]


def heights(svg: str, *names: str) -> list[float]:
    words = words_of(svg)
    return [next(y for _, y, text in words if text.startswith(name)) for name in names]


@pytest.mark.parametrize("case", CASES)
def test_every_module_shows_its_count(case):
    subject, params = subject_and_parameters(case)
    svg = model_svg(subject, params)
    text = " ".join(text for _, _, text in words_of(svg))
    for module in params.modules:
        inner = re.search(r"(\*|\d)\.(attention|cross|feed|cells|project|up|down)$", module.path)
        is_box = module.path.count(".") <= 1 or (inner and "feed." not in module.path)
        containers = r"heads|backbone(\.(encoder|decoder|stack|ahead|back|forwards|backwards|layers))?"
        is_container = re.fullmatch(containers, module.path)
        if is_box and not module.tensor and not is_container:
            assert f"{module.value:,}" in text, module.path
    assert f"{params.total:,} parameters" in text


@pytest.mark.parametrize("case", CASES)
def test_boxes_do_not_overlap_and_stay_inside(case):
    diagram = ModelDiagram(*subject_and_parameters(case)).draw()
    pattern = re.compile(r'<rect class="box[^"]*" x="(.+?)" y="(.+?)" width="(.+?)" height="(.+?)"')
    boxes = [tuple(map(float, numbers)) for part in diagram.parts for numbers in pattern.findall(part)]
    assert len(boxes) >= 3
    for i, (x, y, width, height) in enumerate(boxes):
        assert diagram.left <= x and x + width <= diagram.right and diagram.top <= y and y + height <= diagram.bottom
        for a, b, wide, high in boxes[i + 1 :]:
            apart = a >= x + width or x >= a + wide or b >= y + height or y >= b + high
            assert apart, (boxes[i], (a, b, wide, high))


def test_directions_and_ngrams_are_drawn_from_their_blocks():
    words = words_of(model_svg(*subject_and_parameters("bitransformer")))
    columns = {text: x for x, _, text in words if text.startswith("causal")}
    assert columns["causal"] < 0 < columns["causal from right to left"]
    assert sum(text == "Self-attention" for _, _, text in words) == 2 and "× 2" in {text for _, _, text in words}
    svg = model_svg(*subject_and_parameters("bitransformer"))
    assert (svg.count('class="allowed"'), svg.count('class="masked"')) == (20, 12)
    svg = model_svg(*subject_and_parameters("ngram"))
    concatenation, hidden, head = heights(svg, "Concatenation", "Hidden layer", "Language model head")
    assert concatenation > hidden > head and "× 2" in svg and "640 → 1,040, tanh" in svg and "128 → 1,040, tanh" in svg
    svg = model_svg(*subject_and_parameters("gru-seq2seq"))
    cells, attention = heights(svg, "GRU", "Attention over the source")
    assert cells > attention and "shared" in svg and "right to left" in svg
    assert "shared" not in model_svg(*subject_and_parameters("gru-two-vocabularies"))


def test_norms_are_drawn_before_or_after_their_sublayers():
    pre, post = (model_svg(*subject_and_parameters(case)) for case in ("gpt", "classic"))
    # y decreases upwards, from the input to the heads
    norms = [y for _, y, text in words_of(pre) if text == "Layer norm"]
    attention, feed = heights(pre, "Self-attention", "Feed-forward")
    assert norms[0] > attention > norms[1] > feed > norms[2]  # one before each sublayer, and the final norm
    norms = [y for _, y, text in words_of(post) if text == "Layer norm"]
    attention, feed = heights(post, "Self-attention", "Feed-forward")
    assert len(norms) == 2 and attention > norms[0] > feed > norms[1]


def test_encoder_and_decoder_are_drawn_side_by_side():
    words = words_of(model_svg(*subject_and_parameters("seq2seq")))
    columns = {text: x for x, _, text in words if text in ("source", "target so far", "Cross-attention")}
    assert columns["source"] < columns["Cross-attention"] < columns["target so far"] + 10
    assert "shared" in {text for _, _, text in words}
    assert "shared" not in {text for _, _, text in words_of(model_svg(*subject_and_parameters("two-vocabularies")))}


def test_mask_thumbnails():
    pictures = {case: model_svg(*subject_and_parameters(case)) for case in ("gpt", "bert", "hybrid")}
    counts = {case: (svg.count('class="allowed"'), svg.count('class="masked"')) for case, svg in pictures.items()}
    assert counts == {"gpt": (10, 6), "bert": (16, 0), "hybrid": (26, 6)}


@dataclass(frozen=True)
class ToyConfig:
    vocabulary: int = 300
    width: int = 16
    tied: bool = False


class ToyBackbone(Backbone):
    """A causal convolution, without closed forms or a diagram of its own."""

    name, Config, causal, context, width, depth = "toy", ToyConfig, True, 32, 16, 1

    def __init__(self):
        super().__init__()
        self.config = ToyConfig()
        self.tokens = nn.Embedding(300, 16)
        self.conv = nn.Conv1d(16, 16, 3)

    def forward(self, batch, state=None, *, keep_layers=False):
        x = self.tokens(batch.tokens)
        return Output(x + self.conv(nn.functional.pad(x.mT, (2, 0))).mT, None, None)

    def parameters_by_layer(self):
        return [list(self.parameters())]

    def new_state(self, rows, capacity):
        raise NotImplementedError


def test_backbone_without_formulas_or_diagram():
    backbone = ToyBackbone()
    subject = replace(subject_and_parameters("gpt")[0], model=Model(backbone, {"token": LMHead(backbone)}), name="toy")
    params = explain_parameters(subject, length=16)
    assert params.total == sum(parameter.numel() for parameter in subject.model.parameters())
    assert any("no closed form" in note for note in params.notes)
    texts = {text for _, _, text in words_of(model_svg(subject, params))}
    assert "conv: 784" in texts and "Language model head" in texts
    for document in (model_document(subject, params), parameter_document(params)):
        assert "no closed form" in page(document) and "There is no closed form" in "".join(map(str, terminal(document)))


def test_model_command(call, tmp_path):
    out, err = call("explain", "model", "--preset", "gpt-nano")
    assert "self-attention" in out and "weight " not in out and "--out" in err
    output = json.loads(call("explain", "model", "--preset", "gpt-nano", "--json")[0].splitlines()[-1])
    assert output["total"] == sum(part["count"] for part in output["parts"] if part["part"] in ("backbone", "heads"))
    call("explain", "model", "--preset", "gpt-nano", "--out", tmp_path / "gpt.html")
    assert "<!doctype html>" in (tmp_path / "gpt.html").read_text()
    call("explain", "model", "--preset", "gpt-nano", "--out", tmp_path / "gpt.svg")
    root = ElementTree.parse(tmp_path / "gpt.svg").getroot()
    assert root.get("width") and "prefers-color-scheme: dark" in (tmp_path / "gpt.svg").read_text()


def test_pages_in_a_browser(browser, tmp_path):
    pages = {case: tmp_path / f"{case}.html" for case in ("bert", "seq2seq", "elmo")}
    for case, file in pages.items():
        file.write_text(page(model_document(*subject_and_parameters(case))), encoding="utf-8")
        check_sound(Outline(file))
    parts = [".diagram .embedding", ".diagram .name", ".diagram .line"]
    style = "name => { const s = getComputedStyle(document.querySelector(name)); return [s.fill, s.stroke] }"
    fills = {}
    for width, scheme in ((1280, "light"), (390, "dark")):
        for case, file in pages.items():
            assert view_page(browser, file, width=width, scheme=scheme).is_sound()
            tab = open_tab(browser, width=width, scheme=scheme)
            assert tab.locator("svg.diagram").bounding_box()["width"] > 400
            fills[case, scheme] = [tab.evaluate(style, name) for name in parts]
    for case in pages:
        assert all(a != b for a, b in zip(fills[case, "light"], fills[case, "dark"], strict=True))
