"""Beam search against its definition: all sequences, one by one, and greedy decoding."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headstock.decoding.beam_search import Hypothesis, beam_search
from headstock.decoding.generate import generate
from headstock.decoding.sampling import Sampling
from headstock.errors import ConfigError, UserError
from headstock.model.backbone import Backbone
from headstock.model.batch import Batch, Output
from headstock.model.model import Model
from tests.model.small import small_model, stir
from tests.model.test_encoder_decoder import small_translator

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5]]
SOURCES = [[2, 7], [1, 8, 2, 8, 1, 8], [2], [8, 4, 5, 9]]
PENALTIES = st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0])
FAMILIES = st.sampled_from(["causal", "seq2seq"])


def any_model(family: str, seed: int = 0, **shape: Any) -> tuple[Model, dict[str, Any]]:
    """A model of either family whose choices are far from even, and the sources that go with PROMPTS."""
    model = small_model(seed, **shape) if family == "causal" else small_translator(seed, **shape)
    stir(model, seed=seed + 1)
    return model, {} if family == "causal" else {"sources": SOURCES}


@torch.inference_mode()
def likelihood(model: Model, prompt: list[int], tokens: list[int], source: list[int] | None = None) -> float:
    """The log-probability of tokens after a prompt, by reading all of it at once."""
    text = torch.tensor([prompt + tokens])
    beside = None if source is None else Batch(torch.tensor([source]))
    scores = model.heads["token"](model(Batch(text, source=beside)).hidden[0]).log_softmax(-1)
    return sum(float(scores[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens))


def everything(model: Model, prompt: list[int], source: list[int] | None, *, end: int, longest: int, penalty: float):
    """Every sequence there is with its score, the best first: it ends by the mark, or because it is long enough."""
    others = [token for token in range(model.backbone.config.vocabulary) if token != end]
    found = []
    for length in range(longest + 1):
        for tokens in product(others, repeat=length):
            marked = [*tokens, end] if length < longest else list(tokens)
            score = likelihood(model, prompt, marked, source) / len(marked) ** penalty
            found.append(Hypothesis(list(tokens), score, "end" if length < longest else "length"))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def same(one: list[Hypothesis], other: list[Hypothesis]) -> bool:
    return [(h.tokens, h.ended) for h in one] == [(h.tokens, h.ended) for h in other] and all(
        math.isclose(mine.score, theirs.score, abs_tol=1e-4) for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("family", "seed"), [*(("causal", seed) for seed in range(6)), ("seq2seq", 0), ("seq2seq", 1)])
def test_with_room_for_every_prefix_it_finds_the_best_of_all(family, seed, penalty):
    model, _ = any_model(family, seed, vocabulary=4, context=8)
    prompts, sources = [[1, 2], [3]], None if family == "causal" else [[2, 1, 1], [0, 3]]
    options = {"max_tokens": 3, "end": 0, "length_penalty": penalty, "sources": sources}
    found = beam_search(model, prompts, beams=4**3, **options)
    few = beam_search(model, prompts, beams=2, **options)
    for place, prompt in enumerate(prompts):
        source = None if sources is None else sources[place]
        best = everything(model, prompt, source, end=0, longest=3, penalty=penalty)
        assert same(found[place][:1], best[:1])
        told = {tuple(h.tokens): h.score for h in best if h.ended == "end" or len(h.tokens) == 3}
        for hypothesis in (*found[place], *few[place]):  # whatever else was found has the score it says
            assert hypothesis.score == pytest.approx(told[tuple(hypothesis.tokens)], abs=1e-4)
        scores = [hypothesis.score for hypothesis in found[place]]
        assert scores == sorted(scores, reverse=True)
        assert len(few[place]) <= 2


@given(family=FAMILIES, seed=st.integers(0, 50), penalty=PENALTIES)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_one_beam_is_greedy(family, seed, penalty):
    model, beside = any_model(family, seed)
    found = beam_search(
        model, PROMPTS, beams=1, max_tokens=9, end=4, length_penalty=penalty, suppress_tokens=[7], **beside
    )
    greedy = generate(model, PROMPTS, max_tokens=9, end=4, sampling=GREEDY, suppress_tokens=[7], **beside)
    assert [[(h.tokens, h.ended) for h in row] for row in found] == [[(c.tokens, c.ended)] for c in greedy]


@given(
    family=FAMILIES,
    seed=st.integers(0, 200),
    beams=st.integers(2, 6),
    penalty=PENALTIES,
    no_repeat=st.sampled_from([0, 0, 1, 2]),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_more_beams_are_never_worse_than_greedy(family, seed, beams, penalty, no_repeat):
    model, beside = any_model(family, seed)
    options = {"max_tokens": 10, "end": 4, "length_penalty": penalty, "no_repeat": no_repeat, **beside}
    greedy = beam_search(model, PROMPTS, beams=1, **options)
    for one, many in zip(greedy, beam_search(model, PROMPTS, beams=beams, **options), strict=True):
        assert many[0].score >= one[0].score - 1e-5


def test_more_beams_are_often_better_than_greedy():
    better = 0
    for seed in range(10):
        model, _ = any_model("causal", seed)
        one, many = (beam_search(model, PROMPTS, beams=beams, max_tokens=8, end=4) for beams in (1, 4))
        better += sum(b[0].score > a[0].score + 1e-4 for a, b in zip(one, many, strict=True))
    assert better > 15  # of 40


@given(
    family=FAMILIES,
    positions=st.sampled_from(["sinusoidal", "learned", "rotary"]),
    seed=st.integers(0, 50),
    beams=st.integers(1, 5),
    no_repeat=st.integers(0, 3),
    penalty=PENALTIES,
    end=st.sampled_from([None, 4, 8]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_neighbours_change_nothing(family, positions, seed, beams, no_repeat, penalty, end):
    model, beside = any_model(family, seed, positions=positions)
    options = {"beams": beams, "max_tokens": 8, "end": end, "length_penalty": penalty, "no_repeat": no_repeat}
    together = beam_search(model, PROMPTS, **options, **beside)
    for place, found in enumerate(together):
        own = {name: rows[place : place + 1] for name, rows in beside.items()}
        assert same(found, beam_search(model, PROMPTS[place : place + 1], **options, **own)[0])
        assert 1 <= len(found) <= beams
        assert len({tuple(h.tokens) + ((end,) if h.ended == "end" else ()) for h in found}) == len(found)
        for hypothesis in found:  # the score is the model's own, whichever rows it went through
            tokens = [*hypothesis.tokens, *([end] if hypothesis.ended == "end" else [])]
            source = beside["sources"][place] if beside else None
            told = likelihood(model, PROMPTS[place], tokens, source) / max(1, len(tokens)) ** penalty
            assert hypothesis.score == pytest.approx(told, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sequence_comes_twice(beams, size):
    model, _ = any_model("causal", seed=2, context=32)

    def again(prompt: list[int], tokens: list[int]) -> bool:
        text = prompt + tokens
        grams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
        first = max(0, len(prompt) - size + 1)  # what repeats inside the prompt is not the search's doing
        return any(gram in grams[:at] for at, gram in enumerate(grams) if at >= first)

    options = {"beams": beams, "max_tokens": 20, "end": None}
    free, held = (beam_search(model, PROMPTS, **options, no_repeat=n) for n in (0, size))
    assert any(again(prompt, row[0].tokens) for prompt, row in zip(PROMPTS, free, strict=True))
    for prompt, row in zip(PROMPTS, held, strict=True):
        assert not any(again(prompt, hypothesis.tokens) for hypothesis in row)
    if size == 1:  # when all of the vocabulary was said, nothing is left to say
        assert [len(row[0].tokens) + len(set(prompt)) for prompt, row in zip(PROMPTS, held, strict=True)] == [13] * 4


def test_an_end_mark_may_come_though_the_prompt_has_it():
    model, _ = any_model("causal", vocabulary=4)
    found = beam_search(model, [[0, 1]], beams=64, max_tokens=3, end=0, no_repeat=1, length_penalty=9.0)[0]
    assert {tuple(h.tokens) for h in found if h.ended == "end"} == {(), (2,), (3,), (2, 3), (3, 2)}


def test_forbidden_tokens_never_come():
    model, _ = any_model("causal")
    free = beam_search(model, PROMPTS, beams=4, max_tokens=10, end=None)
    forbidden = sorted({token for row in free for h in row for token in h.tokens})[:5]
    held = beam_search(model, PROMPTS, beams=4, max_tokens=10, end=None, suppress_tokens=forbidden)
    assert not {token for row in held for h in row for token in h.tokens} & set(forbidden)
    assert all(len(h.tokens) == 10 for row in held for h in row)


def test_a_continuation_ends_with_the_context():
    model, _ = any_model("causal", context=8)
    found = beam_search(model, PROMPTS, beams=3, max_tokens=50, end=None)
    assert [{len(h.tokens) for h in row} for row in found] == [{6}, {8}, {4}, {7}]  # the last token is not read
    with pytest.raises(UserError, match="a prompt of 9 tokens does not fit into the model's context of 8"):
        beam_search(model, [[1], [2] * 9], beams=3, max_tokens=5, end=None)


def test_a_row_stops_when_nothing_can_beat_what_it_has():
    """Without a penalty a sum of log-probabilities only falls, so that an end that leads stays ahead."""
    steps = {0.0: 0, 1.0: 0}
    for seed, prompt, penalty in product(range(6), PROMPTS, steps):
        calls: list[int] = []
        model, _ = any_model("causal", seed)
        model.backbone.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        beam_search(model, [prompt], beams=4, max_tokens=11, end=4, length_penalty=penalty)
        steps[penalty] += len(calls)
    assert steps[0.0] < 0.8 * steps[1.0] < 0.8 * 6 * 4 * 11


@dataclass
class Count:
    """A state that is nothing but how much was read."""

    lengths: Tensor

    def select(self, rows: Tensor) -> "Count":
        return Count(self.lengths[rows])


class Pairs(Backbone):
    """Sees one token only, so that its head is a table: how likely each token is after each."""

    causal, context, width, depth = True, None, 3, 0

    def forward(self, batch, state=None, *, keep_layers=False):
        read = Count(state.lengths + batch.tokens.size(1))
        return Output(nn.functional.one_hot(batch.tokens, 3).float(), state=read)

    def stages(self):
        return []

    def new_state(self, rows, capacity):
        return Count(torch.zeros(rows))


@pytest.mark.parametrize(
    ("now", "later", "penalty", "best", "steps"),
    [
        # the end leads by far, yet what is to come is so sure that its mean wins after many tokens
        (0.9, [1e-9, 1e-6, 1.0], 1.0, [2] * 40, 40),
        (0.9, [1e-9, 1e-6, 1.0], 0.0, [], 1),
        # a penalty that punishes length: one more token is worth it, many more would not be
        (0.3, [1.0, 1e-9, 1e-6], -0.5, [2], 2),
        (0.6, [1.0, 1e-9, 1e-6], -0.5, [], 1),
    ],
)
def test_it_waits_for_what_can_still_win_and_no_longer(now, later, penalty, best, steps):
    """Token 0 ends; after 1 it comes with probability `now`, otherwise 2 does; `later` are the three after a 2."""
    table = torch.tensor([[0.5, 1e-9, 0.5], [now, 1e-9, 1 - now], later]).log()
    head = nn.Linear(3, 3, bias=False)
    head.weight.data = table.T
    model, calls = Model(Pairs(), {"token": head}), []
    head.register_forward_hook(lambda *_: calls.append(1))
    (found,) = beam_search(model, [[1]], beams=2, max_tokens=40, end=0, length_penalty=penalty)
    assert found[0].tokens == best
    assert len(calls) == steps


def test_a_greater_penalty_favours_length():
    lengths = []
    for penalty in (0.0, 1.0, 3.0):
        made = [
            beam_search(any_model("causal", seed)[0], PROMPTS, beams=4, max_tokens=10, end=4, length_penalty=penalty)
            for seed in range(8)
        ]
        lengths.append(sum(len(row[0].tokens) for rows in made for row in rows))
    assert lengths[0] < lengths[1] < lengths[2]


def test_wrong_calls_and_empty_ones():
    model = small_model()
    with pytest.raises(ConfigError) as wrong:
        beam_search(model, PROMPTS, beams=0, max_tokens=3, end=None, length_penalty=math.nan, no_repeat=-1)
    assert [name for name, _ in wrong.value.problems] == ["beams", "length_penalty", "no_repeat"]
    assert beam_search(model, [], beams=2, max_tokens=3, end=None) == []
    assert beam_search(model, [[1], [2]], beams=2, max_tokens=0, end=None) == [[Hypothesis([], 0.0)]] * 2
    with pytest.raises(ValueError, match="at least one token"):
        beam_search(model, [[]], beams=2, max_tokens=3, end=None)
    with pytest.raises(ValueError, match="needs a source for every prompt"):
        beam_search(small_translator(), PROMPTS, beams=2, max_tokens=3, end=None)
