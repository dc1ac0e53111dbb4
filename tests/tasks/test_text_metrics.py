"""Metrics of predicted text, against official implementations and values computed by hand."""

import warnings

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.intervals import SufficientStatistics
from headstock.tasks.labelled import metric_value
from headstock.tasks.text_metrics import (
    answer_f1,
    bleu,
    bleu_counts,
    chrf,
    chrf_counts,
    entities,
    entity_counts,
    exact_match,
    is_entity_scheme,
    normalize_answer,
    sacrebleu_signatures,
)

# SQuAD: values computed by hand


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),
        ("  an  old\u00a0 man\n", "old man"),
        ("Eiffel-Tower", "eiffeltower"),
        ("U.S.", "us"),
        ("theatre banana", "theatre banana"),
        ("A, the; an.", ""),
        ("the-cat", "thecat"),  # punctuation is removed before articles
        ("«\u00a0Été\u00a0»", "« été »"),  # only ASCII punctuation is removed
        ("il y a", "il y"),
        ("$3,000", "3000"),
        ("", ""),
    ],
)
def test_normalize_answer(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("the cat", ["Cat!"], 1, 1),
        ("cat", ["dog", "cat"], 1, 1),
        ("big cat", ["cat"], 0, 2 / 3),  # precision 1/2, recall 1
        ("big black cat", ["black cat sat"], 0, 2 / 3),  # two of three both ways
        ("cat cat", ["cat"], 0, 2 / 3),  # repeated words count
        ("cat cat", ["cat cat dog"], 0, 0.8),
        ("cat black", ["black cat"], 0, 1),  # order matters only for the exact match
        ("dog", ["cat"], 0, 0),
        ("big cat", ["cat", "a big old cat"], 0, 0.8),  # the better of two
        ("", ["cat"], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),  # empty after normalization
        ("cat", [], 0, 0),
        ("cat", ["cat", "the"], 1, 1),
        ("the", ["cat", "the"], 0, 0),  # "the" is empty after normalization
        ("the", ["a"], 1, 1),
    ],
)
def test_answer_scores(prediction, answers, exact, overlap):
    assert exact_match(prediction, answers) == exact
    assert answer_f1(prediction, answers) == pytest.approx(overlap)


words = st.lists(st.sampled_from(["the", "a", "Cat", "cat,", "dog", "été", "42", "-", ""])).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, st.lists(words, max_size=3))
def test_exact_match_is_at_most_f1(prediction, answers):
    exact, overlap = exact_match(prediction, answers), answer_f1(prediction, answers)
    assert 0 <= exact <= overlap <= 1
    assert exact in (0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, words)
def test_answer_f1_is_symmetric(first, second):
    assert answer_f1(first, [second]) == pytest.approx(answer_f1(second, [first]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words, st.lists(words.filter(normalize_answer), min_size=1, max_size=3))
def test_best_answer_counts(prediction, answers):
    assert answer_f1(prediction, answers) == max(answer_f1(prediction, [answer]) for answer in answers)
    assert exact_match(prediction, answers) == max(exact_match(prediction, [answer]) for answer in answers)


# Entities


CASES = [
    ("O O", []),
    ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
    ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # another type cannot continue it
    ("O I-PER I-PER", [("PER", 1, 3)]),  # IOB1, or an invalid IOB2 sequence
    ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),  # IOB1 separates entities of one type by B
    ("I-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
    ("B-PER I-PER E-PER S-LOC", [("PER", 0, 3), ("LOC", 3, 4)]),
    ("B-PER L-PER U-PER", [("PER", 0, 2), ("PER", 2, 3)]),
    ("B-PER L-PER B-PER L-PER", [("PER", 0, 2), ("PER", 2, 4)]),
    ("B-PER E-PER I-PER", [("PER", 0, 2), ("PER", 2, 3)]),  # nothing continues after an end
    ("E-PER E-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("S-PER I-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER S-PER O", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-MY-KIND I-MY-KIND", [("MY-KIND", 0, 2)]),
]


@pytest.mark.parametrize(("tags", "expected"), CASES)
def test_entities(tags, expected):
    assert entities(tags.split()) == expected


def test_no_entities_without_words():
    assert entities([]) == []


def test_entity_counts_by_sentence():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "O"], ["B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC"], ["B-PER"]]
    numerators, denominators = entity_counts(predicted, gold)
    assert numerators.tolist() == [2, 0, 2]
    assert denominators.tolist() == [4, 1, 2]
    # precision 2/4, recall 2/3
    assert numerators.sum() / denominators.sum() == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_partial_entity_is_wrong():
    numerators, denominators = entity_counts([["B-PER", "O"]], [["B-PER", "I-PER"]])
    assert (numerators.tolist(), denominators.tolist()) == ([0], [2])


def test_different_lengths_are_refused():
    with pytest.raises(ValueError, match="sentence 0: 1 predicted tags for 2 words"):
        entity_counts([["O"]], [["O", "O"]])


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (["O", "B-PER", "I-PER"], True),
        (["I-PER", "O"], True),
        (["B-PER", "S-PER"], True),
        (["O", "U-LOC", "L-LOC"], True),
        (["NOUN", "VERB"], False),
        (["O", "B-PER", "NOUN"], False),
        (["O"], False),
        ([], False),
        (["B", "I", "O"], False),
        (["B-", "O"], False),
        (["X-PER", "O"], False),
    ],
)
def test_is_entity_scheme(classes, expected):
    assert is_entity_scheme(classes) is expected


tag = st.sampled_from(["O", "B-A", "I-A", "E-A", "S-A", "L-A", "U-A", "B-B", "I-B"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(tag))
def test_entities_cover_the_tagged_words(tags):
    spans = entities(tags)
    covered = [word for _, start, end in spans for word in range(start, end)]
    assert covered == [index for index, tag in enumerate(tags) if tag != "O"]
    assert all(tags[word].endswith(entity_type) for entity_type, start, end in spans for word in range(start, end))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(tag))
def test_correct_prediction_scores_one(tags):
    numerators, denominators = entity_counts([tags], [tags])
    assert numerators.tolist() == denominators.tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(tag, tag), min_size=1), min_size=1))
def test_entity_f1_matches_seqeval(pairs):
    metrics = pytest.importorskip("seqeval.metrics")
    aliases = {"L": "E", "U": "S"}  # seqeval reads these only in strict mode
    sides = [
        [[aliases.get(tag[0], tag[0]) + tag[1:] for tag in side] for side in zip(*row, strict=True)] for row in pairs
    ]
    predicted, gold = ([side[i] for side in sides] for i in range(2))
    numerators, denominators = entity_counts(predicted, gold)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sentences without entities
        expected = metrics.f1_score(gold, predicted)
    assert numerators.sum() / max(1, denominators.sum()) == pytest.approx(expected)


# BLEU and chrF


HYPOTHESES = ["The cat sat on the mat.", "A dog", "", "It's 3.5 p.m. already, isn't it?", "the the the the", "x"]
REFERENCES = [
    "A cat sat on the mat today.",
    "A dog ran.",
    "Nothing.",
    "It is 3.5 p.m. already, isn't it?",
    "the cat",
    "y",
]

sentences = st.lists(st.sampled_from(["the", "cat", "dog,", "sat.", "on", "É", "3.5", "a"]), max_size=9).map(" ".join)


def our_scores(hypotheses, references):
    return float(bleu(bleu_counts(hypotheses, references).sum(0))), float(
        chrf(chrf_counts(hypotheses, references).sum(0))
    )


def sacrebleu_scores(hypotheses, references):
    return sacrebleu.corpus_bleu(hypotheses, [references]).score / 100, sacrebleu.corpus_chrf(
        hypotheses, [references]
    ).score / 100


@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 2), slice(2, 3), slice(5, 6), slice(0, 0)])
def test_summed_counts_give_the_corpus_score(rows):
    if HYPOTHESES[rows]:
        assert our_scores(HYPOTHESES[rows], REFERENCES[rows]) == pytest.approx(
            sacrebleu_scores(HYPOTHESES[rows], REFERENCES[rows]), abs=1e-12
        )
    else:
        assert bleu_counts([], []).shape == (0, 10) and chrf_counts([], []).shape == (0, 18)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sentences, sentences.filter(bool)), min_size=1, max_size=6))
def test_random_sentences_match_sacrebleu(pairs):
    hypotheses, references = map(list, zip(*pairs, strict=True))
    assert our_scores(hypotheses, references) == pytest.approx(sacrebleu_scores(hypotheses, references), abs=1e-9)


def test_samples_are_scored_at_once():
    counts = bleu_counts(HYPOTHESES, REFERENCES), chrf_counts(HYPOTHESES, REFERENCES)
    for score, statistics in zip((bleu, chrf), counts, strict=True):
        samples = np.stack([statistics[[0, 1]].sum(0), statistics[[3, 3, 0]].sum(0)])
        assert score(samples) == pytest.approx([float(score(sample)) for sample in samples])
        assert score(samples[None]).shape == (1, 2)


def test_corpus_score_is_not_the_mean_sentence_score():
    counts = bleu_counts(HYPOTHESES, REFERENCES)
    assert metric_value(SufficientStatistics(counts, bleu)) != pytest.approx(float(bleu(counts).mean()))


def test_signatures():
    signatures = sacrebleu_signatures()
    assert set(signatures) == {"bleu", "chrf"}
    assert "tok:13a" in signatures["bleu"] and f"version:{sacrebleu.__version__}" in signatures["bleu"]
    assert "nc:6" in signatures["chrf"] and "nrefs:1" in signatures["chrf"]
