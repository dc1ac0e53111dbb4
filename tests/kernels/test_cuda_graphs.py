"""Replayed decoding steps generate the same text."""

import pytest
import torch

from headstock.decoding import generate as generation
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.kernels.cuda_graphs import MIN_STEPS, can_capture
from tests.model.small import small_backbone, small_model, some_tokens

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [some_tokens(1 + n % 6, seed=n).tolist() for n in range(9)]


def test_cpus_do_not_capture():
    backbone = small_backbone()
    assert not can_capture(object(), backbone.new_state(2, 8), MIN_STEPS)
    assert not can_capture(object(), None, MIN_STEPS)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize(
    ("positions", "sampling", "end"),
    [
        ("learned", Sampling(temperature=0.0), 2),
        ("rotary", Sampling(top_p=0.9, repetition_penalty=1.2), 2),
        ("sinusoidal", Sampling(top_p=0.9), None),
    ],
)
def test_replayed_steps_generate_the_same_text(monkeypatch, positions, sampling, end):
    """Rows of different lengths that end at different times and slide."""
    model = small_model(positions=positions, context=24).cuda()
    options = {"max_tokens": 40, "sampling": sampling, "end": end, "seeds": list(range(9))}
    recorded = []
    capture_step = generation.capture_step
    monkeypatch.setattr(
        generation, "capture_step", lambda step, tokens: recorded.append(1) or capture_step(step, tokens)
    )
    replayed = generate(model, PROMPTS, **options)
    assert recorded
    monkeypatch.setattr(generation, "can_capture", lambda *_: False)
    assert generate(model, PROMPTS, **options) == replayed
    assert generate(model, PROMPTS, cache=False, **options) == replayed


@pytest.mark.gpu
@CUDA
def test_few_steps_are_not_captured():
    state = small_backbone().cuda().new_state(2, 8)
    assert not can_capture(object(), state, MIN_STEPS - 1)
    assert can_capture(object(), state, MIN_STEPS)
    assert not can_capture(small_backbone(), state, MIN_STEPS)  # a module may have hooks
