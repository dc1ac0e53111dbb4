"""Calibrates a finished classifier on labelled rows, and compares metrics before and after."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headstock.errors import UserError, did_you_mean
from headstock.inference.evaluation import labelled_records, reopen_splits
from headstock.inference.pipeline import Pipeline
from headstock.tasks.calibration import Calibration, fit_calibration
from headstock.tasks.class_labels import label_numbers


@dataclass(frozen=True)
class CalibrationResult:
    """A fitted calibration, and the metrics of the rows it was fitted on."""

    calibration: Calibration
    before: dict[str, float]
    after: dict[str, float]


def calibrate(
    pipeline: Pipeline,
    file: str | Path | None = None,
    *,
    thresholds: str | None = None,
    positive: str | None = None,
    columns: dict[str, str] | None = None,
    skip_blank: bool = False,
) -> CalibrationResult:
    """Fit the temperature, and by the criterion `thresholds` also decision thresholds, and store them in the run.

    Without a file, the rows are the run's validation rows, which also selected its epoch. `positive` is the class to
    which F1, precision or recall refer; by default the rarer of two.
    """
    task, run = pipeline.classification_task(), pipeline.run
    assert pipeline.calibration is None, "a calibration is fitted on the model's own probabilities"
    if run.path.parent.name == "checkpoints":
        raise UserError(f"{run}: is a checkpoint; calibrate the run itself")
    if positive is not None and positive not in task.config.classes:
        hint = did_you_mean(positive, task.config.classes)
        raise UserError(f"--positive {positive}: is no class of this run ({', '.join(task.config.classes)}){hint}")
    if positive is not None and thresholds is None:
        raise UserError("--positive is only for --thresholds")
    selected_epoch = file is None
    if file is None:
        rows = reopen_splits(run, pipeline.config, task, hint="name a labelled file with --data").valid
    else:
        rows = labelled_records(pipeline.config, task, [file], columns, skip_blank=skip_blank)
    task.check(rows)
    data = task.prepare(rows)
    labels, probabilities = label_numbers(rows, task.config), np.stack(pipeline.outputs(data))
    calibration = fit_calibration(
        labels,
        probabilities,
        file=rows.source,
        selected_epoch=selected_epoch,
        criterion=thresholds,
        positive=None if positive is None else task.config.classes.index(positive),
        fingerprint=rows.fingerprint(),
    )
    run.write_calibration(calibration)
    before = task.extra_metrics(data, list(probabilities))
    after = task.extra_metrics(data, list(calibration.scaled(probabilities)))
    return CalibrationResult(calibration, before, after)
