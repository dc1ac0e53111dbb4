"""Sampling frequencies against expected probabilities."""

import math

import pytest
import torch

from headstock.decoding.sampling import Sampling, choose, penalize_repetition
from headstock.errors import ConfigError

LOGITS = [0.5, -1.0, 2.0, 1.5, -3.0, 0.4]
MANY = 20_000


def frequencies(sampling: Sampling, logits: list[float] = LOGITS) -> list[float]:
    """How often each token is sampled with draws spread evenly over [0, 1)."""
    draws = torch.arange(MANY) / MANY
    tokens = choose(torch.tensor([logits]).expand(MANY, -1), sampling, draws=draws)
    return (torch.bincount(tokens, minlength=len(logits)) / MANY).tolist()


def softmax(logits: list[float], *, temperature: float = 1.0, only: set[int] | None = None) -> list[float]:
    weights = [
        math.exp(score / temperature) if only is None or token in only else 0.0 for token, score in enumerate(logits)
    ]
    return [weight / sum(weights) for weight in weights]


def assert_frequencies(sampling: Sampling, expected: list[float]) -> None:
    actual = frequencies(sampling)
    assert actual == pytest.approx(expected, abs=2 / MANY)
    assert all(share == 0 for share, expected_share in zip(actual, expected, strict=True) if expected_share == 0)


def test_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert choose(logits, Sampling(temperature=0.0)).tolist() == [1, 0]
    assert Sampling(temperature=0.0).greedy
    assert not Sampling().greedy


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
    assert_frequencies(Sampling(temperature=temperature), softmax(LOGITS, temperature=temperature))


def test_extreme_temperatures():
    assert frequencies(Sampling(temperature=1e-30))[2] == 1.0
    assert frequencies(Sampling(temperature=1e6)) == pytest.approx([1 / 6] * 6, abs=1e-4)


@pytest.mark.parametrize(("k", "allowed"), [(1, {2}), (3, {2, 3, 0}), (6, set(range(6))), (100, set(range(6)))])
def test_top_k(k, allowed):
    assert_frequencies(Sampling(top_k=k), softmax(LOGITS, only=allowed))
    assert_frequencies(Sampling(top_k=k, temperature=0.5), softmax(LOGITS, temperature=0.5, only=allowed))


def nucleus(p: float, temperature: float = 1.0) -> set[int]:
    """The smallest set of the most likely tokens with total probability p."""
    allowed, total = set(), 0.0
    ranked = sorted(enumerate(softmax(LOGITS, temperature=temperature)), key=lambda pair: -pair[1])
    for token, probability in ranked:
        if total >= p:
            break
        allowed.add(token)
        total += probability
    return allowed


@pytest.mark.parametrize("p", [1e-6, 0.4, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_top_p(p, temperature):
    allowed = nucleus(p, temperature)
    assert_frequencies(
        Sampling(top_p=p, temperature=temperature), softmax(LOGITS, temperature=temperature, only=allowed)
    )


def test_top_p_textbook_example():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    actual = frequencies(Sampling(top_p=0.8), [math.log(p) for p in probabilities])
    assert actual == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)


def test_top_p_ranks_equal_logits_by_token():
    """As a stable sort with its indices does."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-4, 4, (64, 50), generator=generator) / 2.0
    logits[:, :7] = -torch.inf
    draws = torch.rand(64, generator=generator)
    ranked, token_ids = logits.sort(stable=True, dim=-1, descending=True)
    probabilities = ranked.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities >= 0.9] = 0.0
    cumulative = probabilities.cumsum(-1)
    index = (cumulative > draws[:, None] * cumulative[:, -1:]).byte().argmax(-1, keepdim=True)
    tokens = choose(logits, Sampling(top_p=0.9), draws=draws)
    assert torch.equal(tokens, token_ids.gather(-1, index).squeeze(-1))
    assert len(tokens.unique()) > 20


@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.25, 1.0])
def test_min_p(minimum):
    probabilities = softmax(LOGITS)
    allowed = {token for token, p in enumerate(probabilities) if p >= minimum * max(probabilities)}
    assert_frequencies(Sampling(min_p=minimum), softmax(LOGITS, only=allowed))


def test_combined_filters():
    allowed = {2, 3, 0, 5}  # the four likeliest; together with top_p 0.75 the first two of them
    assert_frequencies(Sampling(top_k=4, min_p=0.01), softmax(LOGITS, only=allowed))
    assert_frequencies(Sampling(top_k=4, top_p=0.75), softmax(LOGITS, only={2, 3}))


def test_excluded_tokens_are_never_sampled():
    logits = [1.0, float("-inf"), 0.0, float("-inf")]
    for sampling in (Sampling(), Sampling(top_p=0.999), Sampling(top_k=3), Sampling(min_p=0.0)):
        for draws in (0.0, 0.5, 1 - 2**-24):
            assert choose(torch.tensor([logits]), sampling, draws=torch.tensor([draws])).item() in (0, 2)


def test_rows_are_independent():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    draws = torch.rand(5, generator=torch.Generator().manual_seed(1))
    for sampling in (Sampling(), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(min_p=0.2)):
        tokens = choose(logits, sampling, draws=draws).tolist()
        assert tokens == [choose(logits[i : i + 1], sampling, draws=draws[i : i + 1]).item() for i in range(5)]


def test_repetition_penalty():
    in_text = torch.tensor([[True, True, False]])
    penalized = penalize_repetition(torch.tensor([[3.0, -1.0, 2.0]]), in_text, 2.0)
    assert penalized.tolist() == [[1.5, -2.0, 2.0]]
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert choose(torch.tensor([[3.0, -1.0, 2.0]]), greedy, in_text=in_text).item() == 2
    assert choose(torch.tensor([[3.0, -1.0, 2.0]]), greedy, in_text=~in_text).item() == 0


def test_invalid_settings_are_reported_together():
    with pytest.raises(ConfigError) as error:
        Sampling(temperature=-1.0, top_k=0, top_p=1.5, min_p=-0.1, repetition_penalty=0.0)
    assert [name for name, _ in error.value.problems] == [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
    ]
    assert "-1.0" in str(error.value)
    for setting in ({"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"min_p": 1.01}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            Sampling(**setting)
