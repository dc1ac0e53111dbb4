"""Data and metrics for evaluating a finished run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstock.data.corpus import read_corpus
from headstock.data.records import Records
from headstock.data.token_store import TokenStore, build_store
from headstock.errors import UserError
from headstock.inference.inputs import resolve_columns
from headstock.intervals import WeightedMetric, macro_f1, weighted_interval
from headstock.logs import muted
from headstock.model.model import Model
from headstock.results import Result, json_value
from headstock.tasks.base import Task
from headstock.tasks.classify import nll
from headstock.tasks.labelled import LabelledTask, metric_value
from headstock.train.distributed import DistributedContext
from headstock.train.evaluate import evaluate
from headstock.train.labelled_data import LabelledSplits, read_splits, require_labels
from headstock.train.pretrain import reopen_stores
from headstock.train.run_folder import RunFolder
from headstock.train.settings import RunConfig

BATCH_SIZE = 16
CALIBRATION_METRICS = ("loss", "ece", "brier")


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """The metrics of a run. `evaluation["accuracy"]` is one of them."""

    task: str
    metric: str  # the primary one
    metrics: dict[str, Any]  # by name, and what else was measured, such as `intervals` and the number of `rows`

    @property
    def value(self) -> float:
        """The primary metric."""
        return float(self.metrics[self.metric])

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% confidence intervals of metrics."""
        return {name: (low, high) for name, (low, high) in (self.metrics.get("intervals") or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        return json_value(self.metrics)

    def _rows(self) -> list[dict[str, Any]]:
        values = {name: value for name, value in self.metrics.items() if type(value) in (int, float)}
        names = sorted(values, key=lambda name: name != self.metric)
        none = (None, None)
        ends = {name: self.intervals.get(name, none) for name in names}
        return [{"metric": name, "value": values[name], "low": ends[name][0], "high": ends[name][1]} for name in names]


def reopen_splits(run: RunFolder, config: RunConfig, task: LabelledTask, *, hint: str) -> LabelledSplits:
    """The rows of a run, which must be those it was trained on; `hint` says what to do otherwise."""
    try:
        with muted():
            splits = read_splits(config.data, type(task), task.config, seed=config.train.seed)
    except UserError as error:
        files = [Path(file) for file in (config.data.train, config.data.valid, config.data.test) if file]
        elsewhere = any(not file.is_absolute() and not file.exists() for file in files)
        first = "run this in the folder where it was trained, or " if elsewhere else ""
        raise UserError(f"{run}: its labelled rows cannot be read again ({error}); {first}{hint}") from None
    recorded = run.data()
    if splits.fingerprint() == recorded["fingerprint"]:
        return splits
    trained, validated = (recorded[name]["rows"] for name in ("train", "valid"))
    if (trained, validated) == (len(splits.train), len(splits.valid)):
        raise UserError(f"{run}: its labelled files have changed since training; {hint}")
    raise UserError(
        f"{run}: was trained on {trained:,} rows and validated on {validated:,}, but its labelled files give "
        f"{len(splits.train):,} and {len(splits.valid):,}: a comparison or cross-validation trained it on a sample, or "
        f"the files have changed; {hint}"
    )


def held_out_records(run: RunFolder, config: RunConfig, task: LabelledTask) -> Records:
    """The run's test rows, or if it has none its validation rows."""
    splits = reopen_splits(run, config, task, hint="pass the file to evaluate on")
    return splits.test if splits.test is not None and splits.test.has_labels else splits.valid


def labelled_records(
    config: RunConfig,
    task: LabelledTask,
    files: Sequence[str | Path],
    columns: dict[str, str] | None,
    *,
    skip_blank: bool,
) -> Records:
    """The rows of one labelled file."""
    if len(files) > 1:
        raise UserError(f"a {task.title} is evaluated on one labelled file at a time, not on {len(files)}")
    names = resolve_columns(config, files[0], columns)
    records = task.read_file(files[0], config=task.config, columns=names, skip_blank=skip_blank)
    return require_labels(records, task.target, "to measure by")


def uncalibrated_metrics(
    task: LabelledTask, data: Any, raw: Sequence[np.ndarray], calibrated: Sequence[np.ndarray], *, fitted_here: bool
) -> dict[str, Any]:
    """The metrics before calibration, and by how much it changes the loss, with a 95% interval over the rows.

    There is no interval if the calibration was fitted on these rows: it would not cover the change on others.
    """
    thresholds, task.thresholds = task.thresholds, ()
    try:
        metrics = {name: metric_value(values) for name, values in task.row_metrics(data, raw).items()}
        if (classes := task.true_and_predicted(data, raw)) is not None:
            metrics["macro_f1"] = macro_f1(*classes)
        metrics |= {name: value for name, value in task.extra_metrics(data, raw).items() if name in CALIBRATION_METRICS}
    finally:
        task.thresholds = thresholds
    result: dict[str, Any] = {"uncalibrated": metrics, "calibration_fitted_here": fitted_here}
    if not task.multilabel:
        before, after = (nll(np.stack(part), data.labels) for part in (raw, calibrated))
        change = after - before

        def mean(weights: np.ndarray) -> np.ndarray:
            return weights @ change / weights.sum(1)

        if (estimate := weighted_interval(WeightedMetric(mean, len(change), bounds=(-np.inf, np.inf)))) is not None:
            result["loss_change"] = estimate.mean
            if not fitted_here:
                result["loss_change_interval"] = [estimate.low, estimate.high]
    return result


def evaluation_store(
    run: RunFolder,
    config: RunConfig,
    task: Task,
    corpus: str | Path | Sequence[str | Path],
    *,
    documents: str,
    column: str | None,
) -> TokenStore:
    """A corpus as tokens; by default the run's validation split."""
    if not corpus:
        with muted():
            return reopen_stores(run, config, task).valid
    text = read_corpus(corpus, documents=documents, column=column or config.data.column)  # type: ignore[arg-type]
    return build_store(text, task.tokenizer, sentences=task.needs_sentences)


def evaluate_store(model: Model, task: Task, store: TokenStore, *, length: int, dtype: str) -> dict[str, Any]:
    """The metrics of a language model on a corpus, and the size of the corpus."""
    metrics = evaluate(
        model,
        task,
        task.examples(store, length=length),
        distributed=DistributedContext(model.device),
        batch_size=BATCH_SIZE,
        size=store.bytes,
        dtype=dtype,
        unknown=store.unknown,
    )
    sizes = {"tokens": store.tokens, "documents": store.documents, "bytes": store.bytes}
    if store.unknown is not None and store.unknown.tokens:
        sizes |= {"unknown_tokens": store.unknown.tokens, "unknown_bytes": store.unknown.bytes}
    return metrics | sizes
