"""Generation: the cache, the batch and the sliding window change nothing but the time it takes."""

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


def first_principles(model, prompt: list[int], new: int) -> list[int]:
    """Greedy by its definition, for texts that fit the context."""
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


def test_greedy_by_its_definition():
    model = small_model()
    made = generate(model, PROMPTS, max_tokens=8, sampling=GREEDY)
    assert [c.tokens for c in made] == [first_principles(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(c.tokens) for c in made}) == 4  # the prompts matter
    assert all(len(set(c.tokens)) > 1 for c in made)  # and it is no mere repetition
    assert all(c.ended == "length" for c in made)


@given(
    sampling=samplings,
    positions=st.sampled_from(["sinusoidal", "learned", "rotary"]),
    norm=st.sampled_from(["pre", "post"]),
    context=st.sampled_from([6, 9, 64]),
    end=st.sampled_from([None, 2, 5]),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_neither_cache_nor_neighbours_change_a_text(sampling, positions, norm, context, end):
    """Rows of different lengths, some ending early, some outgrowing the context while others do not."""
    model = small_model(positions=positions, norm=norm, context=context)
    options = {"max_tokens": 14, "sampling": sampling, "end": end, "seeds": SEEDS}
    together = generate(model, PROMPTS, **options)
    assert together == generate(model, PROMPTS, cache=False, **options)
    assert together == one_by_one(model, PROMPTS, **options)


def test_rows_end_at_their_own_time():
    model = small_model()
    free = [c.tokens for c in generate(model, PROMPTS, max_tokens=12, sampling=Sampling(), seeds=SEEDS)]
    end = next(token for token in range(13) if 0 < sum(token in tokens for tokens in free) < 4)
    made = generate(model, PROMPTS, max_tokens=12, sampling=Sampling(), seeds=SEEDS, end=end)
    for continuation, tokens in zip(made, free, strict=True):
        if end in tokens:
            assert continuation.tokens == tokens[: tokens.index(end)]
            assert continuation.ended == "end"
        else:
            assert continuation.tokens == tokens
            assert continuation.ended == "length"


def test_a_stop_rule_ends_a_row_and_its_last_token_stays():
    model = small_model()
    free = [c.tokens for c in generate(model, PROMPTS, max_tokens=9, sampling=GREEDY)]
    calls: list[tuple[int, int]] = []

    def stop(row: int, tokens: list[int]) -> bool:
        calls.append((row, tokens[-1]))
        return len(tokens) == 2 * row + 1

    made = generate(model, PROMPTS, max_tokens=9, sampling=GREEDY, stop=stop)
    assert [c.tokens for c in made] == [tokens[: 2 * row + 1] for row, tokens in enumerate(free)]
    assert [c.ended for c in made] == ["stop"] * 4
    for row, continuation in enumerate(made):
        assert [token for index, token in calls if index == row] == continuation.tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_forbidden_tokens_never_come(sampling):
    model = small_model()
    free = generate(model, PROMPTS, max_tokens=10, sampling=sampling, seeds=SEEDS)
    forbidden = sorted({token for c in free for token in c.tokens})[:5]
    made = generate(model, PROMPTS, max_tokens=10, sampling=sampling, seeds=SEEDS, suppress_tokens=forbidden)
    assert not {token for c in made for token in c.tokens} & set(forbidden)
    assert all(len(c.tokens) == 10 for c in made)


def test_nothing_asked_nothing_made():
    assert generate(small_model(), PROMPTS, max_tokens=0, sampling=GREEDY) == [Continuation()] * 4
    assert generate(small_model(), [], max_tokens=3, sampling=GREEDY) == []
    with pytest.raises(ValueError, match="at least one token"):
        generate(small_model(), [[1], []], max_tokens=3, sampling=GREEDY)


@pytest.mark.parametrize("cache", [True, False])
def test_slid_says_whether_the_beginning_was_forgotten(cache):
    model = small_model(context=8)
    options = {"sampling": GREEDY, "cache": cache}
    assert not generate(model, [[1, 2, 3]], max_tokens=5, **options)[0].slid
    assert not generate(model, [[1, 2, 3]], max_tokens=6, **options)[
        0
    ].slid  # the ninth token came from the first eight
    assert generate(model, [[1, 2, 3]], max_tokens=7, **options)[0].slid
    assert generate(model, [list(range(9))], max_tokens=1, **options)[0].slid
    assert [c.slid for c in generate(model, [[1], [2] * 8], max_tokens=4, **options)] == [False, True]


def test_past_the_context_the_window_is_the_end_of_the_text():
    """The model is shown the last half to whole context, so its next token is that of the window alone."""
    model = small_model(context=8)
    prompt = some_tokens(13, seed=5).tolist()  # one whose next token depends on how much of it is shown
    made = generate(model, [prompt], max_tokens=1, sampling=GREEDY)[0].tokens
    shown = [length for length in range(4, 9) if first_principles(model, prompt[-length:], 1) == made]
    assert shown == [5]  # thirteen tokens slide by four twice


def test_seeds_make_it_again_and_other_seeds_do_not():
    model = small_model()
    options = {"max_tokens": 12, "sampling": Sampling()}
    once = generate(model, PROMPTS, seeds=SEEDS, **options)
    assert once == generate(model, PROMPTS, seeds=SEEDS, **options)
    assert once != generate(model, PROMPTS, seeds=[seed + 1 for seed in SEEDS], **options)
    torch.manual_seed(99)
    torch.rand(1)
    assert once == generate(model, PROMPTS, seeds=SEEDS, **options)  # the ambient generator has no part in it
    same = generate(model, [[1, 2]] * 2, seeds=[7, 8], **options)
    assert same[0].tokens != same[1].tokens
    with pytest.raises(ValueError, match="shorter"):
        generate(model, PROMPTS, seeds=[1], **options)


def test_a_repetition_penalty_breaks_a_loop():
    model = small_model()
    loop = generate(model, [[4]], max_tokens=12, sampling=GREEDY)[0].tokens
    freed = generate(model, [[4]], max_tokens=12, sampling=Sampling(temperature=0.0, repetition_penalty=50.0))[0].tokens
    assert len(set(freed)) > len(set(loop)) + 2


def test_a_prompt_is_not_changed():
    prompt = [1, 2, 3]
    generate(small_model(), [prompt], max_tokens=3, sampling=GREEDY)
    assert prompt == [1, 2, 3]


MANY = [some_tokens(1 + n % 6, seed=n).tolist() for n in range(13)]


def held_fast(backbone, state, steps):
    """What a GPU does with a state before it records a step; on a CPU the step is then simply done again."""
    return state is not None and state.make_static()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(repetition_penalty=1.3)])
def test_looking_seldom_as_for_a_gpu_changes_no_text(monkeypatch, recorded, positions, sampling):
    """Rows end at different times and some slide, while several tokens are made before anyone looks."""
    model = small_model(positions=positions, context=11)
    options = {"max_tokens": 40, "sampling": sampling, "seeds": list(range(13))}
    free = [c.tokens for c in generate(model, MANY, **options)]
    places = {token: {row.index(token) for row in free if token in row} for row in free for token in row}
    options["end"] = max(places, key=lambda token: len(places[token]))  # what ends rows at as many times as may be
    often = generate(model, MANY, **options)
    alone = one_by_one(model, MANY, **options)
    assert [c.tokens for c in often] == [c.tokens for c in alone]
    monkeypatch.setattr(generation, "STEPS_PER_CHECK", {})
    if recorded:
        monkeypatch.setattr(generation, "can_capture", held_fast)
        monkeypatch.setattr(generation, "capture_step", lambda step, tokens: step)
    assert generate(model, MANY, **options) == often
    assert len({len(c.tokens) for c in often}) > 3
    assert any(c.slid for c in often)


def test_rows_that_are_done_are_not_read_for_long(monkeypatch):
    """Each row stops at a token of its own number; those that have are left out once they are a quarter."""
    model, read = small_model(context=40), []
    one_more = generation._Decoder.decode_step
    monkeypatch.setattr(
        generation._Decoder, "decode_step", lambda self, tokens: read.append(len(tokens)) or one_more(self, tokens)
    )
    made = generate(
        model, MANY[:12], max_tokens=30, sampling=GREEDY, stop=lambda row, tokens: len(tokens) == 1 + 2 * row
    )
    assert [len(c.tokens) for c in made] == [1 + 2 * row for row in range(12)]
    going = [sum(1 + 2 * row > step for row in range(12)) for step in range(1, 23)]
    assert len(read) == len(going)
    assert all(wanted <= taken < 4 / 3 * wanted + 1 for taken, wanted in zip(read, going, strict=True))


@pytest.mark.parametrize("prompts", [[[1, 2], [3, 4]], [[1, 2], [3, 4, 5]]])
def test_it_may_be_asked_for_in_half_precision(prompts):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = generate(small_model(), prompts, max_tokens=4, sampling=Sampling(temperature=0.0))
        found = beam_search(small_model(), prompts, beams=2, max_tokens=4, end=None)
    assert [len(row.tokens) for row in made] == [4, 4] and len(found) == 2
