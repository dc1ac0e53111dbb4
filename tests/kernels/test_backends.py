"""A library is set aside for as long as somebody wants it, and then is as it was."""

from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F

import headstock
from headstock.kernels import backends as aside
from headstock.kernels.backends import without_cudnn_attention


@pytest.fixture
def onednn(monkeypatch):
    """Whether torch uses it, on a machine where it is slow."""
    monkeypatch.setattr(aside, "onednn_is_slow", lambda: True)
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield torch.backends.mkldnn
    torch.backends.mkldnn.enabled = before


def test_a_slow_library_is_set_aside_until_the_last_has_left(onednn, monkeypatch):
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    plain, first, second = F.linear(x, weight), aside.fast_cpu_kernels(), aside.fast_cpu_kernels()
    with suppress(KeyError), aside.fast_cpu_kernels():
        assert not onednn.enabled
        torch.testing.assert_close(F.linear(x, weight), plain)
        raise KeyError
    assert onednn.enabled
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not onednn.enabled  # the second is still inside
    second.__exit__(None, None, None)
    assert onednn.enabled
    monkeypatch.setattr(aside, "onednn_is_slow", lambda: False)
    with aside.fast_cpu_kernels():
        assert onednn.enabled


def test_reading_writing_and_learning_set_it_aside(corpus, tmp_path, tiny, onednn, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*given, **more):
        seen.append(onednn.enabled)
        return attend(*given, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    headstock.pretrain(corpus, out=tmp_path / "run", settings=tiny | {"steps": 2}, device="cpu")
    loaded = headstock.load(tmp_path / "run", device="cpu")
    for use, more in ((loaded.generate, {"max_tokens": 2}), (loaded.score, {}), (loaded.embed, {})):
        before = len(seen)
        use(["Anne"], **more)
        assert len(seen) > before > 0
    assert not any(seen) and onednn.enabled


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_set_aside_until_the_last_has_left(before):
    cuda = torch.backends.cuda
    was = cuda.cudnn_sdp_enabled()
    try:
        cuda.enable_cudnn_sdp(before)
        first, second = without_cudnn_attention(torch.device("cuda")), without_cudnn_attention(torch.device("cuda", 0))
        with without_cudnn_attention(torch.device("cpu")):
            assert cuda.cudnn_sdp_enabled() == before  # it concerns no other device
        first.__enter__()
        second.__enter__()
        assert not cuda.cudnn_sdp_enabled()
        first.__exit__(None, None, None)
        assert not cuda.cudnn_sdp_enabled()
        second.__exit__(None, None, None)
        assert cuda.cudnn_sdp_enabled() == before
    finally:
        cuda.enable_cudnn_sdp(was)
