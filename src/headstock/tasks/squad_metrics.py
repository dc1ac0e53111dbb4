"""Exact match and F1 of answers, as the official SQuAD evaluation computes them.

Two texts are compared without case, ASCII punctuation, the English articles a, an and the, and differences of white
space. The articles are those of the official script, whatever the language: a French `a` (has) is dropped as well, from
prediction and answer alike, so that numbers can be compared with those that others publish. The scripts for v1.1 and
v2.0 give the same numbers except where nothing is left of a text, such as of the answer "a"; there v2.0 is followed.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """
    >>> normalize_answer("The  Eiffel-Tower, an icon!")
    'eiffeltower icon'
    """
    bare = text.lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals an answer, else 0; without answers, "" is correct."""
    return _best(prediction, answers, lambda ours, theirs: float(ours == theirs))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The word overlap with the best-matching answer; without answers, "" is correct."""
    return _best(prediction, answers, _overlap)


def _best(prediction: str, answers: Sequence[str], score: Callable[[str, str], float]) -> float:
    # an answer of which nothing is left, such as "the", is no answer, except where there is no other
    wanted = [left for answer in answers if (left := normalize_answer(answer))] or [""]
    ours = normalize_answer(prediction)
    return max(score(ours, theirs) for theirs in wanted)


def _overlap(ours: str, theirs: str) -> float:
    """The harmonic mean of precision and recall over a bag of words."""
    our_words, their_words = ours.split(), theirs.split()
    if not our_words or not their_words:
        return float(our_words == their_words)
    shared = (Counter(our_words) & Counter(their_words)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(our_words), shared / len(their_words)
    return 2 * precision * recall / (precision + recall)
