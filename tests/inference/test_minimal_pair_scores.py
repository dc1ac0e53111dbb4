"""Which of two texts a model finds likelier."""

import json
import random

import numpy as np
import pytest

import headstock
from headstock.data.minimal_pairs import MinimalPair
from headstock.inference.score import score_minimal_pairs


def by_letters(texts):
    """As if every token were a letter, and a letter the likelier the earlier it is in the alphabet."""
    return [np.array([-float(token) for token in row]) for row in texts]


def measured(pairs):
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
    found = measured(pairs)
    assert found["accuracy"] == (1 + 0 + 1 + 0.5) / 4
    assert (found["rows"], found["ties"]) == (4, 1)
    low, high = found["intervals"]["accuracy"]
    assert 0 <= low < found["accuracy"] < high <= 1
    assert list(found["by"]) == ["UID", "field"]
    assert {name: (group["accuracy"], group["rows"]) for name, group in found["by"]["UID"].items()} == {
        "x": (0.5, 2),
        "y": (1.0, 1),
    }
    assert list(found["by"]["UID"]) == ["x", "y"]  # the worst first
    assert "partial_accuracy" not in found


def test_the_part_after_the_candidate_is_compared_alone():
    # whole: the candidate z makes the good text less likely; after it, the good one is likelier
    found = measured([MinimalPair("xzaa", "xbcc", "here", continuation=(2, 2)), MinimalPair("xb", "xc", "here")])
    assert found["accuracy"] == 0.5
    assert found["partial_accuracy"] == 1.0
    assert found["intervals"].keys() == {"accuracy", "partial_accuracy"}


def test_texts_of_the_same_tokens_are_read_once():
    asked = []

    def watch(texts):
        asked.extend(texts)
        return by_letters(texts)

    pairs = [MinimalPair("ab", "ab", "here"), MinimalPair("ab", "b", "here")]
    found = score_minimal_pairs(pairs, lambda texts: [list(map(ord, text)) for text in texts], lambda text: [], watch)
    assert sorted(map(len, asked)) == [1, 2]
    assert found["ties"] == 1


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """Text in which the adjective always stands before the noun, and pairs in which it does and does not."""
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
def test_a_model_prefers_the_order_it_has_read(ordered, tmp_path, tiny, objective, pseudo):
    quick = {"steps": 120, "optimizer": "muon", "lr": 0.03, "width": 32, "batch": 16}
    headstock.pretrain(ordered / "text.txt", out=tmp_path / "run", objective=objective, settings=tiny | quick)
    heard = []
    model = headstock.load(tmp_path / "run")
    found = model.minimal_pairs([ordered / "pairs.jsonl"], pseudo=pseudo, progress=heard.append)
    assert found["accuracy"] >= 15 / 16
    assert found["kind"] == ("log-likelihood" if objective == "causal" else "pseudo-log-likelihood")
    assert heard == sorted(heard) and heard[-1] == 1.0
    scores = model.score(["The red house is near.", "The house red is near."], pseudo=pseudo)
    assert scores[0].log_likelihood > scores[1].log_likelihood + 2
