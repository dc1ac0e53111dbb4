"""Winograd schemas: how they are written, and which candidate is likelier."""

import numpy as np
import pytest

from headstock.data.minimal_pairs import schema_pair
from headstock.data.winograd import parse_schema, read_schemas
from headstock.errors import UserError
from headstock.inference.schemas import schema_metrics, score_schemas
from headstock.inference.score import score_minimal_pairs

TROPHY = "The trophy does not fit in the suitcase because [it] is too big. | *the trophy | the suitcase"


def by_letters(texts):
    """Log-probabilities of characters: the earlier in the alphabet, the likelier; each depends on itself alone."""
    return [np.array([-float(token) for token in row]) for row in texts]


def encode(texts):
    return [[ord(letter) for letter in text] for text in texts]


def offsets(text):
    return [(i, i + 1) for i in range(len(text))]


def after_z(texts):
    """The same, but everything after a z is likelier: what a candidate does to its continuation."""
    return [
        np.array([-float(token) / (10 if ord("z") in row[:i] else 1) for i, token in enumerate(row)]) for row in texts
    ]


def test_both_ways_of_writing_a_schema():
    schema = parse_schema(TROPHY)
    assert schema == parse_schema(TROPHY.replace("[it]", "it").replace("| *", "| it | *", 1))
    assert (schema.pronoun, schema.candidates, schema.correct) == ("it", ("the trophy", "the suitcase"), 0)
    text, start = schema.substituted(1)
    assert text == "The trophy does not fit in the suitcase because the suitcase is too big."
    assert text[start:] == " is too big."
    assert parse_schema("[He] left. | a man | a dog").substituted(0)[0] == "A man left."
    assert parse_schema("Ann took [his] hat. | Tom | Al").substituted(0)[0] == "Ann took Tom's hat."


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("It fits. | it | a | b", "'it' occurs 0 times"),
        ("it and it | it | a | b", "'it' occurs 2 times"),
        ("[it] and [it] | a | b", "2 pronouns are in brackets"),
        ("[it] fits. | a", "expected two candidates"),
        ("[it] fits.", "expected two candidates"),
        ("[it] fits. | *a | *b", "several candidates are marked"),
        ("no pronoun", "expected two candidates"),
    ],
)
def test_what_is_no_schema_is_refused(line, problem):
    with pytest.raises(UserError, match=problem):
        parse_schema(line)


def test_scores_shares_and_choices():
    schema = parse_schema("x [it] bb | *zz | aa | b")
    (score,) = score_schemas([schema], encode, offsets, by_letters)
    for field in ("share", "partial_share"):
        assert sum(getattr(candidate, field) for candidate in score.candidates) == pytest.approx(1)
    for candidate in score.candidates:
        assert candidate.log_likelihood == pytest.approx(-sum(map(ord, candidate.text)))
        assert candidate.partial_log_likelihood == pytest.approx(-sum(map(ord, " bb")))  # the same for all
    assert score.choice("full") == 2 and score.outcome("full") == 0  # the sum favours the shortest
    assert score.outcome("partial") == pytest.approx(1 / 3)  # a tie
    (mean,) = score_schemas([schema], encode, offsets, by_letters, normalize=True)
    assert mean.candidates[0].log_likelihood == pytest.approx(-np.mean(encode([mean.candidates[0].text])))
    (other,) = score_schemas([schema], encode, offsets, after_z)
    assert (
        other.choice("partial") == 0 and other.outcome("partial") == 1
    )  # and where the candidate changes what follows
    assert schema_metrics([other, other])["partial_accuracy"] == 1 and schema_metrics([score])["accuracy"] == 0


def test_accuracy_is_that_of_the_minimal_pairs(tmp_path):
    lines = ["z [it] aa | *a | b", "z [it] aa | c | *d", "x [it] zz bb | *zz | aa", "x [it] | *ab | ba"]
    (tmp_path / "schemas.txt").write_text("\n\n".join(lines))
    schemas = read_schemas(tmp_path / "schemas.txt")
    assert schemas[1].location.endswith("schemas.txt:3")
    expected = score_minimal_pairs([schema_pair(schema) for schema in schemas], encode, offsets, after_z)
    metrics = schema_metrics(score_schemas(schemas, encode, offsets, after_z))
    for name in ("accuracy", "partial_accuracy"):
        assert metrics[name] == expected[name] and metrics["intervals"][name] == expected["intervals"][name]
    assert metrics["chance"] == 0.5
    unmarked = schema_metrics(score_schemas([parse_schema("z [it] aa | a | b")], encode, offsets, by_letters))
    assert unmarked["rows"] == 0 and "accuracy" not in unmarked
