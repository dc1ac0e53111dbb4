"""Minimal pairs: which of two texts is likelier."""

import json
import random

import numpy as np
import pytest

import headstock
from headstock.data.minimal_pairs import MinimalPair
from headstock.inference.score import score_minimal_pairs


def by_letters(texts):
    """Log-probabilities of letters: the earlier in the alphabet, the likelier."""
    return [np.array([-float(token) for token in row]) for row in texts]


def score_by_letters(pairs):
    return score_minimal_pairs(
        pairs,
        lambda texts: [[ord(letter) - ord("a") for letter in text] for text in texts],
        lambda text: [(i, i + 1) for i in range(len(text))],
        by_letters,
    )


def test_accuracy_ties_and_groups_are_counted():
    right, wrong, tie = ("aa", "ab"), ("c", "b"), ("ab", "ba")
    kinds = [{"UID": "x", "field": "f"}, {"UID": "x", "field": "f"}, {"UID": "y"}, {}]
    pairs = [MinimalPair(*texts, "here", kind) for texts, kind in zip((right, wrong, right, tie), kinds, strict=True)]
    metrics = score_by_letters(pairs)
    assert metrics["accuracy"] == (1 + 0 + 1 + 0.5) / 4
    assert (metrics["rows"], metrics["ties"]) == (4, 1)
    low, high = metrics["intervals"]["accuracy"]
    assert 0 <= low < metrics["accuracy"] < high <= 1
    assert list(metrics["by"]) == ["UID", "field"]
    assert {name: (group["accuracy"], group["rows"]) for name, group in metrics["by"]["UID"].items()} == {
        "x": (0.5, 2),
        "y": (1.0, 1),
    }
    assert list(metrics["by"]["UID"]) == ["x", "y"]  # the lowest accuracy first
    assert "partial_accuracy" not in metrics


def test_the_part_after_the_candidate_is_compared_alone():
    # the candidate z makes the good text less likely, but what follows it is likelier
    metrics = score_by_letters(
        [MinimalPair("xzaa", "xbcc", "here", continuation=(2, 2)), MinimalPair("xb", "xc", "here")]
    )
    assert metrics["accuracy"] == 0.5
    assert metrics["partial_accuracy"] == 1.0
    assert metrics["intervals"].keys() == {"accuracy", "partial_accuracy"}


def test_equal_texts_are_scored_once():
    scored = []

    def record(texts):
        scored.extend(texts)
        return by_letters(texts)

    pairs = [MinimalPair("ab", "ab", "here"), MinimalPair("ab", "b", "here")]
    metrics = score_minimal_pairs(
        pairs, lambda texts: [list(map(ord, text)) for text in texts], lambda text: [], record
    )
    assert sorted(map(len, scored)) == [1, 2]
    assert metrics["ties"] == 1


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """A folder with text in which adjectives precede nouns, and pairs in both orders."""
    pick = random.Random(0)
    adjectives, nouns = ["red", "old", "big", "new"], ["house", "river", "train", "garden"]
    folder = tmp_path_factory.mktemp("order")

    def phrase():
        return pick.choice(adjectives), pick.choice(nouns)

    text = [f"The {a} {n} is near the {b} {m}, {i}." for i in range(200) for (a, n), (b, m) in [(phrase(), phrase())]]
    (folder / "text.txt").write_text("\n".join(text))
    rows = [
        {"sentence_good": f"The {a} {n} is near.", "sentence_bad": f"The {n} {a} is near.", "UID": a}
        for a in adjectives
        for n in nouns
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize(("objective", "pseudo"), [("causal", None), ("masked", None), ("hybrid", True)])
def test_a_model_prefers_the_word_order_of_its_training_text(ordered, tmp_path, tiny, objective, pseudo):
    quick = {"steps": 80, "validate_every": 40, "optimizer": "muon", "lr": 0.03, "width": 32, "batch": 16}
    headstock.pretrain(ordered / "text.txt", out=tmp_path / "run", objective=objective, settings=tiny | quick)
    progress = []
    model = headstock.load(tmp_path / "run")
    metrics = model.minimal_pairs([ordered / "pairs.jsonl"], pseudo=pseudo, progress=progress.append)
    assert metrics["accuracy"] >= 15 / 16
    assert metrics["kind"] == ("log-likelihood" if objective == "causal" else "pseudo-log-likelihood")
    assert progress == sorted(progress) and progress[-1] == 1.0
    scores = model.score(["The red house is near.", "The house red is near."], pseudo=pseudo)
    assert scores[0].log_likelihood > scores[1].log_likelihood + 2
