"""Beam search against exhaustive search and greedy decoding."""

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
    """A model with uneven probabilities, and the sources of PROMPTS for an encoder-decoder."""
    model = small_model(seed, **shape) if family == "causal" else small_translator(seed, **shape)
    stir(model, seed=seed + 1)
    return model, {} if family == "causal" else {"sources": SOURCES}


@torch.inference_mode()
def likelihoods(
    model: Model, prompt: list[int], continuations: list[list[int]], source: list[int] | None = None
) -> list[float]:
    """The log-probabilities of continuations of one length after a prompt, in one forward pass."""
    text = torch.tensor([prompt + tokens for tokens in continuations])
    source_options = None if source is None else Batch(torch.tensor([source] * len(continuations)))
    scores = model.heads["token"](model(Batch(text, source=source_options)).hidden).log_softmax(-1)
    continued = scores[:, len(prompt) - 1 : -1].gather(2, text[:, len(prompt) :, None])
    return continued.sum((1, 2)).tolist()


def likelihood(model: Model, prompt: list[int], tokens: list[int], source: list[int] | None = None) -> float:
    return likelihoods(model, prompt, [tokens], source)[0]


def all_continuations(
    model: Model, prompt: list[int], source: list[int] | None, *, end: int, limit: int
) -> list[tuple[list[int], str, float]]:
    """Every possible continuation, how it ends, with EOS or at the limit, and its log-probability."""
    others = [token for token in range(model.backbone.config.vocabulary) if token != end]
    continuations = []
    for length in range(limit + 1):
        ending, ended = ([end], "end") if length < limit else ([], "length")
        texts = [list(tokens) for tokens in product(others, repeat=length)]
        totals = likelihoods(model, prompt, [text + ending for text in texts], source)
        continuations += [(tokens, ended, total) for tokens, total in zip(texts, totals, strict=True)]
    return continuations


def ranked(continuations: list[tuple[list[int], str, float]], penalty: float) -> list[Hypothesis]:
    """The continuations with their scores, best first."""
    hypotheses = [
        Hypothesis(tokens, total / (len(tokens) + (ended == "end")) ** penalty, ended)
        for tokens, ended, total in continuations
    ]
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def is_same(actual: list[Hypothesis], expected: list[Hypothesis]) -> bool:
    return [(h.tokens, h.ended) for h in actual] == [(h.tokens, h.ended) for h in expected] and all(
        math.isclose(ours.score, theirs.score, abs_tol=1e-4) for ours, theirs in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize(("family", "seed"), [*(("causal", seed) for seed in range(6)), ("seq2seq", 0), ("seq2seq", 1)])
def test_wide_beam_matches_exhaustive_search(family, seed):
    model, _ = any_model(family, seed, vocabulary=4, context=8)
    prompts, sources = [[1, 2], [3]], None if family == "causal" else [[2, 1, 1], [0, 3]]
    rows = list(zip(prompts, sources or [None, None], strict=True))
    continuations = [all_continuations(model, *row, end=0, limit=3) for row in rows]
    for penalty in (-0.5, 0.0, 0.6, 1.0, 2.0):
        options = {"max_tokens": 3, "end": 0, "length_penalty": penalty, "sources": sources}
        wide = beam_search(model, prompts, beams=4**3, **options)
        narrow = beam_search(model, prompts, beams=2, **options)
        for index in range(len(prompts)):
            check_beams(wide[index], narrow[index], ranked(continuations[index], penalty))


def check_beams(wide: list[Hypothesis], narrow: list[Hypothesis], best: list[Hypothesis]) -> None:
    """The widest beam finds the best of all continuations, and all scores are correct."""
    assert is_same(wide[:1], best[:1])
    scores_by_tokens = {tuple(h.tokens): h.score for h in best if h.ended == "end" or len(h.tokens) == 3}
    for hypothesis in (*wide, *narrow):
        assert hypothesis.score == pytest.approx(scores_by_tokens[tuple(hypothesis.tokens)], abs=1e-4)
    scores = [hypothesis.score for hypothesis in wide]
    assert scores == sorted(scores, reverse=True)
    assert len(narrow) <= 2


@given(family=FAMILIES, seed=st.integers(0, 50), penalty=PENALTIES)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_one_beam_is_greedy(family, seed, penalty):
    model, source_options = any_model(family, seed)
    results = beam_search(
        model, PROMPTS, beams=1, max_tokens=9, end=4, length_penalty=penalty, suppress_tokens=[7], **source_options
    )
    greedy = generate(model, PROMPTS, max_tokens=9, end=4, sampling=GREEDY, suppress_tokens=[7], **source_options)
    assert [[(h.tokens, h.ended) for h in row] for row in results] == [[(c.tokens, c.ended)] for c in greedy]


@given(
    family=FAMILIES,
    seed=st.integers(0, 200),
    beams=st.integers(2, 6),
    penalty=PENALTIES,
    no_repeat=st.sampled_from([0, 0, 1, 2]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_more_beams_are_never_worse_than_greedy(family, seed, beams, penalty, no_repeat):
    model, source_options = any_model(family, seed)
    options = {"max_tokens": 10, "end": 4, "length_penalty": penalty, "no_repeat": no_repeat, **source_options}
    greedy = beam_search(model, PROMPTS, beams=1, **options)
    for greedy_row, beam_row in zip(greedy, beam_search(model, PROMPTS, beams=beams, **options), strict=True):
        assert beam_row[0].score >= greedy_row[0].score - 1e-5


def test_more_beams_are_often_better_than_greedy():
    better = 0
    for seed in range(10):
        model, _ = any_model("causal", seed)
        greedy, wide = (beam_search(model, PROMPTS, beams=beams, max_tokens=8, end=4) for beams in (1, 4))
        better += sum(b[0].score > a[0].score + 1e-4 for a, b in zip(greedy, wide, strict=True))
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
@settings(max_examples=10, deadline=None, derandomize=True)
def test_results_do_not_depend_on_the_batch(family, positions, seed, beams, no_repeat, penalty, end):
    model, source_options = any_model(family, seed, positions=positions)
    options = {"beams": beams, "max_tokens": 8, "end": end, "length_penalty": penalty, "no_repeat": no_repeat}
    results = beam_search(model, PROMPTS, **options, **source_options)
    for index, hypotheses in enumerate(results):
        own_source = {name: rows[index : index + 1] for name, rows in source_options.items()}
        assert is_same(hypotheses, beam_search(model, PROMPTS[index : index + 1], **options, **own_source)[0])
        assert 1 <= len(hypotheses) <= beams
        assert len({tuple(h.tokens) + ((end,) if h.ended == "end" else ()) for h in hypotheses}) == len(hypotheses)
        for hypothesis in hypotheses:
            tokens = [*hypothesis.tokens, *([end] if hypothesis.ended == "end" else [])]
            source = source_options["sources"][index] if source_options else None
            expected = likelihood(model, PROMPTS[index], tokens, source) / max(1, len(tokens)) ** penalty
            assert hypothesis.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ngrams_do_not_repeat(beams, size):
    model, _ = any_model("causal", seed=2, context=32)

    def repeats(prompt: list[int], tokens: list[int]) -> bool:
        text = prompt + tokens
        ngrams = [tuple(text[index : index + size]) for index in range(len(text) - size + 1)]
        first = max(0, len(prompt) - size + 1)  # repetitions inside the prompt are allowed
        return any(gram in ngrams[:index] for index, gram in enumerate(ngrams) if index >= first)

    options = {"beams": beams, "max_tokens": 20, "end": None}
    unlimited, limited = (beam_search(model, PROMPTS, **options, no_repeat=n) for n in (0, size))
    assert any(repeats(prompt, row[0].tokens) for prompt, row in zip(PROMPTS, unlimited, strict=True))
    for prompt, row in zip(PROMPTS, limited, strict=True):
        assert not any(repeats(prompt, hypothesis.tokens) for hypothesis in row)
    if size == 1:  # the text ends when every token was used
        assert [len(row[0].tokens) + len(set(prompt)) for prompt, row in zip(PROMPTS, limited, strict=True)] == [13] * 4


def test_eos_is_allowed_although_the_prompt_contains_it():
    model, _ = any_model("causal", vocabulary=4)
    hypotheses = beam_search(model, [[0, 1]], beams=64, max_tokens=3, end=0, no_repeat=1, length_penalty=9.0)[0]
    assert {tuple(h.tokens) for h in hypotheses if h.ended == "end"} == {(), (2,), (3,), (2, 3), (3, 2)}


def test_suppressed_tokens_are_never_generated():
    model, _ = any_model("causal")
    unlimited = beam_search(model, PROMPTS, beams=4, max_tokens=10, end=None)
    suppressed = sorted({token for row in unlimited for h in row for token in h.tokens})[:5]
    limited = beam_search(model, PROMPTS, beams=4, max_tokens=10, end=None, suppress_tokens=suppressed)
    assert not {token for row in limited for h in row for token in h.tokens} & set(suppressed)
    assert all(len(h.tokens) == 10 for row in limited for h in row)


def test_continuations_end_with_the_context():
    model, _ = any_model("causal", context=8)
    results = beam_search(model, PROMPTS, beams=3, max_tokens=50, end=None)
    assert [{len(h.tokens) for h in row} for row in results] == [{6}, {8}, {4}, {7}]
    with pytest.raises(UserError, match="a prompt of 9 tokens does not fit into the model's context of 8"):
        beam_search(model, [[1], [2] * 9], beams=3, max_tokens=5, end=None)


def test_search_stops_when_nothing_can_improve():
    """Without a length penalty the log-probability only decreases, so that a leading finished hypothesis wins."""
    steps = {0.0: 0, 1.0: 0}
    for seed, prompt, penalty in product(range(4), PROMPTS, steps):
        calls: list[int] = []
        model, _ = any_model("causal", seed)
        model.backbone.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        beam_search(model, [prompt], beams=4, max_tokens=11, end=4, length_penalty=penalty)
        steps[penalty] += len(calls)
    assert steps[0.0] < 0.8 * steps[1.0] < 0.8 * 4 * 4 * 11


@dataclass
class Count:
    """A state that only counts tokens."""

    lengths: Tensor

    def select(self, rows: Tensor) -> "Count":
        return Count(self.lengths[rows])


class Pairs(Backbone):
    """A bigram model: the head is a table of log-probabilities."""

    causal, context, width, depth = True, None, 3, 0

    def forward(self, batch, state=None, *, keep_layers=False):
        read = Count(state.lengths + batch.tokens.size(1))
        return Output(nn.functional.one_hot(batch.tokens, 3).float(), state=read)

    def parameters_by_layer(self):
        return []

    def new_state(self, rows, capacity):
        return Count(torch.zeros(rows))


@pytest.mark.parametrize(
    ("eos_probability", "after_two", "penalty", "best", "steps"),
    [
        # EOS leads, but a certain continuation has a higher mean after many tokens
        (0.9, [1e-9, 1e-6, 1.0], 1.0, [2] * 40, 40),
        (0.9, [1e-9, 1e-6, 1.0], 0.0, [], 1),
        # a negative penalty: one more token is worth it, many are not
        (0.3, [1.0, 1e-9, 1e-6], -0.5, [2], 2),
        (0.6, [1.0, 1e-9, 1e-6], -0.5, [], 1),
    ],
)
def test_search_continues_while_a_hypothesis_can_win(eos_probability, after_two, penalty, best, steps):
    """Token 0 is EOS. `eos_probability` is that of EOS after token 1; `after_two` are the probabilities after 2."""
    table = torch.tensor([[0.5, 1e-9, 0.5], [eos_probability, 1e-9, 1 - eos_probability], after_two]).log()
    head = nn.Linear(3, 3, bias=False)
    head.weight.data = table.T
    model, calls = Model(Pairs(), {"token": head}), []
    head.register_forward_hook(lambda *_: calls.append(1))
    (hypotheses,) = beam_search(model, [[1]], beams=2, max_tokens=40, end=0, length_penalty=penalty)
    assert hypotheses[0].tokens == best
    assert len(calls) == steps


def test_higher_length_penalty_favours_longer_texts():
    lengths = []
    for penalty in (0.0, 1.0, 3.0):
        results = [
            beam_search(any_model("causal", seed)[0], PROMPTS, beams=4, max_tokens=10, end=4, length_penalty=penalty)
            for seed in range(8)
        ]
        lengths.append(sum(len(row[0].tokens) for rows in results for row in rows))
    assert lengths[0] < lengths[1] < lengths[2]


def test_invalid_and_empty_calls():
    model = small_model()
    with pytest.raises(ConfigError) as error:
        beam_search(model, PROMPTS, beams=0, max_tokens=3, end=None, length_penalty=math.nan, no_repeat=-1)
    assert [name for name, _ in error.value.problems] == ["beams", "length_penalty", "no_repeat"]
    assert beam_search(model, [], beams=2, max_tokens=3, end=None) == []
    assert beam_search(model, [[1], [2]], beams=2, max_tokens=0, end=None) == [[Hypothesis([], 0.0)]] * 2
    with pytest.raises(ValueError, match="at least one token"):
        beam_search(model, [[]], beams=2, max_tokens=3, end=None)
    with pytest.raises(ValueError, match="needs a source for every prompt"):
        beam_search(small_translator(), PROMPTS, beams=2, max_tokens=3, end=None)
