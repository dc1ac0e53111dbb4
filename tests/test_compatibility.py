"""Runs, checkpoints, comparisons and sweeps written before the redesign keep loading, resuming and answering alike.

The folder `compatibility/before_redesign` holds one tiny run of every family and task, interrupted runs with a
checkpoint, a comparison and a sweep, and in `expected.json` what that version computed from each finished run.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import headstock

BEFORE = Path(__file__).parent / "compatibility" / "before_redesign"
EXPECTED = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))
ROWS = {
    "classify": ["Anne likes Paris."],
    "pair": [("Anne likes Paris.", "Ben likes Paris.")],
    "tag": [["Anne", "likes", "Paris"]],
    "answer": [{"context": "Anne likes Paris.", "question": "Who?"}],
}


@pytest.fixture
def before(tmp_path, monkeypatch) -> Path:
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


def approximately(value):
    """Numbers are compared within rounding, everything else exactly, at any depth."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_finished_runs_answer_as_before(before, name):
    expected, run = EXPECTED[name], headstock.load(name, device="cpu")
    if "score" in expected:
        assert run.score("Anne likes Paris.")[0].log_likelihood == pytest.approx(expected["score"], rel=1e-4)
    if "predict" in expected:
        assert run.predict(ROWS[expected["task"]]) == approximately(expected["predict"])
    if "translate" in expected:
        assert run.translate(["Anne likes Paris."]) == expected["translate"]
    if "embed" in expected:
        assert run.embed(["Anne likes Paris."])[0].tolist() == pytest.approx(expected["embed"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["causal", "masked", "recurrent", "elmo", "seq2seq"])
def test_interrupted_pretraining_resumes_to_the_same_weights(before, name):
    headstock.pretrain(out=f"{name}-interrupted", resume=True, device="cpu")
    resumed, straight = (load_file(before / run / "model.safetensors") for run in (f"{name}-interrupted", name))
    assert resumed.keys() == straight.keys()
    for key, tensor in straight.items():
        assert resumed[key].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=1e-5), key


def test_interrupted_finetuning_resumes_to_the_same_weights(before):
    headstock.finetune(out="classify-interrupted", resume=True, device="cpu")
    resumed, straight = (load_file(before / run / "model.safetensors") for run in ("classify-interrupted", "classify"))
    for key, tensor in straight.items():
        assert resumed[key].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=3e-5), key


def test_a_checkpoint_opens_as_a_run(before):
    checkpoint = max(before.glob("causal/checkpoints/step-*"))
    assert headstock.load(checkpoint, device="cpu").score("Anne likes Paris.")[0].log_likelihood < 0


@pytest.mark.parametrize("name", ["causal", "masked", "hybrid", "recurrent", "elmo", "seq2seq"])
def test_a_config_repeats_its_run(before, name):
    results = headstock.pretrain(config_file=f"{name}/config.json", out="again", device="cpu")
    recorded = json.loads((before / name / "results.json").read_text())
    assert results["valid_loss"] == pytest.approx(recorded["valid_loss"], rel=1e-4)


def test_a_comparison_reuses_its_trials(before):
    recorded = json.loads(Path("compare/results.json").read_text())
    trials = sorted(path for path in before.glob("compare/**/*.json") if path.name != "results.json")
    made = {path: path.stat().st_mtime_ns for path in trials}
    results = headstock.compare(
        "causal",
        train="classify-train.csv",
        test="classify-test.csv",
        out="compare",
        labels=[16],
        seeds=2,
        settings={"epochs": 1, "tensorboard": False},
        device="cpu",
    )
    assert made == {path: path.stat().st_mtime_ns for path in trials}
    assert [arm["name"] for arm in results["arms"]] == [arm["name"] for arm in recorded["arms"]]
