"""What people call the metrics, and what the rows of each task are to them."""

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


@dataclass(frozen=True)
class Nouns:
    """What a task's rows are, what each of its predictions is of, and what is so long or short that it may matter."""

    row: str
    judged: str
    read: str
    wrong: str  # those of which a prediction was wrong
    learned: str  # what the curves of training count
    right: str = ""  # what counts as right in lengths and calibration, where that is not plain
    unit: str = "label"  # what the number of training rows counts, in the singular

    @property
    def rows(self) -> str:
        return f"{self.row}s"


NOUNS = {
    "classify": Nouns("text", "text", "text", "wrongly classified texts", "accuracy"),
    "pair": Nouns("pair", "pair", "pair", "wrongly classified pairs", "accuracy"),
    "tag": Nouns(
        "sentence",
        "word",
        "sentence",
        "sentences with a wrong tag",
        "share of words tagged right",
        "Calibration looks at each word; of lengths, a sentence is right if all its tags are.",
    ),
    "answer": Nouns(
        "question",
        "question",
        "context",
        "contexts of wrong answers",
        "share of answers found exactly",
        "An answer is right here if it is just what one of the true answers is.",
    ),
    "translate": Nouns(
        "sentence", "sentence", "sentence", "badly translated sentences", "share of next tokens right", unit="pair"
    ),
}


def shown_score(metric: str, score: float) -> str:
    """A score between 0 and 1 as people write it: `71.0%`, or of BLEU and chrF, which are no shares, `BLEU 21.0`."""
    return f"{METRICS[metric]} {100 * score:.1f}" if metric in ("bleu", "chrf") else f"{score:.1%}"


def nouns_of(task: str | None) -> Nouns:
    """The words of a task; those of texts where it is not named, as in what was made before there were others."""
    return NOUNS.get(task or "classify", NOUNS["classify"])
