"""The Triton attention kernel agrees with the plain formula, in Triton's interpreter and on a GPU."""

import pytest
import torch

from headstock.kernels import attention as kernels
from headstock.model.batch import make_cu_seqlens
from tests.kernels.interpreter import interpret

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def problem(sizes, *, rows=1, heads=2, width=16, kind=torch.float32, device="cpu"):
    """(B, T, 3, H, K) queries, keys and values of documents, their boundaries, and an output gradient."""
    draw = torch.Generator().manual_seed(sum(sizes) + width)
    shape = rows, sum(sizes) // rows, 3, heads, width
    packed = torch.randn(shape, generator=draw).to(device, kind)
    grad = torch.randn(rows, heads, shape[1], width, generator=draw).to(device, kind)
    cu_seqlens = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed.requires_grad_(), cu_seqlens.to(device), grad


def unpack(packed):
    return packed.transpose(1, 3).unbind(2)  # as in project_qkv


def plain(packed, cu_seqlens, causal, stays=None, dropout=0.0):
    """The plain formula in float64; `stays` (H, N, N) is True where dropout keeps a pair."""
    rows, length, _, _, width = packed.shape
    query, key, value = (x.transpose(0, 1) for x in packed.double().flatten(0, 1).unbind(1))  # each (H, N, K)
    tokens = torch.arange(rows * length, device=packed.device)
    document = torch.searchsorted(cu_seqlens.long(), tokens, right=True)
    seen = document[:, None] == document
    seen = seen.tril() if causal else seen
    weights = (query @ key.mT * width**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights if stays is None else weights * stays / (1 - dropout)
    return (weights @ value).transpose(0, 1).unflatten(0, (rows, length)).transpose(1, 2)


def drawn(seed, heads, tokens, dropout):
    """(H, N, N) the pairs that dropout keeps: the kernel's hash in Python integers."""

    def mixed(x, salt=0):
        x = (x ^ (x >> 16) ^ salt) * 0x7FEB352D & 0xFFFFFFFF
        return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF

    at = torch.arange(tokens)
    pairs = (at[:, None] * 0x9E3779B1 + at) & 0xFFFFFFFF
    made = []
    for head in range(heads):
        salt = mixed(torch.tensor(seed + head * 0x9E3779B1) & 0xFFFFFFFF)
        made.append(mixed(pairs, salt ^ (salt >> 16)) >= round(dropout * 2**32))
    return torch.stack(made)


def check(packed, cu_seqlens, grad, found, wanted, near):
    assert found.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    mine, theirs = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0] for x in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=2 * near, atol=2 * near)


SIZES = [  # documents of one token, of none, of several tiles; in total less than a tile, or no whole number of tiles
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
            found = fused.attention(*unpack(packed), cu_seqlens, causal=causal)
            check(packed, cu_seqlens, grad, found, plain(packed, cu_seqlens, causal), 1e-5)
    check_strides(fused)
    check_dropout(fused)
    check_packed(fused)
    packed, cu_seqlens, grad = problem([9, 3], heads=1, kind=torch.float16)
    found = fused.attention(*unpack(packed), cu_seqlens, causal=True)
    check(packed, cu_seqlens, grad, found, plain(packed, cu_seqlens, True), 4e-3)
    check_operation(fused)


def check_strides(fused):
    """Other memory layouts give the same result: contiguous queries, padded keys, and an expanded gradient."""
    packed, cu_seqlens, grad = problem([7, 5, 12], rows=2, heads=1)
    query, key, value = unpack(packed)
    wide = torch.nn.functional.pad(key, (0, 3, 0, 2))[:, :, :-2, :-3]
    turned = value.mT.contiguous().mT  # not contiguous in the last dimension
    found = fused.attention(query.contiguous(), wide, turned, cu_seqlens, causal=False)
    check(packed, cu_seqlens, grad, found, plain(packed, cu_seqlens, False), 1e-5)
    found = fused.attention(query, key, value, cu_seqlens, causal=False)
    check(packed, cu_seqlens, torch.ones(()).expand_as(grad), found, plain(packed, cu_seqlens, False), 1e-5)


def check_dropout(fused):
    for dropout, causal in ((0.1, False), (0.6, True)):  # the second threshold exceeds 2^31
        packed, cu_seqlens, grad = problem([3, 1, 20])
        seed = torch.tensor([2**31 - 5])
        found = fused.varlen_attention(*unpack(packed), cu_seqlens, seed, causal, dropout)[0]
        wanted = plain(packed, cu_seqlens, causal, drawn(seed.item(), 2, 24, dropout), dropout)
        check(packed, cu_seqlens, grad, found, wanted, 1e-5)
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
        wanted = fused.attention(*unpack(packed), cu_seqlens, causal=causal, dropout=dropout)
        torch.manual_seed(3)
        found = fused.packed_attention(packed, cu_seqlens, causal=causal, dropout=dropout).transpose(1, 2)
        assert torch.equal(found, wanted)
        mine, theirs = (torch.autograd.grad(x, packed, grad)[0] for x in (found, wanted))
        assert torch.equal(mine, theirs)


def check_operation(fused, device="cpu"):
    packed, cu_seqlens, _ = problem([3, 5], heads=1, device=device)
    query, key, value = (x.detach().requires_grad_() for x in unpack(packed))
    for seed, dropout in ((None, 0.0), (torch.tensor([3], device=device), 0.2)):
        torch.library.opcheck(fused.varlen_attention, (query, key, value, cu_seqlens, seed, False, dropout))


def test_the_kernels_in_the_interpreter():
    interpret(__name__)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_pairs_are_dropped_as_if_by_chance(dropout):
    """The share that is dropped is right, and no pair tells of its neighbours, of another head or of another call."""
    stays = torch.cat([drawn(seed, 3, 512, dropout) for seed in (0, 1, 12345)]).double()
    count, spread = stays[0].numel(), (dropout * (1 - dropout)) ** 0.5
    off = (stays - (1 - dropout)) / spread  # of mean 0 and spread 1, if by chance
    assert (off.mean((1, 2)).abs() < 4 / count**0.5).all()
    for along in (1, 2):  # also the share of each query's, and of each key's, has the spread that chance gives
        assert off.mean(along).square().mean(-1).mul(512).sub(1).abs().max() < 4 * (2 / 512) ** 0.5
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (0, 16), (16, 0), (0, 64), (64, 0)):
        both = off * off.roll((down, right), (1, 2))
        assert (both.mean((1, 2)).abs() < 5 / count**0.5).all(), (down, right)
    alike = off.flatten(1) @ off.flatten(1).T / count - torch.eye(9)
    assert (alike - alike.diag().diag()).abs().max() < 5 / count**0.5


# What only a GPU can show


def several(rows=8, length=512, heads=12, width=64, kind=torch.bfloat16, often=0.02):
    """Rows of documents of fifty tokens on average, as they come from the data side."""
    draw = torch.Generator().manual_seed(0)
    cu_seqlens = make_cu_seqlens((torch.rand(rows, length, generator=draw) < often).int().cumsum(1))
    packed = torch.randn(rows, length, 3, heads, width, generator=draw).to("cuda", kind).requires_grad_()
    return packed, cu_seqlens.cuda(), torch.randn(rows, heads, length, width, generator=draw).to("cuda", kind)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "often"), [(64, 0.02), (64, 0.001), (128, 0.02), (32, 0.3), (24, 0.02)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_it_is_as_near_as_flash_attention(kind, width, often, causal):
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = several(3, 333, 3, width, kind, often)
    exact = plain(packed, cu_seqlens, causal)
    ways = (
        fused.attention(*unpack(packed), cu_seqlens, causal=causal),
        kernels.flash_varlen_attention(*unpack(packed), cu_seqlens, causal=causal),
    )
    true, mine, theirs = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0].double() for x in (exact, *ways))
    errors = [(x.double() - exact).norm() for x in ways], [(x - true).norm() for x in (mine, theirs)]
    for own, usual in errors:
        assert own < 1.2 * usual
    torch.testing.assert_close(*ways, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_on_a_gpu_is_that_of_the_formula(causal):
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = several(2, 200, 3)
    for dropout in (0.1, 0.6):
        found = fused.varlen_attention(*unpack(packed), cu_seqlens, torch.tensor([77], device="cuda"), causal, dropout)[
            0
        ]
        wanted = plain(packed, cu_seqlens, causal, drawn(77, 3, 400, dropout).cuda(), dropout)
        mine, theirs = (torch.autograd.grad(x, packed, grad.to(x.dtype))[0].double() for x in (found, wanted))
        assert (found - wanted).norm() < 0.01 * wanted.norm()
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.gpu
@gpu
def test_two_calls_are_equal_to_the_bit_also_compiled():
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, grad = several()

    def made(way):
        torch.manual_seed(5)
        mixed = way(packed, cu_seqlens)
        return mixed.detach(), torch.autograd.grad(mixed, packed, grad)[0]

    def way(packed, cu_seqlens, dropout=0.0):
        return fused.attention(*unpack(packed), cu_seqlens, causal=False, dropout=dropout)

    torch._dynamo.reset()
    wanted = made(way)
    for again in (way, torch.compile(way, fullgraph=True)):
        assert all(torch.equal(*both) for both in zip(made(again), wanted, strict=True))
    noisy = torch.compile(lambda *given: way(*given, dropout=0.1), fullgraph=True)
    wanted = made(noisy)
    assert all(torch.equal(*both) for both in zip(made(noisy), wanted, strict=True))
    check_operation(fused, "cuda")


@pytest.mark.gpu
@gpu
def test_it_can_be_recorded_and_draws_anew_each_time():
    fused = pytest.importorskip("headstock.kernels.attention_triton")
    packed, cu_seqlens, _ = several()
    with torch.no_grad():
        inputs = unpack(packed)
        plainly = fused.attention(*inputs, cu_seqlens, causal=False, dropout=0.1)  # which also builds it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused.attention(*inputs, cu_seqlens, causal=False, dropout=0.1)
        calls = []
        for _ in range(2):
            graph.replay()
            calls.append(found.clone())
    assert not torch.equal(*calls)
    assert (calls[0] - plainly).float().norm() < plainly.float().norm()
