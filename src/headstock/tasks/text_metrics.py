"""Metrics of predicted answers, entities and translations, and how reports name metrics.

N rows. Each metric comes from statistics per row, so that any sample of rows can be scored.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

METRICS = {
    "accuracy": "accuracy",
    "majority": "majority baseline",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "f1": "F1",
    "mcc": "Matthews correlation",
    "auroc": "AUROC",
    "exact_match": "exact match",
    "bleu": "BLEU",
    "chrf": "chrF",
    "pearson": "Pearson r",
    "spearman": "Spearman rho",
    "quadratic_kappa": "quadratic kappa",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
}
DEFINITIONS = {  # of metrics whose keys do not explain themselves
    "ece": "expected calibration error: the mean gap between confidence and accuracy, 0 at best",
    "brier": "Brier score: the mean squared error of the probabilities, 0 at best",
    "aurc": "area under the risk-coverage curve: the error rate averaged over withholding more and more of the least "
    "confident predictions, 0 at best",
}
LOSSES = {"loss": "validation loss", "bits_per_byte": "bits per byte", "perplexity": "perplexity"}
ERRORS = ("mae", "rmse")  # in the units of the labels; lower is better
# scores that are shown times 100 and are no percentages
NOT_PERCENT = ("bleu", "chrf", "pearson", "spearman", "quadratic_kappa", "r2")
UNDETERMINED = "undetermined"  # in place of an interval that contains every possible value
SECONDARY = ("mcc", "auroc")  # left out of one-line summaries


def metric_name(metric: str) -> str:
    """The name of a metric in a report; of a metric without an entry, its key.

    >>> metric_name("macro_f1"), metric_name("within_one")
    ('macro F1', 'within one')
    """
    return (METRICS | LOSSES).get(metric, metric.replace("_", " "))


def is_score(metric: str) -> bool:
    """Whether a metric is at most 1 and higher is better, unlike a loss or an error."""
    return metric not in LOSSES and metric not in ERRORS


def format_score(metric: str, score: float) -> str:
    """`71.0%`; with the name where that is no percentage: `BLEU 21.0`, `MAE 0.412`."""
    text = format_metric(metric, score)
    return text if text.endswith("%") else f"{metric_name(metric)} {text}"


def format_metric(metric: str, value: float | None, *, scale: float | None = None) -> str:
    """`71.3%`, `21.0` (BLEU), `0.412` (MAE) or `2.3456` (loss).

    An error has as many decimals as give `scale`, by default the error itself, three digits.
    """
    if value is None:
        return "–"
    if metric in ERRORS:
        return f"{value:.{decimals(value if scale is None else scale)}f}"
    if not is_score(metric):
        return f"{value:.4f}"
    return f"{100 * value:.1f}{'' if metric in NOT_PERCENT else '%'}"


def format_range(metric: str, low: float | None, high: float | None, *, scale: float | None = None) -> str:
    """`70.1 to 72.5`; empty without an interval, and `undetermined` for one that contains every possible share."""
    if low is None or high is None:
        return ""
    if is_score(metric) and metric not in NOT_PERCENT and low <= 0 and high >= 1:
        return UNDETERMINED
    return " to ".join(
        format_metric(metric, end, scale=high if scale is None else scale).removesuffix("%") for end in (low, high)
    )


def decimals(value: float) -> int:
    """The decimals with which a number has three digits.

    >>> decimals(0.4123), decimals(41.23), decimals(4123.0)
    (3, 1, 0)
    """
    return min(max(0, 2 - math.floor(math.log10(abs(value)))), 9) if value else 3


# Answers: exact match and F1 as the official SQuAD evaluation computes them.
#
# Texts are compared without case, ASCII punctuation, the English articles a, an and the, and differences of white
# space. The articles are those of the official script, whatever the language: a French `a` (has) is dropped as well,
# from prediction and answer alike, so that scores can be compared with published ones. The scripts for v1.1 and v2.0
# differ only where normalization leaves nothing of a text, such as the answer "a"; there v2.0 is followed.

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """
    >>> normalize_answer("The  Eiffel-Tower, an icon!")
    'eiffeltower icon'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals an answer, else 0; without answers, "" is correct."""
    return _best_score(prediction, answers, lambda predicted, answer: float(predicted == answer))


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """The word overlap with the best-matching answer; without answers, "" is correct."""
    return _best_score(prediction, answers, _word_f1)


def _best_score(prediction: str, answers: Sequence[str], score: Callable[[str, str], float]) -> float:
    # an answer that normalizes to nothing, such as "the", is no answer unless it is the only one
    references = list(filter(None, map(normalize_answer, answers))) or [""]
    predicted = normalize_answer(prediction)
    return max(score(predicted, reference) for reference in references)


def _word_f1(prediction: str, answer: str) -> float:
    """The harmonic mean of precision and recall over a bag of words."""
    predicted_words, answer_words = prediction.split(), answer.split()
    if not predicted_words or not answer_words:
        return float(predicted_words == answer_words)
    overlap = (Counter(predicted_words) & Counter(answer_words)).total()
    return 2 * overlap / (len(predicted_words) + len(answer_words))


# Named entities: B-X begins an entity of type X and I-X continues it (BIO, also called IOB2). In IOB1, I-X also begins
# one, and B-X only separates it from one of the same type just before. E-X (or L-X) ends an entity and S-X (or U-X) is
# one of a single word (BIOES, BILOU). Invalid sequences are read as conlleval and seqeval read them: a tag that can
# only continue an entity begins one where none of its type is open.

OUTSIDE = "O"
ALIASES = {"L": "E", "U": "S"}  # BILOU's prefixes
PREFIXES = frozenset("BIESLU")

Entity = tuple[str, int, int]  # type, first word, one past the last


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities in a sentence's tags, in order.

    >>> entities(["B-PER", "I-PER", "O", "B-LOC"])
    [('PER', 0, 2), ('LOC', 3, 4)]
    """
    spans: list[Entity] = []
    start: int | None = None
    previous_prefix, previous_type = OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, entity_type = tag.partition("-")
        prefix = ALIASES.get(prefix, prefix)
        continues = previous_prefix in ("B", "I") and prefix in ("I", "E") and entity_type == previous_type
        if start is not None and not continues:
            spans.append((previous_type, start, index))
            start = None
        if prefix != OUTSIDE and not continues:
            start = index
        previous_prefix, previous_type = prefix, entity_type
    return spans


def is_entity_scheme(classes: Iterable[str]) -> bool:
    """Whether the tags are O and B-X, I-X and so on, so that entities can be scored, not only words."""
    parts = [tag.partition("-") for tag in set(classes) - {OUTSIDE}]
    return bool(parts) and all(prefix in PREFIXES and dash and entity_type for prefix, dash, entity_type in parts)


def entity_counts(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """For each sentence twice the number of correct entities, and the number of predicted plus true ones.

    The ratio of their sums is the micro-averaged F1 of entities with the right type and boundaries, which is what
    seqeval's `f1_score` computes by default.
    """
    numerators, denominators = np.zeros((2, len(gold)))
    for i, (predicted_tags, gold_tags) in enumerate(zip(predicted, gold, strict=True)):
        if len(predicted_tags) != len(gold_tags):
            raise ValueError(f"sentence {i}: {len(predicted_tags)} predicted tags for {len(gold_tags)} words")
        predicted_entities, gold_entities = set(entities(predicted_tags)), set(entities(gold_tags))
        numerators[i] = 2 * len(predicted_entities & gold_entities)
        denominators[i] = len(predicted_entities) + len(gold_entities)
    return numerators, denominators


# Translations: BLEU and chrF as sacreBLEU computes them. The score of a sample comes from the sum of its statistics.

MAX_WORD_NGRAM = 4  # of BLEU
MAX_CHARACTER_NGRAM = 6  # of chrF
BETA = 2  # weight of recall in chrF


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(N, 10) hypothesis length, reference length, then matching and total n-grams of orders 1 to 4."""
    metric = _sacrebleu_metrics()["bleu"]
    counts = np.zeros((len(hypotheses), 2 + 2 * MAX_WORD_NGRAM), dtype=np.int64)
    for row, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True)):
        score = metric.corpus_score([hypothesis], [[reference]])
        counts[row] = [score.sys_len, score.ref_len, *score.counts, *score.totals]
    return counts


def chrf_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(N, 18) for n-grams of 1 to 6 characters: those of the hypothesis, of the reference, and matching ones."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    counts = np.zeros((len(hypotheses), MAX_CHARACTER_NGRAM, 3), dtype=np.int64)
    for row, pair in enumerate(zip(hypotheses, references, strict=True)):
        both_sides = [extract_all_char_ngrams(text.rstrip(), MAX_CHARACTER_NGRAM) for text in pair]
        for order, (hypothesis, reference) in enumerate(zip(*both_sides, strict=True)):
            # without reference n-grams of this order, those of the hypothesis do not count as wrong
            total = sum(hypothesis.values()) if reference else 0
            counts[row, order] = total, sum(reference.values()), sum((hypothesis & reference).values())
    return counts.reshape(len(hypotheses), 3 * MAX_CHARACTER_NGRAM)


def bleu(counts: np.ndarray) -> np.ndarray:
    """(..., 10) summed counts -> (...) BLEU from 0 to 1; orders without a match are smoothed as in sacreBLEU."""
    counts = np.asarray(counts, dtype=np.float64)
    hypothesis_length, reference_length = counts[..., 0], counts[..., 1]
    matches, totals = counts[..., 2 : 2 + MAX_WORD_NGRAM], counts[..., 2 + MAX_WORD_NGRAM :]
    unmatched = (matches == 0) & (totals > 0)
    smoothed = np.where(unmatched, np.exp2(-np.cumsum(unmatched, -1)), matches)
    precisions = smoothed / np.maximum(totals, 1)
    with np.errstate(divide="ignore"):
        mean = np.exp(np.log(precisions).mean(-1))  # 0 if the hypothesis has no n-gram of some order
        brevity_penalty = np.exp(np.minimum(0.0, 1 - reference_length / np.maximum(hypothesis_length, 1e-9)))
    return np.where(matches.any(-1), brevity_penalty * mean, 0.0)


def chrf(counts: np.ndarray) -> np.ndarray:
    """(..., 18) summed counts -> (...) chrF from 0 to 1."""
    counts = np.asarray(counts, dtype=np.float64).reshape(*np.shape(counts)[:-1], MAX_CHARACTER_NGRAM, 3)
    hypothesis, reference, matches = counts[..., 0], counts[..., 1], counts[..., 2]
    counted = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(counted.sum(-1), 1)
    precision = (np.where(counted, matches, 0) / np.maximum(hypothesis, 1)).sum(-1) / orders
    recall = (np.where(counted, matches, 0) / np.maximum(reference, 1)).sum(-1) / orders
    return (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, 1e-12)


def sacrebleu_signatures() -> dict[str, str]:
    """The sacreBLEU signature of each metric."""
    metrics = _sacrebleu_metrics()
    for metric in metrics.values():
        metric.corpus_score(["a"], [["a"]])  # a signature includes the number of references
    return {name: str(metric.get_signature()) for name, metric in metrics.items()}


def _sacrebleu_metrics() -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU(), "chrf": CHRF()}
