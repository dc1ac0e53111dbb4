"""One trial of a comparison: an arm, a number of labels and a seed."""

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
from headstock.experiments.grid import ResultCache, TrialResult
from headstock.experiments.tfidf import TfidfClassifier
from headstock.intervals import SufficientStatistics, macro_f1
from headstock.io import fingerprint, sha256
from headstock.logs import muted
from headstock.report.theme import arm_label
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.error_analysis import reliability
from headstock.tasks.labelled import LabelledTask, RowMetric, metric_value
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.finetune import parameter_counts, save_fit
from headstock.train.fit import FitResult, LabelledData, fit
from headstock.train.labelled_data import LabelledSplits, subset
from headstock.train.models import source_weights
from headstock.train.resolve import resolve_finetune_config, resolve_with_data
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

DIGITS = 5  # of probabilities in a result file
SHARED_SETTINGS = ("classes", "separator", "unanswerable")  # inferred from all training rows, also for trials on few


@dataclass(frozen=True)
class ExperimentContext:
    """What all trials of a comparison share: data, task and settings."""

    task_class: type[LabelledTask]
    splits: LabelledSplits
    eval_records: Records  # the test rows, or the validation rows if the test file has no labels
    task_config: Any
    settings: dict[str, Any]  # of every fine-tuned arm
    folder: Path
    distributed: DistributedContext
    task: LabelledTask  # without a tokenizer: computes metrics of any model's predictions
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
        return self.task_class.nouns.unit

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
    analyze_errors: bool  # also save the model and analyse its errors
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


def run_trial(context: ExperimentContext, point: GridPoint, callbacks: Sequence[Callback]) -> tuple[TrialResult, bool]:
    """The result of a trial and whether it is new (not from the cache)."""
    cache = ResultCache(context.folder)
    train, valid = context.rows(point.labels, point.seed)
    run_config = trial_config(context, point, train)
    key = trial_key(context, point, run_config, train, valid)
    cached = cache.read(point)
    if cached.get("key") == key and (cached["shown"] or not point.analyze_errors):
        return cached, False
    start = time.monotonic()
    if run_config is None:
        result = run_tfidf(context, point, train, valid)
    else:
        with muted():
            result = run_finetuning(context, point, run_config, train, valid, callbacks)
    result |= {"seconds": round(time.monotonic() - start, 3), "key": key, "shown": point.analyze_errors}
    result |= {"arm": point.arm.name, "labels": point.labels, "seed": point.seed}
    cache.write(point, result)
    return result, True


def trial_config(context: ExperimentContext, point: GridPoint, train: Records) -> RunConfig | None:
    """The fine-tuning config of a trial; None for TF-IDF."""
    if point.arm.run is None:
        return None
    settings = {**context.settings, **point.arm.options(), "train.seed": point.seed}
    shared = {name: getattr(context.task_config, name, None) for name in SHARED_SETTINGS}
    settings |= {f"task.{name}": config.to_dict(value) for name, value in shared.items() if value}
    settings |= {"data.train": context.splits.train.source, "data.columns": list(context.columns)}
    return resolve_with_data(resolve_finetune_config(point.arm.run, context.task_class.name, None, settings), train)


def trial_key(
    context: ExperimentContext, point: GridPoint, run_config: RunConfig | None, train: Records, valid: Records
) -> str:
    """A fingerprint of everything that can change the result: rows, settings and weights."""
    run, settings = point.arm.run, None if run_config is None else run_config.plain()
    if settings is not None:
        settings["transfer"].pop("run")  # the weights count, not the path
        settings["data"].pop("train")  # likewise the rows
        settings["data"].pop("columns")
    return fingerprint(
        {
            "version": __version__,
            "rows": LabelledSplits(train, valid, context.eval_records).fingerprint(),
            "unlabelled": context.unlabelled_test.columns if context.unlabelled_test else None,
            "task": [context.task_class.name, config.to_dict(context.task_config)],
            "settings": settings,
            "tokenizer": run.data()["tokenizer"] if run else None,
            "weights": sha256(run.weights_file) if run and point.arm.kind != "scratch" else None,
        }
    )


def evaluate_outputs(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """Metrics of a model's outputs on the evaluation rows, and the values per row from which intervals are computed."""
    stored = list(rounded(np.stack(outputs))) if task.predicts_classes else outputs  # metrics agree with what is stored
    row_metrics, certainty = task.row_metrics(data, stored), task.confidences(data, stored)
    metrics = task.extra_metrics(data, stored) | {name: metric_value(values) for name, values in row_metrics.items()}
    if (numbers := task.true_and_predicted(data, stored)) is not None:
        metrics["macro_f1"] = macro_f1(*numbers)
    return {
        "score": metrics[task.primary_metric],
        "accuracy": metrics.get("accuracy", metrics.get("exact_match")),  # a translation has neither
        **{name: metrics[name] for name in row_metrics},
        "macro_f1": metrics.get("macro_f1"),
        "loss": task.extra_metrics(data, outputs).get("loss"),  # not of rounded probabilities, which may be 0
        "ece": None if certainty is None else reliability(*certainty)["ece"],
        "tallies": {name: serialize_metric(values) for name, values in row_metrics.items()},
        "probabilities": np.stack(stored).tolist() if task.predicts_classes else None,
    }


def serialize_metric(values: RowMetric) -> list[list[float]]:
    """A metric's values per row as lists: numerators and denominators, or the counts of each row."""
    return [compact_list(row) for row in (values.values if isinstance(values, SufficientStatistics) else values)]


def rounded(probabilities: np.ndarray) -> np.ndarray:
    return probabilities.astype(np.float64).round(DIGITS)


def compact_list(values: np.ndarray) -> list[float]:
    """Integers where possible, otherwise rounded numbers, to keep the JSON short."""
    return [int(value) if value == int(value) else round(float(value), DIGITS) for value in values]


def run_tfidf(context: ExperimentContext, point: GridPoint, train: Records, valid: Records) -> TrialResult:
    """TF-IDF features and a linear classifier on the raw texts."""
    task = context.task
    assert task.predicts_classes
    labels = [label_numbers(rows, context.task_config) for rows in (train, valid, context.eval_records)]
    classifier = TfidfClassifier(context.task_config.classes).fit(
        input_texts(train), labels[0], input_texts(valid), labels[1], seed=point.seed
    )
    probabilities, data = classifier.probabilities(input_texts(context.eval_records)), LabelsOnly(labels[2])
    result = {
        **evaluate_outputs(task, data, list(probabilities)),
        "valid_score": classifier.valid_accuracy,
        "best_epoch": None,
        "tokens_per_second": None,
        "chosen": classifier.chosen,
        "epochs": [],
        "parameters": None,
        "predicted": None,
    }
    if context.unlabelled_test is not None:
        outputs = classifier.probabilities(input_texts(context.unlabelled_test))
        result["predicted"] = task.predictions(None, list(rounded(outputs)))
    if point.analyze_errors:
        result["told"] = task.error_analysis(context.eval_records, data, list(rounded(probabilities)))
    return result


@dataclass(frozen=True)
class LabelsOnly:
    """Rows that are not tokenized, for TF-IDF."""

    labels: np.ndarray


def input_texts(records: Records) -> list[Any]:
    """The texts of the rows, or pairs of texts."""
    columns = records.columns
    return list(zip(columns["text"], columns["text_b"], strict=True)) if "text_b" in columns else records.display_texts


def run_finetuning(
    context: ExperimentContext,
    point: GridPoint,
    run_config: RunConfig,
    train: Records,
    valid: Records,
    callbacks: Sequence[Callback],
) -> TrialResult:
    """Fine-tune and evaluate a model; save it and analyse its errors where the grid point says so."""
    run = point.arm.run
    assert run is not None
    tokenizer, dtype, frozen = run.tokenizer(), run_config.train.dtype, run_config.transfer.freeze
    task = context.task_class(run_config.task, tokenizer)
    data = LabelledData(task.prepare(train), task.prepare(valid))
    weights = None if point.arm.kind == "scratch" else source_weights(run)
    fitted = fit(run_config, tokenizer, weights, data, run=None, distributed=context.distributed, callbacks=callbacks)
    eval_data = task.prepare(context.eval_records)
    outputs = fitted.outputs(eval_data, dtype=dtype)
    predicted = None
    if context.unlabelled_test is not None:
        rows = task.prepare(context.unlabelled_test)
        predicted = task.predictions(rows, fitted.outputs(rows, dtype=dtype))
    result = {
        **evaluate_outputs(task, eval_data, outputs),
        "valid_score": valid_score(fitted, data.valid, run_config),
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
        save_run(context, point, run_config, tokenizer, fitted, LabelledSplits(train, valid, None))
    return result


def valid_score(fitted: FitResult, valid: Any, run_config: RunConfig) -> float:
    """The primary metric on the validation rows at the best epoch."""
    if fitted.task.primary_metric == "accuracy":
        return next(row["valid_accuracy"] for row in fitted.epochs if row["step"] == fitted.state.best_step)
    outputs = fitted.outputs(valid, dtype=run_config.train.dtype)
    return metric_value(fitted.task.row_metrics(valid, outputs)[fitted.task.primary_metric])


def tokens_per_second(fitted: FitResult) -> float:
    return round(fitted.state.tokens / max(1e-9, fitted.state.seconds - fitted.state.overhead_seconds), 1)


def save_run(
    context: ExperimentContext,
    point: GridPoint,
    run_config: RunConfig,
    tokenizer: Tokenizer,
    fitted: FitResult,
    splits: LabelledSplits,
) -> None:
    run = RunFolder(context.folder / "runs" / point.run_name)
    save_fit(run, run_config, tokenizer, fitted, splits, context.distributed)
