"""The Triton attention kernel agrees with the plain formula, in Triton's interpreter and on a GPU."""

import pytest
import torch

from headstock.kernels import attention as kernels
from headstock.model.batch import make_cu_seqlens
from tests.kernels.interpreter import interpret

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def problem(sizes, *, rows=1, heads=2, width=16, dtype=torch.float32, device="cpu"):
    """(B, T, 3, H, K) queries, keys and values of documents, their boundaries, and an output gradient."""
    generator = torch.Generator().manual_seed(sum(sizes) + width)
    shape = rows, sum(sizes) // rows, 3, heads, width
    packed = torch.randn(shape, generator=generator).to(device, dtype)
    grad = torch.randn(rows, heads, shape[1], width, generator=generator).to(device, dtype)
    cu_seqlens = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed.requires_grad_(), cu_seqlens.to(device), grad


def unpack(packed):
    return packed.transpose(1, 3).unbind(2)  # as in project_qkv


def reference(packed, cu_seqlens, causal, keep_mask=None, dropout=0.0):
    """The plain formula in float64; `keep_mask` (H, N, N) is True where dropout keeps a pair."""
    rows, length, _, _, width = packed.shape
    query, key, value = (x.transpose(0, 1) for x in packed.double().flatten(0, 1).unbind(1))  # each (H, N, K)
    tokens = torch.arange(rows * length, device=packed.device)
    document = torch.searchsorted(cu_seqlens.long(), tokens, right=True)
    allowed = document[:, None] == document
    allowed = allowed.tril() if causal else allowed
    weights = (query @ key.mT * width**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
    weights = weights if keep_mask is None else weights * keep_mask / (1 - dropout)
    return (weights @ value).transpose(0, 1).unflatten(0, (rows, length)).transpose(1, 2)


def dropout_mask(seed, heads, tokens, dropout):
    """(H, N, N) the pairs that dropout keeps: the kernel's hash in Python integers."""

    def hashed(x, salt=0):
        x = (x ^ (x >> 16) ^ salt) * 0x7FEB352D & 0xFFFFFFFF
        return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF

    index = torch.arange(tokens)
    pairs = (index[:, None] * 0x9E3779B1 + index) & 0xFFFFFFFF
    masks = []
    for head in range(heads):
        salt = hashed(torch.tensor(seed + head * 0x9E3779B1) & 0xFFFFFFFF)
        masks.append(hashed(pairs, salt ^ (salt >> 16)) >= round(dropout * 2**32))
    return torch.stack(masks)


def check(packed, cu_seqlens, grad, actual, expected, tolerance):
    assert actual.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    actual_grad, expected_grad = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0] for x in (actual, expected))
    torch.testing.assert_close(actual_grad, expected_grad, rtol=2 * tolerance, atol=2 * tolerance)


SIZES = [  # documents of one token, of none, of several tiles; totals of less than a tile, or not a multiple of one
    (2, [1, 0, 1, 14, 7, 23, 0]),
    (1, [37]),
    (1, [4, 1]),
]


def interpreted():
    """All checks in Triton's interpreter: see interpreter.py."""
    from headstock.kernels import attention_triton as fused

    fused.FORWARD, fused.BACKWARD_QUERY, fused.BACKWARD_KEY = (
        fused.Tiles(*size, 4, 2) for size in ((16, 16), (16, 32), (32, 16))
    )
    for rows, sizes in SIZES:
        for causal, width in ((False, 16), (True, 24)):
            packed, cu_seqlens, grad = problem(sizes, rows=rows, heads=rows, width=width)
            actual = fused.attention(*unpack(packed), cu_seqlens, causal=causal)
            check(packed, cu_seqlens, grad, actual, reference(packed, cu_seqlens, causal), 1e-5)
    check_strides(fused)
    check_dropout(fused)
    check_packed(fused)
    packed, cu_seqlens, grad = problem([9, 3], heads=1, dtype=torch.float16)
    actual = fused.attention(*unpack(packed), cu_seqlens, causal=True)
    check(packed, cu_seqlens, grad, actual, reference(packed, cu_seqlens, True), 4e-3)
    check_operation(fused)


def check_strides(fused):
    """Other memory layouts give the same result: contiguous queries, padded keys, and an expanded gradient."""
    packed, cu_seqlens, grad = problem([7, 5, 12], rows=2, heads=1)
    query, key, value = unpack(packed)
    wide = torch.nn.functional.pad(key, (0, 3, 0, 2))[:, :, :-2, :-3]
    strided = value.mT.contiguous().mT  # not contiguous in the last dimension
    actual = fused.attention(query.contiguous(), wide, strided, cu_seqlens, causal=False)
    check(packed, cu_seqlens, grad, actual, reference(packed, cu_seqlens, False), 1e-5)
    actual = fused.attention(query, key, value, cu_seqlens, causal=False)
    check(packed, cu_seqlens, torch.ones(()).expand_as(grad), actual, reference(packed, cu_seqlens, False), 1e-5)


def check_dropout(fused):
    for dropout, causal in ((0.1, False), (0.6, True)):  # the second threshold exceeds 2^31
        packed, cu_seqlens, grad = problem([3, 1, 20])
        seed = torch.tensor([2**31 - 5])
        actual = fused.varlen_attention(*unpack(packed), cu_seqlens, seed, causal, dropout)[0]
        expected = reference(packed, cu_seqlens, causal, dropout_mask(seed.item(), 2, 24, dropout), dropout)
        check(packed, cu_seqlens, grad, actual, expected, 1e-5)
    calls = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        calls.append(fused.attention(*unpack(packed), cu_seqlens, causal=False, dropout=0.5))
    assert torch.equal(calls[0], calls[1]) and not torch.equal(calls[0], calls[2])


def check_packed(fused):
    """A packed projection gives the same bits, and so does its gradient."""
    packed, cu_seqlens, grad = problem([7, 5, 12], rows=2)
    for causal, dropout in ((False, 0.0), (True, 0.3)):
        torch.manual_seed(3)
        expected = fused.attention(*unpack(packed), cu_seqlens, causal=causal, dropout=dropout)
        torch.manual_seed(3)
        actual = fused.packed_attention(packed, cu_seqlens, causal=causal, dropout=dropout).transpose(1, 2)
        assert torch.equal(actual, expected)
        actual_grad, expected_grad = (torch.autograd.grad(x, packed, grad)[0] for x in (actual, expected))
        assert torch.equal(actual_grad, expected_grad)


def check_operation(fused, device="cpu"):
    packed, cu_seqlens, _ = problem([3, 5], heads=1, device=device)
    query, key, value = (x.detach().requires_grad_() for x in unpack(packed))
    for seed, dropout in ((None, 0.0), (torch.tensor([3], device=device), 0.2)):
        torch.library.opcheck(fused.varlen_attention, (query, key, value, cu_seqlens, seed, False, dropout))


def test_the_kernels_in_the_interpreter():
    interpret(__name__)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_statistically_random(dropout):
    """The rate is right, and pairs are uncorrelated with neighbours, other heads and other calls."""
    keep_mask = torch.cat([dropout_mask(seed, 3, 512, dropout) for seed in (0, 1, 12345)]).double()
    count, spread = keep_mask[0].numel(), (dropout * (1 - dropout)) ** 0.5
    standardized = (keep_mask - (1 - dropout)) / spread  # mean 0 and variance 1 if random
    assert (standardized.mean((1, 2)).abs() < 4 / count**0.5).all()
    for axis in (1, 2):  # the rates of queries and keys have the variance of independent draws
        assert standardized.mean(axis).square().mean(-1).mul(512).sub(1).abs().max() < 4 * (2 / 512) ** 0.5
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (0, 16), (16, 0), (0, 64), (64, 0)):
        product = standardized * standardized.roll((down, right), (1, 2))
        assert (product.mean((1, 2)).abs() < 5 / count**0.5).all(), (down, right)
    correlations = standardized.flatten(1) @ standardized.flatten(1).T / count - torch.eye(9)
    assert (correlations - correlations.diag().diag()).abs().max() < 5 / count**0.5


# On a GPU


def random_documents(rows=8, length=512, heads=12, width=64, dtype=torch.bfloat16, boundary_rate=0.02):
    """Rows of packed documents of fifty tokens on average."""
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = make_cu_seqlens((torch.rand(rows, length, generator=generator) < boundary_rate).int().cumsum(1))
    packed = torch.randn(rows, length, 3, heads, width, generator=generator).to("cuda", dtype).requires_grad_()
    return packed, cu_seqlens.cuda(), torch.randn(rows, heads, length, width, generator=generator).to("cuda", dtype)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "boundary_rate"), [(64, 0.02), (64, 0.001), (128, 0.02), (32, 0.3), (24, 0.02)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_those_of_flash_attention(dtype, width, boundary_rate, causal):
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = random_documents(3, 333, 3, width, dtype, boundary_rate)
    expected = reference(packed, cu_seqlens, causal)
    outputs = (
        fused.attention(*unpack(packed), cu_seqlens, causal=causal),
        kernels.flash_varlen_attention(*unpack(packed), cu_seqlens, causal=causal),
    )
    exact_grad, *grads = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0].double() for x in (expected, *outputs))
    errors = [(x.double() - expected).norm() for x in outputs], [(x - exact_grad).norm() for x in grads]
    for error, flash_error in errors:
        assert error < 1.2 * flash_error
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_on_a_gpu_matches_the_reference(causal):
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = random_documents(2, 200, 3)
    for dropout in (0.1, 0.6):
        seed = torch.tensor([77], device="cuda")
        actual = fused.varlen_attention(*unpack(packed), cu_seqlens, seed, causal, dropout)[0]
        expected = reference(packed, cu_seqlens, causal, dropout_mask(77, 3, 400, dropout).cuda(), dropout)
        grads = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0].double() for x in (actual, expected))
        actual_grad, expected_grad = grads
        assert (actual - expected).norm() < 0.01 * expected.norm()
        assert (actual_grad - expected_grad).norm() < 0.01 * expected_grad.norm()


@pytest.mark.gpu
@gpu
def test_calls_are_deterministic_and_compile():
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = random_documents()

    def output_and_grad(function):
        torch.manual_seed(5)
        output = function(packed, cu_seqlens)
        return output.detach(), torch.autograd.grad(output, packed, grad)[0]

    def run_attention(packed, cu_seqlens, dropout=0.0):
        return fused.attention(*unpack(packed), cu_seqlens, causal=False, dropout=dropout)

    torch._dynamo.reset()
    expected = output_and_grad(run_attention)
    for function in (run_attention, torch.compile(run_attention, fullgraph=True)):
        assert all(map(torch.equal, output_and_grad(function), expected))
    with_dropout = torch.compile(lambda *args: run_attention(*args, dropout=0.1), fullgraph=True)
    expected = output_and_grad(with_dropout)
    assert all(map(torch.equal, output_and_grad(with_dropout), expected))
    check_operation(fused, "cuda")


@pytest.mark.gpu
@gpu
def test_a_captured_graph_draws_new_dropout_at_each_replay():
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, _ = random_documents()
    with torch.no_grad():
        inputs = unpack(packed)
        eager = fused.attention(*inputs, cu_seqlens, causal=False, dropout=0.1)  # this call also compiles it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = fused.attention(*inputs, cu_seqlens, causal=False, dropout=0.1)
        calls = []
        for _ in range(2):
            graph.replay()
            calls.append(actual.clone())
    assert not torch.equal(*calls)
    assert (calls[0] - eager).float().norm() < eager.float().norm()
