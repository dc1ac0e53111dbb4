"""Products in 8 bits are near those they stand for, and a model learns by them what it learns without."""

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


def apart(found, wanted):
    """How far two tensors are from each other, to the length of the second."""
    return ((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm()).item()


def layer(device, rows=(4, 64), features=48, outputs=80):
    """A normed input, weights, a bias, and the gradient of a mean over all rows."""
    draw = torch.Generator().manual_seed(0)
    x = F.layer_norm(torch.randn(*rows, features, generator=draw), (features,))
    others = torch.randn(outputs, features, generator=draw) * 0.1, torch.randn(outputs, generator=draw)
    slope = torch.randn(*rows, outputs, generator=draw) / (rows[0] * rows[1])
    x, weight, bias, slope = (tensor.to(device) for tensor in (x, *others, slope))
    return (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()), slope


def in_eight(inputs, function=fp8.linear):
    with torch.autocast(inputs[0].device.type, torch.bfloat16), fp8.fp8_matmuls():
        return function(*inputs)


def in_parts(x, weight, bias):
    """As three products, put together again."""
    parts = fp8.split_linear(x, weight, bias, 3)
    assert len(parts) == 3 and all(part.shape[-1] == len(weight) // 3 for part in parts)
    return torch.cat(parts, -1)


@pytest.mark.parametrize(("function", "outputs"), [(fp8.linear, 80), (in_parts, 144)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_and_its_gradients_are_near(device, function, outputs):
    inputs, slope = layer(device, outputs=outputs)
    wanted = F.linear(*inputs)
    found = in_eight(inputs, function)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    assert 1e-3 < apart(found, wanted) < 0.03  # 3 bits of fraction are not exact, and many of them are
    theirs = torch.autograd.grad(wanted, inputs, slope)
    mine = torch.autograd.grad(found, inputs, slope.bfloat16())
    assert apart(mine[0], theirs[0]) < 0.08  # 2 bits of fraction
    assert all(apart(m, t) < 0.01 for m, t in zip(mine[1:], theirs[1:], strict=True))


def test_a_token_of_a_small_mean_keeps_its_gradient():
    """A gradient is divided by all tokens of a step: without a scale 8 bits would hold nothing of it."""
    inputs, slope = layer("cpu")
    found = torch.autograd.grad(in_eight(inputs), inputs[0], (slope / 64).bfloat16())[0]  # 64 micro-batches
    wanted = torch.autograd.grad(F.linear(*inputs), inputs[0], slope / 64)[0]
    assert apart(found, wanted) < 0.08


def test_what_is_too_large_is_cut_off_and_stays_a_number():
    x = torch.full((64, 16), 1e6)
    found = in_eight((x, torch.eye(16), None))
    assert found.isfinite().all() and (found == 448 / fp8.activation_scale(16)).all()


def test_who_only_looks_is_not_served_nor_are_odd_sizes():
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    with torch.autocast("cpu", torch.bfloat16), fp8.fp8_matmuls():
        assert fp8.applies(x, weight)
        assert not fp8.applies(x[:63], weight)
        assert not fp8.applies(x, torch.randn(47, 32)) and not fp8.applies(x[:, :31], weight[:, :31])
        with torch.no_grad():
            assert not fp8.applies(x, weight)
    assert not fp8.applies(x, weight)


def head(device, bias):
    draw = torch.Generator().manual_seed(1)
    hidden = F.layer_norm(torch.randn(300, 32, generator=draw), (32,)).to(device).requires_grad_()
    weight = (torch.randn(160, 32, generator=draw) * 0.3).to(device).requires_grad_()
    labels = torch.randint(160, (300,), generator=draw).to(device)
    labels[::7] = IGNORE_INDEX
    shift = (torch.randn(160, generator=draw)).to(device).requires_grad_() if bias else None
    return hidden, weight, shift, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("most", [None, 160 * 140])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_of_a_head_and_its_gradients_are_near(device, bias, most, smoothing):
    *inputs, labels = head(device, bias)
    wanted, hits = cross_entropy.linear_cross_entropy(*inputs, labels, max_logits=most, smoothing=smoothing)
    with torch.autocast(device, torch.bfloat16), fp8.fp8_matmuls():
        found, found_hits = cross_entropy.linear_cross_entropy(*inputs, labels, max_logits=most, smoothing=smoothing)
    assert found.item() == pytest.approx(wanted.item(), rel=0.01) and found.item() != wanted.item()
    assert abs(int(found_hits - hits)) <= 3
    inputs = inputs if bias else inputs[:2]
    theirs, mine = (torch.autograd.grad(loss / 300, inputs) for loss in (wanted, found))
    assert all(apart(m, t) < 0.06 for m, t in zip(mine, theirs, strict=True))
    assert (mine[0][labels == IGNORE_INDEX] == 0).all()


def test_they_are_operations_as_torch_wants_them():
    scores, labels = torch.randn(20, 32), torch.arange(20)
    torch.library.opcheck(cross_entropy.cross_entropy_fp8, (scores, labels, 0.1))
    torch.library.opcheck(fp8.concat_and_quantize, ([scores, scores[:, :16]], 2.0, True))
    torch.library.opcheck(fp8.transpose, (scores.to(torch.int8),))  # it cannot compare numbers of 8 bits itself


def gradient_parts(kind=torch.float32, device="cpu", rows=70):
    """Three gradients: of rows that stand apart, of rows that lie together, and turned round in memory."""
    draw = torch.Generator().manual_seed(2)
    one, two, three = (torch.randn(*size, generator=draw) for size in ((rows, 300), (rows, 48), (32, rows)))
    return [one.to(device, kind)[:, 100:260], two.to(device, kind), three.to(device, kind).t()]


def check_gather(parts, near=0.08):
    """Parts side by side, the same in few bits, and sums."""
    wanted = torch.cat(parts, 1)
    whole, small, sums = fp8.concat_and_quantize(parts, 4.0, True)
    assert torch.equal(whole, wanted) and small.dtype == fp8.GRADIENT
    assert apart(small.float() / 4, wanted) < near
    torch.testing.assert_close(sums, wanted.sum(0, dtype=torch.float32), rtol=1e-4, atol=1e-4)
    far = fp8.concat_and_quantize([part * 1e6 for part in parts], 4.0, False)[1].float()
    assert far.isfinite().all() and far.abs().max() == torch.finfo(fp8.GRADIENT).max


def check_turn(device="cpu"):
    """Rows become columns, with zeros behind them."""
    for rows, columns in ((32, 48), (70, 300), (1, 16), (129, 257)):
        x = torch.randn(rows, columns, device=device).to(fp8.GRADIENT)
        turned = fp8.transpose(x)
        assert turned.shape == (columns, -(-rows // 16) * 16) and turned.is_contiguous()
        assert torch.equal(turned[:, :rows].view(torch.int8), x.view(torch.int8).t())
        assert not turned[:, rows:].view(torch.int8).any()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_gathered_and_turned(device):
    check_gather(gradient_parts(torch.bfloat16 if device == "cuda" else torch.float32, device))
    check_turn(device)


def interpreted():
    """The kernels on a CPU, where Triton only pretends; see interpreter.py."""
    fp8.triton_works = lambda device: True
    check_gather(gradient_parts(), 0.2)  # it cuts bits off instead of rounding them
    check_turn()


def test_the_kernels_in_the_interpreter():
    interpret(__name__)


@pytest.mark.parametrize(("function", "outputs"), [(fp8.linear, 80), (in_parts, 144)])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_it_is_the_same(device, function, outputs):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    inputs, slope = layer(device, outputs=outputs)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    made = [in_eight(inputs, way) for way in (function, compiled)]
    mine, theirs = ([found, *torch.autograd.grad(found, inputs, slope.bfloat16())] for found in made)
    assert all(apart(a, b) < 0.03 for a, b in zip(mine, theirs, strict=True))  # compiled, 16 bits are rounded less


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_learns_what_it_learns_in_sixteen_bits(corpus, tmp_path, tiny, device):
    losses, vocabulary = {}, {"vocabulary_multiple": 16}
    for dtype in ("bfloat16", "float8"):
        settings = tiny | vocabulary | {"steps": 20, "lr": 1e-2, "dtype": dtype, "width": 32, "hidden": 64}
        done = headstock.pretrain(corpus, out=tmp_path / dtype, settings=settings, device=device)
        losses[dtype] = done["valid_loss"]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], abs=0.05)
    assert losses["float8"] != losses["bfloat16"]


def test_a_device_without_them_is_told(monkeypatch):
    monkeypatch.setattr("headstock.train.execution.supports_fp8", lambda device: False)
    with pytest.raises(UserError, match="float8 needs a GPU"):
        check_settings(TrainSettings(dtype="float8"), DistributedContext(torch.device("cpu")))
    check_settings(TrainSettings(dtype="bfloat16"), DistributedContext(torch.device("cpu")))


def test_it_ends_with_the_last_who_wants_it_and_not_before():
    first, second = fp8.fp8_matmuls(), fp8.fp8_matmuls()
    first.__enter__()
    with precision(CPU, "auto"):
        assert fp8._enabled
    second.__enter__()
    first.__exit__(None, None, None)
    assert fp8._enabled
    second.__exit__(None, None, None)
    assert not fp8._enabled
