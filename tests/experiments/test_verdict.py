"""A verdict says what the intervals support, in words that follow their signs, and nothing more."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.experiments.demo import honest
from headstock.experiments.verdict import features_verdict
from headstock.experiments.verdict import verdict as verdict_sentence

ARMS = {"pretrained": "pretrained", "scratch": "scratch", "frozen": "frozen", "tfidf": "tfidf"}


def verdict(scores: dict[str, float], gaps: dict[tuple[str, str], tuple], *, labels=400, arms=ARMS, seeds=3) -> str:
    """Scores and gaps in points; an arm's own interval is two points either way."""
    spread = (None, None) if seeds < 2 else (-0.02, 0.02)
    summary = [
        {
            "arm": name,
            "labels": labels,
            "score": score / 100,
            "low": spread[0] and score / 100 + spread[0],
            "high": spread[1] and score / 100 + spread[1],
        }
        for name, score in scores.items()
    ]
    pairs = []
    for (a, b), values in gaps.items():
        difference, low, high = (None if value is None else value / 100 for value in values)
        pairs.append({"labels": labels, "a": a, "b": b, "difference": difference, "low": low, "high": high})
    elsewhere = {"labels": labels + 1, "a": "pretrained", "b": "scratch", "difference": 0.9, "low": 0.8, "high": 1.0}
    listed = [{"name": name, "kind": arms[name]} for name in scores]
    return verdict_sentence(labels, summary, [elsewhere, *pairs], listed)


TWO = {"pretrained": 80.0, "scratch": 74.0}
PS, PT, ST = ("pretrained", "scratch"), ("pretrained", "tfidf"), ("scratch", "tfidf")


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        ((6.1, 4.2, 7.9), "pretraining adds 6.1 points (4.2 to 7.9) over scratch."),
        ((-6.1, -7.9, -4.2), "pretraining costs 6.1 points (4.2 to 7.9) against scratch."),
        ((0.4, -1.1, 1.9), "pretraining makes no clear difference against scratch (+0.4 points, -1.1 to 1.9)."),
        ((-0.4, -1.9, 1.1), "pretraining makes no clear difference against scratch (-0.4 points, -1.9 to 1.1)."),
        ((0.0, 0.0, 0.0), "pretraining makes no clear difference against scratch (+0.0 points, 0.0 to 0.0)."),
    ],
)
def test_pretraining_against_scratch(gap, words):
    assert verdict(TWO, {PS: gap}) == f"With 400 labels {words}"
    low, high = gap[1:]
    assert (
        verdict(TWO, {PS[::-1]: (-gap[0], -high, -low)}) == f"With 400 labels {words}"
    )  # the pair the other way round


def test_a_bound_that_is_shown_as_zero_is_no_claim():
    assert "no clear difference" in verdict(TWO, {PS: (0.9, 0.04, 1.8)})
    assert "adds 0.9 points (0.1 to 1.8)" in verdict(TWO, {PS: (0.9, 0.06, 1.8)})


def test_label_counts_read_well():
    assert verdict(TWO, {PS: (1, 0.5, 2)}, labels=1).startswith("With 1 label pretraining")
    assert verdict(TWO, {PS: (1, 0.5, 2)}, labels=1600).startswith("With 1,600 labels pretraining")


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ({PS: (6.1, 4.2, 7.9), PT: (3.2, 1.0, 5.5)}, "over scratch, and 3.2 points (1.0 to 5.5) over TF-IDF."),
        (
            {PS: (0.4, -1.1, 1.9), PT: (3.2, 1.0, 5.5)},
            "; the pretrained model is 3.2 points (1.0 to 5.5) better than TF-IDF.",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (0.1, -1.4, 1.6)},
            "; TF-IDF is enough here: the pretrained model is not clearly better (+0.1 points, -1.4 to 1.6).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (8.0, -2.0, 18.0)},
            "; TF-IDF may be enough: the pretrained model is not clearly better (+8.0 points, -2.0 to 18.0).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (-1.3, -2.2, -0.4)},
            "; TF-IDF is enough here: it is 1.3 points (0.4 to 2.2) better than the pretrained model.",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (-1.3, -2.2, -0.4), ST: (-7.4, -9.0, -5.8)},
            "; TF-IDF is enough here: it beats the pretrained model by 1.3 points (0.4 to 2.2) "
            "and scratch by 7.4 points (5.8 to 9.0).",
        ),
        (
            {PS: (-6.1, -7.9, -4.2), PT: (-1.0, -2.0, 0.5), ST: (5.0, 3.0, 7.0)},
            "; TF-IDF is clearly beaten by the model from scratch (+5.0 points, 3.0 to 7.0), "
            "not by the pretrained model (-1.0 points, -2.0 to 0.5).",
        ),
    ],
)
def test_whether_tfidf_is_enough(gaps, words):
    gaps = {ST: (-3, -5, -1), **gaps}
    if gaps[PT][2] < 0 and gaps[ST] == (-3, -5, -1):
        gaps[ST] = (-1, -2.5, 0.5)  # scratch and TF-IDF not told apart, so that only the pretrained model is behind
    said = verdict({**TWO, "tfidf": 79.0}, gaps)
    assert said.endswith(words), said


def test_the_frozen_backbone_is_reported_beside_the_rest():
    said = verdict({**TWO, "frozen": 71.0}, {PS: (6.1, 4.2, 7.9)})
    assert said.endswith("over scratch; the frozen backbone alone reaches 71.0% (69.0 to 73.0).")


def test_a_frozen_arm_alone_stands_for_pretraining():
    said = verdict({"scratch": 70.0, "frozen": 75.0}, {("frozen", "scratch"): (5.0, 3.0, 7.0)})
    assert said == "With 400 labels pretraining (frozen) adds 5.0 points (3.0 to 7.0) over scratch."


def test_one_seed_claims_nothing():
    gaps = {PS: (6.1, None, None), PT: (-1.3, None, None)}
    said = verdict({**TWO, "tfidf": 81.3, "frozen": 70.0}, gaps, seeds=1)
    assert said == (
        "With 400 labels pretraining scores 6.1 points more than scratch; the pretrained model scores 1.3 points less "
        "than TF-IDF; the frozen backbone alone reaches 70.0%; one seed only, so no interval."
    )
    assert "scores the same as scratch" in verdict(TWO, {PS: (0.0, None, None)}, seeds=1)


def test_of_several_pretrained_runs_the_most_accurate_is_named():
    arms = {"pretrained gpt": "pretrained", "pretrained reviews-en": "pretrained", "scratch": "scratch"}
    gaps = {("pretrained gpt", "scratch"): (2, 1, 3), ("pretrained reviews-en", "scratch"): (6, 4, 8)}
    said = verdict({"pretrained gpt": 76, "pretrained reviews-en": 80, "scratch": 74}, gaps, arms=arms)
    assert said == (
        "With 400 labels pretraining (pretrained reviews-en, the most accurate of 2) "
        "adds 6.0 points (4.0 to 8.0) over scratch."
    )


def test_a_run_is_measured_against_the_scratch_model_made_like_it():
    arms = [
        {"name": "scratch big", "kind": "scratch", "run": "big"},
        {"name": "scratch small", "kind": "scratch", "run": "small"},
        {"name": "pretrained small", "kind": "pretrained", "run": "small"},
    ]
    summary = [
        {"arm": arm["name"], "labels": 9, "score": score, "low": score - 0.01, "high": score + 0.01}
        for arm, score in zip(arms, (0.8, 0.7, 0.75), strict=True)
    ]
    pairs = [
        {"labels": 9, "a": "pretrained small", "b": "scratch small", "difference": 0.05, "low": 0.04, "high": 0.06},
        {"labels": 9, "a": "pretrained small", "b": "scratch big", "difference": -0.05, "low": -0.06, "high": -0.04},
    ]
    assert "adds 5.0 points (4.0 to 6.0)" in verdict_sentence(9, summary, pairs, arms)


def test_without_scratch_or_without_pretraining_no_answer_is_made_up():
    said = verdict({"pretrained": 80.0, "tfidf": 75.0}, {PT: (5, 3, 7)})
    assert "no scratch arm to say what pretraining adds" in said
    assert said.endswith("the pretrained model is 5.0 points (3.0 to 7.0) better than TF-IDF.")
    said = verdict({"scratch": 74.0, "tfidf": 75.0}, {ST: (-1, -2, -0.5)})
    assert said.startswith("With 400 labels nothing pretrained was compared; the model from scratch reaches 74.0%")
    assert said.endswith("TF-IDF is enough here: it is 1.0 points (0.5 to 2.0) better than the model from scratch.")
    assert verdict({"tfidf": 75.0}, {}) == (
        "With 400 labels no model of ours was compared; TF-IDF reaches 75.0% (73.0 to 77.0)."
    )


edges = st.floats(-30, 30, allow_nan=False)
gaps_drawn = st.tuples(edges, edges, edges).map(sorted).map(lambda three: (three[1], three[0], three[2]))


@given(gaps_drawn, gaps_drawn, gaps_drawn, st.booleans())
def test_words_follow_the_signs_of_the_intervals(over_scratch, over_tfidf, scratch_over_tfidf, with_frozen):
    scores = {"pretrained": 80.0, "scratch": 74.0, "tfidf": 75.0} | ({"frozen": 71.0} if with_frozen else {})
    gaps = {PS: over_scratch, PT: over_tfidf, ST: scratch_over_tfidf, ("frozen", "tfidf"): (-4.0, -6.0, -2.0)}
    said = verdict(scores, gaps)
    _, low, high = over_scratch
    assert ("adds" in said) <= (low > 0) and (low > 0.1) <= ("adds" in said)
    assert ("costs" in said) <= (high < 0) and (high < -0.1) <= ("costs" in said)
    assert ("no clear difference" in said) <= (low < 0.1 and high > -0.1)
    if re.search(r"over TF-IDF|better than TF-IDF", said):
        assert over_tfidf[1] > 0
    if "TF-IDF is clearly beaten by the model from scratch" in said:
        assert scratch_over_tfidf[1] > 0
    if "TF-IDF is enough" in said:  # nothing that learns is clearly better, nor can it be by much
        assert max(over_tfidf[2], scratch_over_tfidf[2]) < 2.1 and max(over_tfidf[1], scratch_over_tfidf[1]) < 0.1
    if "it is" in said or "it beats" in said:
        assert over_tfidf[2] < 0
    if "it beats" in said:
        assert scratch_over_tfidf[2] < 0
    assert "-0.0" not in said and said.count("TF-IDF") == 1 and said.endswith(".")


@given(gaps_drawn, gaps_drawn, gaps_drawn)
def test_the_demo_never_contradicts_the_verdict_it_follows(over_scratch, over_tfidf, frozen_over_tfidf):
    gaps = {PS: over_scratch, PT: over_tfidf, ("frozen", "tfidf"): frozen_over_tfidf}
    said = verdict({"pretrained": 80.0, "scratch": 74.0, "frozen": 81.0, "tfidf": 75.0}, gaps)
    pairs = [
        {"labels": 400, "a": a, "b": b, "difference": one[0] / 100, "low": one[1] / 100, "high": one[2] / 100}
        for (a, b), one in gaps.items()
        if a == "pretrained"
    ]
    for pair in pairs:
        if pair["b"] == "scratch":  # as a comparison stores it: its arms come in the order of --arms
            pair |= {"a": "scratch", "b": "pretrained", "difference": -pair["difference"]}
            pair |= {"low": -pair["high"], "high": -pair["low"]}
    summed = honest({"pairs": pairs})
    assert summed.strip().startswith("The pretrained model is ")
    unclear = "not clearly better" in summed and "TF-IDF at 400 labels" in summed
    beaten = re.search(r"over TF-IDF|the pretrained model is [\d.]+ points \S+ to \S+ better than TF-IDF", said)
    assert unclear == (beaten is None)
    assert not ("clearly beaten" in said and unclear) or "not by the pretrained model" in said
    assert ("scratch at 400 labels" in summed) == ("adds" not in said)


@given(edges, edges)
def test_without_intervals_no_claim_is_made(over_scratch, over_tfidf):
    gaps = {PS: (over_scratch, None, None), PT: (over_tfidf, None, None), ST: (0, None, None)}
    said = verdict({**TWO, "tfidf": 75.0}, gaps, seeds=1)
    assert not re.search(r"adds|costs|enough|better|clear", said)
    assert said.endswith("one seed only, so no interval.")


# Which layers are the best features


def of_layers(scores: dict[str, float], gaps: dict[str, tuple], **more) -> str:
    """Scores of layers in points, and by how much the best of them, `mix`, is ahead of the others."""
    rows = [{"arm": f"frozen {layers}", "labels": 50, "score": score / 100} for layers, score in scores.items()]
    for row in rows:
        row |= {"low": row["score"] - 0.02, "high": row["score"] + 0.02, **more}
    pairs = []
    for layers, values in gaps.items():  # the other way round, as it is stored where the best came later
        gap, low, high = (None if value is None else -value / 100 for value in values)
        pairs.append({"labels": 50, "a": f"frozen {layers}", "b": "frozen mix", "difference": gap, "low": high})
        pairs[-1]["high"] = low
    arms = [{"name": row["arm"], "kind": "frozen"} for row in rows]
    return features_verdict(50, rows, pairs, arms)


def test_the_best_layers_are_named_with_what_they_clearly_beat():
    said = of_layers(
        {"last": 70.0, "mix": 80.0, "0": 60.0, "sum4": 79.0},
        {"last": (10, 7, 13), "0": (20, 15, 25), "sum4": (1, -1, 3)},
    )
    assert said == (
        "As features with 50 labels, mix reaches 80.0% (78.0 to 82.0): 10.0 points (7.0 to 13.0) over last, "
        "20.0 points (15.0 to 25.0) over layer 0; not clearly better than sum4 (+1.0 points, -1.0 to 3.0)."
    )
    assert "reaches F1 80.0%" in of_layers({"mix": 80.0}, {}, metric="f1")


def test_one_seed_compares_layers_without_a_claim():
    said = of_layers({"last": 70.0, "mix": 80.0}, {"last": (10, None, None)}, low=None, high=None)
    assert said == (
        "As features with 50 labels, mix reaches 80.0%; not clearly better than last (+10.0 points, no interval)."
    )
