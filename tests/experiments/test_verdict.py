"""A verdict claims what the intervals support, in words that follow their signs, and nothing more."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.experiments.demo import summarize_pretrained
from headstock.experiments.verdict import features_verdict
from headstock.experiments.verdict import verdict as verdict_of_results
from tests.forks import ROOT

ARMS = {"pretrained": "pretrained", "scratch": "scratch", "frozen": "frozen", "tfidf": "tfidf"}


def verdict(
    scores: dict[str, float],
    gaps: dict[tuple[str, str], tuple],
    *,
    labels=400,
    arms=ARMS,
    seeds=3,
    metric="accuracy",
) -> str:
    """Scores and differences in points; an arm's own interval is two points either way."""
    margin = None if seeds < 2 else 0.02
    summary = [
        {
            "arm": name,
            "labels": labels,
            "metric": metric,
            "score": score / 100,
            "low": margin and score / 100 - margin,
            "high": margin and score / 100 + margin,
        }
        for name, score in scores.items()
    ]
    pairs = []
    for (a, b), values in gaps.items():
        difference, low, high = (None if value is None else value / 100 for value in values)
        pairs.append({"labels": labels, "a": a, "b": b, "difference": difference, "low": low, "high": high})
    other_labels = {"labels": labels + 1, "a": "pretrained", "b": "scratch", "difference": 0.9, "low": 0.8, "high": 1.0}
    arm_rows = [{"name": name, "kind": arms[name]} for name in scores]
    return verdict_of_results(labels, summary, [other_labels, *pairs], arm_rows)


TWO = {"pretrained": 80.0, "scratch": 74.0}
PS, PT, ST = ("pretrained", "scratch"), ("pretrained", "tfidf"), ("scratch", "tfidf")


@pytest.mark.parametrize(
    ("gap", "facts"),
    [
        ((6.1, 4.2, 7.9), ("improves accuracy", "6.1 points", "95% CI 4.2 to 7.9")),
        ((-6.1, -7.9, -4.2), ("lowers accuracy", "6.1 points", "95% CI 4.2 to 7.9")),
        ((0.4, -1.1, 1.9), ("no clear difference", "+0.4 points, 95% CI -1.1 to 1.9")),
        ((-0.4, -1.9, 1.1), ("no clear difference", "-0.4 points, 95% CI -1.9 to 1.1")),
        ((0.0, 0.0, 0.0), ("no clear difference", "+0.0 points, 95% CI 0.0 to 0.0")),
    ],
)
def test_pretraining_compared_with_scratch(gap, facts):
    text = verdict(TWO, {PS: gap})
    assert text.startswith("With 400 labels, pretraining ") and all(fact in text for fact in facts)
    low, high = gap[1:]
    assert verdict(TWO, {PS[::-1]: (-gap[0], -high, -low)}) == text  # pairs may be stored in either order


@pytest.mark.parametrize(
    ("gap", "facts"),
    [
        ((-6.1, -7.9, -4.2), ("improves MAE by 0.0610 over scratch", "95% CI 0.0420 to 0.0790")),
        ((6.1, 4.2, 7.9), ("raises MAE by 0.0610", "95% CI 0.0420 to 0.0790")),
        ((-0.4, -1.9, 1.1), ("no clear difference", "0.0040 better, 95% CI -0.0110 to 0.0190")),
    ],
)
def test_less_of_an_error_is_better(gap, facts):
    text = verdict(TWO, {PS: gap}, metric="mae")
    assert all(fact in text for fact in facts) and "points" not in text
    low, high = gap[1:]
    assert verdict(TWO, {PS[::-1]: (-gap[0], -high, -low)}, metric="mae") == text


def test_the_best_arm_has_the_smallest_error():
    arms, scores = {"a": "pretrained", "b": "pretrained", "s": "scratch"}, {"a": 50.0, "b": 40.0, "s": 60.0}
    assert "(b, the best of 2)" in verdict(scores, {}, arms=arms, metric="rmse")
    assert "(a, the best of 2)" in verdict(scores, {}, arms=arms, metric="pearson")


def test_a_bound_displayed_as_zero_supports_no_claim():
    assert "no clear difference" in verdict(TWO, {PS: (0.9, 0.04, 1.8)})
    assert "improves accuracy by 0.9 points over scratch (95% CI 0.1 to 1.8)" in verdict(TWO, {PS: (0.9, 0.06, 1.8)})


def test_label_counts():
    assert verdict(TWO, {PS: (1, 0.5, 2)}, labels=1).startswith("With 1 label, ")
    assert verdict(TWO, {PS: (1, 0.5, 2)}, labels=1600).startswith("With 1,600 labels, ")


@pytest.mark.parametrize(
    ("gaps", "ending"),
    [
        ({PS: (6.1, 4.2, 7.9), PT: (3.2, 1.0, 5.5)}, " and by 3.2 points over TF-IDF (95% CI 1.0 to 5.5)."),
        (
            {PS: (0.4, -1.1, 1.9), PT: (3.2, 1.0, 5.5)},
            "; the pretrained model is 3.2 points better than TF-IDF (95% CI 1.0 to 5.5).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (0.1, -1.4, 1.6)},
            "; TF-IDF is sufficient: the pretrained model is not clearly better (+0.1 points, 95% CI -1.4 to 1.6).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (8.0, -2.0, 18.0)},
            "; TF-IDF may be sufficient: the pretrained model is not clearly better "
            "(+8.0 points, 95% CI -2.0 to 18.0).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (-1.3, -2.2, -0.4)},
            "; TF-IDF is sufficient: it outperforms the pretrained model by 1.3 points (95% CI 0.4 to 2.2).",
        ),
        (
            {PS: (6.1, 4.2, 7.9), PT: (-1.3, -2.2, -0.4), ST: (-7.4, -9.0, -5.8)},
            "; TF-IDF is sufficient: it outperforms the pretrained model by 1.3 points (95% CI 0.4 to 2.2) "
            "and the model trained from scratch by 7.4 points (95% CI 5.8 to 9.0).",
        ),
        (
            {PS: (-6.1, -7.9, -4.2), PT: (-1.0, -2.0, 0.5), ST: (5.0, 3.0, 7.0)},
            "; the model trained from scratch clearly outperforms TF-IDF (+5.0 points, 95% CI 3.0 to 7.0), "
            "but the pretrained model does not (-1.0 points, 95% CI -2.0 to 0.5).",
        ),
    ],
)
def test_whether_tfidf_is_sufficient(gaps, ending):
    gaps = {ST: (-3, -5, -1), **gaps}
    if gaps[PT][2] < 0 and gaps[ST] == (-3, -5, -1):
        gaps[ST] = (-1, -2.5, 0.5)  # no clear difference, so that only the pretrained model is behind
    text = verdict({**TWO, "tfidf": 79.0}, gaps)
    assert text.endswith(ending), text


def test_the_frozen_backbone_is_reported_as_well():
    text = verdict({**TWO, "frozen": 71.0}, {PS: (6.1, 4.2, 7.9)})
    assert text.endswith("; the frozen backbone reaches 71.0% (69.0 to 73.0).")


def test_a_frozen_arm_without_a_pretrained_one_stands_for_pretraining():
    text = verdict({"scratch": 70.0, "frozen": 75.0}, {("frozen", "scratch"): (5.0, 3.0, 7.0)})
    assert text.startswith("With 400 labels, pretraining (frozen) improves accuracy by 5.0 points")


@pytest.mark.parametrize(("setfit", "frozen"), [(75.0, 70.0), (70.0, 75.0)])
def test_without_full_fine_tuning_the_best_arm_stands_for_pretraining(setfit, frozen):
    scores, arms = {"frozen": frozen, "setfit": setfit, "tfidf": 65.0}, ARMS | {"setfit": "setfit"}
    gaps = {(name, "tfidf"): (scores[name] - 65, 1.0, 12.0) for name in ("frozen", "setfit")}
    names = ["SetFit", "the frozen backbone"] if setfit > frozen else ["the frozen backbone", "SetFit"]
    assert verdict(scores, gaps, arms=arms) == (
        f"With 400 labels, {names[0]} reaches 75.0% (73.0 to 77.0); without a scratch arm the gain is unknown; "
        f"{names[0]} is 10.0 points better than TF-IDF (95% CI 1.0 to 12.0); {names[1]} reaches 70.0% (68.0 to 72.0)."
    )
    best = "setfit" if setfit > frozen else "frozen"
    text = verdict(scores | {"scratch": 60.0}, {(best, "scratch"): (15.0, 10.0, 20.0)}, arms=arms)
    assert f"pretraining ({best}, the best of 2) improves accuracy by 15.0 points over scratch" in text


def test_one_seed_supports_no_claim():
    gaps = {PS: (6.1, None, None), PT: (-1.3, None, None)}
    text = verdict({**TWO, "tfidf": 81.3, "frozen": 70.0}, gaps, seeds=1)
    assert "pretraining scores 6.1 points more than scratch" in text
    assert "the pretrained model scores 1.3 points less than TF-IDF" in text
    assert "reaches 70.0%;" in text and text.endswith("one seed only, so there are no intervals.")
    assert "scores the same as scratch" in verdict(TWO, {PS: (0.0, None, None)}, seeds=1)


def test_of_several_pretrained_runs_the_best_is_named():
    arms = {"pretrained gpt": "pretrained", "pretrained reviews-en": "pretrained", "scratch": "scratch"}
    gaps = {("pretrained gpt", "scratch"): (2, 1, 3), ("pretrained reviews-en", "scratch"): (6, 4, 8)}
    text = verdict({"pretrained gpt": 76, "pretrained reviews-en": 80, "scratch": 74}, gaps, arms=arms)
    assert "(pretrained reviews-en, the best of 2) improves accuracy by 6.0 points" in text


def test_a_run_is_compared_with_the_scratch_model_of_the_same_run():
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
    text = verdict_of_results(9, summary, pairs, arms)
    assert "improves accuracy by 5.0 points over scratch (95% CI 4.0 to 6.0)" in text


def test_missing_arms_are_stated():
    text = verdict({"pretrained": 80.0, "tfidf": 75.0}, {PT: (5, 3, 7)})
    assert "without a scratch arm" in text
    assert text.endswith("the pretrained model is 5.0 points better than TF-IDF (95% CI 3.0 to 7.0).")
    text = verdict({"scratch": 74.0, "tfidf": 75.0}, {ST: (-1, -2, -0.5)})
    assert text.startswith("With 400 labels, no pretrained model was compared; the model trained from scratch reaches")
    assert "outperforms the model trained from scratch by 1.0 points (95% CI 0.5 to 2.0)" in text
    text = verdict({"tfidf": 75.0}, {})
    assert text == "With 400 labels, only TF-IDF was evaluated: it reaches 75.0% (73.0 to 77.0)."


ends = st.floats(-30, 30, allow_nan=False)
random_gaps = st.tuples(ends, ends, ends).map(sorted).map(lambda bounds: (bounds[1], bounds[0], bounds[2]))


@given(random_gaps, random_gaps, random_gaps, st.booleans())
def test_words_follow_the_signs_of_the_intervals(over_scratch, over_tfidf, scratch_over_tfidf, with_frozen):
    scores = {"pretrained": 80.0, "scratch": 74.0, "tfidf": 75.0} | ({"frozen": 71.0} if with_frozen else {})
    gaps = {PS: over_scratch, PT: over_tfidf, ST: scratch_over_tfidf, ("frozen", "tfidf"): (-4.0, -6.0, -2.0)}
    text = verdict(scores, gaps)
    _, low, high = over_scratch
    assert ("improves" in text) <= (low > 0) and (low > 0.1) <= ("improves" in text)
    assert ("lowers" in text) <= (high < 0) and (high < -0.1) <= ("lowers" in text)
    assert ("no clear difference" in text) <= (low < 0.1 and high > -0.1)
    if re.search(r"over TF-IDF|better than TF-IDF", text):
        assert over_tfidf[1] > 0
    if "the model trained from scratch clearly outperforms TF-IDF" in text:
        assert scratch_over_tfidf[1] > 0
    if "TF-IDF is sufficient" in text:  # no trained model is clearly better, nor can it be by much
        assert max(over_tfidf[2], scratch_over_tfidf[2]) < 2.1 and max(over_tfidf[1], scratch_over_tfidf[1]) < 0.1
    if "it outperforms the pretrained model" in text:
        assert over_tfidf[2] < 0
    if "and the model trained from scratch by" in text:
        assert scratch_over_tfidf[2] < 0
    assert "-0.0" not in text and text.count("TF-IDF") == 1 and text.endswith(".")


@given(random_gaps, random_gaps, random_gaps)
def test_the_demo_never_contradicts_the_verdict(over_scratch, over_tfidf, frozen_over_tfidf):
    gaps = {PS: over_scratch, PT: over_tfidf, ("frozen", "tfidf"): frozen_over_tfidf}
    text = verdict({"pretrained": 80.0, "scratch": 74.0, "frozen": 81.0, "tfidf": 75.0}, gaps)
    pairs = [
        {"labels": 400, "a": a, "b": b, "difference": gap[0] / 100, "low": gap[1] / 100, "high": gap[2] / 100}
        for (a, b), gap in gaps.items()
        if a == "pretrained"
    ]
    for pair in pairs:
        if pair["b"] == "scratch":  # as a comparison stores it: arms in the order of --arms
            pair |= {"a": "scratch", "b": "pretrained", "difference": -pair["difference"]}
            pair |= {"low": -pair["high"], "high": -pair["low"]}
    summary = summarize_pretrained({"pairs": pairs})
    unclear = "not clearly better" in summary and "TF-IDF at 400 labels" in summary
    is_better = re.search(r"over TF-IDF|the pretrained model is [\d.]+ points better than TF-IDF", text)
    assert unclear == (is_better is None)
    assert ("scratch at 400 labels" in summary) == ("improves" not in text)


@given(ends, ends)
def test_without_intervals_no_claim_is_made(over_scratch, over_tfidf):
    gaps = {PS: (over_scratch, None, None), PT: (over_tfidf, None, None), ST: (0, None, None)}
    text = verdict({**TWO, "tfidf": 75.0}, gaps, seeds=1)
    assert not re.search(r"improves|lowers|sufficient|outperforms|better|clear", text)
    assert text.endswith("one seed only, so there are no intervals.")


# Which layers are the best features


def verdict_of_layers(scores: dict[str, float], gaps: dict[str, tuple], **values) -> str:
    """Scores of layers in points, and by how much the best of them, `mix`, is ahead of the others."""
    rows = [{"arm": f"frozen {layers}", "labels": 50, "score": score / 100} for layers, score in scores.items()]
    for row in rows:
        row |= {"low": row["score"] - 0.02, "high": row["score"] + 0.02, **values}
    pairs = []
    for layers, values in gaps.items():  # reversed, as stored when the best arm comes later
        gap, low, high = (None if value is None else -value / 100 for value in values)
        pairs.append({"labels": 50, "a": f"frozen {layers}", "b": "frozen mix", "difference": gap, "low": high})
        pairs[-1]["high"] = low
    arms = [{"name": row["arm"], "kind": "frozen"} for row in rows]
    return features_verdict(50, rows, pairs, arms)


def test_the_best_layers_are_named_with_those_they_clearly_outperform():
    text = verdict_of_layers(
        {"last": 70.0, "mix": 80.0, "0": 60.0, "sum4": 79.0},
        {"last": (10, 7, 13), "0": (20, 15, 25), "sum4": (1, -1, 3)},
    )
    assert text == (
        "As features with 50 labels, mix reaches 80.0% (78.0 to 82.0); clearly better than last (+10.0 points, 95% CI "
        "7.0 to 13.0), layer 0 (+20.0 points, 95% CI 15.0 to 25.0); not clearly better than sum4 (+1.0 points, 95% CI "
        "-1.0 to 3.0)."
    )
    assert "reaches F1 80.0%" in verdict_of_layers({"mix": 80.0}, {}, metric="f1")


def test_one_seed_compares_layers_without_a_claim():
    text = verdict_of_layers({"last": 70.0, "mix": 80.0}, {"last": (10, None, None)}, low=None, high=None)
    assert "not clearly better than last (+10.0 points, no interval)" in text and "; clearly" not in text


LORA = ARMS | {"lora": "lora"}
FL = ("lora", "pretrained")


@pytest.mark.parametrize(
    ("gap", "relation"),
    [
        ((1.5, 0.4, 2.6), "clearly better than"),
        ((-1.5, -2.6, -0.4), "clearly worse than"),
        ((0.4, -1.1, 1.9), "not clearly different from"),
    ],
)
def test_lora_is_compared_with_full_fine_tuning(gap, relation):
    text = verdict(TWO | {"lora": 80.0 + gap[0]}, {PS: (6.0, 4.0, 8.0), FL: gap}, arms=LORA)
    assert text.startswith("With 400 labels, pretraining improves accuracy by 6.0 points")
    assert f"LoRA reaches {80 + gap[0]:.1f}%" in text and f"{relation} full fine-tuning ({gap[0]:+.1f} points" in text


def test_lora_without_full_fine_tuning_is_not_compared_with_it():
    text = verdict({"lora": 80.0, "scratch": 74.0}, {("lora", "scratch"): (6.0, 4.0, 8.0)}, arms=LORA)
    assert "improves accuracy by 6.0 points over scratch" in text and "full fine-tuning" not in text


@pytest.mark.parametrize("page", ["docs/howto/compare.md", "docs/start/five-minutes.md"])
def test_pages_quote_a_verdict_as_it_is_worded_now(page):
    results = json.loads((ROOT / "recipes/results/quotes/results.json").read_text(encoding="utf-8"))
    sentence = verdict_of_results(100, results["summary"], results["pairs"], results["arms"])
    assert sentence in " ".join((ROOT / page).read_text(encoding="utf-8").split())
