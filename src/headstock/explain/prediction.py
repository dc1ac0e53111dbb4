"""Explains a prediction by gradients (what each token contributes) and by leaving out each word."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headstock.data.words import word_spans
from headstock.explain import document as doc
from headstock.explain.gradients_document import BLUE, ORANGE
from headstock.explain.prediction_cases import PredictionCase, case_of
from headstock.explain.render_document import picture_of
from headstock.explain.subject import check_texts
from headstock.inference.pipeline import Pipeline
from headstock.report.highlighted_text import decode_tokens, locate_tokens, merge_into_words, merge_spaces
from headstock.report.theme import GRID, WIDE

MAX_UNFOLDED = 40  # words that a page lists without folding
MAX_BARS = 12  # words in the chart
MAX_LETTERS = 18  # of a word beside its bar
TOP = 5  # answers listed beside the one that is explained
MIN_PROBABILITY = 1e-7  # probabilities are clamped to it, so that log-odds are finite


@dataclass(frozen=True)
class TokenWeight:
    """One token of the text."""

    token: str
    weight: float  # integrated gradients; positive supports the answer
    plain: float  # gradient x input


@dataclass(frozen=True)
class WordEffect:
    """One word of the text, and the prediction without it."""

    word: str
    text: int  # index of the text that contains it
    begin: int
    end: int
    weight: float  # sum of its tokens
    probability: float  # of the answer without the word
    change: float  # of the answer's log-odds: with the word minus without it
    says: str  # the prediction without the word


@dataclass(frozen=True)
class PredictionFacts:
    """An answer, and what in the text supports or opposes it."""

    kind: str  # "class", "next token", "masked word" or "translation"
    texts: list[str]
    answer: str
    probability: float
    answers: list[tuple[str, float]]  # the most probable ones
    tokens: list[TokenWeight]
    words: list[WordEffect]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        answers = [{"answer": name, "probability": probability} for name, probability in self.answers]
        return asdict(self) | {"answers": answers}


def explain_prediction(
    pipeline: Pipeline, texts: Sequence[str], *, label: str | None = None, at: int | None = None
) -> PredictionFacts:
    """Explain a run's prediction for a text, or `label`; `at` is the number of a [MASK], from 1."""
    check_texts(pipeline, texts)
    case = case_of(pipeline, list(texts), at, label)
    (probabilities,) = case.probabilities([texts])
    target = case.select(label, probabilities)
    integrated, plain = (case.weights(target, averaged=averaged) for averaged in (True, False))
    return PredictionFacts(
        kind=case.kind,
        texts=list(texts),
        answer=case.name(target),
        probability=float(probabilities[target]),
        answers=[(case.name(index), float(probabilities[index])) for index in case.top(probabilities, TOP)],
        tokens=[TokenWeight(*pair, weight) for pair, (_, weight) in zip(integrated, plain, strict=True)],
        words=leave_one_out(case, list(texts), target, float(probabilities[target]), integrated),
        notes=case.notes,
    )


# Leaving out words


def leave_one_out(
    case: PredictionCase, texts: list[str], target: int, probability: float, weights: Sequence[tuple[str, float]]
) -> list[WordEffect]:
    """The prediction without each word; all variants are read together."""
    spans = [
        (number, begin, end)
        for number, text in enumerate(texts)
        for begin, end in word_spans(text)
        if not any(first < end and begin < last for first, last in case.excluded_spans(text))
    ]
    variants = [[*texts[:i], without_word(texts[i], begin, end), *texts[i + 1 :]] for i, begin, end in spans]
    rows = [row for row, variant in enumerate(variants) if all(text.strip() for text in variant)]
    if not rows:
        return []
    shares = word_weights(texts, weights, spans)
    effects = []
    for row, probabilities in zip(rows, case.probabilities([variants[row] for row in rows]), strict=True):
        number, begin, end = spans[row]
        without = float(probabilities[target])
        change = log_odds(probability) - log_odds(without)
        prediction = case.name(case.top(probabilities, 1)[0])
        word = texts[number][begin:end]
        effects.append(WordEffect(word, number, begin, end, shares[row], without, change, prediction))
    return effects


def without_word(text: str, begin: int, end: int) -> str:
    """A text without a word, and without the space that would be doubled or left at an end."""
    before, after = text[:begin], text[end:]
    if after.startswith(" ") and (not before or before.endswith(" ")):
        return before + after[1:]
    return before[:-1] if not after and before.endswith(" ") else before + after


def log_odds(probability: float) -> float:
    clamped = min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY)
    return math.log(clamped) - math.log1p(-clamped)


def word_weights(
    texts: Sequence[str], weights: Sequence[tuple[str, float]], spans: Sequence[tuple[int, int, int]]
) -> list[float]:
    """The sum of the weights of the tokens that start in each word."""
    joined, starts = "", []
    for text in texts:
        starts.append(len(joined))
        joined += text + "\n"
    located = [
        (start, weight)
        for _, weight, start in locate_tokens(joined, merge_spaces(decode_tokens(weights)))
        if start is not None
    ]
    return [
        sum(weight for start, weight in located if starts[text] + begin <= start < starts[text] + end)
        for text, begin, end in spans
    ]


# Document


def prediction_document(facts: PredictionFacts, name: str) -> doc.ExplainDocument:
    joined = "\n".join(facts.texts)
    pieces = decode_tokens([(token.token, token.weight) for token in facts.tokens])
    answers = ", ".join(f"{answer} {chance:.1%}" for answer, chance in facts.answers)
    chart = words_chart(facts)
    by_gradient = doc.WeightedText(
        "By gradient",
        joined,
        merge_into_words(joined, pieces, word_spans(joined)),
        "Integrated gradients (gradient × input, averaged on the path from a blank text to this one) of the answer's "
        "score relative to the mean of all others, summed over the tokens of each word.",
    )
    by_leaving_out = doc.WeightedText(
        "By leaving out",
        joined,
        [(word.word, word.change) for word in facts.words],
        "The change of the answer's log-odds when a word is left out.",
    )
    blocks = [
        *doc.notes(facts.notes),
        doc.Text("Orange words support the answer, blue ones oppose it.", "soft", only="page"),
        doc.Grid([by_gradient, by_leaving_out], only="page"),
        *([chart, words_table(facts)] if facts.words else []),
    ]
    return doc.ExplainDocument(
        subject=f"why this {facts.kind}?",
        title=facts.answer,
        summary=f"{name}: {facts.probability:.1%} ({answers})",
        page_title=f"Why {name} predicts {facts.answer}",
        sections=[doc.Section("", blocks)],
        json=facts.to_dict(),
        picture=picture_of(chart),
    )


def words_table(facts: PredictionFacts) -> doc.Table:
    columns: dict[str, Any] = {
        "word": ("text", "word"),
        "without it": ("percent", "probability"),
        "log-odds": ("signed", "change"),
        "gradient": ("signed", "weight"),
        "prediction without it": ("text", lambda word: word.says if word.says != facts.answer else ""),
    }
    caption = (
        "The probability of the answer without each word, the change of its log-odds, the word's gradient × input, and "
        "the prediction without it where that differs."
    )
    return doc.Table.from_records(f"Why this {facts.kind}", facts.words, columns, caption, fold_after=MAX_UNFOLDED)


def words_chart(facts: PredictionFacts) -> doc.Chart:
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
    return doc.Chart("words", "effect of each word", paint, caption, (60 + 24 * max(2, len(words))) / WIDE)
