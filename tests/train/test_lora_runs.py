"""Fine-tuning with LoRA from start to end: run folder, checkpoints, every verb, processes, comparison and sweep."""

import json
import re

import pytest
import torch
from safetensors import safe_open

import headstock
from headstock.errors import HeadstockError
from headstock.experiments.sweep import sweep
from headstock.interop import export_run
from headstock.model.lora import LoRAConfig, LoRAModel
from headstock.train.finetune import finetune
from headstock.train.models import load_run_model
from headstock.train.optimizers import make_optimizers, update_weights
from headstock.train.run_folder import LAYOUT, RunFolder, open_run
from headstock.train.settings import TrainSettings
from tests.conftest import TINY
from tests.experiments.small import SETTINGS
from tests.interop.small import scores, small_run
from tests.train.processes import start_ranks

QUICK = {"epochs": 3, "batch": 8, "lora": 4, "lr": 0.02, "validate_every": 4, "dropout": 0.0}
TEXTS = ["Anne likes the sea", "Ben finds home"]


@pytest.fixture(scope="module")
def tuned(stock, files, tmp_path_factory):
    """A run with adapters, and its results."""
    out = tmp_path_factory.mktemp("lora") / "run"
    return out, finetune(stock, train=files["train"], valid=files["valid"], out=out, settings=QUICK)


def test_the_run_holds_merged_weights_and_the_adapter(stock, tuned):
    out, results = tuned
    run = RunFolder(out)
    before, after, adapter = RunFolder(stock).weights(), run.weights(), run.adapter()
    changed = {name for name in before if name.startswith("backbone.") and not torch.equal(before[name], after[name])}
    projections = ("attention.inputs.weight", "attention.output.weight")
    assert changed == {name for name in before if name.endswith(projections)}
    for name in changed:
        product = adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
        torch.testing.assert_close(after[name], before[name] + 16 / 4 * product, rtol=1e-6, atol=1e-6)
    assert torch.equal(adapter["heads.label.linear.weight"], after["heads.label.linear.weight"])
    with safe_open(run.adapter_file, "pt") as file:
        settings = json.loads(file.metadata()["lora"])
        assert settings == {"rank": 4, "alpha": 16.0, "dropout": 0.0, "targets": "attention"}
    assert run.adapter_file.name in run.manifest() and {path.name for path in out.iterdir()} <= LAYOUT.keys()
    counts = results["parameters"]
    assert counts["lora"] == 2 * 4 * (16 + 48 + 16 + 16) and counts["trainable"] == counts["lora"] + counts["label"]
    assert counts["frozen"] == counts["base"]
    assert "rank 4" in run.model_card.read_text() and "optimizer state" in run.model_card.read_text()


def test_every_verb_reads_it_and_a_checkpoint_too(tuned):
    out, results = tuned
    expected = headstock.load(out).predict(TEXTS)
    best = headstock.load(out / "checkpoints" / f"step-{results['best_step']}").predict(TEXTS)
    assert best == expected
    other = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    assert (other / "model.safetensors").stat().st_size < (out / "model.safetensors").stat().st_size / 4
    assert len(headstock.load(other).predict(TEXTS)) == 2
    int8 = headstock.load(out, int8=True).predict(TEXTS)
    assert [row["label"] for row in int8] == [row["label"] for row in expected]


def test_a_checkpoint_of_other_steps_has_its_own_adapter(stock, tuned):
    """Merged again from its own adapter, and not the run's."""
    out, _ = tuned
    path = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    own, adapter = open_run(path).weights(), read(path / "model.safetensors")
    name = "backbone.blocks.0.attention.inputs.weight"
    expected = RunFolder(stock).weights()[name] + 4 * adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
    torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-6)


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_the_reported_optimizer_memory_is_what_the_optimizer_holds(tuned):
    out, results = tuned
    pipeline = headstock.load(out)

    def held(model):
        (optimizer,) = make_optimizers(model, TrainSettings())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        update_weights([optimizer], 1.0, to_none=True)
        return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())

    full = load_run_model(RunFolder(out), pipeline.config, pipeline.task)
    assert held(full) == results["lora"]["full_optimizer_bytes"]
    adapted = LoRAModel(full, LoRAConfig(4, 16.0, 0.0, "attention"), seed=0)
    assert held(adapted) == results["lora"]["optimizer_bytes"] < results["lora"]["full_optimizer_bytes"] / 3
    assert 0.6 < results["lora"]["flops_ratio"] < 1


def test_a_recurrent_run_is_adapted(corpus, files, tmp_path):
    sizes = {name: TINY[name] for name in ("depth", "width", "hidden", "vocabulary", "batch", "tensorboard")}
    headstock.pretrain(corpus, out=tmp_path / "lstm", preset="lstm-nano", settings=sizes | {"steps": 4})
    settings = QUICK | {"epochs": 1, "lora_dropout": 0.1}
    data = {name: files[name] for name in ("train", "valid")}
    results = finetune(tmp_path / "lstm", **data, out=tmp_path / "run", settings=settings)
    before, after = RunFolder(tmp_path / "lstm").weights(), RunFolder(tmp_path / "run").weights()
    changed = {name for name in before if name.startswith("backbone.") and not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "cells.weight" in name}
    assert results["parameters"]["lora"] == 2 * 4 * (16 + 128 + 32 + 128)
    assert len(headstock.load(tmp_path / "run").predict(TEXTS)) == 2


def test_an_imported_model_is_adapted_and_exported_merged(files, tmp_path):
    transformers = pytest.importorskip("transformers")
    bert = {"norm": "post", "embed_norm": True, "segments": 2, "causal": False, "inner_dropout": False}
    small_run(tmp_path / "bert", bert, {"name": "masked"})
    data, head = {name: files[name] for name in ("train", "valid")}, {"pool": "cls", "dense": "tanh"}
    finetune(tmp_path / "bert", **data, out=tmp_path / "run", settings=QUICK | head | {"epochs": 1})
    export_run(tmp_path / "run", tmp_path / "hf", to="huggingface")
    assert not any("lora" in name for name in read(tmp_path / "hf" / "model.safetensors"))
    pipeline = headstock.load(tmp_path / "run", device="cpu")
    tokens = torch.tensor([pipeline.tokenizer.encode(TEXTS[0])])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(exported(**inputs).logits, scores(pipeline, inputs), rtol=1e-4, atol=1e-5)


def test_two_processes_train_the_same_adapters(stock, files, tuned, tmp_path):
    out = tmp_path / "run"
    arguments = ["finetune", stock, "--train", files["train"], "--valid", files["valid"], "--out", out, "--lora", "4"]
    sets = [f"{name}={value}" for name, value in QUICK.items() if name != "lora"]
    ranks = start_ranks(tmp_path / "rank", 2, *arguments, "--device", "cpu", *(w for s in sets for w in ("--set", s)))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    expected, got = RunFolder(tuned[0]).adapter(), RunFolder(out).adapter()
    assert expected.keys() == got.keys()
    assert all(torch.allclose(got[name], expected[name], atol=1e-4) for name in got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": -1}, r"transfer.lora: must be 0 or above"),
        ({"lora": 16}, r"rank 16 is not low for backbone\.\S+ \(\d+ x 16\); choose at most 15"),
        ({"lora": 4, "lora_alpha": 0}, r"lora_alpha: must be above 0"),
        ({"lora": 4, "lora_targets": "mlp"}, r"lora_targets: must be one of 'attention', 'all-linear'"),
        ({"lora": 4, "freeze": True}, r"lora: .* conflicts with freeze"),
        ({"lora": 4, "init": "scratch"}, r"lora: .* conflicts with init scratch"),
        ({"lora": 4, "optimizer": "muon", "unfreeze": 1.0}, r"(?s)unfreeze.*muon"),
        ({"lora": 4, "dtype": "float8"}, r"train.dtype: with LoRA, .*bfloat16"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(stock, files, tmp_path, options, message):
    with pytest.raises(HeadstockError) as error:
        finetune(stock, train=files["train"], out=tmp_path / "run", settings=options)
    assert re.search(message, str(error.value)) and not (tmp_path / "run").exists()


def test_a_translator_with_new_cross_attention_is_refused(stock, tmp_path):
    (tmp_path / "pairs.tsv").write_text("source\ttarget\na\tb\nc\td\n")
    with pytest.raises(HeadstockError, match="cross-attention"):
        finetune(stock, task="translate", train=tmp_path / "pairs.tsv", out=tmp_path / "run", settings={"lora": 4})


def test_lora_is_an_arm_of_a_comparison(stock, files, tmp_path, call):
    words = [w for name, value in (SETTINGS | {"lora": 2}).items() for w in ("--set", f"{name}={value}")]
    data = [word for name, file in files.items() for word in (f"--{name}", file)]
    out, _ = call("compare", stock, *data, "--out", tmp_path / "out", "--arms", "pretrained,lora", "--labels", "8",
                  "--seeds", "2", *words, "--json")  # fmt: skip
    results = json.loads(out.splitlines()[-1])
    full, lora = (arm["parameters"] for arm in results["arms"])
    assert full["trainable"] == full["total"] == lora["total"] and lora["trainable"] < full["total"] / 4
    assert "LoRA reaches" in results["verdicts"][0] and "full fine-tuning" in results["verdicts"][0]
    (pair,) = results["pairs"]
    assert {pair["a"], pair["b"]} == {"pretrained", "lora"} and pair["low"] <= pair["difference"] <= pair["high"]
    assert RunFolder(tmp_path / "out" / "runs" / "lora-8").adapter()
    assert "LoRA" in (tmp_path / "out" / "report.html").read_text()


def test_ranks_are_swept(stock, files, tmp_path):
    results = sweep(
        run=stock, train=files["train"], valid=[str(files["valid"])], grid={"lora": [0, 2]}, out=tmp_path / "out",
        seeds=1, settings=SETTINGS,
    )  # fmt: skip
    assert {point["settings"]["lora"] for point in results["points"]} == {0, 2}
