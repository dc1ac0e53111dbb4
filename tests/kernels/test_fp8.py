"""fp8 matmuls are close to bfloat16, and training with them reaches the same loss."""

import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.errors import UserError
from headstock.kernels import cross_entropy, fp8
from headstock.model.batch import IGNORE_INDEX
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import precision
from headstock.train.execution import check_settings
from headstock.train.settings import TrainSettings
from tests.kernels.interpreter import interpret

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(fp8, "MIN_ROWS", 64)


def relative_error(actual, expected):
    return ((actual.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm()).item()


def layer(device, rows=(4, 64), features=48, outputs=80):
    """A normalized input, weight and bias, and the gradient of a mean over all rows."""
    generator = torch.Generator().manual_seed(0)
    x = F.layer_norm(torch.randn(*rows, features, generator=generator), (features,))
    others = torch.randn(outputs, features, generator=generator) * 0.1, torch.randn(outputs, generator=generator)
    output_grad = torch.randn(*rows, outputs, generator=generator) / (rows[0] * rows[1])
    x, weight, bias, output_grad = (tensor.to(device) for tensor in (x, *others, output_grad))
    return (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()), output_grad


def in_fp8(inputs, function=fp8.linear):
    with torch.autocast(inputs[0].device.type, torch.bfloat16), fp8.fp8_matmuls():
        return function(*inputs)


def in_parts(x, weight, bias):
    """split_linear, concatenated again."""
    parts = fp8.split_linear(x, weight, bias, 3)
    assert len(parts) == 3 and all(part.shape[-1] == len(weight) // 3 for part in parts)
    return torch.cat(parts, -1)


@pytest.mark.parametrize(("function", "outputs"), [(fp8.linear, 80), (in_parts, 144)])
@pytest.mark.parametrize("device", DEVICES)
def test_linear_and_its_gradients_are_close(device, function, outputs):
    inputs, output_grad = layer(device, outputs=outputs)
    expected = F.linear(*inputs)
    actual = in_fp8(inputs, function)
    assert actual.shape == expected.shape and actual.dtype == torch.bfloat16
    assert 1e-3 < relative_error(actual, expected) < 0.03  # 3 bits of mantissa
    expected_grads = torch.autograd.grad(expected, inputs, output_grad)
    actual_grads = torch.autograd.grad(actual, inputs, output_grad.bfloat16())
    assert relative_error(actual_grads[0], expected_grads[0]) < 0.08  # 2 bits of mantissa
    assert all(relative_error(a, e) < 0.01 for a, e in zip(actual_grads[1:], expected_grads[1:], strict=True))


def test_small_gradients_do_not_underflow():
    """Gradients are divided by the tokens of a step: without a scale they would underflow."""
    inputs, output_grad = layer("cpu")
    actual = torch.autograd.grad(in_fp8(inputs), inputs[0], (output_grad / 64).bfloat16())[0]  # 64 micro-batches
    expected = torch.autograd.grad(F.linear(*inputs), inputs[0], output_grad / 64)[0]
    assert relative_error(actual, expected) < 0.08


def test_large_values_are_clamped():
    x = torch.full((64, 16), 1e6)
    actual = in_fp8((x, torch.eye(16), None))
    assert actual.isfinite().all() and (actual == 448 / fp8.activation_scale(16)).all()


def test_inference_and_odd_sizes_do_not_use_fp8():
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    with torch.autocast("cpu", torch.bfloat16), fp8.fp8_matmuls():
        assert fp8.applies(x, weight)
        assert not fp8.applies(x[:63], weight)
        assert not fp8.applies(x, torch.randn(47, 32)) and not fp8.applies(x[:, :31], weight[:, :31])
        with torch.no_grad():
            assert not fp8.applies(x, weight)
    assert not fp8.applies(x, weight)


def vocabulary_layer(device, bias):
    generator = torch.Generator().manual_seed(1)
    hidden = F.layer_norm(torch.randn(300, 32, generator=generator), (32,)).to(device).requires_grad_()
    weight = (torch.randn(160, 32, generator=generator) * 0.3).to(device).requires_grad_()
    labels = torch.randint(160, (300,), generator=generator).to(device)
    labels[::7] = IGNORE_INDEX
    biases = (torch.randn(160, generator=generator)).to(device).requires_grad_() if bias else None
    return hidden, weight, biases, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("max_logits", [None, 160 * 140])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_linear_cross_entropy_and_its_gradients_are_close(device, bias, max_logits, smoothing):
    *inputs, labels = vocabulary_layer(device, bias)
    options = {"max_logits": max_logits, "smoothing": smoothing}
    expected, expected_correct = cross_entropy.linear_cross_entropy(*inputs, labels, **options)
    with torch.autocast(device, torch.bfloat16), fp8.fp8_matmuls():
        actual, correct = cross_entropy.linear_cross_entropy(*inputs, labels, **options)
    assert actual.item() == pytest.approx(expected.item(), rel=0.01) and actual.item() != expected.item()
    assert abs(int(correct - expected_correct)) <= 3
    inputs = inputs if bias else inputs[:2]
    expected_grads, actual_grads = (torch.autograd.grad(loss / 300, inputs) for loss in (expected, actual))
    assert all(relative_error(a, e) < 0.06 for a, e in zip(actual_grads, expected_grads, strict=True))
    assert (actual_grads[0][labels == IGNORE_INDEX] == 0).all()


def test_custom_ops_are_valid():
    logits, labels = torch.randn(20, 32), torch.arange(20)
    torch.library.opcheck(cross_entropy.cross_entropy_fp8, (logits, labels, 0.1))
    torch.library.opcheck(fp8.concat_and_quantize, ([logits, logits[:, :16]], 2.0, True))
    torch.library.opcheck(fp8.transpose, (logits.to(torch.int8),))  # opcheck cannot compare fp8


def gradient_parts(dtype=torch.float32, device="cpu", rows=70):
    """Three gradients: with a row stride, contiguous, and transposed."""
    generator = torch.Generator().manual_seed(2)
    sizes = (rows, 300), (rows, 48), (32, rows)
    strided, contiguous, transposed = (torch.randn(*size, generator=generator).to(device, dtype) for size in sizes)
    return [strided[:, 100:260], contiguous, transposed.t()]


def check_concat(parts, tolerance=0.08):
    """Parts side by side, the same in fp8, and sums."""
    expected = torch.cat(parts, 1)
    grad, fp8_grad, sums = fp8.concat_and_quantize(parts, 4.0, True)
    assert torch.equal(grad, expected) and fp8_grad.dtype == fp8.GRADIENT
    assert relative_error(fp8_grad.float() / 4, expected) < tolerance
    torch.testing.assert_close(sums, expected.sum(0, dtype=torch.float32), rtol=1e-4, atol=1e-4)
    clamped = fp8.concat_and_quantize([part * 1e6 for part in parts], 4.0, False)[1].float()
    assert clamped.isfinite().all() and clamped.abs().max() == torch.finfo(fp8.GRADIENT).max


def check_transpose(device="cpu"):
    """Rows become columns, padded with zeros."""
    for rows, columns in ((32, 48), (70, 300), (1, 16), (129, 257)):
        x = torch.randn(rows, columns, device=device).to(fp8.GRADIENT)
        transposed = fp8.transpose(x)
        assert transposed.shape == (columns, -(-rows // 16) * 16) and transposed.is_contiguous()
        assert torch.equal(transposed[:, :rows].view(torch.int8), x.view(torch.int8).t())
        assert not transposed[:, rows:].view(torch.int8).any()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_concatenated_and_transposed(device):
    check_concat(gradient_parts(torch.bfloat16 if device == "cuda" else torch.float32, device))
    check_transpose(device)


def interpreted():
    """The kernels in Triton's interpreter: see interpreter.py."""
    fp8.triton_works = lambda device: True
    check_concat(gradient_parts(), 0.2)  # the interpreter truncates
    check_transpose()


def test_kernels_in_the_interpreter():
    interpret(__name__)


@pytest.mark.parametrize(("function", "outputs"), [(fp8.linear, 80), (in_parts, 144)])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_layers_agree(device, function, outputs):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    inputs, output_grad = layer(device, outputs=outputs)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    outputs = [in_fp8(inputs, layer_function) for layer_function in (compiled, function)]
    actual, expected = ([y, *torch.autograd.grad(y, inputs, output_grad.bfloat16())] for y in outputs)
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < 0.03  # compiled code rounds to bfloat16 less often


@pytest.mark.parametrize("device", DEVICES)
def test_training_in_fp8_reaches_the_bfloat16_loss(corpus, tmp_path, tiny, device):
    # 64 tokens, the fewest for fp8: CPUs without bfloat16 multiply slowly
    losses, sizes = {}, {"vocabulary_multiple": 16, "batch": 2, "depth": 1, "width": 32, "hidden": 64}
    for dtype in ("bfloat16", "float8"):
        settings = tiny | sizes | {"steps": 20, "validate_every": 20, "lr": 1e-2, "dtype": dtype}
        results = headstock.pretrain(corpus, out=tmp_path / dtype, settings=settings, device=device)
        losses[dtype] = results["valid_loss"]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], abs=0.05)
    assert losses["float8"] != losses["bfloat16"]


def test_devices_without_fp8_are_rejected(monkeypatch):
    monkeypatch.setattr("headstock.train.execution.supports_fp8", lambda device: False)
    with pytest.raises(UserError, match="float8"):
        check_settings(TrainSettings(dtype="float8"), DistributedContext(torch.device("cpu")))
    check_settings(TrainSettings(dtype="bfloat16"), DistributedContext(torch.device("cpu")))


def test_overlapping_contexts_end_with_the_last():
    first, second = fp8.fp8_matmuls(), fp8.fp8_matmuls()
    first.__enter__()
    with precision(CPU, "auto"):
        assert fp8._enabled
    second.__enter__()
    first.__exit__(None, None, None)
    assert fp8._enabled
    second.__exit__(None, None, None)
    assert not fp8._enabled
