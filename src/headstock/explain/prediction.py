"""Why this class, this token, this word behind a mask: what each token weighs, and what is said without each word."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headstock.data.word_joining import word_spans
from headstock.explain.prediction_cases import Case, case_of
from headstock.explain.targets import check_texts
from headstock.inference.pipeline import Pipeline
from headstock.report.highlighted_text import decode_tokens, locate_tokens, merge_spaces

TOP = 5  # answers that are told beside the one that is explained
LEAST = 1e-7  # a probability nearer to 0 or 1 is taken for this one, whose log-odds are finite


@dataclass(frozen=True)
class Token:
    """One token of the text as the model reads it."""

    token: str
    weight: float  # gradient x input, averaged on the way from a blank text; positive speaks for the answer
    plain: float  # gradient x input at the text itself


@dataclass(frozen=True)
class Word:
    """One word of the text, and what becomes of the answer without it."""

    word: str
    text: int  # which text it stands in, from 0
    begin: int
    end: int
    weight: float  # of its tokens together
    probability: float  # of the answer when the word is left out
    change: float  # by how much the word moves it: log-odds with it less log-odds without it
    says: str  # what is said without it


@dataclass(frozen=True)
class Prediction:
    """An answer, and what in the text speaks for it and against it."""

    kind: str  # "class", "next token", "masked word" or "translation"
    texts: list[str]
    answer: str
    probability: float
    answers: list[tuple[str, float]]  # the likeliest, with their probabilities
    tokens: list[Token]
    words: list[Word]
    notes: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        answers = [{"answer": name, "probability": chance} for name, chance in self.answers]
        return asdict(self) | {"answers": answers}


def predict(loaded: Pipeline, texts: Sequence[str], *, label: str | None = None, at: int | None = None) -> Prediction:
    """Explain what a run says of a text: its class, its next token, or the word behind its mask number `at`."""
    check_texts(loaded, texts)
    case = case_of(loaded, list(texts), at, label)
    (now,) = case.chances([texts])
    target = case.choose(label, now)
    averaged, plain = (case.weights(target, averaged=averaged) for averaged in (True, False))
    tokens = [Token(token, weight, other) for (token, weight), (_, other) in zip(averaged, plain, strict=True)]
    return Prediction(
        kind=case.kind,
        texts=list(texts),
        answer=case.name(target),
        probability=float(now[target]),
        answers=[(case.name(number), float(now[number])) for number in case.likeliest(now, TOP)],
        tokens=tokens,
        words=left_out(case, list(texts), target, float(now[target]), averaged),
        notes=case.notes,
    )


# What happens without a word


def left_out(
    case: Case, texts: list[str], target: int, probability: float, weighed: Sequence[tuple[str, float]]
) -> list[Word]:
    """Every word, and the answer to the text without it; all variants are read together."""
    places = [
        (number, begin, end)
        for number, text in enumerate(texts)
        for begin, end in word_spans(text)
        if not any(first < end and begin < last for first, last in case.closed(text))
    ]
    variants = [[*texts[:i], without(texts[i], begin, end), *texts[i + 1 :]] for i, begin, end in places]
    kept = [row for row, variant in enumerate(variants) if all(text.strip() for text in variant)]
    if not kept:
        return []
    chances = case.chances([variants[row] for row in kept])
    shares = word_weights(texts, weighed, places)
    found = []
    for row, chance in zip(kept, chances, strict=True):
        number, begin, end = places[row]
        after = float(chance[target])
        says = case.name(case.likeliest(chance, 1)[0])
        moved = log_odds(probability) - log_odds(after)
        found.append(Word(texts[number][begin:end], number, begin, end, shares[row], after, moved, says))
    return found


def without(text: str, begin: int, end: int) -> str:
    """A text without a word, and without the space that then stands there twice or at an end."""
    before, after = text[:begin], text[end:]
    if after.startswith(" ") and (not before or before.endswith(" ")):
        return before + after[1:]
    return before[:-1] if not after and before.endswith(" ") else before + after


def log_odds(probability: float) -> float:
    known = min(max(probability, LEAST), 1 - LEAST)
    return math.log(known) - math.log1p(-known)


def word_weights(
    texts: Sequence[str], weighed: Sequence[tuple[str, float]], places: Sequence[tuple[int, int, int]]
) -> list[float]:
    """The weights of the tokens that begin in each word, added up."""
    whole, starts = "", []
    for text in texts:
        starts.append(len(whole))
        whole += text + "\n"
    marks = [
        (at, weight) for _, weight, at in locate_tokens(whole, merge_spaces(decode_tokens(weighed))) if at is not None
    ]
    return [
        sum(weight for place, weight in marks if starts[text] + begin <= place < starts[text] + end)
        for text, begin, end in places
    ]
