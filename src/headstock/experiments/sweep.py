"""Which settings are best? Trains a grid of settings, or a random sample of it, with several seeds and ranks them."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from headstock.data.corpus import read_corpus
from headstock.errors import ConfigError, UserError
from headstock.experiments.cross_validation import CrossValidation
from headstock.experiments.duration import format_duration_range
from headstock.experiments.grid import TrialResult, explain_interruption, lock_experiment, log_outcome, run_grid
from headstock.experiments.ray_trials import Placement, place_trials
from headstock.experiments.recipe import fixed_setting_problems, given_options
from headstock.experiments.sweep_search import import_optuna, successive_halving, tpe_search
from headstock.experiments.sweep_settings import SweepPlan, SweepSettings, corner_points, draw_points, make_plan
from headstock.experiments.sweep_summary import ranking, scores_of, summarize_sweep
from headstock.experiments.sweep_trials import (
    FIXED_SETTINGS,
    Finetuning,
    Pretraining,
    SweepKind,
    SweepTrainable,
    SweepTrial,
)
from headstock.io import rank_and_size, remove_stale, write_json
from headstock.report.format import pluralize
from headstock.report.sweep_points import Point, canonical, format_metric, point_label
from headstock.train.callbacks import Callback
from headstock.train.distributed import choose_device
from headstock.train.settings import RunConfig, assign_sections

logger = logging.getLogger(__name__)

LONG_SWEEP = 60  # seconds; what takes longer is announced


def sweep(
    corpus: str | Path | Sequence[str | Path] = (),
    *,
    grid: Mapping[str, Any] | None = None,
    out: str | Path,
    run: str | Path | None = None,
    task: str | None = None,
    train: str | Path | None = None,
    valid: str | Path | Sequence[str | Path] | None = None,
    columns: dict[str, str] | None = None,
    preset: str | None = None,
    objective: str | None = None,
    tokenizer: str | Path | None = None,
    sample: int | None = None,
    method: str | None = None,
    reduction: int | None = None,
    seeds: int | None = None,
    folds: int | None = None,
    repeats: int | None = None,
    out_of_fold: str | None = None,
    seed: int | None = None,
    by: str | None = None,
    keep: bool | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    on: str | None = None,
    gpus_per_trial: float | None = None,
    cpus_per_trial: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train every point of a grid such as `{"depth": [2, 4], "lr": [1e-3, 3e-3]}`; returns what results.json holds.

    With text it pretrains and ranks by validation loss; with `run` and `train` it fine-tunes and ranks by the task's
    metric on the validation rows. `sample` draws a number of points; values may then be ranges, as in
    `{"lr": "1e-4..1e-2"}`. With `method="tpe"` the points are proposed by a tree-structured Parzen estimator; with
    "asha" they are random, and at each rung only one in `reduction` of them goes on. With `folds`, fine-tuning is
    cross-validated on the rows of `train` and `valid` instead of repeated with several seeds. The result of every
    trial (point, seed, fold) is saved in the folder `out`: repeating the call continues an interrupted sweep. With
    `on="ray"` or `"ray:ADDRESS"` trials run as Ray tasks: those of a grid side by side, those of a search as far as it
    asks for them.
    """
    start, folder = time.monotonic(), Path(out)
    corpus = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if "-" in corpus:  # standard input is copied to a file, which every trial can read
        corpus = list(read_corpus([str(path) for path in corpus]).paths)
    options = given_options(SweepSettings, locals() | {"corpus": corpus or None, "valid": valid or None})
    plan = make_plan(config_file, options, grid or {}, settings or {}, preset=preset, objective=objective)
    check_plan(plan)
    placing = place_trials(on, device, gpus_per_trial=gpus_per_trial, cpus_per_trial=cpus_per_trial)
    with lock_experiment(folder):
        method = plan.sweep.search_method
        if method == "tpe":
            import_optuna()
            points = corner_points(plan.grid)  # to check; those of the search are not known yet
        else:
            points = draw_points(plan.grid, sample=plan.sweep.sample, seed=plan.sweep.seed)
        kind: SweepKind = kind_of(plan)(plan, folder, choose_device("cpu" if on else device))
        kind.read(configure_all(plan, kind, points))
        build_all(points, lambda point: kind.complete(kind.configure(point, plan.sweep.seed)))
        if plan.sweep.trials_per_point < 2:
            logger.info("with a single seed there are no intervals; use --seeds 2 or more")
        with placing as placement:
            kind.device = placement.device
            if method == "tpe":
                points, results_by_point = run_tpe(plan, kind, placement, callbacks)
            elif method == "asha":
                results_by_point = run_asha(plan, kind, points, placement, callbacks)
            else:
                results_by_point = run_sweep_grid(plan, kind, points, placement, callbacks)
            best = keep_best(plan, kind, points, results_by_point, placement, callbacks)
        results = summarize_sweep(plan, kind, points, results_by_point, best, seconds=time.monotonic() - start)
        if isinstance(kind, CrossValidation):
            results["out_of_fold"] = save_out_of_fold(plan, kind, points, results_by_point)
        write_json(folder / "results.json", results)
    return results


def kind_of(plan: SweepPlan) -> type[SweepKind]:
    if plan.kind == "pretrain":
        return Pretraining
    return Finetuning if plan.sweep.folds is None else CrossValidation


def save_out_of_fold(
    plan: SweepPlan, kind: CrossValidation, points: list[Point], results_by_point: list[list[TrialResult]]
) -> list[str]:
    """Write the out-of-fold predictions of the best point, or of all of them, the best first; returns the files."""
    order = ranking(results_by_point, lower=kind.lower)
    chosen = order if plan.sweep.out_of_fold == "all" else order[:1]
    return kind.write_out_of_fold([points[number] for number in chosen], [results_by_point[n] for n in chosen])


# Checks before anything is trained


def check_plan(plan: SweepPlan) -> None:
    """Refuse options of the other kind of sweep, and grids over settings that must be equal for all points."""
    sweep = plan.sweep
    if rank_and_size()[1] > 1:
        raise UserError("a sweep runs in one process; start it without torchrun")
    if plan.kind == "finetune":
        if len(sweep.valid) > 1:
            raise UserError("--valid: fine-tuning takes one file of validation rows")
        misplaced = {"preset": plan.preset, "objective": plan.objective, "tokenizer": sweep.tokenizer}
        misplaced |= {"by": None if sweep.by == "auto" else sweep.by}
        reason = f"applies to pretraining, not to --run {sweep.run}"
        problems = fixed_setting_problems(plan.settings, FIXED_SETTINGS)
    else:
        misplaced = {"train": sweep.train, "columns": ",".join(sweep.columns)}
        misplaced |= {"folds": None if sweep.folds is None else str(sweep.folds)}
        reason, problems = "applies to fine-tuning, which needs --run", []
    problems += [(f"--{name}", reason) for name, value in misplaced.items() if value]
    problems += [(f"grid.{key}", f"cannot vary: {why}") for key in plan.grid if (why := reason_fixed(plan, key))]
    if problems:
        raise ConfigError(problems)


def reason_fixed(plan: SweepPlan, key: str) -> str | None:
    """Why a setting must be equal for all points; None if it may vary."""
    section, _, name = key.rpartition(".")
    if name == "seed":
        return FIXED_SETTINGS["seed"]
    if plan.kind == "finetune":
        if section == "data" or name in ("train", "valid", "columns", "valid_fraction", "separator"):
            return "all points must use the same training and validation rows"
        return FIXED_SETTINGS.get(name) if name != "preset" else "the model is that of the run to fine-tune"
    if key in ("objective", "task.name"):
        return "losses of different objectives are not comparable"
    data_settings = ("corpus", "valid", "documents", "column", "valid_fraction", "split_seed", "deduplicate")
    if section == "data" or name in data_settings:
        has_fixed_valid = plan.sweep.valid and name != "valid"
        return None if has_fixed_valid else "points would be evaluated on different text; give a file with --valid"
    return None


def configure_all(plan: SweepPlan, kind: SweepKind, points: Sequence[Point]) -> list[RunConfig]:
    """The settings of every point; all problems of all points are reported together."""
    seed, tree = plan.sweep.seed, {}
    for point in ({}, points[0]):
        try:
            tree = kind.configure(point, seed).plain()
            break
        except UserError:
            continue  # reported for every point below
    full_names = {key: full_name for key in plan.grid if (full_name := full_setting_name(key, tree))}
    if repeated := sorted(key for key, name in full_names.items() if list(full_names.values()).count(name) > 1):
        raise UserError(f"--grid {', '.join(repeated)}: are two names of one setting")
    configs = build_all(points, lambda point: kind.configure(point, seed))
    if len({config.objective for config in configs}) > 1:
        raise UserError("grid.preset: these presets have different objectives, whose losses are not comparable")
    return configs


def full_setting_name(key: str, tree: dict[str, Any]) -> str | None:
    """`lr` -> `train.lr`; None if there is no such setting."""
    if not tree:
        return None
    try:
        ((section, values),) = assign_sections({key: None}, tree).items()
    except ConfigError:
        return None
    return f"{section}.{next(iter(values))}"


def build_all(points: Sequence[Point], build: Callable[[Point], RunConfig]) -> list[RunConfig]:
    """`build` of every point, or one error that lists each problem once with the settings that cause it."""
    configs: list[RunConfig] = []
    points_by_problem: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        remaining, before = dict(point), None
        while remaining != before:  # without unknown settings, the others can be checked too
            before = dict(remaining)
            try:
                configs.append(build(remaining))
            except ConfigError as error:
                problems = error.problems
            except UserError as error:
                problems = [("", str(error))]
            else:
                break
            for location, message in problems:
                points_by_problem.setdefault((location, message), []).append(point)
                if "unknown setting" in message:
                    remaining.pop(location, None)
    if points_by_problem:
        raise ConfigError([(cause(*problem, affected), problem[1]) for problem, affected in points_by_problem.items()])
    return configs


def cause(location: str, message: str, points: Sequence[Point]) -> str:
    """`width=30 heads=4: model.width`: the settings in the message that all affected points share, and where."""
    common = {
        key: value
        for key, value in points[0].items()
        if all(canonical(point[key]) == canonical(value) for point in points)
    }
    words = set(re.findall(r"\w+", f"{location} {message}"))
    named = {key: value for key, value in common.items() if key.rpartition(".")[2] in words}
    return ": ".join(part for part in (point_label(named), location) if part)


# Trials


def trials_of(plan: SweepPlan, point: Point) -> list[SweepTrial]:
    """One per seed, or one per repeat and fold."""
    sweep = plan.sweep
    if sweep.folds is None:
        return [SweepTrial(point, seed) for seed in range(sweep.seed, sweep.seed + sweep.seeds)]
    repeats = range(sweep.seed, sweep.seed + sweep.repeats)
    return [SweepTrial(point, seed, fold) for seed in repeats for fold in range(sweep.folds)]


def describe_trials(plan: SweepPlan) -> str:
    """`3 seeds`, or `5 folds` with how often they are repeated."""
    sweep = plan.sweep
    repeats = f" x {sweep.repeats} repeats" if sweep.repeats > 1 else ""
    return pluralize(sweep.seeds, "seed") if sweep.folds is None else f"{sweep.folds} folds{repeats}"


def run_sweep_grid(
    plan: SweepPlan, kind: SweepKind, points: list[Point], placement: Placement, callbacks: Sequence[Callback]
) -> list[list[TrialResult]]:
    """The results of each point, one per seed or fold."""
    trials, count = [trial for point in points for trial in trials_of(plan, point)], plan.sweep.trials_per_point
    total = pluralize(len(trials), "trial")
    logger.info(f"{pluralize(len(points), 'point')} x {describe_trials(plan)}: {total}")

    def after_trial(index: int, results: dict[int, TrialResult], is_new: bool) -> None:
        if is_new and len(results) == 1 and not placement.is_remote:
            announce_duration(results[index]["seconds"], others=len(trials) - 1)
        remove_worse_runs(index, results)

    def remove_worse_runs(index: int, results: dict[int, TrialResult]) -> None:
        finished = {
            number: [results[first + repetition] for repetition in range(count)]
            for number, first in enumerate(range(0, len(trials), count))
            if all(first + repetition in results for repetition in range(count))
        }
        if index // count in finished:
            remove_runs(plan, kind, [points[number] for number in finished], list(finished.values()))

    results = run_grid(
        SweepTrainable(kind, plan.sweep.keep, callbacks=callbacks),
        trials,
        execute=placement.execute,
        format_score=lambda result: f"{kind.metric} {format_trial(kind.metric, result)}",
        on_result=after_trial,
    )
    return [results[first : first + count] for first in range(0, len(results), count)]


def announce_duration(seconds: float, *, others: int) -> None:
    """Log how long the other trials may take, from the seconds of the first."""
    if others * seconds > LONG_SWEEP:
        duration = format_duration_range(others * seconds)
        logger.info(f"{duration} for the other {pluralize(others, 'trial')}, if they take as long")


def run_tpe(
    plan: SweepPlan, kind: SweepKind, placement: Placement, callbacks: Sequence[Callback]
) -> tuple[list[Point], list[list[TrialResult]]]:
    """The points that TPE proposes, and the results of each, one per seed."""
    sweep = plan.sweep
    assert sweep.sample is not None
    run = TrialRunner(plan, kind, placement, callbacks)

    def evaluate(points: list[Point]) -> list[float | None]:
        results = run([trial for point in points for trial in trials_of(plan, point)])
        count = sweep.trials_per_point
        by_point = [results[first : first + count] for first in range(0, len(results), count)]
        run.add(points, by_point)
        scores = [scores_of(results) for results in by_point]
        return [None if score is None else (1 if kind.lower else -1) * float(np.mean(score)) for score in scores]

    def is_valid(point: Point) -> bool:
        try:
            kind.complete(kind.configure(point, sweep.seed))
        except UserError as error:
            logger.info("%s: passed over: %s", point_label(point), error)
            return False
        return True

    logger.info("%d points proposed by TPE x %s", sweep.sample, describe_trials(plan))
    with run.explain_interruption():
        tpe_search(plan.grid, sample=sweep.sample, seed=sweep.seed, evaluate=evaluate, is_valid=is_valid)
    if not run.points:
        raise UserError("--method tpe: no valid point was proposed; narrow the ranges of the grid")
    if len(run.points) < sweep.sample:
        logger.info("the search proposed nothing new after %d points", len(run.points))
    return run.points, run.results_by_point


def run_asha(
    plan: SweepPlan, kind: SweepKind, points: list[Point], placement: Placement, callbacks: Sequence[Callback]
) -> list[list[TrialResult]]:
    """The results of each point, one per seed; a point that is pruned, or fails, has that of the first seed alone."""
    run = TrialRunner(plan, kind, placement, callbacks)
    trials = [trials_of(plan, point) for point in points]
    results: dict[int, list[TrialResult]] = {}

    def evaluate(numbers: list[int], validations: int) -> list[float | None]:
        logger.info("%d points up to validation %d", len(numbers), validations)
        firsts = run([trials[number][0] for number in numbers], stop_after=validations)
        results.update({number: [first] for number, first in zip(numbers, firsts, strict=True)})
        return [None if first["failed"] else first["curve"][:validations][-1][1] for first in firsts]

    logger.info("%d points, the better ones to the end with %s", len(points), describe_trials(plan))
    with run.explain_interruption():
        survivors = successive_halving(len(points), reduction=plan.sweep.reduction, evaluate=evaluate)
        complete = run([trial for number in survivors for trial in trials[number]])
        count = plan.sweep.trials_per_point
        results |= {number: complete[i * count : (i + 1) * count] for i, number in enumerate(survivors)}
        run.add([points[number] for number in survivors], [results[number] for number in survivors])
    return [results[number] for number in range(len(points))]


class TrialRunner:
    """Runs trials as a search asks for them, logs them, and removes the runs of points that are not the best."""

    def __init__(self, plan: SweepPlan, kind: SweepKind, placement: Placement, callbacks: Sequence[Callback]):
        self.plan, self.kind, self.execute, self.callbacks = plan, kind, placement.execute, callbacks
        self.points, self.results_by_point, self.trials = list[Point](), list[list[TrialResult]](), 0
        remove_stale(kind.folder / "cells")

    def __call__(self, trials: Sequence[SweepTrial], *, stop_after: int | None = None) -> list[TrialResult]:
        kind, results = self.kind, dict[int, TrialResult]()
        trainable = SweepTrainable(kind, self.plan.sweep.keep, stop_after=stop_after, callbacks=self.callbacks)
        for index, outcome in self.execute(trainable, trials):
            results[index] = outcome.result
            self.trials += 1
            score = f"{kind.metric} {format_trial(kind.metric, outcome.result)}"
            log_outcome(f"{self.trials:3d}  {trials[index].label}", score, outcome)
        return [results[index] for index in range(len(trials))]

    def add(self, points: Sequence[Point], results_by_point: Sequence[list[TrialResult]]) -> None:
        """Add points whose trials are complete."""
        self.points += points
        self.results_by_point += results_by_point
        remove_runs(self.plan, self.kind, self.points, self.results_by_point)

    def explain_interruption(self) -> AbstractContextManager[None]:
        return explain_interruption(lambda: f"{self.trials} trials are saved in {self.kind.folder}")


def format_trial(metric: str, result: TrialResult) -> str:
    if pruned := result.get("pruned"):
        return f"{pruned['loss']:.4f} at step {pruned['step']:,}"
    return "failed" if result["failed"] else format_metric(metric, result["score"])


def remove_runs(
    plan: SweepPlan,
    kind: SweepKind,
    points: Sequence[Point],
    results_by_point: Sequence[list[TrialResult]],
    best_seed: int | None = None,
) -> None:
    """Remove all runs except those of the best point (only its `best_seed`, if given) and those marked as kept."""
    best = ranking(results_by_point, lower=kind.lower)[0]
    for number, (point, results) in enumerate(zip(points, results_by_point, strict=True)):
        for result in results:
            trial = SweepTrial(point, result["seed"], result.get("fold"))
            is_best = number == best and best_seed in (None, trial.seed)
            if not is_best and not result["kept"]:
                kind.run_folder(trial).remove()


def keep_best(
    plan: SweepPlan,
    kind: SweepKind,
    points: list[Point],
    results_by_point: list[list[TrialResult]],
    placement: Placement,
    callbacks: Sequence[Callback],
) -> SweepTrial | None:
    """The best trial of the best point. Its run is kept; it is trained again if its weights were removed earlier.

    After a cross-validation, the best point is trained once more, on the rows of all folds.
    """
    best = ranking(results_by_point, lower=kind.lower)[0]
    sign = 1 if kind.lower else -1
    scores = {
        result["seed"]: sign * result["score"]
        for result in results_by_point[best]
        if not result["failed"] and not result.get("pruned")
    }
    if not scores:
        return None
    if plan.sweep.folds is not None:
        trial = SweepTrial(points[best], plan.sweep.seed)
        logger.info("training the best point on all rows (%s)", point_label(points[best]))
        train_again(plan, kind, trial, placement, callbacks)
        for point in points if not plan.sweep.keep else ():
            if point is not points[best]:  # which may have been the best one of an earlier call
                kind.run_folder(SweepTrial(point, plan.sweep.seed)).remove()
        return trial
    with_run = [seed for seed in scores if kind.run_folder(SweepTrial(points[best], seed)).is_finished()]
    trial = SweepTrial(points[best], min(with_run or scores, key=scores.__getitem__))
    if not with_run:
        logger.info("training the best trial again (%s): its weights were not kept", trial.label)
        train_again(plan, kind, trial, placement, callbacks)
    remove_runs(plan, kind, points, results_by_point, best_seed=trial.seed)
    return trial


def train_again(
    plan: SweepPlan, kind: SweepKind, trial: SweepTrial, placement: Placement, callbacks: Sequence[Callback]
) -> None:
    """Train a trial whose run is needed, unless it is there."""
    with explain_interruption(lambda: f"all trials are saved in {kind.folder}"):
        trainable = SweepTrainable(kind, plan.sweep.keep, needs_run=True, callbacks=callbacks)
        list(placement.execute(trainable, [trial]))
