"""The TF-IDF baseline: word and character n-grams, and a linear model selected on the validation rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.base import ARM_KINDS, ArmKind
from headstock.experiments.compare_trials import ExperimentContext, GridPoint
from headstock.experiments.grid import TrialResult
from headstock.experiments.trial_evaluation import evaluate_probabilities, primary_score
from headstock.tasks.calibration import softmax
from headstock.tasks.class_labels import label_numbers
from headstock.train.callbacks import Callback
from headstock.train.resolve import labelled_task
from headstock.train.settings import RunConfig

if TYPE_CHECKING:
    from headstock.experiments.compare_settings import CompareSettings

# scikit-learn's default comes first and wins ties
CANDIDATES = (
    ("linear SVM", 1.0),
    ("linear SVM", 0.3),
    ("linear SVM", 0.1),
    ("logistic regression", 10.0),
    ("logistic regression", 30.0),
    ("logistic regression", 3.0),
)
RIDGE_PENALTIES = (1.0, 0.1, 0.3, 3.0, 10.0)


class TfidfFeatures:
    """Sublinear TF-IDF of word 1-2-grams and character 2-5-grams of texts or pairs of texts.

    A pair is represented by both texts, their product and their difference.
    """

    def __init__(self, texts: Sequence[Any]):
        self.vectorizers = _fit_vectorizers([text for row in texts for text in row] if _paired(texts) else texts)

    def __call__(self, texts: Sequence[Any]) -> Any:
        from scipy.sparse import hstack

        if not _paired(texts):
            return hstack([vectorizer.transform(texts) for vectorizer in self.vectorizers]).tocsr()
        parts = []
        for vectorizer in self.vectorizers:
            first, second = (vectorizer.transform([row[side] for row in texts]) for side in (0, 1))
            parts += [first, second, first.multiply(second), abs(first - second)]
        return hstack(parts).tocsr()


@dataclass
class TfidfRegressor:
    """Ridge regression on TF-IDF features, with the penalty that has the smallest error on the validation rows."""

    chosen: str = field(default="", init=False)
    _features: Any = field(default=None, init=False, repr=False)
    _ridge: Any = field(default=None, init=False, repr=False)

    def fit(
        self, texts: Sequence[Any], labels: NDArray, valid_texts: Sequence[Any], valid_labels: NDArray, *, seed: int
    ) -> "TfidfRegressor":
        from sklearn.linear_model import Ridge

        self._features = TfidfFeatures(texts)
        rows, valid_rows, best = self._features(texts), self._features(valid_texts), np.inf
        for penalty in RIDGE_PENALTIES:
            # sparse_cg keeps the features sparse and the intercept exact
            ridge = Ridge(alpha=penalty, solver="sparse_cg", random_state=seed).fit(rows, labels)
            error = float(np.mean((ridge.predict(valid_rows) - valid_labels) ** 2))
            if error < best:
                best, self._ridge, self.chosen = error, ridge, f"ridge, alpha={penalty:g}"
        return self

    def outputs(self, texts: Sequence[Any]) -> NDArray[np.float64]:
        """(N, 1) the predicted values."""
        return self._ridge.predict(self._features(texts))[:, None] if len(texts) else np.zeros((0, 1))


@dataclass
class TfidfClassifier:
    """The best of a few linear classifiers on TF-IDF features of texts or pairs of texts.

    >>> baseline = TfidfClassifier(["negative", "positive"]).fit(texts, labels, valid_texts, valid_labels, seed=0)
    >>> baseline.chosen, baseline.valid_accuracy
    ('linear SVM, C=1', 0.8525)
    """

    classes: Sequence[str]
    chosen: str = field(default="", init=False)
    valid_accuracy: float = field(default=float("nan"), init=False)
    _features: Any = field(default=None, init=False, repr=False)
    _classifier: Any = field(default=None, init=False, repr=False)
    _scale: float = field(default=1.0, init=False, repr=False)

    def fit(
        self, texts: Sequence[Any], labels: Any, valid_texts: Sequence[Any], valid_labels: Any, *, seed: int
    ) -> "TfidfClassifier":
        """Fit on the training rows and select the classifier on the validation rows; labels index `classes`."""
        true, valid_true = _class_numbers(labels), _class_numbers(valid_labels)
        if not len(valid_true):
            raise UserError("TF-IDF arm: there are no validation rows to select the classifier on")
        if len(present := np.unique(true)) < 2:
            names = ", ".join(repr(self.classes[number]) for number in present) or "none"
            raise UserError(f"TF-IDF arm: the training rows must have two classes or more, not {names}")
        self._features = TfidfFeatures(texts)
        rows = self._features(texts)
        valid_rows = self._features(valid_texts)
        best = -1.0
        for name, c in CANDIDATES:
            classifier = _classifier(name, c, seed).fit(rows, true)
            accuracy = float(np.mean(classifier.predict(valid_rows) == valid_true))
            if accuracy > best:
                best, self._classifier, self.chosen = accuracy, classifier, f"{name}, C={c:g}"
        self.valid_accuracy = best
        self._scale = _fit_scale(self._decisions(valid_rows), valid_true, self._classifier.classes_)
        return self

    def probabilities(self, texts: Sequence[Any]) -> NDArray[np.float64]:
        """(N, C), 0 for classes without training rows. The most likely class is always the classifier's prediction."""
        probabilities = np.zeros((len(texts), len(self.classes)))
        if len(texts):
            probabilities[:, self._classifier.classes_] = softmax(self._scale * self._decisions(self._features(texts)))
        return probabilities

    def outputs(self, texts: Sequence[Any]) -> NDArray[np.float64]:
        return self.probabilities(texts)

    def _decisions(self, rows: Any) -> NDArray[np.float64]:
        """(N, K) decision values of the K classes in the training rows."""
        values = self._classifier.decision_function(rows)
        # for two classes there is one value; the softmax of its halves is its sigmoid
        return np.stack([-values / 2, values / 2], axis=1) if values.ndim == 1 else values


def _class_numbers(labels: Any) -> NDArray[np.integer]:
    if any(isinstance(label, (set, frozenset, list, tuple, np.ndarray)) for label in labels):
        raise UserError("TF-IDF arm: several labels per text are not supported; remove tfidf from --arms")
    return np.asarray(labels, dtype=np.int64)


def _paired(texts: Sequence[Any]) -> bool:
    return bool(len(texts)) and not isinstance(texts[0], str)


def _fit_vectorizers(texts: Sequence[str]) -> list[Any]:
    """Word and character vectorizers, except one whose vocabulary would be empty."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizers = []
    for vectorizer in (
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        TfidfVectorizer(analyzer="char", ngram_range=(2, 5), sublinear_tf=True),
    ):
        try:
            vectorizers.append(vectorizer.fit(texts))
        except ValueError as error:
            if "empty vocabulary" not in str(error):  # of words, if all have one letter
                raise
    if not vectorizers:
        raise UserError("TF-IDF arm: the training texts contain no word and no two consecutive characters")
    return vectorizers


def _classifier(name: str, c: float, seed: int) -> Any:
    """An unfitted classifier, one-vs-rest for more than two classes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import LinearSVC

    if name == "linear SVM":
        return LinearSVC(C=c, random_state=seed, max_iter=5000)
    # the dual problem is much faster when features outnumber rows
    logistic = LogisticRegression(C=c, solver="liblinear", dual=True, random_state=seed, max_iter=5000)
    return OneVsRestClassifier(logistic)


def _fit_scale(decisions: NDArray[np.float64], true: NDArray[np.integer], classes: NDArray[np.integer]) -> float:
    """The factor on decision values whose softmax has the highest likelihood on the validation rows.

    This is Platt scaling without the offset, which could change the predicted class. It keeps his smoothed targets:
    without them the factor would be infinite if all rows are classified correctly.
    """
    from scipy.optimize import minimize_scalar

    in_training = np.isin(true, classes)
    if not in_training.any():
        return 1.0
    decisions, targets = decisions[in_training], (true[in_training][:, None] == classes).astype(float)
    smoothing = 1 / (len(targets) + 2)
    targets = (1 - smoothing) * targets + smoothing / len(classes)

    def loss(exponent: float) -> float:
        return -float((targets * np.log(softmax(np.exp(exponent) * decisions) + 1e-300)).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))


# The arm


def input_texts(records: Records) -> list[Any]:
    """The texts of the rows, or pairs of texts."""
    columns = records.columns
    return list(zip(columns["text"], columns["text_b"], strict=True)) if "text_b" in columns else records.display_texts


def fit_tfidf(
    context: ExperimentContext, train: Records, valid: Records, *, seed: int
) -> TfidfClassifier | TfidfRegressor:
    task = context.task
    model: TfidfClassifier | TfidfRegressor
    if task.predicts_values:
        model, (labels, valid_labels) = TfidfRegressor(), (task.label_array(records) for records in (train, valid))
    else:
        model = TfidfClassifier(task.config.classes)
        labels, valid_labels = (label_numbers(records, task.config) for records in (train, valid))
    return model.fit(input_texts(train), labels, input_texts(valid), valid_labels, seed=seed)


@ARM_KINDS.add("tfidf")
class TfidfArm(ArmKind):
    """TF-IDF features and a linear classifier or ridge regression on the raw texts."""

    title = "TF-IDF"
    needs_run = False
    uses_weights = False

    @classmethod
    def unsupported(cls, settings: "CompareSettings") -> str | None:
        if settings.separator is not None:
            return "does not support several labels per text"
        task = labelled_task(settings.task)
        if not (task.predicts_classes or task.predicts_values):
            return f"predicts one class or value per text and does not apply to {settings.task}"
        return None

    @classmethod
    def check_settings(cls, name: str, table: Mapping[str, Any]) -> None:
        if table:
            raise UserError(f"arms.{name}: TF-IDF has no settings, so {', '.join(table)} cannot be set")

    @classmethod
    def run_trial(
        cls,
        context: ExperimentContext,
        point: GridPoint,
        run_config: RunConfig | None,
        train: Records,
        valid: Records,
        callbacks: Sequence[Callback],
    ) -> TrialResult:
        task, model = context.task, fit_tfidf(context, train, valid, seed=point.seed)
        return evaluate_probabilities(
            task,
            context.eval_records,
            lambda records: model.outputs(input_texts(records)),
            unlabelled=context.unlabelled_test,
            analyze_errors=point.analyze_errors,
            valid_score=primary_score(task, valid, model.outputs(input_texts(valid))),
            chosen=model.chosen,
        )
