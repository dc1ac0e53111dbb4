"""Every export computes what the run computes; the largest difference of each format is recorded."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from headstock.inference.pipeline import load
from headstock.interop import export_run
from headstock.interop.lab import export_lab, import_lab
from headstock.model.batch import Batch
from tests.faults.harness import amount, is_full
from tests.interop import test_export, test_gguf
from tests.interop.small import scores, small_run, some_texts
from tests.interop.test_lab import Lab, pieces, save_checkpoint, vocabulary  # noqa: F401

TOLERANCE = 1e-4
full_only = pytest.mark.skipif(not is_full(), reason="tests/interop has the small ones")


def huggingface_difference(name: str, home: Path) -> float:
    """Between the logits of a run and those that transformers computes from its export."""
    transformers = pytest.importorskip("transformers")
    _, model, task = test_export.CASES[name]
    run = small_run(home / "run", model, task, kind=test_export.kind_for(model))
    export_run(run, home / "exported")
    pipeline, (first, second) = load(run.path, device="cpu"), test_export.texts_for(task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "exported")
    inputs = tokenizer(first, second, padding=True, truncation=True, max_length=24, return_tensors="pt")
    targets = inputs["input_ids"].flip(0) if pipeline.task.needs_encoder_decoder else None
    real = None if pipeline.task.needs_encoder_decoder else inputs["attention_mask"].bool()
    ours, theirs = scores(pipeline, inputs, targets), test_export.their_scores(home / "exported", inputs, targets)
    return test_export.distance(ours, theirs, real)


def test_fault_30_hugging_face(tmp_path, monkeypatch, record):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = list(test_export.CASES)[: amount(1, len(test_export.CASES))]
    differences = {name: huggingface_difference(name, tmp_path / str(i)) for i, name in enumerate(names)}
    assert max(differences.values()) < TOLERANCE
    record(30, "Hugging Face folders", models=len(names), largest_difference=f"{max(differences.values()):.1e}")


@full_only
def test_fault_30_gguf(tmp_path, record):
    llama_cpp = pytest.importorskip("llama_cpp")
    differences = []
    for name, (model, _, tolerance) in test_gguf.CASES.items():
        run = small_run(tmp_path / f"{name}-run", model | test_gguf.WIDE, {"name": "causal"}, spread=0.3)
        export_run(run, tmp_path / name, to="gguf")
        pipeline, single = load(run.path, device="cpu"), llama_cpp.GGML_TYPE_F32
        options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "type_k": single, "type_v": single}
        llama = llama_cpp.Llama(str(tmp_path / name / "model.gguf"), verbose=False, **options)
        text = unicodedata.normalize("NFC", some_texts(1)[0])
        tokens = llama.tokenize(text.encode(), add_bos=True, special=False)[:8]
        llama.eval(tokens)
        with torch.no_grad():
            logits = pipeline.model.heads["token"](pipeline.model(Batch(torch.tensor([tokens]))).hidden)[0].numpy()
        difference = float(np.abs(np.array(llama.scores[: len(tokens)]) - logits).max())
        assert difference < tolerance
        differences.append(f"{name} {difference:.1e}")
    record(30, "GGUF in llama.cpp", models=len(differences), largest_differences="; ".join(differences))


ONNX = {  # model and task settings, and whether the graph returns embeddings
    "causal": (test_export.MODERN, {"name": "causal"}, False),
    "classify": (test_export.GPT, test_export.LAST, False),
    "tag": (test_export.BERT, test_export.TAGS, False),
    "answer": (test_export.BERT, {"name": "answer", "opening": "cls"}, False),
    "embedding": (test_export.BERT, test_export.MASKED, True),
}


@full_only
def test_fault_30_onnx(tmp_path, record):
    pytest.importorskip("onnxruntime")
    differences = []
    for name, (model, task, embedding) in ONNX.items():
        run = small_run(tmp_path / f"{name}-run", model, task, kind=test_export.kind_for(model))
        result = export_run(run, tmp_path / name, to="onnx", embedding=embedding)
        assert result["difference"] < TOLERANCE
        differences.append(result["difference"])
    record(30, "ONNX in onnxruntime", models=len(ONNX), largest_difference=f"{max(differences):.1e}")


@full_only
def test_fault_30_lab(pieces, vocabulary, tmp_path, record):  # noqa: F811
    torch.manual_seed(0)
    lab = Lab(vocabulary, vocabulary).eval()
    file, _ = save_checkpoint(lab, tmp_path, pieces)
    run = import_lab(file, tmp_path / "run")
    export_lab(run, tmp_path / "back")
    again = Lab(vocabulary, vocabulary).eval()
    again.load_state_dict(torch.load(tmp_path / "back" / "model.pt", weights_only=True)["model_state_dict"])
    pipeline, tokens = load(run.path, device="cpu"), torch.randint(vocabulary, (3, 17))
    with torch.inference_mode():
        ours = pipeline.model.heads["token"](pipeline.model(Batch(tokens)).hidden)
        difference = float((ours - again(tokens.T).transpose(0, 1)).abs().max())
    assert difference < TOLERANCE
    record(30, "lab checkpoints in the lab's modules", models=1, largest_difference=f"{difference:.1e}")


def test_fault_30_other_weights_would_be_noticed(tmp_path):
    """The control: one weight is changed by a thousandth after the export."""
    run = small_run(tmp_path / "run", test_export.GPT, {"name": "causal"})
    pipeline, tokens = load(run.path, device="cpu"), torch.arange(3, 9)[None]
    with torch.inference_mode():
        before = pipeline.model.heads["token"](pipeline.model(Batch(tokens)).hidden)
        pipeline.model.backbone.blocks[0].feed.up.weight[0] += 0.001
        after = pipeline.model.heads["token"](pipeline.model(Batch(tokens)).hidden)
    assert float((before - after).abs().max()) > TOLERANCE
