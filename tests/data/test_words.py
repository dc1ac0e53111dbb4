"""Joining words to French and English text, and finding words in text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.data.words import join_words, word_spans

WRITTEN = [
    "Qu'est-ce que c'est aujourd'hui ? L'eau (froide) de M. Dupont, a-t-il dit.",
    "It's why we don't like the U.S. \"economy\"; 1,500.25 of them... isn't it?!",
    "Jusqu’à quand ? « Peut-être », dit-elle : 5% d’accord !",
    "They'll see [us], we're not sure.",
]


def split(text):
    return [text[begin:end] for begin, end in word_spans(text)]


@pytest.mark.parametrize("text", WRITTEN)
def test_joined_words_read_as_written(text):
    assert join_words(split(text))[0] == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("l'eau qu'il boit", ["l'", "eau", "qu'", "il", "boit"]),
        ("d’ici à l’été", ["d’", "ici", "à", "l’", "été"]),
        ("quelqu'un aujourd'hui", ["quelqu'un", "aujourd'hui"]),
        ("a-t-il peut-être dit-on", ["a", "-t-il", "peut-être", "dit", "-on"]),
        ("don't it's we'll", ["do", "n't", "it", "'s", "we", "'ll"]),
        ("No... really?!", ["No", "...", "really", "?", "!"]),
        ("3.14 (M. X.)", ["3.14", "(", "M.", "X", ".", ")"]),
        ("", []),
    ],
)
def test_words_and_punctuation_are_found(text, words):
    assert split(text) == words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["à", "l'", "emplacement", "de", "Cora", "."], "à l'emplacement de Cora."),
        (["Est", "-ce", "vrai", "?", "Il", "le", "dit"], "Est-ce vrai ? Il le dit"),
        (["Is", "it", "true", "?"], "Is it true?"),
        (["He", "said", '"', "no", '"', "and", '"', "yes", '"', "."], 'He said "no" and "yes".'),
        (["(", "1", "000", "$", "5", ")"], "(1 000 $5)"),
        (["a", "-LRB-", "b", "-", "c"], "a -LRB- b - c"),
    ],
)
def test_spaces_follow_the_rules(words, text):
    assert join_words(words)[0] == text


@given(st.lists(st.text(alphabet="aé'’\".,;-!?(« n1", min_size=1, max_size=5), max_size=12))
def test_spans_cover_all_words_and_only_spaces_remain(words):
    text, spans = join_words(words)
    assert [text[begin:end] for begin, end in spans] == words
    between = [text[end:begin] for (_, end), (begin, _) in zip([(0, 0), *spans], [*spans, (len(text), 0)], strict=True)]
    assert set(between) <= {"", " "}


@given(st.text(alphabet="aé'’\".,;-!?(« n1\n_tl"))
def test_every_visible_character_is_in_one_word(text):
    spans = word_spans(text)
    assert "".join(text[begin:end] for begin, end in spans) == "".join(text.split())
    assert all(begin < end for begin, end in spans)
