"""Training and inference on a CUDA device."""

import pytest
import torch

import headstock
from headstock.train.finetune import finetune
from headstock.train.run_folder import RunFolder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_mixed_precision_learns_what_single_precision_does(corpus, tmp_path, tiny):
    losses = {}
    for dtype in ("bfloat16", "float32"):
        settings = tiny | {"steps": 60, "lr": 1e-2, "dtype": dtype}
        losses[dtype] = headstock.pretrain(corpus, out=tmp_path / dtype, settings=settings, device="cuda")["valid_loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.05)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_follows_the_same_curve(corpus, tmp_path, tiny, optimizer):
    settings = tiny | {"validate_every": 4, "log_every": 1, "optimizer": optimizer, "ema": 0.9, "dropout": 0.1}
    headstock.pretrain(corpus, out=tmp_path / "whole", settings=settings, device="cuda")

    def stop(event):
        if event.kind == "step" and event.state.step == 7:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        headstock.pretrain(corpus, out=tmp_path / "cut", settings=settings, device="cuda", callbacks=[stop])
    headstock.pretrain(corpus, out=tmp_path / "cut", resume=True, device="cuda")
    curves = [
        [row["loss"] for row in RunFolder(tmp_path / name).read_metrics() if "loss" in row] for name in ("whole", "cut")
    ]
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)


def test_compiled_runs_learn_the_same(corpus, tmp_path, tiny):
    losses = [
        headstock.pretrain(corpus, out=tmp_path / str(on), settings=tiny | {"compile": on}, device="cuda")["valid_loss"]
        for on in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def test_inference_does_not_use_cudnn_attention(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny, device="cuda")
    model, cuda, enabled = headstock.load(tmp_path / "run", device="cuda"), torch.backends.cuda, []
    before = cuda.cudnn_sdp_enabled()
    texts = ["Anne likes Paris. " * (1 + i % 5) for i in range(600)]
    model.model.backbone.register_forward_pre_hook(lambda *_: enabled.append(cuda.cudnn_sdp_enabled()))
    embeddings = model.embed(texts, pool="last")
    assert enabled and not any(enabled)
    assert cuda.cudnn_sdp_enabled() == before
    assert embeddings == pytest.approx(
        headstock.load(tmp_path / "run", device="cpu").embed(texts, pool="last"), abs=0.05
    )


def test_generation_is_the_same_with_and_without_the_cache(corpus, tmp_path, tiny):
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 60, "lr": 1e-2}, device="cuda")
    model = headstock.load(tmp_path / "run", device="cuda")
    texts = [
        [generated.text for generated in model.generate(["Anne", "Story 4\nB"], temperature=0, cache=on)]
        for on in (True, False)
    ]
    assert texts[0] == texts[1]
    on_cpu = headstock.load(tmp_path / "run", device="cpu").score("Anne likes Paris.")[0].log_likelihood
    assert model.score("Anne likes Paris.")[0].log_likelihood == pytest.approx(on_cpu, abs=1e-2)


@pytest.mark.parametrize(("preset", "compile"), [("gpt-nano", False), ("gpt-nano", "replay"), ("lstm-nano", False)])
def test_adapters_are_trained_as_on_a_cpu(corpus, files, tmp_path, tiny, preset, compile):
    sizes = {name: value for name, value in tiny.items() if preset == "gpt-nano" or name not in ("heads", "context")}
    headstock.pretrain(corpus, out=tmp_path / "source", preset=preset, settings=sizes, device="cpu")
    settings = {"lora": 4, "lr": 0.01, "epochs": 1, "batch": 8, "dropout": 0.0, "dtype": "float32", "weights": "last"}
    data = {name: files[name] for name in ("train", "valid")}
    adapters = []
    for device, mode in (("cpu", False), ("cuda", compile)):
        out, options = tmp_path / device, settings | {"compile": mode}
        finetune(tmp_path / "source", **data, out=out, settings=options, device=device)
        adapters.append(RunFolder(out).adapter())
    assert all(torch.allclose(tensor, adapters[1][name], atol=2e-3) for name, tensor in adapters[0].items())


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_auxiliary_losses_are_learnt_by_graphs_as_on_a_cpu(corpus, files, tmp_path, tiny, objective):
    headstock.pretrain(corpus, out=tmp_path / "source", objective=objective, settings=tiny, device="cpu")
    data, curves = {name: files[name] for name in ("train", "valid")}, []
    plain = {"dropout": 0.0, "model.dropout": 0.0, "dtype": "float32"}
    settings = plain | {"lm_loss": 0.5, "epochs": 4, "batch": 8, "reinit_layers": 1}
    for device, compile in (("cpu", False), ("cuda", False), ("cuda", "replay")):
        out = tmp_path / f"{device}-{compile}"
        finetune(tmp_path / "source", **data, out=out, settings=settings | {"compile": compile}, device=device)
        rows = [row for row in RunFolder(out).read_metrics() if "train_lm_loss" in row]
        curves.append([row[name] for row in rows for name in ("train_loss", "train_lm_loss", "valid_loss")])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0.02)
    dropped = {"r_drop": 1.0, "epochs": 4, "batch": 8, "compile": "replay"}
    finetune(tmp_path / "source", **data, out=tmp_path / "dropped", settings=dropped, device="cuda")
    assert any(row.get("train_r_drop", 0) > 0 for row in RunFolder(tmp_path / "dropped").read_metrics())
