"""One trial of a comparison: an arm, a number of labels and a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock import __version__, config
from headstock.data.records import Records
from headstock.experiments.compare_settings import Arm
from headstock.experiments.grid import Outcome, ResultCache, TrialResult
from headstock.experiments.tfidf import TfidfClassifier
from headstock.experiments.trial_evaluation import attribution_for, evaluate_outputs, fit_run, rounded
from headstock.io import fingerprint, sha256
from headstock.report.theme import arm_label
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.labelled import LabelledTask, metric_value
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.finetune import parameter_counts, save_fit
from headstock.train.fit import FitResult
from headstock.train.labelled_data import LabelledSplits, subset
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

SHARED_SETTINGS = ("classes", "separator", "unanswerable")  # inferred from all training rows, also for trials on few


@dataclass(frozen=True)
class ExperimentContext:
    """What all trials of a comparison share: data, task and settings."""

    task: LabelledTask  # without a tokenizer: computes metrics of any model's predictions
    splits: LabelledSplits
    eval_records: Records  # the test rows, or the validation rows if the test file has no labels
    settings: dict[str, Any]  # of every fine-tuned arm
    folder: Path
    distributed: DistributedContext
    columns: tuple[str, ...] = ()  # column names in the files

    @property
    def unlabelled_test(self) -> Records | None:
        """Test rows without labels, to be predicted."""
        test = self.splits.test
        return test if test is not None and not test.has_labels else None

    @property
    def evaluates_on_valid(self) -> bool:
        return self.splits.test is None or not self.splits.test.has_labels

    @property
    def unit(self) -> str:
        """What the number of training rows counts, in the singular: label or pair."""
        return self.task.nouns.unit

    def rows(self, labels: int, seed: int) -> tuple[Records, Records]:
        """Training and validation rows, the same for every arm; at most `labels` validation rows, also labelled."""
        train, valid = self.splits.train, self.splits.valid
        return subset(train, labels, seed=seed), subset(valid, min(labels, len(valid)), seed=seed)


@dataclass(frozen=True)
class GridPoint:
    """The coordinates of a trial."""

    arm: Arm
    labels: int
    seed: int
    analyze_errors: bool = False  # also save the model and analyse its errors
    unit: str = "label"

    @property
    def run_name(self) -> str:
        return f"{self.arm.name}-{self.labels}".replace(" ", "-").replace("/", "-")

    @property
    def name(self) -> str:
        return f"{self.run_name}-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.labels:6,} {self.unit}s  seed {self.seed}  {arm_label(self.arm.name):14s}"


def run_trial(context: ExperimentContext, callbacks: Sequence[Callback], point: GridPoint) -> Outcome:
    train, valid = context.rows(point.labels, point.seed)
    run_config = trial_config(context, point, train)

    def run() -> TrialResult:
        if run_config is None:
            result = run_tfidf(context, point, train, valid)
        else:
            result = run_finetuning(context, point, run_config, train, valid, callbacks)
        position = {"arm": point.arm.name, "labels": point.labels, "seed": point.seed}
        return result | {"shown": point.analyze_errors} | position

    return ResultCache(context.folder).get_or_run(
        point,
        trial_key(context, point, run_config, train, valid),
        run,
        is_complete=lambda cached: cached["shown"] or not point.analyze_errors,
    )


def trial_config(context: ExperimentContext, point: GridPoint, train: Records) -> RunConfig | None:
    """The fine-tuning config of a trial; None for TF-IDF."""
    if point.arm.run is None:
        return None
    settings = {**context.settings, **point.arm.options(), "train.seed": point.seed}
    shared = {name: getattr(context.task.config, name, None) for name in SHARED_SETTINGS}
    settings |= {f"task.{name}": config.to_dict(value) for name, value in shared.items() if value}
    settings |= {"data.train": context.splits.train.source, "data.columns": list(context.columns)}
    return resolve_with_data(resolve_finetune_config(point.arm.run, context.task.name, None, settings), train)


def trial_key(
    context: ExperimentContext, point: GridPoint, run_config: RunConfig | None, train: Records, valid: Records
) -> str:
    """A fingerprint of everything that can change the result: rows, settings and weights."""
    run, settings = point.arm.run, None if run_config is None else run_config.plain(for_key=True)
    if settings is not None:
        settings["transfer"].pop("run")  # the weights count, not the path
        settings["data"].pop("train")  # likewise the rows
        settings["data"].pop("columns")
    return fingerprint(
        {
            "version": __version__,
            "rows": LabelledSplits(train, valid, context.eval_records).fingerprint(),
            "unlabelled": context.unlabelled_test.columns if context.unlabelled_test else None,
            "task": [context.task.name, config.to_dict(context.task.config)],
            "settings": settings,
            "tokenizer": run.data()["tokenizer"] if run else None,
            "weights": sha256(run.weights_file) if run and point.arm.kind != "scratch" else None,
        }
    )


# TF-IDF


@dataclass(frozen=True)
class LabelsOnly:
    """Rows that are not tokenized."""

    labels: np.ndarray


def input_texts(records: Records) -> list[Any]:
    """The texts of the rows, or pairs of texts."""
    columns = records.columns
    return list(zip(columns["text"], columns["text_b"], strict=True)) if "text_b" in columns else records.display_texts


def fit_tfidf(context: ExperimentContext, train: Records, valid: Records, *, seed: int) -> TfidfClassifier:
    labels, valid_labels = (label_numbers(records, context.task.config) for records in (train, valid))
    classifier = TfidfClassifier(context.task.config.classes)
    return classifier.fit(input_texts(train), labels, input_texts(valid), valid_labels, seed=seed)


def run_tfidf(context: ExperimentContext, point: GridPoint, train: Records, valid: Records) -> TrialResult:
    """TF-IDF features and a linear classifier on the raw texts."""
    task, records = context.task, context.eval_records
    classifier = fit_tfidf(context, train, valid, seed=point.seed)
    probabilities = classifier.probabilities(input_texts(records))
    data = LabelsOnly(label_numbers(records, task.config))
    predicted = None
    if context.unlabelled_test is not None:
        outputs = classifier.probabilities(input_texts(context.unlabelled_test))
        predicted = task.predictions(None, list(rounded(outputs)))
    result = {
        **evaluate_outputs(task, data, list(probabilities)),
        "valid_score": classifier.valid_accuracy,
        "best_epoch": None,
        "tokens_per_second": None,
        "chosen": classifier.chosen,
        "epochs": [],
        "parameters": None,
        "predicted": predicted,
    }
    if point.analyze_errors:
        result["told"] = task.error_analysis(records, data, list(rounded(probabilities)))
    return result


# Fine-tuning


def run_finetuning(
    context: ExperimentContext,
    point: GridPoint,
    run_config: RunConfig,
    train: Records,
    valid: Records,
    callbacks: Sequence[Callback],
) -> TrialResult:
    """Fine-tune and evaluate a model; save it and analyse its errors where the grid point says so."""
    source, distributed, dtype = point.arm.run, context.distributed, run_config.train.dtype
    assert source is not None
    fitted, data = fit_run(
        source, type(context.task), run_config, train, valid, distributed=distributed, callbacks=callbacks
    )
    task, frozen = fitted.task, run_config.transfer.freeze
    eval_data = task.prepare(context.eval_records)
    outputs = fitted.outputs(eval_data, dtype=dtype)
    predicted = None
    if context.unlabelled_test is not None:
        rows = task.prepare(context.unlabelled_test)
        predicted = task.predictions(rows, fitted.outputs(rows, dtype=dtype))
    result = {
        **evaluate_outputs(task, eval_data, outputs),
        "valid_score": valid_score(fitted, data.valid, dtype),
        "best_epoch": fitted.best_epoch,
        "tokens_per_second": None if frozen else tokens_per_second(fitted),  # frozen features are computed once
        "chosen": None,
        "epochs": fitted.epochs,
        "parameters": parameter_counts(fitted.model, frozen=frozen),
        "predicted": predicted,
    }
    if point.analyze_errors:
        attribute = attribution_for(fitted.model, task, eval_data, length=fitted.length)
        result["told"] = task.error_analysis(context.eval_records, eval_data, outputs, attribute=attribute)
        run, splits = RunFolder(context.folder / "runs" / point.run_name), LabelledSplits(train, valid, None)
        save_fit(run, run_config, fitted, splits, distributed)
    return result


def valid_score(fitted: FitResult, valid: Any, dtype: str) -> float:
    """The primary metric on the validation rows at the best epoch."""
    if fitted.task.primary_metric == "accuracy":
        return next(row["valid_accuracy"] for row in fitted.epochs if row["step"] == fitted.state.best_step)
    outputs = fitted.outputs(valid, dtype=dtype)
    return metric_value(fitted.task.row_metrics(valid, outputs)[fitted.task.primary_metric])


def tokens_per_second(fitted: FitResult) -> float:
    return round(fitted.state.tokens / max(1e-9, fitted.state.seconds - fitted.state.overhead_seconds), 1)
