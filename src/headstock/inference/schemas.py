"""Scores Winograd schemas: which candidate does a language model take a pronoun to stand for?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headstock.data.winograd import Schema
from headstock.inference.score import log_likelihood_after
from headstock.intervals import item_interval
from headstock.results import Result

# how candidates are compared, and the field of a candidate's score
MEASURES = {"full": "log_likelihood", "partial": "partial_log_likelihood"}


@dataclass(frozen=True)
class CandidateScore:
    """A candidate in place of the pronoun (Trinh & Le, 2018).

    The full score is that of the whole text, the partial one that of what follows the candidate, given it: a frequent
    candidate then has no advantage. Shares are normalized over the candidates.
    """

    candidate: str
    text: str
    tokens: int
    log_likelihood: float
    share: float
    partial_tokens: int
    partial_log_likelihood: float
    partial_share: float


@dataclass(frozen=True, eq=False)
class SchemaScore(Result):
    """The scores of the candidates of a Winograd schema."""

    schema: Schema
    candidates: list[CandidateScore]

    def choice(self, measure: str) -> int:
        """The index of the likeliest candidate."""
        return int(np.argmax([getattr(candidate, MEASURES[measure]) for candidate in self.candidates]))

    def outcome(self, measure: str) -> float:
        """1 if the correct candidate is the likeliest, shared among those that tie with it, else 0."""
        assert self.schema.correct is not None
        scores = [getattr(candidate, MEASURES[measure]) for candidate in self.candidates]
        best = [number for number, score in enumerate(scores) if score == max(scores)]
        return 1 / len(best) if self.schema.correct in best else 0.0

    def to_dict(self) -> dict[str, Any]:
        names, correct = self.schema.candidates, self.schema.correct
        return {
            "text": self.schema.text,
            "location": self.schema.location,
            "correct": None if correct is None else names[correct],
            "choice": names[self.choice("full")],
            "partial_choice": names[self.choice("partial")],
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }


def score_schemas(
    schemas: Sequence[Schema],
    encode: Callable[[list[str]], list[list[int]]],
    offsets: Callable[[str], list[tuple[int, int]]],
    log_probabilities: Callable[[list[list[int]]], list[np.ndarray]],
    *,
    normalize: bool = False,
) -> list[SchemaScore]:
    """Every schema with each of its candidates; with `normalize`, scores are means per token instead of sums."""
    places = [(schema, number) for schema in schemas for number in range(len(schema.candidates))]
    texts = [schema.substituted(number) for schema, number in places]
    rows = [tuple(row) for row in encode([text for text, _ in texts])]
    unique = list(dict.fromkeys(rows))  # equal texts are scored once, so that they tie exactly
    scores = dict(zip(unique, log_probabilities([list(row) for row in unique]), strict=True))
    scored = iter(zip(texts, rows, strict=True))
    return [
        score_schema(schema, [next(scored) for _ in schema.candidates], scores, offsets, normalize)
        for schema in schemas
    ]


def score_schema(
    schema: Schema,
    texts: Sequence[tuple[tuple[str, int], tuple[int, ...]]],
    scores: dict[tuple[int, ...], np.ndarray],
    offsets: Callable[[str], list[tuple[int, int]]],
    normalize: bool,
) -> SchemaScore:
    full, partial, counts = [], [], []
    for (text, start), row in texts:
        spans = offsets(text)
        after = sum(begin >= start for begin, _ in spans)
        counts.append((len(row), after))
        full.append(float(scores[row].sum()) / (max(1, len(row)) if normalize else 1))
        partial.append(log_likelihood_after(scores[row], spans, start) / (max(1, after) if normalize else 1))
    columns = zip(schema.candidates, texts, counts, full, shares(full), partial, shares(partial), strict=True)
    return SchemaScore(
        schema,
        [
            CandidateScore(name, text, tokens, total, share, after, rest, rest_share)
            for name, ((text, _), _), (tokens, after), total, share, rest, rest_share in columns
        ],
    )


def shares(scores: Sequence[float]) -> list[float]:
    """A softmax: probabilities normalized over the candidates, which may be too small to be compared themselves."""
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def schema_metrics(scores: Sequence[SchemaScore]) -> dict[str, Any]:
    """The accuracy on the schemas whose correct candidate is known, with 95% intervals; ties count in part."""
    known = [score for score in scores if score.schema.correct is not None]
    metrics: dict[str, Any] = {"rows": len(known), "intervals": {}}
    if known:
        metrics["chance"] = float(np.mean([1 / len(score.candidates) for score in known]))
        for measure, name in (("full", "accuracy"), ("partial", "partial_accuracy")):
            interval = item_interval(np.array([score.outcome(measure) for score in known]))
            metrics[name] = interval.mean
            metrics["intervals"][name] = [interval.low, interval.high]
    return metrics
