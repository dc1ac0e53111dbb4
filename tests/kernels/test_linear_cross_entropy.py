"""The chunked loss over the vocabulary agrees with torch's cross entropy: values, gradients and short runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import headstock
from headstock.kernels import attention, cross_entropy
from headstock.kernels.cross_entropy import linear_cross_entropy
from headstock.model.backbones import transformer
from headstock.model.batch import IGNORE_INDEX
from headstock.tasks import base
from headstock.train.run_folder import RunFolder
from tests.kernels.test_varlen import varlen_by_document

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def problem(count=30, width=6, vocabulary=11, *, bias=True, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (count, vocabulary))
    biases = [torch.randn(vocabulary, generator=generator)] if bias else []
    labels = torch.randint(vocabulary, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.3] = IGNORE_INDEX
    return [x.to(device).requires_grad_() for x in (hidden, weight, *biases)], labels.to(device)


def plain(inputs, labels, smoothing):
    logits = F.linear(*inputs)
    loss = F.cross_entropy(
        logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
    )
    return loss, (logits.argmax(-1) == labels).sum()


def chunked(inputs, labels, smoothing, max_logits=100):
    hidden, weight, bias = [*inputs, None][:3]
    return linear_cross_entropy(hidden, weight, bias, labels, smoothing=smoothing, max_logits=max_logits)


def assert_gradients_close(losses, inputs, **tolerance):
    for ours, theirs in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.booleans(), st.sampled_from([0.0, 0.1]), st.integers(1, 2000), st.integers(0, 99))
def test_loss_and_gradient_match_torch(count, bias, smoothing, max_logits, seed):
    inputs, labels = problem(count, bias=bias, seed=seed)
    expected, expected_correct = plain(inputs, labels, smoothing)
    loss, correct = chunked(inputs, labels, smoothing, max_logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert correct == expected_correct
    assert_gradients_close((loss * 0.3, expected * 0.3), inputs, rtol=1e-5, atol=1e-5)


def test_without_labels_loss_and_gradient_are_zero():
    inputs, labels = problem()
    loss, correct = chunked(inputs, torch.full_like(labels, IGNORE_INDEX), 0.1)
    assert loss == 0 and correct == 0
    assert all((part == 0).all() for part in torch.autograd.grad(loss, inputs))


def test_inference_computes_no_gradient():
    inputs, labels = problem()
    with torch.inference_mode():
        loss, _ = chunked(inputs, labels, 0.0)
    assert not loss.requires_grad and loss == pytest.approx(plain(inputs, labels, 0.0)[0].item(), rel=1e-5)


def test_mixed_precision_is_as_accurate_as_torch():
    inputs, labels = problem(200, 32, 50)
    exact = torch.autograd.grad(plain(inputs, labels, 0.0)[0], inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [function(inputs, labels, 0.0)[0] for function in (plain, chunked)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=5e-3)
    for gradients in zip(exact, *(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        expected, theirs, ours = (gradient.float() for gradient in gradients)
        assert (ours - expected).norm() < 1.2 * (theirs - expected).norm() + 1e-6
        assert ours.dtype == torch.float32


@pytest.mark.parametrize("count", [700, 1500])
def test_the_scale_of_a_mean_is_not_rounded(count):
    """1/1500 in bfloat16 is 0.14% off, and would be so for every weight below the head."""
    (hidden, *others), labels = problem(200, 32, 50)
    hidden = hidden.detach().bfloat16().requires_grad_()
    total, mean = (
        torch.autograd.grad(chunked((hidden, *others), labels, 0.0)[0] * scale, hidden)[0].float()
        for scale in (1.0, 1 / count)
    )
    assert count * (mean * total).sum() / total.square().sum() == pytest.approx(1, abs=3e-4)


def test_it_compiles_without_graph_breaks():
    torch._dynamo.reset()
    inputs, labels = problem()
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    (expected, _), (loss, _) = chunked(inputs, labels, 0.1), compiled(inputs, labels, 0.1)
    torch.testing.assert_close(loss, expected)
    assert_gradients_close((loss, expected), inputs)


@pytest.mark.parametrize(("limit", "rows"), [(1, 1), (127, 127), (128, 128), (300, 256), (10_672, 10_624)])
def test_chunks_are_whole_tiles(limit, rows):
    assert cross_entropy.chunk_rows(limit) == rows


def loss_curve(corpus, out, options):
    headstock.pretrain(corpus, out=out, settings=options, device="cpu")  # in float32 on every machine
    return [row["loss"] for row in RunFolder(out).read_metrics() if "loss" in row]


@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_training_with_and_without_kernels_gives_the_same_losses(objective, corpus, tmp_path, tiny, monkeypatch):
    options = tiny | {"task.name": objective, "log_every": 1, "steps": 6, "label_smoothing": 0.1}
    expected = loss_curve(corpus, tmp_path / "plain", options)
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 0)
    monkeypatch.setattr(
        base, "linear_cross_entropy", lambda *args, **kwargs: linear_cross_entropy(*args, **kwargs, max_logits=9999)
    )
    monkeypatch.setattr(attention, "_varlen", varlen_by_document)
    monkeypatch.setattr(transformer, "supports_varlen", lambda x, width: True)
    losses = loss_curve(corpus, tmp_path / "fast", options)
    assert len(losses) == 6 and losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.gpu
@gpu
def test_loss_on_a_gpu():
    inputs, labels = problem(500, 64, 1000, device="cuda")
    for smoothing in (0.0, 0.1):
        (expected, expected_correct), (loss, correct) = (
            plain(inputs, labels, smoothing),
            chunked(inputs, labels, smoothing, 1 << 16),
        )
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-3)
        assert correct == expected_correct


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("objective", ["causal", "masked", "hybrid"])
def test_a_training_step_never_synchronizes(objective, corpus, tmp_path, tiny):
    """torch raises where an operation waits for the GPU."""
    from headstock.train.step import TrainingStep

    accumulate, calls = TrainingStep.accumulate, []

    def strict(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error" if calls else 0)  # the first step may
        calls.append(1)
        try:
            return accumulate(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "accumulate", strict)
        headstock.pretrain(
            corpus, out=tmp_path / "run", settings=tiny | {"task.name": objective, "width": 32}, device="cuda"
        )
    assert len(calls) == 12
