"""int8 inference on a CPU is close to float32."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import headstock
from headstock.cost.model import model_dimensions
from headstock.errors import UserError
from headstock.kernels import int8
from headstock.kernels.bare_modules import strip_modules
from headstock.kernels.int8 import Int8Linear, engine, quantize_int8
from headstock.model.batch import Batch
from headstock.model.heads import ClassificationHead
from headstock.model.model import Model
from tests.model.small import small_model, some_tokens
from tests.train.processes import BackgroundProcess

pytestmark = pytest.mark.skipif(engine() is None, reason="no such library for this processor")


@pytest.fixture
def quantize_all(monkeypatch):
    monkeypatch.setattr(int8, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(int8, "MIN_ROWS", 1)


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_is_close_for_any_number_of_rows(bias):
    torch.manual_seed(0)
    layer = nn.Linear(96, 80, bias=bias)
    quantized = Int8Linear(layer.weight, layer.bias)
    for shape in [(64, 96), (9, 96), (200, 96), (3, 7, 96), (64, 96)]:
        x = torch.randn(shape) + 0.5
        assert 0 < relative_error(quantized(x), layer(x)) < 0.03
    few = torch.randn(int8.MIN_ROWS - 1, 96)
    assert torch.equal(quantized(few), layer(few))
    half = quantized(torch.randn(16, 96).bfloat16())
    assert half.dtype == torch.bfloat16


@torch.no_grad()
def test_large_outputs_do_not_reduce_the_precision_of_others():
    torch.manual_seed(0)
    layer = nn.Linear(64, 16, bias=False)
    layer.weight[3] *= 1000
    x = torch.randn(32, 64)
    actual, expected = Int8Linear(layer.weight, None)(x), layer(x)
    assert max(relative_error(actual[:, i], expected[:, i]) for i in range(16)) < 0.05


@torch.no_grad()
def test_a_model_is_close_and_its_weights_are_kept(quantize_all):
    model, batch = small_model().eval(), Batch(some_tokens(4, 12))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model.heads["token"](model(batch).hidden)
    quantize_int8(model)
    actual = model.heads["token"](model(batch).hidden)
    assert 0 < relative_error(actual, expected) < 0.05
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) >= 8
    backbone, head = strip_modules(model.backbone), strip_modules(model.heads["token"])
    torch.testing.assert_close(head(backbone(batch).hidden), actual)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_predictions_embeddings_and_text_are_close(corpus, tmp_path, tiny, call, quantize_all):
    (tmp_path / "rows.csv").write_text("text,label\n" + "a good day,yes\na bad night,no\n" * 8)
    headstock.pretrain(corpus, out=tmp_path / "grown", settings=tiny)
    headstock.finetune(tmp_path / "grown", train=tmp_path / "rows.csv", out=tmp_path / "run", settings={"epochs": 2})
    texts = ["a good day", "a bad night", "one day after the other, good and bad"]
    float32, quantized = headstock.load(tmp_path / "run"), headstock.load(tmp_path / "run", int8=True)
    for first, second in zip(float32.predict(texts), quantized.predict(texts), strict=True):
        assert first["probabilities"] == pytest.approx(second["probabilities"], abs=0.05)
    assert 0 < np.abs(float32.embed(texts) - quantized.embed(texts)).max() < 0.2
    for arguments in (["predict", tmp_path / "run", *texts], ["evaluate", tmp_path / "run", tmp_path / "rows.csv"]):
        out, _ = call(*arguments, "--int8", "--device", "cpu")
        assert out
    out, _ = call("generate", tmp_path / "grown", "Anne", "--int8", "--max-tokens", 5, "--device", "cpu")
    assert out.startswith("Anne")


def test_unsupported_devices_are_rejected(monkeypatch):
    with pytest.raises(UserError, match="--device cpu"):
        quantize_int8(small_model().to("meta"))
    monkeypatch.setattr(int8, "engine", lambda: None)
    with pytest.raises(UserError, match="this build of torch"):
        quantize_int8(small_model())


def use_layer_in_two_threads():
    torch.set_num_threads(1)
    layer, x = Int8Linear(torch.randn(128, 256), None), torch.randn(64, 256)
    with torch.inference_mode():
        expected = layer(x)

    def use(_):
        with torch.inference_mode():
            return all(torch.equal(layer(x), expected) for _ in range(500))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(use, range(4)))


def test_two_threads_can_use_one_layer(tmp_path):
    """In another process, since a failure would crash it."""
    process = BackgroundProcess(tmp_path / "process", use_layer_in_two_threads)
    assert process.wait() == 0, process.stderr


def test_dimensions_of_a_quantized_classifier():
    model = Model(small_model(width=64, heads=2).backbone, {"label": ClassificationHead(64, 100)}).eval()
    expected = model_dimensions(model)
    quantize_int8(model)
    assert isinstance(model.heads["label"].linear, Int8Linear)
    assert model_dimensions(model) == expected
