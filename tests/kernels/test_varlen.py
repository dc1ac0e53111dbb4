"""Attention inside packed documents agrees with attention under a mask."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from headstock.kernels import attention as kernels
from headstock.model.backbones import transformer
from headstock.model.batch import Batch, make_cu_seqlens
from tests.model.small import small_model, some_tokens

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def varlen_by_document(query, key, value, cu_seqlens, length, causal):
    """The reference of torch's varlen attention, document by document: (N, H, K) each."""
    output = torch.zeros_like(query)
    for begin, end in pairwise(cu_seqlens.tolist()):
        part = [x[begin:end].transpose(0, 1) for x in (query, key, value)]  # (H, n, K)
        output[begin:end] = F.scaled_dot_product_attention(*part, is_causal=causal).transpose(0, 1)
        assert end - begin <= length
    return output


@pytest.fixture
def varlen_calls(monkeypatch):
    """Use varlen attention on the CPU, by the reference; the calls are listed."""
    calls = []
    monkeypatch.setattr(kernels, "_varlen", lambda *args: calls.append(1) or varlen_by_document(*args))
    monkeypatch.setattr(transformer, "supports_varlen", lambda x, width: True)
    return calls


def packed_batch():
    documents = torch.tensor([[0] * 3 + [1] * 5 + [2] * 4, [0] * 10 + [-1] * 2])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(10), 0, 1]])
    return Batch(some_tokens(2, 12), document_ids=documents, positions=positions, cu_seqlens=make_cu_seqlens(documents))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_varlen_attention_agrees_with_the_mask(causal, positions, varlen_calls):
    model, batch = small_model(causal=causal, positions=positions, width=16), packed_batch()  # heads of width 8
    hidden = model(batch).hidden
    assert len(varlen_calls) == 2  # layers
    batch.cu_seqlens = None
    masked = model(batch).hidden
    assert len(varlen_calls) == 2
    torch.testing.assert_close(hidden, masked, rtol=1e-5, atol=1e-5)
    batch.cu_seqlens = make_cu_seqlens(torch.zeros_like(batch.document_ids))
    assert not torch.allclose(model(batch).hidden, masked, atol=1e-3)  # other boundaries, other vectors


def test_attention_hooks_receive_a_mask(varlen_calls):
    model, batch, masks = small_model(), packed_batch(), []
    model.backbone.blocks[0].attention.hook = lambda *args: masks.append(args[3])
    model(batch)
    assert masks[0].cu_seqlens is None and masks[0].allowed is not None and not varlen_calls


@pytest.mark.parametrize("fused", [True, False])
def test_packed_projections_reach_the_triton_kernel(fused, varlen_calls, monkeypatch):
    """Unchanged views of one projection are passed on packed; rotated ones are not."""
    projections = []

    def attention(query, key, value, *, packed, **options):
        projections.append(packed)
        if packed is not None:
            assert torch.equal(packed.transpose(1, 3)[:, :, 0], query) and packed.shape == (2, 12, 3, 2, 8)
        return kernels.flash_varlen_attention(query, key, value, options["cu_seqlens"], causal=options["causal"])

    monkeypatch.setattr("headstock.model.layers.attention", attention)
    monkeypatch.setattr(kernels, "_triton_supports", lambda width, device: fused)
    for positions in ("learned", "rotary"):
        small_model(positions=positions, width=16)(packed_batch())
    assert [packed is not None for packed in projections] == [fused, fused, False, False]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [32, 100])  # 100 is not a multiple of 8
def test_gpu_kernels_agree_with_the_mask(causal, width):
    documents = torch.randint(0, 2, (4, 96)).cumsum(1)
    cu_seqlens, allowed = make_cu_seqlens(documents).cuda(), documents[:, :, None] == documents[:, None]
    allowed = (allowed.tril() if causal else allowed)[:, None].cuda()
    inputs = [torch.randn(4, 2, 96, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    assert kernels.supports_varlen(inputs[0], width)

    def varlen(dropout=0.0):
        return kernels.attention(*inputs, cu_seqlens=cu_seqlens, causal=causal, dropout=dropout)

    outputs = varlen(), F.scaled_dot_product_attention(*inputs, allowed)
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(outputs[0])
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, grad) for x in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
    noisy = torch.stack([varlen(0.2) for _ in range(200)]).float()
    torch.testing.assert_close(noisy.mean(0), outputs[0].float(), rtol=0.3, atol=0.3)  # dropout keeps the mean
    assert noisy.std(0).mean() > 0.01
