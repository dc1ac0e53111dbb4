"""BLEU and chrF as sacreBLEU computes them, from per-sentence statistics so that any sample can be scored.

N sentences. The score of a sample comes from the sum of its statistics.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

ORDERS = 4  # largest word n-gram of BLEU
CHARACTERS = 6  # largest character n-gram of chrF
BETA = 2  # weight of recall in chrF


def bleu_counts(texts: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """(N, 10) hypothesis length, reference length, then matching and total n-grams of orders 1 to 4."""
    metric = _metrics()["bleu"]
    counts = np.zeros((len(texts), 2 + 2 * ORDERS), dtype=np.int64)
    for row, (text, reference) in enumerate(zip(texts, wanted, strict=True)):
        found = metric.corpus_score([text], [[reference]])
        counts[row] = [found.sys_len, found.ref_len, *found.counts, *found.totals]
    return counts


def chrf_counts(texts: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """(N, 18) for n-grams of 1 to 6 characters: hypothesis, reference and matching ones."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    counts = np.zeros((len(texts), CHARACTERS, 3), dtype=np.int64)
    for row, sides in enumerate(zip(texts, wanted, strict=True)):
        said, reference = (extract_all_char_ngrams(text.rstrip(), CHARACTERS) for text in sides)
        for order, (ours, theirs) in enumerate(zip(said, reference, strict=True)):
            # what has no row of this length to be compared with does not count as wrong
            all_said = sum(ours.values()) if theirs else 0
            counts[row, order] = all_said, sum(theirs.values()), sum((ours & theirs).values())
    return counts.reshape(len(texts), 3 * CHARACTERS)


def bleu(counts: np.ndarray) -> np.ndarray:
    """(..., 10) summed counts -> (...) BLEU from 0 to 1; orders without a hit are smoothed as sacrebleu does."""
    counts = np.asarray(counts, dtype=np.float64)
    said, wanted = counts[..., 0], counts[..., 1]
    right, every = counts[..., 2 : 2 + ORDERS], counts[..., 2 + ORDERS :]
    missed = (right == 0) & (every > 0)
    halvings = np.exp2(np.cumsum(missed, -1))
    share = np.where(missed, 1 / halvings, right) / np.maximum(every, 1)
    with np.errstate(divide="ignore"):
        mean = np.exp(np.log(share).mean(-1))  # nothing said of some length: 0
        brief = np.exp(np.minimum(0.0, 1 - wanted / np.maximum(said, 1e-9)))
    return np.where(right.any(-1), brief * mean, 0.0)


def chrf(counts: np.ndarray) -> np.ndarray:
    """(..., 18) summed counts -> (...) chrF from 0 to 1."""
    counts = np.asarray(counts, dtype=np.float64).reshape(*np.shape(counts)[:-1], CHARACTERS, 3)
    said, wanted, right = counts[..., 0], counts[..., 1], counts[..., 2]
    there = (said > 0) & (wanted > 0)
    orders = np.maximum(there.sum(-1), 1)
    precision = (np.where(there, right, 0) / np.maximum(said, 1)).sum(-1) / orders
    recall = (np.where(there, right, 0) / np.maximum(wanted, 1)).sum(-1) / orders
    return (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, 1e-12)


def signatures() -> dict[str, str]:
    """The sacreBLEU signature of each metric."""
    told = {}
    for name, metric in _metrics().items():
        metric.corpus_score(["a"], [["a"]])  # a signature names how many references there are
        told[name] = str(metric.get_signature())
    return told


def _metrics() -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU(), "chrf": CHRF()}
