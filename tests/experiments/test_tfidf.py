"""The TF-IDF baseline matches scikit-learn, is selected on validation rows and has calibrated probabilities."""

import numpy as np
import pytest
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from headstock.errors import UserError
from headstock.experiments.arms.tfidf import CANDIDATES, TfidfClassifier
from headstock.rng import generator
from headstock.tasks.error_analysis import calibration

WORDS = {
    0: ["dull", "boring", "weak", "waste", "sadly"],
    1: ["superb", "moving", "lovely", "gripping", "finest"],
    2: ["average", "middling", "passable", "ordinary", "plain"],
}
COMMON = ["the", "book", "story", "of", "author", "and", "chapter", "reader", "was", "end", "pages", "very", "told"]


def reviews(count: int, *, classes: int = 2, name: str = "rows", clarity: float = 0.2) -> tuple[list[str], np.ndarray]:
    """Texts of twelve words; each word indicates the label with probability `clarity`."""
    random = generator("reviews", name)
    labels = np.arange(count) % classes
    texts = []
    for label in labels:
        words = []
        for _ in range(12):
            indicated = label if random.random() < 0.7 else random.integers(classes)
            words.append(random.choice(WORDS[int(indicated)] if random.random() < clarity else COMMON))
        texts.append(" ".join(words))
    return texts, labels


def fitted(count: int, *, classes: int = 2) -> TfidfClassifier:
    train, valid = (reviews(rows, classes=classes, name=name) for rows, name in ((count, "train"), (200, "valid")))
    return TfidfClassifier(["bad", "good", "fair"][:classes]).fit(*train, *valid, seed=0)


def test_the_classifier_learns_and_reports_its_choice():
    baseline = fitted(200)
    texts, labels = reviews(300, name="test")
    assert np.mean(baseline.probabilities(texts).argmax(1) == labels) > 0.7
    assert baseline.chosen in {f"{name}, C={strength:g}" for name, strength in CANDIDATES}
    valid_texts, valid_labels = reviews(200, name="valid")
    predicted = baseline.probabilities(valid_texts).argmax(1)
    assert baseline.valid_accuracy == pytest.approx(np.mean(predicted == valid_labels))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_first_candidate_matches_scikit_learn(classes, monkeypatch):
    """Parity with a pipeline built from scikit-learn."""
    monkeypatch.setattr("headstock.experiments.arms.tfidf.CANDIDATES", CANDIDATES[:1])
    train, test = reviews(90, classes=classes, name="train"), reviews(120, classes=classes, name="test")
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    characters = TfidfVectorizer(analyzer="char", ngram_range=(2, 5), sublinear_tf=True)
    rows = hstack([words.fit_transform(train[0]), characters.fit_transform(train[0])])
    plain = LinearSVC(random_state=0).fit(rows, train[1])
    expected = plain.predict(hstack([words.transform(test[0]), characters.transform(test[0])]))
    baseline = fitted(90, classes=classes)
    assert baseline.chosen == "linear SVM, C=1"
    assert (baseline.probabilities(test[0]).argmax(1) == expected).all()
    assert 0.02 < np.mean(expected != test[1]) < 0.5  # control: the task is not trivial


@pytest.mark.parametrize("candidate", [CANDIDATES[0], CANDIDATES[3]])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_most_likely_class_is_the_prediction(candidate, classes, monkeypatch):
    monkeypatch.setattr("headstock.experiments.arms.tfidf.CANDIDATES", (candidate,))
    baseline = fitted(60, classes=classes)
    texts, _ = reviews(150, classes=classes, name="test")
    probabilities = baseline.probabilities(texts)
    assert probabilities.sum(1) == pytest.approx(1.0)
    assert (probabilities.argmax(1) == baseline._classifier.predict(baseline._features(texts))).all()


def test_probabilities_are_calibrated_on_the_validation_rows():
    baseline = fitted(200)
    texts, labels = reviews(1000, name="test")
    assert calibration(baseline.probabilities(texts), labels)["ece"] < 0.08
    baseline._scale *= 8  # control: another scale is not calibrated
    assert calibration(baseline.probabilities(texts), labels)["ece"] > 0.1


def test_absent_classes_have_probability_zero():
    texts, labels = reviews(20, classes=2, name="few", clarity=0.5)
    valid_texts, valid_labels = reviews(60, classes=3, name="valid", clarity=0.5)
    baseline = TfidfClassifier(["bad", "good", "fair"]).fit(texts, labels, valid_texts, valid_labels, seed=1)
    probabilities = baseline.probabilities(valid_texts)
    assert probabilities.shape == (60, 3)
    assert (probabilities[:, 2] == 0).all() and probabilities.sum(1) == pytest.approx(1.0)
    assert baseline.valid_accuracy <= 2 / 3  # a third of the validation rows have an unseen class
    assert baseline.probabilities([]).shape == (0, 3)


def test_ties_go_to_the_first_listed():
    texts, labels = ["dull boring waste", "superb lovely gripping"] * 20, np.array([0, 1] * 20)
    baseline = TfidfClassifier(["bad", "good"]).fit(texts, labels, texts, labels, seed=0)  # every candidate is perfect
    assert baseline.valid_accuracy == 1.0
    assert baseline.chosen == "linear SVM, C=1"
    assert baseline.probabilities(["superb lovely gripping"])[0, 1] < 1.0  # not certain


def test_texts_without_words_use_character_n_grams():
    texts, labels = ["a b a b", "x y x y"] * 10, np.array([0, 1] * 10)
    baseline = TfidfClassifier(["ab", "xy"]).fit(texts, labels, texts, labels, seed=0)
    assert baseline.valid_accuracy == 1.0
    with pytest.raises(UserError, match="TF-IDF arm: the training texts contain no word"):
        TfidfClassifier(["ab", "xy"]).fit(["", "x"], [0, 1], texts, labels, seed=0)


def test_unsupported_data_is_refused():
    texts = ["one text", "two texts"]
    with pytest.raises(UserError, match="TF-IDF arm: several labels per text"):
        TfidfClassifier(["a", "b"]).fit(texts, [{0, 1}, {1}], texts, [{0}, {1}], seed=0)
    with pytest.raises(UserError, match=r"TF-IDF arm: .* two classes or more, not 'b'"):
        TfidfClassifier(["a", "b"]).fit(texts, [1, 1], texts, [0, 1], seed=0)
    with pytest.raises(UserError, match="TF-IDF arm: there are no validation rows"):
        TfidfClassifier(["a", "b"]).fit(texts, [0, 1], [], [], seed=0)
