"""The words in which reports describe a task's rows and metrics."""

from dataclasses import dataclass

METRICS = {
    "accuracy": "accuracy",
    "majority": "majority class",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "f1": "F1",
    "exact_match": "exact match",
    "bleu": "BLEU",
    "chrf": "chrF",
}
LOSSES = {"loss": "validation loss", "bits_per_byte": "bits per byte", "perplexity": "perplexity"}
NOT_PERCENT = ("bleu", "chrf")  # scores from 0 to 100 that are no percentages


@dataclass(frozen=True)
class Nouns:
    """What a report calls the rows of a task and what is predicted for them, all in the singular."""

    row: str = "row"
    judged: str = "row"  # what one prediction is about
    read: str = "text"  # what may be long or short
    wrong: str = "wrongly predicted rows"
    learned: str = "accuracy"  # the quantity of the training curves
    right: str = ""  # what counts as a correct prediction, where that needs explaining
    unit: str = "label"  # what the number of training rows counts

    @property
    def rows(self) -> str:
        return f"{self.row}s"


def metric_name(metric: str) -> str:
    """The name of a metric in a report; of a metric without an entry, its key.

    >>> metric_name("macro_f1"), metric_name("within_one")
    ('macro F1', 'within one')
    """
    return (METRICS | LOSSES).get(metric, metric.replace("_", " "))


def is_score(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and more of it is better, unlike a loss."""
    return metric not in LOSSES


def format_score(metric: str, score: float) -> str:
    """A score between 0 and 1: `71.0%`, or for BLEU and chrF `BLEU 21.0`."""
    return f"{metric_name(metric)} {100 * score:.1f}" if metric in NOT_PERCENT else f"{score:.1%}"
