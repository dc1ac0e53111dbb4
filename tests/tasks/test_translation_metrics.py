"""BLEU and chrF from counts kept apart by sentence are sacrebleu's own numbers, on any text."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.intervals import SufficientStatistics
from headstock.tasks.labelled import metric_value
from headstock.tasks.text_metrics import bleu, bleu_counts, chrf, chrf_counts, sacrebleu_signatures

SAID = ["The cat sat on the mat.", "A dog", "", "It's 3.5 p.m. already, isn't it?", "the the the the", "x"]
WANTED = ["A cat sat on the mat today.", "A dog ran.", "Nothing.", "It is 3.5 p.m. already, isn't it?", "the cat", "y"]

sentences = st.lists(st.sampled_from(["the", "cat", "dog,", "sat.", "on", "É", "3.5", "a"]), max_size=9).map(" ".join)


def ours(said, wanted):
    return float(bleu(bleu_counts(said, wanted).sum(0))), float(chrf(chrf_counts(said, wanted).sum(0)))


def theirs(said, wanted):
    return sacrebleu.corpus_bleu(said, [wanted]).score / 100, sacrebleu.corpus_chrf(said, [wanted]).score / 100


@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 2), slice(2, 3), slice(5, 6), slice(0, 0)])
def test_the_sum_of_the_counts_gives_sacrebleus_corpus_score(rows):
    if SAID[rows]:
        assert ours(SAID[rows], WANTED[rows]) == pytest.approx(theirs(SAID[rows], WANTED[rows]), abs=1e-12)
    else:
        assert bleu_counts([], []).shape == (0, 10) and chrf_counts([], []).shape == (0, 18)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sentences, sentences.filter(bool)), min_size=1, max_size=6))
def test_so_do_any_sentences(pairs):
    said, wanted = map(list, zip(*pairs, strict=True))
    assert ours(said, wanted) == pytest.approx(theirs(said, wanted), abs=1e-9)


def test_many_samples_are_scored_at_once():
    counts = bleu_counts(SAID, WANTED), chrf_counts(SAID, WANTED)
    for score, found in zip((bleu, chrf), counts, strict=True):
        samples = np.stack([found[[0, 1]].sum(0), found[[3, 3, 0]].sum(0)])
        assert score(samples) == pytest.approx([float(score(one)) for one in samples])
        assert score(samples[None]).shape == (1, 2)


def test_a_corpus_score_is_no_mean_of_sentence_scores():
    counts = bleu_counts(SAID, WANTED)
    assert metric_value(SufficientStatistics(counts, bleu)) != pytest.approx(float(bleu(counts).mean()))


def test_the_signature_says_how_it_was_counted():
    told = sacrebleu_signatures()
    assert set(told) == {"bleu", "chrf"}
    assert "tok:13a" in told["bleu"] and f"version:{sacrebleu.__version__}" in told["bleu"]
    assert "nc:6" in told["chrf"] and "nrefs:1" in told["chrf"]
