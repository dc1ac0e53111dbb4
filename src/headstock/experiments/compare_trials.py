"""One cell of a comparison: an arm, so many labels, one seed. Made once, then read from its file."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock import __version__, config
from headstock.data.records import Records
from headstock.data.tokenizer import Tokenizer
from headstock.experiments.arms import Arm
from headstock.experiments.error_report import attribution_for
from headstock.experiments.tfidf import TfidfClassifier
from headstock.intervals import SufficientStatistics, macro_f1
from headstock.io import sha256, write_json
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.error_analysis import reliability
from headstock.tasks.labelled import LabelledTask, RowMetric, metric_value
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.finetune import save_fit, sizes
from headstock.train.finetune_config import resolve_finetune_config, resolve_with_data
from headstock.train.fit import FitResult, LabelledData, fit
from headstock.train.labelled_data import LabelledSplits, subset
from headstock.train.pretrain import source_weights
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

DIGITS = 5  # of probabilities in a cell's file
SHARED = ("classes", "separator", "unanswerable")  # what the whole training file says, also to a cell of few rows


@dataclass(frozen=True)
class ExperimentContext:
    """What all cells share: the rows, what they are measured on, and common settings."""

    task_class: type[LabelledTask]
    splits: LabelledSplits
    eval_records: Records  # labelled: the test rows, or the validation rows where those have no labels
    task_config: Any  # the task's settings that are the same for all, such as the classes
    settings: dict[str, Any]  # of every arm that is fine-tuned
    folder: Path
    distributed: DistributedContext
    task: LabelledTask  # the task without a tokenizer: it knows what is right, whoever predicts
    columns: tuple[str, ...] = ()  # what the files call them

    @property
    def unlabelled_test(self) -> Records | None:
        """Test rows to predict."""
        test = self.splits.test
        return test if test is not None and not test.has_labels else None

    @property
    def evaluates_on_valid(self) -> bool:
        return self.splits.test is None or not self.splits.test.has_labels

    def rows(self, labels: int, seed: int) -> tuple[Records, Records]:
        """The same training rows for every arm, and at most as many to choose the epoch by: those are labels too."""
        train, valid = self.splits.train, self.splits.valid
        return subset(train, labels, seed=seed), subset(valid, min(labels, len(valid)), seed=seed)


@dataclass(frozen=True)
class GridPoint:
    """Where a cell is in the grid."""

    arm: Arm
    labels: int
    seed: int
    analyze_errors: bool  # its mistakes are explained and its model is kept

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.labels}".replace(" ", "-").replace("/", "-")


def run_trial(
    ground: ExperimentContext, place: GridPoint, callbacks: Sequence[Callback]
) -> tuple[dict[str, Any], bool]:
    """A cell from its file, or made now; and whether it was made now."""
    path = ground.folder / "cells" / f"{place.name}-{place.seed}.json"
    train, valid = ground.rows(place.labels, place.seed)
    chosen = trial_config(ground, place, train)
    key = fingerprint(ground, place, chosen, train, valid)
    if (kept := read_json(path)).get("key") == key and (kept["shown"] or not place.analyze_errors):
        return kept, False
    began = time.monotonic()
    made = (
        run_tfidf(ground, place, train, valid)
        if chosen is None
        else run_finetuning(ground, place, chosen, train, valid, callbacks)
    )
    made |= {"seconds": round(time.monotonic() - began, 3), "key": key, "shown": place.analyze_errors}
    made |= {"arm": place.arm.name, "labels": place.labels, "seed": place.seed}
    write_json(path, made)
    return made, True


def trial_config(ground: ExperimentContext, place: GridPoint, train: Records) -> RunConfig | None:
    """What a fine-tuned cell is made with; none for TF-IDF, which has no settings."""
    if place.arm.run is None:
        return None
    given = {**ground.settings, **place.arm.options(), "train.seed": place.seed}
    shared = {name: getattr(ground.task_config, name, None) for name in SHARED}
    given |= {f"task.{name}": config.to_dict(value) for name, value in shared.items() if value}
    given |= {"data.train": ground.splits.train.source, "data.columns": list(ground.columns)}
    return resolve_with_data(resolve_finetune_config(place.arm.run, ground.task_class.name, None, given), train)


def fingerprint(
    ground: ExperimentContext, place: GridPoint, chosen: RunConfig | None, train: Records, valid: Records
) -> str:
    """Changes with anything that could change the cell: rows, settings, weights."""
    run, settings = place.arm.run, None if chosen is None else chosen.plain()
    if settings is not None:
        settings["transfer"].pop("run")  # a run that was moved is the same run
        settings["data"].pop("train")
        settings["data"].pop("columns")  # the rows themselves are in the key
    parts = {
        "version": __version__,
        "rows": LabelledSplits(train, valid, ground.eval_records).fingerprint(),
        "unlabelled": ground.unlabelled_test.columns if ground.unlabelled_test else None,
        "task": [ground.task_class.name, config.to_dict(ground.task_config)],
        "settings": settings,
        "tokenizer": run.data()["tokenizer"] if run else None,
        "weights": sha256(run.weights_file) if run and place.arm.kind != "scratch" else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def evaluate_outputs(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """What a cell says of the measured rows."""
    kept = list(rounded(np.stack(outputs))) if task.predicts_classes else outputs  # near ties count as they are kept
    tallies, sure = task.row_metrics(data, kept), task.confidences(data, kept)
    found = task.extra_metrics(data, kept) | {name: metric_value(tally) for name, tally in tallies.items()}
    if (numbers := task.true_and_predicted(data, kept)) is not None:
        found["macro_f1"] = macro_f1(*numbers)
    return {
        "score": found[task.primary_metric],
        "accuracy": found.get("accuracy", found.get("exact_match")),  # a translation has neither
        **{name: found[name] for name in tallies},
        "macro_f1": found.get("macro_f1"),
        "loss": task.extra_metrics(data, outputs).get("loss"),  # rounded, the improbable were impossible
        "ece": None if sure is None else reliability(*sure)["ece"],
        "tallies": {name: serialize_metric(tally) for name, tally in tallies.items()},
        "probabilities": np.stack(kept).tolist() if task.predicts_classes else None,
    }


def serialize_metric(tally: RowMetric) -> list[list[float]]:
    """As text: a numerator and a denominator for each row, or the counts of each row."""
    return [brief(values) for values in (tally.values if isinstance(tally, SufficientStatistics) else tally)]


def rounded(probabilities: np.ndarray) -> np.ndarray:
    return probabilities.astype(np.float64).round(DIGITS)


def brief(values: np.ndarray) -> list[float]:
    """Whole numbers as such, others rounded: a cell is kept as text."""
    return [int(value) if value == int(value) else round(float(value), DIGITS) for value in values]


def run_tfidf(ground: ExperimentContext, place: GridPoint, train: Records, valid: Records) -> dict[str, Any]:
    """TF-IDF and a linear classifier, on the words as a person reads them."""
    task = ground.task
    assert task.predicts_classes
    known = [label_numbers(rows, ground.task_config) for rows in (train, valid, ground.eval_records)]
    fitted = TfidfClassifier(ground.task_config.classes).fit(
        input_texts(train), known[0], input_texts(valid), known[1], seed=place.seed
    )
    found = fitted.probabilities(input_texts(ground.eval_records))
    data = LabelsOnly(known[2])
    made = {
        **evaluate_outputs(task, data, list(found)),
        "valid_score": fitted.valid_accuracy,
        "best_epoch": None,
        "tokens_per_second": None,
        "chosen": fitted.chosen,
        "epochs": [],
        "parameters": None,
        "predicted": None,
    }
    if ground.unlabelled_test is not None:
        made["predicted"] = task.predictions(
            None, list(rounded(fitted.probabilities(input_texts(ground.unlabelled_test))))
        )
    if place.analyze_errors:
        made["told"] = task.error_analysis(ground.eval_records, data, list(rounded(found)))
    return made


@dataclass(frozen=True)
class LabelsOnly:
    """Rows that are not cut into tokens, as TF-IDF reads them: their labels alone."""

    labels: np.ndarray


def input_texts(records: Records) -> list[Any]:
    """Texts as a person reads them; the two of a pair stay two."""
    columns = records.columns
    return list(zip(columns["text"], columns["text_b"], strict=True)) if "text_b" in columns else records.display_texts


def run_finetuning(
    ground: ExperimentContext,
    place: GridPoint,
    chosen: RunConfig,
    train: Records,
    valid: Records,
    callbacks: Sequence[Callback],
) -> dict[str, Any]:
    """A fine-tuned model, measured and, where it is to be shown, explained and kept."""
    run = place.arm.run
    assert run is not None
    tokenizer = run.tokenizer()
    task = ground.task_class(chosen.task, tokenizer)
    data = LabelledData(task.prepare(train), task.prepare(valid))
    weights = None if place.arm.kind == "scratch" else source_weights(run)
    fitted = fit(chosen, tokenizer, weights, data, run=None, distributed=ground.distributed, callbacks=callbacks)
    measured = task.prepare(ground.eval_records)
    found = fitted.outputs(measured, dtype=chosen.train.dtype)
    predicted = None
    if ground.unlabelled_test is not None:
        rows = task.prepare(ground.unlabelled_test)
        predicted = task.predictions(rows, fitted.outputs(rows, dtype=chosen.train.dtype))
    made = {
        **evaluate_outputs(task, measured, found),
        "valid_score": valid_score(fitted, data.valid, chosen),
        "best_epoch": fitted.best_epoch,
        "tokens_per_second": None
        if chosen.transfer.freeze
        else tokens_per_second(fitted),  # frozen, no token is read in training
        "chosen": None,
        "epochs": fitted.epochs,
        "parameters": sizes(fitted.model, frozen=chosen.transfer.freeze),
        "predicted": predicted,
    }
    if place.analyze_errors:
        made["told"] = task.error_analysis(
            ground.eval_records,
            measured,
            found,
            attribute=attribution_for(fitted.model, task, measured, length=fitted.length),
        )
        save_run(ground, place, chosen, tokenizer, fitted, LabelledSplits(train, valid, None))
    return made


def valid_score(fitted: FitResult, valid: Any, chosen: RunConfig) -> float:
    """Of the epoch that was chosen; what is not known of every epoch is measured again."""
    if fitted.task.primary_metric == "accuracy":
        return next(row["valid_accuracy"] for row in fitted.epochs if row["step"] == fitted.state.best_step)
    found = fitted.outputs(valid, dtype=chosen.train.dtype)
    return metric_value(fitted.task.row_metrics(valid, found)[fitted.task.primary_metric])


def tokens_per_second(fitted: FitResult) -> float:
    """Tokens a second while it trained."""
    return round(fitted.state.tokens / max(1e-9, fitted.state.seconds - fitted.state.overhead_seconds), 1)


def save_run(
    ground: ExperimentContext,
    place: GridPoint,
    chosen: RunConfig,
    tokenizer: Tokenizer,
    fitted: FitResult,
    splits: LabelledSplits,
) -> None:
    """The model as a run of its own, so that it can be used."""
    run = RunFolder(ground.folder / "runs" / place.name)
    save_fit(run, chosen, tokenizer, fitted, splits, ground.distributed)
