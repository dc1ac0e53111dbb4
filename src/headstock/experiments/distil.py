"""Distils several classifiers into one model: it learns their probabilities on unlabelled text.

    teachers, TF-IDF -> probabilities on text like the labelled one -> soft labels -> fine-tune one student

N texts, C classes.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from headstock import __version__
from headstock.cache_use import mark_used
from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.tfidf import TfidfClassifier
from headstock.experiments.ensemble import Ensemble, check_members, class_probabilities, is_ensemble, load_ensemble
from headstock.experiments.ensemble_weights import accuracy, combine, fit_weights
from headstock.experiments.leakage_search import overlapping_rows
from headstock.inference.pipeline import Pipeline, load
from headstock.io import atomic_file, cache_folder, fingerprint, write_text
from headstock.tasks.soft_labels import PROBABILITIES
from headstock.train.callbacks import Callback
from headstock.train.finetune import finetune
from headstock.train.labelled_data import LabelledSplits, read_splits
from headstock.train.resolve import labelled_task
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import LabelledSettings

logger = logging.getLogger(__name__)

TFIDF = "tfidf"  # the name of the teacher that is fitted here
ROWS_PER_LABEL = 10  # unlabelled texts per labelled one
MIN_CHARACTERS, MAX_CHARACTERS = 40, 2000  # of an unlabelled text; longer ones are cut
DOMAIN_WORDS = 50_000
READING = ("valid_fraction", "skip_blank")  # settings of how rows are read


@dataclass(frozen=True)
class Teacher:
    """The probabilities of one classifier."""

    name: str
    valid: np.ndarray  # (N, C) for the validation rows
    pool: np.ndarray  # (N, C) for the unlabelled texts


def distil(
    student: str | Path,
    *,
    teachers: Sequence[str | Path],
    text: str | Path | Sequence[str | Path],
    train: str | Path,
    out: str | Path,
    valid: str | Path | None = None,
    test: str | Path | None = None,
    tfidf: bool = True,
    equal_weights: bool = False,
    rows: int | None = None,
    columns: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Fine-tune `student`, a pretrained run, on what fine-tuned `teachers` and TF-IDF predict; returns its results.

    The student reads the labelled rows, and the `rows` texts of `text` that are most like them (ten per labelled row
    unless given), with the teachers' combined probabilities. The weights of the teachers are fitted on the validation
    rows, or equal; those of an ensemble, which `headstock ensemble` has made, are its own. The result is a run like any
    other.
    """
    if not teachers:
        raise UserError("no teachers: name at least one fine-tuned classifier with --teacher")
    if tfidf and TFIDF in map(str, teachers):
        raise UserError(f"{TFIDF}: is the name of the TF-IDF teacher; give the run as ./{TFIDF}")
    if rows is not None and rows < 1:
        raise UserError(f"--rows {rows}: must be 1 or more")
    open_run(student)  # an error before the teachers predict
    together = open_ensemble(teachers, device=device)
    if together and equal_weights:
        raise UserError("--equal-weights: an ensemble has weights of its own; name its members as teachers instead")
    pipelines = {} if together else {str(name): load(name, device=device) for name in teachers}
    task = together.task if together else next(iter(pipelines.values())).classification_task()
    if not task.row_is_text or not task.linear_classes or getattr(task, "multilabel", False):
        raise UserError(f"{teachers[0]}: distils classifiers of single texts, not a {task.title}")
    classes = tuple((task if together else check_members(pipelines)).config.classes)
    options = settings or {}
    data = LabelledSettings(
        train=str(train),
        valid=None if valid is None else str(valid),
        test=None if test is None else str(test),
        columns=tuple(f"{name}={column}" for name, column in (columns or {}).items()),
        **{key.removeprefix("data."): value for key, value in options.items() if key.removeprefix("data.") in READING},
    )
    seed = int(options.get("train.seed", options.get("seed", 0)))
    splits = read_splits(data, labelled_task(task.name), task.config, seed=seed)
    for records in (splits.train, splits.valid, splits.test):
        if records is not None:
            task.check(records)
    pool = closest_texts(splits, text, rows or ROWS_PER_LABEL * len(splits.train), seed=seed)
    models = together.classifiers if together else pipelines
    texts = text_records(pool)
    combined = [
        Teacher(name, *(cached_probabilities(model, rows, classes) for rows in (splits.valid, texts)))
        for name, model in models.items()
    ]
    if tfidf and not together:
        combined.append(Teacher(TFIDF, *tfidf_probabilities(splits, texts, classes, seed=seed)))
    del models, pipelines
    truth = np.array([classes.index(label) for label in splits.valid.labels or []])
    if together:
        weights = together.weights
    elif equal_weights:
        weights = np.full(len(combined), 1 / len(combined))  # the geometric mean of the probabilities
    else:
        weights = fit_weights([teacher.valid for teacher in combined], truth)
    facts: dict[str, Any] = {
        "teachers": [
            {"name": teacher.name, "weight": round(float(weight), 4), "valid_accuracy": accuracy(teacher.valid, truth)}
            for teacher, weight in zip(combined, weights, strict=True)
        ],
        "ensemble_valid_accuracy": accuracy(combine([t.valid for t in combined], weights), truth),
        "rows": len(pool),
    }
    for row in facts["teachers"]:
        logger.info(f"teacher {row['name']}: weight {row['weight']:.2f}, {row['valid_accuracy']:.1%} of the valid rows")
    logger.info(f"together: {facts['ensemble_valid_accuracy']:.1%} of the validation rows")
    soft = write_soft_labels(splits.train, classes, pool, combine([t.pool for t in combined], weights))
    # files with columns of other names are copied, as the soft labels have the usual ones
    held_out = write_labelled(splits.valid) if valid is None or columns else valid
    test = write_labelled(splits.test) if splits.test is not None and columns else test
    results = finetune(
        student,
        train=soft,
        valid=held_out,
        test=test,
        out=out,
        task=task.name,
        settings=options | {"task.soft_labels": True, "task.classes": list(classes)},
        resume=resume,
        overwrite=overwrite,
        device=device,
        callbacks=callbacks,
    )
    results |= {"distillation": facts}
    RunFolder(Path(out)).write_results(results)
    return results


def open_ensemble(teachers: Sequence[str | Path], *, device: str) -> Ensemble | None:
    """The ensemble that is the only teacher; None if the teachers are classifiers."""
    folder = next((name for name in teachers if is_ensemble(name)), None)
    if folder is None:
        return None
    if len(teachers) > 1:
        raise UserError(f"{folder}: is an ensemble with weights of its own, and the only teacher; name no other")
    return load_ensemble(folder, device=device)


# Texts


def closest_texts(splits: LabelledSplits, text: Any, count: int, *, seed: int) -> list[str]:
    """The unlabelled texts that a linear classifier finds most like the labelled ones.

    None of them has the same words as a labelled text, of test rows as well.
    """
    own = [text for part in (splits.train, splits.valid, splits.test) if part for text in part.display_texts]
    pool = list(dict.fromkeys(normalize(document.text) for document in read_corpus(text)))
    known = set(overlapping_rows(pool, own))
    unknown = [text[:MAX_CHARACTERS] for row, text in enumerate(pool) if row not in known]
    texts = [text for text in dict.fromkeys(unknown) if len(text) >= MIN_CHARACTERS]
    if not texts:
        raise UserError(f"no unlabelled texts of {MIN_CHARACTERS} characters or more, except the labelled ones")
    if len(texts) <= count:
        return texts
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    labelled = splits.train.display_texts
    vectorizer = TfidfVectorizer(sublinear_tf=True, max_features=DOMAIN_WORDS)
    features = vectorizer.fit_transform([*labelled, *texts])
    domain = np.array([1] * len(labelled) + [0] * len(texts))
    model = LogisticRegression(class_weight="balanced", max_iter=300, random_state=seed).fit(features, domain)
    similarity = model.decision_function(features[len(labelled) :])
    chosen = np.sort(np.argsort(-similarity, kind="stable")[:count])
    logger.info(f"chose the {count:,} of {len(texts):,} unlabelled texts that are most like the labelled ones")
    return [texts[index] for index in chosen]


def normalize(text: str) -> str:
    return " ".join(text.split())


# Teachers


def cached_probabilities(model: Pipeline | TfidfClassifier, rows: Records, classes: Sequence[str]) -> np.ndarray:
    """(N, C) in the order of `classes`; those of a run are kept in the cache, for students with the same teacher."""
    if isinstance(model, TfidfClassifier):
        return class_probabilities(model, rows, classes)
    runs = model.run.model_runs()
    if any(run.weights_file.name not in run.manifest() for run in runs):  # of an earlier version
        return class_probabilities(model, rows, classes)
    key = [[run.manifest() for run in runs], rows.display_texts, list(classes)]
    return cached(key, lambda: class_probabilities(model, rows, classes))


def tfidf_probabilities(
    splits: LabelledSplits, texts: Records, classes: Sequence[str], *, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """What TF-IDF, fitted on the labelled rows, predicts for the validation rows and for `texts`, from the cache.

    Reading all n-grams of the texts takes minutes, and students of the same rows need it only once.
    """
    labelled = [[part.display_texts, part.labels] for part in (splits.train, splits.valid)]
    key = [TFIDF, __version__, version("scikit-learn"), labelled, texts.display_texts, list(classes), seed]

    def predict() -> np.ndarray:
        model = fit_tfidf(classes, splits, seed=seed)
        return np.concatenate([class_probabilities(model, rows, classes) for rows in (splits.valid, texts)])

    probabilities = cached(key, predict)
    return probabilities[: len(splits.valid)], probabilities[len(splits.valid) :]


def cached(key: Any, compute: Callable[[], np.ndarray]) -> np.ndarray:
    path = mark_used(cache_folder() / "distil" / f"{fingerprint(key)}.npy")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file, file.open("wb") as stream:
            np.save(stream, compute(), allow_pickle=False)
    return np.load(path, allow_pickle=False)


def text_records(texts: Sequence[str]) -> Records:
    return Records("text", list(range(len(texts))), {"text": list(texts)})


def fit_tfidf(classes: Sequence[str], splits: LabelledSplits, *, seed: int) -> TfidfClassifier:
    rows, valid = splits.train, splits.valid
    numbers = [np.array([classes.index(label) for label in part.labels or []]) for part in (rows, valid)]
    model = TfidfClassifier(classes)
    return model.fit(rows.display_texts, numbers[0], valid.display_texts, numbers[1], seed=seed)


# Files, in the cache: a resumed run finds them by their content


def write_soft_labels(train: Records, classes: Sequence[str], pool: Sequence[str], probabilities: np.ndarray) -> Path:
    """The labelled rows with certain labels, then the unlabelled texts with the teachers' probabilities."""
    certain = [{name: float(name == label) for name in classes} for label in train.labels or []]
    rounded = np.round(probabilities, 5).tolist()
    taught = [dict(zip(classes, row, strict=True)) for row in rounded]
    texts = [*train.display_texts, *pool]
    rows = [{"text": text, PROBABILITIES: row} for text, row in zip(texts, [*certain, *taught], strict=True)]
    return write_rows(rows)


def write_labelled(records: Records) -> Path:
    labels = [{}] * len(records) if records.labels is None else [{"label": label} for label in records.labels]
    return write_rows([{"text": text} | label for text, label in zip(records.display_texts, labels, strict=True)])


def write_rows(rows: list[dict[str, Any]]) -> Path:
    path = mark_used(cache_folder() / "distil" / f"{fingerprint(rows)}.jsonl")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path
