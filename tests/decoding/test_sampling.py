"""The next token: how often each comes, against probabilities worked out here."""

import math

import pytest
import torch

from headstock.decoding.sampling import Sampling, choose, penalize_repetition
from headstock.errors import ConfigError

SCORES = [0.5, -1.0, 2.0, 1.5, -3.0, 0.4]  # the highest is not the first, which a faulty rule might fall back on
MANY = 20_000


def shares(how: Sampling, scores: list[float] = SCORES) -> list[float]:
    """How often each token is chosen when luck is spread evenly over [0, 1)."""
    luck = torch.arange(MANY) / MANY
    chosen = choose(torch.tensor([scores]).expand(MANY, -1), how, draws=luck)
    return (torch.bincount(chosen, minlength=len(scores)) / MANY).tolist()


def softmax(scores: list[float], *, temperature: float = 1.0, only: set[int] | None = None) -> list[float]:
    weights = [
        math.exp(score / temperature) if only is None or token in only else 0.0 for token, score in enumerate(scores)
    ]
    return [weight / sum(weights) for weight in weights]


def assert_shares(how: Sampling, expected: list[float]) -> None:
    found = shares(how)
    assert found == pytest.approx(expected, abs=2 / MANY)
    assert all(share == 0 for share, wanted in zip(found, expected, strict=True) if wanted == 0)


def test_greedy_takes_the_highest():
    scores = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert choose(scores, Sampling(temperature=0.0)).tolist() == [1, 0]
    assert Sampling(temperature=0.0).greedy
    assert not Sampling().greedy


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
    assert_shares(Sampling(temperature=temperature), softmax(SCORES, temperature=temperature))


def test_the_smallest_temperature_is_greedy_and_a_large_one_even():
    assert shares(Sampling(temperature=1e-30))[2] == 1.0
    assert shares(Sampling(temperature=1e6)) == pytest.approx([1 / 6] * 6, abs=1e-4)


@pytest.mark.parametrize(("k", "kept"), [(1, {2}), (3, {2, 3, 0}), (6, set(range(6))), (100, set(range(6)))])
def test_top_k(k, kept):
    assert_shares(Sampling(top_k=k), softmax(SCORES, only=kept))
    assert_shares(Sampling(top_k=k, temperature=0.5), softmax(SCORES, temperature=0.5, only=kept))


def nucleus(p: float, temperature: float = 1.0) -> set[int]:
    """The likeliest tokens, just enough of them to reach p."""
    kept, reached = set(), 0.0
    likely = sorted(enumerate(softmax(SCORES, temperature=temperature)), key=lambda pair: -pair[1])
    for token, probability in likely:
        if reached >= p:
            break
        kept.add(token)
        reached += probability
    return kept


@pytest.mark.parametrize("p", [1e-6, 0.4, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_top_p(p, temperature):
    kept = nucleus(p, temperature)
    assert_shares(Sampling(top_p=p, temperature=temperature), softmax(SCORES, temperature=temperature, only=kept))


def test_top_p_keeps_what_the_textbook_example_keeps():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    found = shares(Sampling(top_p=0.8), [math.log(p) for p in probabilities])
    assert found == pytest.approx([0.625, 0.375, 0, 0], abs=1e-3)


@pytest.mark.parametrize("least", [0.0, 0.1, 0.25, 1.0])
def test_min_p(least):
    probabilities = softmax(SCORES)
    kept = {token for token, p in enumerate(probabilities) if p >= least * max(probabilities)}
    assert_shares(Sampling(min_p=least), softmax(SCORES, only=kept))


def test_rules_together():
    kept = {2, 3, 0, 5}  # the four likeliest; together with top_p 0.75 the first two of them
    assert_shares(Sampling(top_k=4, min_p=0.01), softmax(SCORES, only=kept))
    assert_shares(Sampling(top_k=4, top_p=0.75), softmax(SCORES, only={2, 3}))


def test_what_is_ruled_out_never_comes():
    scores = [1.0, float("-inf"), 0.0, float("-inf")]
    for how in (Sampling(), Sampling(top_p=0.999), Sampling(top_k=3), Sampling(min_p=0.0)):
        for luck in (0.0, 0.5, 1 - 2**-24):
            assert choose(torch.tensor([scores]), how, draws=torch.tensor([luck])).item() in (0, 2)


def test_rows_do_not_disturb_each_other():
    scores = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    luck = torch.rand(5, generator=torch.Generator().manual_seed(1))
    for how in (Sampling(), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(min_p=0.2)):
        together = choose(scores, how, draws=luck).tolist()
        assert together == [choose(scores[i : i + 1], how, draws=luck[i : i + 1]).item() for i in range(5)]


def test_the_repetition_penalty_weakens_what_was_seen_whatever_its_sign():
    seen = torch.tensor([[True, True, False]])
    weaker = penalize_repetition(torch.tensor([[3.0, -1.0, 2.0]]), seen, 2.0)
    assert weaker.tolist() == [[1.5, -2.0, 2.0]]
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert choose(torch.tensor([[3.0, -1.0, 2.0]]), greedy, in_text=seen).item() == 2
    assert choose(torch.tensor([[3.0, -1.0, 2.0]]), greedy, in_text=~seen).item() == 0


def test_wrong_settings_are_named_all_at_once():
    with pytest.raises(ConfigError) as wrong:
        Sampling(temperature=-1.0, top_k=0, top_p=1.5, min_p=-0.1, repetition_penalty=0.0)
    assert [where for where, _ in wrong.value.problems] == [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
    ]
    assert "-1.0" in str(wrong.value)
    for setting in ({"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"min_p": 1.01}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            Sampling(**setting)
