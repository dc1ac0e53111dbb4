"""Fine-tunes and evaluates the models of trials.

Metrics are stored per row, so that intervals can be computed over the seeds and rows of several trials.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstock.data.records import Records
from headstock.experiments.grid import TrialResult
from headstock.inference.attribution import token_attributions
from headstock.inference.pipeline import load
from headstock.intervals import Interval, SufficientStatistics, difference, interval, macro_f1
from headstock.model.model import Model
from headstock.tasks.class_labels import label_numbers
from headstock.tasks.error_analysis import reliability
from headstock.tasks.labelled import Attribution, LabelledTask, RowMetric, metric_value
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext
from headstock.train.fit import EncodedSplits, FitResult, fit, member_configs, model_soup
from headstock.train.loop import sequence_length
from headstock.train.models import build_lm_objective, source_weights
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

DIGITS = 5  # of probabilities in a result file
SIGNIFICANT = 8  # digits of other numbers, which may be of any size


def fit_run(
    source: RunFolder,
    task_class: type[LabelledTask],
    run_config: RunConfig,
    train: Records,
    valid: Records,
    *,
    distributed: DistributedContext,
    callbacks: Sequence[Callback],
) -> tuple[FitResult, EncodedSplits]:
    """Fine-tune a run, or its architecture from scratch; also returns the prepared rows."""
    task = task_class(run_config.task, source.tokenizer())
    data = EncodedSplits(task.prepare(train), task.prepare(valid))
    weights = None if run_config.transfer.init == "scratch" else source_weights(source)
    objective = build_lm_objective(source, run_config)
    fits = [
        fit(member, task, weights, data, run=None, distributed=distributed, objective=objective, callbacks=callbacks)
        for member in member_configs(run_config)
    ]
    return model_soup(fits) if len(fits) > 1 else fits[0], data


def evaluate_outputs(task: LabelledTask, data: Any, outputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """Metrics of a model's outputs, and the values per row from which intervals are computed."""
    stored = stored_outputs(task, outputs)
    row_metrics, confidences = task.row_metrics(data, stored), task.confidences(data, stored)
    metrics = task.extra_metrics(data, stored) | {name: metric_value(values) for name, values in row_metrics.items()}
    if (classes := task.true_and_predicted(data, stored)) is not None:
        metrics["macro_f1"] = macro_f1(*classes)
    return {
        "score": metrics[task.primary_metric],
        "accuracy": metrics.get("accuracy", metrics.get("exact_match")),  # a translation has neither
        **{name: metrics[name] for name in row_metrics},
        "macro_f1": metrics.get("macro_f1"),
        "loss": task.extra_metrics(data, outputs).get("loss"),  # not of rounded probabilities, which may be 0
        "ece": None if confidences is None else reliability(*confidences)["ece"],
        "tallies": {name: serialize_metric(values) for name, values in row_metrics.items()},
        "probabilities": np.stack(stored).tolist() if task.predicts_classes else None,
    }


@dataclass(frozen=True)
class LabelsOnly:
    """Rows that are not tokenized."""

    labels: np.ndarray


def labels_only(task: LabelledTask, records: Records) -> LabelsOnly:
    return LabelsOnly(task.label_array(records) if task.predicts_values else label_numbers(records, task.config))


def primary_score(task: LabelledTask, records: Records, outputs: np.ndarray) -> float:
    """The task's primary metric of a model that the training loop did not train."""
    return metric_value(task.row_metrics(labels_only(task, records), list(outputs))[task.primary_metric])


def evaluate_probabilities(
    task: LabelledTask,
    records: Records,
    probabilities: Callable[[Records], np.ndarray],
    *,
    unlabelled: Records | None,
    analyze_errors: bool,
    valid_score: float,
    chosen: str | None,
) -> TrialResult:
    """The result of a model that the training loop did not train, from its outputs of rows.

    These are probabilities (N, C), or values (N, 1) where the task predicts them.
    """
    values, data = probabilities(records), labels_only(task, records)
    predicted = None
    if unlabelled is not None:
        predicted = task.predictions(None, stored_outputs(task, list(probabilities(unlabelled))))
    result = {
        **evaluate_outputs(task, data, list(values)),
        "valid_score": valid_score,
        "best_epoch": None,
        "tokens_per_second": None,
        "chosen": chosen,
        "epochs": [],
        "parameters": None,
        "predicted": predicted,
    }
    if analyze_errors:
        result["told"] = task.error_analysis(records, data, stored_outputs(task, list(values)))
    return result


def stored_outputs(task: LabelledTask, outputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Probabilities as a result file has them, so that metrics agree with what is stored."""
    return list(rounded(np.stack(outputs))) if task.predicts_classes and len(outputs) else outputs


def rounded(probabilities: np.ndarray) -> np.ndarray:
    return probabilities.astype(np.float64).round(DIGITS)


def serialize_metric(values: RowMetric) -> list[list[float]]:
    """A metric's values per row as lists: numerators and denominators, or the counts of each row."""
    return [compact_list(row) for row in (values.values if isinstance(values, SufficientStatistics) else values)]


def compact_list(values: Iterable[float]) -> list[float]:
    """Integers where possible, otherwise rounded numbers, to keep the JSON short."""
    return [int(value) if value == int(value) else float(f"{value:.{SIGNIFICANT}g}") for value in values]


# Intervals


def row_values(
    task: LabelledTask, results: Sequence[TrialResult], metric: str
) -> tuple[np.ndarray | SufficientStatistics, np.ndarray | None]:
    """A metric's numerators and denominators, each (seeds, rows); the denominators are None if all are 1.

    For a metric that is not a ratio, such as BLEU, the (seeds, rows, K) counts it is computed from.
    """
    values = [result["tallies"][metric] for result in results]
    if metric in task.formulas:
        return task.formulas[metric].of(np.array(values)), None
    numerators, denominators = (np.array(part) for part in zip(*values, strict=True))
    return numerators, None if (denominators == 1).all() else denominators


def score_interval(
    task: LabelledTask | None, results: Sequence[TrialResult], *, overlap: float | None = None
) -> Interval:
    """Over seeds and, for labelled tasks, over rows; with `overlap`, over folds (see `t_interval`)."""
    if task is None or overlap is not None:
        return t_interval([result["score"] for result in results], overlap=overlap or 0.0)
    return interval(*row_values(task, results, task.primary_metric))


def paired_difference(
    task: LabelledTask | None, a: Sequence[TrialResult], b: Sequence[TrialResult], *, overlap: float | None = None
) -> Interval:
    """The difference of scores, paired by seed and, for labelled tasks, by row; with `overlap`, paired by fold."""
    if task is None or overlap is not None:
        differences = [first["score"] - second["score"] for first, second in zip(a, b, strict=True)]
        return t_interval(differences, overlap=overlap or 0.0)
    (numerators_a, denominators_a), (numerators_b, denominators_b) = (
        row_values(task, results, task.primary_metric) for results in (a, b)
    )
    return difference(numerators_a, numerators_b, denominators_a, denominators_b)


def t_interval(values: Sequence[float], *, overlap: float = 0.0) -> Interval:
    """The mean with Student's 95% interval; without an interval for a single value.

    The scores of folds are correlated, since their models share training rows. `overlap`, the number of rows that
    score a model over those that train it, widens the interval for that (Nadeau and Bengio 2003, corrected resampled
    t-test).
    """
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    radius = float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) * (1 / len(values) + overlap) ** 0.5)
    return Interval(mean, mean - radius, mean + radius)


# Errors


def attribution_for(model: Model, task: LabelledTask, data: Any, *, length: int) -> Attribution:
    """Attributes the score of a class to the tokens of a row."""
    return lambda row, target: token_attributions(model, task, data, row, target=target, length=length)


def add_error_analysis(run: RunFolder, *, device: str = "auto") -> None:
    """Add the errors on a fine-tuned run's test rows, or else its validation rows, to its results."""
    pipeline = load(run.path, device=device)
    task, rows = pipeline.labelled_task(), pipeline.held_out()
    data = task.prepare(rows)
    length = sequence_length(pipeline.model, pipeline.config.train)
    attribute = attribution_for(pipeline.model, task, data, length=length)
    outputs = pipeline.outputs(data)
    if analysis := task.error_analysis(rows, data, outputs, attribute=attribute):
        if (calibration := run.calibration()) is not None:
            confidences = task.confidences(data, list(calibration.scaled(np.stack(outputs))))
            fit = {"temperature": calibration.temperature, "rows": calibration.rows, "file": calibration.file}
            fit["fitted_here"] = calibration.fitted_on(rows)
            analysis["calibrated"] = (reliability(*confidences) if confidences else {}) | fit
        run.write_results(run.results() | {"details": analysis})
