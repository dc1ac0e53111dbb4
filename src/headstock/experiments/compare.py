"""Does pretraining help? Compares arms on the same rows and seeds and reports differences with intervals."""

import logging
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headstock import config
from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms.base import ARM_KINDS
from headstock.experiments.compare_settings import (
    Arm,
    CompareSettings,
    ComparisonPlan,
    check_arm_names,
    kind_of_arm,
    make_arms,
    make_plan,
)
from headstock.experiments.compare_trials import ComparisonTrainable, ExperimentContext, GridPoint, trial_config
from headstock.experiments.comparison_slices import comparison_slices
from headstock.experiments.comparison_summary import summarize_comparison
from headstock.experiments.duration import format_duration_range, grid_seconds
from headstock.experiments.grid import TrialResult, explain_interruption, lock_experiment, run_grid
from headstock.experiments.leakage import LeakageReport, check_leakage
from headstock.experiments.ray_trials import Placement, place_trials
from headstock.experiments.recipe import given_options
from headstock.io import FolderLayout, rank_and_size
from headstock.report.theme import arm_label
from headstock.tasks.text_metrics import format_score
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.labelled_data import read_splits, subset
from headstock.train.pretrain import pretrain
from headstock.train.resolve import labelled_task
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import RunFolder
from headstock.train.session import check_same_settings
from headstock.train.settings import LabelledSettings

logger = logging.getLogger(__name__)

LAYOUT: dict[str, FolderLayout | None] = {  # everything a comparison folder may contain
    "results.json": None,
    "report.html": None,
    "figures": {"*.svg": None, "*.png": None},
    "cells": {"*.json": None},
    "claims": {"*": None},  # locks of earlier versions
    "leakage": {"*.json": None},
    "predictions": {"*.jsonl": None},
    "stock": RUN_LAYOUT,
    "runs": {"*": RUN_LAYOUT},
}


def compare(
    runs: str | Path | Sequence[str | Path] = (),
    *,
    train: str | Path | None = None,
    valid: str | Path | None = None,
    test: str | Path | None = None,
    out: str | Path,
    task: str | None = None,
    arms: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    prompt: str | None = None,
    label_words: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    columns: dict[str, str] | None = None,
    skip_blank: bool | None = None,
    leakage: str | None = None,
    rows: int | None = None,
    slices: Sequence[str] | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    on: str | None = None,
    gpus_per_trial: float | None = None,
    cpus_per_trial: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Compare arms on labelled rows; returns the contents of results.json in the folder `out`.

    `features` adds a frozen arm for each choice of layers, for example `["last", "sum4", "concat4", "mix"]`.
    `prompt` and `label_words` are the template and the words of prompt arms, such as `["negative=bad|awful", ...]`.
    `settings` are fine-tuning settings for all arms; a recipe file can also set them for single arms.

    The result of every trial (arm, number of labels, seed) is saved in `out`: repeating the call continues an
    interrupted comparison. With `on="ray"` or `"ray:ADDRESS"` trials run side by side as Ray tasks, each with a number
    of CPUs and a number or fraction of GPUs.
    """
    plan = make_plan(config_file, given_options(CompareSettings, locals()), settings or {})
    start, folder = time.monotonic(), Path(out)
    if rank_and_size()[1] > 1:
        raise UserError("a comparison runs in one process; start it without torchrun (--on ray uses several GPUs)")
    run_names = [runs] if isinstance(runs, str | Path) else list(runs)
    placing = place_trials(on, device, gpus_per_trial=gpus_per_trial, cpus_per_trial=cpus_per_trial)
    with lock_experiment(folder):
        context = make_context(plan, folder, DistributedContext(choose_device("cpu" if on else device)))
        if not run_names and plan.pretrain:
            run_names = [pretrain_backbone(plan, folder, device, callbacks).path]
        compared_arms = make_arms(run_names, plan.compare.arms, plan.arms)
        for arm in compared_arms:  # report invalid settings of any arm before training the first one
            trial_config(context, GridPoint(arm, 0, plan.compare.seed), context.splits.train)
        leaks = check_leakage(compared_arms, context.eval_records, plan.compare.leakage, folder)
        context = replace(context, eval_records=select_eval_records(context, leaks, plan.compare))
        comparison_slices(context, plan.compare.slices)  # reports an invalid slice before training
        with placing as placement:
            context = replace(context, distributed=DistributedContext(placement.device))
            results = run_comparison_grid(plan, context, compared_arms, placement, callbacks)
        return summarize_comparison(plan, context, compared_arms, results, leaks, seconds=time.monotonic() - start)


def make_context(plan: ComparisonPlan, folder: Path, distributed: DistributedContext) -> ExperimentContext:
    """Read and check the labelled files, before anything is trained."""
    settings = plan.compare
    check_arm_names(settings.arms, plan.arms)
    task_class = labelled_task(settings.task)
    for name in settings.arms:
        if reason := ARM_KINDS.get(kind_of_arm(name, plan.arms)).unsupported(settings):
            raise UserError(f"--arms: {arm_label(name)} {reason}; remove {name} from --arms")
    if settings.separator is not None and "separator" not in {part.name for part in fields(task_class.Config)}:
        raise UserError(f"separator: a row of {settings.task} has a single label, so there is nothing to separate")
    task_settings = {
        name: plan.settings.get(name, plan.settings.get(f"task.{name}"))
        for name in task_class.comparison_settings
        if plan.settings.keys() & {name, f"task.{name}"}
    }
    task_settings |= {} if settings.separator is None else {"separator": settings.separator}
    task_config: Any = config.from_dict(task_class.Config, task_settings, prefix="task")
    paths = settings.train, settings.valid, settings.test
    files = LabelledSettings(*paths, settings.columns, skip_blank=settings.skip_blank)
    splits = read_splits(files, task_class, task_config, seed=settings.seed)
    task = task_class(task_class.infer_settings(task_config, splits.train), None)
    eval_records = splits.test if splits.test is not None and splits.test.has_labels else splits.valid
    for records in (splits.train, splits.valid, eval_records):
        task.check(records)
    if too_large := [count for count in settings.labels if count > len(splits.train)]:
        counts = ", ".join(f"{count:,}" for count in too_large)
        raise UserError(f"--labels {counts}: {splits.train.source} has only {len(splits.train):,} rows")
    if settings.seeds < 2:
        logger.info("with a single seed there are no intervals; use --seeds 2 or more")
    return ExperimentContext(task, splits, eval_records, plan.settings, folder, distributed, settings.columns)


def pretrain_backbone(plan: ComparisonPlan, folder: Path, device: str, callbacks: Sequence[Callback]) -> RunFolder:
    """The run of the recipe's `pretrain` section, trained in the comparison's folder unless it is finished."""
    run, options = RunFolder(folder / "stock"), dict(plan.pretrain)
    preset, objective = options.pop("preset", None), options.pop("objective", None)
    settings = ({"task.name": objective} if objective else {}) | config.flatten_tables(options)
    if run.is_finished():
        check_same_settings(run, settings)  # refuses a recipe that was changed since
        return run
    with explain_interruption(lambda: f"pretraining checkpoints are saved in {run}"):
        pretrain(out=run.path, preset=preset, settings=settings, resume=True, device=device, callbacks=callbacks)
    return run


def select_eval_records(context: ExperimentContext, leaks: LeakageReport, settings: CompareSettings) -> Records:
    """The evaluation rows without leaked ones, sampled down to `settings.rows`."""
    records = context.eval_records
    rows = [row for row in range(len(records)) if row not in leaks.excluded]
    if not rows:
        raise UserError(f"{records.source}: all texts occur in the pretraining text; none is left to evaluate on")
    selected = records.select(rows)
    if settings.rows is None or settings.rows >= len(rows):
        return selected
    return subset(selected, settings.rows, seed=settings.seed, strata=context.task.strata(selected))


def grid_points(settings: CompareSettings, context: ExperimentContext, arms: Sequence[Arm]) -> list[GridPoint]:
    """All trials, those with few labels first. Errors are analysed for the first seed with the most labels."""
    counts = sorted(settings.labels) or [len(context.splits.train)]
    seeds = range(settings.seed, settings.seed + settings.seeds)
    return [
        GridPoint(arm, count, seed, count == counts[-1] and seed == settings.seed, context.unit)
        for count in counts
        for seed in seeds
        for arm in arms
    ]


def run_comparison_grid(
    plan: ComparisonPlan,
    context: ExperimentContext,
    arms: list[Arm],
    placement: Placement,
    callbacks: Sequence[Callback],
) -> list[TrialResult]:
    points = grid_points(plan.compare, context, arms)
    if placement.is_remote:
        logger.info("%d trials", len(points))
    elif logger.isEnabledFor(logging.INFO) and (seconds := grid_seconds(context, points)):
        logger.info("%d trials: %s at the current load of this machine", len(points), format_duration_range(seconds))
    return run_grid(
        ComparisonTrainable(context, callbacks),
        points,
        execute=placement.execute,
        format_score=lambda result: f"{format_score(context.task.primary_metric, result['score']):>6s}",
    )
