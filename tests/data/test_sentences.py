"""Sentence boundaries in French and English; the sentences join to the text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.data.sentences import split_sentences

# | marks a sentence boundary
CASES = [
    # punctuation, and closing quotes and brackets
    "Il pleut.| Elle rit !| Pourquoi ?| Qui sait…| Fin.",
    "Really?!| Yes!!!| Well...| Maybe.",
    "Vraiment\u202f?| Oui\u00a0!| Bon.",
    "Quoi ? !| Rien.",
    "He said “No.”| She left.",
    "(It was late.)| He slept.| [Sic.]| Then he woke.",
    "Il cria « Au feu\u00a0!\u00a0»| Tous sortirent.",
    "Il cria « Au feu ! ».| Tous sortirent.",
    '"Stop."| "Why?"| "Because."',
    "« Non. »| « Si. »",
    # lower case continues a sentence
    "« Oui ? » dit-il.| Elle se tut.",
    "“Why?” she asked.| He shrugged.",
    '"Really?" John asked.| Nobody spoke.',
    "« Ah ! ah ! » fit le comte.",
    "Il hésita... puis partit.| Elle resta… seule.",
    "— Tu viens ?| — Oui, dit-elle.",
    "Alors !…| Bon.",
    # abbreviations
    "M. Jourdain et MM. Dupont et Durand parlent à Mme Lepic.| Mlle Rose rit.",
    "Dr. Watson met Mr. Holmes, Mrs. Hudson and Prof. Moriarty on St. James Street.| Ms. Adler left.",
    "Des pommes, des poires, etc.| Puis des noix, etc. et du pain.",
    "Voir cf. Dupont.| Un fruit, p. ex. Reinette ou autre.",
    "Rome fut fondée en 753 av. J.-C. et pillée ensuite.| Elle dura.",
    "Il mourut en 44 av. J.-C.| Rome pleura.",
    "Use a tool, e.g. Python, i.e. Guido's language.| It is Smith vs. Jones.",
    "No. 5 is alive, see Fig. 2 and p. 12.| No.| He said no.",
    "They met on Jan. 5 and on Sept. 9.| It was in Dec.| He left.",
    "J. K. Rowling wrote it.| George R. R. Martin did not.",
    "She came with my wife and I.| Overall it was me.| Isaac I. Asimov wrote.",
    "J.-P. Belmondo joue.| C. Nolan filme.",
    "The U.S. Army left the U.S.| He stayed.",
    "She works at Acme Inc. Boston.| He owns Acme Inc.| The end.",
    # numbers, file names and URLs
    "Pi is 3.14 and the version is 2.0.1.| Good.",
    "En 1999.| 3 personnes vinrent.",
    "See https://example.org/a.b?c=d.Html or readme.txt.| Then www.example.org.| Bye.",
    "Le XXe siècle.| Louis XIV.| Il régna.",
    "1. Faire ceci.| 2. Faire cela.",
    "It costs a lot.| $5 is enough.",
    # lines
    "Chapitre premier|\n\nOù l'on voit un homme|\n\nqui marche",
    "Le titre|\nIl était une fois un roi.|\nIl avait une fille.",
    "À acheter :|\n- du pain|\n- du lait|\n2. deux œufs",
    "Cette ligne a été coupée par un programme à la hauteur de\nParis, et la phrase va jusqu'ici.| Fin.",
    "Chère Anne,\nJe vous écris.",
    "Elle vit en sortant de la gare, au coin de la rue du Bac,\nM. Dupont.|\n— Bonjour, dit-il.",
    "One.|  \n \n\tTwo.",
    "one.|\n\ntwo",
    # without any capital a single mark ends a sentence
    "i liked it.| it was good!| was it?| yes... well, e.g. this.",
    "... Il partit.| Elle aussi.",
    "  Voilà.  ",
]


@pytest.mark.parametrize("expected", CASES)
def test_sentence_boundaries(expected: str) -> None:
    assert split_sentences(expected.replace("|", "")) == expected.split("|")


def test_empty_and_blank_texts() -> None:
    assert split_sentences("") == []
    assert split_sentences(" \n\n ") == [" \n\n "]


PIECES = [
    "M",
    "Oui",
    "oui",
    "etc",
    "J",
    "U.S",
    "av",
    "1",
    "3.14",
    "É",
    " ",
    " ",
    "\n",
    "\n\n",
    "\u00a0",
    "\u202f",
    "\r\n",
]
PIECES += [".", "!", "?", "…", "...", "«", "»", '"', "'", "”", "(", ")", "-", "—", ",", "$", "😀", "said"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(st.lists(st.sampled_from(PIECES)).map("".join), st.text()))
def test_sentences_join_to_the_text_and_none_is_blank(text: str) -> None:
    slices = split_sentences(text)
    assert "".join(slices) == text
    if text.strip():
        assert all(piece.strip() for piece in slices)
        assert all(piece == piece.rstrip() for piece in slices[:-1])
        assert all(piece[0].isspace() for piece in slices[1:])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["Il pleut.", "Why?", "« Oui ! »", "It is M. Jourdain's.", "Fin…"]), min_size=1))
def test_joined_sentences_are_split_again(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == [sentences[0], *(f" {sentence}" for sentence in sentences[1:])]


@pytest.mark.parametrize(
    "nasty",
    [
        "!",
        ". ",
        "« ",
        "\n",
        " ",
        "\n ",
        '!" » ',
        "A. ",
        "a)\n",
        "1. ",
        "M. Le ",
        "x",
        '?" A a ',
        "x\n",
        ".\n- ",
        "I.V.",
        "((",
    ],
)
def test_adversarial_text_takes_linear_time(nasty: str) -> None:
    """Forty times the text must not take 1,600 times as long."""

    def seconds(times: int) -> float:
        text = "Ah" + nasty * times + "b"
        best = float("inf")
        for _ in range(3):
            begun = time.process_time()
            split_sentences(text)
            best = min(best, time.process_time() - begun)
        return best

    assert seconds(40_000) < 400 * max(seconds(1_000), 2e-4)
