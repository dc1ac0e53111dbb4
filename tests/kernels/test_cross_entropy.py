"""The in-place cross-entropy kernel agrees with torch, in Triton's interpreter and on a GPU."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from headstock.kernels import cross_entropy as kernels
from headstock.kernels.attention import supports_varlen
from headstock.kernels.backends import triton_works
from headstock.kernels.fp8 import CROSS_ENTROPY_SCALE
from headstock.model.batch import IGNORE_INDEX
from tests.kernels.interpreter import interpret

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem(rows, vocabulary, dtype=torch.float32, device="cpu"):
    """Logits and labels; every third label is ignored, every fifth is the top-1 prediction."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[::5] = logits.argmax(-1)[::5]
    labels[1::3] = IGNORE_INDEX
    return logits.to(device), labels.to(device)


def reference(logits, labels, smoothing):
    """torch's losses (N,), whether the top-1 prediction is correct, and the gradient."""
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)
    top1 = logits.cpu().argmax(-1).to(labels.device)  # on a CPU, ties go to the first
    return losses.detach().float(), top1 == labels, torch.autograd.grad(losses.sum(), exact)[0]


def check(logits, labels, smoothing, kernel, rounds_to_nearest=True):
    losses, correct, grad = reference(logits, labels, smoothing)
    updated = logits.clone()
    actual, top1_correct = kernel(updated, labels, smoothing, False)
    assert torch.equal(updated, logits)  # without gradient the logits stay
    torch.testing.assert_close(actual, losses, rtol=2e-5, atol=2e-5)
    assert torch.equal(top1_correct, correct)
    repeated, top1_correct = kernel(updated, labels, smoothing, True)
    assert torch.equal(repeated, actual) and torch.equal(top1_correct, correct)
    assert (updated[labels == IGNORE_INDEX] == 0).all()
    tolerance = torch.finfo(logits.dtype).eps * (0.51 if rounds_to_nearest else 1)  # half a rounding step, or one
    torch.testing.assert_close(updated.double(), grad, rtol=max(tolerance, 5e-6), atol=2e-6)


def check_ties(kernel, device="cpu", vocabulary=20_000):
    """Among equal logits the first is the prediction, also across blocks."""
    logits = torch.zeros(4, vocabulary, device=device)
    logits[:3, [7, 8, vocabulary - 1]] = 2.0
    labels = torch.tensor([7, 8, vocabulary - 1, 0], device=device)
    assert kernel(logits, labels, 0.0, False)[1].tolist() == [True, False, False, True]


def check_infinite_logits(kernel, device="cpu", vocabulary=20_000):
    """Logits may be -inf, even a whole block of them."""
    logits = torch.full((1, vocabulary), -torch.inf, device=device)
    logits[:, -2:] = 1.0
    losses, _ = kernel(logits, torch.tensor([vocabulary - 1], device=device), 0.0, True)
    assert losses.item() == pytest.approx(0.693147, abs=1e-5)
    assert logits[0, -2:].tolist() == pytest.approx([0.5, -0.5], abs=1e-5) and (logits[:, :-2] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_matches_torch(dtype, smoothing, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_LOGITS", 200)  # several chunks
    check(*problem(16, 50, dtype), smoothing, kernels.cross_entropy_)
    check_ties(kernels.cross_entropy_)
    check_infinite_logits(kernels.cross_entropy_)


def test_custom_op_is_valid():
    logits, labels = problem(6, 10)
    torch.library.opcheck(kernels.cross_entropy_, (logits, labels, 0.1, True))
    torch.library.opcheck(kernels.cross_entropy_, (logits, labels, 0.0, False))


def layer_loss(device, max_logits, backend=None):
    """The loss of a small vocabulary layer, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, generator=generator).to(device).requires_grad_() for size in ((30, 6), (11, 6), (11,))]
    labels = problem(30, 11, device=device)[1]
    function = kernels.linear_cross_entropy
    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend)
    loss, correct = function(*inputs, labels, smoothing=0.1, max_logits=max_logits)
    return [loss.detach(), correct, *torch.autograd.grad(loss * 0.3, inputs)]


def check_layer_loss(device, max_logits, backend):
    """In place or not, compiled or not, the result is the same."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "updates_in_place", lambda x: False)
        expected = layer_loss(device, max_logits)
        patch.setattr(kernels, "updates_in_place", lambda x: True)
        for compile_backend in (None, backend):
            actual = layer_loss(device, max_logits, compile_backend)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_logits", [100, None])
def test_in_place_and_compiled_losses_agree(max_logits):
    check_layer_loss("cpu", max_logits, "aot_eager")


def interpreted():
    """All checks in Triton's interpreter: see interpreter.py."""
    from headstock.kernels import cross_entropy_triton as fused

    def counted(*inputs):
        calls.append(1)
        return run(*inputs)

    calls, run = [], fused.cross_entropy
    fused.cross_entropy = counted
    kernels.triton_works = lambda device: True
    for dtype in DTYPES:
        for smoothing in (0.0, 0.1):
            for size in ((16, 50), (3, 50_257)):  # the interpreter truncates bfloat16
                rounds = dtype != torch.bfloat16
                check(*problem(*size, dtype), smoothing, kernels.cross_entropy_, rounds_to_nearest=rounds)
    check(*problem(4, 1), 0.1, kernels.cross_entropy_)
    check(*problem(3, 2 * fused.BLOCK), 0.1, kernels.cross_entropy_)
    logits, labels = problem(8, 50)
    padded = F.pad(logits, (0, 14), value=9.0)  # rows with a gap
    actual, expected = (kernels.cross_entropy_(x, labels, 0.1, True)[0] for x in (padded[:, :50], logits))
    assert torch.equal(actual, expected) and torch.equal(padded[:, :50], logits) and (padded[:, 50:] == 9).all()
    check_ties(kernels.cross_entropy_)
    check_infinite_logits(kernels.cross_entropy_)
    assert kernels.cross_entropy_(torch.zeros(1, 5), torch.tensor([5]), 0.0, False)[0].isnan()
    assert kernels.cross_entropy_(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 0.0, True)[0].shape == (0,)
    for max_logits in (100, None):
        check_layer_loss("cpu", max_logits, "aot_eager")
    check_separate_gradient(run)
    with torch.inference_mode():
        assert uniform_loss() == pytest.approx(10 * 2.397895, rel=1e-5)
    assert len(calls) > 40


def check_separate_gradient(run):
    """A separate, scaled gradient; not in fp8, which the interpreter rounds differently."""
    for size in ((16, 50), (3, 20_000)):
        logits, labels = problem(*size)
        expected, correct, grad = reference(logits, labels, 0.1)
        updated, scaled_grad = logits.clone(), torch.full_like(logits, torch.nan)
        losses, top1_correct = run(logits, labels, 0.1, scaled_grad, CROSS_ENTROPY_SCALE)
        torch.testing.assert_close(losses, expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(top1_correct, correct) and torch.equal(logits, updated)
        torch.testing.assert_close(scaled_grad.double() / CROSS_ENTROPY_SCALE, grad, rtol=5e-6, atol=2e-6)


def uniform_loss():
    """The loss of ten uniform predictions among eleven tokens."""
    hidden, weight, labels = torch.zeros(10, 6), torch.zeros(11, 6), torch.arange(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "updates_in_place", lambda x: True)
        return kernels.linear_cross_entropy(hidden, weight, None, labels)[0].item()


def test_kernel_in_the_interpreter():
    interpret(__name__)


# On a GPU


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_on_a_gpu(dtype, smoothing):
    assert kernels.triton_works(torch.device("cuda", 0))
    for rows, vocabulary in ((64, 50), (40, 50_257), (40, 50_304), (4, 300_000)):
        check(*problem(rows, vocabulary, dtype, "cuda"), smoothing, kernels.cross_entropy_)
    check_ties(kernels.cross_entropy_, "cuda")
    check_infinite_logits(kernels.cross_entropy_, "cuda")


@pytest.mark.gpu
@gpu
def test_more_logits_than_32_bits_can_index():
    logits = torch.zeros(44_000, 50_000, dtype=torch.bfloat16, device="cuda")
    labels = torch.zeros(44_000, dtype=torch.int64, device="cuda")
    losses, correct = kernels.cross_entropy_(logits, labels, 0.0, True)
    assert losses.min() == losses.max() and losses[0].item() == pytest.approx(10.819778, rel=1e-5) and correct.all()
    assert (logits[:, 0] == -1).all() and (logits[-1, 1:] == logits[0, 1]).all() and logits[0, 1] > 0


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("max_logits", [100, None])
def test_compiled_loss_on_a_gpu(max_logits):
    check_layer_loss("cuda", max_logits, "inductor")


def test_triton_works_is_marked_constant_like_torch_does():
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(marked)
    assert vars(marked).items() <= vars(triton_works).items()


@pytest.mark.gpu
@gpu
def test_device_checks_compile_without_graph_breaks():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + supports_varlen(x, 64), fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lru_cache.*")
        x = torch.zeros(2, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(compiled(x), x + supports_varlen(x, 64))


@pytest.mark.gpu
@gpu
def test_kernel_can_be_captured():
    logits, labels = problem(40, 5000, torch.bfloat16, "cuda")
    expected = logits.clone()
    losses, correct = kernels.cross_entropy_(expected, labels, 0.1, True)  # this call also compiles it
    inputs, graph = torch.zeros_like(logits), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual, top1_correct = kernels.cross_entropy_(inputs, labels, 0.1, True)
    inputs.copy_(logits)
    graph.replay()
    assert torch.equal(actual, losses) and torch.equal(top1_correct, correct) and torch.equal(inputs, expected)
