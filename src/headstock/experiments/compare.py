"""Does pretraining pay here? The same rows and seeds for every arm, and an answer with intervals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headstock.data.records import Records
from headstock.errors import UserError
from headstock.experiments.arms import Arm, check_names, kind_of, make_arms
from headstock.experiments.claims import alone, share
from headstock.experiments.compare_settings import CompareSettings, ComparisonPlan, make_plan
from headstock.experiments.compare_trials import ExperimentContext, GridPoint, run_trial, trial_config
from headstock.experiments.comparison_summary import summarize_comparison
from headstock.experiments.duration import format_duration_range, grid_seconds
from headstock.experiments.leakage_check import LeakageReport, check_leakage
from headstock.io import FolderLayout, remove_stale
from headstock.report.theme import arm_label
from headstock.tasks.wording import format_score
from headstock.train.callbacks import Callback
from headstock.train.distributed import DistributedContext, choose_device
from headstock.train.finetune_config import labelled_task
from headstock.train.labelled_data import read_splits, stratified_order
from headstock.train.pretrain import check_same_settings, pretrain
from headstock.train.run_folder import LAYOUT as RUN_LAYOUT
from headstock.train.run_folder import RunFolder
from headstock.train.settings import LabelledSettings
from headstock.train.signals import Interrupted

Say = Callable[[str], None]
# all that the folder of a comparison holds
LAYOUT: dict[str, FolderLayout | None] = {
    "results.json": None,
    "report.html": None,
    "figures": {"*.svg": None, "*.png": None},
}
LAYOUT |= {"cells": {"*.json": None}, "claims": {"*": None}, "leakage": {"*.json": None}}
LAYOUT |= {"predictions": {"*.jsonl": None}, "stock": RUN_LAYOUT, "runs": {"*": RUN_LAYOUT}}


def silent(line: str) -> None:
    """What is said to nobody."""


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
    labels: Sequence[int] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    columns: dict[str, str] | None = None,
    skip_blank: bool | None = None,
    leakage: str | None = None,
    rows: int | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    say: Say = silent,
) -> dict[str, Any]:
    """Compare arms on labelled rows; returns what results.json in the folder `out` holds.

    `features` asks for a frozen arm for each choice of layers, such as `["last", "sum4", "concat4", "mix"]`.

    Every cell (an arm, so many labels, a seed) is kept in the folder: the same call goes on where it was stopped.
    `settings` are those of `finetune`, for all arms; a file may set them for one arm alone.
    """
    began = time.monotonic()
    wishes = {"train": train, "valid": valid, "test": test}
    given: dict[str, Any] = {name: str(value) for name, value in wishes.items() if value is not None}
    given |= {"columns": [f"{ours}={theirs}" for ours, theirs in columns.items()]} if columns else {}
    options = {
        "task": task,
        "arms": arms,
        "features": features,
        "labels": labels,
        "seeds": seeds,
        "seed": seed,
        "leakage": leakage,
        "rows": rows,
        "skip_blank": skip_blank,
    }
    given |= {name: value for name, value in options.items() if value is not None}
    plan = make_plan(config_file, given, settings or {})
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; a comparison is kept in a folder")
    named = [runs] if isinstance(runs, str | Path) else list(runs)
    ground = make_context(plan, folder, DistributedContext(choose_device(device)), say)
    if not named and plan.pretrain:
        with alone(folder, "stock"):
            named = [pretrain_backbone(plan, folder, device, callbacks, say).path]
    chosen = make_arms(named, plan.compare.arms, plan.arms)
    for arm in chosen:  # wrong settings of the last arm are found before the first is trained
        trial_config(ground, GridPoint(arm, 0, plan.compare.seed, analyze_errors=False), ground.splits.train)
    found = check_leakage(chosen, ground.eval_records, plan.compare.leakage, folder, say)
    ground = replace(ground, eval_records=select_eval_records(ground.eval_records, found, plan.compare))
    cells = run_comparison_grid(plan, ground, chosen, callbacks, say)
    return summarize_comparison(plan, ground, chosen, cells, found, seconds=time.monotonic() - began)


def make_context(plan: ComparisonPlan, folder: Path, distributed: DistributedContext, say: Say) -> ExperimentContext:
    """Read the files and find everything that is wrong with them before any work is done."""
    asked = plan.compare
    check_names(asked.arms, plan.arms)
    task = labelled_task(asked.task)
    if "tfidf" in (kind_of(name, plan.arms) for name in asked.arms) and (why := beyond_tfidf(asked)):
        raise UserError(f"--arms: TF-IDF {why}; leave tfidf out of --arms for these rows")
    if asked.separator is not None and "separator" not in {part.name for part in fields(task.Config)}:
        raise UserError(f"separator: a row of {asked.task} has one label, so there is nothing to separate")
    files = LabelledSettings(asked.train, asked.valid, asked.test, asked.columns, skip_blank=asked.skip_blank)
    bare = task.Config(separator=asked.separator) if asked.separator is not None else task.Config()
    if hasattr(bare, "many_classes"):
        many = plan.settings.get("many_classes", plan.settings.get("task.many_classes", False))
        bare = replace(bare, many_classes=bool(many))
    splits = read_splits(files, task, bare, seed=asked.seed)
    settled = task.infer_settings(bare, splits.train)
    judge = task(settled, None)
    measured = splits.test if splits.test is not None and splits.test.has_labels else splits.valid
    for records in (splits.train, splits.valid, measured):
        judge.check(records)
    too_many = [count for count in asked.labels if count > len(splits.train)]
    if too_many:
        wanted = ", ".join(f"{count:,}" for count in too_many)
        raise UserError(f"--labels {wanted}: {splits.train.source} has only {len(splits.train):,} rows")
    if asked.seeds < 2:
        say("one seed tells nothing of the next: intervals are left out; ask for two or more with --seeds")
    return ExperimentContext(task, splits, measured, settled, plan.settings, folder, distributed, judge, asked.columns)


def beyond_tfidf(asked: CompareSettings) -> str | None:
    """Why TF-IDF cannot learn what is asked, if it cannot."""
    if asked.separator is not None:
        return "cannot learn several labels a text"
    if labelled_task(asked.task).predicts_classes:
        return None
    return f"predicts one class for a whole text, which is not the task {asked.task!r}"


def pretrain_backbone(
    plan: ComparisonPlan, folder: Path, device: str, callbacks: Sequence[Callback], say: Say
) -> RunFolder:
    """The run that a recipe describes, made in the comparison's folder unless it is there."""
    run, asked = RunFolder(folder / "stock"), dict(plan.pretrain)
    preset, objective = asked.pop("preset", None), asked.pop("objective", None)
    settings: dict[str, Any] = {"task.name": objective} if objective else {}
    for name, value in asked.items():
        settings |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    if run.is_finished():
        check_same_settings(run, settings)  # a recipe that was changed since asks for another stock
        return run
    try:
        pretrain(out=run.path, preset=preset, settings=settings, resume=True, device=device, callbacks=callbacks)
    except Interrupted as stop:
        told = f"stopped while {run} was pretrained; the same command goes on"
        raise Interrupted(told, stop.exit_code - 128) from None
    return run


def select_eval_records(measured: Records, found: LeakageReport, asked: CompareSettings) -> Records:
    """The rows that are measured: without those that pretraining has seen, and not more than asked for."""
    rows = [row for row in range(len(measured)) if row not in found.excluded]
    if not rows:
        raise UserError(f"{measured.source}: pretraining has seen all its texts, so nothing is left to measure by")
    kept = measured.select(rows)
    if asked.rows is None or asked.rows >= len(rows):
        return kept
    return kept.select(sorted(stratified_order(kept.strata, seed=asked.seed)[: asked.rows]))


def grid_points(asked: CompareSettings, ground: ExperimentContext, arms: Sequence[Arm]) -> list[GridPoint]:
    """The whole grid, the cheap cells first."""
    counts = sorted(asked.labels) or [len(ground.splits.train)]
    seeds = range(asked.seed, asked.seed + asked.seeds)
    return [
        GridPoint(arm, count, seed, analyze_errors=count == counts[-1] and seed == asked.seed)
        for count in counts
        for seed in seeds
        for arm in arms
    ]


def run_comparison_grid(
    plan: ComparisonPlan, ground: ExperimentContext, arms: list[Arm], callbacks: Sequence[Callback], say: Say
) -> list[dict[str, Any]]:
    """All cells, the cheap ones first; those whose file is there are not made again, nor those others are making."""
    places, unit = grid_points(plan.compare, ground, arms), ground.task_class.nouns.unit
    if say is not silent and (seconds := grid_seconds(ground, places)):
        say(f"{len(places)} cells: {format_duration_range(seconds)} on this machine, if it stays as busy as it is")
    remove_stale(ground.folder / "cells")
    cells: dict[int, dict[str, Any]] = {}
    try:
        for number, (made, new) in share(
            ground.folder,
            places,
            lambda place: f"{place.name}-{place.seed}",
            lambda p: run_trial(ground, p, callbacks),
            say,
        ):
            place, cells[number] = places[number], made
            score = f"{format_score(ground.task.primary_metric, made['score']):>6s}"
            told = f"{score}  {made['seconds']:5.1f} s" if new else f"{score}  (kept)"
            where = f"{place.labels:6,} {unit}s  seed {place.seed}  {arm_label(place.arm.name):20s}"
            say(f"{len(cells):3d}/{len(places)}  {where} {told}")
    except Interrupted as stop:
        raise Interrupted(
            f"stopped; {len(cells)} of {len(places)} cells are kept in {ground.folder}, the same command goes on",
            stop.exit_code - 128,
        ) from None
    return [cells[number] for number in range(len(places))]
