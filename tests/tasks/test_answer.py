"""Extractive question answering: windows, token spans, the loss, predictions and metrics."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from headstock.data.records import Records
from headstock.data.tokenizer import TokenizerSettings, train_tokenizer
from headstock.errors import ConfigError, UserError
from headstock.model.batch import IGNORE_INDEX
from headstock.model.model import Model
from headstock.tasks.answer import Answer, AnswerConfig, Passage, best_spans
from headstock.tasks.base import padded_batch
from headstock.train.evaluate import cache_features, ensemble_mean, model_outputs
from tests.model.small import small_backbone, stir

LETTERS = "abcdefghij ?"
CHARACTERS = train_tokenizer([LETTERS] * 3, TokenizerSettings(kind="char", vocabulary=40, min_frequency=1))
WORDS = ["the cat sat on the mat", "the cats sit on mats", "a cat"] * 20
PIECES = {
    kind: train_tokenizer(WORDS, TokenizerSettings(kind=kind, vocabulary=300, min_frequency=1))
    for kind in ("bpe", "unigram", "wordpiece")
}


def make_task(tokenizer=CHARACTERS, **config):
    return Answer(AnswerConfig(**config), tokenizer)


def records(*rows):
    """Rows of (context, question, answers or None); an answer is a part of the context or (part, start)."""
    columns = {"context": [row[0] for row in rows], "question": [row[1] for row in rows]}
    columns["id"] = [f"q{i}" for i in range(len(rows))]
    if rows[0][2] is not None:
        spans = [
            [a if isinstance(a, tuple) else (a, context.index(a)) for a in answers] for context, _, answers in rows
        ]
        columns["answers"] = [[{"text": text, "start": start} for text, start in answers] for answers in spans]
    return Records("q.json", list(range(1, len(rows) + 1)), columns)


@pytest.fixture(autouse=True)
def gradients(request):
    """Gradients only where a test asks for them."""
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def model_for(task, *, seed=0, **backbone):
    sizes = {"context": 64, "segments": 2, "causal": False} | backbone
    stock = small_backbone(seed, vocabulary=task.tokenizer.vocabulary, **sizes)
    heads = task.heads(stock)
    stir(heads["span"], seed=seed, spread=0.5)
    return Model(stock, heads).eval()


def text_of(ids, tokenizer=CHARACTERS):
    return "".join(tokenizer.id_to_token(i) for i in ids)


# Rows


def test_row_is_question_then_context():
    task = make_task()
    data = task.prepare(records(("abc", "d?", ["b"]), ("abcdef", "j", ["ef"])))
    batch = task.examples(data, length=32).batch([0, 1])
    rows = ["<sos>d?[SEP]abc[SEP]<pad>", "<sos>j[SEP]abcdef[SEP]"]
    assert [text_of(row) for row in batch.tokens.tolist()] == [rows[0] + "<pad>", rows[1]]
    assert batch.padding.sum(1).tolist() == [2, 0]
    assert batch.segments.tolist() == [[0] * 4 + [1] * 6, [0] * 3 + [1] * 7]
    assert batch.example_ids is None
    assert (batch.labels["start"].tolist(), batch.labels["end"].tolist()) == ([5, 7], [5, 8])
    assert text_of(batch.tokens[1, 7:9].tolist()) == "ef"


def test_segments_when_bos_equals_separator(tmp_path):
    """As in GPT-2."""
    task = make_task()
    task.bos = task.separator
    batch = task.examples(task.prepare(records(("abc", "d?", ["b"]))), length=32).batch([0])
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    scores, context = task.log_probabilities(model_for(task), batch)
    assert context.tolist() == [[False] * 4 + [True] * 3 + [False]]
    assert scores.isfinite().all(-1).tolist() == [[True, *[False] * 3, *[True] * 3, False]]


@given(st.integers(0, 80), st.integers(1, 30), st.none() | st.integers(1, 40))
@example(31, 30, None)
@example(30, 30, None)
def test_windows_cover_the_context(count, room, stride):
    windows = [(window.start, window.end) for window in make_task(stride=stride).windows(count, room)]
    assert windows[0][0] == 0
    assert windows[-1][1] == count
    assert all(begin < end <= begin + room for begin, end in windows) or count == 0
    for (begin, end), (next_begin, next_end) in pairwise(windows):
        assert begin < next_begin <= end < next_end
        assert end - begin == room  # only the last may be shorter
    if stride is None and len(windows) > 2 and room > 1:
        assert windows[0][1] - windows[1][0] == room - room // 2


def test_long_context_is_split_into_windows():
    task = make_task()
    context = "abcdefghij" * 3
    data = task.prepare(records((context, "ab?", [("bc", 21)]), ("ab", "c?", ["b"])))
    examples = task.examples(data, length=16)
    batch = examples.batch([1, 0])
    assert batch.example_ids.tolist() == [0, 1, 1, 1, 1, 1]
    windows = [(window.start, window.end) for window in task.windows(30, 10)]
    assert [begin for begin, _ in windows] == [0, 5, 10, 15, 20]
    starts, ends = batch.labels["start"].tolist(), batch.labels["end"].tolist()
    for row, (begin, end) in enumerate(windows, 1):
        assert text_of(batch.tokens[row, 5 : 5 + end - begin].tolist()) == context[begin:end]
        if begin <= 21 and end >= 23:
            assert text_of(batch.tokens[row, starts[row] : ends[row] + 1].tolist()) == "bc"
            assert starts[row] == 5 + 21 - begin
        else:
            assert (starts[row], ends[row]) == (0, 0)
    assert sum(start > 0 for start in starts[1:]) == 2  # the windows overlap by half, so two of them have it
    assert examples.lengths.tolist() == [5 * 16, 7]


def test_answer_across_window_edge_has_no_label():
    task = make_task(stride=10)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", [("ja", 9)])))
    batch = task.examples(data, length=16).batch([0])
    assert batch.labels["start"].tolist() == batch.labels["end"].tolist() == [0, 0]


def test_questions_share_their_passage():
    task = make_task()
    data = task.prepare(records(("abc", "a?", ["b"]), ("abcd", "b?", []), ("abc", "c?", ["c"])))
    assert data.passages[0] is data.passages[2]
    assert data.labels == [["b"], [], ["c"]]
    assert data.answer_spans == [(1, 1), None, (2, 2)]
    part = data.select([2, 1])
    assert (part.ids, part.locations, part.labels) == (["q2", "q1"], ["q.json:3", "q.json:2"], [["c"], []])


def test_long_question_is_truncated_and_short_row_refused():
    task = make_task(longest_question=6)
    data = task.prepare(records(("abcdefghij", "aaaaaaaaaa?", ["b"])))
    assert [len(tokens) for tokens in data.tokens] == [6]
    assert len(task.examples(data, length=17)) == 1
    with pytest.raises(UserError, match=r"q.json:1: a row of 12 tokens leaves 3 for the context .*longest_question"):
        task.examples(data, length=12)
    short = task.prepare(records(("abc", "aaaaaaaaaa?", ["b"])))
    assert task.examples(short, length=12).batch([0]).tokens.shape == (1, 12)  # all of it fits


# Tokens and characters


@pytest.mark.parametrize("kind", PIECES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_answer_tokens_cover_the_answer(kind, data):
    context = " ".join(data.draw(st.lists(st.sampled_from(["the", "cats", "sat", "mat", "é", "naïve"]), min_size=1)))
    begin = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(begin + 1, len(context)))
    if not context[begin:end].strip():
        return
    task = make_task(PIECES[kind])
    encoded = task.prepare(records((context, "the cat", [(context[begin:end], begin)])))
    passage, (first, last) = encoded.passages[0], encoded.answer_spans[0]
    answer = context[begin:end].strip()
    answer_start = begin + context[begin:end].index(answer)
    start, stop = passage.characters(first, last)
    assert start <= answer_start
    assert stop >= answer_start + len(answer)
    assert passage.text[start:stop] == passage.text[start:stop].strip()
    assert passage.offsets[first, 1] > begin  # neither end token lies wholly outside
    assert passage.offsets[last, 0] < end


def test_answer_inside_a_token_takes_the_token():
    task = make_task(PIECES["wordpiece"])
    encoded = task.prepare(records(("the cat sat", "the", [("a", 5)])))
    first, last = encoded.answer_spans[0]
    begin, end = encoded.passages[0].characters(first, last)
    assert first == last
    assert begin <= 5 < end


def test_answer_without_tokens_has_no_span():
    passage = Passage("a b", [1, 2], np.array([[0, 1], [2, 3]]))
    assert passage.token_span(1, 2) is None
    assert passage.token_span(0, 3) == (0, 1)


# The loss


def test_loss_covers_first_token_and_context():
    task = make_task(dropout=0.0)
    model = model_for(task)
    data = task.prepare(records(("abc", "d?", ["bc"]), ("abcdef", "j", ["e"])))
    batch = task.examples(data, length=32).batch([0, 1])
    logits = model.heads["span"](model(batch).hidden)
    expected = {"start": 0.0, "end": 0.0}
    for row, positions in enumerate(([0, 4, 5, 6], [0, 3, 4, 5, 6, 7, 8])):
        for side, head in enumerate(expected):
            label = torch.tensor(positions.index(int(batch.labels[head][row])))
            expected[head] += float(nn.functional.cross_entropy(logits[row, positions, side], label))
    losses = task.losses(model, batch)
    assert {head: float(losses[head]) for head in expected} == pytest.approx(expected, rel=1e-5)
    smooth = task.losses(model, batch, smoothing=0.2)
    positions, label = [0, 4, 5, 6], torch.tensor(2)
    first_batch = task.examples(data.select([0]), length=32).batch([0])
    expected_smooth = nn.functional.cross_entropy(logits[0, positions, 0], label, label_smoothing=0.2)
    assert float(task.losses(model, first_batch, smoothing=0.2)["start"]) == pytest.approx(
        float(expected_smooth), rel=1e-4
    )
    assert float(smooth["start"]) != pytest.approx(float(losses["start"]))


def test_gradient_is_finite_and_padding_examples_are_ignored():
    task = make_task(dropout=0.0)
    model = model_for(task)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", ["c"]), ("ab", "c?", ["b"]), ("abcd", "c?", [])))
    examples = task.examples(data, length=16)
    plain, padded = padded_batch(examples, [0, 1], 2), padded_batch(examples, [0, 1], 4, filler=0)
    assert len(padded.tokens) == len(plain.tokens) + 2 * 3
    assert (padded.labels["start"] == IGNORE_INDEX).sum() == 2 * 3
    assert task.counts(padded) == task.counts(plain) == {"start": 4, "end": 4}
    assert task.tokens(padded) == task.tokens(plain)
    losses, padded_losses = task.losses(model, plain, smoothing=0.1), task.losses(model, padded, smoothing=0.1)
    for name in losses:
        assert losses[name].item() == pytest.approx(padded_losses[name].item(), rel=1e-5)
    assert losses["questions"] == 2
    (losses["start"] + losses["end"]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


class FixedHead(nn.Module):
    """A head that predicts given spans, with a given logit."""

    def __init__(self, spans):
        super().__init__()
        self.spans = spans

    def forward(self, vectors):
        scores = torch.zeros(*vectors.shape[:2], 2)
        for row, (start, end, *logit) in enumerate(self.spans):
            scores[row, start, 0] = scores[row, end, 1] = logit[0] if logit else 20.0
        return scores


def count_correct(task, batch, *spans):
    model = model_for(task)
    model.heads["span"] = FixedHead(spans)
    losses = task.losses(model, batch)
    return int(losses["correct"]), int(losses["questions"])


def test_accuracy_counts_exact_spans():
    task = make_task()
    data = task.prepare(records(("abcd", "d?", ["bc"]), ("abcd", "j?", ["d"])))
    batch = task.examples(data, length=32).batch([0, 1])
    assert count_correct(task, batch, (5, 6), (7, 7)) == (2, 2)
    assert count_correct(task, batch, (5, 5), (7, 7)) == (1, 2)
    assert count_correct(task, batch, (0, 0), (7, 7)) == (1, 2)
    metrics = task.score({"start": 4.0, "end": 2.0, "correct": 1.0, "questions": 2.0}, {"start": 4, "end": 4}, size=0)
    assert metrics == {"loss": 0.75, "accuracy": 0.5}
    assert (
        task.selection_score(metrics)
        > task.selection_score(metrics | {"accuracy": 0.6})
        > task.selection_score({"loss": 9.0, "accuracy": 0.61})
    )


def test_windows_of_one_question_count_once():
    task = make_task()
    data = task.prepare(records(("abcdefghij" * 2, "ab?", [("b", 11)])))
    batch = task.examples(data, length=16).batch([0])
    assert batch.labels["start"].tolist() == [0, 11, 6]
    assert count_correct(task, batch, (0, 0), (11, 11), (6, 6)) == (1, 1)
    assert count_correct(task, batch, (0, 0), (11, 11), (0, 0)) == (1, 1)
    assert count_correct(task, batch, (7, 7), (0, 0), (0, 0)) == (0, 1)
    assert count_correct(task, batch, (7, 7, 4.0), (11, 11, 6.0), (0, 0)) == (1, 1)
    assert count_correct(task, batch, (7, 7, 6.0), (11, 11, 4.0), (0, 0)) == (0, 1)  # the more confident window decides
    abstaining = make_task(unanswerable=True)
    assert count_correct(abstaining, batch, (0, 0), (11, 11, 4.0), (0, 0)) == (1, 1)
    assert count_correct(abstaining, batch, (0, 0), (0, 0), (0, 0)) == (0, 1)


def test_no_answer_is_correct_only_for_unanswerable_questions():
    rows = records(("abcd", "d?", ["bc"]), ("abcd", "j?", []))
    answerable, abstaining = make_task(), make_task(unanswerable=True)
    batch = abstaining.examples(abstaining.prepare(rows), length=32).batch([0, 1])
    assert batch.labels["start"].tolist() == [5, 0]
    assert count_correct(abstaining, batch, (5, 6), (0, 0)) == (2, 2)
    assert count_correct(abstaining, batch, (0, 0), (0, 0)) == (1, 2)
    assert count_correct(abstaining, batch, (5, 6), (5, 6)) == (1, 2)
    assert count_correct(answerable, batch, (5, 6), (0, 0)) == (1, 2)
    assert count_correct(make_task(unanswerable=True, threshold=99.0), batch, (5, 6), (0, 0)) == (1, 2)
    padded = padded_batch(abstaining.examples(abstaining.prepare(rows), length=32), [1], 3, filler=1)
    assert count_correct(abstaining, padded, (0, 0), (0, 0), (0, 0)) == (1, 1)


# Predictions


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 99))
def test_best_span_matches_brute_force(count, longest, seed):
    scores = torch.randn(2, count, 2, generator=torch.Generator().manual_seed(seed))
    scores[1, count // 2 + 1 :] = -torch.inf  # a shorter row
    starts, ends, best = best_spans(scores, longest)
    for row in range(2):
        scores_by_span = {
            (i, j): float(scores[row, i, 0] + scores[row, j, 1])
            for i in range(count)
            for j in range(i, min(count, i + longest))
        }
        assert (int(starts[row]), int(ends[row])) == max(scores_by_span, key=scores_by_span.__getitem__)
        assert float(best[row]) == max(scores_by_span.values())


def peaked(rows, width, *spans, logit=8.0):
    """Scores of (rows, 1 + width, 2) with certain starts and ends at (row, start, end), where 0 is no answer."""
    scores = torch.zeros(rows, 1 + width, 2)
    for row, start, end in spans:
        scores[row, start, 0] = scores[row, end, 1] = 8.0 if start == 0 else logit
    return scores.log_softmax(1).numpy()


def test_answer_position_accounts_for_its_window():
    task = make_task()
    context = "abcdefghij" * 2
    data = task.prepare(records((context, "ab?", None)))
    predictions = task.predictions(data, [peaked(3, 10, (0, 0, 0), (1, 8, 10), (2, 0, 0))])
    assert predictions == [{"id": "q0", "answer": "cde", "start": 12, "end": 15, "score": predictions[0]["score"]}]
    assert 0.9 < predictions[0]["score"] <= 1
    unsure = task.predictions(data, [peaked(3, 10)])[0]
    assert 0 < unsure["score"] < 0.1
    assert unsure["answer"] == context[unsure["start"] : unsure["end"]]


def test_no_answer_needs_all_windows_and_the_threshold():
    data = make_task().prepare(records(("abcdefghij" * 2, "ab?", None)))
    no_answer = peaked(3, 10, (0, 0, 0), (1, 0, 0), (2, 0, 0))
    one_answer = peaked(3, 10, (0, 0, 0), (1, 4, 4), (2, 0, 0), logit=5.0)  # less certain than "no answer" elsewhere
    abstaining = make_task(unanswerable=True)
    prediction = abstaining.predictions(data, [no_answer])[0]
    assert (prediction["answer"], prediction["start"], prediction["end"]) == ("", None, None)
    assert 0.9 < prediction["score"] <= 1
    assert abstaining.predictions(data, [one_answer])[0]["answer"] == "i"
    assert make_task().predictions(data, [no_answer])[0]["answer"]  # without unanswerable questions in training
    assert make_task(unanswerable=True, threshold=20.0).predictions(data, [no_answer])[0]["answer"]


def test_answers_have_no_surrounding_white_space():
    task = make_task()
    data = task.prepare(records(("ab  cd", "ab?", None), ("  ", "a", None)))
    blank = peaked(1, 2, (0, 1, 2))
    for start, end in ((3, 4), (3, 5), (2, 3)):
        row, empty = task.predictions(data, [peaked(1, 6, (0, start, end)), blank])
        assert row["answer"] == "ab  cd"[row["start"] : row["end"]] == row["answer"].strip() != ""
        assert (empty["answer"], empty["start"], empty["end"]) == ("", None, None)
    across = task.predictions(data, [peaked(1, 6, (0, 2, 5)), blank])[0]
    assert (across["answer"], across["start"], across["end"]) == ("b  c", 1, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_cover_every_context_token(causal):
    task = make_task()
    model = model_for(task, causal=causal)
    context = "abcdefghij" * 2 + "abc"
    data = task.prepare(records((context, "ab?", None), ("ab", "c?", None)))
    outputs = model_outputs(model, task, data, length=16)
    assert [output.shape for output in outputs] == [(4, 11, 2), (1, 3, 2)]
    assert np.isneginf(outputs[0][3, 9:]).all()  # the last window reads 8 tokens
    assert np.isfinite(outputs[0][:3]).all()
    for output in outputs:
        assert np.exp(output).sum(1) == pytest.approx(np.ones((len(output), 2)), abs=1e-5)
    alone = model_outputs(model, task, data.select([0]), length=16)
    assert alone[0] == pytest.approx(outputs[0], abs=1e-4)
    for row in task.predictions(data, outputs):
        assert row["answer"] == (context if row["id"] == "q0" else "ab")[row["start"] : row["end"]]
        assert 0 < row["score"] <= 1


def test_ensemble_averages_token_scores():
    task = make_task()
    data = task.prepare(records(("abcdefghij" * 2 + "abc", "ab?", None), ("ab", "c?", None)))
    members = [model_outputs(model_for(task, seed=seed), task, data, length=16) for seed in (0, 1)]
    mean = ensemble_mean(members)
    assert [output.shape for output in mean] == [output.shape for output in members[0]]
    assert mean[1] == pytest.approx((members[0][1] + members[1][1]) / 2)
    assert all(0 < row["score"] <= 1 for row in task.predictions(data, mean))


def test_first_token_sees_the_context_only_in_bidirectional_models():
    task = make_task()
    data = task.prepare(records(("abcdefg", "ab?", None), ("jjjjjjj", "ab?", None)))
    for causal in (True, False):
        model = model_for(task, causal=causal)
        first, second = model(task.examples(data, length=32).batch([0, 1])).hidden[:, 0]
        assert torch.allclose(first, second, atol=1e-5) is causal


@pytest.mark.parametrize("layers", ["last", "mix", "sum4", "2"])
def test_cached_features_give_the_same_outputs(layers):
    task = make_task(layers=layers, dropout=0.0)
    model = model_for(task, depth=4)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", ["c"]), ("ab", "c?", ["b"]), ("abcd", "c?", ["d"])))
    cached = cache_features(model, task, data, length=16)
    batch, cached_batch = (task.examples(rows, length=16).batch([2, 0]) for rows in (data, cached))
    for actual, expected in zip(
        task.losses(model, batch).values(), task.losses(model, cached_batch).values(), strict=True
    ):
        assert float(actual) == pytest.approx(float(expected), rel=1e-4)
    for actual, expected in zip(task.outputs(model, batch), task.outputs(model, cached_batch), strict=True):
        assert torch.allclose(actual, expected, atol=1e-5)


def test_row_metrics_are_squad_scores():
    task = make_task()
    data = task.prepare(records(("abc def", "a?", ["abc", "abc def"]), ("abc def", "b?", ["abc def"])))
    metrics = task.row_metrics(data, [peaked(1, 7, (0, 1, 3)), peaked(1, 7, (0, 1, 3))])
    assert metrics["exact_match"][0].tolist() == [1.0, 0.0]
    assert metrics["f1"][0].tolist() == pytest.approx([1.0, 2 / 3])
    assert all((denominators == 1).all() for _, denominators in metrics.values())
    assert task.primary_metric == "f1"


# Settings and rows


def test_unanswerable_is_inferred_from_training_rows():
    config = AnswerConfig()
    assert not Answer.infer_settings(config, records(("ab", "a?", ["b"]))).unanswerable
    assert Answer.infer_settings(config, records(("ab", "a?", ["b"]), ("ab", "c?", []))).unanswerable
    assert Answer.infer_settings(AnswerConfig(unanswerable=True), records(("ab", "a?", ["b"]))).unanswerable


def test_invalid_settings_are_reported_together():
    with pytest.raises(ConfigError) as error:
        AnswerConfig(dropout=1.0, stride=0, longest_answer=0)
    assert [name for name, _ in error.value.problems] == ["dropout", "longest_answer", "stride"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Who?", "a row of this run is"),
        ({"question": "Who?"}, "a row of this run is"),
        ({"question": " ", "context": "ab"}, "the question is empty"),
        ({"question": "Who?", "context": "\n"}, "the context is empty"),
    ],
)
def test_invalid_rows_are_refused(row, message):
    with pytest.raises(UserError, match=message):
        make_task().columns_of([row])


def test_row_ids_default_to_row_numbers():
    columns = make_task().columns_of([{"question": "a", "context": "b"}, {"question": "c", "context": "d", "id": "x"}])
    assert columns == {"context": ["b", "d"], "question": ["a", "c"], "id": ["1", "x"]}


def test_best_threshold_matches_grid_search():
    rows = [("abc def", "a?", ["abc"] if i % 3 else []) for i in range(12)]
    task = make_task(unanswerable=True)
    data = task.prepare(records(*rows))
    rng = np.random.default_rng(0)
    outputs = [np.log(rng.dirichlet(np.ones(8), 2).T[None]).astype(np.float32) for _ in rows]  # (1, 1 + 7, 2)
    metrics = task.extra_metrics(data, outputs)

    def f1_at(threshold):
        return make_task(unanswerable=True, threshold=threshold).row_metrics(data, outputs)["f1"][0].mean()

    assert metrics["best_f1"] == pytest.approx(f1_at(metrics["best_threshold"]))
    assert metrics["best_f1"] == pytest.approx(max(f1_at(t) for t in np.linspace(-15, 15, 151)))
    assert metrics["best_f1"] > f1_at(15.0) or metrics["best_f1"] > f1_at(-15.0)
    assert make_task().extra_metrics(data, outputs) == {}
