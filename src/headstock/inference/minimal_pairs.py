"""Which of two texts a model finds likelier: the share of minimal pairs in which it is the right one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headstock.data.minimal_pairs import GROUPS, MinimalPair
from headstock.intervals import item_interval

Likelihoods = Callable[[list[list[int]]], list[np.ndarray]]  # of every token of every text


def score_minimal_pairs(
    pairs: Sequence[MinimalPair],
    encode: Callable[[list[str]], list[list[int]]],
    offsets: Callable[[str], list[tuple[int, int]]],
    likelihoods: Likelihoods,
) -> dict[str, Any]:
    """Accuracy over all pairs and by kind, each with its 95% interval; a pair that is a tie counts half.

    Where it is known what follows the candidate in both texts, `partial_accuracy` compares that part alone: it is the
    same in both, so that a candidate that is likely by itself is not preferred for that.
    """
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    rows = encode(texts)
    # texts of the same tokens are read once, and so are exactly as likely
    unique = list(dict.fromkeys(map(tuple, rows)))
    found = dict(zip(unique, likelihoods([list(row) for row in unique]), strict=True))
    values = [found[tuple(row)] for row in rows]
    sums = np.array([value.sum() for value in values]).reshape(-1, 2)
    right = halves(sums)
    accuracy = item_interval(right)
    metrics: dict[str, Any] = {
        "accuracy": accuracy.mean,
        "rows": len(pairs),
        "ties": int((right == 0.5).sum()),
        "intervals": {"accuracy": [accuracy.low, accuracy.high]},
    }
    if partial := [(i, pair.continuation) for i, pair in enumerate(pairs) if pair.continuation is not None]:
        after = [
            value_after(values[2 * i + side], offsets(texts[2 * i + side]), rest[side])
            for i, rest in partial
            for side in (0, 1)
        ]
        share = item_interval(halves(np.array(after).reshape(-1, 2)))
        metrics["partial_accuracy"] = share.mean
        metrics["intervals"]["partial_accuracy"] = [share.low, share.high]
    return metrics | {"by": by_kind(pairs, right)}


def halves(sums: np.ndarray) -> np.ndarray:
    """(N, 2) of the good and the bad text -> (N,) 1 where the good one is likelier, 0.5 where both are as likely."""
    return (sums[:, 0] > sums[:, 1]) + 0.5 * (sums[:, 0] == sums[:, 1])


def value_after(values: np.ndarray, offsets: Sequence[tuple[int, int]], place: int) -> float:
    """The part of a text's likelihood that is of the tokens which begin at a place or after it."""
    return float(sum(value for value, (begin, _) in zip(values, offsets, strict=True) if begin >= place))


def by_kind(pairs: Sequence[MinimalPair], right: np.ndarray) -> dict[str, dict[str, dict[str, Any]]]:
    """For each way of grouping the pairs, the accuracy of each group, the worst first."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in GROUPS:
        groups: dict[str, list[int]] = {}
        for i, pair in enumerate(pairs):
            if kind in pair.groups:
                groups.setdefault(pair.groups[kind], []).append(i)
        told: dict[str, dict[str, Any]] = {}
        for name, members in groups.items():
            share = item_interval(right[members])
            told[name] = {"accuracy": share.mean, "low": share.low, "high": share.high, "rows": len(members)}
        if told:
            found[kind] = dict(sorted(told.items(), key=lambda item: item[1]["accuracy"]))
    return found
