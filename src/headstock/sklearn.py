"""scikit-learn estimators: TextClassifier and TextRegressor fine-tune a run, TextEmbedder computes its embeddings.

N texts, C classes, D width.
"""

import secrets
import shutil
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from headstock.api.data import split_files
from headstock.errors import UserError
from headstock.inference.inputs import describe_value
from headstock.inference.pipeline import Pipeline
from headstock.inference.run_reference import RunReference
from headstock.io import atomic_folder, cache_folder, layout_files
from headstock.option_names import names_keywords
from headstock.train.finetune import finetune
from headstock.train.model_card import write_card
from headstock.train.run_folder import LAYOUT, RunFolder

__all__ = ["TextClassifier", "TextEmbedder", "TextRegressor"]

FOLDER = "estimators"  # in the cache: the runs of fitted estimators
MAX_SEED = 2**31 - 1
MIN_ROWS_TO_SPLIT = 20


# Texts and runs


def check_texts(X: Any) -> list[str]:
    """The texts of a list, a 1-D array or a pandas or polars Series."""
    if isinstance(X, str | bytes | Mapping) or not isinstance(X, Iterable):
        raise ValueError(f"X is {describe_value(X)}, expected a 1-D array of texts")
    shape = getattr(X, "shape", None)
    if shape is not None and len(shape) != 1:
        hint = f", such as X[{str(X.columns[0])!r}]" if hasattr(X, "columns") and len(X.columns) else ""
        raise ValueError(f"X has the shape {tuple(shape)}, expected a 1-D array of texts; pass one column{hint}")
    texts = list(X)
    if not texts:
        raise ValueError("found array with 0 samples in X, while a minimum of 1 is required")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"X[{index}] is {describe_value(text)}, expected a text (str)")
    return [str(text) for text in texts]  # converts numpy.str_


class RunEstimator(BaseEstimator):
    """An estimator whose model is a run folder.

    `run_` refers to it by its path and the sha256 of its weights; a pickle contains this in place of the weights.
    """

    device: str
    run_: RunReference

    @property
    def pipeline(self) -> Pipeline:
        """The fitted run, as `headstock.load` returns it."""
        check_is_fitted(self, "run_")
        return self.run_.load(device=self.device)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags


# Fine-tuned estimators


class FinetunedEstimator(RunEstimator):
    """Fine-tunes a run on texts and labels.

    Parameters are settings of `headstock finetune` and have its defaults where they are None; `settings` has all
    others, such as {"label_smoothing": 0.1}. `random_state` is the seed. A tenth of the rows (`valid_fraction`) selects
    the best epoch; fewer than 20 rows are not split.

    `fit` writes a run folder into the cache. It is removed with the estimator, unless the estimator was pickled;
    `save` puts it elsewhere.
    """

    task: str

    def __init__(
        self,
        run: str | None = "reviews-en",
        *,
        preset: str | None = None,
        init: str | None = None,
        freeze: bool | None = None,
        method: str | None = None,
        lora: int | None = None,
        epochs: float | None = None,
        lr: float | None = None,
        batch: int | None = None,
        length: int | None = None,
        pool: str | None = None,
        valid_fraction: float | None = None,
        settings: dict[str, Any] | None = None,
        device: str = "auto",
        random_state: Any = 0,
    ):
        self.run = run
        self.preset = preset
        self.init = init
        self.freeze = freeze
        self.method = method
        self.lora = lora
        self.epochs = epochs
        self.lr = lr
        self.batch = batch
        self.length = length
        self.pool = pool
        self.valid_fraction = valid_fraction
        self.settings = settings
        self.device = device
        self.random_state = random_state

    def options(self) -> dict[str, Any]:
        """The parameters that are settings of a run."""
        arguments = {"run", "preset", "settings", "device", "random_state"}
        values = {name: value for name, value in self.get_params().items() if name not in arguments}
        options = {name: plain(value) for name, value in values.items() if value is not None}
        return options | {name: plain(value) for name, value in (self.settings or {}).items()}

    def seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(MAX_SEED))

    @names_keywords
    def fit_run(self, texts: list[str], labels: list[Any], **settings: Any) -> None:
        """Train on rows in a new run folder, and use it."""
        if len(texts) < 2:
            raise ValueError(f"n_samples = {len(texts)}, expected 2 or more")
        options = {"tensorboard": False, "seed": self.seed()} | settings | self.options()
        rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
        skip_blank = bool(options.pop("skip_blank", False))
        # a few rows cannot be split, so the best epoch is that of the training loss
        valid = rows if len(rows) < MIN_ROWS_TO_SPLIT else None
        files = split_files(self.task, train=rows, valid=valid, skip_blank=skip_blank)
        run = RunFolder(cache_folder() / FOLDER / secrets.token_hex(8))
        try:
            finetune(
                self.run,
                preset=self.preset,
                train=files["train"],
                valid=files["valid"],
                out=run.path,
                task=self.task,
                skip_blank=skip_blank,
                settings=options,
                device=self.device,
            )
        except BaseException:
            run.remove()
            raise
        run.remove_checkpoints()
        self.remove_run()
        self.run_ = RunReference.to(run.path)
        self._cleanup = weakref.finalize(self, run.remove)

    def remove_run(self) -> None:
        """Remove the run of an earlier `fit`, unless it was pickled or saved."""
        if cleanup := self.__dict__.pop("_cleanup", None):
            cleanup()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if cleanup := state.pop("_cleanup", None):
            cleanup.detach()  # the run belongs to the copy, too
        return state

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Self:
        """Copy the fitted run to a folder, which every command and `headstock.load` can open.

        The estimator and its later pickles refer to this folder.
        """
        check_is_fitted(self, "run_")
        path, source = Path(folder), RunFolder(Path(self.run_.run))
        if path.exists() and not overwrite:
            raise UserError(f"{path}: exists already; use overwrite=True to replace it, or name another folder")
        self.run_.load(device=self.device)  # refuses other weights
        with atomic_folder(path, layout=LAYOUT) as copy:
            for file in layout_files(source.path, LAYOUT):
                target = copy / file.relative_to(source.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        run = RunFolder(path)
        run.write_results(run.results() | {"run": str(run)})
        write_card(run)
        self.remove_run()
        self.run_ = RunReference.to(path)
        return self


class TextClassifier(ClassifierMixin, FinetunedEstimator):
    """A text classifier: fine-tunes a pretrained run on texts and their classes.

    >>> model = TextClassifier("reviews-en", epochs=2).fit(texts, labels)
    >>> model.predict(["A masterpiece."])
    """

    task = "classify"
    classes_: np.ndarray

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the run on texts and their classes, which may be strings, integers or booleans."""
        texts, labels = check_texts(X), check_target(self, y)
        check_consistent_length(texts, labels)
        for index, label in enumerate(labels if labels.dtype == object else ()):
            if label is None or label != label:  # NaN differs from itself
                raise ValueError(f"y[{index}] is {describe_value(label)}, expected a class; drop such rows first")
        check_classification_targets(labels)
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has one class, {classes[0]!r}; a classifier needs at least 2 classes")
        names = class_names(classes)
        # labels that look like numbers to be predicted are classes here
        self.fit_run(texts, [names[number] for number in numbers], classes=names, many_classes=True)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) the probability of each class, in the order of `classes_`."""
        return self.probabilities(X)

    def predict(self, X: Any) -> np.ndarray:
        """(N,) the most probable class of each text."""
        probabilities = self.probabilities(X)
        return self.classes_[probabilities.argmax(1)]

    def probabilities(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "run_")
        return np.asarray(self.pipeline.probabilities(check_texts(X)), dtype=np.float64)


class TextRegressor(RegressorMixin, FinetunedEstimator):
    """Predicts a number for a text: fine-tunes a pretrained run on texts and numbers."""

    task = "regress"

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the run on texts and numbers."""
        texts, target = check_texts(X), check_target(self, y)
        try:
            values = np.asarray(target, dtype=np.float64)
        except ValueError as error:
            raise ValueError(f"y: {error}, expected numbers; TextClassifier predicts classes") from error
        check_consistent_length(texts, values)
        if not np.isfinite(values).all():
            raise ValueError("y contains NaN or infinity, expected finite numbers")
        self.fit_run(texts, values.tolist())
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(N,) a number for each text."""
        pipeline = self.pipeline
        target = pipeline.labelled_task().target
        return np.array([row[target] for row in pipeline.iter_predictions(check_texts(X))])


def check_target(estimator: BaseEstimator, y: Any) -> np.ndarray:
    """(N,) labels."""
    if y is None:
        name = type(estimator).__name__
        raise ValueError(f"{name} requires y to be passed, but the target y is None")
    return column_or_1d(y, warn=True)


def class_names(classes: np.ndarray) -> list[str]:
    """The names of classes in the run: the labels as text, or numbered if these are blank or ambiguous."""
    names = [str(value) for value in classes.tolist()]
    if len(set(names)) == len(names) and all(name and name == " ".join(name.split()) for name in names):
        return names
    return [f"class {number}" for number in range(len(names))]


def plain(value: Any) -> Any:
    """A parameter without numpy's types, which searches over a grid of an array produce."""
    return value.item() if isinstance(value, np.generic) else value


# Embeddings


class TextEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, RunEstimator):
    """Transforms texts into the embeddings of a run, without training it.

    `layers` and `pool` are those of `headstock embed`: "last" and "mean" or "last", for example. The default pooling is
    the mean for bidirectional models and the last token for causal ones.
    """

    def __init__(self, run: str = "reviews-en", *, layers: str = "last", pool: str | None = None, device: str = "auto"):
        self.run = run
        self.layers = layers
        self.pool = pool
        self.device = device

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # embeddings are float32
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Load the run; the texts are only checked."""
        if self.pool == "none":
            raise ValueError("pool='none' gives a vector for each token, expected one for each text")
        texts = check_texts(X)
        self.run_ = RunReference.to(self.run)
        self._n_features_out = self.embed(texts[:1]).shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """(N, D) the embedding of each text."""
        check_is_fitted(self, "run_")
        return self.embed(check_texts(X))

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.asarray(self.pipeline.embed(texts, layers=self.layers, pool=self.pool))
