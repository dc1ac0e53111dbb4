"""Answering questions: what is read of a long context, which tokens may answer, and what an answer is."""

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


def make(tokenizer=CHARACTERS, **config):
    return Answer(AnswerConfig(**config), tokenizer)


def records(*rows):
    """Of (context, question, answers or None), an answer being words of the context or (words, start)."""
    columns = {"context": [row[0] for row in rows], "question": [row[1] for row in rows]}
    columns["id"] = [f"q{i}" for i in range(len(rows))]
    if rows[0][2] is not None:
        placed = [[a if isinstance(a, tuple) else (a, context.index(a)) for a in found] for context, _, found in rows]
        columns["answers"] = [[{"text": text, "start": start} for text, start in found] for found in placed]
    return Records("q.json", list(range(1, len(rows) + 1)), columns)


@pytest.fixture(autouse=True)
def nothing_to_follow(request):
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


# What is read


def test_a_row_is_the_question_and_then_the_context():
    task = make()
    data = task.prepare(records(("abc", "d?", ["b"]), ("abcdef", "j", ["ef"])))
    batch = task.examples(data, length=32).batch([0, 1])
    rows = ["<sos>d?[SEP]abc[SEP]<pad>", "<sos>j[SEP]abcdef[SEP]"]
    assert [text_of(row) for row in batch.tokens.tolist()] == [rows[0] + "<pad>", rows[1]]
    assert batch.padding.sum(1).tolist() == [2, 0]
    assert batch.segments.tolist() == [[0] * 4 + [1] * 6, [0] * 3 + [1] * 7]
    assert batch.example_ids is None
    assert (batch.labels["start"].tolist(), batch.labels["end"].tolist()) == ([5, 7], [5, 8])
    assert text_of(batch.tokens[1, 7:9].tolist()) == "ef"


def test_the_two_texts_are_told_apart_where_one_mark_serves_for_all(tmp_path):
    """As in GPT-2: the opening mark is then the separator too, and must not be taken for one."""
    task = make()
    task.bos = task.separator
    batch = task.examples(task.prepare(records(("abc", "d?", ["b"]))), length=32).batch([0])
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    scores, context = task.log_probabilities(model_for(task), batch)
    assert context.tolist() == [[False] * 4 + [True] * 3 + [False]]
    assert scores.isfinite().all(-1).tolist() == [[True, *[False] * 3, *[True] * 3, False]]


@given(st.integers(0, 80), st.integers(1, 30), st.none() | st.integers(1, 40))
@example(31, 30, None)
@example(30, 30, None)
def test_windows_cover_the_context_in_order_and_none_is_idle(count, room, stride):
    found = [(window.start, window.end) for window in make(stride=stride).windows(count, room)]
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(begin < end <= begin + room for begin, end in found) or count == 0
    for (begin, end), (after, further) in pairwise(found):
        assert begin < after <= end < further
        assert end - begin == room  # only the last may be shorter, so that the first tells the room there was
    if stride is None and len(found) > 2 and room > 1:
        assert found[0][1] - found[1][0] == room - room // 2


def test_a_long_context_is_read_in_windows_of_one_example():
    task = make()
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


def test_an_answer_cut_by_a_windows_edge_is_not_in_that_window():
    task = make(stride=10)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", [("ja", 9)])))
    batch = task.examples(data, length=16).batch([0])
    assert batch.labels["start"].tolist() == batch.labels["end"].tolist() == [0, 0]


def test_questions_about_one_text_share_it():
    task = make()
    data = task.prepare(records(("abc", "a?", ["b"]), ("abcd", "b?", []), ("abc", "c?", ["c"])))
    assert data.passages[0] is data.passages[2]
    assert data.labels == [["b"], [], ["c"]]
    assert data.answer_spans == [(1, 1), None, (2, 2)]
    part = data.select([2, 1])
    assert (part.ids, part.locations, part.labels) == (["q2", "q1"], ["q.json:3", "q.json:2"], [["c"], []])


def test_a_long_question_is_cut_and_a_row_too_short_for_any_context_refused():
    task = make(longest_question=6)
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
def test_the_tokens_of_an_answer_cover_it_and_little_more(kind, data):
    context = " ".join(data.draw(st.lists(st.sampled_from(["the", "cats", "sat", "mat", "é", "naïve"]), min_size=1)))
    begin = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(begin + 1, len(context)))
    if not context[begin:end].strip():
        return
    task = make(PIECES[kind])
    made = task.prepare(records((context, "the cat", [(context[begin:end], begin)])))
    passage, (first, last) = made.passages[0], made.answer_spans[0]
    wanted = context[begin:end].strip()
    at = begin + context[begin:end].index(wanted)
    start, stop = passage.characters(first, last)
    assert start <= at
    assert stop >= at + len(wanted)
    assert passage.text[start:stop] == passage.text[start:stop].strip()
    assert passage.offsets[first, 1] > begin  # neither end token lies wholly outside
    assert passage.offsets[last, 0] < end


def test_an_answer_inside_a_token_takes_the_whole_token():
    task = make(PIECES["wordpiece"])
    made = task.prepare(records(("the cat sat", "the", [("a", 5)])))
    first, last = made.answer_spans[0]
    begin, end = made.passages[0].characters(first, last)
    assert first == last
    assert begin <= 5 < end


def test_an_answer_that_no_token_stands_for_is_in_no_window():
    passage = Passage("a b", [1, 2], np.array([[0, 1], [2, 3]]))
    assert passage.token_span(1, 2) is None
    assert passage.token_span(0, 3) == (0, 1)


# The loss


def test_the_loss_is_that_of_the_opening_and_the_context_alone():
    task = make(dropout=0.0)
    model = model_for(task)
    data = task.prepare(records(("abc", "d?", ["bc"]), ("abcdef", "j", ["e"])))
    batch = task.examples(data, length=32).batch([0, 1])
    logits = model.heads["span"](model(batch).hidden)
    wanted = {"start": 0.0, "end": 0.0}
    for row, places in enumerate(([0, 4, 5, 6], [0, 3, 4, 5, 6, 7, 8])):
        for side, head in enumerate(wanted):
            label = torch.tensor(places.index(int(batch.labels[head][row])))
            wanted[head] += float(nn.functional.cross_entropy(logits[row, places, side], label))
    found = task.losses(model, batch)
    assert {head: float(found[head]) for head in wanted} == pytest.approx(wanted, rel=1e-5)
    smooth = task.losses(model, batch, smoothing=0.2)
    places, label = [0, 4, 5, 6], torch.tensor(2)
    one = task.examples(data.select([0]), length=32).batch([0])
    by_torch = nn.functional.cross_entropy(logits[0, places, 0], label, label_smoothing=0.2)
    assert float(task.losses(model, one, smoothing=0.2)["start"]) == pytest.approx(float(by_torch), rel=1e-4)
    assert float(smooth["start"]) != pytest.approx(float(found["start"]))


def test_the_gradient_is_finite_and_rows_that_only_fill_up_count_for_nothing():
    task = make(dropout=0.0)
    model = model_for(task)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", ["c"]), ("ab", "c?", ["b"]), ("abcd", "c?", [])))
    examples = task.examples(data, length=16)
    plain, more = padded_batch(examples, [0, 1], 2), padded_batch(examples, [0, 1], 4, filler=0)
    assert len(more.tokens) == len(plain.tokens) + 2 * 3
    assert (more.labels["start"] == IGNORE_INDEX).sum() == 2 * 3
    assert task.counts(more) == task.counts(plain) == {"start": 4, "end": 4}
    assert task.tokens(more) == task.tokens(plain)
    one, other = task.losses(model, plain, smoothing=0.1), task.losses(model, more, smoothing=0.1)
    for name in one:
        assert one[name].item() == pytest.approx(other[name].item(), rel=1e-5)
    assert one["questions"] == 2
    (one["start"] + one["end"]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


class Known(nn.Module):
    """Stands in for the head: scores that are as good as certain, or as sure as they say, right or not."""

    def __init__(self, spans):
        super().__init__()
        self.spans = spans

    def forward(self, vectors):
        scores = torch.zeros(*vectors.shape[:2], 2)
        for row, (start, end, *sure) in enumerate(self.spans):
            scores[row, start, 0] = scores[row, end, 1] = sure[0] if sure else 20.0
        return scores


def hits(task, batch, *spans):
    model = model_for(task)
    model.heads["span"] = Known(spans)
    found = task.losses(model, batch)
    return int(found["correct"]), int(found["questions"])


def test_accuracy_is_the_share_of_questions_whose_very_span_is_found():
    task = make()
    data = task.prepare(records(("abcd", "d?", ["bc"]), ("abcd", "j?", ["d"])))
    batch = task.examples(data, length=32).batch([0, 1])
    assert hits(task, batch, (5, 6), (7, 7)) == (2, 2)
    assert hits(task, batch, (5, 5), (7, 7)) == (1, 2)
    assert hits(task, batch, (0, 0), (7, 7)) == (1, 2)
    metrics = task.score({"start": 4.0, "end": 2.0, "correct": 1.0, "questions": 2.0}, {"start": 4, "end": 4}, size=0)
    assert metrics == {"loss": 0.75, "accuracy": 0.5}
    assert (
        task.selection_score(metrics)
        > task.selection_score(metrics | {"accuracy": 0.6})
        > task.selection_score({"loss": 9.0, "accuracy": 0.61})
    )


def test_windows_of_one_question_make_one_hit():
    task = make()
    data = task.prepare(records(("abcdefghij" * 2, "ab?", [("b", 11)])))
    batch = task.examples(data, length=16).batch([0])
    assert batch.labels["start"].tolist() == [0, 11, 6]
    assert hits(task, batch, (0, 0), (11, 11), (6, 6)) == (1, 1)
    assert hits(task, batch, (0, 0), (11, 11), (0, 0)) == (1, 1)
    assert hits(task, batch, (7, 7), (0, 0), (0, 0)) == (0, 1)
    assert hits(task, batch, (7, 7, 4.0), (11, 11, 6.0), (0, 0)) == (1, 1)
    assert hits(task, batch, (7, 7, 6.0), (11, 11, 4.0), (0, 0)) == (0, 1)  # the surer window speaks
    either = make(unanswerable=True)
    assert hits(either, batch, (0, 0), (11, 11, 4.0), (0, 0)) == (1, 1)
    assert hits(either, batch, (0, 0), (0, 0), (0, 0)) == (0, 1)


def test_to_say_nothing_is_a_hit_only_where_there_is_no_answer():
    rows = records(("abcd", "d?", ["bc"]), ("abcd", "j?", []))
    answerable, either = make(), make(unanswerable=True)
    batch = either.examples(either.prepare(rows), length=32).batch([0, 1])
    assert batch.labels["start"].tolist() == [5, 0]
    assert hits(either, batch, (5, 6), (0, 0)) == (2, 2)
    assert hits(either, batch, (0, 0), (0, 0)) == (1, 2)
    assert hits(either, batch, (5, 6), (5, 6)) == (1, 2)
    assert hits(answerable, batch, (5, 6), (0, 0)) == (1, 2)
    assert hits(make(unanswerable=True, threshold=99.0), batch, (5, 6), (0, 0)) == (1, 2)
    more = padded_batch(either.examples(either.prepare(rows), length=32), [1], 3, filler=1)
    assert hits(either, more, (0, 0), (0, 0), (0, 0)) == (1, 1)


# From numbers to answers


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 99))
def test_the_best_span_is_the_best_of_all_that_may_be(count, longest, seed):
    scores = torch.randn(2, count, 2, generator=torch.Generator().manual_seed(seed))
    scores[1, count // 2 + 1 :] = -torch.inf  # a shorter row
    firsts, lasts, bests = best_spans(scores, longest)
    for row in range(2):
        every = {
            (i, j): float(scores[row, i, 0] + scores[row, j, 1])
            for i in range(count)
            for j in range(i, min(count, i + longest))
        }
        assert (int(firsts[row]), int(lasts[row])) == max(every, key=every.__getitem__)
        assert float(bests[row]) == max(every.values())


def peaked(rows, width, *spans, sure=8.0):
    """Scores of (rows, 1 + width, 2) with certain starts and ends at (row, start, end), where 0 is no answer."""
    scores = torch.zeros(rows, 1 + width, 2)
    for row, start, end in spans:
        scores[row, start, 0] = scores[row, end, 1] = 8.0 if start == 0 else sure
    return scores.log_softmax(1).numpy()


def test_an_answer_is_found_where_its_window_stands_in_the_context():
    task = make()
    context = "abcdefghij" * 2
    data = task.prepare(records((context, "ab?", None)))
    found = task.predictions(data, [peaked(3, 10, (0, 0, 0), (1, 8, 10), (2, 0, 0))])
    assert found == [{"id": "q0", "answer": "cde", "start": 12, "end": 15, "score": found[0]["score"]}]
    assert 0.9 < found[0]["score"] <= 1
    unsure = task.predictions(data, [peaked(3, 10)])[0]
    assert 0 < unsure["score"] < 0.1
    assert unsure["answer"] == context[unsure["start"] : unsure["end"]]


def test_no_answer_is_given_only_where_all_windows_say_so_and_by_enough():
    data = make().prepare(records(("abcdefghij" * 2, "ab?", None)))
    nowhere = peaked(3, 10, (0, 0, 0), (1, 0, 0), (2, 0, 0))
    somewhere = peaked(3, 10, (0, 0, 0), (1, 4, 4), (2, 0, 0), sure=5.0)  # less sure than the others are of nothing
    either = make(unanswerable=True)
    said = either.predictions(data, [nowhere])[0]
    assert (said["answer"], said["start"], said["end"]) == ("", None, None)
    assert 0.9 < said["score"] <= 1
    assert either.predictions(data, [somewhere])[0]["answer"] == "i"
    assert make().predictions(data, [nowhere])[0]["answer"]  # a model that saw no such question always answers
    assert make(unanswerable=True, threshold=20.0).predictions(data, [nowhere])[0]["answer"]


def test_an_answer_neither_is_nor_begins_nor_ends_with_white_space():
    task = make()
    data = task.prepare(records(("ab  cd", "ab?", None), ("  ", "a", None)))
    blank = peaked(1, 2, (0, 1, 2))
    for start, end in ((3, 4), (3, 5), (2, 3)):
        row, empty = task.predictions(data, [peaked(1, 6, (0, start, end)), blank])
        assert row["answer"] == "ab  cd"[row["start"] : row["end"]] == row["answer"].strip() != ""
        assert (empty["answer"], empty["start"], empty["end"]) == ("", None, None)
    across = task.predictions(data, [peaked(1, 6, (0, 2, 5)), blank])[0]
    assert (across["answer"], across["start"], across["end"]) == ("b  c", 1, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_are_of_every_context_token_in_every_window(causal):
    task = make()
    model = model_for(task, causal=causal)
    context = "abcdefghij" * 2 + "abc"
    data = task.prepare(records((context, "ab?", None), ("ab", "c?", None)))
    found = model_outputs(model, task, data, length=16)
    assert [one.shape for one in found] == [(4, 11, 2), (1, 3, 2)]
    assert np.isneginf(found[0][3, 9:]).all()  # the last window reads 8 tokens
    assert np.isfinite(found[0][:3]).all()
    for one in found:
        assert np.exp(one).sum(1) == pytest.approx(np.ones((len(one), 2)), abs=1e-5)
    alone = model_outputs(model, task, data.select([0]), length=16)
    assert alone[0] == pytest.approx(found[0], abs=1e-4)
    for row in task.predictions(data, found):
        assert row["answer"] == (context if row["id"] == "q0" else "ab")[row["start"] : row["end"]]
        assert 0 < row["score"] <= 1


def test_several_models_are_averaged_token_by_token():
    task = make()
    data = task.prepare(records(("abcdefghij" * 2 + "abc", "ab?", None), ("ab", "c?", None)))
    several = [model_outputs(model_for(task, seed=seed), task, data, length=16) for seed in (0, 1)]
    mean = ensemble_mean(several)
    assert [one.shape for one in mean] == [one.shape for one in several[0]]
    assert mean[1] == pytest.approx((several[0][1] + several[1][1]) / 2)
    assert all(0 < row["score"] <= 1 for row in task.predictions(data, mean))


def test_a_causal_models_opening_hears_nothing_but_a_bidirectional_ones_does():
    task = make()
    data = task.prepare(records(("abcdefg", "ab?", None), ("jjjjjjj", "ab?", None)))
    for causal in (True, False):
        model = model_for(task, causal=causal)
        one, other = model(task.examples(data, length=32).batch([0, 1])).hidden[:, 0]
        assert torch.allclose(one, other, atol=1e-5) is causal


@pytest.mark.parametrize("layers", ["last", "mix", "sum4", "2"])
def test_what_a_frozen_backbone_saw_gives_the_same_answers(layers):
    task = make(layers=layers, dropout=0.0)
    model = model_for(task, depth=4)
    data = task.prepare(records(("abcdefghij" * 2, "ab?", ["c"]), ("ab", "c?", ["b"]), ("abcd", "c?", ["d"])))
    kept = cache_features(model, task, data, length=16)
    fresh, known = (task.examples(rows, length=16).batch([2, 0]) for rows in (data, kept))
    for one, other in zip(task.losses(model, fresh).values(), task.losses(model, known).values(), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-4)
    for one, other in zip(task.outputs(model, fresh), task.outputs(model, known), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_tallies_are_those_of_the_official_scores():
    task = make()
    data = task.prepare(records(("abc def", "a?", ["abc", "abc def"]), ("abc def", "b?", ["abc def"])))
    found = task.row_metrics(data, [peaked(1, 7, (0, 1, 3)), peaked(1, 7, (0, 1, 3))])
    assert found["exact_match"][0].tolist() == [1.0, 0.0]
    assert found["f1"][0].tolist() == pytest.approx([1.0, 2 / 3])
    assert all((of == 1).all() for _, of in found.values())
    assert task.primary_metric == "f1"


# Settings and rows


def test_training_rows_tell_whether_there_may_be_no_answer():
    config = AnswerConfig()
    assert not Answer.infer_settings(config, records(("ab", "a?", ["b"]))).unanswerable
    assert Answer.infer_settings(config, records(("ab", "a?", ["b"]), ("ab", "c?", []))).unanswerable
    assert Answer.infer_settings(AnswerConfig(unanswerable=True), records(("ab", "a?", ["b"]))).unanswerable


def test_wrong_settings_are_named_together():
    with pytest.raises(ConfigError) as wrong:
        AnswerConfig(dropout=1.0, stride=0, longest_answer=0)
    assert [where for where, _ in wrong.value.problems] == ["dropout", "longest_answer", "stride"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Who?", "a row of this run is"),
        ({"question": "Who?"}, "a row of this run is"),
        ({"question": " ", "context": "ab"}, "the question is empty"),
        ({"question": "Who?", "context": "\n"}, "the context is empty"),
    ],
)
def test_rows_that_are_no_question_are_refused(row, said):
    with pytest.raises(UserError, match=said):
        make().columns_of([row])


def test_rows_have_an_id_of_their_own_or_their_number():
    made = make().columns_of([{"question": "a", "context": "b"}, {"question": "c", "context": "d", "id": "x"}])
    assert made == {"context": ["b", "d"], "question": ["a", "c"], "id": ["1", "x"]}


def test_the_best_threshold_is_the_best_of_all_that_could_be_set():
    """As the official script's best F1: no threshold on a fine grid does better, and the one named does as well."""
    rows = [("abc def", "a?", ["abc"] if i % 3 else []) for i in range(12)]
    task = make(unanswerable=True)
    data = task.prepare(records(*rows))
    draw = np.random.default_rng(0)
    found = [np.log(draw.dirichlet(np.ones(8), 2).T[None]).astype(np.float32) for _ in rows]  # (1, 1 + 7, 2)
    told = task.extra_metrics(data, found)

    def f1_at(threshold):
        return make(unanswerable=True, threshold=threshold).row_metrics(data, found)["f1"][0].mean()

    assert told["best_f1"] == pytest.approx(f1_at(told["best_threshold"]))
    assert told["best_f1"] == pytest.approx(max(f1_at(t) for t in np.linspace(-15, 15, 601)))
    assert told["best_f1"] > f1_at(15.0) or told["best_f1"] > f1_at(-15.0)
    assert make().extra_metrics(data, found) == {}
