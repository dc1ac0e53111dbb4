"""Rows of a continuous batch get the tokens of `generate` for their prompts alone, whatever rows come and go."""

import math
import random
from dataclasses import replace
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.decoding.continuous_batching import ContinuousBatch, DecodingRequest, DecodingRow
from headstock.decoding.generate import Continuation, generate
from headstock.decoding.sampling import Sampling
from headstock.errors import WorkError
from headstock.model.backbones.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from headstock.model.backbones.ngram import NGram, NGramConfig
from headstock.model.backbones.recurrent import Recurrent, RecurrentConfig
from headstock.model.batch import Batch
from headstock.model.heads import LMHead
from headstock.model.kv_cache import KVCache
from headstock.model.model import Model
from tests.model.small import SIZES, small_model, some_tokens, stir

GREEDY = Sampling(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    Sampling(),
    Sampling(top_k=4, temperature=1.5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.1, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=1.5),
]
SUPPRESSED = [3, 8]


def lm(backbone) -> Model:
    stir(backbone)
    return Model(backbone, {"token": LMHead(backbone)}).eval()


def recurrent(cell: str, context: int | None) -> Model:
    torch.manual_seed(0)
    return lm(Recurrent(RecurrentConfig(13, cell=cell, context=context, depth=2, width=8, hidden=12)))


def ngram(context: int | None) -> Model:
    torch.manual_seed(0)
    return lm(NGram(NGramConfig(13, order=3, context=context, width=8, hidden=12)))


MODELS = {
    **{
        name: lambda context, name=name: small_model(positions=name, context=context or 64)
        for name in ("learned", "sinusoidal", "rotary", "relative", "none")
    },
    "hybrid": lambda context: small_model(causal=False, positions="rotary", norm="post", context=context or 64),
    **{cell: lambda context, cell=cell: recurrent(cell, context) for cell in ("lstm", "gru", "rnn")},
    "ngram": ngram,
}


def random_requests(count: int, seed: int) -> list[DecodingRequest]:
    choose = random.Random(seed)
    return [
        DecodingRequest(
            prompt=some_tokens(choose.randint(1, 11), seed=seed + i).tolist(),
            max_tokens=choose.choice([0, 1, 5, 14, 20]),
            sampling=choose.choice(SAMPLINGS),
            seed=seed + i,
            stop=(lambda tokens: tokens[-1] == 7) if choose.random() < 0.3 else None,
            logprobs=choose.choice([None, 0, 3]),
        )
        for i in range(count)
    ]


def alone(model: Model, request: DecodingRequest, end: int | None) -> Continuation:
    return generate(
        model,
        [request.prompt],
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        end=end,
        seeds=[request.seed],
        suppress_tokens=SUPPRESSED,
        stop=None if request.stop is None else lambda _, tokens: request.stop(tokens),
    )[0]


def run(batch: ContinuousBatch, arrivals: dict[int, list[DecodingRequest]], cancels=()) -> list[DecodingRow]:
    """Steps with rows that arrive before given steps; `cancels` are pairs of a step and the index of a row."""
    rows: list[DecodingRow] = []
    for step in range(1000):
        rows += [batch.add(request) for request in arrivals.get(step, [])]
        for when, index in cancels:
            if when == step and index < len(rows):
                rows[index].cancel()
        before = {row: (len(row.tokens), row.ended) for row in rows}
        changed = batch.step()
        assert len(changed) == len(set(changed))
        assert set(changed) == {row for row in rows if (len(row.tokens), row.ended) != before[row]}
        assert all(len(row.tokens) - before[row][0] <= 1 for row in rows)
        assert batch.active <= batch.max_rows
        if batch.idle and step >= max(arrivals):
            return rows
    raise AssertionError("rows never end")


def compare(model: Model, rows: list[DecodingRow], end: int | None) -> None:
    for row in rows:
        expected, tokens = alone(model, row.request, end), [token.id for token in row.tokens]
        if row.ended == "cancelled":
            assert tokens == expected.tokens[: len(tokens)]
        else:
            assert (tokens, row.ended, row.slid) == (expected.tokens, expected.ended, expected.slid)


def spread(requests: list[DecodingRequest], seed: int, steps: int = 25) -> dict[int, list[DecodingRequest]]:
    choose = random.Random(seed)
    arrivals: dict[int, list[DecodingRequest]] = {0: []}
    for request in requests:
        arrivals.setdefault(choose.randrange(steps), []).append(request)
    return arrivals


@given(
    name=st.sampled_from(list(MODELS)),
    context=st.sampled_from([None, 6, 9]),
    end=st.sampled_from([None, 2, 5]),
    max_rows=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_rows_get_the_tokens_of_their_prompts_alone(name, context, end, max_rows, seed):
    """Mixed settings; rows arrive at random steps, outgrow the context, end, stop and are cancelled."""
    model = MODELS[name](context)
    batch = ContinuousBatch(model, end=end, suppress_tokens=SUPPRESSED, max_rows=max_rows)
    choose = random.Random(seed)
    cancels = [(choose.randrange(30), choose.randrange(12)) for _ in range(3)]
    rows = run(batch, spread(random_requests(12, seed), seed), cancels)
    assert len(rows) == 12
    compare(model, rows, end)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_batches_rows_that_slide(name):
    model = MODELS[name](8)
    requests = [replace(request, max_tokens=14) for request in random_requests(7, seed=3)]
    rows = run(ContinuousBatch(model, end=None, suppress_tokens=SUPPRESSED), spread(requests, 4, steps=6))
    compare(model, rows, None)
    assert sum(row.slid for row in rows) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_rows_on_a_gpu(name):
    model = MODELS[name](9).cuda()
    batch = ContinuousBatch(model, end=2, suppress_tokens=SUPPRESSED, max_rows=5)
    compare(model, run(batch, spread(random_requests(12, seed=6), 6)), 2)


@pytest.mark.parametrize("name", ["rotary", "lstm", "ngram"])
def test_rows_that_leak_into_each_other_are_noticed(name, monkeypatch):
    """The control: joined states in the wrong order."""
    model = MODELS[name](None)
    state = type(model.backbone.new_state(1, 1))
    append = state.append

    def append_reversed(self, other):
        joined = append(self, other)
        return joined.keep(list(reversed(range(len(joined.lengths)))))

    requests = [replace(request, max_tokens=14, stop=None) for request in random_requests(8, seed=5)]
    for function in (append, append_reversed):
        monkeypatch.setattr(state, "append", function)
        rows = run(ContinuousBatch(model, end=None, suppress_tokens=SUPPRESSED), spread(requests, 1, steps=4))
        if function is append:
            compare(model, rows, None)
        else:
            with pytest.raises(AssertionError):
                compare(model, rows, None)


def test_rows_without_a_token_end_in_the_next_step():
    model = small_model()
    end = generate(model, [[1, 2]], max_tokens=1, sampling=GREEDY)[0].tokens[0]
    batch = ContinuousBatch(model, end=end, suppress_tokens=())
    empty = batch.add(DecodingRequest([1], 0, GREEDY))
    first_is_end = batch.add(DecodingRequest([1, 2], 5, GREEDY, logprobs=2))
    cancelled = batch.add(DecodingRequest([1], 5, GREEDY))
    cancelled.cancel()
    assert batch.waiting == 3 and batch.active == 0 and not batch.idle
    assert set(batch.step()) == {empty, first_is_end, cancelled}
    assert [row.ended for row in (empty, first_is_end, cancelled)] == ["length", "end", "cancelled"]
    assert not empty.tokens + first_is_end.tokens + cancelled.tokens and batch.idle
    assert batch.step() == []


def test_rows_wait_for_room_and_cancelled_ones_make_it():
    batch = ContinuousBatch(small_model(context=64), end=None, suppress_tokens=(), max_rows=2)
    first, second, third, fourth = rows = [batch.add(DecodingRequest([i], 20, GREEDY)) for i in range(1, 5)]
    assert batch.step() == [first, second] and (batch.active, batch.waiting) == (2, 2)
    fourth.cancel()  # leaves the queue at once
    first.cancel()
    assert set(batch.step()) == {first, second, third, fourth} and (batch.active, batch.waiting) == (2, 0)
    assert [len(row.tokens) for row in rows] == [1, 2, 1, 0]
    assert first.ended == fourth.ended == "cancelled"


def test_long_prompts_are_admitted_in_several_steps():
    """Active rows would wait for all of them otherwise."""
    batch = ContinuousBatch(small_model(context=1024), end=None, suppress_tokens=())
    rows = [batch.add(DecodingRequest([1] * 400, 4, GREEDY)) for _ in range(5)]
    batch.step()
    assert 0 < batch.active < 5
    while not batch.idle:
        batch.step()
    assert len({tuple(token.id for token in row.tokens) for row in rows}) == 1


def test_log_probabilities_are_the_models_own():
    model, sampling = small_model(), Sampling(temperature=0.5, top_k=2, repetition_penalty=1.5)
    batch = ContinuousBatch(model, end=None, suppress_tokens=SUPPRESSED)
    requests = [DecodingRequest([4, 1, i], 6, sampling, seed=i, logprobs=n) for i, n in enumerate([3, 0, None, 99])]
    rows = [batch.add(request) for request in requests]
    while not batch.idle:
        batch.step()
    for row in rows:
        text = [*row.request.prompt, *(token.id for token in row.tokens)]
        logits = model.heads["token"](model(Batch(torch.tensor([text]))).hidden[0])
        logits[:, SUPPRESSED] = -math.inf
        expected = logits.log_softmax(-1)[2:-1]
        for token, log_probabilities in zip(row.tokens, expected.tolist(), strict=True):
            if row.request.logprobs is None:
                assert token.logprob is None and token.top == []
                continue
            assert token.logprob == pytest.approx(log_probabilities[token.id], abs=1e-4)
            likeliest = sorted(range(13), key=lambda i: -log_probabilities[i])[: min(row.request.logprobs, 11)]
            assert [i for i, _ in token.top] == likeliest
            assert dict(token.top) == pytest.approx({i: log_probabilities[i] for i in likeliest}, abs=1e-4)
        if row.request.logprobs == 99:
            assert sum(math.exp(value) for _, value in row.tokens[0].top) == pytest.approx(1)


def test_invalid_requests_are_refused_before_they_reach_others():
    batch = ContinuousBatch(small_model(), end=None, suppress_tokens=())
    for prompt in ([], [13], [-1]):
        with pytest.raises(ValueError, match="token"):
            batch.add(DecodingRequest(prompt, 3, GREEDY))
    for problem in ({"max_tokens": -1}, {"logprobs": -1}):
        with pytest.raises(ValueError, match="0 or more"):
            batch.add(replace(DecodingRequest([1], 3, GREEDY), **problem))
    assert batch.idle
    backbone = EncoderDecoder(EncoderDecoderConfig(**SIZES))
    with pytest.raises(ValueError, match="encoder-decoder"):
        ContinuousBatch(Model(backbone, {"token": LMHead(backbone)}), end=None, suppress_tokens=())


def test_after_an_error_all_rows_are_returned_and_others_can_follow():
    model = small_model()
    batch = ContinuousBatch(model, end=None, suppress_tokens=SUPPRESSED, max_rows=1)
    rows = [batch.add(DecodingRequest([1], 3, GREEDY)) for _ in range(2)]
    with torch.no_grad():
        saved = model.backbone.tokens.weight.clone()
        model.backbone.tokens.weight.fill_(math.nan)
    with pytest.raises(WorkError, match="not finite"):
        batch.step()
    assert set(batch.clear()) == set(rows) and all(row.ended == "cancelled" for row in rows) and batch.idle
    with torch.no_grad():
        model.backbone.tokens.weight.copy_(saved)
    compare(model, run(batch, {0: [DecodingRequest([1], 3, GREEDY)]}), None)


def test_rows_added_by_other_threads():
    model = small_model(context=64)
    batch, requests = ContinuousBatch(model, end=None, suppress_tokens=SUPPRESSED), random_requests(40, seed=8)
    rows: list[DecodingRow] = []
    threads = [Thread(target=lambda i=i: rows.extend(map(batch.add, requests[i::4]))) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not batch.idle:
        batch.step()
    assert len(rows) == 40
    compare(model, rows, None)


def test_joining_and_leaving_copies_single_rows():
    """A cache with spare rows stays where it is, and is released with the last row."""
    batch = ContinuousBatch(small_model(context=64), end=None, suppress_tokens=())
    for i in range(8):
        batch.add(DecodingRequest([i], 9 + i, GREEDY))
    batch.step()
    batch.add(DecodingRequest([9], 20, GREEDY))
    batch.step()
    assert isinstance(batch.state, KVCache)
    address = batch.state.storage.data_ptr()
    for i in range(6):
        batch.add(DecodingRequest([i], 2, GREEDY))
        batch.step()
        assert batch.state.storage.data_ptr() == address
    while not batch.idle:
        batch.step()
    assert batch.state is None
