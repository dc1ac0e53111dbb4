"""Settings of a sweep: a recipe file and options merged and checked, and the grid points they describe."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headstock import config
from headstock.errors import ConfigError, UserError
from headstock.experiments.recipe import section_problems
from headstock.report.sweep_points import Point, canonical, format_value
from headstock.rng import generator
from headstock.train.settings import override_flat

SECTIONS = ("sweep", "grid", "pretrain", "finetune")
DIGITS = 3  # significant digits of numbers sampled from a range
MAX_DRAWS = 200  # per requested point; a small grid of integers yields duplicates


@dataclass(frozen=True)
class SweepSettings:
    corpus: tuple[str, ...] = ()  # text to pretrain on
    run: str | None = None  # run to fine-tune, instead of pretraining
    task: str = "classify"  # the labelled task of fine-tuning
    train: str | None = None  # labelled training rows
    valid: tuple[str, ...] = ()  # validation text, or one file of labelled validation rows
    columns: tuple[str, ...] = ()  # column names of the files, such as text=review
    tokenizer: str | None = None  # file of an existing tokenizer
    seeds: int = 3  # trials per point
    folds: int | None = config.added(None)  # of a cross-validation of fine-tuning, instead of seeds
    repeats: int = config.added(1)  # of the cross-validation, each with other folds
    out_of_fold: Literal["best", "all"] = config.added("best")  # points whose out-of-fold predictions are saved
    seed: int = 0  # the first seed; also seeds the random sample of points
    sample: int | None = None  # number of points to sample from the grid; default: all
    # how points are chosen: all of them, at random, by TPE, or at random with the worse ones stopped early (ASHA);
    # auto is random with `sample` and otherwise grid
    method: Literal["auto", "grid", "random", "tpe", "asha"] = "auto"
    reduction: int = 3  # asha: one in this many points goes on at each rung
    by: Literal["auto", "loss", "bits_per_byte"] = "auto"  # ranking of pretraining; auto is loss where comparable
    keep: bool = False  # keep all runs instead of only the best

    def __post_init__(self) -> None:
        problems = [
            (name, f"must be 1 or more, not {value}")
            for name, value in (("seeds", self.seeds), ("sample", self.sample), ("repeats", self.repeats))
            if value is not None and value < 1
        ]
        if self.folds is not None and self.folds < 2:
            problems.append(("folds", f"must be 2 or more, not {self.folds}"))
        for name, is_set in (("repeats", self.repeats > 1), ("out_of_fold", self.out_of_fold != "best")):
            if is_set and self.folds is None:
                problems.append((name, "applies to cross-validation, which needs --folds"))
        if self.reduction < 2:
            problems.append(("reduction", f"must be 2 or more, not {self.reduction}"))
        if self.method in ("random", "tpe", "asha") and self.sample is None:
            problems.append(("method", f"{self.method} needs --sample N, the number of points to try"))
        if self.method == "grid" and self.sample is not None:
            problems.append(("method", f"grid trains all points, so it conflicts with --sample {self.sample}"))
        if problems:
            raise ConfigError(problems)

    @property
    def trials_per_point(self) -> int:
        """The number of seeds, or of folds in all repeats."""
        return self.seeds if self.folds is None else self.folds * self.repeats

    @property
    def search_method(self) -> str:
        """`method` with `auto` resolved."""
        return self.method if self.method != "auto" else "grid" if self.sample is None else "random"


@dataclass(frozen=True)
class Range:
    """An interval to sample from, on a log scale if both ends are positive. Integer ends give integers."""

    low: float
    high: float

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        return self.high - self.low + 1 if self.is_integer else math.inf

    def interpolate(self, fraction: float) -> float:
        """The value at a fraction from 0 to 1 of the interval."""
        if self.low <= 0:
            value = self.low + fraction * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** fraction
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        """The value as it is used: an integer within the ends, or a number of few digits."""
        return min(max(round(value), self.low), self.high) if self.is_integer else float(f"{value:.{DIGITS}g}")


Values = list[Any] | Range


@dataclass(frozen=True)
class SweepPlan:
    """The sections of a sweep recipe."""

    sweep: SweepSettings
    grid: dict[str, Values]
    settings: dict[str, Any]  # of every point
    preset: str | None = None
    objective: str | None = None
    file: Path | None = None  # a config file of a run, if the file is not a recipe

    @property
    def kind(self) -> str:
        return "finetune" if self.sweep.run else "pretrain"


def make_plan(
    file: str | Path | None,
    options: Mapping[str, Any],
    grid: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    preset: str | None = None,
    objective: str | None = None,
) -> SweepPlan:
    """Merge a file with options, which take precedence. The file is a recipe or the config of a run."""
    contents = config.read_settings(Path(file)) if file else {}
    is_recipe = any(name in contents for name in SECTIONS)
    recipe = contents if is_recipe else {}
    if problems := section_problems(recipe, SECTIONS):
        raise ConfigError(problems)
    merged = recipe.get("sweep", {}) | options
    if not isinstance(recipe_grid := merged.pop("grid", {}), dict):
        raise ConfigError([("sweep.grid", "must be a table")])
    for name in ("corpus", "valid"):
        if isinstance(merged.get(name), str):
            merged[name] = [merged[name]]
    if merged.get("folds") is not None and "seeds" in merged:
        raise UserError("--seeds: conflicts with --folds, which trains one model per fold; repeat it with --repeats")
    sweep = config.from_dict(SweepSettings, merged, prefix="sweep")
    if sweep.corpus and sweep.run:
        raise UserError(f"--run {sweep.run}: cannot be combined with text; a sweep either pretrains or fine-tunes")
    if not (sweep.corpus or sweep.run or file):
        raise UserError("nothing to train: give text to pretrain on, or a run to fine-tune with --run")
    base = config.flatten_tables(recipe.get("finetune" if sweep.run else "pretrain", {}))
    preset, objective = preset or base.pop("preset", None), objective or base.pop("objective", None)
    values = read_grid({**recipe_grid, **recipe.get("grid", {}), **grid}, sampled=sweep.sample is not None)
    config_file = Path(file) if file and not is_recipe else None
    return SweepPlan(sweep, values, override_flat(base, settings), preset, objective, config_file)


def parse_grid(text: str) -> tuple[str, str]:
    """`lr=1e-3,3e-3` -> ("lr", "1e-3,3e-3")."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise UserError(f"--grid {text}: expected key=value,value, for example --grid lr=1e-3,3e-3")
    return key.strip(), values.strip()


def read_grid(grid: Mapping[str, Any], *, sampled: bool) -> dict[str, Values]:
    """The values of each setting, given as text like `--grid` or as lists; all problems are reported together."""
    if not grid:
        raise UserError("nothing to vary: give a setting and its values, for example --grid lr=1e-3,3e-3")
    values_by_key: dict[str, Values] = {}
    problems: config.Problems = []
    for key, raw in grid.items():
        values = read_values(key, raw)
        if isinstance(values, Range):
            if not sampled:
                problems.append((f"grid.{key}", f"{raw} is a range, which needs --sample N; otherwise list values"))
            elif not values.low < values.high:
                problems.append((f"grid.{key}", f"{raw} must go from a smaller to a larger number"))
        elif not values:
            problems.append((f"grid.{key}", "has no values"))
        elif len({canonical(value) for value in values}) < len(values):
            problems.append((f"grid.{key}", f"contains a value twice: {', '.join(map(format_value, values))}"))
        values_by_key[key] = values
    if problems:
        raise ConfigError(problems)
    return values_by_key


def read_values(key: str, raw: Any) -> Values:
    if not isinstance(raw, str):
        return list(raw) if isinstance(raw, list | tuple) else [raw]
    if bounds := re.fullmatch(r"\s*(\S+?)\s*\.\.\s*(\S+)\s*", raw):
        low, high = (config.parse_setting(f"{key}={bound}")[1] for bound in bounds.groups())
        if all(type(bound) in (int, float) for bound in (low, high)):
            return Range(low, high)
    try:
        return list(tomllib.loads(f"values = [{raw}]")["values"])
    except tomllib.TOMLDecodeError:  # unquoted words, such as pre,post
        return [config.parse_setting(f"{key}={part}")[1] for part in raw.split(",")]


def draw_points(grid: Mapping[str, Values], *, sample: int | None, seed: int) -> list[Point]:
    """All points of the grid, or `sample` distinct ones; a larger sample starts with the smaller ones."""
    if sample is None:
        lists = [values for values in grid.values() if not isinstance(values, Range)]
        return [dict(zip(grid, combination, strict=True)) for combination in product(*lists)]
    check_sample(grid, sample)
    points: dict[str, Point] = {}
    for draw in range(MAX_DRAWS * sample * len(grid)):
        fractions = generator(seed, "sweep", draw).random(len(grid))
        point = {key: pick_value(grid[key], fraction) for key, fraction in zip(grid, fractions, strict=True)}
        points.setdefault(canonical(point), point)
        if len(points) == sample:
            return list(points.values())
    raise UserError(f"--sample {sample}: could not draw that many distinct points from this grid; use fewer")


def corner_points(grid: Mapping[str, Values]) -> list[Point]:
    """Points that together have every listed value and both ends of every range, to check settings beforehand."""
    lists = {key: [values.low, values.high] if isinstance(values, Range) else values for key, values in grid.items()}
    count = max(map(len, lists.values()))
    return [{key: values[number % len(values)] for key, values in lists.items()} for number in range(count)]


def check_sample(grid: Mapping[str, Values], sample: int) -> None:
    size = math.prod(values.size if isinstance(values, Range) else len(values) for values in grid.values())
    if sample > size:
        raise UserError(f"--sample {sample}: the grid has only {size:,} points; omit --sample to run them all")


def pick_value(values: Values, fraction: float) -> Any:
    return values.interpolate(fraction) if isinstance(values, Range) else values[int(fraction * len(values))]
