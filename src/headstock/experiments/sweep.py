"""Which settings are best? A grid of them, or a random sample of it, with several seeds each, and a ranked answer."""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstock import io as files
from headstock.data.corpus import read_corpus
from headstock.errors import ConfigError, UserError
from headstock.experiments.claims import alone, share
from headstock.experiments.grid import Point, SweepPlan, canonical, draw_points, label, make_plan
from headstock.experiments.sweep_summary import best_first, format_score, summarize_sweep
from headstock.experiments.sweep_trials import DECIDED, Field, Finetuning, Made, Pretraining, Trial, make_trial, run_of
from headstock.io import rank_and_size
from headstock.train.callbacks import Callback
from headstock.train.settings import RunConfig, assign_sections
from headstock.train.signals import Interrupted

Say = Callable[[str], None]


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
    seeds: int | None = None,
    seed: int | None = None,
    by: str | None = None,
    keep: bool | None = None,
    config_file: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Try every point of a grid such as `{"depth": [2, 4], "lr": [1e-3, 3e-3]}`; returns what results.json holds.

    With text it pretrains and ranks by validation loss; with `run` and `train` it fine-tunes and ranks by the task's
    metric on the validation rows. `sample` draws so many points; then `{"lr": "1e-4..1e-2"}` is a range to draw from.
    Every trial (a point, a seed) is kept in the folder `out`: the same call goes on where it was stopped.
    """
    began = time.monotonic()
    many = {"corpus": corpus, "valid": valid}
    given: dict[str, Any] = {
        name: [str(value)] if isinstance(value, str | Path) else [str(path) for path in value]
        for name, value in many.items()
        if value
    }
    options = {"run": run, "train": train, "tokenizer": tokenizer}
    given |= {name: str(value) for name, value in options.items() if value is not None}
    given |= {"columns": [f"{ours}={theirs}" for ours, theirs in columns.items()]} if columns else {}
    plain = {"task": task, "preset": preset, "objective": objective, "sample": sample, "seeds": seeds, "seed": seed}
    given |= {name: value for name, value in (plain | {"by": by, "keep": keep}).items() if value is not None}
    if "-" in given.get("corpus", ()):  # kept in a file from now on, so that it can be read for every trial
        given["corpus"] = list(read_corpus(given["corpus"]).paths)
    plan = make_plan(config_file, given, grid or {}, settings or {})
    check_plan(plan)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; a sweep is kept in a folder")
    points = draw_points(plan.grid, sample=plan.sweep.sample, seed=plan.sweep.seed)
    field: Field = Finetuning(plan, folder, device) if plan.kind == "finetune" else Pretraining(plan, folder, device)
    configs = configure_all(plan, field, points)
    field.read(configs, say)
    checked(points, lambda point: field.settle(field.configure(point, plan.sweep.seed)))
    if plan.sweep.seeds < 2:
        say("one seed tells nothing of the next: intervals are left out; ask for two or more with --seeds")
    made = make_all(plan, field, points, callbacks, say)
    with alone(folder, "best"):
        best = keep_best(plan, field, points, made, callbacks, say)
    results = summarize_sweep(plan, field, points, made, best, seconds=time.monotonic() - began)
    files.write_json(folder / "results.json", results)
    return results


# What is wrong is found before anything is trained


def check_plan(plan: SweepPlan) -> None:
    """Refuse options of the other kind of sweep, and settings that no point of a grid can have for itself."""
    asked = plan.sweep
    if rank_and_size()[1] > 1:
        raise UserError("a sweep runs in one process; start it without torchrun")
    if plan.kind == "finetune":
        wrong: dict[str, Any] = {
            "preset": plan.preset,
            "objective": plan.objective,
            "tokenizer": asked.tokenizer,
            "by": asked.by != "auto",
        }
        said = f"goes with pretraining, not with --run {asked.run}"
        if len(asked.valid) > 1:
            raise UserError("--valid: fine-tuning has one file of validation rows; name it once")
    else:
        wrong = {"train": asked.train, "columns": asked.columns}
        said = "goes with fine-tuning: name the run with --run"
    problems = [(f"--{name}", said) for name, value in wrong.items() if value]
    problems += [(f"grid.{key}", f"cannot vary: {why}") for key in plan.grid if (why := fixed(plan, key))]
    if plan.kind == "finetune":
        named = ((key, DECIDED.get(key.rpartition(".")[2])) for key in plan.settings)
        problems += [(key, f"cannot be set: {why}") for key, why in named if why]
    if problems:
        raise ConfigError(problems)


def fixed(plan: SweepPlan, key: str) -> str | None:
    """Why a setting must be the same for all points, if it must."""
    section, _, name = key.rpartition(".")
    if name == "seed":
        return DECIDED["seed"]
    if plan.kind == "finetune":
        if section == "data" or name in ("train", "valid", "columns", "valid_fraction", "separator"):
            return "all points learn from the same rows and are ranked by the same rows"
        return DECIDED.get(name) if name != "preset" else "a run to fine-tune brings its own model"
    if key in ("objective", "task.name"):
        return "losses of different objectives cannot be compared"
    if section == "data" or name in (
        "corpus",
        "valid",
        "documents",
        "column",
        "valid_fraction",
        "split_seed",
        "deduplicate",
    ):
        return (
            None if plan.sweep.valid and name != "valid" else "points would be measured on different text; name --valid"
        )
    return None


def configure_all(plan: SweepPlan, field: Field, points: Sequence[Point]) -> list[RunConfig]:
    """The settings of every point; every wrong key and value of all of them is named at once."""
    seed, tree = plan.sweep.seed, {}
    for point in ({}, points[0]):
        try:
            tree = field.configure(point, seed).plain()
            break
        except UserError:
            continue  # what is wrong is told below, of every point
    places = {key: place for key in plan.grid if (place := place_of(key, tree))}
    if again := sorted({key for key, place in places.items() if list(places.values()).count(place) > 1}):
        raise UserError(f"--grid {', '.join(again)}: are one setting by two names")
    field.overlap |= {key for key in plan.settings if place_of(key, tree) in places.values()}
    configs = checked(points, lambda point: field.configure(point, seed))
    if len({chosen.objective for chosen in configs}) > 1:
        raise UserError("grid.preset: these have different objectives, whose losses cannot be compared")
    return configs


def place_of(key: str, tree: dict[str, Any]) -> str | None:
    """`lr` -> `train.lr`; None where there is no such setting."""
    if not tree:
        return None
    try:
        ((section, values),) = assign_sections({key: None}, tree).items()
    except ConfigError:
        return None
    return f"{section}.{next(iter(values))}"


def checked(points: Sequence[Point], build: Callable[[Point], RunConfig]) -> list[RunConfig]:
    """What `build` makes of every point, or one error that names each problem once, with the settings that cause it."""
    made: list[RunConfig] = []
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        left, before = dict(point), None
        while left != before:  # without settings that do not exist, the others can be judged too
            before = dict(left)
            try:
                made.append(build(left))
            except ConfigError as wrong:
                problems = wrong.problems
            except UserError as wrong:
                problems = [("", str(wrong))]
            else:
                break
            for where, what in problems:
                found.setdefault((where, what), []).append(point)
                if "unknown setting" in what:
                    left.pop(where, None)
    if found:
        raise ConfigError([(caused_by(where, what, those), what) for (where, what), those in found.items()])
    return made


def caused_by(where: str, what: str, points: Sequence[Point]) -> str:
    """`width=30 heads=4: model.width`: what all points with a problem have in common, as far as it is named in it."""
    common = {
        key: value
        for key, value in points[0].items()
        if all(canonical(point[key]) == canonical(value) for point in points)
    }
    words = set(re.findall(r"\w+", f"{where} {what}"))
    named = {key: value for key, value in common.items() if key.rpartition(".")[2] in words}
    return ": ".join(part for part in (label(named), where) if part)


# The trials


def trials_of(plan: SweepPlan, point: Point) -> list[Trial]:
    return [Trial(point, seed) for seed in range(plan.sweep.seed, plan.sweep.seed + plan.sweep.seeds)]


def make_all(
    plan: SweepPlan, field: Field, points: list[Point], callbacks: Sequence[Callback], say: Say
) -> list[list[Made]]:
    """The trials of each point, its seeds together; those whose file is there are not made again.

    Nor are those that another process is at work on.
    """
    files.remove_stale(field.folder / "cells")
    trials = [trial for point in points for trial in trials_of(plan, point)]
    total, seeds, known = len(trials), plan.sweep.seeds, dict[int, Made]()
    width = min(40, max(len(label(point)) for point in points))
    say(f"points: {len(points)}, seeds of each: {seeds}, trainings: {total}")

    def make(trial: Trial) -> tuple[Made, bool]:
        with told_if_stopped(f"{len(known)} of {total} cells are kept in {field.folder}"):
            return make_trial(field, trial, keep=plan.sweep.keep, callbacks=callbacks)

    for place, (cell, new) in share(field.folder, trials, lambda trial: trial.name, make, say):
        known[place] = cell
        score = "failed" if cell["failed"] else format_score(field.metric, cell["score"])
        time_it_took = f"{cell['seconds']:6.1f} s" if new else "(kept)"
        what = f"{label(trials[place].point):{width}s}  seed {trials[place].seed}"
        say(f"{len(known):3d}/{total}  {what}  {field.metric} {score}  {time_it_took}")
        whole = [at for at in range(len(points)) if all(at * seeds + seed in known for seed in range(seeds))]
        if place // seeds in whole:  # what is worse than another can go, whatever is yet to come
            tidy(plan, field, [points[at] for at in whole], [cells_of(known, at, seeds) for at in whole])
    return [cells_of(known, at, seeds) for at in range(len(points))]


def cells_of(known: Mapping[int, Made], point: int, seeds: int) -> list[Made]:
    return [known[point * seeds + seed] for seed in range(seeds)]


@contextmanager
def told_if_stopped(kept: str) -> Iterator[None]:
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        received = stop.exit_code - 128 if isinstance(stop, Interrupted) else signal.SIGINT
        raise Interrupted(f"stopped; {kept}, the same command goes on", received) from None


def tidy(
    plan: SweepPlan, field: Field, points: Sequence[Point], made: Sequence[list[Made]], only: int | None = None
) -> None:
    """Remove the runs of all points but the best so far, and of its other seeds where `only` one of them is wanted."""
    best = best_first(made, lower=field.lower)[0]
    for place, (point, cells) in enumerate(zip(points, made, strict=True)):
        for trial, cell in zip(trials_of(plan, point), cells, strict=True):
            wanted = place == best and only in (None, trial.seed)
            if not wanted and not cell["kept"]:
                run_of(field.folder, trial).remove()


def keep_best(
    plan: SweepPlan, field: Field, points: list[Point], made: list[list[Made]], callbacks: Sequence[Callback], say: Say
) -> Trial | None:
    """The best trial of the best point, whose run stays; trained again if it was not kept when another was best."""
    place = best_first(made, lower=field.lower)[0]
    whole = [cell for cell in made[place] if not cell["failed"]]
    if not whole:
        return None
    sign = 1 if field.lower else -1
    there = [cell for cell in whole if run_of(field.folder, Trial(points[place], cell["seed"])).is_finished()]
    best = Trial(points[place], min(there or whole, key=lambda cell: sign * cell["score"])["seed"])
    if not there:
        say(f"training {label(best.point)}, seed {best.seed}, again: it is the best now, but its weights were not kept")
        with told_if_stopped(f"all cells are kept in {field.folder}"):
            make_trial(field, best, keep=plan.sweep.keep, with_run=True, callbacks=callbacks)
    tidy(plan, field, points, made, only=best.seed)
    return best
