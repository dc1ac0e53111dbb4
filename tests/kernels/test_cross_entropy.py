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
KINDS = [torch.float32, torch.bfloat16, torch.float16]


def problem(rows, vocabulary, kind=torch.float32, device="cpu"):
    """Logits and labels; every third label is ignored, every fifth is the top-1 prediction."""
    draw = torch.Generator().manual_seed(rows + vocabulary)
    scores = (torch.randn(rows, vocabulary, generator=draw) * 4).to(kind)
    labels = torch.randint(vocabulary, (rows,), generator=draw)
    labels[::5] = scores.argmax(-1)[::5]
    labels[1::3] = IGNORE_INDEX
    return scores.to(device), labels.to(device)


def plain(scores, labels, smoothing):
    """torch's losses (N,), whether the top-1 prediction is correct, and the gradient."""
    exact = scores.double().requires_grad_()
    lost = F.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)
    best = scores.cpu().argmax(-1).to(labels.device)  # a CPU's is the first
    return lost.detach().float(), best == labels, torch.autograd.grad(lost.sum(), exact)[0]


def check(scores, labels, smoothing, kernel, rounds=True):
    lost, right, slope = plain(scores, labels, smoothing)
    kept = scores.clone()
    found, hits = kernel(kept, labels, smoothing, False)
    assert torch.equal(kept, scores)  # without gradient the logits stay
    torch.testing.assert_close(found, lost, rtol=2e-5, atol=2e-5)
    assert torch.equal(hits, right)
    again, hits = kernel(kept, labels, smoothing, True)
    assert torch.equal(again, found) and torch.equal(hits, right)
    assert (kept[labels == IGNORE_INDEX] == 0).all()
    near = torch.finfo(scores.dtype).eps * (0.51 if rounds else 1)  # half a rounding step, or a whole one
    torch.testing.assert_close(kept.double(), slope, rtol=max(near, 5e-6), atol=2e-6)


def check_ties(kernel, device="cpu", vocabulary=20_000):
    """Among equal logits the first is the prediction, also across blocks."""
    scores = torch.zeros(4, vocabulary, device=device)
    scores[:3, [7, 8, vocabulary - 1]] = 2.0
    labels = torch.tensor([7, 8, vocabulary - 1, 0], device=device)
    assert kernel(scores, labels, 0.0, False)[1].tolist() == [True, False, False, True]


def check_infinite_logits(kernel, device="cpu", vocabulary=20_000):
    """Logits may be -inf, even a whole block of them."""
    scores = torch.full((1, vocabulary), -torch.inf, device=device)
    scores[:, -2:] = 1.0
    lost, _ = kernel(scores, torch.tensor([vocabulary - 1], device=device), 0.0, True)
    assert lost.item() == pytest.approx(0.693147, abs=1e-5)
    assert scores[0, -2:].tolist() == pytest.approx([0.5, -0.5], abs=1e-5) and (scores[:, :-2] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_matches_torch(kind, smoothing, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_LOGITS", 200)  # several chunks
    check(*problem(16, 50, kind), smoothing, kernels.cross_entropy_)
    check_ties(kernels.cross_entropy_)
    check_infinite_logits(kernels.cross_entropy_)


def test_custom_op_is_valid():
    scores, labels = problem(6, 10)
    torch.library.opcheck(kernels.cross_entropy_, (scores, labels, 0.1, True))
    torch.library.opcheck(kernels.cross_entropy_, (scores, labels, 0.0, False))


def whole_loss(device, most, compiled=False):
    """The loss of a small vocabulary layer, and its gradients."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, generator=draw).to(device).requires_grad_() for size in ((30, 6), (11, 6), (11,))]
    labels = problem(30, 11, device=device)[1]
    way = torch.compile(kernels.linear_cross_entropy, fullgraph=True, backend=compiled) if compiled else None
    loss, hits = (way or kernels.linear_cross_entropy)(*inputs, labels, smoothing=0.1, max_logits=most)
    return [loss.detach(), hits, *torch.autograd.grad(loss * 0.3, inputs)]


def check_whole(device, most, backend):
    """In place or not, compiled or not, the result is the same."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "updates_in_place", lambda x: False)
        wanted = whole_loss(device, most)
        patch.setattr(kernels, "updates_in_place", lambda x: True)
        for way in (False, backend):
            for mine, theirs in zip(whole_loss(device, most, way), wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [100, None])
def test_in_place_and_compiled_losses_agree(most):
    check_whole("cpu", most, "aot_eager")


def interpreted():
    """All checks in Triton's interpreter: see interpreter.py."""
    from headstock.kernels import cross_entropy_triton as fused

    def lose(*given):
        calls.append(1)
        return run(*given)

    calls, run = [], fused.cross_entropy
    fused.cross_entropy = lose
    kernels.triton_works = lambda device: True
    for kind in KINDS:
        for smoothing in (0.0, 0.1):
            for size in ((16, 50), (3, 50_257)):  # the interpreter truncates bfloat16
                check(*problem(*size, kind), smoothing, kernels.cross_entropy_, rounds=kind != torch.bfloat16)
    check(*problem(4, 1), 0.1, kernels.cross_entropy_)
    check(*problem(3, 2 * fused.BLOCK), 0.1, kernels.cross_entropy_)
    scores, labels = problem(8, 50)
    wide = F.pad(scores, (0, 14), value=9.0)  # rows with a gap
    found, wanted = (kernels.cross_entropy_(x, labels, 0.1, True)[0] for x in (wide[:, :50], scores))
    assert torch.equal(found, wanted) and torch.equal(wide[:, :50], scores) and (wide[:, 50:] == 9).all()
    check_ties(kernels.cross_entropy_)
    check_infinite_logits(kernels.cross_entropy_)
    assert kernels.cross_entropy_(torch.zeros(1, 5), torch.tensor([5]), 0.0, False)[0].isnan()
    assert kernels.cross_entropy_(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 0.0, True)[0].shape == (0,)
    for most in (100, None):
        check_whole("cpu", most, "aot_eager")
    check_separate_gradient(run)
    with torch.inference_mode():
        assert whole_loss_alone() == pytest.approx(10 * 2.397895, rel=1e-5)
    assert len(calls) > 40


def check_separate_gradient(run):
    """A separate, scaled gradient; not in fp8, which the interpreter rounds differently."""
    for size in ((16, 50), (3, 20_000)):
        scores, labels = problem(*size)
        wanted, right, slope = plain(scores, labels, 0.1)
        kept, slopes = scores.clone(), torch.full_like(scores, torch.nan)
        lost, hits = run(scores, labels, 0.1, slopes, CROSS_ENTROPY_SCALE)
        torch.testing.assert_close(lost, wanted, rtol=2e-5, atol=2e-5)
        assert torch.equal(hits, right) and torch.equal(scores, kept)
        torch.testing.assert_close(slopes.double() / CROSS_ENTROPY_SCALE, slope, rtol=5e-6, atol=2e-6)


def whole_loss_alone():
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
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_on_a_gpu(kind, smoothing):
    assert kernels.triton_works(torch.device("cuda", 0))
    for rows, vocabulary in ((64, 50), (40, 50_257), (40, 50_304), (4, 300_000)):
        check(*problem(rows, vocabulary, kind, "cuda"), smoothing, kernels.cross_entropy_)
    check_ties(kernels.cross_entropy_, "cuda")
    check_infinite_logits(kernels.cross_entropy_, "cuda")


@pytest.mark.gpu
@gpu
def test_more_logits_than_32_bits_can_index():
    scores = torch.zeros(44_000, 50_000, dtype=torch.bfloat16, device="cuda")
    labels = torch.zeros(44_000, dtype=torch.int64, device="cuda")
    lost, right = kernels.cross_entropy_(scores, labels, 0.0, True)
    assert lost.min() == lost.max() and lost[0].item() == pytest.approx(10.819778, rel=1e-5) and right.all()
    assert (scores[:, 0] == -1).all() and (scores[-1, 1:] == scores[0, 1]).all() and scores[0, 1] > 0


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("most", [100, None])
def test_compiled_loss_on_a_gpu(most):
    check_whole("cuda", most, "inductor")


def test_triton_works_is_marked_constant_like_torch_does():
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(marked)
    assert vars(marked).items() <= vars(triton_works).items()


@pytest.mark.gpu
@gpu
def test_device_checks_compile_without_graph_breaks():
    torch._dynamo.reset()
    asks = torch.compile(lambda x: x + supports_varlen(x, 64), fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lru_cache.*")
        x = torch.zeros(2, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(asks(x), x + supports_varlen(x, 64))


@pytest.mark.gpu
@gpu
def test_kernel_can_be_captured():
    scores, labels = problem(40, 5000, torch.bfloat16, "cuda")
    wanted = scores.clone()
    lost, right = kernels.cross_entropy_(wanted, labels, 0.1, True)  # this call also compiles it
    given, graph = torch.zeros_like(scores), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, hits = kernels.cross_entropy_(given, labels, 0.1, True)
    given.copy_(scores)
    graph.replay()
    assert torch.equal(found, lost) and torch.equal(hits, right) and torch.equal(given, wanted)
