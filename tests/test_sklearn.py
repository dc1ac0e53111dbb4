"""The estimators work where scikit-learn's do, pass its own checks, and are pickled by reference to a run."""

import copy
import gc
import pickle
import shutil
from pathlib import Path
from unittest import SkipTest

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator
from sklearn.utils.validation import check_is_fitted, validate_data

import headstock
from headstock.errors import UserError
from headstock.io import cache_folder
from headstock.sklearn import FOLDER, TextClassifier, TextEmbedder, TextRegressor
from tests.commands import REVIEWS
from tests.conftest import TINY
from tests.train.processes import BackgroundProcess

TEXTS, LABELS = [text for text, _ in REVIEWS], [label for _, label in REVIEWS]
LENGTHS = [float(len(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("runs") / "base"
    headstock.pretrain(corpus, out=path, settings=TINY)
    return str(path)


@pytest.fixture
def quick(base) -> dict:
    """Parameters of an estimator that is fitted in a fraction of a second."""
    return {"run": base, "epochs": 2, "lr": 1e-2, "batch": 8, "settings": {"least_steps": 0}}


@pytest.fixture(scope="module")
def fitted(base) -> TextClassifier:
    return TextClassifier(base, epochs=10, lr=1e-2, batch=8, settings={"least_steps": 0}).fit(TEXTS, LABELS)


def run_folder(estimator) -> Path:
    return Path(estimator.run_.run)


# Classifier


def test_a_classifier_learns_and_its_probabilities_belong_to_its_classes(fitted):
    assert fitted.classes_.tolist() == ["sea", "town"]
    assert fitted.score(TEXTS, LABELS) == 1.0
    probabilities = fitted.predict_proba(["Ben likes the sea.", "Zoë finds Paris."])
    assert probabilities.sum(1) == pytest.approx([1, 1])
    assert probabilities[0, 0] > 0.5 and probabilities[1, 1] > 0.5
    assert headstock.load(fitted.run_.run).predict(["Ben likes the sea."])[0]["label"] == "sea"


@pytest.mark.parametrize(
    "labels",
    [
        np.where(np.array(LABELS) == "sea", 10, 9),  # as text, 10 comes before 9
        np.array(LABELS) == "sea",
        np.where(np.array(LABELS) == "sea", " ", "").astype(object),  # no names that a run can have
    ],
    ids=["integers", "booleans", "blanks"],
)
def test_classes_have_the_type_of_the_labels(quick, labels):
    model = TextClassifier(**quick | {"epochs": 8}).fit(TEXTS, labels)
    assert model.classes_.dtype == labels.dtype
    assert (model.predict(TEXTS) == labels).all()


def test_inputs_are_lists_arrays_and_series(fitted):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    expected = fitted.predict_proba(TEXTS)
    for texts in (
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pandas.Series(TEXTS, index=range(100, 100 + len(TEXTS))),
        pandas.Series(TEXTS, dtype="string"),
        polars.Series(TEXTS),
        tuple(TEXTS),
    ):
        assert (fitted.predict_proba(texts) == expected).all(), type(texts)
    model = clone(fitted).set_params(epochs=1).fit(pandas.Series(TEXTS), pandas.Series(LABELS))
    assert model.predict(TEXTS).shape == (len(TEXTS),)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ("one text", "1-D array of texts"),
        (np.array([TEXTS]), "shape"),
        ([1.5, 2.5], r"X\[0\] is 1.5"),
        (["fine", None], r"X\[1\] is None"),
        ([], "0 samples"),
    ],
)
def test_what_is_no_text_is_refused(fitted, texts, problem):
    with pytest.raises(ValueError, match=problem):
        fitted.predict(texts)


def test_a_frame_is_refused_with_its_column(fitted):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"such as X\['review'\]"):
        fitted.predict(pandas.DataFrame({"review": TEXTS}))


def test_labels_are_checked(quick):
    for labels, problem in ((["a"] * len(TEXTS), "one class"), (None, "requires y"), (LABELS[:-1], "inconsistent")):
        with pytest.raises(ValueError, match=problem):
            TextClassifier(**quick).fit(TEXTS, labels)
    with pytest.raises(UserError, match="learning_rate"):
        TextClassifier(**quick | {"settings": {"learning_rate": 1.0}}).fit(TEXTS, LABELS)
    with pytest.raises(NotFittedError):
        TextClassifier().predict(TEXTS)


def test_the_seed_is_the_random_state(quick):
    first, same, other = (
        TextClassifier(**quick, random_state=state).fit(TEXTS, LABELS).predict_proba(TEXTS)
        for state in (3, np.random.RandomState(3), 4)
    )
    drawn = TextClassifier(**quick, random_state=np.random.RandomState(3)).fit(TEXTS, LABELS).predict_proba(TEXTS)
    assert (first != other).any()
    assert (same == drawn).all()


def test_a_missing_label_is_named(quick):
    for missing in (None, float("nan")):
        with pytest.raises(ValueError, match=r"y\[1\] is .*, expected a class"):
            TextClassifier(**quick).fit(TEXTS, np.array([LABELS[0], missing, *LABELS[2:]], dtype=object))


# Regressor


def test_a_regressor_learns_a_number(quick):
    model = TextRegressor(**quick | {"epochs": 15}).fit(TEXTS, LENGTHS)
    assert model.score(TEXTS, LENGTHS) > 0.5
    with pytest.raises(ValueError, match=r"y: could not convert string.*, expected numbers; TextClassifier"):
        TextRegressor(**quick).fit(TEXTS, LABELS)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(TEXTS, [*LENGTHS[:-1], float("nan")])


# scikit-learn's tools


def test_grid_search_and_cross_validation(quick):
    model = TextClassifier(**quick)
    search = GridSearchCV(model, {"freeze": [True, False], "lr": np.array([1e-2])}, cv=2).fit(TEXTS, LABELS)
    assert search.best_params_["lr"] == 1e-2
    assert search.predict(TEXTS[:2]).shape == (2,)
    scores = cross_val_score(model.set_params(lora=2), TEXTS, LABELS, cv=2, scoring="neg_log_loss")
    assert np.isfinite(scores).all()


def test_embeddings_in_a_pipeline(base):
    model = make_pipeline(TextEmbedder(base, pool="mean"), LogisticRegression(C=100)).fit(TEXTS, LABELS)
    assert model.score(TEXTS, LABELS) > 0.9
    names = model[:-1].get_feature_names_out()
    assert names.tolist() == [f"textembedder{number}" for number in range(TINY["width"])]
    vectors = model[0].transform(TEXTS)
    assert (vectors == headstock.load(base).embed(TEXTS, pool="mean")).all()
    pytest.importorskip("pandas")
    frame = model[0].set_output(transform="pandas").transform(TEXTS)
    assert list(frame.columns) == names.tolist() and (frame.to_numpy() == vectors).all()
    assert (
        GridSearchCV(
            make_pipeline(TextEmbedder(base), LogisticRegression()), {"textembedder__layers": ["last", "0"]}, cv=2
        )
        .fit(TEXTS, LABELS)
        .best_params_
    )
    with pytest.raises(ValueError, match="each token"):
        TextEmbedder(base, pool="none").fit(TEXTS)


# Run folders and pickles


def test_a_run_is_removed_with_its_estimator(quick):
    model = TextClassifier(**quick).fit(TEXTS, LABELS)
    first = run_folder(model)
    assert first.parent == cache_folder() / FOLDER and (first / "model.safetensors").is_file()
    assert not (first / "checkpoints").exists()
    model.fit(TEXTS, LABELS)
    second = run_folder(model)
    assert not first.exists() and second.exists()
    del model
    gc.collect()
    assert not second.exists()


def test_a_failed_fit_keeps_the_run_before_it(quick):
    model = TextClassifier(**quick).fit(TEXTS, LABELS)
    before = set((cache_folder() / FOLDER).iterdir())
    with pytest.raises(UserError):
        model.set_params(settings={"context": 7}).fit(TEXTS, LABELS)
    assert set((cache_folder() / FOLDER).iterdir()) == before
    assert model.predict(TEXTS[:1]).shape == (1,)


def predict_with_pickle(path):
    print(pickle.loads(path.read_bytes()).predict(TEXTS).tolist())


def test_a_pickle_refers_to_the_run_and_is_loaded_by_another_process(quick, tmp_path):
    model = TextClassifier(**quick).fit(TEXTS, LABELS)
    data, folder, expected = pickle.dumps(model), run_folder(model), model.predict(TEXTS).tolist()
    assert len(data) < 3000 and str(folder).encode() in data
    del model
    gc.collect()
    assert folder.exists(), "a pickle needs it"
    (tmp_path / "model.pickle").write_bytes(data)
    process = BackgroundProcess(tmp_path / "process", predict_with_pickle, tmp_path / "model.pickle")
    assert process.wait() == 0 and process.stdout.strip() == str(expected), process.stderr


def test_a_pickle_without_its_run_is_refused(quick):
    model = TextClassifier(**quick).fit(TEXTS, LABELS)
    copied, folder = copy.deepcopy(model), run_folder(model)
    weights = (folder / "model.safetensors").read_bytes()
    other = TextClassifier(**quick, random_state=1).fit(TEXTS, LABELS)
    shutil.copytree(run_folder(other), folder, dirs_exist_ok=True)
    with pytest.raises(UserError, match="other weights"):
        copied.predict(TEXTS)
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="damaged"):  # the manifest is that of the other run
        copied.predict(TEXTS)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="is missing"):
        copied.predict(TEXTS)


def test_a_saved_run_is_one_for_every_command(quick, tmp_path):
    model = TextClassifier(**quick | {"settings": {"least_steps": 0, "ensemble": 2}}).fit(TEXTS, LABELS)
    temporary, expected = run_folder(model), model.predict_proba(TEXTS)
    model.save(tmp_path / "towns")
    assert run_folder(model) == tmp_path / "towns" and not temporary.exists()
    assert (headstock.load(tmp_path / "towns").probabilities(TEXTS) == expected).all()
    assert "towns" in (tmp_path / "towns" / "README.md").read_text()
    assert (pickle.loads(pickle.dumps(model)).predict_proba(TEXTS) == expected).all()
    with pytest.raises(UserError, match="exists already"):
        model.save(tmp_path / "towns")
    del model
    gc.collect()
    assert (tmp_path / "towns" / "members" / "1" / "model.safetensors").is_file()


# scikit-learn's own checks


def of_numbers(estimator_class: type, name: str) -> type:
    """An estimator of rows of numbers, which it writes as texts.

    scikit-learn's checks have no texts: they skip estimators that read nothing else.
    """

    class OfNumbers(estimator_class):
        def texts(self, X, *, reset: bool = False) -> list[str]:
            rows = validate_data(self, X, reset=reset, dtype=np.float64, ensure_min_samples=1)
            return [" ".join(f"{'sea' if value > 0 else 'Paris'} {value:.1f}" for value in row) for row in rows]

        def fit(self, X, y=None):
            return super().fit(self.texts(X, reset=True), y)

        def __sklearn_tags__(self):
            tags = super().__sklearn_tags__()
            tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = False, False, True
            if tags.classifier_tags is not None:
                tags.classifier_tags.poor_score = True  # a language model of a few words does not read numbers
            if tags.regressor_tags is not None:
                tags.regressor_tags.poor_score = True
            return tags

    def on_texts(method: str):
        def call(self, X):
            check_is_fitted(self)
            return getattr(super(OfNumbers, self), method)(self.texts(X))

        return call

    for method in ("predict", "predict_proba", "transform"):
        if hasattr(estimator_class, method):
            setattr(OfNumbers, method, on_texts(method))
    OfNumbers.__name__ = OfNumbers.__qualname__ = name  # by which it is pickled
    return OfNumbers


NumberClassifier = of_numbers(TextClassifier, "NumberClassifier")
NumberRegressor = of_numbers(TextRegressor, "NumberRegressor")
NumberEmbedder = of_numbers(TextEmbedder, "NumberEmbedder")
FITTED_QUICKLY = {"epochs": 1, "freeze": True, "settings": {"least_steps": 0}}

# checks that do not pass, and why; one that is not listed must pass, and one that is must not
NOT_PASSED = {"check_array_api_input": "skipped by scikit-learn: arrays of the array API contain no texts"}


def run_checks(estimator, contains: str = "") -> dict[str, str]:
    """Every check whose name contains a text: passed, skipped or failed."""
    outcomes = {}
    for instance, check in estimator_checks_generator(estimator):
        name = check.func.__name__
        if contains in name and outcomes.get(name, "passed") == "passed":
            try:
                check(instance)
                outcomes[name] = "passed"
            except SkipTest as reason:
                outcomes[name] = f"skipped: {reason}"
            except Exception as error:
                outcomes[name] = f"failed: {str(error)[:300]}"
    return outcomes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("estimator_class", "parameters", "contains", "count"),
    [
        (NumberClassifier, FITTED_QUICKLY, "", 40),
        (NumberRegressor, FITTED_QUICKLY, "regressor", 4),  # the others are those of the classifier
        (NumberEmbedder, {}, "", 35),
    ],
    ids=["classifier", "regressor", "embedder"],
)
def test_the_checks_of_scikit_learn_pass(base, estimator_class, parameters, contains, count):
    outcomes = run_checks(estimator_class(base, **parameters), contains)
    assert len(outcomes) >= count
    not_passed = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert not_passed.keys() == NOT_PASSED.keys() & outcomes.keys(), not_passed


def test_a_failing_check_is_noticed(base):
    class Unchecked(NumberEmbedder):
        def fit(self, X, y=None):
            super().fit(X, y)  # returns None

    assert run_checks(Unchecked(base), "fit_returns_self")["check_estimators_fit_returns_self"].startswith("failed")


@pytest.mark.filterwarnings("ignore:Can't test estimator")
@pytest.mark.parametrize("estimator_class", [TextClassifier, TextRegressor, TextEmbedder])
def test_tags_say_that_input_is_text(estimator_class):
    tags = estimator_class().__sklearn_tags__().input_tags
    assert (tags.string, tags.one_d_array, tags.two_d_array) == (True, True, False)
    assert run_checks(estimator_class()) == {"check_estimator_cloneable": "passed"}, "all that there is for texts"
