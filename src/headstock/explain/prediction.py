"""Why this class, this token, this word behind a mask: what each token weighs, and what is said without each word."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headstock.data.word_joining import word_spans
from headstock.explain.document import (
    Block,
    Chart,
    Column,
    Document,
    Grid,
    Section,
    Table,
    Text,
    WeightedText,
    notes,
)
from headstock.explain.gradients_document import BLUE, ORANGE
from headstock.explain.prediction_cases import Case, case_of
from headstock.explain.render_document import picture_of
from headstock.explain.targets import check_texts
from headstock.inference.pipeline import Pipeline
from headstock.report.highlighted_text import decode_tokens, locate_tokens, merge_into_words, merge_spaces
from headstock.report.theme import GRID, WIDE

MAX_UNFOLDED = 40  # words that a page lists without folding
MAX_BARS = 12  # words in the chart
MAX_LETTERS = 18  # of a word beside its bar
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

    def to_dict(self) -> dict[str, Any]:
        answers = [{"answer": name, "probability": chance} for name, chance in self.answers]
        return asdict(self) | {"answers": answers}


def explain_prediction(
    loaded: Pipeline, texts: Sequence[str], *, label: str | None = None, at: int | None = None
) -> Prediction:
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


# Document


def prediction_document(facts: Prediction, name: str) -> Document:
    whole = "\n".join(facts.texts)
    pieces = decode_tokens([(token.token, token.weight) for token in facts.tokens])
    answers = ", ".join(f"{answer} {chance:.1%}" for answer, chance in facts.answers)
    chart = words_chart(facts)
    marked: list[Block] = [
        Text("Orange words support the answer, blue ones oppose it.", "soft", only="page"),
        Grid(
            [
                WeightedText(
                    "By gradient",
                    whole,
                    merge_into_words(whole, pieces, word_spans(whole)),
                    "Integrated gradients (gradient × input, averaged on the path from a blank text to this one) of "
                    "the answer's score relative to the mean of all others, summed over the tokens of each word.",
                ),
                WeightedText(
                    "By leaving out",
                    whole,
                    [(word.word, word.change) for word in facts.words],
                    "The change of the answer's log-odds when a word is left out.",
                ),
            ],
            only="page",
        ),
    ]
    return Document(
        subject=f"why this {facts.kind}?",
        title=facts.answer,
        summary=f"{name}: {facts.probability:.1%} ({answers})",
        page_title=f"Why {name} predicts {facts.answer}",
        sections=[Section("", [*notes(facts.notes), *marked, *([chart, words_table(facts)] if facts.words else [])])],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def words_table(facts: Prediction) -> Table:
    columns = [
        Column("word"),
        Column("without it", "percent"),
        Column("log-odds", "signed"),
        Column("gradient", "signed"),
        Column("prediction without it"),
    ]
    rows = [
        [word.word, word.probability, word.change, word.weight, word.says if word.says != facts.answer else ""]
        for word in facts.words
    ]
    caption = (
        "The probability of the answer without each word, the change of its log-odds, the word's gradient × input, and "
        "the prediction without it where that differs."
    )
    return Table(f"Why this {facts.kind}", columns, rows, caption, fold_after=MAX_UNFOLDED)


def words_chart(facts: Prediction) -> Chart:
    """Both measures for the words with the largest effect, in the order of the text."""
    strongest = sorted(facts.words, key=lambda word: -abs(word.change))[:MAX_BARS]
    words = sorted(strongest, key=lambda word: (word.text, word.begin))
    rows = range(len(words), 0, -1)

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, title, values in (
            (left, "left out: change of log-odds", [word.change for word in words]),
            (right, "gradient × input", [word.weight for word in words]),
        ):
            axes.barh(list(rows), values, 0.68, color=[ORANGE if value > 0 else BLUE for value in values])
            axes.axvline(0, color=GRID, linewidth=0.8)
            axes.set_title(title, fontsize=10)
            axes.locator_params(axis="x", nbins=3)
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        left.set_yticks(list(rows), [word.word[:MAX_LETTERS] for word in words])

    caption = (
        "The words with the largest effect. The two measures need not agree: one asks what slightly less of a word "
        "would change, the other what removing it changes."
    )
    return Chart("words", "effect of each word", paint, caption, (60 + 24 * max(2, len(words))) / WIDE)
