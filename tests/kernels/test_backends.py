"""oneDNN and cuDNN attention are disabled within a context and restored afterwards."""

from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.kernels import backends
from headstock.kernels.backends import without_cudnn_attention


@pytest.fixture
def onednn(monkeypatch):
    """torch's oneDNN flag, on a machine where oneDNN is slow."""
    monkeypatch.setattr(backends, "onednn_is_slow", lambda: True)
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield torch.backends.mkldnn
    torch.backends.mkldnn.enabled = before


def test_onednn_is_disabled_until_the_last_context_ends(onednn, monkeypatch):
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    plain, first, second = F.linear(x, weight), backends.fast_cpu_kernels(), backends.fast_cpu_kernels()
    with suppress(KeyError), backends.fast_cpu_kernels():
        assert not onednn.enabled
        torch.testing.assert_close(F.linear(x, weight), plain)
        raise KeyError
    assert onednn.enabled
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not onednn.enabled  # the second context is still active
    second.__exit__(None, None, None)
    assert onednn.enabled
    monkeypatch.setattr(backends, "onednn_is_slow", lambda: False)
    with backends.fast_cpu_kernels():
        assert onednn.enabled


def test_training_and_inference_disable_slow_onednn(corpus, tmp_path, tiny, onednn, monkeypatch):
    flags, sdpa = [], F.scaled_dot_product_attention

    def recording_sdpa(*args, **kwargs):
        flags.append(onednn.enabled)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording_sdpa)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 2}, device="cpu")
    loaded = headstock.load(tmp_path / "run", device="cpu")
    for function, options in ((loaded.generate, {"max_tokens": 2}), (loaded.score, {}), (loaded.embed, {})):
        before = len(flags)
        function(["Anne"], **options)
        assert len(flags) > before > 0
    assert not any(flags) and onednn.enabled


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attention_is_disabled_until_the_last_context_ends(before):
    cuda = torch.backends.cuda
    previous = cuda.cudnn_sdp_enabled()
    try:
        cuda.enable_cudnn_sdp(before)
        first, second = without_cudnn_attention(torch.device("cuda")), without_cudnn_attention(torch.device("cuda", 0))
        with without_cudnn_attention(torch.device("cpu")):
            assert cuda.cudnn_sdp_enabled() == before  # other devices are not affected
        first.__enter__()
        second.__enter__()
        assert not cuda.cudnn_sdp_enabled()
        first.__exit__(None, None, None)
        assert not cuda.cudnn_sdp_enabled()
        second.__exit__(None, None, None)
        assert cuda.cudnn_sdp_enabled() == before
    finally:
        cuda.enable_cudnn_sdp(previous)


def test_torch_uses_one_host_thread_while_the_model_runs_elsewhere():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with backends.single_host_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 3
        with backends.single_host_thread(torch.device("cuda")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
