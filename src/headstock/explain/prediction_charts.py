"""Shows on the text itself why a run says what it says, and draws the words that weigh most."""

from collections.abc import Sequence
from typing import Any

from headstock.data.word_joining import word_spans
from headstock.explain.gradient_charts import BLUE, ORANGE, both
from headstock.explain.prediction import Prediction, Word
from headstock.report.highlighted_text import decode_tokens, make_passage, merge_into_words
from headstock.report.render import render
from headstock.report.standalone import standalone_svg
from headstock.report.theme import GRID, WIDE, Gallery, make_figure

BARS = 12
ROWS = 40  # words in the table that are shown at once
LETTERS = 18  # of a word beside its bar


def heaviest(found: Prediction, count: int = BARS) -> list[Word]:
    """The words that move the answer most, in the order of the text."""
    chosen = sorted(found.words, key=lambda word: -abs(word.change))[:count]
    return sorted(chosen, key=lambda word: (word.text, word.begin))


def paint_words(words: Sequence[Word]) -> Any:
    """Both measures side by side, one bar a word."""

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        places = range(len(words), 0, -1)
        for axes, title, values in (
            (left, "left out: change of log-odds", [word.change for word in words]),
            (right, "gradient × input", [word.weight for word in words]),
        ):
            colours = [ORANGE if value > 0 else BLUE for value in values]
            axes.barh(list(places), values, 0.68, color=colours)
            axes.axvline(0, color=GRID, linewidth=0.8)
            axes.set_title(title, fontsize=10)
            axes.locator_params(axis="x", nbins=3)
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        left.set_yticks(list(places), [word.word[:LETTERS] for word in words])

    return paint


def height(words: Sequence[Word]) -> float:
    return 60 + 24 * max(2, len(words))


def picture(found: Prediction) -> str:
    words = heaviest(found)
    figure = make_figure(paint_words(words), WIDE, height(words))
    return standalone_svg(str(Gallery().embed("words", figure, "the words that weigh most")))


def page(found: Prediction, *, name: str) -> str:
    words, gallery = heaviest(found), Gallery()
    chart = None
    if words:
        share = height(words) / WIDE
        chart = both(gallery, "words", paint_words(words), "the words that weigh most", share)
    whole = "\n".join(found.texts)
    pieces = decode_tokens([(token.token, token.weight) for token in found.tokens])
    by_word = merge_into_words(whole, pieces, word_spans(whole))
    return render(
        "headstock.explain",
        "prediction.html",
        found=found,
        name=name,
        chart=chart,
        by_gradient=make_passage(whole, by_word, first=1500),
        by_leaving=make_passage(whole, [(word.word, word.change) for word in found.words], first=1500),
        words=found.words[:ROWS],
        more=found.words[ROWS:],
    )
