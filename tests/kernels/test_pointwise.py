"""Hashed dropout has the statistics of random dropout, and the polynomial GELU is exact to rounding."""

import pytest
import torch
from torch.nn import functional as F

from headstock.kernels import pointwise
from headstock.model.layers import Dropout

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dropout", [0.1, 0.6])
def test_hashed_dropout_looks_random(dropout):
    """Rates are right overall, by row and by column, without correlation to neighbours or other calls."""
    torch.manual_seed(0)
    ones, spread = torch.ones(512, 768), (dropout * (1 - dropout)) ** 0.5
    calls = torch.stack([pointwise.hashed_dropout(ones, dropout) for _ in range(4)])
    assert set(calls.unique().tolist()) == {0.0, torch.tensor(1 / (1 - dropout)).item()}
    standardized = ((calls > 0).double() - (1 - dropout)) / spread  # standardized
    assert (standardized.mean((1, 2)).abs() < 4 / ones.numel() ** 0.5).all()
    for axis, others in ((1, 768), (2, 512)):  # rates of columns and rows have the variance of independent draws
        size = ones.numel() // others
        assert standardized.mean(axis).square().mean(-1).mul(size).sub(1).abs().max() < 5 * (2 / others) ** 0.5
    for down, right in ((0, 1), (1, 0), (1, 1), (0, 8), (0, 64), (0, 128), (64, 0)):
        product = standardized * standardized.roll((down, right), (1, 2))
        assert (product.mean((1, 2)).abs() < 5 / ones.numel() ** 0.5).all(), (down, right)
    correlations = standardized.flatten(1) @ standardized.flatten(1).T / ones.numel()
    assert (correlations - torch.eye(4)).abs().fill_diagonal_(0).max() < 5 / ones.numel() ** 0.5


def test_the_backward_pass_uses_the_same_mask():
    x = torch.randn(40, 24, requires_grad=True)
    for backend in (None, "aot_eager"):
        function = pointwise.hashed_dropout
        function = function if backend is None else torch.compile(function, backend=backend)
        output = function(x, 0.3)
        grad = torch.autograd.grad(output.sum(), x)[0]
        torch.testing.assert_close(grad * x, output)
        assert 0.1 < (grad == 0).float().mean() < 0.5


def test_eager_dropout_is_torchs():
    torch.manual_seed(1)
    expected = F.dropout(torch.ones(50), 0.5)
    torch.manual_seed(1)
    layer = Dropout(0.5)
    assert torch.equal(layer(torch.ones(50)), expected)
    assert torch.equal(layer.eval()(torch.ones(50)), torch.ones(50))


def test_polynomial_gelu_matches_torch():
    x = torch.linspace(-12, 12, 100_001, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    actual, expected = pointwise._PolynomialGelu.apply(x), F.gelu(exact)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=4e-7)
    actual_grad, expected_grad = torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), exact)[0]
    torch.testing.assert_close(actual_grad.double(), expected_grad, rtol=2e-7, atol=4e-7)


def test_polynomial_gelu_rounds_like_torch_in_bfloat16():
    x = torch.randn(100_000, dtype=torch.bfloat16)
    actual, expected = pointwise._PolynomialGelu.apply(x), F.gelu(x)
    assert (actual == expected).float().mean() > 0.999
    torch.testing.assert_close(actual, expected, rtol=8e-3, atol=1e-6)


@pytest.mark.gpu
@gpu
def test_compiled_on_a_gpu():
    """Masks differ between calls, and values and gradients match torch."""

    def function(x):
        return pointwise.dropout(pointwise.gelu(x), 0.25)

    x = (torch.rand(512, 768, device="cuda") + 0.5).bfloat16().requires_grad_()
    compiled = torch.compile(function, fullgraph=True)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first == 0, second == 0)
    keep_mask = first != 0
    assert (~keep_mask).float().mean().item() == pytest.approx(0.25, abs=0.01)
    expected = torch.where(keep_mask, F.gelu(x) / 0.75, 0.0)
    torch.testing.assert_close(first, expected, rtol=1e-2, atol=1e-2)
    actual_grad, expected_grad = (torch.autograd.grad(output.float().sum(), x)[0] for output in (first, expected))
    torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-2, atol=1e-2)
