"""Generation does not depend on the cache, the batch or when rows are checked; windows slide past the context."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.decoding import generate as generation
from headstock.decoding.beam_search import beam_search
from headstock.decoding.generate import Continuation, generate
from headstock.decoding.sampling import Sampling
from headstock.model.batch import Batch
from tests.model.small import small_model, some_tokens

GREEDY = Sampling(temperature=0.0)
PROMPTS = [some_tokens(n, seed=n).tolist() for n in (3, 7, 1, 5)]
SEEDS = [11, 12, 13, 14]


def one_by_one(model, prompts, *, seeds=None, **options) -> list[Continuation]:
    return [
        generate(model, [prompt], seeds=None if seeds is None else [seeds[i]], **options)[0]
        for i, prompt in enumerate(prompts)
    ]


def greedy_reference(model, prompt: list[int], new: int) -> list[int]:
    """Greedy decoding without a cache, for texts that fit the context."""
    text = list(prompt)
    for _ in range(new):
        hidden = model(Batch(torch.tensor([text]))).hidden[0, -1]
        text.append(int(model.heads["token"](hidden).argmax()))
    return text[len(prompt) :]


samplings = st.sampled_from(
    [
        GREEDY,
        Sampling(),
        Sampling(top_k=4, temperature=1.5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1, repetition_penalty=1.3),
        Sampling(temperature=0.0, repetition_penalty=1.5),
    ]
)


def test_greedy_matches_its_definition():
    model = small_model()
    continuations = generate(model, PROMPTS, max_tokens=8, sampling=GREEDY)
    assert [c.tokens for c in continuations] == [greedy_reference(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(c.tokens) for c in continuations}) == 4
    assert all(len(set(c.tokens)) > 1 for c in continuations)
    assert all(c.ended == "length" for c in continuations)


@given(
    sampling=samplings,
    positions=st.sampled_from(["sinusoidal", "learned", "rotary"]),
    norm=st.sampled_from(["pre", "post"]),
    context=st.sampled_from([6, 9, 64]),
    end=st.sampled_from([None, 2, 5]),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_texts_do_not_depend_on_cache_or_batch(sampling, positions, norm, context, end):
    """With rows of different lengths, of which some end early and some exceed the context."""
    model = small_model(positions=positions, norm=norm, context=context)
    options = {"max_tokens": 14, "sampling": sampling, "end": end, "seeds": SEEDS}
    continuations = generate(model, PROMPTS, **options)
    assert continuations == generate(model, PROMPTS, cache=False, **options)
    assert continuations == one_by_one(model, PROMPTS, **options)


def test_rows_end_independently():
    model = small_model()
    unlimited = [c.tokens for c in generate(model, PROMPTS, max_tokens=12, sampling=Sampling(), seeds=SEEDS)]
    end = next(token for token in range(13) if 0 < sum(token in tokens for tokens in unlimited) < 4)
    continuations = generate(model, PROMPTS, max_tokens=12, sampling=Sampling(), seeds=SEEDS, end=end)
    for continuation, tokens in zip(continuations, unlimited, strict=True):
        if end in tokens:
            assert continuation.tokens == tokens[: tokens.index(end)]
            assert continuation.ended == "end"
        else:
            assert continuation.tokens == tokens
            assert continuation.ended == "length"


def test_stop_ends_a_row():
    model = small_model()
    unlimited = [c.tokens for c in generate(model, PROMPTS, max_tokens=9, sampling=GREEDY)]
    calls: list[tuple[int, int]] = []

    def stop(row: int, tokens: list[int]) -> bool:
        calls.append((row, tokens[-1]))
        return len(tokens) == 2 * row + 1

    continuations = generate(model, PROMPTS, max_tokens=9, sampling=GREEDY, stop=stop)
    assert [c.tokens for c in continuations] == [tokens[: 2 * row + 1] for row, tokens in enumerate(unlimited)]
    assert [c.ended for c in continuations] == ["stop"] * 4
    for row, continuation in enumerate(continuations):
        assert [token for index, token in calls if index == row] == continuation.tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_suppressed_tokens_are_never_generated(sampling):
    model = small_model()
    unlimited = generate(model, PROMPTS, max_tokens=10, sampling=sampling, seeds=SEEDS)
    suppressed = sorted({token for c in unlimited for token in c.tokens})[:5]
    continuations = generate(model, PROMPTS, max_tokens=10, sampling=sampling, seeds=SEEDS, suppress_tokens=suppressed)
    assert not {token for c in continuations for token in c.tokens} & set(suppressed)
    assert all(len(c.tokens) == 10 for c in continuations)


def test_empty_and_invalid_calls():
    assert generate(small_model(), PROMPTS, max_tokens=0, sampling=GREEDY) == [Continuation()] * 4
    assert generate(small_model(), [], max_tokens=3, sampling=GREEDY) == []
    with pytest.raises(ValueError, match="at least one token"):
        generate(small_model(), [[1], []], max_tokens=3, sampling=GREEDY)


@pytest.mark.parametrize("cache", [True, False])
def test_slid_reports_a_dropped_beginning(cache):
    model = small_model(context=8)
    options = {"sampling": GREEDY, "cache": cache}
    assert not generate(model, [[1, 2, 3]], max_tokens=5, **options)[0].slid
    # the ninth token came from the first eight
    assert not generate(model, [[1, 2, 3]], max_tokens=6, **options)[0].slid
    assert generate(model, [[1, 2, 3]], max_tokens=7, **options)[0].slid
    assert generate(model, [list(range(9))], max_tokens=1, **options)[0].slid
    assert [c.slid for c in generate(model, [[1], [2] * 8], max_tokens=4, **options)] == [False, True]


def test_window_is_a_suffix_past_the_context():
    """The next token is that of the last half to full context alone."""
    model = small_model(context=8)
    prompt = some_tokens(13, seed=5).tolist()  # one whose next token depends on the window
    tokens = generate(model, [prompt], max_tokens=1, sampling=GREEDY)[0].tokens
    lengths = [length for length in range(4, 9) if greedy_reference(model, prompt[-length:], 1) == tokens]
    assert lengths == [5]  # thirteen tokens slide by four twice


def test_texts_depend_on_their_seeds():
    model = small_model()
    options = {"max_tokens": 12, "sampling": Sampling()}
    continuations = generate(model, PROMPTS, seeds=SEEDS, **options)
    assert continuations == generate(model, PROMPTS, seeds=SEEDS, **options)
    assert continuations != generate(model, PROMPTS, seeds=[seed + 1 for seed in SEEDS], **options)
    torch.manual_seed(99)
    torch.rand(1)
    assert continuations == generate(model, PROMPTS, seeds=SEEDS, **options)  # the global generator has no effect
    same_prompt = generate(model, [[1, 2]] * 2, seeds=[7, 8], **options)
    assert same_prompt[0].tokens != same_prompt[1].tokens
    with pytest.raises(ValueError, match="shorter"):
        generate(model, PROMPTS, seeds=[1], **options)


def test_repetition_penalty_breaks_a_loop():
    model = small_model()
    loop = generate(model, [[4]], max_tokens=12, sampling=GREEDY)[0].tokens
    penalized = generate(model, [[4]], max_tokens=12, sampling=Sampling(temperature=0.0, repetition_penalty=50.0))[
        0
    ].tokens
    assert len(set(penalized)) > len(set(loop)) + 2


def test_prompt_is_not_modified():
    prompt = [1, 2, 3]
    generate(small_model(), [prompt], max_tokens=3, sampling=GREEDY)
    assert prompt == [1, 2, 3]


MORE_PROMPTS = [some_tokens(1 + n % 6, seed=n).tolist() for n in range(13)]


def make_static(backbone, state, steps):
    """Makes the state static, as before capture on a GPU."""
    return state is not None and state.make_static()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("positions", "sampling"), [("learned", GREEDY), ("rotary", Sampling(repetition_penalty=1.3))])
def test_texts_do_not_depend_on_steps_per_check(monkeypatch, captured, positions, sampling):
    """Rows end at different times and some slide between two checks."""
    model = small_model(positions=positions, context=11)
    options = {"max_tokens": 40, "sampling": sampling, "seeds": list(range(13))}
    unlimited = [c.tokens for c in generate(model, MORE_PROMPTS, **options)]
    end_steps = {token: {row.index(token) for row in unlimited if token in row} for row in unlimited for token in row}
    # the token that ends rows at most different times
    options["end"] = max(end_steps, key=lambda token: len(end_steps[token]))
    expected = generate(model, MORE_PROMPTS, **options)
    single = one_by_one(model, MORE_PROMPTS, **options)
    assert [c.tokens for c in expected] == [c.tokens for c in single]
    monkeypatch.setattr(generation, "STEPS_PER_CHECK", {})
    if captured:
        monkeypatch.setattr(generation, "can_capture", make_static)
        monkeypatch.setattr(generation, "capture_step", lambda step, tokens: step)
    assert generate(model, MORE_PROMPTS, **options) == expected
    assert len({len(c.tokens) for c in expected}) > 3
    assert any(c.slid for c in expected)


def test_finished_rows_are_removed(monkeypatch):
    """Rows stop at different lengths; finished ones are removed once they are a quarter."""
    model, batch_sizes = small_model(context=40), []
    decode_step = generation._Decoder.decode_step
    monkeypatch.setattr(
        generation._Decoder,
        "decode_step",
        lambda self, tokens: batch_sizes.append(len(tokens)) or decode_step(self, tokens),
    )
    continuations = generate(
        model, MORE_PROMPTS[:12], max_tokens=30, sampling=GREEDY, stop=lambda row, tokens: len(tokens) == 1 + 2 * row
    )
    assert [len(c.tokens) for c in continuations] == [1 + 2 * row for row in range(12)]
    active_rows = [sum(1 + 2 * row > step for row in range(12)) for step in range(1, 23)]
    assert len(batch_sizes) == len(active_rows)
    assert all(active <= size < 4 / 3 * active + 1 for size, active in zip(batch_sizes, active_rows, strict=True))


@pytest.mark.parametrize("prompts", [[[1, 2], [3, 4]], [[1, 2], [3, 4, 5]]])
def test_autocast(prompts):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        continuations = generate(small_model(), prompts, max_tokens=4, sampling=Sampling(temperature=0.0))
        hypotheses = beam_search(small_model(), prompts, beams=2, max_tokens=4, end=None)
    assert [len(row.tokens) for row in continuations] == [4, 4] and len(hypotheses) == 2
