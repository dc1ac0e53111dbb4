"""Combines fine-tuned classifiers of any family, and TF-IDF, into one with fitted weights.

    members -> probabilities of rows that they were not trained on -> weights -> predictions of the test rows

N rows, C classes.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock import config
from headstock.data.records import Records, join_records
from headstock.errors import UserError
from headstock.experiments.arms.tfidf import TfidfClassifier, input_texts
from headstock.experiments.cross_validation import assign_folds
from headstock.experiments.ensemble_weights import combine, cross_fitted, fit_weights
from headstock.experiments.grid import lock_experiment, versions
from headstock.inference.pipeline import Pipeline, load
from headstock.intervals import item_difference, item_interval
from headstock.io import write_json
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.classify import class_predictions
from headstock.tasks.labelled import LabelledTask
from headstock.train.labelled_data import hold_out_rows, read_labelled, read_rows
from headstock.train.resolve import labelled_task
from headstock.train.run_folder import RunFolder, open_run
from headstock.train.settings import LabelledSettings

logger = logging.getLogger(__name__)

KIND, TFIDF = "ensemble", "tfidf"
FOLDS = 5  # of the out-of-fold predictions of TF-IDF
SCORES = ("rows", "ensemble", "best_member", "gain")  # of a split in results.json
VALID, OUT_OF_FOLD = "the validation rows", "out-of-fold predictions of the training rows"


@dataclass(frozen=True)
class Member:
    """A fine-tuned run; `out_of_fold` are its predictions of all training rows, if a cross-validation made it."""

    name: str
    run: str
    out_of_fold: Path | None = None
    fingerprint: str | None = None  # of the rows of the cross-validation


@dataclass(frozen=True)
class EnsembleRows:
    """The labelled rows of an ensemble: `fit` are those its weights are fitted on."""

    train: Records
    valid: Records | None
    fit: Records
    data: LabelledSettings
    task_class: type[LabelledTask]
    task_config: Any

    @property
    def fingerprint(self) -> str:
        return join_records(self.train, self.valid).fingerprint() if self.valid else self.train.fingerprint()


class Ensemble:
    """Classifiers and their weights; `probabilities` are those of all of them together."""

    def __init__(self, classifiers: Mapping[str, Pipeline | TfidfClassifier], weights: Sequence[float] | np.ndarray):
        self.classifiers, self.weights = dict(classifiers), np.array(weights, dtype=float)
        self.task = next(model for model in classifiers.values() if isinstance(model, Pipeline)).classification_task()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.task.config.classes)

    def member_probabilities(self, rows: Records) -> dict[str, np.ndarray]:
        """(N, C) for each member."""
        return {name: class_probabilities(model, rows, self.classes) for name, model in self.classifiers.items()}

    def probabilities(self, rows: Records) -> np.ndarray:
        return combine(list(self.member_probabilities(rows).values()), self.weights)


def ensemble(
    members: Sequence[str | Path],
    *,
    train: str | Path,
    out: str | Path,
    valid: str | Path | None = None,
    test: str | Path | None = None,
    tfidf: bool = False,
    columns: dict[str, str] | None = None,
    skip_blank: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Combine fine-tuned classifiers, and TF-IDF, with fitted weights; returns the contents of results.json.

    The weights are fitted on the validation rows, which no member may be trained on. Members that are folders of
    cross-validated sweeps have out-of-fold predictions of all rows instead, and are trained on all of them. Test rows
    are evaluated if they have labels; their predictions are written to predictions.jsonl.
    """
    start = time.monotonic()
    sources = open_members(members, tfidf=tfidf)
    out_of_fold = check_out_of_fold(sources)
    if not out_of_fold and valid is None:
        raise UserError("--valid: is missing: weights are fitted on rows that no member was trained on")
    pipelines = {member.name: load(member.run, device=device) for member in sources}
    task = check_members(pipelines)
    data = LabelledSettings(
        train=str(train),
        valid=None if valid is None else str(valid),
        test=None if test is None else str(test),
        columns=tuple(f"{name}={column}" for name, column in (columns or {}).items()),
        skip_blank=skip_blank,
    )
    with lock_experiment(Path(out)):
        rows = read_ensemble_rows(data, task, out_of_fold=out_of_fold)
        classifiers: dict[str, Pipeline | TfidfClassifier] = {**pipelines}
        if tfidf:
            classifiers[TFIDF] = fit_tfidf(rows, task.config.classes, seed=seed)
        fitted = fit_probabilities(sources, classifiers, rows, task.config.classes, seed=seed)
        truth = label_numbers(rows.fit, task.config)
        weights = fit_weights(list(fitted.values()), truth)
        scored = {"valid": describe_scores(fitted, cross_fitted(list(fitted.values()), truth, seed=seed), truth)}
        if test is not None:
            scored |= predict_test(RunFolder(Path(out)), Ensemble(classifiers, weights), rows)
        results = {
            "kind": KIND,
            "title": f"{', '.join(classifiers)} on {data.train}",
            "task": task.name,
            "classes": list(task.config.classes),
            "versions": versions(),
            "device": str(next(iter(pipelines.values())).model.device),
            "seconds": round(time.monotonic() - start, 1),
            "seed": seed,
            "fitted_on": OUT_OF_FOLD if out_of_fold else VALID,
            "measured_on": "test" if "test" in scored else "valid",
            "members": describe_members(sources, classifiers, weights, scored),
            **{split: {name: part[name] for name in SCORES} for split, part in scored.items()},
            "settings": {"tfidf": tfidf, **config.to_dict(data)},
            "data": {"fingerprint": rows.fingerprint, "rows": len(rows.fit)},
        }
        results["verdict"] = verdict(results)
        write_json(Path(out) / "results.json", results)
    return results


# Members


def open_members(names: Sequence[str | Path], *, tfidf: bool) -> list[Member]:
    """The members that are runs; too few members, and one that is named twice, are refused."""
    members = [open_member(name) for name in names]
    if not names or len(names) + tfidf < 2:
        raise UserError("an ensemble needs two members or more, of which one is a run; add a run or --tfidf")
    if tfidf and TFIDF in map(str, names):
        raise UserError(f"{TFIDF}: is the name of the TF-IDF member; give the run as ./{TFIDF}")
    if repeated := sorted({str(name) for name in names if list(map(str, names)).count(str(name)) > 1}):
        raise UserError(f"{repeated[0]}: given twice")
    return members


def open_member(name: str | Path) -> Member:
    """A run, or the best run of a cross-validated sweep with its out-of-fold predictions."""
    results = RunFolder(Path(name)).results() if (Path(name) / "results.json").is_file() else {}
    if results.get("kind") != "sweep":
        open_run(name)  # an error if there is none
        return Member(str(name), str(name))
    if not results.get("out_of_fold") or not results.get("best"):
        raise UserError(
            f"{name}: is a sweep without out-of-fold predictions; run it with --folds, or name its best run"
        )
    file = Path(results["out_of_fold"][0])
    file = file if file.is_file() else Path(name) / file.parent.name / file.name  # the sweep may have been moved
    run = Path(results["best"]["run"])
    run = run if run.exists() else Path(name) / run.parent.name / run.name
    return Member(str(name), str(run), file, results["data"]["train"]["fingerprint"])


def check_out_of_fold(members: Sequence[Member]) -> bool:
    """Whether weights are fitted on out-of-fold predictions; refuses a mixture of sweeps and runs."""
    with_folds = [member.name for member in members if member.out_of_fold]
    without = [member.name for member in members if not member.out_of_fold]
    if with_folds and without:
        raise UserError(
            f"{without[0]}: is a run, but {with_folds[0]} a sweep, whose best run was trained on all rows; members are "
            "either all cross-validated sweeps or all runs"
        )
    return bool(with_folds)


def check_members(pipelines: Mapping[str, Pipeline]) -> LabelledTask:
    """The task of the first member; refuses members that do not predict one of the same classes."""
    tasks = {name: pipeline.classification_task() for name, pipeline in pipelines.items()}
    (first, task), *others = tasks.items()
    if task.multilabel:
        raise UserError(f"{first}: predicts several classes for a row; an ensemble combines classifiers of one class")
    for name, other in others:
        if other.name != task.name:
            raise UserError(f"{name}: is a model for {other.name!r}, but {first} is one for {task.name!r}")
        if set(other.config.classes) != set(task.config.classes):
            own, classes = (", ".join(part.config.classes) for part in (other, task))
            raise UserError(f"{name}: its classes are {own}, those of {first} are {classes}")
    return task


def class_probabilities(model: Pipeline | TfidfClassifier, rows: Records, classes: Sequence[str]) -> np.ndarray:
    """(N, C) in the order of `classes`."""
    if isinstance(model, TfidfClassifier):
        return model.probabilities(input_texts(rows))
    own = model.classification_task().config.classes
    return model.probabilities(rows)[:, [own.index(name) for name in classes]]


def fit_probabilities(
    members: Sequence[Member],
    classifiers: Mapping[str, Pipeline | TfidfClassifier],
    rows: EnsembleRows,
    classes: Sequence[str],
    *,
    seed: int,
) -> dict[str, np.ndarray]:
    """(N, C) the probabilities of each member for the rows that the weights are fitted on."""
    if rows.fit is rows.valid:
        return {name: class_probabilities(model, rows.fit, classes) for name, model in classifiers.items()}
    fitted = {member.name: read_out_of_fold(member, rows, classes) for member in members}
    return fitted | ({TFIDF: tfidf_out_of_fold(rows, classes, seed=seed)} if TFIDF in classifiers else {})


def read_out_of_fold(member: Member, rows: EnsembleRows, classes: Sequence[str]) -> np.ndarray:
    """(N, C) a member's predictions of all rows, each by models that were not trained on it."""
    assert member.out_of_fold is not None
    if member.fingerprint != rows.fingerprint:
        raise UserError(f"{member.name}: was cross-validated on other rows than those of --train and --valid")
    with config.malformed_as_user_error(member.out_of_fold, "out-of-fold predictions"):
        lines = [json.loads(line) for line in member.out_of_fold.read_text(encoding="utf-8").splitlines()]
        if [line["true"] for line in lines] != rows.fit.labels:
            raise ValueError("the rows are in another order")
        return np.array([[line["probabilities"][name] for name in classes] for line in lines])


# TF-IDF is fitted again from the training file where it is needed: a vectorizer cannot be stored without a pickle


def fit_tfidf(rows: EnsembleRows, classes: Sequence[str], *, seed: int) -> TfidfClassifier:
    """Fitted on the training rows, and selected on the validation rows or on some held-out ones."""
    train, valid = rows.train, rows.valid
    if valid is None or rows.fit is not valid:
        train, valid = hold_out_rows(rows.fit, rows.data, rows.task_class, rows.task_config, seed=seed)
    return fit_tfidf_on(rows, train, valid, classes, seed=seed)


def fit_tfidf_on(
    rows: EnsembleRows, train: Records, valid: Records, classes: Sequence[str], *, seed: int
) -> TfidfClassifier:
    labels = [label_numbers(part, rows.task_config) for part in (train, valid)]
    model = TfidfClassifier(classes)
    return model.fit(input_texts(train), labels[0], input_texts(valid), labels[1], seed=seed)


def tfidf_out_of_fold(rows: EnsembleRows, classes: Sequence[str], *, seed: int) -> np.ndarray:
    """(N, C) the predictions of each row by a classifier that was not fitted on it."""
    folds = assign_folds(rows.fit, FOLDS, seed=seed, strata=rows.task_class.strata(rows.fit))
    probabilities = np.empty((len(rows.fit), len(classes)))
    for fold in range(FOLDS):
        others, own = (rows.fit.select(np.flatnonzero(part).tolist()) for part in (folds != fold, folds == fold))
        train, valid = hold_out_rows(others, rows.data, rows.task_class, rows.task_config, seed=seed)
        model = fit_tfidf_on(rows, train, valid, classes, seed=seed)
        probabilities[folds == fold] = model.probabilities(input_texts(own))
    return probabilities


# Rows and results


def read_ensemble_rows(data: LabelledSettings, task: LabelledTask, *, out_of_fold: bool) -> EnsembleRows:
    task_class = labelled_task(task.name)
    train, valid, warnings = read_labelled(data, task_class, task.config)
    for line in warnings:
        logger.info(f"warning: {line}")
    for records in (train, valid):
        if records is not None:
            task.check(records)
    if not out_of_fold:
        assert valid is not None
        return EnsembleRows(train, valid, valid, data, task_class, task.config)
    fit = train if valid is None else join_records(train, valid)
    return EnsembleRows(train, valid, fit, data, task_class, task.config)


def predict_test(folder: RunFolder, model: Ensemble, rows: EnsembleRows) -> dict[str, Any]:
    """Write the predictions of the test rows; returns their scores if they have labels."""
    assert rows.data.test is not None
    test = read_rows(rows.data.test, rows.data, rows.task_class, rows.task_config, [], strict=False)
    members = model.member_probabilities(test)
    combined = combine(list(members.values()), model.weights)
    folder.write_predictions(class_predictions(model.task.config, list(combined)))
    if not test.has_labels:
        return {}
    return {"test": describe_scores(members, combined, label_numbers(test, model.task.config))}


def describe_scores(members: Mapping[str, np.ndarray], combined: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Accuracies with intervals over the rows, and the gain over the best member, paired by row."""
    correct = {name: (part.argmax(1) == truth).astype(float) for name, part in members.items()}
    together = (combined.argmax(1) == truth).astype(float)
    best = max(correct, key=lambda name: correct[name].mean())
    return {
        "rows": len(truth),
        "members": {name: item_interval(part)._asdict() for name, part in correct.items()},
        "ensemble": item_interval(together)._asdict(),
        "best_member": best,
        "gain": item_difference(together, correct[best])._asdict(),
    }


def describe_members(
    sources: Sequence[Member],
    classifiers: Mapping[str, Pipeline | TfidfClassifier],
    weights: np.ndarray,
    scored: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    runs = {member.name: member.run for member in sources}
    return [
        {
            "name": name,
            "run": runs.get(name),
            "kind": model.chosen if isinstance(model, TfidfClassifier) else model.config.family,
            "weight": round(float(weight), 6),
            **{split: part["members"][name] for split, part in scored.items()},
        }
        for (name, model), weight in zip(classifiers.items(), weights, strict=True)
    ]


def verdict(results: Mapping[str, Any]) -> str:
    """Whether the ensemble is better than its best member."""
    scores = results[results["measured_on"]]
    score, gain = scores["ensemble"], scores["gain"]
    clearly = "clearly more" if gain["low"] > 0 else "clearly fewer" if gain["high"] < 0 else "not clearly more"
    return (
        f"Together, the members classify {in_percent(score)} of {scores['rows']:,} {results['measured_on']} rows "
        f"correctly, {clearly} than the best of them, {scores['best_member']}: {in_percent(gain, sign='+')} points."
    )


def in_percent(interval: Mapping[str, float], *, sign: str = "") -> str:
    """`87.2% (85.0 to 89.1)`, or with a sign `+1.2 (-0.3 to +2.5)`."""
    mean, low, high = (f"{100 * interval[name]:{sign}.1f}" for name in ("mean", "low", "high"))
    return f"{mean}{'' if sign else '%'} ({low} to {high})"


# Ensembles on disk


def is_ensemble(folder: str | Path) -> bool:
    path = Path(folder) / "results.json"
    return path.is_file() and RunFolder(Path(folder)).results().get("kind") == KIND


def load_ensemble(folder: str | Path, *, device: str = "auto") -> Ensemble:
    """An ensemble with its weights. TF-IDF is fitted again, on the same rows as before."""
    results = RunFolder(Path(folder)).results()
    with config.malformed_as_user_error(Path(folder) / "results.json", "an ensemble"):
        weights = [float(member["weight"]) for member in results["members"]]
        runs = {member["name"]: member["run"] for member in results["members"] if member["run"]}
        settings = {name: value for name, value in results["settings"].items() if name != TFIDF}
        data = config.from_dict(LabelledSettings, settings, prefix="settings")
        fingerprint, seed = results["data"]["fingerprint"], int(results["seed"])
        out_of_fold = results["fitted_on"] == OUT_OF_FOLD
    pipelines = {name: load(run, device=device) for name, run in runs.items()}
    task = check_members(pipelines)
    classifiers: dict[str, Pipeline | TfidfClassifier] = {**pipelines}
    if len(runs) < len(weights):
        rows = read_ensemble_rows(data, task, out_of_fold=out_of_fold)
        if rows.fingerprint != fingerprint:
            raise UserError(f"{folder}: the rows of {data.train} have changed since its weights were fitted")
        classifiers[TFIDF] = fit_tfidf(rows, tuple(task.config.classes), seed=seed)
    return Ensemble(classifiers, weights)
