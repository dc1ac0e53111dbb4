"""Answers score what the official SQuAD evaluation gives them; every number here was worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.tasks.text_metrics import answer_f1, exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The Cat", "cat"),
        ("  an  old\u00a0 man\n", "old man"),
        ("Eiffel-Tower", "eiffeltower"),
        ("U.S.", "us"),
        ("theatre banana", "theatre banana"),
        ("A, the; an.", ""),
        ("the-cat", "thecat"),  # punctuation goes first, so the article is no word any more
        ("«\u00a0Été\u00a0»", "« été »"),  # only ASCII punctuation goes
        ("il y a", "il y"),
        ("$3,000", "3000"),
        ("", ""),
    ],
)
def test_what_is_compared(text, wanted):
    assert normalize_answer(text) == wanted


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("the cat", ["Cat!"], 1, 1),
        ("cat", ["dog", "cat"], 1, 1),
        ("big cat", ["cat"], 0, 2 / 3),  # precision 1/2, recall 1
        ("big black cat", ["black cat sat"], 0, 2 / 3),  # two of three both ways
        ("cat cat", ["cat"], 0, 2 / 3),  # a word counts as often as it is there
        ("cat cat", ["cat cat dog"], 0, 0.8),
        ("cat black", ["black cat"], 0, 1),  # order matters to the exact match alone
        ("dog", ["cat"], 0, 0),
        ("big cat", ["cat", "a big old cat"], 0, 0.8),  # the better of two
        ("", ["cat"], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),  # nothing is left of it
        ("cat", [], 0, 0),
        ("cat", ["cat", "the"], 1, 1),
        ("the", ["cat", "the"], 0, 0),  # of "the" nothing is left, so only "cat" is an answer
        ("the", ["a"], 1, 1),
    ],
)
def test_scores_worked_out_by_hand(prediction, answers, exact, overlap):
    assert exact_match(prediction, answers) == exact
    assert answer_f1(prediction, answers) == pytest.approx(overlap)


words = st.lists(st.sampled_from(["the", "a", "Cat", "cat,", "dog", "été", "42", "-", ""])).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, st.lists(words, max_size=3))
def test_scores_are_shares_and_an_exact_match_is_a_full_overlap(prediction, answers):
    exact, overlap = exact_match(prediction, answers), answer_f1(prediction, answers)
    assert 0 <= exact <= overlap <= 1
    assert exact in (0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, words)
def test_overlap_has_no_sides(one, other):
    assert answer_f1(one, [other]) == pytest.approx(answer_f1(other, [one]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, st.lists(words.filter(normalize_answer), min_size=1, max_size=3))
def test_more_answers_never_hurt(prediction, answers):
    assert answer_f1(prediction, answers) == max(answer_f1(prediction, [answer]) for answer in answers)
    assert exact_match(prediction, answers) == max(exact_match(prediction, [answer]) for answer in answers)
