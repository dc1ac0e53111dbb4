"""Measures of generated text against references, brute force and closed forms."""

import random

import numpy as np
import pytest

from headstock.errors import HeadstockError
from headstock.inference.generation_quality import Passage, QualityJudge, TextSet, control_sets, parse_decoding
from headstock.inference.mauve import kl, mauve, mauve_of_histograms
from headstock.inference.text_quality import (
    CopyDetector,
    distinct,
    longest_repeat,
    mean_interval,
    repetition,
    self_bleu,
    zipf_coefficient,
)
from headstock.intervals import jackknife_interval

MAUVE_TEXT = 0.2711696522515651  # by the package mauve-text 0.4.0, for the histograms of the test


def random_texts(count, *, words="abcdef", seed=0, longest=14):
    pick = random.Random(seed)
    return [[pick.choice(words) for _ in range(pick.randint(1, longest))] for _ in range(count)]


def contains(document, span):
    return any(document[i : i + len(span)] == span for i in range(len(document) - len(span) + 1))


def test_repetition_matches_its_definition():
    assert repetition(["a", "b", "c", "d"], 2) == 0
    assert repetition(["a"] * 10, 4) == pytest.approx(6 / 7)
    assert repetition(["a"], 4) == 0
    for words in random_texts(60):
        spans = [words[i:j] for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
        repeated = [span for span in spans if spans.count(span) > 1]
        assert longest_repeat(words) == max(map(len, repeated), default=0), words


def test_self_bleu_is_the_sentence_bleu_of_sacrebleu_against_the_others():
    import sacrebleu

    texts = [*random_texts(8), ["z"], list("abcdefabc"), list("abcdefabc")]
    for i, words in enumerate(texts):
        others = [" ".join(other) for j, other in enumerate(texts) if j != i]
        expected = sacrebleu.sentence_bleu(" ".join(words), others, tokenize="none").score
        assert self_bleu(texts)[i] == pytest.approx(expected, abs=1e-6), words


def test_diversity_and_zipf():
    assert distinct([list("ab"), list("ab")], 1) == 0.5 and distinct([list("ab"), list("cd")], 2) == 1
    zipf = [[f"w{rank}"] * round(10_000 / rank) for rank in range(1, 200)]
    uniform = [[f"w{rank}"] * 50 for rank in range(200)]
    assert zipf_coefficient(zipf) == pytest.approx(1, abs=0.01)
    assert zipf_coefficient(uniform) == pytest.approx(0, abs=1e-9)


def test_intervals_match_the_standard_error_of_a_mean():
    values = np.random.default_rng(0).normal(3, 1, 400).tolist()
    expected = 1.96 * np.std(values, ddof=1) / 20
    bootstrap, jackknife = mean_interval(values, key="x"), jackknife_interval(lambda part: float(np.mean(part)), values)
    assert (bootstrap.high - bootstrap.low) / 2 == pytest.approx(expected, rel=0.1)
    assert (jackknife.high - jackknife.low) / 2 == pytest.approx(expected, rel=0.4)
    # a bootstrap of distinct-n would be biased: a resample has texts twice
    texts = random_texts(100, words=[f"w{i}" for i in range(500)])
    resample = [texts[i] for i in np.random.default_rng(0).integers(100, size=100)]
    interval = jackknife_interval(lambda part: distinct(part, 2), texts)
    assert distinct(resample, 2) < interval.low <= distinct(texts, 2)


def test_copies_are_found_within_documents():
    training = [" ".join(words) for words in random_texts(12, seed=1, words="abcdefgh", longest=30)]
    texts = [*random_texts(20, words="abcdefgh"), [], ["unknown"], training[3].split()]
    longest, shares = CopyDetector(texts, training).measure(3)
    for words, size, share in zip(texts, longest, shares, strict=True):
        spans = [(i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
        copied = [(i, j) for i, j in spans if any(contains(document.split(), words[i:j]) for document in training)]
        assert size == max((j - i for i, j in copied), default=0)
        covered = {k for i, j in copied if j - i >= 3 for k in range(i, j)}
        assert share == pytest.approx(len(covered) / max(1, len(words)))
    assert longest[-1] == len(texts[-1])


def test_mauve_of_histograms():
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    assert mauve_of_histograms(p, p) == pytest.approx(1, abs=1e-4)
    # disjoint: the curve is ((1 - w)^5, w^5), whose area is 5 B(6, 5)
    disjoint = mauve_of_histograms(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    assert disjoint == pytest.approx(5 * 120 * 24 / 3628800, rel=0.1)
    assert mauve_of_histograms(p, q) == pytest.approx(MAUVE_TEXT, abs=1e-9)
    assert mauve_of_histograms(q, p) == pytest.approx(mauve_of_histograms(p, q), abs=1e-9)
    assert kl(q, q) == 0 < kl(p, q) < kl(q, p) == np.inf


def test_mauve_of_embeddings_falls_with_their_distance():
    draw = np.random.default_rng(0)
    human = draw.normal(size=(200, 8))
    values = [mauve(human, draw.normal(size=(200, 8)) + shift * np.eye(8)[0]) for shift in (0, 1, 3)]
    assert values[0].mean > 0.9 > values[1].mean > values[2].mean and values[2].mean < 0.1
    assert all(value.low <= value.mean <= value.high for value in values)
    assert mauve(human, human[:1].repeat(200, 0)).mean < 0.1  # one text for all


def test_controls_fail_the_measure_they_are_made_for():
    texts = [f"the {i}a cat and the {i}b dog met a {i}c bird near that {i}d river" for i in range(10)]
    human = TextSet("human", [Passage("once", f" {text}") for text in texts])
    shuffled, looped, same, training = control_sets(human, [Passage("", text) for text in texts[:4]])
    judge = QualityJudge(training=texts[:4])
    measures = {part.name: judge.measure(part).measures for part in (human, shuffled, looped, same, training)}
    assert measures["human"]["rep_4"].mean == 0 < 0.5 < measures["looped words"]["rep_4"].mean
    assert measures["one text"]["self_bleu"].mean == pytest.approx(100)
    assert measures["one text"]["distinct_2"].mean < measures["human"]["distinct_2"].mean
    assert measures["training text"]["copied"].mean == 1 > measures["shuffled words"]["copied"].mean
    assert sorted(shuffled.words[0]) == sorted(human.words[0]) and shuffled.words[0] != human.words[0]


@pytest.mark.parametrize("text", ["topp=0.9", "top_p=2", "top_k=many", "top_p", "nothing"])
def test_unknown_decoding_is_refused(text):
    with pytest.raises(HeadstockError, match=r"top|must be"):
        parse_decoding(text)


def test_decoding():
    assert parse_decoding("greedy") == {"temperature": 0} and parse_decoding("sample") == {}
    assert parse_decoding("top_k=5, temperature=0.5") == {"top_k": 5, "temperature": 0.5}
