"""A new backbone is one file: a toy one goes through the whole product without touching another file.

Gated causal convolutions (Dauphin et al. 2017). B rows, T tokens, D width.
"""

import json
import tomllib
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headstock
from headstock.decoding.continuous_batching import ContinuousBatch, DecodingRequest
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.explain.prediction import explain_prediction
from headstock.model.backbone import BACKBONES, Backbone
from headstock.model.batch import Batch, Output, pad
from headstock.planner import rules
from headstock.report.pages import write_report
from headstock.tasks.base import TASKS
from headstock.train.run_folder import RunFolder

KERNEL = 3  # tokens that a convolution reads: its own and the two before it
SETTINGS = """
[model]
family = "gated-conv"
context = 32
depth = 2
width = 16

[tokenizer]
vocabulary = 300

[train]
steps = 60
batch = 8
lr = 0.01
optimizer = "adamw"
tensorboard = false
"""


@dataclass(frozen=True)
class GatedConvConfig:
    vocabulary: int = 300
    context: int = 32
    depth: int = 2
    width: int = 16
    dropout: float = 0.0
    tied: bool = True


class ConvState:
    """The tokens read so far: decoding reads them again, which a toy may do."""

    def __init__(self, rows: list[list[int]]):
        self.rows, self.lengths = rows, torch.tensor([len(row) for row in rows])

    def select(self, rows: Tensor) -> "ConvState":
        return self.keep(rows.tolist())

    def keep(self, rows: list[int]) -> "ConvState":
        return ConvState([self.rows[row] for row in rows])

    def append(self, other: "ConvState") -> "ConvState":
        return ConvState(self.rows + other.rows)

    def read(self, batch: Batch) -> "ConvState":
        padding = torch.zeros_like(batch.tokens, dtype=torch.bool) if batch.padding is None else batch.padding
        new = [tokens[~padded].tolist() for tokens, padded in zip(batch.tokens, padding, strict=True)]
        return ConvState([old + more for old, more in zip(self.rows, new, strict=True)])

    def make_static(self) -> bool:
        return False


class GatedConv(Backbone):
    Config = GatedConvConfig
    causal = True

    def __init__(self, config: GatedConvConfig):
        super().__init__()
        self.config = config
        self.width, self.depth, self.context = config.width, config.depth, config.context
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(nn.Conv1d(config.width, 2 * config.width, KERNEL) for _ in range(config.depth))

    def parameters_by_layer(self) -> list[list[nn.Parameter]]:
        return [list(self.tokens.parameters()), *(list(layer.parameters()) for layer in self.layers)]

    def new_state(self, rows: int, capacity: int) -> ConvState:
        return ConvState([[]] * rows)

    def forward(self, batch: Batch, state=None, *, keep_layers: bool = False) -> Output:
        tokens, before = batch.tokens, state
        if state is not None:
            state = state.read(batch)
            tokens, _ = pad(state.rows, filler=0)
        x = self.tokens(tokens)  # (B, T, D)
        layers = [x]
        for layer in self.layers:
            x = x + F.glu(layer(F.pad(x.transpose(1, 2), (KERNEL - 1, 0))), 1).transpose(1, 2)
            layers.append(x)
        if before is not None:  # only the new tokens
            positions = before.lengths[:, None] + torch.arange(batch.tokens.size(1))
            positions = torch.minimum(positions, state.lengths[:, None] - 1)  # padding
            layers = [layer[torch.arange(len(layer))[:, None], positions] for layer in layers]
        return Output(layers[-1], layers if keep_layers else [], state)


@pytest.fixture(scope="module", autouse=True)
def registered():
    BACKBONES.names()  # loads the package's own, so that the toy comes on top
    BACKBONES.add("gated-conv")(GatedConv)
    yield
    del BACKBONES._classes["gated-conv"]


@pytest.fixture(scope="module")
def files(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("toy")
    texts = [f"{who} {what} Paris." for who in ("Anne", "Ben", "Zoë", "le café") for what in ("likes", "finds")]
    rows = [json.dumps({"text": text, "label": "good" if "likes" in text else "plain"}) for text in texts * 3]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "test.jsonl").write_text("\n".join(rows[:8]))
    (folder / "toy.toml").write_text(SETTINGS)
    headstock.pretrain(corpus, out=folder / "run", config_file=folder / "toy.toml", device="cpu")
    headstock.finetune(
        folder / "run",
        train=folder / "train.jsonl",
        test=folder / "test.jsonl",
        out=folder / "classifier",
        settings={"epochs": 2, "batch": 8, "tensorboard": False},
        device="cpu",
    )
    return folder


def test_it_is_causal():
    torch.manual_seed(0)
    backbone = GatedConv(GatedConvConfig()).eval()
    tokens = torch.randint(300, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 300
    one, other = (backbone(Batch(x)).hidden for x in (tokens, changed))
    assert torch.equal(one[:, :5], other[:, :5]) and not torch.equal(one[:, 5:], other[:, 5:])


def test_it_pretrains_scores_and_generates(files):
    run = headstock.load(files / "run", device="cpu")
    results = RunFolder(files / "run").results()
    assert results["valid_loss"] < 5.0  # of 300 tokens; a uniform guess has 5.7
    assert run.score("Anne likes Paris.")[0].log_likelihood < 0
    assert run.generate("Anne", max_tokens=4, temperature=0.0)[0].text
    assert run.embed(["Anne likes Paris."]).shape == (1, 16)


def test_it_decodes_in_a_continuous_batch(files):
    model = headstock.load(files / "run", device="cpu").model
    prompts, greedy = [[5, 6, 7], [8], [9, 10]], Sampling(temperature=0.0)
    batch = ContinuousBatch(model, end=None, suppress_tokens=(), max_rows=2)
    rows = [batch.add(DecodingRequest(prompt, 6 - i, greedy)) for i, prompt in enumerate(prompts)]
    while not batch.idle:
        batch.step()
    for row in rows:
        alone = generate(model, [row.request.prompt], max_tokens=row.request.max_tokens, sampling=greedy)[0]
        assert row.new_tokens == alone.tokens


def test_it_finetunes_predicts_and_is_explained(files):
    classifier = headstock.load(files / "classifier", device="cpu")
    assert {row["label"] for row in classifier.predict(["Anne likes Paris.", "Ben finds home."])} <= {"good", "plain"}
    explanation = explain_prediction(classifier, ["Anne likes Paris."])
    assert explanation.words and 0 <= explanation.probability <= 1


def test_its_report_and_model_card_are_written(files):
    for name in ("run", "classifier"):
        assert write_report(files / name).is_file()
        assert "gated-conv" in (files / name / "README.md").read_text(encoding="utf-8")


def test_its_parameters_are_counted_without_a_formula(files, call):
    out, _ = call("explain", "params", files / "run", "--json")
    facts = json.loads(out.splitlines()[-1])
    counted = sum(tensor.numel() for tensor in headstock.load(files / "run", device="cpu").model.parameters())
    assert facts["total"] == counted


def test_its_plan_says_that_costs_are_measured(corpus, call, monkeypatch):
    preset = tomllib.loads(SETTINGS) | {"task": {"name": "causal"}}
    causal = TASKS.get("causal")
    monkeypatch.setattr(causal, "plan", replace(causal.plan, family="gated-conv"))
    monkeypatch.setattr(rules, "PRESETS", ("nano",))
    monkeypatch.setattr(rules, "read_preset", lambda name: deepcopy(preset))
    out, _ = call("plan", corpus, "--objective", "causal", "--device", "cpu")
    assert "no closed form for backbone" in " ".join(out.split())
    out, _ = call("plan", corpus, "--objective", "causal", "--device", "cpu", "--json")
    output = json.loads(out.splitlines()[-1])
    assert output["measured_parts"] == ["backbone"] and output["config"]["model"]["family"] == "gated-conv"
    assert output["parameters"] > 300 * 16 and output["flops"] > 0 and output["peak_bytes"] > 0


def test_a_plan_by_formula_has_no_measured_parts(corpus, call):
    out, _ = call("plan", corpus, "--objective", "causal", "--device", "cpu", "--json")
    assert json.loads(out.splitlines()[-1])["measured_parts"] == []


def test_it_is_compared(files, tmp_path):
    results = headstock.compare(
        files / "run",
        train=files / "train.jsonl",
        test=files / "test.jsonl",
        out=tmp_path / "compare",
        arms=["pretrained", "scratch", "frozen"],
        labels=[16],
        seeds=2,
        settings={"epochs": 1, "tensorboard": False},
        device="cpu",
    )
    assert {arm["name"] for arm in results["arms"]} == {"pretrained", "scratch", "frozen"} and results["verdicts"]
    assert write_report(tmp_path / "compare").is_file()


def test_it_is_exported_to_onnx(files, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    headstock.export_run(files / "classifier", tmp_path / "onnx", to="onnx")
    session = runtime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    assert "logits" in {output.name for output in session.get_outputs()}
