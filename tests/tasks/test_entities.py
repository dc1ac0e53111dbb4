"""Tags become the entities a person would mark, in every scheme, and their F1 is seqeval's."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.tasks.text_metrics import entities, entity_counts, is_entity_scheme

CASES = [
    ("O O", []),
    ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
    ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # another kind cannot go on with it
    ("O I-PER I-PER", [("PER", 1, 3)]),  # IOB1, and what a model makes up in IOB2
    ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),  # IOB1 parts two of a kind by B
    ("I-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
    ("B-PER I-PER E-PER S-LOC", [("PER", 0, 3), ("LOC", 3, 4)]),
    ("B-PER L-PER U-PER", [("PER", 0, 2), ("PER", 2, 3)]),
    ("B-PER L-PER B-PER L-PER", [("PER", 0, 2), ("PER", 2, 4)]),
    ("B-PER E-PER I-PER", [("PER", 0, 2), ("PER", 2, 3)]),  # nothing goes on after an end
    ("E-PER E-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("S-PER I-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER S-PER O", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-MY-KIND I-MY-KIND", [("MY-KIND", 0, 2)]),
]


@pytest.mark.parametrize(("tags", "wanted"), CASES)
def test_entities_of_tags(tags, wanted):
    assert entities(tags.split()) == wanted


def test_no_words_hold_no_entities():
    assert entities([]) == []


def test_tallies_are_of_whole_entities_sentence_by_sentence():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "O"], ["B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC"], ["B-PER"]]
    numerators, denominators = entity_counts(predicted, gold)
    assert numerators.tolist() == [2, 0, 2]
    assert denominators.tolist() == [4, 1, 2]
    # precision 2/4, recall 2/3
    assert numerators.sum() / denominators.sum() == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_half_of_an_entity_is_none():
    numerators, denominators = entity_counts([["B-PER", "O"]], [["B-PER", "I-PER"]])
    assert (numerators.tolist(), denominators.tolist()) == ([0], [2])


def test_sentences_of_different_length_are_our_mistake():
    with pytest.raises(ValueError, match="sentence 0: 1 predicted tags for 2 words"):
        entity_counts([["O"]], [["O", "O"]])


@pytest.mark.parametrize(
    ("classes", "wanted"),
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
def test_which_tags_name_entities(classes, wanted):
    assert is_entity_scheme(classes) is wanted


tag = st.sampled_from(["O", "B-A", "I-A", "E-A", "S-A", "L-A", "U-A", "B-B", "I-B"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(tag))
def test_entities_cover_just_the_tagged_words(tags):
    found = entities(tags)
    covered = [word for _, start, end in found for word in range(start, end)]
    assert covered == [at for at, of_one in enumerate(tags) if of_one != "O"]
    assert all(tags[word].endswith(kind) for kind, start, end in found for word in range(start, end))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(tag))
def test_a_right_prediction_scores_one(tags):
    numerators, denominators = entity_counts([tags], [tags])
    assert numerators.tolist() == denominators.tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(tag, tag), min_size=1), min_size=1))
def test_f1_is_that_of_seqeval(pairs):
    metrics = pytest.importorskip("seqeval.metrics")
    same = {"L": "E", "U": "S"}  # which seqeval reads only where it is told the scheme
    sides = [[[same.get(of[0], of[0]) + of[1:] for of in side] for side in zip(*row, strict=True)] for row in pairs]
    predicted, gold = ([side[i] for side in sides] for i in range(2))
    numerators, denominators = entity_counts(predicted, gold)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no entities at all
        wanted = metrics.f1_score(gold, predicted)
    assert numerators.sum() / max(1, denominators.sum()) == pytest.approx(wanted)
