"""Named entities in tag sequences, and the counts of their F1.

B-X begins an entity of the kind X and I-X goes on with it (BIO, also called IOB2); in IOB1 I-X also begins one, and B-X
only parts it from another of the same kind just before. E-X (or L-X) ends one, S-X (or U-X) is one of a single word
(BIOES, BILOU); O is none. Sequences that a model makes up are read as conlleval and seqeval read them: what can only go
on where nothing of its kind is open begins an entity.
"""

from collections.abc import Iterable, Sequence

import numpy as np

OUTSIDE = "O"
ALIASES = {"L": "E", "U": "S"}  # BILOU's words for the end and for a single word
PREFIXES = frozenset("BIESLU")

Entity = tuple[str, int, int]  # kind, first word, word after the last


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities that a sentence's tags name, in order.

    >>> entities(["B-PER", "I-PER", "O", "B-LOC"])
    [('PER', 0, 2), ('LOC', 3, 4)]
    """
    found: list[Entity] = []
    start: int | None = None
    before = (OUTSIDE, "")
    for at, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = _parts(tag)
        goes_on = before[0] in ("B", "I") and prefix in ("I", "E") and kind == before[1]
        if start is not None and not goes_on:
            found.append((before[1], start, at))
            start = None
        if prefix != OUTSIDE and not goes_on:
            start = at
        before = (prefix, kind)
    return found


def _parts(tag: str) -> tuple[str, str]:
    prefix, _, kind = tag.partition("-")
    return ALIASES.get(prefix, prefix), kind


def is_entity_scheme(classes: Iterable[str]) -> bool:
    """Whether the tags are O and B-X, I-X and the like, so that entities can be counted, not only words."""
    known = set(classes)
    parts = [tag.partition("-") for tag in known - {OUTSIDE}]
    return bool(parts) and all(prefix in PREFIXES and dash and kind for prefix, dash, kind in parts)


def entity_counts(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """For each sentence twice the entities that were found, and the entities predicted plus those that are there.

    The sum of the first over the sum of the second is the micro-averaged F1 of whole entities, kind and both ends
    right: the number that seqeval's `f1_score` gives by default.
    """
    numerators, denominators = np.zeros((2, len(gold)))
    for i, (ours, theirs) in enumerate(zip(predicted, gold, strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(f"sentence {i}: {len(ours)} predicted tags for {len(theirs)} words")
        found, there = set(entities(ours)), set(entities(theirs))
        numerators[i] = 2 * len(found & there)
        denominators[i] = len(found) + len(there)
    return numerators, denominators
