"""Cross-validation of fine-tuning: each point is trained on all folds but one, and scored on that one.

N rows, K folds.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headstock.data.records import Records, join_records
from headstock.errors import UserError
from headstock.experiments.grid import TrialResult
from headstock.experiments.sweep_trials import Finetuning, SweepTrial
from headstock.io import write_text
from headstock.report.sweep_points import Point, point_file_name
from headstock.rng import generator
from headstock.train import resolve
from headstock.train.labelled_data import LabelledSplits, hold_out_rows, read_labelled, stratified_order
from headstock.train.settings import RunConfig

logger = logging.getLogger(__name__)

OUT_OF_FOLD = "out_of_fold"  # folder of the predictions


class CrossValidation(Finetuning):
    """Trials that each fine-tune the same run on K - 1 folds. All points have the same folds.

    A fold plays no part in the training of the model that it scores: where the settings select the best epoch, a
    fraction of the other folds is held out for that, as `finetune` does without a validation file. A trial without a
    fold is trained on all rows.
    """

    def read_rows(self, first: RunConfig) -> None:
        sweep, data = self.plan.sweep, first.data
        assert sweep.folds is not None
        train, valid, warnings = read_labelled(data, self.task_class, first.task)
        for line in warnings:
            logger.info(f"warning: {line}")
        self.rows = train if valid is None else join_records(train, valid)
        parts = [train] if valid is None else [train, valid]
        self.locations = [part.location(row) for part in parts for row in range(len(part))]
        if len(self.rows) < 2 * sweep.folds:
            raise UserError(f"--folds {sweep.folds}: needs {2 * sweep.folds} rows or more, not {len(self.rows)}")
        logger.info(f"{len(self.rows):,} rows in {sweep.folds} folds")
        self.first, strata = first, self.task_class.strata(self.rows)
        self.folds = {
            seed: assign_folds(self.rows, sweep.folds, seed=seed, strata=strata)
            for seed in range(sweep.seed, sweep.seed + sweep.repeats)
        }
        self.splits = LabelledSplits(self.rows, self.rows.select([]), None)  # the classes are those of all rows
        held_out = data.valid_fraction if selects_epoch(first) else 0.0
        self.overlap = 1 / ((sweep.folds - 1) * (1 - held_out))

    def splits_of(self, trial: SweepTrial, run_config: RunConfig) -> LabelledSplits:
        """The rows of a trial; those of its fold are the test rows."""
        if trial.fold is None:
            return LabelledSplits(*self.hold_out(self.rows, trial.seed), None)
        in_fold = self.folds[trial.seed] == trial.fold
        train, fold = (self.rows.select(np.flatnonzero(rows).tolist()) for rows in (~in_fold, in_fold))
        return LabelledSplits(*(self.hold_out(train, trial.seed) if selects_epoch(run_config) else (train, fold)), fold)

    def hold_out(self, rows: Records, seed: int) -> tuple[Records, Records]:
        return hold_out_rows(rows, self.first.data, self.task_class, self.first.task, seed=seed)

    def config_of(self, trial: SweepTrial) -> RunConfig:
        """Only the classes and the like come from all rows; class weights and epochs from those of the trial."""
        run_config = self.configure(trial.point, trial.seed)
        known = self.complete(run_config).task
        shared = {name: getattr(known, name, None) for name in self.task_class.shared_settings}
        task = replace(run_config.task, **{name: value for name, value in shared.items() if value not in (None, ())})
        rows = self.splits_of(trial, run_config).train
        return resolve.resolve_with_data(replace(run_config, task=task), rows)

    def describe_data(self) -> dict[str, Any]:
        labels = self.task_class.describe_labels(self.rows)
        facts = {"file": self.rows.source, "rows": len(self.rows), "fingerprint": self.rows.fingerprint()}
        return {"train": facts | labels}

    def write_out_of_fold(self, points: Sequence[Point], results_by_point: Sequence[list[TrialResult]]) -> list[str]:
        """Write the predictions of all rows, in their order, each by models that were not trained on it.

        With repeats they are averaged. Returns the files.
        """
        files, task = list[str](), self.task
        assert task is not None
        for point, results in zip(points, results_by_point, strict=True):
            outputs = self.out_of_fold(results)
            if outputs is None:
                continue
            lines = [
                json.dumps({"row": location, "true": true, **prediction}, ensure_ascii=False)
                for location, true, prediction in zip(
                    self.locations, self.rows.labels or [], task.predictions(None, list(outputs)), strict=True
                )
            ]
            path = self.folder / OUT_OF_FOLD / f"{point_file_name(point)}.jsonl"
            path.parent.mkdir(exist_ok=True)
            write_text(path, "\n".join(lines) + "\n")
            files.append(str(path))
        return files

    def out_of_fold(self, results: Sequence[TrialResult]) -> np.ndarray | None:
        """(N, C) the mean over repeats of the outputs of each row; None if the task has none or a trial failed."""
        if self.task is None or not self.task.predicts_classes or any(not result.get("outputs") for result in results):
            return None
        width = len(results[0]["outputs"][0])
        sums = np.zeros((len(self.rows), width))
        for result in results:
            sums[self.folds[result["seed"]] == result["fold"]] += np.array(result["outputs"])
        return sums / self.plan.sweep.repeats


def selects_epoch(run_config: RunConfig) -> bool:
    """Whether fine-tuning needs validation rows."""
    return run_config.train.weights == "best" or run_config.train.patience is not None


def assign_folds(records: Records, folds: int, *, seed: int, strata: Sequence[str]) -> np.ndarray:
    """(N,) the fold of each row: stratified, of equal size. Questions on the same text are in the same fold."""
    numbers = np.empty(len(records), dtype=np.int64)
    if "context" not in records.columns:
        for fold, rows in enumerate(np.array_split(stratified_order(strata, seed=seed), folds)):
            numbers[rows] = fold
        return numbers
    contexts = list(dict.fromkeys(records.columns["context"]))
    if len(contexts) < folds:
        raise UserError(f"--folds {folds}: {records.source} has questions on {len(contexts)} texts only")
    order = generator(seed, "folds").permutation(len(contexts))
    fold_of = {contexts[context]: place % folds for place, context in enumerate(order)}
    return np.array([fold_of[context] for context in records.columns["context"]])
