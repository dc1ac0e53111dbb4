"""The baseline to beat: TF-IDF of words and characters under a linear classifier chosen on the validation rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstock.errors import UserError

# scikit-learn's own default comes first, so that it wins ties
CANDIDATES = (
    ("linear SVM", 1.0),
    ("linear SVM", 0.3),
    ("linear SVM", 0.1),
    ("logistic regression", 10.0),
    ("logistic regression", 30.0),
    ("logistic regression", 3.0),
)


@dataclass
class TfidfClassifier:
    """Words 1-2 and characters 2-5, each by sublinear TF-IDF, then the best of a few linear classifiers.

    Texts may come in pairs: then both are counted by themselves, and what they share and do not share beside them.

    >>> baseline = Baseline(["negative", "positive"]).fit(texts, labels, valid_texts, valid_labels, seed=0)
    >>> baseline.chosen, baseline.valid_accuracy
    ('linear SVM, C=1', 0.8525)
    """

    classes: Sequence[str]
    chosen: str = field(default="", init=False)
    valid_accuracy: float = field(default=float("nan"), init=False)
    _counters: list[Any] = field(default_factory=list, init=False, repr=False)
    _classifier: Any = field(default=None, init=False, repr=False)
    _sharpness: float = field(default=1.0, init=False, repr=False)

    def fit(
        self, texts: Sequence[Any], labels: Any, valid_texts: Sequence[Any], valid_labels: Any, *, seed: int
    ) -> "TfidfClassifier":
        """Learn from the training rows, choose on the validation rows; labels are numbers into `classes`."""
        true, valid_true = _class_numbers(labels), _class_numbers(valid_labels)
        if not len(valid_true):
            raise UserError("TF-IDF arm: there are no validation rows to choose the classifier on")
        if len(present := np.unique(true)) < 2:
            got = ", ".join(repr(self.classes[number]) for number in present) or "none"
            raise UserError(f"TF-IDF arm: the training rows must hold two classes or more, got {got}")
        self._counters = _counters([text for row in texts for text in row] if _paired(texts) else texts)
        rows = self._features(texts)
        valid_rows = self._features(valid_texts)
        best = -1.0
        for name, strength in CANDIDATES:
            classifier = _classifier(name, strength, seed).fit(rows, true)
            share = float(np.mean(classifier.predict(valid_rows) == valid_true))
            if share > best:
                best, self._classifier, self.chosen = share, classifier, f"{name}, C={strength:g}"
        self.valid_accuracy = best
        self._sharpness = _fitted_sharpness(self._decisions(valid_rows), valid_true, self._classifier.classes_)
        return self

    def probabilities(self, texts: Sequence[Any]) -> NDArray[np.float64]:
        """(N, C); 0 for a class that no training row had. The likeliest class is always the classifier's own choice."""
        every = np.zeros((len(texts), len(self.classes)))
        if len(texts):
            every[:, self._classifier.classes_] = _softmax(self._sharpness * self._decisions(self._features(texts)))
        return every

    def _features(self, texts: Sequence[Any]) -> Any:
        from scipy.sparse import hstack

        if not _paired(texts):
            return hstack([counter.transform(texts) for counter in self._counters]).tocsr()
        parts = []
        for counter in self._counters:
            first, second = (counter.transform([row[side] for row in texts]) for side in (0, 1))
            parts += [first, second, first.multiply(second), abs(first - second)]
        return hstack(parts).tocsr()

    def _decisions(self, rows: Any) -> NDArray[np.float64]:
        """(N, K) the decision value of each of the K classes seen in training."""
        values = self._classifier.decision_function(rows)
        # scikit-learn gives one value for two classes; split evenly, a softmax of the two is the sigmoid of the one
        return np.stack([-values / 2, values / 2], axis=1) if values.ndim == 1 else values


def _class_numbers(labels: Any) -> NDArray[np.integer]:
    if any(isinstance(label, (set, frozenset, list, tuple, np.ndarray)) for label in labels):
        raise UserError(
            "TF-IDF arm: several labels a text are more than it can learn; leave tfidf out of --arms for these rows"
        )
    return np.asarray(labels, dtype=np.int64)


def _paired(texts: Sequence[Any]) -> bool:
    return bool(len(texts)) and not isinstance(texts[0], str)


def _counters(texts: Sequence[str]) -> list[Any]:
    """The counters of words and of characters that find something in `texts`."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    counters = []
    for counter in (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        TfidfVectorizer(analyzer="char", ngram_range=(2, 5), sublinear_tf=True),
    ):
        try:
            counters.append(counter.fit(texts))
        except ValueError as wrong:
            if "empty vocabulary" not in str(wrong):  # texts of one-letter words have one, and characters still serve
                raise
    if not counters:
        raise UserError("TF-IDF arm: the training texts hold no word and no two characters in a row")
    return counters


def _classifier(name: str, strength: float, seed: int) -> Any:
    """An untrained classifier, one against the rest where there are more than two classes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import LinearSVC

    if name == "linear SVM":
        return LinearSVC(C=strength, random_state=seed, max_iter=5000)
    # the dual is much the faster of the two where features outnumber rows, as n-grams do
    logistic = LogisticRegression(C=strength, solver="liblinear", dual=True, random_state=seed, max_iter=5000)
    return OneVsRestClassifier(logistic)


def _fitted_sharpness(decisions: NDArray[np.float64], true: NDArray[np.integer], seen: NDArray[np.integer]) -> float:
    """The factor that makes the softmax of decision values most likely on the validation rows.

    This is Platt's scaling without its offset, which could make the likeliest class another than the decided one.
    His softened targets are kept: rows that are all right would else ask for an endless factor.
    """
    from scipy.optimize import minimize_scalar

    known = np.isin(true, seen)
    if not known.any():
        return 1.0
    decisions, targets = decisions[known], (true[known][:, None] == seen).astype(float)
    soft = 1 / (len(targets) + 2)
    targets = (1 - soft) * targets + soft / len(seen)

    def loss(exponent: float) -> float:
        return -float((targets * np.log(_softmax(np.exp(exponent) * decisions) + 1e-300)).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(values - values.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)
